"""The dashboard *Stall*: one incident, rank by rank and rail by rail."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from railscope.dashboards import page, variables
from railscope.dashboards.page import Section
from railscope.dashboards.panels import (
    NEVER_FINE,
    STALLED,
    UP_OR_DOWN,
    AnyPanel,
    query,
    stat,
    states,
    table,
    timeseries,
)
from railscope.dashboards.variables import COMM, hosts_of_communicator

_RANK = "rank {{rank}}"
"""A rank is on one host; a longer legend would be cut off."""
_RAIL = "{{device}} {{instance}} {{netns}}"
_CHOSEN = '{instance=~"$host",rail=~"$rail"}'


def _of_rails(metric: str) -> str:
    """The metric on the rails of hosts with a rank of the communicator."""
    return hosts_of_communicator(f"{metric}{_CHOSEN}")


def dashboard() -> Dashboard:
    return page.page(
        page.STALL,
        "One communicator that does not get on: what each host says, which rank is behind, and what its rails do.  "
        "For a verdict with its evidence run: railscope diagnose --prometheus URL --comm HASH",
        [variables.communicator(of_job=False), variables.host(), variables.rail()],
        [
            Section("What is wrong", _summary()),
            Section("Rank by rank", _ranks()),
            Section("Rail by rail", _rails()),
        ],
    )


def _summary() -> list[AnyPanel]:
    return [
        stat(
            "Ranks stalled",
            "Ranks that wait or keep others waiting.",
            "short",
            f"count(count by (comm, rank) (railscope_comm_stalled{{{COMM}}} == 1)) or vector(0)",
            thresholds=NEVER_FINE,
            whole=True,
        ),
        stat(
            "Ranks seen",
            "Ranks of the communicator that any agent tells of.",
            "short",
            f"count(count by (comm, rank) (railscope_comm_info{{{COMM}}}))",
            whole=True,
        ),
        stat(
            "Longest",
            "How long any of its ranks was stalled, in sum.",
            "s",
            f"max(railscope_comm_stall_seconds_total{{{COMM}}})",
        ),
        stat(
            "Oldest operation in flight",
            "Age of the oldest operation that was handed to the network and is not complete.",
            "s",
            f"max(railscope_comm_inflight_seconds{{{COMM}}})",
        ),
        stat(
            "Operations behind",
            "How many operations the hindmost rank entered less than the foremost.",
            "short",
            f"max(comm:railscope_sequence_spread:max{{{COMM}}})",
            whole=True,
        ),
        stat(
            "Rails down",
            "Rails without a link on the hosts of this communicator.",
            "short",
            f"count({hosts_of_communicator(f'railscope_rail_up{_CHOSEN} == 0')}) or vector(0)",
            thresholds=NEVER_FINE,
            whole=True,
        ),
        table(
            "What the hosts say",
            "A rank a row: the cause as its host sees it, and whom it blames; empty: nothing of the kind.  "
            "A rank that only waits says rank_behind; process_stopped, process_gone and rail_* name the reason.",
            "comm rank instance cause strength blamed_rank rail device netns",
            f"railscope_comm_stall_info{{{COMM}}}",
            links={"instance": page.TO_HOST},
            width=16,
        ),
        table(
            "Best founded causes",
            "What any host puts the stall down to; the greater the number, the less the evidence leaves open.",
            "comm cause",
            f"comm_cause:railscope_stall_evidence:max{{{COMM}}}",
            value="evidence",
            width=8,
        ),
        table(
            "Ranks seen beside how many there are",
            "Of nranks ranks this many are seen by an agent: where fewer, an agent is missing or silent.",
            "comm nranks",
            f"comm_nranks:railscope_ranks:count{{{COMM}}}",
            value="seen",
            width=8,
        ),
        table(
            "Ranks that write",
            "Ranks whose process makes no call and writes to storage, as for a checkpoint: the others may wait for "
            "them, and that is no stall.",
            "comm rank instance",
            f"railscope_comm_writing{{{COMM}}}",
            links={"instance": page.TO_HOST},
            width=8,
        ),
        table(
            "Ranks that left",
            "Ranks that destroyed or aborted their end of the communicator, or whose process has ended: they do not "
            "wait.",
            "comm rank instance",
            f"railscope_comm_ended{{{COMM}}}",
            links={"instance": page.TO_HOST},
            width=8,
        ),
        timeseries(
            "Stalled, by cause",
            "How many ranks were stalled at a time, by the cause that their host gave.",
            "short",
            query(
                f"sum by (cause) (rate(railscope_comm_stall_seconds_total{{{COMM}}}[$__rate_interval]))", "{{cause}}"
            ),
            stacked=True,
            whole=True,
        ),
    ]


def _ranks() -> list[AnyPanel]:
    return [
        states(
            "Stalled",
            "Which ranks were stalled when, with operation and cause.",
            query(
                f"max by (rank, instance, op, cause) (railscope_comm_stalled{{{COMM}}})",
                "{{rank}} {{op}} {{cause}}",
            ),
            words=STALLED,
        ),
        timeseries(
            "Operations behind",
            "Operations that each rank entered less than the foremost: who is above 0 keeps the others waiting.",
            "short",
            query(f"comm_rank:railscope_operations_behind:max{{{COMM}}}", _RANK),
            whole=True,
        ),
        timeseries(
            "Age of the oldest operation in flight",
            "Rises a second each second while a rank waits; 0 on a rank that did not enter the operation.",
            "s",
            query(f"railscope_comm_inflight_seconds{{{COMM}}}", _RANK),
        ),
        timeseries(
            "Operations entered",
            "Operations that each rank gave to NCCL per second: 0 from the stall on.",
            "ops",
            query(f"rate(railscope_comm_enqueued_total{{{COMM}}}[$__rate_interval])", _RANK),
        ),
        timeseries(
            "Operations not complete",
            "Operations that each rank entered and that are not known to be complete.",
            "short",
            query(f"railscope_comm_enqueued_total{{{COMM}}} - railscope_comm_completed_total{{{COMM}}}", _RANK),
            whole=True,
        ),
        timeseries(
            "How long operations took before",
            "Mean time from hand-over to completion: who waits least comes last.",
            "s",
            query(f"comm_rank:railscope_operation_seconds:mean5m{{{COMM}}}", _RANK),
        ),
        table(
            "Ranks",
            "Where each rank runs.",
            "comm rank nranks instance gpu pid exported_job user identity_source",
            f"railscope_comm_info{{{COMM}}}",
            links={"instance": page.TO_HOST, "job": page.TO_JOB},
            width=24,
        ),
    ]


def _rails() -> list[AnyPanel]:
    return [
        states(
            "Links",
            "Whether the rails of this communicator's hosts are up.",
            query(_of_rails("railscope_rail_up"), _RAIL),
            words=UP_OR_DOWN,
        ),
        timeseries(
            "Sent",
            "Port bytes sent: in a ring all rails drop together with the slowest.",
            "Bps",
            query(_of_rails("rail:railscope_transmit_bytes:rate1m"), _RAIL),
        ),
        timeseries(
            "Waiting to be sent",
            "Bytes in each rail's queue: a slow rail has some while its siblings have none.",
            "bytes",
            query(_of_rails("railscope_rail_queue_backlog_bytes"), _RAIL),
        ),
        timeseries(
            "Round trips",
            "Mean smoothed round trip of the sending connections.",
            "s",
            query(
                hosts_of_communicator(
                    'railscope_rail_tcp_round_trip_seconds{stat="mean",instance=~"$host",rail=~"$rail"}'
                ),
                _RAIL,
            ),
        ),
        timeseries(
            "Sent again",
            "Of the payload that observed connections sent, what they sent again.",
            "percentunit",
            query(_of_rails("rail:railscope_retransmitted:ratio1m"), _RAIL),
        ),
        timeseries(
            "Under way",
            "Segments that are not acknowledged yet: they stay while nothing arrives.",
            "short",
            query(_of_rails("railscope_rail_tcp_unacknowledged_segments"), _RAIL),
            whole=True,
        ),
        timeseries(
            "Errors of which any matters",
            "Increase of counters with severity page.",
            "short",
            query(
                hosts_of_communicator(
                    'increase(railscope_rail_events_total{severity="page",instance=~"$host",rail=~"$rail"}'
                    "[$__rate_interval])"
                ),
                _RAIL + " {{counter}}",
            ),
            thresholds=NEVER_FINE,
        ),
        timeseries(
            "How full",
            "Port bytes sent over the line rate.",
            "percentunit",
            query(_of_rails("rail:railscope_transmit_utilization:ratio"), _RAIL),
            largest=1,
        ),
    ]
