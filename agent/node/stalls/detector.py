"""Decides which operations are stalls.

An operation stalls when it is in flight, its process moves no bytes, and it takes longer than it may: `after` (30 s by
default) for a mere wait; `floor` (2 s) where something on this host is plainly broken, and at once where the kernel
told of it and others wait because of it (agent/node/stalls/early_looks.py); `factor` (8) times the longest
of its own history, and no less than `floor`, where this host has a mere suspect.  It also stalls, though
bytes move, when operations of its kind and size have taken 1.75 times as long as usual for some seconds and a rail is
named that differs from its siblings, or its own threads wait for a processor, or its process is stopped again and
again.  Where an operation takes so long that none completes, its own age stands for that: it is `factor` times the
longest of its history in flight, and no less than `floor`.

What is never called a stall: a job that makes no calls and a computation between calls (nothing is in flight), a
checkpoint (the rank of this host that is waited for writes to storage, or did so within `after`; hosts that wait for
one elsewhere cannot know, but `railscope diagnose` and the alerts learn it from agent/node/stalls/checkpoints.py),
a slow first operation (there is no history to hold it against, and `after` is long), a ring that is slow on all rails
alike, a rail that is shared with others who fill it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from railscope.agent.facts.causes import HELD, RAIL_CAUSES, Cause, is_well_founded
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.stall import Diagnosis, InFlight, Stall
from railscope.agent.node.stalls.baseline import RECENT_NS
from railscope.agent.node.stalls.early_looks import SETTLED_NS
from railscope.agent.node.stalls.evidence import Evidence, RailSigns, RankFacts
from railscope.agent.node.stalls.root_cause import find_root_cause
from railscope.probes.processes.owner import ProcessOwner

_SLOW_CAUSES: Final = frozenset(RAIL_CAUSES)
_BROKEN: Final = frozenset(
    {
        Cause.PROCESS_GONE,
        *HELD,
        Cause.PEER_LEFT,
        Cause.RAIL_DOWN,
        Cause.RANKS_DISAGREE,
        Cause.RAIL_MTU,
        Cause.RAIL_FILTERED,
    }
)
_LOOKS_IN_A_ROW: Final = 8
"""Two seconds: queues are read once a second."""
_HELD_LOOKS: Final = 16
"""Four seconds, in half of which a process is found stopped: that alone makes operations take twice as long, and a
debugger that looks at it holds it for less."""
_STARVED_NS: Final = 500_000_000
_MOVING_BYTES_PER_SECOND: Final = 16 << 10
"""Less than this is no operation that moves: connections have a keep-alive, a window is asked for."""
_BUSY_PORT_BYTES_PER_SECOND: Final = 16 << 20
_SENT_BY_ALL: Final = frozenset({"AllReduce", "AllGather", "ReduceScatter", "AlltoAll"})
"""Operations in which every rank sends as long as they go on."""
_PORT_SPEAKS_FACTOR: Final = 4
"""Times the limit of a mere wait: so long does traffic of a port pass for the operation's own."""
_MOSTLY_FOREIGN: Final = 0.5
"""Share of what a rail carries, from which on it works for others."""
_ORDER: Final = list(Cause)
_LEAST_WATCHED_NS: Final = 450_000_000
"""Before that it is unknown whether a process computes, or moves bytes."""
_JOB_GONE_NS: Final = 60_000_000_000
"""As long as a stall is shown of a communicator without ranks: a rare scrape must see it, too."""
_LEAST_HISTORY: Final = 20
"""Operations, before one is called slow for its kind: the first few of a job are not like the rest."""


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Times in ns."""

    after_ns: int = 30_000_000_000
    """A mere wait; nothing takes longer without being called a stall."""
    factor: float = 8.0
    """Times its own history, if the culprit is on this host."""
    floor_ns: int = 2_000_000_000
    """And never less than this."""

    def suspicion_ns(self) -> int:
        """The age from which on an operation is inspected."""
        return min(self.floor_ns, self.after_ns) // 2

    def limit_ns(self, flight: InFlight, diagnosis: Diagnosis) -> float:
        """How long this operation may take."""
        if not diagnosis.culprit:
            return self.after_ns
        if diagnosis.cause in _BROKEN:
            return min(self.after_ns, self.floor_ns)
        history = flight.history
        if history is None or history.operations < _LEAST_HISTORY:
            return self.after_ns
        return min(self.after_ns, max(self.floor_ns, self.factor * history.longest_ns))


@dataclass(frozen=True, slots=True)
class Changes:
    """What one look brought."""

    begun: tuple[Stall, ...]
    ended: tuple[Stall, ...]


class Detector:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        limits: StallLimits,
        realtime_offset_ns: Callable[[], int],
        ended: Callable[[str], Collection[str]] = lambda _comm: (),
        owner: Callable[[int], ProcessOwner | None] = lambda _pid: None,
    ) -> None:
        """`realtime_offset_ns`: the time of day less CLOCK_MONOTONIC, asked once for each stall.

        `ended`: ranks of this host whose end of a communicator has ended, by its name.
        `owner`: whose a process is, by its pid; asked once for each stall.
        """
        self.limits = limits
        self._realtime_offset_ns = realtime_offset_ns
        self._ended = ended
        self._owner = owner
        self._current: dict[int, Stall] = {}
        self._excused: dict[int, tuple[int, int]] = {}
        """By instance: since when the operation in flight was, and when it was last excused."""
        self._insisted: dict[int, tuple[Cause, str, int]] = {}
        """By instance: what its slowness is put down to, and in how many looks in a row."""
        self._dragged: dict[int, tuple[int, int]] = {}
        """By instance that stalls because an operation drags on: when it did last, and how many calls were made."""
        self._held: dict[int, deque[bool]] = {}
        """By instance, while it is slow: whether its process was found stopped in the last looks."""
        self._went_on_ns: dict[int, int] = {}
        """By instance: when its last stall ended in which an operation did not complete."""
        self._gone: dict[int, int] = {}
        """Those of them whose process ended, and when: no process is left that could report their end."""
        self._gone_by_comm: dict[str, dict[int, None]] = {}
        """The same, by the communicator's name, in the order in which they ended."""

    @property
    def current(self) -> tuple[Stall, ...]:
        return tuple(self._current.values())

    def evaluate(
        self,
        now_ns: int,
        ranks: Iterable[RankFacts],
        evidence_of: Callable[[RankFacts], Evidence],
        *,
        others: Iterable[int] = (),
    ) -> Changes:
        """Judge living ranks; `evidence_of` is asked about suspects only.

        `others`: instances of ranks that live and that nothing can be wrong with.
        """
        begun: list[Stall] = []
        ended: list[Stall] = []
        seen = set(others)
        for rank in ranks:
            seen.add(rank.instance)
            stall = self._judge(now_ns, rank, evidence_of)
            before = self._current.get(rank.instance)
            another = before is not None and (stall is None or stall.since_ns != before.since_ns)
            if before is not None and another:
                ended.append(self._end(before, now_ns))
            if stall is not None:
                self._current[rank.instance] = stall
                if before is None or another:
                    begun.append(stall)
        self._excused = {instance: one for instance, one in self._excused.items() if instance in seen}
        self._insisted = {instance: one for instance, one in self._insisted.items() if instance in seen}
        self._held = {instance: one for instance, one in self._held.items() if instance in seen}
        self._dragged = {instance: one for instance, one in self._dragged.items() if instance in seen}
        self._went_on_ns = {instance: one for instance, one in self._went_on_ns.items() if instance in seen}
        for instance in self._current.keys() - seen - self._gone.keys():
            ended.append(self._end(self._current[instance], now_ns))
        ended += self._of_nobody(now_ns)
        return Changes(tuple(begun), tuple(ended))

    def process_gone(self, now_ns: int, rank: RankFacts, evidence: str) -> Stall | None:
        """A rank's process ended while others count on it; None: it was stalled already, for whatever reason."""
        before = self._current.get(rank.instance)
        if rank.instance in self._gone:
            return None
        flight = rank.in_flight or InFlight("unknown", None, now_ns, "strong", "its communicator was not destroyed")
        diagnosis = Diagnosis(Cause.PROCESS_GONE, (evidence,), culprit=True, blamed_rank=rank.rank)
        first = self.stall_of_first_gone(rank.comm)
        if first is not None:
            sentence = f"rank {first.rank}, process {first.pid}, had ended before"
            diagnosis = replace(first.diagnosis, evidence=(evidence, sentence), culprit=False)
        if before is not None:
            stall = replace(_put_down_to(before, diagnosis), flight_strength="strong", slow=False)
        else:
            stall = self._stall(rank, replace(flight, strength="strong"), diagnosis, now_ns)
        self._current[rank.instance] = stall
        self._gone[rank.instance] = now_ns
        self._gone_by_comm.setdefault(rank.comm, {})[rank.instance] = None
        return stall if before is None else None

    @property
    def broken(self) -> frozenset[str]:
        """Names of communicators that lost a rank whose process has ended."""
        return frozenset(self._gone_by_comm) - {UNKNOWN}

    def stall_of_first_gone(self, comm: str) -> Stall | None:
        """The stall of the rank of a communicator whose process ended first; None: none has."""
        instances = self._gone_by_comm.get(comm, ()) if comm != UNKNOWN else ()
        return next((self._current[instance] for instance in instances), None)

    def _of_nobody(self, now_ns: int) -> list[Stall]:
        """End stalls for which no rank waits: the ranks are gone or have left, and the stall was shown long enough."""
        stalls = {instance: self._current[instance] for instance in self._gone}
        ranks: defaultdict[str, set[str]] = defaultdict(set)
        last_ns: dict[str, int] = {}
        for instance, stall in stalls.items():
            ranks[stall.comm].add(stall.rank)
            last_ns[stall.comm] = max(last_ns.get(stall.comm, 0), self._gone[instance])
        over = {comm for comm, gone_ns in last_ns.items() if now_ns - gone_ns >= _JOB_GONE_NS}
        left = {comm: str(len(ranks[comm].union(self._ended(comm)))) for comm in over}
        return [self._end(stall, now_ns) for stall in stalls.values() if stall.nranks == left.get(stall.comm)]

    def forget(self, now_ns: int, instances: Iterable[int]) -> tuple[Stall, ...]:
        """Nobody can ask about these communicators any more; returns the stalls that end with them."""
        return tuple(self._end(self._current[one], now_ns) for one in instances if one in self._current)

    def _late(self, now_ns: int, rank: RankFacts, flight: InFlight, diagnosis: Diagnosis) -> bool:
        """Whether an operation takes longer than it may."""
        if diagnosis.excused:
            if diagnosis.writes:
                self._excused[rank.instance] = flight.since_ns, now_ns
            return False
        if diagnosis.at_once and rank.event_ns is not None:
            # The next operation may begin a moment after the event, and stand because of it too.
            return now_ns - rank.event_ns >= SETTLED_NS and now_ns - flight.since_ns >= SETTLED_NS // 2
        limit_ns = self.limits.limit_ns(flight, diagnosis)
        since_ns, excused_ns = self._excused.get(rank.instance, (0, 0))
        if since_ns == flight.since_ns and not (diagnosis.culprit and diagnosis.cause in _BROKEN):
            # Who writes pauses now and then.
            return now_ns - excused_ns >= self.limits.after_ns
        return now_ns - flight.since_ns >= limit_ns

    def _held_often(self, rank: RankFacts, diagnosis: Diagnosis) -> bool:
        """Whether a process that runs now and then was found stopped in half of the looks since operations are slow."""
        if rank.slow is None:
            return False
        looks = self._held.setdefault(rank.instance, deque(maxlen=_HELD_LOOKS))
        looks.append(diagnosis.cause in HELD)
        return looks[-1] and looks.count(True) >= _HELD_LOOKS // 2

    def _insists(self, instance: int, diagnosis: Diagnosis) -> bool:
        """Whether consecutive evaluations found the same reason for slowness: one full queue proves nothing.

        What is plainly broken needs no more looks, and who is stopped was found so in many already.
        """
        cause, device, looks = self._insisted.get(instance, (diagnosis.cause, diagnosis.device, 0))
        looks = looks + 1 if (cause, device) == (diagnosis.cause, diagnosis.device) else 1
        self._insisted[instance] = diagnosis.cause, diagnosis.device, looks
        return diagnosis.cause in _BROKEN or looks >= _LOOKS_IN_A_ROW

    def _end(self, stall: Stall, now_ns: int) -> Stall:
        self._insisted.pop(stall.instance, None)
        self._dragged.pop(stall.instance, None)
        if not stall.slow:
            self._went_on_ns[stall.instance] = now_ns
        del self._current[stall.instance]
        if self._gone.pop(stall.instance, None) is not None:
            gone = self._gone_by_comm[stall.comm]
            del gone[stall.instance]
            if not gone:
                del self._gone_by_comm[stall.comm]
        return replace(stall, ended_ns=now_ns)

    def _judge(self, now_ns: int, rank: RankFacts, evidence_of: Callable[[RankFacts], Evidence]) -> Stall | None:
        """The stall of a communicator now; None: it has none."""
        before = self._current.get(rank.instance)
        flight = rank.in_flight
        same = before is not None and flight is not None and before.since_ns == flight.since_ns
        told = rank.event_ns is not None or (same and before is not None and not before.slow)
        old = flight is not None and (told or now_ns - flight.since_ns >= self.limits.suspicion_ns())
        if rank.slow is None:
            self._held.pop(rank.instance, None)
            if not old:
                return before if before is not None and before.slow and self._drags_on(now_ns, rank) else None
        evidence = evidence_of(rank)
        diagnosis = find_root_cause(rank, evidence, now_ns)
        held = self._held_often(rank, diagnosis)
        if same and before is not None and before.flight_strength == "strong" and rank.completed == rank.enqueued:
            same = False  # it was seen to complete: what is inferred now is another one
        at_once = diagnosis.at_once and rank.event_ns is not None
        # What moved since the event is what was under way.
        if old and flight is not None and (at_once or not self._moves(now_ns, flight, diagnosis, evidence)):
            judged = diagnosis.cause in _BROKEN or evidence.process.window_ns >= _LEAST_WATCHED_NS
            if same or (judged and self._late(now_ns, rank, flight, diagnosis)):
                return self._continued(before if same else None, rank, flight, diagnosis, now_ns)
        drags = rank.slow is None and old and flight is not None and _drags(flight, evidence, diagnosis)
        slows = drags or _slows(rank, evidence, diagnosis) or held
        if before is not None and before.slow and (drags or rank.slow is not None or self._drags_on(now_ns, rank)):
            if drags:
                self._dragged[rank.instance] = now_ns, rank.enqueued
            # The signs come and go within an operation; that operations are slow does not.
            return self._slow_continued(before, rank, diagnosis, now_ns) if slows else before
        # The mean of the last few seconds holds the operation that was stalled, which was told of.
        went_on_ns = self._went_on_ns.get(rank.instance)
        told = went_on_ns is not None and now_ns - went_on_ns < RECENT_NS
        insists = slows and self._insists(rank.instance, diagnosis)
        if drags and flight is not None and now_ns - flight.since_ns < self.limits.limit_ns(flight, diagnosis):
            insists = False
        if insists and not told:
            if drags:
                self._dragged[rank.instance] = now_ns, rank.enqueued
            found = self._stall(rank, _slow_flight(rank, now_ns), _with_slowness(diagnosis, rank, now_ns), now_ns)
            return replace(found, slow=True)
        if not slows:
            self._insisted.pop(rank.instance, None)
        # Bytes move again, but the operation that was stalled is not through yet.
        return before if same else None

    def _drags_on(self, now_ns: int, rank: RankFacts) -> bool:
        """Whether an operation dragged on a moment ago, and none of those since has shown that they are fast again.

        At counts the signs that one is in flight come and go, and between two operations there are none.
        """
        dragged_ns, enqueued = self._dragged.get(rank.instance, (now_ns - RECENT_NS, 0))
        return now_ns - dragged_ns < RECENT_NS and rank.enqueued - enqueued < _LEAST_HISTORY

    def _slow_continued(self, before: Stall, rank: RankFacts, diagnosis: Diagnosis, now_ns: int) -> Stall:
        """A stall of slow operations as it is now: another rail is blamed when that is found as often as the first."""
        insists = self._insists(rank.instance, diagnosis)
        of_rails = {diagnosis.cause, before.diagnosis.cause} <= _SLOW_CAUSES
        if not of_rails or diagnosis.device == before.diagnosis.device:
            return self._continued(before, rank, _slow_flight(rank, now_ns), diagnosis, now_ns)
        return replace(before, diagnosis=diagnosis) if insists else before

    def _moves(self, now_ns: int, flight: InFlight, diagnosis: Diagnosis, evidence: Evidence) -> bool:
        """Whether the process moves bytes, by TCP or, where it does not use that, by what else tells."""
        process = evidence.process
        if not process.window_ns:
            return False
        least_bytes = _MOVING_BYTES_PER_SECOND * process.window_ns / 1_000_000_000
        if (process.moved_bytes or 0) > least_bytes or evidence.sends:
            return True
        # A port's bytes may be another job's, or storage's: they say nothing against what was seen, and not for ever.
        if evidence.sends is False and flight.op in _SENT_BY_ALL:
            return False
        if diagnosis.culprit and (diagnosis.cause in _BROKEN or diagnosis.cause is Cause.RANK_BEHIND):
            return False
        if now_ns - flight.since_ns >= _PORT_SPEAKS_FACTOR * self.limits.after_ns:
            return False
        return any(not rail.connections and _is_busy(rail) for rail in evidence.rails)

    def _continued(
        self, before: Stall | None, rank: RankFacts, flight: InFlight, diagnosis: Diagnosis, now_ns: int
    ) -> Stall:
        """The stall as it is now: what was found to be its cause stays until something better founded is."""
        if before is None:
            return self._stall(rank, flight, diagnosis, now_ns)
        better = _ORDER.index(diagnosis.cause) < _ORDER.index(before.diagnosis.cause)
        same = (diagnosis.cause, diagnosis.device, diagnosis.blamed_rank) == (
            before.diagnosis.cause,
            before.diagnosis.device,
            before.diagnosis.blamed_rank,
        )
        if same and diagnosis.either_end and not before.diagnosis.either_end:
            return before  # the queue that told which end it is comes and goes
        return _put_down_to(before, diagnosis) if better or same else before

    def _stall(self, rank: RankFacts, flight: InFlight, diagnosis: Diagnosis, now_ns: int) -> Stall:
        return Stall(
            instance=rank.instance,
            comm=rank.comm,
            rank=rank.name,
            nranks="unknown" if rank.nranks is None else str(rank.nranks),
            pid=rank.pid,
            op=flight.op,
            payload_bytes=flight.payload_bytes,
            since_ns=flight.since_ns,
            flagged_ns=now_ns,
            realtime_offset_ns=self._realtime_offset_ns(),
            flight_strength=flight.strength,
            diagnosis=diagnosis,
            owner=self._owner(rank.pid),
        )


