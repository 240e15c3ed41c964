"""Summarises a recording in a few lines: for `railscope record --describe`.

Calls by communicator and op, what completed of them and how long that took, the rails and their links, and what is
missing.  The full analyses read the recording itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np

from railscope.agent.facts.counted import format_count
from railscope.agent.facts.label_numbers import UNKNOWN, parse_number
from railscope.agent.facts.stall import describe_operation
from railscope.agent.recording.recording import NOT_SEEN, RecordedCommunicator, Recording
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import op_name
from railscope.probes.printable import printable

_MOST_ROWS: Final = 20


@dataclass(frozen=True, slots=True)
class CallsSummary:
    """Calls of one op on one rank's end of a communicator."""

    comm: str
    rank: int | None
    """None: not known."""
    nranks: int | None
    pid: int
    op: str
    calls: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class CompletionsSummary:
    """Operations of one op that completed on one rank's end of a communicator."""

    comm: str
    rank: int | None
    nranks: int | None
    pid: int
    op: str
    operations: int
    mean_seconds: float
    longest_seconds: float
    """From hand-over, or from the completion before where that came later, to the last network completion."""


@dataclass(frozen=True, slots=True)
class RailSummary:
    """What one device carried in the window."""

    rail: str
    device: str
    netns: str
    """Empty: the agent's own."""
    samples: int
    transmit_bytes: int
    receive_bytes: int
    link_changes: int
    """How often its link was found to have changed within the window."""


@dataclass(frozen=True, slots=True)
class RecordingSummary:
    host: str
    reason: str
    railscope: str
    simulated: bool
    began_realtime_ns: int
    ended_realtime_ns: int
    realtime_error_ns: int | None
    """How far these times may be off; None: not known."""
    calls: tuple[CallsSummary, ...]
    completions: tuple[CompletionsSummary, ...]
    open_operations: int | None
    """Handed over and not complete at the end; None: completion was not observed."""
    rails: tuple[RailSummary, ...]
    lost: dict[str, int]
    """By kind: the kernel had no room for them."""
    overwritten_seconds: dict[str, float]
    """By kind: so much of the window's beginning is missing, since memory was short; only kinds with any."""
    stalls: tuple[str, ...]
    marks: tuple[str, ...]


def summarise(recording: Recording) -> RecordingSummary:
    """Count what a flight recording holds."""
    communicators = {one.instance: one for one in recording.communicators}
    return RecordingSummary(
        host=recording.host,
        reason=recording.reason,
        railscope=recording.railscope,
        simulated=recording.simulated,
        began_realtime_ns=recording.realtime_ns(recording.began_ns),
        ended_realtime_ns=recording.realtime_ns(recording.ended_ns),
        realtime_error_ns=recording.realtime_error_ns(),
        calls=tuple(_calls(recording.calls, communicators)),
        completions=tuple(_completions(recording.completions, communicators)),
        open_operations=len(recording.open_operations) if recording.completion_seen() else None,
        rails=tuple(_rails(recording)),
        lost=recording.lost_events(),
        overwritten_seconds=recording.overwritten_seconds(),
        stalls=tuple(
            f"{stall.cause}: {describe_operation(stall.op, stall.comm, stall.rank, stall.pid, stall.peer)}, since "
            f"{stall.seconds:.1f} s"
            for stall in recording.stalls
        ),
        marks=tuple(f"{_time(recording.realtime_ns(mark.time_ns))} {mark.text}" for mark in recording.marks),
    )


def describe(summary: RecordingSummary) -> Iterator[str]:
    """The summary of a flight recording as lines for people; names in it hold nothing that a terminal obeys."""
    return map(printable, _lines(summary))


def describe_overwritten(seconds: Mapping[str, float]) -> Iterator[str]:
    """What a flight recording lacks of its window's beginning, by kind of event in seconds, a sentence a kind."""
    for kind, missing in seconds.items():
        yield f"the first {missing:.1f} s of {kind} were overwritten"


