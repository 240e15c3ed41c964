"""What the demo's job did, as the job and as the agent counted it, and how the two are shown.

Lines of the live view, and the tables of the end; nothing here waits or starts anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import CommunicatorFacts, RailFacts, RankTimes, Snapshot
from railscope.exporters.top.words import format_amount, format_length
from railscope.testbed.job import RankReport

_MOST_SHOWN: Final = 8
"""Communicators in one view: ranks times four of them and more are a job's, and most are idle at a time."""


@dataclass(frozen=True, slots=True)
class RankCount:
    """What one rank did, as the job or as the agent counted it."""

    pattern: str
    rank: int
    pid: int
    ops: Mapping[str, Mapping[str, int]]
    """op → calls, payload_bytes."""
    communicators: Mapping[str, int]
    """commHash → operations given to it."""


@dataclass(frozen=True, slots=True)
class RailCount:
    """What one rail carried while the jobs ran."""

    device: str
    netns: str
    direction: str
    port_bytes: int
    expected_wire_bytes: int | None
    explained_ratio: float | None
    """Expected wire bytes / port bytes."""
    collective_bytes: int | None = None
    """That NCCL handed to the rail; None: not seen, or of bytes that were received."""


@dataclass(frozen=True, slots=True)
class OpCompletion:
    """Operations of one kind that the agent saw complete."""

    op: str
    operations: int
    mean_seconds: float
    """From NCCL's hand-over to its proxy threads to the last completion on the network."""
    bus_bytes_per_second: float
    """Mean, by nccl-tests' factors."""


@dataclass(frozen=True, slots=True)
class LiveTotals:
    """What one view of a job is held against in the next."""

    enqueued: Mapping[tuple[int, str], int]
    """Operations by pid and communicator."""
    times: Mapping[tuple[str, str], RankTimes]
    """By communicator and rank."""


NOTHING_YET: Final = LiveTotals({}, {})


def totals_of(snapshot: Snapshot, communicators: Sequence[CommunicatorFacts]) -> LiveTotals:
    """What stands now."""
    return LiveTotals(
        {_key(facts): facts.enqueued for facts in communicators},
        {(one.comm, one.rank): one for one in snapshot.collectives.times.by_rank},
    )


def communicator_lines(
    communicators: Sequence[CommunicatorFacts], before: LiveTotals, now: LiveTotals = NOTHING_YET
) -> Iterator[str]:
    """The communicators that did most since `before`, a second ago, and how long their operations took.

    Those that have ended come last; what there is no room for is counted.
    """

    def done(facts: CommunicatorFacts) -> int:
        return facts.enqueued - before.enqueued.get(_key(facts), 0)

    ordered = sorted(communicators, key=lambda facts: (not facts.alive, -done(facts)))
    for facts in ordered[:_MOST_SHOWN]:
        did = f"{done(facts):>7,} ops/s" if facts.alive else f"{'ended':>13}"
        ops = ", ".join(f"{op.op} {op.calls:,}" for op in facts.ops)
        mean = _mean_since((facts.identity.comm, facts.identity.rank), before, now)
        took = "" if mean is None else f", each {format_length(mean)} on the network"
        yield f"  comm {facts.identity.comm} rank {facts.identity.rank}/{facts.identity.nranks}: {did}{took}   {ops}"
    if len(ordered) > _MOST_SHOWN:
        yield f"  … and {len(ordered) - _MOST_SHOWN:,} more"


def _mean_since(key: tuple[str, str], before: LiveTotals, now: LiveTotals) -> float | None:
    """Mean seconds of the operations that completed in between; None: none is known to have."""
    after, earlier = now.times.get(key), before.times.get(key)
    if after is None:
        return None
    operations = after.operations - (earlier.operations if earlier else 0)
    return (after.seconds - (earlier.seconds if earlier else 0.0)) / operations if operations > 0 else None


