"""The dashboard *Job*: which communicators a job has, what it sends in which sizes, how fast, and who comes late.

Calls, sizes and times of operations are known for a host as a whole: where several jobs share a host they are added.

Histograms of bytes and of bytes per second come to a Prometheus that takes native histograms as such, and then without
classic buckets (exporters/series/native.py).  So what asks for them asks for both, and takes what is there.
"""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from railscope.agent.facts import catalogue
from railscope.agent.facts.bound import LEAST_WAITING, SURE, Bound
from railscope.dashboards import bandwidth, page, recorded, variables
from railscope.dashboards.page import Section
from railscope.dashboards.panels import (
    BAD,
    GOOD,
    NEVER_FINE,
    WATCH,
    AnyPanel,
    heatmap,
    matrix,
    query,
    stat,
    states,
    table,
    timeseries,
)
from railscope.dashboards.variables import HOST, JOB, hosts_of_job, or_zero, ranks_of_job

_ON_HOSTS = "  This panel covers whole hosts: jobs that share a host are added up."
_RANK = "{{comm}} rank {{rank}}"
_STEP = "1m"
"""A histogram of a job's hosts has thousands of series: an hour of them in steps of a scrape would take seconds."""
_INFO = f'{catalogue.COMM_INFO}{{exported_job=~"$job",comm=~"$comm",{HOST}}}'
_BOUND: Final = {
    "1": (Bound.STRAGGLER.value, BAD),
    "2": (Bound.COMMUNICATION.value, WATCH),
    "3": (Bound.COMPUTATION_OR_INPUT.value, GOOD),
    "4": ("cannot be told", "blue"),
}


def _bound() -> str:
    """Which of `_BOUND` the job is bound by, as agent/facts/bound.py finds it."""

    def parts(*names: str) -> str:
        of_job = f'{JOB},part=~"{"|".join(names)}"'
        return f"sum by (cluster, exported_job) ({recorded.JOB_STEP_PARTS.where(of_job)})"

    busy, waiting = parts("waiting", "communication"), parts("waiting")
    over_hosts = recorded.JOB_WAITING.where(JOB)
    # At least half of the other communication is a third of both.
    straggler = (
        f"({waiting} >= {LEAST_WAITING:g} and {waiting} >= {busy} / 3) "
        f"or ({over_hosts} * on (cluster, exported_job) {busy} >= {LEAST_WAITING:g} "
        f"and on (cluster, exported_job) {over_hosts} >= 1 / 3)"
    )
    return (
        f"({straggler}) * 0 + 1 or ({busy} >= {SURE:g}) * 0 + 2 "
        f"or ({parts('between', 'silent')} >= {SURE:g}) * 0 + 3 or {parts('.+')} * 0 + 4"
    )


def _of_ranks(metric: str) -> str:
    return ranks_of_job(f"rate({metric}{{{HOST}}}[$__rate_interval])")


def _of_hosts(metric: str, function: str = "rate") -> str:
    return hosts_of_job(f"{function}({metric}{{{HOST}}}[$__rate_interval])")


def _quantile(quantile: float, metric: str, by: str) -> str:
    return f"histogram_quantile({quantile}, sum by (le, {by}) ({_of_hosts(f'{metric}_bucket')}))"


def _quantile_of_either(quantile: float, metric: str, by: str) -> str:
    return f"{_quantile(quantile, metric, by)} or histogram_quantile({quantile}, sum by ({by}) ({_of_hosts(metric)}))"


def dashboard() -> Dashboard:
    """The dashboard of one job."""
    return page.page(
        page.JOB,
        "One job: its bandwidth against the line rate, steps, payload and sizes of its NCCL calls, and late ranks.",
        [
            variables.namespace(),
            variables.job(everything=False),
            variables.pod_of_job(),
            variables.communicator_of_job(),
            variables.host_of_job(),
        ],
        [
            Section("Bandwidth", [one.interval(_STEP) for one in _bandwidth()]),
            Section("Steps", [one.interval(_STEP) for one in _steps()]),
            Section("Stragglers", [one.interval(_STEP) for one in _stragglers()], folded=True),
            Section("Operations", [one.interval(_STEP) for one in _operations()], folded=True),
            Section("Sizes and times", [one.interval(_STEP) for one in _sizes()], folded=True),
            Section("From rank to rank", [one.interval(_STEP) for one in _traffic()], folded=True),
            Section("Ranks", _ranks(), folded=True),
        ],
    )


