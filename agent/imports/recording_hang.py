"""What agents' recordings tell of a job that hangs: the stalls that they were made for, and how far each rank came."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from railscope.agent.cluster.fleet.dumps import Dumps
from railscope.agent.cluster.fleet.facts import Rank, Stall, StuckTransfer
from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.cluster.verdict.quantities import format_duration, format_rank_numbers
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.label_numbers import UNKNOWN, parse_number
from railscope.agent.facts.rank_identity import rank_identity_from_labels
from railscope.agent.imports.facts import MOST_RANKS, Problems, printable
from railscope.agent.imports.sources import Source
from railscope.agent.recording.file import RecordingError, read_recording
from railscope.agent.recording.recording import RecordedStall, Recording
from railscope.probes.libraries.communication import CommunicationLibrary

_LONG_SECONDS: Final = 10.0
"""An operation that is under way for longer, and that the agent calls no stall, leaves it open whether there is one."""
_MOST_NOTES: Final = 8
_LIBRARIES: Final = frozenset(one.value for one in CommunicationLibrary if one is not CommunicationLibrary.NCCL)


def read_hang_recordings(sources: Sequence[Source], problems: Problems) -> Dumps:
    """What recordings of the hosts of a job tell together; one that cannot be read is left out, and counted."""
    recordings = []
    for source in sources:
        if source.path is None:
            problems.count_skipped(source.name, 0, "a recording inside an archive: unpack it first")
            continue
        try:
            recordings.append(read_recording(source.path))
        except RecordingError as error:
            problems.count_skipped(source.name, 0, str(error))
    ranks = [rank for recording in recordings for rank in _ranks(recording)]
    notes: list[str] = []
    transfers: list[StuckTransfer] = []
    for recording in recordings:
        for stall in recording.stalls:
            if (stuck := _stuck_transfer(recording.host, stall)) is not None:
                transfers.append(stuck)
                continue
            notes += [f"{recording.host}: {line}" for line in stall.evidence]
            if stall.comm in ("", UNKNOWN):
                ranks.append(nameless_rank(recording.host, stall.pid, _stall(stall), stall.seconds))
    blind = sorted({recording.host for recording in recordings if not recording.completion_seen()})
    return Dumps(
        at=max((recording.realtime_ns(recording.ended_ns) for recording in recordings), default=0) / 1e9,
        ranks=tuple(ranks),
        told=(format_count(len(recordings), "recording"),),
        lacking=tuple(ranks_without_recording(ranks)),
        open=(
            *(f"the recording of {host} does not tell what completed" for host in blind),
            *_long_waits(ranks),
        ),
        tells_completion=not blind,
        notes=tuple(dict.fromkeys(notes))[:_MOST_NOTES],
        stuck_transfers=tuple(sorted(transfers, key=lambda one: -one.seconds)),
    )


def _ranks(recording: Recording) -> Iterable[Rank]:
    numbered = recording.numbered_from_start()
    stalls = {(stall.comm, stall.rank): stall for stall in recording.stalls}
    end = recording.realtime_ns(recording.ended_ns) / 1e9
    for one in recording.communicators:
        stall = stalls.get((one.identity.comm, one.identity.rank))
        if not one.alive and stall is None:
            continue
        yield Rank(
            one.identity,
            host=recording.host,
            enqueued=one.enqueued,
            completed=one.completed,
            inflight_seconds=one.inflight_seconds,
            position=Position(one.enqueued) if numbered.get(one.instance) else None,
            stall=None if stall is None else _stall(stall),
            stalled_seconds=None if stall is None else stall.seconds,
            scraped=end,
        )


def make_stuck_transfer(
    *,
    host: str,
    op: str,
    pid: int,
    peer: str,
    cause: str,
    blamed_pid: int,
    seconds: float,
    evidence: Sequence[str],
) -> StuckTransfer | None:
    """A recorded stall of no communicator as a transfer, whose `op` is as in `nixl Write`; None: it is none.

    Args:
        pid, blamed_pid: 0 where a recording does not tell.
    """
    library, _, operation = op.partition(" ")
    if library not in _LIBRARIES or not operation:
        return None
    return StuckTransfer(
        host=host,
        library=library,
        op=printable(operation),
        pid=str(pid or ""),
        peer=printable(peer),
        cause=cause,
        blamed_pid=str(blamed_pid or ""),
        seconds=seconds,
        evidence=tuple(printable(line) for line in evidence[:_MOST_NOTES]),
    )


def _stuck_transfer(host: str, stall: RecordedStall) -> StuckTransfer | None:
    if stall.comm not in ("", UNKNOWN):
        return None
    return make_stuck_transfer(
        host=host,
        op=stall.op,
        pid=stall.pid,
        peer=stall.peer,
        cause=stall.cause,
        blamed_pid=stall.blamed_pid,
        seconds=stall.seconds,
        evidence=stall.evidence,
    )


def nameless_rank(host: str, pid: int, stall: Stall, seconds: float) -> Rank:
    """A process that stalls in a call, or in work, of no communicator that its host knows; `pid` 0: not known."""
    known = {"pid": str(pid)} if pid else {}
    return Rank(
        rank_identity_from_labels(UNKNOWN, UNKNOWN, known, ()),
        host=host,
        inflight_seconds=seconds,
        stall=stall,
        stalled_seconds=seconds,
    )


def _stall(stall: RecordedStall) -> Stall:
    return Stall(stall.op, stall.cause, stall.strength, stall.blamed_rank, stall.rail, stall.device)


def ranks_without_recording(ranks: Iterable[Rank]) -> Iterable[str]:
    """In words, the ranks of these communicators of which nothing was recorded."""
    by_comm: defaultdict[str, set[str]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for rank in ranks:
        by_comm[rank.comm].add(rank.rank)
        size = parse_number(rank.identity.nranks)
        if size is not None and size <= MOST_RANKS:
            sizes[rank.comm] = size
    left = MOST_RANKS
    for comm, size in sorted(sizes.items()):
        if size > left:
            # A size is what the process said: a thousand communicators of a million ranks would take hours.
            yield f"which ranks of {comm} have no recording is not known: its communicators name too many"
            return
        left -= size
        if lost := {str(number) for number in range(size)} - by_comm[comm]:
            yield f"no recording of {format_rank_numbers(lost)} of {comm}"


def _long_waits(ranks: Iterable[Rank]) -> Iterable[str]:
    for rank in ranks:
        if rank.stall is None and (rank.inflight_seconds or 0.0) >= _LONG_SECONDS:
            yield (
                f"an operation of rank {rank.rank} of {rank.comm} on {rank.host} is under way for "
                f"{format_duration(rank.inflight_seconds or 0.0)}, which its agent does not call a stall"
            )
