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
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import IntEnum
from heapq import nsmallest
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from railscope.agent.facts.counted import format_count
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.stall import InFlight, OwnHistory
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.stalls.evidence import ProcessFacts, RailSigns
from railscope.agent.node.stalls.rank_columns import Column, Mask, RankColumns, RanksNow, Roster, Rows
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
    """What is asked about ranks."""

    place: Callable[[int], Place]
    """By row."""
    op: Callable[[int], str]
    """NCCL's name of the last call, by instance."""
    history: Callable[[int], OwnHistory | None]
    """By instance."""
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


class InferredFlights:
    """Remembers what was found of each communicator.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self, known: Known, inspector: Inspection, memory: ProcessMemory) -> None:
        self._known = known
        self._inspector = inspector
        self._memory = memory
        self._roster: Roster | None = None
        """Whose ranks the rows below are."""
        self._looked_ns: Column = np.zeros(0, np.int64)
        """When each was looked at last; 0: it is not suspected."""
        self._sequence: Column = np.zeros(0, np.int64)
        """How many calls it had made then."""
        self._flights: dict[int, InFlight] = {}
        """What was found to be in flight in it, by row."""

    def _follow(self, roster: Roster) -> None:
        """Keep what is known of the ranks that are still there."""
        before = self._roster
        if before is roster:
            return
        looked_ns, sequence = np.zeros(len(roster.pids), np.int64), np.zeros(len(roster.pids), np.int64)
        flights = {}
        if before is not None:
            for row in np.flatnonzero(self._looked_ns).tolist():
                now = roster.row_of.get(int(before.instances[row]))
                if now is not None:
                    looked_ns[now], sequence[now] = self._looked_ns[row], self._sequence[row]
                    if row in self._flights:
                        flights[now] = self._flights[row]
        self._roster, self._looked_ns, self._sequence, self._flights = roster, looked_ns, sequence, flights

    def forget(self, roster: Roster, mask: Mask) -> None:
        """Drop ranks that are not suspected any more."""
        self._follow(roster)
        self._looked_ns[mask] = 0
        for row in [row for row in self._flights if mask[row]]:
            del self._flights[row]

    def find(
        self, now_ns: int, ranks: RanksNow, suspects: Rows, described: Described, afresh: Mask | None = None
    ) -> dict[int, InFlight]:
        """What must be in flight in those of these ranks, by row, in whom no operation is seen.

        `afresh`: those to which something has just happened.
        """
        self._follow(ranks.columns.roster)
        flying = [row for row in suspects.tolist() if row in self._flights] if self._flights else []
        due = suspects[self._due(now_ns, ranks.columns, afresh)[suspects]]
        # A process is looked at only where something is in flight, or to find out: idle ones are not inspected.
        if not len(due) and not flying:
            return {}
        evaluation = _Evaluation(self._known, self._inspector, self._memory, ranks, described)
        for row in flying:
            evaluation.record(row, self._flights[row])
        self._ask(now_ns, due, flying, evaluation)
        if len(due):
            flying = [row for row in suspects.tolist() if row in self._flights]
        return {row: self._flights[row] for row in flying if row in self._flights}

    def _due(self, now_ns: int, columns: RankColumns, afresh: Mask | None) -> Mask:
        """Whom to look at again: at once when calls were made, and ever more seldom while there is no sign."""
        pause_ns = np.clip((now_ns - columns.last_call_ns) // 10, _PERIOD_NS, _LONGEST_PAUSE_NS)
        pause_ns[list(self._flights)] = _PERIOD_NS
        due: Mask = (
            (self._sequence != columns.enqueued) | (now_ns - self._looked_ns >= pause_ns) | (self._looked_ns == 0)
        )
        return due if afresh is None else due | afresh

    def _ask(self, now_ns: int, due: Rows, flying: Iterable[int], evaluation: _Evaluation) -> None:
        """Find out what is in flight where that is due, or may have changed with what others are in."""
        columns = evaluation.columns
        again = [row for row in flying if evaluation.depends_on_others(int(columns.roster.pids[row]))]
        rows = np.union1d(due, np.array(again, np.intp)) if again else due
        stages = evaluation.stages(rows)
        # Whether others wait for a process is known once they have been looked at.
        for stage in _Stage:
            evaluation.begin_stage()
            of_stage = rows[stages == stage]
            for row in evaluation.perhaps_in_flight(of_stage, self._flights):
                flight = self._flight(now_ns, row, evaluation.infer(row), evaluation)
                evaluation.record(row, flight)
                if flight is None:
                    self._flights.pop(row, None)
                else:
                    self._flights[row] = flight
            self._looked_ns[of_stage], self._sequence[of_stage] = now_ns, columns.enqueued[of_stage]

    def _flight(self, now_ns: int, row: int, found: _Found | None, evaluation: _Evaluation) -> InFlight | None:
        if found is None:
            return None
        columns, described = evaluation.columns, evaluation.described
        last_call_ns = int(columns.last_call_ns[row])
        since_ns = last_call_ns if found.since_ns is None else max(last_call_ns, found.since_ns)
        looked_ns = int(self._looked_ns[row])
        if looked_ns and self._sequence[row] == columns.enqueued[row]:
            known = self._flights.get(row)
            if known is not None:
                since_ns = known.since_ns
            elif found.since_ns is None:
                # What the last look saw no sign of began after it: a replay of a graph makes no call.  But after a long
                # pause who waits now may have waited, in vain or not, any number of times.
                since_ns = max(looked_ns, now_ns - _MOST_BEFORE_NS)
        return InFlight(
            *(found.op, None, since_ns, "weak", found.sign, described.history(int(columns.roster.instances[row]))),
            one_of=found.one_of,
            awaited=found.awaited,
            missing=found.missing,
            estimated=self._known.calls_unprobed(int(columns.roster.libraries[row])),
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
    first: tuple[tuple[int, int, InFlight], ...]
    """Of each of the two processes that have waited longest, by pid, the rank that has waited longest, by row."""

    def without(self, pid: int) -> int:
        """How many are not of this process."""
        return self.total - self.counts.get(pid, 0)

    def longest_without(self, pid: int) -> tuple[int, InFlight] | None:
        """The rank of another process that has waited longest; None: no other process waits."""
        return next(((row, flight) for its, row, flight in self.first if its != pid), None)


@dataclass(frozen=True, slots=True)
class _Held:
    """What a process that may not run leaves undone."""

    needed: Mapping[int, _Found]
    """Its ranks in communicators in which ranks of this host wait for it, by row."""
    perhaps: int
    """Communicators in whose last operation it may be."""
    last: int | None
    """Of those, the rank that made the last call."""


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

    A process may have thousands of communicators, each of which asks the same of it.  What is true of a process or of a
    communicator as a whole is worked out once; and of a process the few ranks are found that may be in something at
    all, so that nothing is asked about the others.
    """

    def __init__(
        self, known: Known, inspector: Inspection, memory: ProcessMemory, ranks: RanksNow, described: Described
    ) -> None:
        self._known = known
        self._inspector = inspector
        self._memory = memory
        self._ranks = ranks
        self.columns: Final = ranks.columns
        self._roster = ranks.columns.roster
        self._compared = ranks.comparison()
        self._leads_by = self._compared.lead
        """Calls that another rank of this host has made more, by row."""
        self.described: Final = described
        self._flights: dict[int, InFlight] = {}
        """Of ranks in whom no operation is seen, by row."""
        self._flying: Counter[int] = Counter()
        """How many of these, by pid."""
        self._works: dict[int, Mapping[int, bool | None]] = {}
        self._in: dict[int, Mapping[int, str]] = {}
        self._likely_in: dict[int, frozenset[int]] = {}
        self._last_of: dict[int, int] = {}
        self._processes: dict[int, ProcessFacts] = {}
        self._ways: dict[int, tuple[RailSigns, ...]] = {}
        self._leads: dict[str, _Lead] = {}
        self._unexcused: dict[int, bool] = {}
        # As of this stage:
        self._waits: dict[str, _Waiting] = {}
        self._missed: dict[int, frozenset[int]] = {}
        self._holds: dict[int, _Held] = {}

    def record(self, row: int, flight: InFlight | None) -> None:
        """What a rank is in."""
        before = self._flights.pop(row, None)
        self._flying[self._pid(row)] += (flight is not None) - (before is not None)
        if flight is not None:
            self._flights[row] = flight

    def begin_stage(self) -> None:
        """What ranks of earlier stages are in is known from now on, and none of this stage counts as waiting."""
        self._waits.clear()
        self._missed.clear()
        self._holds.clear()

    def stages(self, rows: Rows) -> npt.NDArray[np.int8]:
        """When to judge each of these ranks."""
        stages = np.full(len(rows), _Stage.ALONE, np.int8)
        pids = self._roster.pids[rows]
        for pid in set(pids.tolist()):
            if self.is_held(pid):
                stages[pids == pid] = _Stage.HELD
            elif self._are_several(pid) and self.depends_on_others(pid):
                stages[(pids == pid) & (self._leads_by[rows] == 0)] = _Stage.UNREAD
        return stages

    def perhaps_in_flight(self, rows: Rows, flights: Container[int]) -> list[int]:
        """Those of these ranks in which something may be in flight; `flights` are those in which something was."""
        pids = self._roster.pids[rows]
        few: set[int] = set()
        for pid in set(pids.tolist()):
            few |= self._perhaps_in(pid)
        return [row for row in rows.tolist() if row in few or row in flights]

    def _perhaps_in(self, pid: int) -> Set[int]:
        """Ranks of a process in which something may be in flight: of all others `infer` finds nothing."""
        rows = self._ranks.rows_of_process(pid)
        if self.is_held(pid):
            held = self._held(pid)
            return held.needed.keys() if held.last is None else {*held.needed, held.last}
        if len(rows) == 1:
            return set(rows.tolist())
        at_work = self._at_work(pid)
        perhaps = {*at_work, *self._likely(pid), *rows[self._leads_by[rows] > 0].tolist()}
        return perhaps if at_work or not self._sleeps_unexcused(pid) else perhaps | self._alone_missing(pid)

    def depends_on_others(self, pid: int) -> bool:
        """Whether what a process is in shows where others wait for it: it does not tell itself."""
        return self.is_held(pid) or (self._unread(pid) > 0 and not self._at_work(pid))

    def is_held(self, pid: int) -> bool:
        """Whether a process may not run."""
        return self._facts(pid).condition in _HELD

    def infer(self, row: int) -> _Found | None:
        """The evidence that a rank without an observed operation has one in flight on its communicator."""
        return self._of_held(row) if self.is_held(self._pid(row)) else self._of_running(row)

    def _pid(self, row: int) -> int:
        return self._roster.communicators[row].tgid

    def _comm(self, row: int) -> str:
        return self._roster.communicators[row].name

    def _op(self, row: int) -> str:
        return self.described.op(self._roster.communicators[row].instance)

    def _are_several(self, pid: int) -> bool:
        return len(self._ranks.rows_of_process(pid)) > 1

    def _flight_of(self, row: int) -> InFlight | None:
        return self._ranks.fact(row).in_flight if self.columns.posted_ns[row] else self._flights.get(row)

    def _of_held(self, row: int) -> _Found | None:
        pid = self._pid(row)
        held = self._held(pid)
        needed = held.needed.get(row)
        if needed is not None:
            return replace(needed, awaited=True)
        operations = int(np.count_nonzero(self.columns.in_operation[self._ranks.rows_of_process(pid)]))
        others = operations + self._flying[pid] - (self._flight_of(row) is not None)
        if held.needed or others or held.last != row:
            return None
        op = UNKNOWN if held.perhaps > 1 else self._op(row)
        sign = f"{self._why_held(pid)} in the middle of its calls"
        return _Found(sign, op, one_of=held.perhaps, awaited=self._unread(pid) > 0)

    def _why_held(self, pid: int) -> str:
        return f"its process is {self._facts(pid).condition}"

    def _held(self, pid: int) -> _Held:
        if pid not in self._holds:
            rows, why = self._ranks.rows_of_process(pid), self._why_held(pid)
            may_be_needed = rows[(self._leads_by[rows] > 0) | self._roster.shared_by_processes[rows]]
            needed = {row: found for row in may_be_needed.tolist() if (found := self._needed(row, why)) is not None}
            perhaps = rows[(self.columns.enqueued[rows] > 0) & ~self._are_through(rows)]
            last = int(perhaps[np.argmax(self.columns.last_call_ns[perhaps])]) if len(perhaps) else None
            self._holds[pid] = _Held(needed, len(perhaps), last)
        return self._holds[pid]

    def _needed(self, row: int, held: str) -> _Found | None:
        """Why a rank of this host must be waiting in a communicator for a process that is stopped."""
        if self._leads_by[row]:
            return self._found_behind(row, f"{self._lead_sentence(row)}, and {held}")
        return self._awaited(row, held)

    def _waiting(self, comm: str) -> _Waiting:
        """Ranks that are in an operation of a communicator, as far as one knows."""
        if comm not in self._waits:
            counts: Counter[int] = Counter()
            longest: dict[int, tuple[int, int, InFlight]] = {}
            for row in self._ranks.rows_of_comm(comm).tolist():
                flight, pid = self._flight_of(row), self._pid(row)
                if flight is None or flight.one_of != 1 or flight.missing or self.is_held(pid):
                    continue
                counts[pid] += 1
                if pid not in longest or flight.since_ns < longest[pid][2].since_ns:
                    longest[pid] = pid, row, flight
            first = tuple(nsmallest(2, longest.values(), key=lambda entry: entry[2].since_ns))
            self._waits[comm] = _Waiting(counts, sum(counts.values()), first)
        return self._waits[comm]

    def _awaited(self, row: int, why: str) -> _Found | None:
        """Which rank of another process waits for this one; None: none does."""
        longest = self._waiting(self._comm(row)).longest_without(self._pid(row))
        if longest is None:
            return None
        peer, flight = longest
        # Of two ranks that talk one sends what the other receives: which of its calls is missing is not seen.
        op = UNKNOWN if flight.op in _POINT_TO_POINT else flight.op
        name = self._ranks.fact(peer).name
        return _Found(f"rank {name} of this host waits in it, and {why}", op, since_ns=flight.since_ns)

    def _sleeps_unexcused(self, pid: int) -> bool:
        """Whether a process neither reads what it is sent nor computes, and no call of it can have failed."""
        if pid not in self._unexcused:
            asleep = self._unread(pid) > 0 and not self._facts(pid).computing and not self._lost_a_peer(pid)
            rows = self._ranks.rows_of_process(pid)
            self._unexcused[pid] = (
                asleep
                and not (self._leads_by[rows] > 0).any()
                and not any(np.isin(rows, self._ranks.rows_of_comm(comm)).any() for comm in self.described.broken)
            )
        return self._unexcused[pid]

    def _alone_missing(self, pid: int) -> frozenset[int]:
        """Ranks of a process in communicators whose ranks are all here and all in an operation, but for that one."""
        if pid not in self._missed:
            rows = self._ranks.rows_of_process(pid)
            self._missed[pid] = frozenset(
                row
                for row in rows[self._roster.nranks[rows] > 0].tolist()
                if self._waiting(self._comm(row)).without(pid) == self._roster.nranks[row] - 1
            )
        return self._missed[pid]

    def _are_through(self, rows: Rows) -> Mask:
        """Whether the last operation of these ranks' communicators is surely complete.

        All ranks made it, and went on to others.
        """
        roster, compared = self._roster, self._compared
        # All are here, and made as many calls.
        number = np.bincount(roster.groups[compared.comparable], minlength=roster.group_count)
        alike = compared.comparable & (compared.least == compared.most) & roster.is_named
        alike &= number[roster.groups] == roster.nranks
        of_these = np.zeros(roster.group_count, bool)
        of_these[roster.groups[rows]] = True
        perhaps_in = np.zeros(len(alike), bool)
        for row in np.flatnonzero(alike & of_these[roster.groups]).tolist():
            pid, completed = self._pid(row), self._known.completed(roster.communicators[row].instance)
            if completed is None or completed < self.columns.enqueued[row]:
                perhaps_in[row] = self.is_held(pid) or self._last(pid) == row
        left = np.bincount(roster.groups[perhaps_in], minlength=roster.group_count)[roster.groups]
        through: Mask = alike & (left - perhaps_in == 0)
        return through[rows]

    def _of_running(self, row: int) -> _Found | None:
        pid = self._pid(row)
        several = self._are_several(pid)
        at_work = self._at_work(pid) if several else {}
        elsewhere = len(at_work) > (row in at_work)
        op = self._op(row)
        if self._leads_by[row] and not elsewhere and not (several and self._lost_a_peer(pid)):
            return self._found_behind(row, self._lead_sentence(row))
        if row in at_work:
            return _Found(at_work[row], op)
        if several and not elsewhere and self._sleeps_unexcused(pid):
            missed = self._alone_missing(pid)
            found = self._awaited(row, "its process does not read data from its peers")
            if row in missed and found is not None:
                return replace(found, missing=True)
            if missed:
                return None
        if several and (elsewhere or row not in self._likely(pid)):
            return None
        return self._of_process_alone(row, op)

    def _of_process_alone(self, row: int, op: str) -> _Found | None:
        """What a process shows that is, as far as one knows, in no communicator but this one."""
        pid = self._pid(row)
        one_of = len(self._ranks.rows_of_process(pid))
        unread = self._unread(pid)
        if unread:
            sentence = f"{unread} bytes from its peers are unread in its sockets"
            return _Found(sentence, op if one_of == 1 else UNKNOWN, one_of=one_of)
        if any(rail.unanswered for rail in self._rails(pid)):
            return _Found("bytes that it sent are not acknowledged", op)
        sign = "" if one_of > 1 or self._ranks.fact(row).completed is not None else self._at_work_alone(row)
        return _Found(sign, op) if sign else None

    def _at_work_alone(self, row: int) -> str:
        works = self._proxies_of(self._pid(row)).get(row)
        if works is not None:
            return _PROXY_WORKS if works else ""
        return self._threads_wait(self._pid(row))

    def _at_work(self, pid: int) -> Mapping[int, str]:
        """Ranks of a process in which it has begun something that goes on, by row: what says so."""
        if pid not in self._in:
            rows = self._ranks.rows_of_process(pid)
            handed = rows[self.columns.in_operation[rows]].tolist()
            found = dict.fromkeys(handed, "handed to the network and not complete")
            works = self._proxies_of(pid)
            found |= {row: _PROXY_WORKS for row, at_work in works.items() if at_work and self._is_unseen(row)}
            likely = [] if found else [row for row in sorted(self._likely(pid)) if self._is_unseen(row)]
            if likely and all(works.get(row) is None for row in likely):
                waits = self._threads_wait(pid)
                found |= {row: waits for row in likely if waits}
            self._in[pid] = found
        return self._in[pid]

    def _is_unseen(self, row: int) -> bool:
        """Whether a rank makes calls whose completion is not seen."""
        completed = self._known.completed(self._roster.communicators[row].instance)
        return completed is None and self.columns.enqueued[row] > 0

    def _likely(self, pid: int) -> frozenset[int]:
        """Where a process is if it is anywhere: in what it called last, or where others of this host are missing."""
        if pid not in self._likely_in:
            rows = self._ranks.rows_of_process(pid)
            alone = self._compared.comparable[rows] & (self._compared.entered[rows] > self._compared.least[rows])
            alone &= self._roster.is_named[rows]
            self._likely_in[pid] = frozenset({self._last(pid), *rows[alone].tolist()})
        return self._likely_in[pid]

    def _last(self, pid: int) -> int:
        """The rank of a process that made the last call; what was never called comes last."""
        if pid not in self._last_of:
            rows = self._ranks.rows_of_process(pid)
            called = rows[self.columns.enqueued[rows] > 0]
            rows = called if len(called) else rows
            self._last_of[pid] = int(rows[np.argmax(self.columns.last_call_ns[rows])])
        return self._last_of[pid]

    def _lead_sentence(self, row: int) -> str:
        return f"another rank of this host is {format_count(int(self._leads_by[row]), 'call')} ahead"

    def _found_behind(self, row: int, sentence: str) -> _Found:
        """The operation that a rank did not enter: the last one of who is ahead by one, or what all they do."""
        comm = self._comm(row)
        if comm not in self._leads:
            self._leads[comm] = self._lead_of(self._ranks.rows_of_comm(comm))
        lead = self._leads[comm]
        at = bisect_left(lead.entered, int(self._compared.entered[row]))
        ops = set(lead.ops[at])
        if self._leads_by[row] > 1:
            ops.add(self._op(row))
        # Its own last call may be long over.
        return _Found(sentence, ops.pop() if len(ops) == 1 else UNKNOWN, since_ns=lead.since_ns[at])

    def _lead_of(self, rows: Rows) -> _Lead:
        called: defaultdict[int, set[str]] = defaultdict(set)
        first_ns: dict[int, int] = {}
        rows = rows[self._compared.comparable[rows]]
        columns = self._compared.entered[rows], self.columns.last_call_ns[rows]
        for row, count, last_call_ns in zip(rows.tolist(), *(column.tolist() for column in columns), strict=True):
            called[count].add(self._op(row))
            first_ns[count] = min(first_ns.get(count, sys.maxsize), last_call_ns)
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

    def _process(self, pid: int) -> ObservedProcess:
        return self.described.place(int(self._ranks.rows_of_process(pid)[0])).process

    def _facts(self, pid: int) -> ProcessFacts:
        if pid not in self._processes:
            self._processes[pid] = self._inspector.process(self._process(pid))
        return self._processes[pid]

    def _threads_wait(self, pid: int) -> str:
        waiting = self._inspector.waits_for_network(self._process(pid))
        return f"a thread that runs collectives waits in {', '.join(waiting)}" if waiting else ""

    def _lost_a_peer(self, pid: int) -> bool:
        """Whether a process at the other end of a process's connections has ended: it may never come on."""
        return any(rail.peer_closed for rail in self._rails(pid))

    def _rails(self, pid: int) -> tuple[RailSigns, ...]:
        if pid not in self._ways:
            self._ways[pid] = self._inspector.rails(self._process(pid), frozenset())
        return self._ways[pid]

    def _unread(self, pid: int) -> int:
        """Bytes that lie unread in a process."""
        return sum(rail.unread_bytes for rail in self._rails(pid))

    def _proxies_of(self, pid: int) -> Mapping[int, bool | None]:
        """Whether proxies have work for ranks of a process, by row; None, or no entry: that cannot be known."""
        if pid not in self._works:
            self._works[pid] = self._read_proxies(pid)
        return self._works[pid]

    def _read_proxies(self, pid: int) -> Mapping[int, bool | None]:
        """Of all communicators of a process at once."""
        rows = self._ranks.rows_of_process(pid)
        libraries = self._roster.libraries[rows]
        layouts = {one: self._known.proxy_layout(one) for one in set(libraries.tolist())}
        wanted = [
            (row, ProxyWork(self._roster.addresses[row], layout))
            for row, library in zip(rows.tolist(), libraries.tolist(), strict=True)
            if (layout := layouts[library]) is not None
        ]
        if not wanted:
            return {}
        try:
            works = self._memory.read(pid, [reading for _, reading in wanted])
        except NotYet:
            return {}
        except Refused as refused:
            _log.debug("process %d: whether its proxies have work cannot be read: %s", pid, refused)
            return {}
        return {row: works for (row, _), works in zip(wanted, works, strict=True)}
