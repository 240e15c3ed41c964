"""Which series a node of a large fleet shows: what alerts, recording rules and `railscope diagnose` ask, and no more.

Profile `lean` (`--series.profile lean`, or `?profile=lean` in the scrape's URL) leaves out histograms, totals by data
type, ledgers of bytes and single links.  What only matters once something stands is shown once it does: positions,
completions and ages of ranks of a process that enters nothing for a while; round trips and queues while a rail has
them; errors of a rail by name once there are some (their sums are always there).  The node's stalls are always told
whole.  `railscope top`, `/communicators` and `?profile=full` show everything of one node.

Operations and their times, by which the slow rank of a communicator is found, are shown of communicators that span
hosts: those of one host it compares itself (`comm_awaited_ratio`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import Metric
from railscope.agent.facts.rank_identity import RankKey
from railscope.agent.facts.snapshot import CommunicatorFacts, RailFacts, Snapshot
from railscope.exporters.series.family import Family, LabelValues

FULL: Final = "full"
LEAN: Final = "lean"
PROFILES: Final = (FULL, LEAN)

WHOLE: Final = frozenset(
    {
        *(catalogue.BUILD_INFO, catalogue.AGENT_START_TIME, catalogue.AGENT_DARK_SECONDS, catalogue.LOOP_LATE_RECENT),
        *(catalogue.SNAPSHOT_TIMESTAMP, catalogue.PROCESSES_OBSERVED, catalogue.PROCESS_CPU),
        *(catalogue.PROCESS_RESIDENT, catalogue.EVENTS_LOST, catalogue.LIMIT_REACHED, catalogue.SERIES_DROPPED),
        *(catalogue.COMM_INFO, catalogue.COMM_ENQUEUED, catalogue.COMM_COUNTED_FROM_START, catalogue.COMM_ENDED),
        *(catalogue.COMM_STALLED, catalogue.COMM_STALL_INFO, catalogue.COMM_STALL_SECONDS, catalogue.STALLS),
        *(catalogue.COMM_STALL_COLLECTIVES, catalogue.CALL_INSIDE_SECONDS, catalogue.PROCESS_WITHOUT_COMM),
        *(catalogue.COMM_WRITING, catalogue.COMM_AWAITED, catalogue.COMM_AWAITED_SINCE, catalogue.COMM_ERRORS),
        *(
            catalogue.RAIL_LINK_TO_SIBLINGS,
            catalogue.COMM_DEGRADED,
            catalogue.RAIL_COUNTER_BY_SEVERITY,
            catalogue.RAIL_COUNTER_PINNED,
        ),
        *(catalogue.RAIL_TCP_SENT_BYTES, catalogue.RAIL_TCP_ACKNOWLEDGED_BYTES),
        *(catalogue.RAIL_TCP_SENDING, catalogue.RAIL_TCP_BUSY_SECONDS, catalogue.NODE_INFO),
        *(catalogue.RAIL_TCP_RETRANSMITTED_BYTES, catalogue.GPU_FABRIC_UNHEALTHY, catalogue.GPU_NVLINKS_UP),
        *(catalogue.RAIL_SWITCH_INFO, catalogue.TRANSFER_STALLED_SECONDS),
        *(catalogue.GPU_ECC_ERRORS, catalogue.GPU_ROW_REMAP_FAILED, catalogue.GPU_ROW_REMAP_PENDING),
        *(catalogue.GPU_RECOVERY_ACTION, catalogue.GPU_SLOWED, catalogue.GPU_PCIE_ERRORS),
        *(catalogue.RAIL_PHYSICAL_STATE, catalogue.RAIL_MODULE_ALARM, catalogue.RAIL_FEC_BLOCKS),
        *(catalogue.JOB_STEP_SECONDS, catalogue.JOB_STEP_PART_SECONDS, catalogue.JOB_TIME_SECONDS),
        *(catalogue.PCIE_LINK_RATIO, catalogue.PCIE_ERRORS, catalogue.HARDWARE_EVENT_TIMESTAMP),
    }
)
"""Metrics of which every series is shown."""
WHILE_STANDING: Final = frozenset(
    {catalogue.COMM_SEQUENCE, catalogue.COMM_COMPLETED, catalogue.COMM_INFLIGHT_SECONDS, catalogue.COMM_SIGNATURE}
)
"""Shown of ranks whose process stands."""
ACROSS_HOSTS: Final = frozenset({catalogue.COMM_OPERATIONS, catalogue.COMM_OPERATION_SECONDS})
"""Shown of communicators that span hosts."""
OF_AWAITED: Final = frozenset({catalogue.COMM_LAST_ARRIVALS, catalogue.COMM_ARRIVAL_LAG_SECONDS})
"""Shown of communicators in which the host finds a rank that the others wait for."""
NOT_OF_TWINS: Final = frozenset({catalogue.RAIL_SPEED, catalogue.RAIL_TRANSMIT_BYTES})
"""Not shown of the network device of an RDMA port, which tells the same."""
WHILE_SLOW: Final = frozenset({catalogue.RAIL_QUEUE_BACKLOG_BYTES, catalogue.RAIL_TCP_ROUND_TRIP})
"""Shown of all rails, which are compared, while one of them stands out."""
WHILE_ANY_STANDS: Final = frozenset({catalogue.RAIL_TCP_UNSENT_BYTES, catalogue.RAIL_TCP_UNACKNOWLEDGED})
"""Shown while a process of the node stands."""

STANDS_NS: Final = 10_000_000_000
"""A process that entered nothing for so long stands, or is busy elsewhere."""
_LONG_SECONDS: Final = 10.0
_BACKLOG_BYTES: Final = 65_536
_ROUND_TRIP_SECONDS: Final = 0.003
"""What the alert on slow rails takes for a queue, and for a long round trip (dashboards/alerting/rails.py)."""
_LEAST_SIZE_DIGITS: Final = 7
"""Of operations whose bandwidth is judged: in smaller ones latency is all that counts."""

Keeps = Callable[[LabelValues, int | float], bool]


def _down(_: LabelValues, value: int | float) -> bool:
    return not value


def _counted(_: LabelValues, value: int | float) -> bool:
    return bool(value)


def _is_page(labels: LabelValues, value: int | float) -> bool:
    return bool(value) and labels[4] == "page"


def _is_foreign(labels: LabelValues, value: int | float) -> bool:
    return bool(value) and labels[2:4] == ("transmit", "foreign")


def _is_broken(labels: LabelValues, value: int | float) -> bool:
    return bool(value) or (labels[1] or "").startswith("recovery")


def _is_recovery(labels: LabelValues, value: int | float) -> bool:
    return bool(value) and (labels[2] or "").startswith("recovery")


def _is_large(labels: LabelValues, _: int | float) -> bool:
    return len(labels[1] or "") >= _LEAST_SIZE_DIGITS


SOME: Final[dict[Metric, Keeps]] = {
    catalogue.COLLECTOR_SUCCESS: _down,
    catalogue.PROBE_ATTACHED: _down,
    catalogue.NVLINK_UP: _down,
    catalogue.RAIL_COUNTER: _is_page,
    catalogue.RAIL_QUEUE_DROPS: _counted,
    catalogue.GPU_NVLINK_ERRORS: _is_broken,
    catalogue.NVLINK_ERRORS: _is_recovery,
    catalogue.COLLECTIVE_COMPLETED_BUS_BYTES: _is_large,
    catalogue.COLLECTIVE_COMPLETED_SECONDS: _is_large,
}
"""Metrics of which some series are shown, by labels and value."""


class LeanSeries:
    """What of an exposition is shown in profile `lean`.  One lives as long as the agent; for one thread at a time."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[int, int]] = {}
        """By process: what its ranks had entered and completed together, and when that last rose (monotonic, ns)."""

    def select(self, families: Iterable[Family], snapshot: Snapshot) -> tuple[Family, ...]:
        """The families that are shown, without what is left out of them."""
        found = tuple(families)
        rules = self._rules(found, snapshot)
        shown = []
        for family in found:
            if family.metric in WHOLE:
                shown.append(family)
            elif (keeps := rules.get(family.metric)) is not None:
                samples = tuple(sample for sample in family.samples if keeps(*sample))
                if samples:
                    shown.append(replace(family, samples=samples))
        return tuple(shown)

    def _rules(self, families: Iterable[Family], snapshot: Snapshot) -> dict[Metric, Keeps]:
        communicators = snapshot.collectives.communicators
        standing = self._standing(communicators, snapshot.monotonic_ns)
        local = {one.identity.key for one in communicators if one.identity.local_ranks == one.identity.nranks}
        awaited = {one.comm for one in snapshot.stalls.slow}
        twins = _twins(snapshot)
        slow = _stands_out(families)

        with_tcp = {_key(one) for one in snapshot.rails if one.tcp is not None}

        def is_twin(labels: LabelValues) -> bool:
            return (labels[0], labels[1], labels[-1]) in twins

        def in_flight(labels: LabelValues, value: int | float) -> bool:
            return value >= _LONG_SECONDS or (value > 0 and labels[:2] in standing)

        def foreign(labels: LabelValues, value: int | float) -> bool:
            return _is_foreign(labels, value) and (labels[0], labels[1], labels[-1]) in with_tcp

        return {
            **SOME,
            **dict.fromkeys(WHILE_STANDING, lambda labels, _: labels[:2] in standing),
            catalogue.COMM_INFLIGHT_SECONDS: in_flight,
            **dict.fromkeys(ACROSS_HOSTS, lambda labels, _: labels[:2] not in local),
            **dict.fromkeys(OF_AWAITED, lambda labels, _: labels[0] in awaited),
            **dict.fromkeys(NOT_OF_TWINS, lambda labels, _: not is_twin(labels)),
            catalogue.RAIL_UP: lambda labels, value: not value or not is_twin(labels),
            catalogue.RAIL_BYTES_BY_ORIGIN: foreign,
            **dict.fromkeys(WHILE_SLOW, lambda _labels, _value: slow),
            **dict.fromkeys(WHILE_ANY_STANDS, lambda _labels, _value: bool(standing)),
        }

    def _standing(self, communicators: Iterable[CommunicatorFacts], now_ns: int) -> Collection[RankKey]:
        """Ranks of processes none of whose communicators was entered, and none of whose operations ended, lately."""
        ranks: dict[int, list[RankKey]] = {}
        done: dict[int, int] = {}
        for one in communicators:
            pid = one.identity.pid
            ranks.setdefault(pid, []).append(one.identity.key)
            done[pid] = done.get(pid, 0) + one.enqueued + (one.completed or 0) + one.replayed
        moved = {}
        for pid, total in done.items():
            before, since_ns = self._moved.get(pid, (None, now_ns))
            moved[pid] = (total, since_ns if before == total else now_ns)
        self._moved = moved
        standing = [pid for pid, (_, since_ns) in moved.items() if now_ns - since_ns >= STANDS_NS]
        return frozenset(key for pid in standing for key in ranks[pid])


def _twins(snapshot: Snapshot) -> Collection[tuple[str, str, str | None]]:
    """Network devices of RDMA ports."""
    of_ports = {one.rail for one in snapshot.rails if one.port}
    return {_key(one) for one in snapshot.rails if not one.port and one.rail in of_ports}


def _key(rail: RailFacts) -> tuple[str, str, str | None]:
    """Rail, device and network namespace, as series have them."""
    return rail.rail, rail.device, rail.netns or None


def _stands_out(families: Iterable[Family]) -> bool:
    """Whether a rail of this node has a queue or long round trips."""
    for family in families:
        if family.metric is catalogue.RAIL_QUEUE_BACKLOG_BYTES:
            if any(value > _BACKLOG_BYTES for _, value in family.samples):
                return True
        elif family.metric is catalogue.RAIL_TCP_ROUND_TRIP and any(
            value > _ROUND_TRIP_SECONDS for labels, value in family.samples if labels[2] == "mean"
        ):
            return True
    return False
