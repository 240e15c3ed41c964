"""The dashboard *Fleet*: is anything stalled, does everything answer, and which rails are the worst."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from railscope.agent.facts import catalogue
from railscope.dashboards import page, recorded, variables
from railscope.dashboards.page import Section
from railscope.dashboards.panels import (
    BAD,
    BETTER_NONE,
    FULLNESS,
    GOOD,
    NEVER_FINE,
    WATCH,
    AnyPanel,
    query,
    stat,
    table,
    timeseries,
)
from railscope.dashboards.variables import CLUSTER, COMM, HOST, JOB, ranks_of_job

_RAIL = "{{instance}} {{device}} {{netns}}"


def dashboard() -> Dashboard:
    """The dashboard of all hosts: stalls, jobs, worst rails."""
    return page.page(
        page.FLEET,
        "All hosts: stalls, silent hosts, traffic of jobs, and the worst rails.",
        [variables.job(), variables.communicator_of_job(), variables.host()],
        [
            Section("Now", _now()),
            Section("Stalls", _stalls()),
            Section("Jobs", _jobs()),
            Section("Worst rails", _rails()),
        ],
    )


def _now() -> list[AnyPanel]:
    return [
        stat(
            "Stalled communicators",
            "Communicators with at least one stalled rank.",
            "short",
            f"count(count by (cluster, comm) ({catalogue.COMM_STALLED.where(HOST)} == 1)) or vector(0)",
            thresholds=NEVER_FINE,
        ),
        stat(
            "Rails down",
            "Rails without a link, on all hosts, including ports without a cable.",
            "short",
            f"count({catalogue.RAIL_UP.where(HOST)} == 0) or vector(0)",
            thresholds=BETTER_NONE,
        ),
        stat(
            "Silent hosts",
            "Hosts whose agent was scraped within the last hour and does not answer now.",
            "short",
            f"count(up{{{HOST}}} == 0 and on (cluster, job, instance) "
            f"last_over_time({catalogue.BUILD_INFO.where(CLUSTER)}[1h])) or vector(0)",
            thresholds=NEVER_FINE,
        ),
        stat("Hosts", "Hosts whose agent answers.", "short", f"count({catalogue.BUILD_INFO.where(HOST)})"),
        stat(
            "Communicators",
            "Communicators of the chosen jobs, each counted once however many ranks it has.",
            "short",
            f'count(count by (cluster, comm) ({recorded.RANKS_OF_JOB}{{{JOB},comm=~"$comm"}}))',
        ),
        stat(
            "Processes",
            "Processes with NCCL that are observed.",
            "short",
            f"sum({catalogue.PROCESSES_OBSERVED.where(HOST)})",
        ),
    ]


def _stalls() -> list[AnyPanel]:
    return [
        table(
            "Stalled now",
            "Each stalled rank with the cause that its host gives.  Ranks that only wait report rank_behind.  "
            "strength weak: the stall is inferred, no probe saw the operation itself.  A click on a communicator "
            "opens its Stall dashboard.",
            "comm rank cause strength blamed_rank rail device netns instance",
            f"topk(500, {ranks_of_job(catalogue.COMM_STALL_INFO.where(HOST))})",
            links={"comm": page.TO_COMMUNICATOR, "instance": page.TO_HOST},
            width=24,
        ),
        timeseries(
            "Stalls begun",
            "Stalls that began, by cause; each host counts its own.",
            "short",
            query(f"sum by (cause) (increase({catalogue.STALLS.where(HOST)}[$__rate_interval]))", "{{cause}}"),
            stacked=True,
        ),
        timeseries(
            "Ranks stalled",
            "Mean number of stalled ranks, by the cause that their host gave.",
            "short",
            query(
                f"sum by (cause) (rate({catalogue.COMM_STALL_SECONDS.where(HOST)}[$__rate_interval]))",
                "{{cause}}",
            ),
            stacked=True,
        ),
        table(
            "Causes with the strongest evidence",
            "Causes of each communicator's stall as given by any host. A larger number means stronger evidence.",
            "comm cause",
            recorded.STALL_EVIDENCE.where(COMM),
            value="evidence",
            links={"comm": page.TO_COMMUNICATOR},
        ),
        timeseries(
            "Errors from NCCL",
            "Errors that NCCL reported for communicators, each counted once, by ncclResult_t name.",
            "short",
            query(f"sum by (error) (increase({catalogue.COMM_ERRORS.where(HOST)}[$__rate_interval]))", "{{error}}"),
            thresholds=NEVER_FINE,
        ),
        timeseries(
            "Connections that NCCL moved off a port",
            "NCCL's own failover, by the status of the completion that told it. The job goes on with less bandwidth.",
            "short",
            query(
                f"sum by (status) (increase({catalogue.COMM_FAILED_OVER.where(HOST)}[$__rate_interval]))", "{{status}}"
            ),
            thresholds=NEVER_FINE,
        ),
        table(
            "Ports that NCCL keeps off",
            "Connections that NCCL moved off a port which failed, and the device that carries its share.",
            "instance rail device port carried_by",
            catalogue.COMM_DEGRADED.where(HOST),
            aggregate="sum",
            value="connections",
        ),
    ]


def _jobs() -> list[AnyPanel]:
    return [
        table(
            "Jobs",
            "Running jobs and their number of communicator instances (ranks, summed over communicators).",
            "exported_job",
            f'{catalogue.COMM_INFO}{{exported_job=~"$job",{HOST}}}',
            aggregate="count",
            value="communicator ranks",
            links={"job": page.TO_JOB},
        ),
        timeseries(
            "Payload by operation",
            "Payload (count x dtype size) that all processes passed to NCCL. Bytes on the network differ.",
            "Bps",
            query(f"sum by (op) (rate({catalogue.COLLECTIVE_PAYLOAD_BYTES.where(HOST)}[$__rate_interval]))", "{{op}}"),
            stacked=True,
        ),
        timeseries(
            "Bytes on the rails",
            "Port bytes of all rails, as counted by the devices.",
            "Bps",
            query(f"sum({recorded.TRANSMIT_RATE.where(HOST)})", "transmit"),
            query(f"sum({recorded.RECEIVE_RATE.where(HOST)})", "receive"),
        ),
        timeseries(
            "Communicators made and ended",
            "Communicator events: created, destroyed, aborted, revoked and others; and communicators that gave a name "
            "which another process had first.",
            "short",
            query(f"sum by (event) (increase({catalogue.COMM_EVENTS.where(HOST)}[$__rate_interval]))", "{{event}}"),
            query(
                f"sum(increase({catalogue.COMM_IDENTITY_CONFLICTS.where(HOST)}[$__rate_interval])) > 0",
                "name of another process",
            ),
        ),
    ]


def _rails() -> list[AnyPanel]:
    return [
        table(
            "Rails that are down",
            "Rails without a link now, by host.",
            "instance rail device netns",
            f"{catalogue.RAIL_UP.where(HOST)} == 0",
            links={"instance": page.TO_HOST},
        ),
        timeseries(
            "Fullest rails",
            "Port bytes sent / line rate: the ten rails with the highest utilization.",
            "percentunit",
            query(f"topk(10, {recorded.TRANSMIT_UTILIZATION.where(HOST)})", _RAIL),
            thresholds=FULLNESS,
            largest=1,
        ),
        timeseries(
            "Slowest against their siblings",
            "Mean TCP round-trip time / that of the fastest rail of the same host. The fastest rail reads 1.",
            "short",
            query(f"topk(10, {recorded.ROUND_TRIP_TO_SIBLINGS.where(HOST)})", _RAIL),
            thresholds=((None, GOOD), (2.0, WATCH), (5.0, BAD)),
        ),
        timeseries(
            "Least against their siblings",
            "Bytes sent / bytes of the busiest rail of the same host: the ten rails with the smallest share.",
            "percentunit",
            query(f"bottomk(10, {recorded.TRANSMIT_TO_SIBLINGS.where(HOST)})", _RAIL),
            largest=1,
        ),
        timeseries(
            "Most sent again",
            "Share of TCP payload that observed connections retransmitted: the ten worst rails.",
            "percentunit",
            query(f"topk(10, {recorded.RETRANSMITTED.where(HOST)})", _RAIL),
            thresholds=((None, GOOD), (0.001, WATCH), (0.01, BAD)),
        ),
        timeseries(
            "Errors with severity page",
            "Increase of counters with severity page (link downed, retries exceeded and others): the ten worst.",
            "short",
            query(
                f'topk(10, increase({catalogue.RAIL_COUNTER}{{severity="page",{HOST}}}[$__rate_interval]))',
                _RAIL + " {{counter}}",
            ),
            thresholds=NEVER_FINE,
        ),
        timeseries(
            "Least explained",
            "Expected wire bytes / port bytes, transmit. Low if other traffic uses the rail.",
            "percentunit",
            query(f"bottomk(10, {recorded.EXPLAINED.where(HOST)})", _RAIL + " {{direction}}"),
        ),
        timeseries(
            "Most foreign traffic",
            "Share of port bytes of processes that are not observed: the ten rails with the largest share.",
            "percentunit",
            query(f'topk(10, {recorded.BYTES_BY_ORIGIN}{{origin="foreign",{HOST}}})', _RAIL + " {{direction}}"),
            largest=1,
        ),
    ]