def completions_of(snapshot: Snapshot) -> tuple[OpCompletion, ...]:
    """By operation; empty where no completion is seen."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0])
    for one in snapshot.collectives.times.by_size:
        total = sums[one.op]
        total[0] += one.operations
        total[1] += one.seconds
        total[2] += one.bus_bytes
    return tuple(
        OpCompletion(op, int(operations), seconds / operations, bus_bytes / seconds)
        for op, (operations, seconds, bus_bytes) in sorted(sums.items())
        if operations and seconds
    )


def completion_table(completions: Sequence[OpCompletion]) -> Iterator[str]:
    """How long operations took, as lines of text."""
    yield f"{'op':<14} {'completed':>14} {'mean time':>14} {'bus bandwidth':>16}"
    for one in completions:
        bandwidth = format_amount(one.bus_bytes_per_second, "B/s")
        yield f"{one.op:<14} {one.operations:>14,} {format_length(one.mean_seconds):>14} {bandwidth:>16}"


def count_table(did: Sequence[RankCount], seen: Sequence[RankCount]) -> Iterator[str]:
    """Calls and payload by operation, beside each other, as lines of text."""
    own, observed = _by_op(did), _by_op(seen)
    yield f"{'op':<14} {'calls (job)':>14} {'calls (agent)':>14} {'payload (job)':>16} {'payload (agent)':>16}"
    for op in sorted(own.keys() | observed.keys()):
        calls, size = own.get(op, (0, 0))
        seen_calls, seen_size = observed.get(op, (0, 0))
        yield f"{op:<14} {calls:>14,} {seen_calls:>14,} {size:>16,} {seen_size:>16,}"


def rail_line(rail: RailFacts, explained: str, window_seconds: float) -> str:
    """What a rail has sent so far, as one line; `explained`: expected wire bytes / port bytes, as it is shown.

    Bytes are since the rail was first read, the ratio is of a window of so many seconds.

    What NCCL handed over and what the port counted are read at different moments: neither is a part of the other.
    """
    handed = rail.transmit_collective_bytes
    return (
        f"  {rail.netns.rsplit('-', 1)[-1]} {rail.device}: port sent {(rail.transmit_bytes or 0) / 1e6:,.1f} MB"
        + (f", NCCL handed over {handed / 1e6:,.1f} MB" if handed is not None else "")
        + f", expected / port (over {window_seconds:g} s) {explained}"
    )


def rail_table(rails: Sequence[RailCount]) -> Iterator[str]:
    """What each rail carried, as lines of text."""
    handed = any(rail.collective_bytes is not None for rail in rails)
    names = f"{'by collectives':>16} {'expected wire':>16}" if handed else f"{'expected wire':>16}"
    yield f"{'rail':<14} {'direction':<9} {'port bytes':>16} {names} {'expected / port':>16}"
    for rail in rails:
        name = f"{rail.netns.rsplit('-', 1)[-1]} {rail.device}"
        given = f"{_number(rail.collective_bytes):>16} " if handed else ""
        expected = _number(rail.expected_wire_bytes)
        ratio = format_ratio(rail.explained_ratio)
        yield f"{name:<14} {rail.direction:<9} {rail.port_bytes:>16,} {given}{expected:>16} {ratio:>16}"


def differences(did: Sequence[RankCount], seen: Sequence[RankCount]) -> Iterator[str]:
    """Where the two counts differ, as lines of text."""
    for own, observed in zip(did, seen, strict=True):
        for op in sorted(own.ops.keys() | observed.ops.keys()):
            if own.ops.get(op) != observed.ops.get(op):
                yield (f"  {own.pattern} rank {own.rank} {op}: job {own.ops.get(op)}, agent {observed.ops.get(op)}")


def counts_are_equal(did: RankCount, seen: RankCount) -> bool:
    """Same calls and bytes of each op, and of each communicator that has a name.

    A communicator that lived shorter than the agent's reader slept may be without a name; its calls are counted all
    the same, and the loss of its name shows in `events_lost_total`.
    """
    named = {comm: calls for comm, calls in seen.communicators.items() if comm != UNKNOWN}
    return did.ops == seen.ops and named.items() <= did.communicators.items()


def _key(facts: CommunicatorFacts) -> tuple[int, str]:
    """Tells two communicators of one view apart."""
    return facts.identity.pid, facts.identity.comm


def format_ratio(ratio: float | None) -> str:
    """Three decimals."""
    return "–" if ratio is None else f"{ratio:.3f}"


def count_of_report(pattern: str, report: RankReport) -> RankCount:
    """What a rank says that it did."""
    ops = {op: {"calls": count.calls, "payload_bytes": count.payload_bytes} for op, count in report.totals().items()}
    communicators = {
        communicator.hash: sum(operation.calls for operation in communicator.operations)
        for communicator in report.communicators
        if communicator.operations
    }
    return RankCount(pattern, report.rank, report.pid, dict(sorted(ops.items())), dict(sorted(communicators.items())))


def count_of_snapshot(pattern: str, rank: int, pid: int, snapshot: Snapshot) -> RankCount:
    """What the agent saw a rank do."""
    ops: dict[str, dict[str, int]] = defaultdict(lambda: {"calls": 0, "payload_bytes": 0})
    communicators: dict[str, int] = defaultdict(int)
    for facts in snapshot.collectives.communicators:
        if facts.identity.pid != pid:
            continue
        if facts.enqueued:
            communicators[facts.identity.comm] += facts.enqueued
        for op in facts.ops:
            ops[op.op]["calls"] += op.calls
            ops[op.op]["payload_bytes"] += op.payload_bytes
    return RankCount(pattern, rank, pid, dict(sorted(ops.items())), dict(sorted(communicators.items())))


def carried_between(before: RailFacts, after: RailFacts) -> tuple[RailCount, RailCount]:
    """What a rail carried between two moments, each direction: a port has counted since long before."""

    def less(now: int | None, then: int | None) -> int | None:
        # Before a namespace's first call nothing is expected there, and nothing known of it.
        return None if now is None else now - (then or 0)

    return (
        _counted(
            after,
            "transmit",
            (after.transmit_bytes or 0) - (before.transmit_bytes or 0),
            less(after.transmit_wire_bytes, before.transmit_wire_bytes),
            less(after.transmit_collective_bytes, before.transmit_collective_bytes),
        ),
        _counted(
            after,
            "receive",
            (after.receive_bytes or 0) - (before.receive_bytes or 0),
            less(after.receive_wire_bytes, before.receive_wire_bytes),
            None,
        ),
    )


def together(one: RailCount, other: RailCount) -> RailCount:
    """What a rail carried in two stretches of time."""
    return _counted(
        one,
        one.direction,
        one.port_bytes + other.port_bytes,
        _sum(one.expected_wire_bytes, other.expected_wire_bytes),
        _sum(one.collective_bytes, other.collective_bytes),
    )


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _counted(
    rail: RailFacts | RailCount, direction: str, port_bytes: int, wire_bytes: int | None, collective_bytes: int | None
) -> RailCount:
    ratio = wire_bytes / port_bytes if wire_bytes is not None and port_bytes else None
    return RailCount(rail.device, rail.netns, direction, port_bytes, wire_bytes, ratio, collective_bytes)


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _by_op(ranks: Sequence[RankCount]) -> dict[str, tuple[int, int]]:
    """Calls and payload bytes by op."""
    totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for rank in ranks:
        for op, count in rank.ops.items():
            totals[op][0] += count["calls"]
            totals[op][1] += count["payload_bytes"]
    return {op: (calls, size) for op, (calls, size) in totals.items()}
