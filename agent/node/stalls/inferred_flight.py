"""What says that something is in flight on a communicator where no operation is seen, and on which of several.

A process tells more than one of its communicators: bytes lie unread in it, it is stopped, its threads wait for the
network.  With one communicator that is enough.  With several such a sign goes to where the process most likely is: to
the communicator that it called last, and to those on which it has made a call that another rank of this host has not.
The others are idle as far as anybody can tell.  What only one communicator can show counts for itself: its ranks' calls
differ, NCCL's proxy works for it, or a rank of this host waits in it for a process that is stopped.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from railscope.agent.facts.snapshot import UNKNOWN
from railscope.agent.facts.stall import InFlight, OwnHistory
from railscope.agent.node.stalls.evidence import ProcessFacts, RailSigns, RankFacts
from railscope.agent.node.stalls.sources import Known, Look
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.nccl.abi import Op, op_name
from railscope.probes.nccl.memory.proxy_work import proxy_has_work

_PERIOD_NS: Final = 800_000_000
"""Once a second: no look that comes a moment early waits for the next."""
_LONGEST_PAUSE_NS: Final = 10_000_000_000
_MOST_BEFORE_NS: Final = 1_000_000_000
"""Less than what is plainly broken may take: a process that is held for a moment after a pause is no stall."""
_PROXY_WORKS: Final = "NCCL's proxy has operations under way"
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


class Signs:
    """Remembers what was found of each communicator.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self, known: Known, look: Look, procfs: Path) -> None:
        self._known = known
        self._look = look
        self._procfs = procfs
        self._seen: dict[int, _Sign] = {}
        """By instance."""

    def forget(self, instance: int) -> None:
        """Nothing may be wrong with this communicator any more, or nobody can ask about it."""
        self._seen.pop(instance, None)

    def add(
        self,
        now_ns: int,
        suspects: Sequence[RankFacts],
        every: Callable[[], Iterable[RankFacts]],
        described: Described,
    ) -> list[RankFacts]:
        """These ranks, in whom no operation is seen, with what must be in flight; `every`: all of this host."""
        # A process is looked at only where something is in flight, or to find out: whoever is idle is left alone.
        signs = [self._seen.get(rank.instance) for rank in suspects]
        if any(
            sign is None or sign.flight is not None or sign.due(now_ns, rank)
            for rank, sign in zip(suspects, signs, strict=True)
        ):
            self._ask(now_ns, suspects, _OneLook(self._known, self._look, self._procfs, tuple(every()), described))
        return [replace(rank, in_flight=self._seen[rank.instance].flight) for rank in suspects]

    def _ask(self, now_ns: int, suspects: Sequence[RankFacts], look: _OneLook) -> None:
        """Find out what is in flight where that is due."""
        due = []
        for rank in suspects:
            known = self._seen.get(rank.instance)
            look.flights[rank.instance] = None if known is None else known.flight
            if known is None or known.due(now_ns, rank) or (known.flight is not None and look.depends_on_others(rank)):
                due.append(rank)
        # Whether others wait for a process is known once they have been looked at.
        for rank in sorted(due, key=look.depends_on_others):
            flight = self._flight(now_ns, rank, look.of(rank), look.described)
            look.flights[rank.instance] = flight
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
            found.op, None, since_ns, "weak", found.sign, history, one_of=found.one_of, missing=found.missing
        )


