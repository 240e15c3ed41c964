"""The dashboard *Fleet*: is anything stalled, does everything answer, and which rails are the worst."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from railscope.agent.facts import catalogue
from railscope.dashboards import bandwidth, page, recorded, variables
from railscope.dashboards.page import Section
from railscope.dashboards.panels import (
    BAD,
    BETTER_NONE,
    FULLNESS,
    GOOD,
    NEVER_FINE,
    NONE_REPORTED,
    WATCH,
    AnyPanel,
    matrix,
    query,
    stat,
    table,
    timeseries,
)
from railscope.dashboards.variables import CLUSTER, COMM, HOST, JOB, or_none, or_zero, ranks_of_job

_RAIL = "{{instance}} rail {{rail}} {{device}} {{netns}}"
_COLUMNS_OF_RAIL = "instance rail device netns"
_STEP = "1m"
_SHOWN_HOSTS = 50
"""Of the heat map of rails, those with the fullest ones."""


def dashboard() -> Dashboard:
    """The dashboard of all hosts: stalls, jobs, worst rails."""
    return page.page(
        page.FLEET,
        "All hosts: alerts, stalls, silent hosts, bandwidth of jobs, and the worst rails.",
        [variables.namespace(), variables.job(), variables.communicator_of_job(), variables.host()],
        [
            Section("Now", _now()),
            Section("Jobs", _jobs()),
            Section("Worst rails", _rails()),
            Section("Stalls and errors", _stalls(), folded=True),
            Section("Traffic", [one.interval(_STEP) for one in _traffic()], folded=True),
            Section("Worst rails over time", _rails_over_time(), folded=True),
        ],
    )


def _now() -> list[AnyPanel]:
    return [
        stat(
            "Stalled communicators",
            "Communicators with at least one stalled rank.",
            "short",
            or_zero(f"count(count by (cluster, comm) ({catalogue.COMM_STALLED.where(HOST)} == 1))"),
            thresholds=NEVER_FINE,
            whole=True,
        ),
        stat(
            "Rails down",
            "Rails without a link, on all hosts, including ports without a cable.",
            "short",
            or_zero(f"count({catalogue.RAIL_UP.where(HOST)} == 0)"),
            thresholds=BETTER_NONE,
            whole=True,
        ),
        stat(
            "Silent hosts",
            "Hosts whose agent was scraped within the last hour and does not answer now.",
            "short",
            or_zero(
                f"count(up{{{HOST}}} == 0 and on (cluster, job, instance) "
                f"last_over_time({catalogue.BUILD_INFO.where(CLUSTER)}[1h]))"
            ),
            thresholds=NEVER_FINE,
            whole=True,
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
        table(
            "Alerts",
            "railscope's alerts that fire or are pending (their time has not passed yet), as Prometheus evaluates "
            "them. Grafana's page Alerting has those that Grafana evaluates itself.",
            "alertname alertstate severity instance comm rank rail device",
            f'topk(200, ALERTS{{alertname=~"Railscope.+",{CLUSTER}}})',
            links={"comm": page.TO_COMMUNICATOR, "instance": page.TO_HOST},
            empty="none fire",
            width=24,
        ),
        table(
            "Stalled now",
            "Each stalled rank with the cause that its host gives.  Ranks that only wait report rank_behind.  "
            "strength weak: the stall is inferred, no probe saw the operation itself, or the other end of the rail may "
            "be to blame.  A click on a communicator opens its Stall dashboard.",
            "comm rank cause strength blamed_rank rail device netns instance",
            f"topk(500, {ranks_of_job(catalogue.COMM_STALL_INFO.where(HOST))})",
            links={"comm": page.TO_COMMUNICATOR, "instance": page.TO_HOST},
            empty=NONE_REPORTED,
            width=16,
        ),
        table(
            "Causes with the strongest evidence",
            "Causes of each communicator's stall as given by any host. A larger number means stronger evidence.",
            "comm cause",
            recorded.STALL_EVIDENCE.where(COMM),
            value="evidence",
            links={"comm": page.TO_COMMUNICATOR},
            empty=NONE_REPORTED,
            width=8,
        ),
    ]


def _stalls() -> list[AnyPanel]:
    return [
        timeseries(
            "Stalls begun",
            "Stalls that began, by cause; each host counts its own.",
            "short",
            query(
                or_none(f"sum by (cause) (increase({catalogue.STALLS.where(HOST)}[$__rate_interval]))", "cause"),
                "{{cause}}",
            ),
            stacked=True,
        ),
        timeseries(
            "Ranks stalled",
            "Mean number of stalled ranks, by the cause that their host gave.",
            "short",
            query(
                or_none(
                    f"sum by (cause) (rate({catalogue.COMM_STALL_SECONDS.where(HOST)}[$__rate_interval]))", "cause"
                ),
                "{{cause}}",
            ),
            stacked=True,
        ),
        timeseries(
            "Errors from NCCL",
            "Errors that NCCL reported for communicators, each counted once, by ncclResult_t name.",
            "short",
            query(
                or_none(f"sum by (error) (increase({catalogue.COMM_ERRORS.where(HOST)}[$__rate_interval]))", "error"),
                "{{error}}",
            ),
            thresholds=NEVER_FINE,
        ),
        timeseries(
            "Connections that NCCL moved off a port",
            "NCCL's own failover, by the status of the completion that told it. The job goes on with less bandwidth.",
            "short",
            query(
                or_none(
                    f"sum by (status) (increase({catalogue.COMM_FAILED_OVER.where(HOST)}[$__rate_interval]))", "status"
                ),
                "{{status}}",
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
            empty=NONE_REPORTED,
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


def _jobs() -> list[AnyPanel]:
    return [
        timeseries(
            "Bus bandwidth against line rate",
            "busbw of the job's completed operations of 1 MiB and more / what all rails of its least host could carry. "
            "Where jobs share a host, its operations count for each. The twenty jobs with the least.",
            "percentunit",
            query(f"bottomk(20, {bandwidth.against_line_rate()})", "{{exported_job}}"),
            width=16,
        ).interval(_STEP),
        table(
            "Jobs",
            "Running jobs and their processes.  A click opens the Job dashboard.",
            "exported_job namespace",
            recorded.PROCESSES_OF_JOB.where(f'{JOB},instance=~"$host"'),
            aggregate="sum",
            value="processes",
            links={"job": page.TO_JOB},
            width=8,
        ),
    ]


def _rails() -> list[AnyPanel]:
    host = {"instance": page.TO_HOST}
    page_counter = catalogue.RAIL_COUNTER.where(f'severity="page",{HOST}')
    fullest = f"topk({_SHOWN_HOSTS}, max by (cluster, instance) ({recorded.TRANSMIT_UTILIZATION.where(HOST)}))"
    return [
        table(
            "Rails that are down",
            "Rails without a link now, by host.",
            _COLUMNS_OF_RAIL,
            f"topk(200, {catalogue.RAIL_UP.where(HOST)} == 0)",
            links=host,
            empty=NONE_REPORTED,
        ),
        table(
            "Worst ten: error counters",
            "Increase within an hour of counters with severity page: link downed, retries exceeded and others.",
            f"{_COLUMNS_OF_RAIL} counter",
            f"topk(10, increase({page_counter}[1h]) > 0)",
            value="in an hour",
            links=host,
            empty=NONE_REPORTED,
        ),
        table(
            "Worst ten: retransmissions",
            "Share of TCP payload that observed connections retransmitted within the last minute.",
            _COLUMNS_OF_RAIL,
            f"topk(10, {recorded.RETRANSMITTED.where(HOST)} > 0)",
            value="of payload",
            value_unit="percentunit",
            links=host,
            empty=NONE_REPORTED,
        ),
        table(
            "Worst ten: round trips",
            "Mean TCP round-trip time / that of the fastest rail of the same host, which reads 1.",
            _COLUMNS_OF_RAIL,
            f"topk(10, {recorded.ROUND_TRIP_TO_SIBLINGS.where(HOST)})",
            value="times the fastest",
            value_unit="short",
            links=host,
        ),
        matrix(
            "Utilization by host and rail",
            f"Port bytes sent / line rate, now: a line a host, a column a rail. The {_SHOWN_HOSTS} hosts with the "
            "fullest rails.  Where names of hosts come again, choose one cluster.",
            "percentunit",
            "instance",
            "rail",
            f"{recorded.TRANSMIT_UTILIZATION.where(HOST)} and on (cluster, instance) {fullest}",
            aggregate="max",
            numbered=False,
            largest=1,
            links=host,
        ),
    ]


def _traffic() -> list[AnyPanel]:
    return [
        timeseries(
            "Payload by operation",
            "Payload (count x dtype size) that all processes passed to NCCL. Bytes on the network differ.",
            "Bps",
            query(f"sum by (op) (rate({catalogue.COLLECTIVE_PAYLOAD_BYTES.where(HOST)}[$__rate_interval]))", "{{op}}"),
            stacked=True,
        ),
        timeseries(
            "Traffic of all rails",
            "Port bytes of all rails, as counted by the devices, in bits.",
            "bps",
            query(f"8 * sum({recorded.TRANSMIT_RATE.where(HOST)})", "transmit"),
            query(f"8 * sum({recorded.RECEIVE_RATE.where(HOST)})", "receive"),
        ),
    ]


def _rails_over_time() -> list[AnyPanel]:
    return [
        timeseries(
            "Highest utilization",
            "Port bytes sent / line rate: the ten rails with the highest utilization.",
            "percentunit",
            query(f"topk(10, {recorded.TRANSMIT_UTILIZATION.where(HOST)})", _RAIL),
            thresholds=FULLNESS,
            largest=1,
        ),
        timeseries(
            "Round trips against siblings",
            "Mean TCP round-trip time / that of the fastest rail of the same host, which reads 1: the ten slowest.",
            "short",
            query(f"topk(10, {recorded.ROUND_TRIP_TO_SIBLINGS.where(HOST)})", _RAIL),
            thresholds=((None, GOOD), (2.0, WATCH), (5.0, BAD)),
        ),
        timeseries(
            "Bytes sent against siblings",
            "Bytes sent / bytes of the busiest rail of the same host: the ten rails with the smallest share.",
            "percentunit",
            query(f"bottomk(10, {recorded.TRANSMIT_TO_SIBLINGS.where(HOST)})", _RAIL),
            largest=1,
        ),
        timeseries(
            "Retransmissions",
            "Share of TCP payload that observed connections retransmitted: the ten worst rails.",
            "percentunit",
            query(f"topk(10, {recorded.RETRANSMITTED.where(HOST)})", _RAIL),
            thresholds=((None, GOOD), (0.001, WATCH), (0.01, BAD)),
        ),
        timeseries(
            "Error counters",
            "Increase of counters with severity page (link downed, retries exceeded and others): the ten worst.",
            "short",
            query(
                f'topk(10, increase({catalogue.RAIL_COUNTER}{{severity="page",{HOST}}}[$__rate_interval]))',
                _RAIL + " {{counter}}",
            ),
            thresholds=NEVER_FINE,
        ),
        timeseries(
            "Traffic that collectives explain",
            "Expected wire bytes / port bytes, transmit: the ten rails with the least. Low if other traffic uses the "
            "rail.",
            "percentunit",
            query(f"bottomk(10, {recorded.EXPLAINED.where(HOST)})", _RAIL + " {{direction}}"),
        ),
        timeseries(
            "Foreign traffic",
            "Share of port bytes of processes that are not observed: the ten rails with the largest share.",
            "percentunit",
            query(f'topk(10, {recorded.BYTES_BY_ORIGIN}{{origin="foreign",{HOST}}})', _RAIL + " {{direction}}"),
            largest=1,
        ),
    ]