def _bandwidth() -> list[AnyPanel]:
    return [
        stat(
            "Bus bandwidth / line rate",
            "busbw of completed operations of 1 MiB and more / what all rails of the job's least host could carry. "
            "Where jobs share a host, its operations count for each.",
            "percentunit",
            f"min({bandwidth.against_line_rate()})",
            thresholds=((None, BAD), (0.3, WATCH), (0.7, GOOD)),
        ),
        stat(
            "Stalled ranks",
            "Ranks of the job whose host reports a stalled operation.",
            "short",
            or_zero(f"count({ranks_of_job(f'{catalogue.COMM_STALLED.where(HOST)} == 1')})"),
            thresholds=NEVER_FINE,
            whole=True,
        ),
        stat(
            "Operations behind",
            "Largest number of operations by which a rank is behind the most advanced rank of its communicator.  "
            "Short values above 0 are normal.",
            "short",
            or_zero(f"max({ranks_of_job(recorded.OPERATIONS_BEHIND.where(HOST))})"),
            whole=True,
        ),
        stat(
            "Oldest operation in flight",
            "Age of the oldest operation in flight: handed to NCCL's proxy thread and not complete.",
            "s",
            f"max({ranks_of_job(catalogue.COMM_INFLIGHT_SECONDS.where(HOST))})",
        ),
        stat("Processes", "Processes of the job.", "short", f"count(count by (cluster, instance, pid) ({_INFO}))"),
        stat(
            "Hosts",
            "Hosts on which the job runs.",
            "short",
            f'count(count by (cluster, instance) ({recorded.PROCESSES_OF_JOB}{{{JOB},instance=~"$host"}}))',
        ),
        timeseries(
            "Bus bandwidth and line rate",
            "busbw of completed operations of 1 MiB and more, and what all rails of the job's least host could carry "
            "in one direction." + _ON_HOSTS,
            "bps",
            query(f"8 * ({bandwidth.bus_bandwidth()})", "{{exported_job}}"),
            query(f"8 * {bandwidth.line_rate()}", "{{exported_job}}: line rate"),
        ),
        timeseries(
            "Payload",
            "Payload (count x dtype size) by operation and data type, exact. Bytes on the network differ." + _ON_HOSTS,
            "Bps",
            query(f"sum by (op, dtype) ({_of_hosts(catalogue.COLLECTIVE_PAYLOAD_BYTES.name)})", "{{op}} {{dtype}}"),
            stacked=True,
        ),
    ]


def _ranks() -> list[AnyPanel]:
    return [
        table(
            "Communicators",
            "Every rank of every communicator, with its process, of large jobs 500.  A click on a communicator opens "
            "its Stall dashboard.",
            "comm rank nranks gpu exported_job user nccl_version pid identity_source instance",
            f"topk(500, {_INFO})",
            links={"comm": page.TO_COMMUNICATOR, "instance": page.TO_HOST},
            width=24,
        ),
    ]