class _OneLook:
    """All ranks of this host at one moment."""

    def __init__(
        self, known: Known, look: Look, procfs: Path, every: tuple[RankFacts, ...], described: Described
    ) -> None:
        self._known = known
        self._look = look
        self._procfs = procfs
        self.described: Final = described
        self.flights: dict[int, InFlight | None] = {rank.instance: rank.in_flight for rank in every}
        """By instance: of those without an operation, once they have been judged."""
        self._of_process: defaultdict[int, list[RankFacts]] = defaultdict(list)
        self._of_comm: defaultdict[str, list[RankFacts]] = defaultdict(list)
        for rank in every:
            self._of_process[rank.pid].append(rank)
            if rank.comm != UNKNOWN:
                self._of_comm[rank.comm].append(rank)
        self._entered = {comm: _compared(ranks) for comm, ranks in self._of_comm.items()}
        self._works: dict[int, bool | None] = {}
        self._in: dict[int, Mapping[int, str]] = {}

    def depends_on_others(self, rank: RankFacts) -> bool:
        """Whether what a rank is in shows where others wait for it: its own process does not tell."""
        return self.is_held(rank) or (self._unread(rank) > 0 and not self._at_work(rank.pid))

    def is_held(self, rank: RankFacts) -> bool:
        """Whether its process may not run."""
        return self._facts(rank).condition in _HELD

    def of(self, rank: RankFacts) -> _Found | None:
        """What says that a rank without an operation has something in flight on its communicator."""
        return self._of_held(rank) if self.is_held(rank) else self._of_running(rank)

    def _of_held(self, rank: RankFacts) -> _Found | None:
        held = f"its process is {self._facts(rank).condition}"
        needed = self._needed(rank, held)
        if needed is not None:
            return needed
        own = self._of_process[rank.pid]
        others = [one for one in own if one.instance != rank.instance]
        if any(self.flights[one.instance] is not None or self._needed(one, held) is not None for one in others):
            return None
        perhaps = [one for one in own if one.enqueued and not self._is_through(one)]
        if not perhaps or max(perhaps, key=_last_call).instance != rank.instance:
            return None
        op = UNKNOWN if len(perhaps) > 1 else self.described.op(rank.instance)
        return _Found(f"{held} in the middle of its calls", op, one_of=len(perhaps))

    def _needed(self, rank: RankFacts, held: str) -> _Found | None:
        """Why a rank of this host must be waiting in a communicator for a process that is stopped."""
        if self._lead(rank):
            return _Found(f"{self._lead_sentence(rank)}, and {held}", self._op_of_lead(rank))
        waiting = self._waiting(rank)
        return self._awaited(waiting, held) if waiting else None

    def _waiting(self, rank: RankFacts) -> list[tuple[RankFacts, InFlight]]:
        """Peers that are in an operation of the communicator, as far as one knows, and what they are in."""
        return [
            (one, flight)
            for one in self._of_comm.get(rank.comm, ())
            if one.pid != rank.pid and not self.is_held(one) and (flight := self.flights[one.instance]) is not None
            if flight.one_of == 1 and not flight.missing
        ]

    def _awaited(self, waiting: list[tuple[RankFacts, InFlight]], why: str) -> _Found:
        peer, flight = min(waiting, key=lambda entry: entry[1].since_ns)
        # Of two ranks that talk one sends what the other receives: which of its calls is missing is not seen.
        op = UNKNOWN if flight.op in _POINT_TO_POINT else flight.op
        return _Found(f"rank {peer.name} of this host waits in it, and {why}", op, since_ns=flight.since_ns)

    def _sleeps_unexcused(self, rank: RankFacts) -> bool:
        """Whether its process neither reads what it is sent nor computes, and no call of it can have failed."""
        if not self._unread(rank) or self._facts(rank).computing or self._lost_a_peer(rank):
            return False
        return not any(one.comm in self.described.broken or self._lead(one) for one in self._of_process[rank.pid])

    def _alone_is_missing(self, rank: RankFacts) -> bool:
        """Whether all ranks of a communicator are on this host, and all others are in an operation of it."""
        return rank.nranks is not None and len(self._waiting(rank)) == rank.nranks - 1

    def _is_through(self, rank: RankFacts) -> bool:
        """Whether the last operation of a communicator is surely complete: all ranks made it, and went on to others."""
        ranks = self._of_comm.get(rank.comm, [])
        if len(ranks) != rank.nranks or not all(one.comparable and one.entered == rank.entered for one in ranks):
            return False
        return all(
            one.instance == rank.instance
            or (one.completed is not None and one.completed >= one.enqueued)
            or (not self.is_held(one) and max(self._of_process[one.pid], key=_last_call).instance != one.instance)
            for one in ranks
        )

    def _of_running(self, rank: RankFacts) -> _Found | None:
        several = len(self._of_process[rank.pid]) > 1
        at_work = self._at_work(rank.pid) if several else {}
        elsewhere = at_work.keys() - {rank.instance}
        op = self.described.op(rank.instance)
        if self._lead(rank) and not elsewhere and not (several and self._lost_a_peer(rank)):
            return _Found(self._lead_sentence(rank), self._op_of_lead(rank))
        if rank.instance in at_work:
            return _Found(at_work[rank.instance], op)
        if several and not elsewhere and self._sleeps_unexcused(rank):
            awaited = [one for one in self._of_process[rank.pid] if self._alone_is_missing(one)]
            if rank in awaited:
                found = self._awaited(self._waiting(rank), "its process does not read what peers sent it")
                return replace(found, missing=True)
            if awaited:
                return None
        if several and (elsewhere or rank.instance not in self._likely(rank.pid)):
            return None
        return self._of_process_alone(rank, op)

    def _of_process_alone(self, rank: RankFacts, op: str) -> _Found | None:
        """What a process shows that is, as far as one knows, in no communicator but this one."""
        one_of = len(self._of_process[rank.pid])
        unread = self._unread(rank)
        if unread:
            sentence = f"{unread} bytes that its peers sent lie unread"
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
        ranks = self._of_process[pid]
        alone = {rank.instance for rank in ranks if rank.comparable and rank.entered > self._least(rank)}
        return frozenset({max(ranks, key=_last_call).instance, *alone})

    def _least(self, rank: RankFacts) -> int:
        return self._entered[rank.comm][0] if rank.comm in self._entered else rank.entered

    def _lead(self, rank: RankFacts) -> int:
        """Calls that another rank of this host has made more."""
        if not rank.comparable or rank.comm not in self._entered:
            return 0
        return max(0, self._entered[rank.comm][1] - rank.entered)

    def _lead_sentence(self, rank: RankFacts) -> str:
        return f"another rank of this host has made {self._lead(rank)} calls more"

    def _op_of_lead(self, rank: RankFacts) -> str:
        """The operation that a rank did not enter: the last one of who is ahead by one, or what all they do."""
        ahead = [one for one in self._of_comm[rank.comm] if one.comparable and one.entered > rank.entered]
        ops = {self.described.op(one.instance) for one in ahead}
        if self._lead(rank) > 1:
            ops.add(self.described.op(rank.instance))
        return ops.pop() if len(ops) == 1 else UNKNOWN

    def _facts(self, rank: RankFacts) -> ProcessFacts:
        return self._look.process(self.described.place(rank.instance).process)

    def _threads_wait(self, rank: RankFacts) -> str:
        waiting = self._look.waits_for_network(self.described.place(rank.instance).process)
        return f"a thread that took part in collectives waits in {', '.join(waiting)}" if waiting else ""

    def _lost_a_peer(self, rank: RankFacts) -> bool:
        """Whether a process at the other end of its process's connections has ended: it may never come on."""
        return any(rail.peer_closed for rail in self._rails(rank))

    def _rails(self, rank: RankFacts) -> tuple[RailSigns, ...]:
        return self._look.rails(self.described.place(rank.instance).process, frozenset())

    def _unread(self, rank: RankFacts) -> int:
        """Bytes that lie unread in its process."""
        return sum(rail.unread_bytes for rail in self._rails(rank))

    def _proxy_works(self, rank: RankFacts) -> bool | None:
        """None: that cannot be known."""
        if rank.instance not in self._works:
            self._works[rank.instance] = self._read_proxy(rank)
        return self._works[rank.instance]

    def _read_proxy(self, rank: RankFacts) -> bool | None:
        place = self.described.place(rank.instance)
        layout = self._known.proxy_layout(place.library)
        if layout is None:
            return None
        try:
            memory = os.open(self._procfs / str(rank.pid) / "mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return proxy_has_work(memory, place.address, layout)
        finally:
            os.close(memory)


def _last_call(rank: RankFacts) -> tuple[bool, int]:
    """Sorts by the last call, what was never called first."""
    return rank.enqueued > 0, rank.last_call_ns


def _compared(ranks: Iterable[RankFacts]) -> tuple[int, int]:
    """The fewest and the most calls that ranks of one communicator made, of those that can be compared."""
    entered = [rank.entered for rank in ranks if rank.comparable]
    return (min(entered), max(entered)) if entered else (0, 0)
