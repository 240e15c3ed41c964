"""Infers that an operation is in flight, and on which communicator, if none is observed directly.

A process tells more than one of its communicators: bytes lie unread in it, it is stopped, its threads wait for the
network.  With one communicator that is enough.  With several such a sign goes to where the process most likely is: to
the communicator that it called last, and to those on which it has made a call that another rank of this host has not.
The others are idle as far as is known.  What only one communicator can show counts for itself: its ranks' calls
differ, NCCL's proxy works for it, or a rank of this host waits in it for a process that is stopped.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from heapq import nsmallest
from typing import Final, NamedTuple

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.stall import InFlight, OwnHistory
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.stalls.evidence import ProcessFacts, RailSigns, RankFacts
from railscope.agent.node.stalls.sources import Inspection, Known
from railscope.agent.node.targets.memory import ProcessMemory, ProxyWork
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.nccl.abi import Op, op_name

_log = logging.getLogger("railscope.stalls")

_PERIOD_NS: Final = 800_000_000
"""Once a second: no look that comes a moment early waits for the next."""
_LONGEST_PAUSE_NS: Final = 10_000_000_000
_MOST_BEFORE_NS: Final = 1_000_000_000
"""Less than what is plainly broken may take: a process that is held for a moment after a pause is no stall."""
_PROXY_WORKS: Final = "NCCL's proxy has operations in flight"
_POINT_TO_POINT: Final = frozenset({op_name(Op.Send), op_name(Op.Recv)})
_HELD: Final = frozenset({"stopped", "frozen"})


class Place(NamedTuple):
    """Where a rank's end of a communicator is."""

    process: ObservedProcess
    address: int
    """Of the communicator, in the process."""
    library: int


@dataclass(frozen=True, slots=True)
class Described:
    """What is asked about ranks, by instance."""

    place: Callable[[int], Place]
    op: Callable[[int], str]
    """NCCL's name of the last call."""
    history: Callable[[int], OwnHistory | None]
    broken: Collection[str]
    """Names of communicators that lost a rank whose process ended on this host."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Why something must be in flight."""

    sign: str
    op: str
    since_ns: int | None = None
    """None: since the last call, as far as one knows."""
    one_of: int = 1
    awaited: bool = False
    missing: bool = False


