"""The dashboard *Fleet*: is anything stalled, does everything answer, and which rails are the worst."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from railscope.dashboards import page, variables
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
            f"count(count by (comm) (railscope_comm_stalled{{{HOST}}} == 1)) or vector(0)",
            thresholds=NEVER_FINE,
        ),
        stat(
            "Rails down",
            "Rails without a link, on all hosts; ports that nobody cabled count too.",
            "short",
            f"count(railscope_rail_up{{{HOST}}} == 0) or vector(0)",
            thresholds=BETTER_NONE,
        ),
        stat(
            "Silent hosts",
            "Hosts whose agent told of itself within the last hour and does not answer now.",
            "short",
            f"count(up{{{HOST}}} == 0 and on (job, instance) last_over_time(railscope_build_info[1h])) or vector(0)",
            thresholds=NEVER_FINE,
        ),
        stat("Hosts", "Hosts whose agent answers.", "short", f"count(railscope_build_info{{{HOST}}})"),
        stat(
            "Communicators",
            "Communicators of the chosen jobs, each counted once however many ranks it has.",
            "short",
            'count(count by (comm) (railscope_comm_info{exported_job=~"$job",comm=~"$comm"}))',
        ),
        stat(
            "Processes",
            "Processes with NCCL that are observed.",
            "short",
            f"sum(railscope_processes_observed{{{HOST}}})",
        ),
    ]


def _stalls() -> list[AnyPanel]:
    return [
        table(
            "Stalled now",
            "Each rank that waits or keeps others waiting, and what its host puts that down to.  Ranks that only wait "
            "say rank_behind.  strength weak: nothing saw the operation itself.  A communicator opens its incident.",
            "comm rank cause strength blamed_rank rail device netns instance",
            f"{ranks_of_job(f'railscope_comm_stall_info{{{HOST}}}')}",
            links={"comm": page.TO_COMMUNICATOR, "instance": page.TO_HOST},
            width=24,
        ),
        timeseries(
            "Stalls begun",
            "Stalls that began, as often as each host saw one, by cause.",
            "short",
            query(f"sum by (cause) (increase(railscope_stalls_total{{{HOST}}}[$__rate_interval]))", "{{cause}}"),
            stacked=True,
        ),
        timeseries(
            "Ranks stalled",
            "How many ranks were stalled at a time, by the cause that their host gave.",
            "short",
            query(
                f"sum by (cause) (rate(railscope_comm_stall_seconds_total{{{HOST}}}[$__rate_interval]))",
                "{{cause}}",
            ),
            stacked=True,
        ),
        table(
            "Best founded causes",
            "For each communicator the causes that any host gives; the greater the number, the less the evidence "
            "leaves open.",
            "comm cause",
            'comm_cause:railscope_stall_evidence:max{comm=~"$comm"}',
            value="evidence",
            links={"comm": page.TO_COMMUNICATOR},
        ),
        timeseries(
            "Errors from NCCL",
            "Errors that NCCL reported for communicators, each once, by name.",
            "short",
            query(f"sum by (error) (increase(railscope_comm_errors_total{{{HOST}}}[$__rate_interval]))", "{{error}}"),
            thresholds=NEVER_FINE,
        ),
    ]


def _jobs() -> list[AnyPanel]:
    return [
        table(
            "Jobs",
            "The jobs that run, and how many communicator ends (ranks of communicators) each has.",
            "exported_job",
            f'railscope_comm_info{{exported_job=~"$job",{HOST}}}',
            aggregate="count",
            value="communicator ranks",
            links={"job": page.TO_JOB},
        ),
        timeseries(
            "Payload by operation",
            "Payload (count x dtype size) that all processes gave to NCCL: not what crossed the network.",
            "Bps",
            query(
                f"sum by (op) (rate(railscope_collective_payload_bytes_total{{{HOST}}}[$__rate_interval]))", "{{op}}"
            ),
            stacked=True,
        ),
        timeseries(
            "Bytes on the rails",
            "Port bytes of all rails, as the devices count them.",
            "Bps",
            query(f"sum(rail:railscope_transmit_bytes:rate1m{{{HOST}}})", "transmit"),
            query(f"sum(rail:railscope_receive_bytes:rate1m{{{HOST}}})", "receive"),
        ),
        timeseries(
            "Communicators made and ended",
            "Communicators that were made, ended, aborted, revoked and so on.",
            "short",
            query(f"sum by (event) (increase(railscope_comm_events_total{{{HOST}}}[$__rate_interval]))", "{{event}}"),
        ),
    ]


def _rails() -> list[AnyPanel]:
    return [
        table(
            "Rails that are down",
            "Rails without a link now, by host.",
            "instance rail device netns",
            f"railscope_rail_up{{{HOST}}} == 0",
            links={"instance": page.TO_HOST},
        ),
        timeseries(
            "Fullest rails",
            "Port bytes sent over the line rate: the ten fullest rails.",
            "percentunit",
            query(f"topk(10, rail:railscope_transmit_utilization:ratio{{{HOST}}})", _RAIL),
            thresholds=FULLNESS,
            largest=1,
        ),
        timeseries(
            "Slowest against their siblings",
            "Mean TCP round trip over that of the best rail of the same host: 1 is the best itself.",
            "short",
            query(f"topk(10, rail:railscope_round_trip_to_siblings:ratio{{{HOST}}})", _RAIL),
            thresholds=((None, GOOD), (2.0, WATCH), (5.0, BAD)),
        ),
        timeseries(
            "Least against their siblings",
            "Bytes sent over those of the busiest rail of the same host: the ten rails that carry the smallest share.",
            "percentunit",
            query(f"bottomk(10, rail:railscope_transmit_to_siblings:ratio{{{HOST}}})", _RAIL),
            largest=1,
        ),
        timeseries(
            "Most sent again",
            "Of the payload that observed TCP connections sent, what they sent again: the ten worst rails.",
            "percentunit",
            query(f"topk(10, rail:railscope_retransmitted:ratio1m{{{HOST}}})", _RAIL),
            thresholds=((None, GOOD), (0.001, WATCH), (0.01, BAD)),
        ),
        timeseries(
            "Errors of which any matters",
            "Increase of the counters with severity page (link downs, retries exceeded and so on): the ten worst.",
            "short",
            query(
                f'topk(10, increase(railscope_rail_events_total{{severity="page",{HOST}}}[$__rate_interval]))',
                _RAIL + " {{counter}}",
            ),
            thresholds=NEVER_FINE,
        ),
        timeseries(
            "Least explained",
            "Wire bytes that collectives should have sent over port bytes: low where others use the rail as well.",
            "percentunit",
            query(f"bottomk(10, rail:railscope_explained:ratio5m{{{HOST}}})", _RAIL + " {{direction}}"),
        ),
        timeseries(
            "Most of others",
            "Share of the port bytes that is not of observed processes: the ten rails with the largest.",
            "percentunit",
            query(
                f'topk(10, rail_origin:railscope_bytes:ratio5m{{origin="foreign",{HOST}}})', _RAIL + " {{direction}}"
            ),
            largest=1,
        ),
    ]
