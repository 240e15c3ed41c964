"""The dashboard *Stall*: one incident, rank by rank and rail by rail."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from railscope.agent.facts import catalogue
from railscope.agent.facts.causes import Cause
from railscope.dashboards import page, recorded, variables
from railscope.dashboards.page import Section
from railscope.dashboards.panels import (
    NEVER_FINE,
    NONE_REPORTED,
    RAIL,
    STALLED,
    UP_OR_DOWN,
    AnyPanel,
    query,
    stat,
    states,
    table,
    timeseries,
)
from railscope.dashboards.variables import CLUSTER, COMM, hosts_of_communicator, or_none, or_zero
from railscope.dashboards.variables import RAIL as CHOSEN

_RANK = "rank {{rank}}"
"""A rank is on one host; a longer legend would be cut off."""
_RAIL = RAIL + " {{instance}} {{netns}}"
_MEAN = 'stat="mean"'


def _of_rails(metric: str) -> str:
    """The metric on the rails of hosts with a rank of the communicator."""
    return hosts_of_communicator(f"{metric}{{{CHOSEN}}}")


def _of_rails_with(metric: str, matchers: str) -> str:
    """Those of its series that the matchers select."""
    return hosts_of_communicator(f"{metric}{{{matchers},{CHOSEN}}}")


def dashboard() -> Dashboard:
    """The dashboard of one stall."""
    return page.page(
        page.STALL,
        "One stalled communicator: each host's finding, ranks that are behind, and its rails.  For a verdict with "
        "evidence run: railscope diagnose --prometheus URL --comm HASH",
        [variables.communicator(), variables.host(), variables.rail()],
        [
            Section("What is wrong", _summary()),
            Section("Rank by rank", _ranks()),
            Section("Rail by rail", _rails(), folded=True),
            Section("Calls, CUDA graphs and processes without a communicator", _calls(), folded=True),
        ],
    )


def _summary() -> list[AnyPanel]:
    return [
        stat(
            "Ranks stalled",
            "Stalled ranks: they wait or keep others waiting.",
            "short",
            or_zero(f"count(count by (cluster, comm, rank) ({catalogue.COMM_STALLED.where(COMM)} == 1))", CLUSTER),
            thresholds=NEVER_FINE,
            whole=True,
        ),
        stat(
            "Ranks seen",
            "Ranks of the communicator that any agent observes.",
            "short",
            f"count(count by (cluster, comm, rank) ({catalogue.COMM_INFO.where(COMM)}))",
            whole=True,
        ),
        stat(
            "Longest stall",
            "Time for which the stalls of one rank stood, of the rank with most.",
            "s",
            f"max({catalogue.COMM_STALL_SECONDS.where(COMM)})",
        ),
        stat(
            "Oldest operation in flight",
            "Age of the oldest operation in flight: handed to NCCL's proxy thread and not complete.",
            "s",
            f"max({catalogue.COMM_INFLIGHT_SECONDS.where(COMM)})",
        ),
        stat(
            "Operations behind",
            "Number of operations by which the last rank is behind the most advanced one.",
            "short",
            f"max({recorded.SEQUENCE_SPREAD.where(COMM)})",
            whole=True,
        ),
        stat(
            "Rails down",
            "Rails without a link on the hosts of this communicator.",
            "short",
            or_zero(f"count({hosts_of_communicator(f'{catalogue.RAIL_UP}{{{CHOSEN}}} == 0')})", CLUSTER),
            thresholds=NEVER_FINE,
            whole=True,
        ),
        table(
            "What the hosts say",
            "One row per rank: the cause that its host gives, and the blamed rank or rail (empty: none).  "
            f"A rank that only waits reports {Cause.RANK_BEHIND}; {Cause.PROCESS_STOPPED}, {Cause.PROCESS_GONE} and "
            "rail_* name the reason.",
            "comm rank instance cause strength blamed_rank rail device netns",
            catalogue.COMM_STALL_INFO.where(COMM),
            links={"instance": page.TO_HOST},
            empty=NONE_REPORTED,
            width=16,
        ),
        table(
            "Causes with the strongest evidence",
            "Causes of the stall as given by any host. A larger number means stronger evidence.",
            "comm cause",
            recorded.STALL_EVIDENCE.where(COMM),
            value="evidence",
            empty=NONE_REPORTED,
            width=8,
        ),
        table(
            "Ranks seen and nranks",
            "Ranks that an agent observes, beside nranks. If fewer, an agent is missing or silent.",
            "comm nranks",
            recorded.RANKS.where(COMM),
            value="seen",
            width=8,
        ),
        table(
            "Ranks that write",
            "Ranks whose process makes no NCCL call and writes to storage, for example a checkpoint. The others may "
            "wait for them; this is not a stall.",
            "comm rank instance",
            catalogue.COMM_WRITING.where(COMM),
            links={"instance": page.TO_HOST},
            empty=NONE_REPORTED,
            width=8,
        ),
        table(
            "Ranks that left",
            "Ranks that destroyed or aborted the communicator, or whose process ended. They do not wait.",
            "comm rank instance",
            catalogue.COMM_ENDED.where(COMM),
            links={"instance": page.TO_HOST},
            empty=NONE_REPORTED,
            width=8,
        ),
        timeseries(
            "Stalled, by cause",
            "Mean number of stalled ranks, by the cause that their host gave.",
            "short",
            query(
                or_none(
                    f"sum by (cause) (rate({catalogue.COMM_STALL_SECONDS.where(COMM)}[$__rate_interval]))",
                    "cause",
                    CLUSTER,
                ),
                "{{cause}}",
            ),
            stacked=True,
            whole=True,
        ),
    ]


def _calls() -> list[AnyPanel]:
    return [
        table(
            "Calls that do not return",
            "NCCL calls (init, split, finalize, connecting ranks) that a rank has been inside for longer than "
            "--stall.after, with their age. Ranks that are not listed are not inside.",
            "comm call rank nranks instance pid",
            catalogue.CALL_INSIDE_SECONDS.where(COMM),
            value="seconds",
            links={"instance": page.TO_HOST},
            empty=NONE_REPORTED,
            width=12,
        ),
        table(
            "Last collectives",
            "What each stalled rank called last, the latest last, with the number of the latest. All ranks of a "
            "communicator make the same collectives in the same order.",
            "rank instance last",
            catalogue.COMM_STALL_COLLECTIVES.where(COMM),
            value="number",
            links={"instance": page.TO_HOST},
            empty=NONE_REPORTED,
            width=12,
        ),
        timeseries(
            "CUDA graphs launched",
            "Rate at which processes on the communicator's hosts launch CUDA graphs; only with --collector.cuda. One "
            "that stands still while others go on is stuck, or waits outside the GPU.",
            "cps",
            query(
                hosts_of_communicator(f"rate({catalogue.CUDA_GRAPH_LAUNCHES.where(CLUSTER)}[$__rate_interval])"),
                "{{instance}} {{pid}}",
            ),
            whole=True,
        ).no_value(NONE_REPORTED),
        timeseries(
            "Age of waits for the GPU",
            "Age of the oldest call of a process that launches a CUDA graph or waits for the GPU; only with "
            "--collector.cuda. Long kernels make long waits.",
            "s",
            query(hosts_of_communicator(catalogue.CUDA_INSIDE_SECONDS.where(CLUSTER)), "{{instance}} {{pid}} {{call}}"),
            whole=True,
        ).no_value(NONE_REPORTED),
        timeseries(
            "Ranks disagree",
            "1 while ranks of the communicator tell different signatures of one block of collectives: they do not "
            "make the same ones.",
            "short",
            query(recorded.RANKS_DISAGREE.where(COMM), "{{comm}}"),
            whole=True,
        ).no_value(NONE_REPORTED),
        table(
            "Processes without a communicator",
            "Processes on all hosts that map NCCL and were given a rank of their job by its launcher, while their "
            "agent saw no call that names a living communicator of theirs. While others are inside an init, it is one "
            "of these that they wait for.",
            "exported_job world_rank world_size instance pid",
            catalogue.PROCESS_WITHOUT_COMM.where(CLUSTER),
            links={"instance": page.TO_HOST},
            empty=NONE_REPORTED,
            width=24,
        ),
    ]


def _ranks() -> list[AnyPanel]:
    return [
        states(
            "Stalled",
            "Stalled ranks over time, with operation and cause.",
            query(
                f"max by (cluster, rank, instance, op, cause) ({catalogue.COMM_STALLED.where(COMM)})",
                "{{rank}} {{op}} {{cause}}",
            ),
            words=STALLED,
        ),
        timeseries(
            "Operations behind",
            "Operations by which each rank is behind the most advanced one. A rank above 0 keeps the others waiting.",
            "short",
            query(f"topk(100, {recorded.OPERATIONS_BEHIND.where(COMM)})", _RANK),
            whole=True,
        ).no_value(NONE_REPORTED),
        timeseries(
            "Age of the oldest operation in flight",
            "Grows by one second per second while a rank waits; 0 on a rank that did not enter the operation.",
            "s",
            query(f"topk(100, {catalogue.COMM_INFLIGHT_SECONDS.where(COMM)})", _RANK),
        ),
        timeseries(
            "Operations entered",
            "Operations that each rank enqueued per second: 0 once the stall began.",
            "ops",
            query(f"bottomk(100, rate({catalogue.COMM_ENQUEUED.where(COMM)}[$__rate_interval]))", _RANK),
        ),
        timeseries(
            "Operations not complete",
            "Operations that each rank entered and that are not known to be complete.",
            "short",
            query(f"topk(100, {catalogue.COMM_ENQUEUED.where(COMM)} - {catalogue.COMM_COMPLETED.where(COMM)})", _RANK),
            whole=True,
        ),
        timeseries(
            "Duration of operations",
            "Mean duration from hand-over to completion. The rank that waits least arrives last.",
            "s",
            query(f"bottomk(100, {recorded.OPERATION_SECONDS.where(COMM)})", _RANK),
        ),
        table(
            "Ranks",
            "Where each rank runs, of the largest communicators 500.",
            "comm rank nranks instance gpu pid exported_job user identity_source",
            f"topk(500, {catalogue.COMM_INFO.where(COMM)})",
            links={"instance": page.TO_HOST, "job": page.TO_JOB},
            width=24,
        ),
    ]


def _rails() -> list[AnyPanel]:
    return [
        states(
            "Links",
            "Whether the rails of this communicator's hosts are up: a hundred, first those that are down.",
            query(f"bottomk(100, {_of_rails(catalogue.RAIL_UP.name)})", _RAIL),
            words=UP_OR_DOWN,
        ),
        timeseries(
            "Sent",
            "Port bytes sent, in bits: the hundred rails that send least. In a ring, all drop together with the "
            "slowest one.",
            "bps",
            query(f"8 * bottomk(100, {_of_rails(recorded.TRANSMIT_RATE.name)})", _RAIL),
        ),
        timeseries(
            "Send queue",
            "Bytes in each rail's qdisc. A slow rail has a backlog while its siblings have none.",
            "bytes",
            query(f"topk(100, {_of_rails(catalogue.RAIL_QUEUE_BACKLOG_BYTES.name)})", _RAIL),
        ),
        timeseries(
            "Round-trip time",
            "Mean smoothed TCP round-trip time of the sending connections.",
            "s",
            query(f"topk(100, {_of_rails_with(catalogue.RAIL_TCP_ROUND_TRIP.name, _MEAN)})", _RAIL),
        ),
        timeseries(
            "Retransmitted share",
            "Share of TCP payload that observed connections retransmitted.",
            "percentunit",
            query(f"topk(100, {_of_rails(recorded.RETRANSMITTED.name)})", _RAIL),
        ),
        timeseries(
            "Segments in flight",
            "TCP segments not acknowledged yet. They stay while nothing arrives.",
            "short",
            query(f"topk(100, {_of_rails(catalogue.RAIL_TCP_UNACKNOWLEDGED.name)})", _RAIL),
            whole=True,
        ),
        timeseries(
            "Error counters, severity page",
            "Increase of counters with severity page: the twenty that rose most.",
            "short",
            query(
                "topk(20, "
                + hosts_of_communicator(
                    f'increase({catalogue.RAIL_COUNTER}{{severity="page",{CHOSEN}}}[$__rate_interval])'
                )
                + ")",
                _RAIL + " {{counter}}",
            ),
            thresholds=NEVER_FINE,
        ),
        timeseries(
            "Utilization",
            "Port bytes sent / line rate.",
            "percentunit",
            query(f"topk(100, {_of_rails(recorded.TRANSMIT_UTILIZATION.name)})", _RAIL),
            largest=1,
        ),
    ]