def _steps() -> list[AnyPanel]:
    steps, silent = catalogue.JOB_STEP_SECONDS.name, catalogue.JOB_STEP_SILENT_SECONDS.name
    parts, spent = catalogue.JOB_STEP_PART_SECONDS.name, catalogue.JOB_TIME_SECONDS.where(HOST)
    return [
        states(
            "Bound by",
            "What bounds the job's steps: a straggler, where ranks wait a tenth of a step for the slowest one and half "
            "as long as they communicate otherwise; communication, where operations are under way for half of a step; "
            "computation or input, where none is for half.  Cannot be told: nothing is half, or completions are not "
            "seen.  `railscope diagnose --job` says it in words, with the shares.",
            query(_bound(), "{{exported_job}}"),
            words=_BOUND,
        ),
        timeseries(
            "Step time",
            "Mean length of a step (iteration), as the job's lowest rank on each host makes it.  Absent where its "
            "calls do not repeat, as with requests at random.",
            "s",
            query(
                f"max by (cluster, instance) (({_of_ranks(f'{steps}_sum')}) / ({_of_ranks(f'{steps}_count')}))",
                "{{instance}}",
            ),
        ),
        timeseries(
            "Steps",
            "Steps (iterations) per second, as the job's lowest rank on each host makes them.",
            "cps",
            query(f"max by (cluster, instance) ({_of_ranks(catalogue.JOB_STEPS.name)})", "{{instance}}"),
        ),
        timeseries(
            "Silent share of steps",
            "Share of the steps' time between a step's last call and the next one's first: computation, input or a "
            "checkpoint, in the job's lowest rank on each host.",
            "percentunit",
            query(
                f"max by (cluster, instance) (({_of_ranks(silent)}) / ({_of_ranks(f'{steps}_sum')}))", "{{instance}}"
            ),
        ),
        timeseries(
            "Parts of a step",
            "Shares of the steps' time on all hosts of the job: waiting for the slowest rank of a communicator on the "
            "same host, other communication, between calls and in the silence after the last one (computation or "
            "input: without a trace of the GPU they are one), unknown (communication or computation, where completions "
            "are not seen).  Where waiting is much, the job is bound by a straggler; where waiting and communication "
            "are half, by communication.",
            "percentunit",
            query(f"sum by (part) ({_of_ranks(parts)}) / on () group_left () sum ({_of_ranks(parts)})", "{{part}}"),
            stacked=True,
        ),
        timeseries(
            "Waiting for the slowest rank",
            "Of the time in operations of all the job's ranks, what each spends longer than the rank of its "
            "communicator that spends least: over all hosts.",
            "percentunit",
            query(f"max by (cluster, exported_job) ({recorded.JOB_WAITING.where(JOB)})", "{{exported_job}}"),
        ),
        timeseries(
            "Goodput",
            "Share of the time since the job began that its steps took, an interrupted one with its usual length.",
            "percentunit",
            query(f"max by (cluster, exported_job) ({recorded.GOODPUT.where(JOB)})", "{{exported_job}}"),
        ),
        timeseries(
            "Time since the job began",
            "What the job's time went into, on the host that knows of most: steps; start and restart, before the "
            "first step; stalls and checkpoints of its ranks there; and what none of these explains.",
            "s",
            query(f"max by (state) ({ranks_of_job(spent)})", "{{state}}"),
            stacked=True,
        ),
    ]