def _put_down_to(stall: Stall, diagnosis: Diagnosis) -> Stall:
    """The same stall with another diagnosis.  That a process has ended does not make what was seen before it unseen."""
    before = stall.diagnosis
    if diagnosis.cause is Cause.PROCESS_GONE and is_well_founded(before.cause):
        return replace(stall, diagnosis=diagnosis, earlier=before)
    return replace(stall, diagnosis=diagnosis)


def _slows(rank: RankFacts, evidence: Evidence, diagnosis: Diagnosis) -> bool:
    """Whether the evidence shows what makes operations slow.

    A busy machine delays every thread now and then: threads that wait for a processor matter where operations come to
    take half a second.
    """
    if rank.slow is None or rank.slow.recent_mean_ns is None:
        return False
    if _is_shared(evidence, diagnosis):
        return False
    starved = diagnosis.cause is Cause.RANK_BEHIND and evidence.process.starved
    return diagnosis.cause in _SLOW_CAUSES or (starved and rank.slow.recent_mean_ns >= _STARVED_NS)


def _drags(flight: InFlight, evidence: Evidence, diagnosis: Diagnosis) -> bool:
    """Whether an operation that moves bytes has a rail that makes it slow, and a history to hold that against."""
    known = flight.history is not None and flight.history.operations >= _LEAST_HISTORY
    excused = evidence.process.excused or _is_shared(evidence, diagnosis)
    return known and diagnosis.culprit and diagnosis.cause in _SLOW_CAUSES and not excused


