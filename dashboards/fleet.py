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
from railscope.dashboards.variables import HOST, ranks_of_job

_RAIL = "{{instance}} {{device}} {{netns}}"


def dashboard() -> Dashboard:
    return page.page(
        page.FLEET,
        "All hosts at a glance: what is stalled, what is silent, what jobs send, and the worst rails.",
        [variables.job(), variables.communicator(of_job=True), variables.host()],
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
            "Communicators of which at least one rank says that an operation does not come to its end.",
            "short",
            f"count(count by (comm) ({catalogue.COMM_STALLED.where(HOST)} == 1)) or vector(0)",
            thresholds=NEVER_FINE,
        ),
        stat(
            "Rails down",
            "Rails without a link, on all hosts; ports that nobody cabled count too.",
            "short",
            f"count({catalogue.RAIL_UP.where(HOST)} == 0) or vector(0)",
            thresholds=BETTER_NONE,
        ),
        stat(
            "Silent hosts",
            "Hosts whose agent told of itself within the last hour and does not answer now.",
            "short",
            f"count(up{{{HOST}}} == 0 and on (job, instance) last_over_time({catalogue.BUILD_INFO}[1h])) or vector(0)",
            thresholds=NEVER_FINE,
        ),
        stat("Hosts", "Hosts whose agent answers.", "short", f"count({catalogue.BUILD_INFO.where(HOST)})"),
        stat(
            "Communicators",
            "Communicators of the chosen jobs, each counted once however many ranks it has.",
            "short",
            f'count(count by (comm) ({catalogue.COMM_INFO}{{exported_job=~"$job",comm=~"$comm"}}))',
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
            "Each rank that waits or keeps others waiting, and what its host puts that down to.  Ranks that only wait "
            "say rank_behind.  strength weak: nothing saw the operation itself.  A communicator opens its incident.",
            "comm rank cause strength blamed_rank rail device netns instance",
            f"{ranks_of_job(catalogue.COMM_STALL_INFO.where(HOST))}",
            links={"comm": page.TO_COMMUNICATOR, "instance": page.TO_HOST},
            width=24,
        ),
        timeseries(
            "Stalls begun",
            "Stalls that began, as often as each host saw one, by cause.",
            "short",
            query(f"sum by (cause) (increase({catalogue.STALLS.where(HOST)}[$__rate_interval]))", "{{cause}}"),
            stacked=True,
        ),
        timeseries(
            "Ranks stalled",
            "How many ranks were stalled at a time, by the cause that their host gave.",
            "short",
            query(
                f"sum by (cause) (rate({catalogue.COMM_STALL_SECONDS.where(HOST)}[$__rate_interval]))",
                "{{cause}}",
            ),
            stacked=True,
        ),
        table(
            "Best founded causes",
            "For each communicator the causes that any host gives; the greater the number, the less the evidence "
            "leaves open.",
            "comm cause",
            f'{recorded.STALL_EVIDENCE}{{comm=~"$comm"}}',
            value="evidence",
            links={"comm": page.TO_COMMUNICATOR},
        ),
        timeseries(
            "Errors from NCCL",
            "Errors that NCCL reported for communicators, each once, by name.",
            "short",
            query(f"sum by (error) (increase({catalogue.COMM_ERRORS.where(HOST)}[$__rate_interval]))", "{{error}}"),
            thresholds=NEVER_FINE,
        ),
    ]


def _jobs() -> list[AnyPanel]:
    return [
        table(
            "Jobs",
            "The jobs that run, and how many communicator ends (ranks of communicators) each has.",
            "exported_job",
            f'{catalogue.COMM_INFO}{{exported_job=~"$job",{HOST}}}',
            aggregate="count",
            value="communicator ranks",
            links={"job": page.TO_JOB},
        ),
        timeseries(
            "Payload by operation",
            "Payload (count x dtype size) that all processes gave to NCCL: not what crossed the network.",
            "Bps",
            query(f"sum by (op) (rate({catalogue.COLLECTIVE_PAYLOAD_BYTES.where(HOST)}[$__rate_interval]))", "{{op}}"),
            stacked=True,
        ),
        timeseries(
            "Bytes on the rails",
            "Port bytes of all rails, as the devices count them.",
            "Bps",
            query(f"sum({recorded.TRANSMIT_RATE.where(HOST)})", "transmit"),
            query(f"sum({recorded.RECEIVE_RATE.where(HOST)})", "receive"),
        ),
        timeseries(
            "Communicators made and ended",
            "Communicators that were made, ended, aborted, revoked and so on.",
            "short",
            query(f"sum by (event) (increase({catalogue.COMM_EVENTS.where(HOST)}[$__rate_interval]))", "{{event}}"),
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
            "Port bytes sent over the line rate: the ten fullest rails.",
            "percentunit",
            query(f"topk(10, {recorded.TRANSMIT_UTILIZATION.where(HOST)})", _RAIL),
            thresholds=FULLNESS,
            largest=1,
        ),
        timeseries(
            "Slowest against their siblings",
            "Mean TCP round trip over that of the best rail of the same host: 1 is the best itself.",
            "short",
            query(f"topk(10, {recorded.ROUND_TRIP_TO_SIBLINGS.where(HOST)})", _RAIL),
            thresholds=((None, GOOD), (2.0, WATCH), (5.0, BAD)),
        ),
        timeseries(
            "Least against their siblings",
            "Bytes sent over those of the busiest rail of the same host: the ten rails that carry the smallest share.",
            "percentunit",
            query(f"bottomk(10, {recorded.TRANSMIT_TO_SIBLINGS.where(HOST)})", _RAIL),
            largest=1,
        ),
        timeseries(
            "Most sent again",
            "Of the payload that observed TCP connections sent, what they sent again: the ten worst rails.",
            "percentunit",
            query(f"topk(10, {recorded.RETRANSMITTED.where(HOST)})", _RAIL),
            thresholds=((None, GOOD), (0.001, WATCH), (0.01, BAD)),
        ),
        timeseries(
            "Errors of which any matters",
            "Increase of the counters with severity page (link downs, retries exceeded and so on): the ten worst.",
            "short",
            query(
                f'topk(10, increase({catalogue.RAIL_COUNTER}{{severity="page",{HOST}}}[$__rate_interval]))',
                _RAIL + " {{counter}}",
            ),
            thresholds=NEVER_FINE,
        ),
        timeseries(
            "Least explained",
            "Wire bytes that collectives should have sent over port bytes: low where others use the rail as well.",
            "percentunit",
            query(f"bottomk(10, {recorded.EXPLAINED.where(HOST)})", _RAIL + " {{direction}}"),
        ),
        timeseries(
            "Most of others",
            "Share of the port bytes that is not of observed processes: the ten rails with the largest.",
            "percentunit",
            query(f'topk(10, {recorded.BYTES_BY_ORIGIN}{{origin="foreign",{HOST}}})', _RAIL + " {{direction}}"),
            largest=1,
        ),
    ]