def _operations() -> list[AnyPanel]:
    calls = catalogue.COLLECTIVE_CALLS.name
    bus, seconds = catalogue.COLLECTIVE_COMPLETED_BUS_BYTES.name, catalogue.COLLECTIVE_COMPLETED_SECONDS.name
    algorithm = catalogue.COLLECTIVE_COMPLETED_PAYLOAD_BYTES.name
    bandwidth = catalogue.COLLECTIVE_BUS_BANDWIDTH.name
    return [
        timeseries(
            "Calls",
            "NCCL calls by operation, exact." + _ON_HOSTS,
            "cps",
            query(f"sum by (op) ({_of_hosts(calls)})", "{{op}}"),
            stacked=True,
        ),
        timeseries(
            "Bus bandwidth by size",
            "busbw of completed operations: payload x nccl-tests' factor / duration, by operation and payload "
            "rounded up to a power of two." + _ON_HOSTS,
            "Bps",
            query(
                f"sum by (op, size) ({_of_hosts(bus)}) / sum by (op, size) ({_of_hosts(seconds)})", "{{op}} {{size}}"
            ),
        ),
        timeseries(
            "Algorithm bandwidth by size",
            "algbw of completed operations: payload / duration, by operation and payload rounded up to a power of "
            "two." + _ON_HOSTS,
            "Bps",
            query(
                f"sum by (op, size) ({_of_hosts(algorithm)}) / sum by (op, size) ({_of_hosts(seconds)})",
                "{{op}} {{size}}",
            ),
        ),
        timeseries(
            "Bus bandwidth, percentiles",
            "Median and 90th percentile of the bus bandwidth of completed collectives." + _ON_HOSTS,
            "Bps",
            query(_quantile_of_either(0.5, bandwidth, "op"), "{{op}} median"),
            query(_quantile_of_either(0.9, bandwidth, "op"), "{{op}} 90th percentile"),
        ),
        timeseries(
            "Operations in flight",
            "Mean number of a rank's operations in flight. 1: one is always in flight; more: they overlap; near 0: "
            "the rank hardly waits for the network. The twenty ranks with the most.",
            "short",
            query(f"topk(20, {_of_ranks(catalogue.COMM_OPERATION_SECONDS.name)})", _RANK),
        ),
        timeseries(
            "Algorithms",
            "Collectives launched, by algorithm, protocol and number of channels chosen by NCCL." + _ON_HOSTS,
            "cps",
            query(
                f"sum by (op, algorithm, protocol, channels) ({_of_hosts(catalogue.COLLECTIVE_LAUNCHES.name)})",
                "{{op}} {{algorithm}} {{protocol}} {{channels}} channels",
            ),
        ),
        timeseries(
            "Collectives of CUDA graphs",
            "Collectives that replays of CUDA graphs ran, for which no call is made, and those that were captured.",
            "cps",
            query(f"sum by (cluster, comm) ({_of_ranks(catalogue.COMM_REPLAYED.name)})", "{{comm}} replayed"),
            query(f"sum by (cluster, comm) ({_of_ranks(catalogue.COMM_CAPTURED.name)})", "{{comm}} captured"),
        ),
    ]


def _sizes() -> list[AnyPanel]:
    def spread(metric: str) -> str:
        return f"sum by (le) ({_of_hosts(f'{metric}_bucket', 'increase')})"

    def spread_of_either(metric: str) -> str:
        # A newer Prometheus can be told to keep classic buckets too: a heat map of both would be of neither.
        return f"{spread(metric)} or sum({_of_hosts(metric, 'increase')}) unless on () {spread(metric)}"

    return [
        heatmap(
            "Message sizes",
            "Payload of NCCL calls, in powers of two: how many calls were how large." + _ON_HOSTS,
            "bytes",
            spread_of_either(catalogue.COLLECTIVE_SIZE_BYTES.name),
        ),
        heatmap(
            "Duration of operations",
            "Start to completion where that can be known; an upper bound." + _ON_HOSTS,
            "s",
            spread(catalogue.COLLECTIVE_DURATION_SECONDS.name),
        ),
        heatmap(
            "Bus bandwidth of operations",
            "How many collectives reached which bus bandwidth." + _ON_HOSTS,
            "Bps",
            spread_of_either(catalogue.COLLECTIVE_BUS_BANDWIDTH.name),
        ),
        heatmap(
            "Time inside NCCL calls",
            "Host time inside the call, sampled: the enqueue, not how long the collective took." + _ON_HOSTS,
            "s",
            spread(catalogue.COLLECTIVE_ENQUEUE_SECONDS.name),
        ),
        timeseries(
            "Duration of operations, percentiles",
            "Median and slowest hundredth, by operation and how it was learned (proxy: the network part; cuda: as the "
            "job learned it, queueing included)." + _ON_HOSTS,
            "s",
            query(_quantile(0.5, catalogue.COLLECTIVE_DURATION_SECONDS.name, "op, source"), "{{op}} {{source}} median"),
            query(
                _quantile(0.99, catalogue.COLLECTIVE_DURATION_SECONDS.name, "op, source"),
                "{{op}} {{source}} slowest hundredth",
            ),
        ),
        timeseries(
            "Time inside NCCL calls, percentiles",
            "Median and slowest hundredth of the host time inside the call, sampled." + _ON_HOSTS,
            "s",
            query(_quantile(0.5, catalogue.COLLECTIVE_ENQUEUE_SECONDS.name, "op"), "{{op}} median"),
            query(_quantile(0.99, catalogue.COLLECTIVE_ENQUEUE_SECONDS.name, "op"), "{{op}} slowest hundredth"),
        ),
    ]