def _is_shared(evidence: Evidence, diagnosis: Diagnosis) -> bool:
    """Whether a rail that is called slow is filled by others."""
    return diagnosis.cause is Cause.RAIL_SLOW and any(
        rail.device == diagnosis.device and _others_use(rail) for rail in evidence.rails
    )


def _others_use(rail: RailSigns) -> bool:
    """Whether a rail carries much, and most of it not for these processes: it is shared, and not slow."""
    return rail.foreign_ratio >= _MOSTLY_FOREIGN and _is_busy(rail)


def _is_busy(rail: RailSigns) -> bool:
    return rail.port_bytes > _BUSY_PORT_BYTES_PER_SECOND * rail.window_ns / 1_000_000_000


def _slow_flight(rank: RankFacts, now_ns: int) -> InFlight:
    return rank.in_flight or InFlight(rank.slow_op, None, now_ns, "strong", "operations complete, but slowly")


def _with_slowness(diagnosis: Diagnosis, rank: RankFacts, now_ns: int) -> Diagnosis:
    if rank.slow is None or rank.slow.recent_mean_ns is None:
        flight = rank.in_flight
        if flight is None or flight.history is None:
            return diagnosis
        usual_ms = flight.history.mean_ns / 1e6
        sentence = f"an operation has taken {(now_ns - flight.since_ns) / 1e9:.1f} s so far, {usual_ms:.1f} ms before"
        return replace(diagnosis, evidence=(*diagnosis.evidence, sentence))
    sentence = f"operations take {rank.slow.recent_mean_ns / 1e6:.1f} ms, {rank.slow.ratio:.1f} times as long as before"
    return replace(diagnosis, evidence=(*diagnosis.evidence, sentence))