def _lines(summary: RecordingSummary) -> Iterator[str]:
    seconds = (summary.ended_realtime_ns - summary.began_realtime_ns) / 1e9
    error = summary.realtime_error_ns
    exact = "clock error unknown" if error is None else f"clock right within {error / 1e6:.3g} ms"
    simulated = ", SIMULATED" if summary.simulated else ""
    yield (
        f"{seconds:.1f} s of {summary.host} until {_time(summary.ended_realtime_ns)} ({exact}), "
        f"reason: {summary.reason}{simulated}"
    )
    for stall in summary.stalls:
        yield f"stall: {stall}"
    yield ""
    yield f"{'communicator':<18} {'rank':>9} {'pid':>8}  {'op':<14} {'calls':>10} {'payload bytes':>18}"
    largest = sorted(summary.calls, key=lambda one: one.calls, reverse=True)
    for calls in largest[:_MOST_ROWS]:
        rank = _rank_text(calls.rank, calls.nranks)
        yield f"{calls.comm:<18} {rank:>9} {calls.pid:>8}  {calls.op:<14} {calls.calls:>10,} {calls.payload_bytes:>18,}"
    if not summary.calls:
        yield "no calls"
    if len(largest) > _MOST_ROWS:
        rest = sum(one.calls for one in largest[_MOST_ROWS:])
        kinds = format_count(len(largest) - _MOST_ROWS, "more kind")
        yield f"and {kinds} with {format_count(rest, 'call')}; --json shows all"
    if summary.completions:
        yield ""
        yield (
            f"{'communicator':<18} {'rank':>9} {'pid':>8}  {'op':<14} {'completed':>10} "
            f"{'mean ms':>10} {'longest ms':>11}"
        )
        for one in sorted(summary.completions, key=lambda one: one.longest_seconds, reverse=True)[:_MOST_ROWS]:
            rank = _rank_text(one.rank, one.nranks)
            yield (
                f"{one.comm:<18} {rank:>9} {one.pid:>8}  {one.op:<14} {one.operations:>10,} "
                f"{one.mean_seconds * 1e3:>10.3f} {one.longest_seconds * 1e3:>11.3f}"
            )
    known = summary.open_operations is not None
    unfinished = summary.open_operations if known else f"not known: {NOT_SEEN}"
    yield f"operations handed over and not complete at the end: {unfinished}"
    if summary.rails:
        yield ""
        yield (
            f"{'rail':>4} {'device':<24} {'sent bytes':>18} {'received bytes':>18} {'samples':>9} {'link changes':>13}"
        )
        for rail in summary.rails:
            device = f"{rail.device} {rail.netns}"
            yield (
                f"{rail.rail or '-':>4} {device:<24} {rail.transmit_bytes:>18,} {rail.receive_bytes:>18,} "
                f"{rail.samples:>9,} {rail.link_changes:>13}"
            )
    yield from summary.marks
    lost = ", ".join(f"{count:,} {kind}" for kind, count in summary.lost.items() if count)
    yield ""
    yield f"lost by the kernel: {lost or 'nothing'}"
    for overwritten in describe_overwritten(summary.overwritten_seconds):
        yield f"{overwritten}: raise recordings.memory (--memory of railscope record) to hold more"


def _calls(calls: Records, communicators: dict[int, RecordedCommunicator]) -> Iterator[CallsSummary]:
    kinds, which = _groups(calls)
    counts = np.bincount(which, minlength=len(kinds)).tolist()
    payload = np.zeros(len(kinds), np.uint64)
    np.add.at(payload, which, calls["payload_bytes"])
    for at, (tgid, instance, op) in enumerate(kinds):
        comm, rank, nranks = _identity(communicators.get(instance))
        yield CallsSummary(comm, rank, nranks, tgid, op_name(op), counts[at], int(payload[at]))


def _completions(events: Records, communicators: dict[int, RecordedCommunicator]) -> Iterator[CompletionsSummary]:
    kinds, which = _groups(events)
    for at, (tgid, instance, op) in enumerate(kinds):
        durations = events["duration_ns"][which == at]
        comm, rank, nranks = _identity(communicators.get(instance))
        yield CompletionsSummary(
            comm,
            rank,
            nranks,
            tgid,
            op_name(op),
            len(durations),
            float(durations.mean()) / 1e9,
            int(durations.max()) / 1e9,
        )


def _groups(events: Records) -> tuple[list[tuple[int, int, int]], Records]:
    """(tgid, instance, op) that occur, and which of them each event has."""
    key = np.empty(len(events), [("tgid", "<u4"), ("instance", "<u4"), ("op", "<u4")])
    for name in ("tgid", "instance", "op"):
        key[name] = events[name]
    kinds, which = np.unique(key, return_inverse=True)
    return kinds.tolist(), which


def _identity(communicator: RecordedCommunicator | None) -> tuple[str, int | None, int | None]:
    if communicator is None:
        return UNKNOWN, None, None
    identity = communicator.identity
    return identity.comm, parse_number(identity.rank), parse_number(identity.nranks)


def _rank_text(rank: int | None, nranks: int | None) -> str:
    """`0/2`."""
    return "/".join(UNKNOWN if number is None else str(number) for number in (rank, nranks))


def _rails(recording: Recording) -> Iterable[RailSummary]:
    for rail in recording.rails:
        samples = recording.rail_samples[recording.rail_samples["device"] == rail.device]
        links = recording.link_events[recording.link_events["device"] == rail.device]
        yield RailSummary(
            rail=rail.rail,
            device=rail.name,
            netns=rail.netns,
            samples=len(samples),
            transmit_bytes=_increase(samples["transmit_bytes"]),
            receive_bytes=_increase(samples["receive_bytes"]),
            link_changes=max(0, len(links) - 1),
        )


def _increase(counted: Records) -> int:
    """How far a counter rose; where it fell, its device began anew and nothing is added."""
    if not len(counted):
        return 0
    later, earlier = counted[1:], counted[:-1]
    return int(np.where(later > earlier, later - earlier, np.uint64(0)).sum())


def _time(realtime_ns: int) -> str:
    moment = datetime.fromtimestamp(realtime_ns / 1e9, UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{moment.microsecond // 1000:03d} UTC"