def _traffic() -> list[AnyPanel]:
    peers = catalogue.COMM_PEER_WIRE_BYTES.name
    only = "  Only of agents that run with --series.peers; choose one communicator, or ranks of several are added."
    return [
        matrix(
            "From rank to rank",
            "Wire bytes that calls of each rank (line) send to each other one (column): of Send, AllToAll, Scatter and "
            "Gather the payload to the peer that the call names; of ring operations payload x algorithm factor to the "
            "next rank, by a model of one ring in the order of ranks, which NCCL's own rings need not follow. The 500 "
            "pairs with the most." + only,
            "Bps",
            "rank",
            "peer",
            f"topk(500, sum by (rank, peer) ({_of_ranks(peers)}))",
        ),
        timeseries(
            "Bytes between ranks, by basis",
            "The same bytes by basis: sent around rings (ring) or to peers that the calls name (call)." + only,
            "Bps",
            query(f"sum by (cluster, comm, basis) ({_of_ranks(peers)})", "{{comm}} {{basis}}"),
            stacked=True,
            width=24,
        ),
    ]


def _stragglers() -> list[AnyPanel]:
    return [
        timeseries(
            "Shortest operations",
            "Mean duration from hand-over to completion: the ten ranks with the smallest. The rank that waits least "
            "arrives last, and the others wait for it.",
            "s",
            query(f"bottomk(10, {ranks_of_job(recorded.OPERATION_SECONDS.where(HOST))})", _RANK),
        ),
        timeseries(
            "Operations behind",
            "Operations by which a rank is behind the most advanced rank of its communicator: the ten worst.",
            "short",
            query(f"topk(10, {ranks_of_job(recorded.OPERATIONS_BEHIND.where(HOST))})", _RANK),
            whole=True,
        ),
        timeseries(
            "Last arrivals",
            "Calls that a rank made last among its host's ranks: the ten ranks with the most.",
            "cps",
            query(f"topk(10, {_of_ranks(catalogue.COMM_LAST_ARRIVALS.name)})", _RANK),
        ),
        timeseries(
            "Arrival lag",
            "Delay of the last rank on its host behind the second-to-last, per second: the share of time that it cost.",
            "percentunit",
            query(f"topk(10, {_of_ranks(catalogue.COMM_ARRIVAL_LAG_SECONDS.name)})", _RANK),
        ),
        timeseries(
            "Share of time that others wait for a rank",
            "Share of their time for which the other ranks wait for this one: by completions on all hosts, else (slow) "
            "as its own host tells by calls, of a rank that is waited for again and again.",
            "percentunit",
            query(f"topk(10, {ranks_of_job(recorded.WAITED_FOR.where(HOST))})", _RANK),
            query(f"topk(10, {ranks_of_job(catalogue.COMM_AWAITED.where(HOST))})", f"{_RANK} slow"),
        ),
        timeseries(
            "How long a rank has been slow",
            "For how long a rank's host has seen its other ranks wait for it in most stretches of 5 seconds.",
            "s",
            query(f"time() - {ranks_of_job(catalogue.COMM_AWAITED_SINCE.where(HOST))}", _RANK),
        ),
        timeseries(
            "Operations entered",
            "Operations that ranks of a communicator enqueued, on average; ranks of one communicator advance together. "
            "The twenty communicators with the most.",
            "ops",
            query(f"topk(20, avg by (cluster, comm) ({_of_ranks(catalogue.COMM_ENQUEUED.name)}))", "{{comm}}"),
        ),
        timeseries(
            "Age of the oldest operation in flight",
            "Age of the oldest operation in flight: the ten oldest.",
            "s",
            query(f"topk(10, {ranks_of_job(catalogue.COMM_INFLIGHT_SECONDS.where(HOST))})", _RANK),
        ),
    ]