@dataclass(slots=True)
class _Sign:
    sequence: int
    looked_ns: int
    flight: InFlight | None

    def due(self, now_ns: int, rank: RankFacts) -> bool:
        """Whether to look again: at once when calls were made, and ever more seldom while there is no sign."""
        pause_ns = _PERIOD_NS
        if self.flight is None:
            pause_ns = min(max(_PERIOD_NS, (now_ns - rank.last_call_ns) // 10), _LONGEST_PAUSE_NS)
        return self.sequence != rank.enqueued or now_ns - self.looked_ns >= pause_ns


class InferredFlights:
    """Remembers what was found of each communicator.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self, known: Known, inspector: Inspection, memory: ProcessMemory) -> None:
        self._known = known
        self._inspector = inspector
        self._memory = memory
        self._seen: dict[int, _Sign] = {}
        """By instance."""

    def forget(self, instance: int) -> None:
        """Drop a communicator that is no longer suspected, or that is forgotten."""
        self._seen.pop(instance, None)

    def add(
        self,
        now_ns: int,
        suspects: Sequence[RankFacts],
        every: Callable[[], Iterable[RankFacts]],
        described: Described,
        afresh: Collection[int] = (),
    ) -> list[RankFacts]:
        """These ranks, in whom no operation is seen, with what must be in flight.

        `every`: all of this host.  `afresh`: instances of those to which something has just happened.
        """
        # A process is looked at only where something is in flight, or to find out: idle ones are not inspected.
        signs = [self._seen.get(rank.instance) for rank in suspects]
        if any(
            sign is None or sign.flight is not None or rank.instance in afresh or sign.due(now_ns, rank)
            for rank, sign in zip(suspects, signs, strict=True)
        ):
            evaluation = _Evaluation(self._known, self._inspector, self._memory, tuple(every()), described)
            self._ask(now_ns, suspects, evaluation, afresh)
        flights = [self._seen[rank.instance].flight for rank in suspects]
        return [
            rank if rank.in_flight is flight else replace(rank, in_flight=flight)
            for rank, flight in zip(suspects, flights, strict=True)
        ]

    def _ask(
        self, now_ns: int, suspects: Sequence[RankFacts], evaluation: _Evaluation, afresh: Collection[int]
    ) -> None:
        """Find out what is in flight where that is due."""
        due: defaultdict[_Stage, list[RankFacts]] = defaultdict(list)
        for rank in suspects:
            known = self._seen.get(rank.instance)
            evaluation.record(rank, None if known is None else known.flight)
            if (
                known is None
                or rank.instance in afresh
                or known.due(now_ns, rank)
                or (known.flight is not None and evaluation.depends_on_others(rank))
            ):
                due[evaluation.stage(rank)].append(rank)
        # Whether others wait for a process is known once they have been looked at.
        for stage in _Stage:
            evaluation.begin_stage()
            for rank in due[stage]:
                flight = self._flight(now_ns, rank, evaluation.infer(rank), evaluation.described)
                evaluation.record(rank, flight)
                self._seen[rank.instance] = _Sign(rank.enqueued, now_ns, flight)

    def _flight(self, now_ns: int, rank: RankFacts, found: _Found | None, described: Described) -> InFlight | None:
        if found is None:
            return None
        known = self._seen.get(rank.instance)
        since_ns = rank.last_call_ns if found.since_ns is None else max(rank.last_call_ns, found.since_ns)
        if known is not None and known.sequence == rank.enqueued:
            if known.flight is not None:
                since_ns = known.flight.since_ns
            elif found.since_ns is None:
                # What the last look saw no sign of began after it: a replay of a graph makes no call.  But after a long
                # pause who waits now may have waited, in vain or not, any number of times.
                since_ns = max(known.looked_ns, now_ns - _MOST_BEFORE_NS)
        history = described.history(rank.instance)
        return InFlight(
            *(found.op, None, since_ns, "weak", found.sign, history),
            one_of=found.one_of,
            awaited=found.awaited,
            missing=found.missing,
            estimated=self._known.calls_unprobed(described.place(rank.instance).library),
        )


class _Stage(IntEnum):
    """The order in which ranks are evaluated: a rank that depends on others comes after them."""

    ALONE = 0
    UNREAD = 1
    """Peers sent it what it does not read: which communicator that is shows where they wait for it."""
    HELD = 2
    """Its process may not run."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Ranks of this host that are in an operation of one communicator."""

    counts: Mapping[int, int]
    """How many, by pid."""
    total: int
    first: tuple[tuple[RankFacts, InFlight], ...]
    """Of each of the two processes that have waited longest, the rank that has waited longest."""

    def without(self, pid: int) -> int:
        """How many are not of this process."""
        return self.total - self.counts.get(pid, 0)

    def longest_without(self, pid: int) -> tuple[RankFacts, InFlight] | None:
        """The rank of another process that has waited longest; None: no other process waits."""
        return next((one for one in self.first if one[0].pid != pid), None)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a process that may not run leaves undone."""

    needed: Mapping[int, _Found]
    """Communicators in which ranks of this host wait for it, by instance."""
    perhaps: int
    """Communicators in whose last operation it may be."""
    last: int | None
    """Of those, the instance that it called last."""


@dataclass(frozen=True, slots=True)
class _Lead:
    """Operations that ranks ahead of others called last, in one communicator."""

    entered: Sequence[int]
    """How often ranks entered, each number once, ascending."""
    ops: Sequence[frozenset[str]]
    """By place in `entered`: what those with more calls than so many called last."""
    since_ns: Sequence[int]
    """Likewise: when the first of them made its last call, and has waited since at the most."""


class _Evaluation:
    """All ranks of this host at one moment.

    A process may have thousands of communicators, each of which asks the same of it: whatever is true of a process or
    of a communicator as a whole is worked out once, so that a look takes time in proportion to the ranks.
    """

    def __init__(
        self,
        known: Known,
        inspector: Inspection,
        memory: ProcessMemory,
        every: tuple[RankFacts, ...],
        described: Described,
    ) -> None:
        self._known = known
        self._inspector = inspector
        self._memory = memory
        self.described: Final = described
        self._flights: dict[int, InFlight | None] = {}
        """By instance: of those without an operation, once they have been judged."""
        self._flying: defaultdict[int, int] = defaultdict(int)
        """How many of them are in flight, by pid."""
        self._of_process: defaultdict[int, list[RankFacts]] = defaultdict(list)
        self._of_comm: defaultdict[str, list[RankFacts]] = defaultdict(list)
        for rank in every:
            self.record(rank, rank.in_flight)
            self._of_process[rank.pid].append(rank)
            if rank.comm != UNKNOWN:
                self._of_comm[rank.comm].append(rank)
        self._entered = {comm: _compared(ranks) for comm, ranks in self._of_comm.items()}
        self._last = {pid: max(ranks, key=_last_call).instance for pid, ranks in self._of_process.items()}
        self._works: dict[int, bool | None] = {}
        self._in: dict[int, Mapping[int, str]] = {}
        self._likely_in: dict[int, frozenset[int]] = {}
        self._processes: dict[int, ProcessFacts] = {}
        self._ways: dict[int, tuple[RailSigns, ...]] = {}
        self._leads: dict[str, _Lead] = {}
        self._unsettled: dict[str, frozenset[int] | None] = {}
        self._unexcused: dict[int, bool] = {}
        # As of this stage:
        self._waits: dict[str, _Waiting] = {}
        self._missed: dict[int, frozenset[int]] = {}
        self._holds: dict[int, _Held] = {}

    def record(self, rank: RankFacts, flight: InFlight | None) -> None:
        """What a rank is in."""
        before = self._flights.get(rank.instance)
        self._flying[rank.pid] += (flight is not None) - (before is not None)
        self._flights[rank.instance] = flight

    def begin_stage(self) -> None:
        """What ranks of earlier stages are in is known from now on, and none of this stage counts as waiting."""
        self._waits.clear()
        self._missed.clear()
        self._holds.clear()

    def stage(self, rank: RankFacts) -> _Stage:
        """When to judge a rank."""
        if self.is_held(rank):
            return _Stage.HELD
        several = len(self._of_process[rank.pid]) > 1
        return _Stage.UNREAD if several and not self._lead(rank) and self.depends_on_others(rank) else _Stage.ALONE

    def depends_on_others(self, rank: RankFacts) -> bool:
        """Whether what a rank is in shows where others wait for it: its own process does not tell."""
        return self.is_held(rank) or (self._unread(rank) > 0 and not self._at_work(rank.pid))

    def is_held(self, rank: RankFacts) -> bool:
        """Whether its process may not run."""
        return self._facts(rank).condition in _HELD

    def infer(self, rank: RankFacts) -> _Found | None:
        """The evidence that a rank without an observed operation has one in flight on its communicator."""
        return self._of_held(rank) if self.is_held(rank) else self._of_running(rank)

    def _of_held(self, rank: RankFacts) -> _Found | None:
        held = self._held(rank)
        needed = held.needed.get(rank.instance)
        if needed is not None:
            return replace(needed, awaited=True)
        others = self._flying[rank.pid] - (self._flights[rank.instance] is not None)
        if held.needed or others or held.last != rank.instance:
            return None
        op = UNKNOWN if held.perhaps > 1 else self.described.op(rank.instance)
        sign = f"{self._why_held(rank)} in the middle of its calls"
        return _Found(sign, op, one_of=held.perhaps, awaited=self._unread(rank) > 0)

    def _why_held(self, rank: RankFacts) -> str:
        return f"its process is {self._facts(rank).condition}"

    def _held(self, rank: RankFacts) -> _Held:
        if rank.pid not in self._holds:
            own, why = self._of_process[rank.pid], self._why_held(rank)
            needed = {one.instance: found for one in own if (found := self._needed(one, why)) is not None}
            perhaps = [one for one in own if one.enqueued and not self._is_through(one)]
            last = max(perhaps, key=_last_call).instance if perhaps else None
            self._holds[rank.pid] = _Held(needed, len(perhaps), last)
        return self._holds[rank.pid]

    def _needed(self, rank: RankFacts, held: str) -> _Found | None:
        """Why a rank of this host must be waiting in a communicator for a process that is stopped."""
        if self._lead(rank):
            return self._found_behind(rank, f"{self._lead_sentence(rank)}, and {held}")
        return self._awaited(rank, held)

    def _waiting(self, comm: str) -> _Waiting:
        """Ranks that are in an operation of a communicator, as far as one knows."""
        if comm not in self._waits:
            counts: defaultdict[int, int] = defaultdict(int)
            longest: dict[int, tuple[RankFacts, InFlight]] = {}
            for one in self._of_comm.get(comm, ()):
                flight = self._flights[one.instance]
                if flight is None or flight.one_of != 1 or flight.missing or self.is_held(one):
                    continue
                counts[one.pid] += 1
                if one.pid not in longest or flight.since_ns < longest[one.pid][1].since_ns:
                    longest[one.pid] = one, flight
            first = tuple(nsmallest(2, longest.values(), key=lambda entry: entry[1].since_ns))
            self._waits[comm] = _Waiting(counts, sum(counts.values()), first)
        return self._waits[comm]

    def _awaited(self, rank: RankFacts, why: str) -> _Found | None:
        """Which rank of another process waits for this one; None: none does."""
        longest = self._waiting(rank.comm).longest_without(rank.pid)
        if longest is None:
            return None
        peer, flight = longest
        # Of two ranks that talk one sends what the other receives: which of its calls is missing is not seen.
        op = UNKNOWN if flight.op in _POINT_TO_POINT else flight.op
        return _Found(f"rank {peer.name} of this host waits in it, and {why}", op, since_ns=flight.since_ns)

    def _sleeps_unexcused(self, rank: RankFacts) -> bool:
        """Whether its process neither reads what it is sent nor computes, and no call of it can have failed."""
        pid = rank.pid
        if pid not in self._unexcused:
            asleep = self._unread(rank) > 0 and not self._facts(rank).computing and not self._lost_a_peer(rank)
            self._unexcused[pid] = asleep and not any(
                one.comm in self.described.broken or self._lead(one) for one in self._of_process[pid]
            )
        return self._unexcused[pid]

    def _alone_missing(self, pid: int) -> frozenset[int]:
        """Communicators, by instance, whose ranks are all here and all in an operation, but for one of this process."""
        if pid not in self._missed:
            self._missed[pid] = frozenset(
                one.instance
                for one in self._of_process[pid]
                if one.nranks is not None and self._waiting(one.comm).without(pid) == one.nranks - 1
            )
        return self._missed[pid]

    def _is_through(self, rank: RankFacts) -> bool:
        """Whether the last operation of a communicator is surely complete: all ranks made it, and went on to others."""
        if rank.comm not in self._unsettled:
            self._unsettled[rank.comm] = self._not_through(self._of_comm.get(rank.comm, []))
        left = self._unsettled[rank.comm]
        return left is not None and left <= {rank.instance}

    def _not_through(self, ranks: Sequence[RankFacts]) -> frozenset[int] | None:
        """Those of a communicator's ranks that may be in its last operation; None: not all made it, or are here."""
        first = ranks[0] if ranks else None
        if first is None or len(ranks) != first.nranks:
            return None
        if not all(one.comparable and one.entered == first.entered for one in ranks):
            return None
        return frozenset(
            one.instance
            for one in ranks
            if (one.completed is None or one.completed < one.enqueued)
            and (self.is_held(one) or self._last[one.pid] == one.instance)
        )

    def _of_running(self, rank: RankFacts) -> _Found | None:
        several = len(self._of_process[rank.pid]) > 1
        at_work = self._at_work(rank.pid) if several else {}
        elsewhere = len(at_work) > (rank.instance in at_work)
        op = self.described.op(rank.instance)
        if self._lead(rank) and not elsewhere and not (several and self._lost_a_peer(rank)):
            return self._found_behind(rank, self._lead_sentence(rank))
        if rank.instance in at_work:
            return _Found(at_work[rank.instance], op)
        if several and not elsewhere and self._sleeps_unexcused(rank):
            missed = self._alone_missing(rank.pid)
            found = self._awaited(rank, "its process does not read data from its peers")
            if rank.instance in missed and found is not None:
                return replace(found, missing=True)
            if missed:
                return None
        if several and (elsewhere or rank.instance not in self._likely(rank.pid)):
            return None
        return self._of_process_alone(rank, op)

    def _of_process_alone(self, rank: RankFacts, op: str) -> _Found | None:
        """What a process shows that is, as far as one knows, in no communicator but this one."""
        one_of = len(self._of_process[rank.pid])
        unread = self._unread(rank)
        if unread:
            sentence = f"{unread} bytes from its peers are unread in its sockets"
            return _Found(sentence, op if one_of == 1 else UNKNOWN, one_of=one_of)
        if any(rail.unanswered for rail in self._rails(rank)):
            return _Found("bytes that it sent are not acknowledged", op)
        sign = "" if one_of > 1 or rank.completed is not None else self._at_work_alone(rank)
        return _Found(sign, op) if sign else None

    def _at_work_alone(self, rank: RankFacts) -> str:
        works = self._proxy_works(rank)
        if works is not None:
            return _PROXY_WORKS if works else ""
        return self._threads_wait(rank)

    def _at_work(self, pid: int) -> Mapping[int, str]:
        """Communicators of a process in which it has begun something that goes on, by instance: what says so."""
        if pid not in self._in:
            ranks = self._of_process[pid]
            found = {rank.instance: "handed to the network and not complete" for rank in ranks if rank.in_flight}
            unseen = [rank for rank in ranks if rank.completed is None and rank.enqueued]
            found |= {rank.instance: _PROXY_WORKS for rank in unseen if self._proxy_works(rank)}
            likely = [rank for rank in unseen if rank.instance in self._likely(pid)]
            if not found and likely and all(self._proxy_works(rank) is None for rank in likely):
                waits = self._threads_wait(likely[0])
                found |= {rank.instance: waits for rank in likely if waits}
            self._in[pid] = found
        return self._in[pid]

    def _likely(self, pid: int) -> frozenset[int]:
        """Where a process is if it is anywhere: in what it called last, or where others of this host are missing."""
        if pid not in self._likely_in:
            ranks = self._of_process[pid]
            alone = {rank.instance for rank in ranks if rank.comparable and rank.entered > self._least(rank)}
            self._likely_in[pid] = frozenset({self._last[pid], *alone})
        return self._likely_in[pid]

    def _least(self, rank: RankFacts) -> int:
        return self._entered[rank.comm][0] if rank.comm in self._entered else rank.entered

    def _lead(self, rank: RankFacts) -> int:
        """Calls that another rank of this host has made more."""
        if not rank.comparable or rank.comm not in self._entered:
            return 0
        return max(0, self._entered[rank.comm][1] - rank.entered)

    def _lead_sentence(self, rank: RankFacts) -> str:
        return f"another rank of this host is {self._lead(rank)} calls ahead"

    def _found_behind(self, rank: RankFacts, sentence: str) -> _Found:
        """The operation that a rank did not enter: the last one of who is ahead by one, or what all they do."""
        if rank.comm not in self._leads:
            self._leads[rank.comm] = self._lead_of(self._of_comm[rank.comm])
        lead = self._leads[rank.comm]
        at = bisect_left(lead.entered, rank.entered)
        ops = set(lead.ops[at])
        if self._lead(rank) > 1:
            ops.add(self.described.op(rank.instance))
        # Its own last call may be long over.
        return _Found(sentence, ops.pop() if len(ops) == 1 else UNKNOWN, since_ns=lead.since_ns[at])

    def _lead_of(self, ranks: Iterable[RankFacts]) -> _Lead:
        called: defaultdict[int, set[str]] = defaultdict(set)
        first_ns: dict[int, int] = {}
        for rank in ranks:
            if rank.comparable:
                called[rank.entered].add(self.described.op(rank.instance))
                first_ns[rank.entered] = min(first_ns.get(rank.entered, sys.maxsize), rank.last_call_ns)
        entered = sorted(called)
        ops: list[frozenset[str]] = []
        since_ns: list[int] = []
        ahead: frozenset[str] = frozenset()
        ahead_ns = sys.maxsize
        for count in reversed(entered):
            ops.append(ahead)
            since_ns.append(ahead_ns)
            ahead |= called[count]
            ahead_ns = min(ahead_ns, first_ns[count])
        return _Lead(entered, ops[::-1], since_ns[::-1])

    def _facts(self, rank: RankFacts) -> ProcessFacts:
        if rank.pid not in self._processes:
            self._processes[rank.pid] = self._inspector.process(self.described.place(rank.instance).process)
        return self._processes[rank.pid]

    def _threads_wait(self, rank: RankFacts) -> str:
        waiting = self._inspector.waits_for_network(self.described.place(rank.instance).process)
        return f"a thread that runs collectives waits in {', '.join(waiting)}" if waiting else ""

    def _lost_a_peer(self, rank: RankFacts) -> bool:
        """Whether a process at the other end of its process's connections has ended: it may never come on."""
        return any(rail.peer_closed for rail in self._rails(rank))

    def _rails(self, rank: RankFacts) -> tuple[RailSigns, ...]:
        if rank.pid not in self._ways:
            self._ways[rank.pid] = self._inspector.rails(self.described.place(rank.instance).process, frozenset())
        return self._ways[rank.pid]

    def _unread(self, rank: RankFacts) -> int:
        """Bytes that lie unread in its process."""
        return sum(rail.unread_bytes for rail in self._rails(rank))

    def _proxy_works(self, rank: RankFacts) -> bool | None:
        """None: that cannot be known."""
        if rank.instance not in self._works:
            self._read_proxies(rank.pid)
        return self._works.get(rank.instance)

    def _read_proxies(self, pid: int) -> None:
        """Of all communicators of a process at once."""
        wanted = []
        for one in self._of_process[pid]:
            self._works[one.instance] = None
            place = self.described.place(one.instance)
            layout = self._known.proxy_layout(place.library)
            if layout is not None:
                wanted.append((one.instance, ProxyWork(place.address, layout)))
        if not wanted:
            return
        try:
            works = self._memory.read(pid, [reading for _, reading in wanted])
        except NotYet:
            return
        except Refused as refused:
            _log.debug("process %d: whether its proxies have work cannot be read: %s", pid, refused)
            return
        self._works.update((instance, works) for (instance, _), works in zip(wanted, works, strict=True))


def _last_call(rank: RankFacts) -> tuple[bool, int]:
    """Sorts by the last call, what was never called first."""
    return rank.enqueued > 0, rank.last_call_ns


def _compared(ranks: Iterable[RankFacts]) -> tuple[int, int]:
    """The fewest and the most calls that ranks of one communicator made, of those that can be compared."""
    entered = [rank.entered for rank in ranks if rank.comparable]
    return (min(entered), max(entered)) if entered else (0, 0)
