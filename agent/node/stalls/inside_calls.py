"""Finds the calls of NCCL that have not returned for longer than a call may take: init, split, finalize and the like.

Jobs hang inside a call more often than in an operation: a peer never comes to `ncclCommInitRank`, a rank leaves out
`ncclCommSplit`, two ranks that never exchanged anything both begin with `ncclRecv`.  No communicator may exist by then.
The programs keep what each thread is in (probes/bpf/lifecycle.h); here it is held against the limit of a mere wait, and
described: the call, who is inside, and of which communicator, by the name that NCCL gives it (probes/nccl/comm_hash.py)
where it is still being made, so that hosts speak of the same; where that is not known, by its unique id.  Who is
missing shows where all hosts are compared (agent/cluster/verdict/culprits.py).

An init in a group or without blocking returns at once, and is no call any more.  NCCL makes that communicator on a
thread of its own, and what is followed there is the function that does it: it is inside until that returns.  Of a
library without `.symtab` these, and the connecting of ranks inside an operation's call, are not seen.

One user may have thousands of threads inside calls.  Of each process and of each user the oldest are described, so
that the work and what is shown stay bounded; a thread that has ended inside its call is taken out.

A unique id is what a process says, and anybody may say another's.  So the name that it gives belongs to who came first,
as that of a communicator does (agent/node/collectives/name_claims.py): a later call of another user, or of another
process with the same rank, has a mark in its name, and hides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.host_calls import CALL_NAMES
from railscope.agent.facts.label_numbers import UNKNOWN, parse_number
from railscope.agent.facts.stall import Diagnosis, Stall
from railscope.agent.node.collectives.communicators import Communicator, format_label
from railscope.agent.node.stalls.detector import Changes
from railscope.agent.node.stalls.sources import Known
from railscope.agent.node.stalls.told_calls import PAUSE_NS, CallKey, CallNumbers, ToldCalls, oldest_calls
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.comm_hash import comm_hash, two_lane_hash
from railscope.probes.nccl.records.calls import LifecycleKind

_MAKES: Final = (
    LifecycleKind.INIT,
    LifecycleKind.INIT_ALL,
    LifecycleKind.SPLIT,
    LifecycleKind.SHRINK,
    LifecycleKind.GROW,
)


class HostCalls(Protocol):
    """What is needed of the programs' table (probes/nccl/programs/host_calls.py)."""

    def read(self) -> tuple[Records, Records]: ...
    def drop(self, ended: Iterable[tuple[int, int]]) -> None: ...


class InsideCalls:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        calls: HostCalls,
        known: Known,
        procfs: Path,
        realtime_offset_ns: Callable[[], int],
        last_op: Callable[[int], str],
        held: Callable[[int, int | None], Diagnosis | None] = lambda _pid, _rank: None,
        *,
        numbers: CallNumbers,
    ) -> None:
        """
        Args:
            calls: the kernel's table.
            known: what the rest of the agent knows.
            procfs: where threads are looked for.
            realtime_offset_ns: the time of day less CLOCK_MONOTONIC.
            last_op: what a communicator was called for last, by instance; `unknown` where that is not known.
            held: that a process is stopped, traced or frozen, by its pid and rank.
            numbers: the instances of the calls that are told of.
        """
        self._calls = calls
        self._known = known
        self._procfs = procfs
        self._realtime_offset_ns = realtime_offset_ns
        self._last_op = last_op
        self._held = held
        self._looked_ns: int | None = None
        self._under_way = 0
        self._calls_of: dict[CallKey, Stall] = {}
        """Apart from how their processes are."""
        self._told = ToldCalls()
        """With that."""
        self._numbers = numbers
        self.pop_forgotten = self._told.pop_forgotten

    @property
    def current(self) -> tuple[Stall, ...]:
        """Calls that have not returned in time."""
        return self._told.current

    @property
    def under_way(self) -> bool:
        """Whether a thread was inside a call at the last look."""
        return self._under_way > 0

    def update(self, now_ns: int, after_ns: int) -> Changes:
        """Look at the calls, once a second at most; one stalls when it takes `after_ns` or more.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        if self._looked_ns is not None and now_ns - self._looked_ns < PAUSE_NS:
            return Changes((), ())
        self._looked_ns = now_ns
        tids, calls = self._calls.read()
        self._under_way = len(tids)
        late = calls["start_ns"] + np.uint64(after_ns) <= now_ns
        tids, calls = _without_parts(*oldest_calls(tids[late], calls[late]))
        calls_of: dict[CallKey, Stall] = {}
        found: dict[CallKey, Stall] = {}
        told: set[tuple[object, ...]] = set()
        gone = []
        owners = _Owners(self._known)
        order = np.argsort(calls["start_ns"], kind="stable")
        for tid, call in zip(tids[order].tolist(), calls[order], strict=True):
            key = tid, int(call["start_ns"])
            if not self._thread_lives(int(call["tgid"]), tid):
                gone.append(key)
                continue
            stall = self._calls_of.get(key)
            # NCCL's version, of which the name of a communicator depends, may be known later than the call.
            if stall is None or stall.comm == UNKNOWN:
                stall = self._described(stall, tid, call, now_ns)
                if call["kind"] == LifecycleKind.INIT and not owners.take(stall):
                    stall = replace(stall, comm=f"{stall.comm}~{stall.pid}")
            elif call["kind"] == LifecycleKind.INIT:
                owners.take(stall)
            # Two threads of one rank may be inside, one for the other.
            who = (stall.comm, stall.rank, stall.op, stall.pid if UNKNOWN in (stall.comm, stall.rank) else 0)
            if who not in told:
                told.add(who)
                calls_of[key], found[key] = stall, self._judged(stall)
        if gone:
            self._calls.drop(gone)
            self._under_way -= len(gone)
        self._calls_of = calls_of
        return self._told.tell(now_ns, found)

    def processes_gone(self, pids: Collection[int]) -> None:
        """Processes have ended: their calls never return.

        Raises:
            KernelRefusal: the table cannot be read or changed.
        """
        if not self._under_way:
            return
        tids, calls = self._calls.read()
        theirs = np.isin(calls["tgid"], sorted(pids))
        self._calls.drop(zip(tids[theirs].tolist(), calls["start_ns"][theirs].tolist(), strict=True))
        self._looked_ns = None

    def _judged(self, call: Stall) -> Stall:
        """That its process is stopped says more than that the call does not return."""
        held = self._held(call.pid, parse_number(call.rank))
        if held is None:
            return call
        evidence = (*held.evidence, *call.diagnosis.evidence)
        return replace(call, diagnosis=replace(held, evidence=evidence))

    def _thread_lives(self, tgid: int, tid: int) -> bool:
        return (self._procfs / str(tgid) / "task" / str(tid)).exists()

    def _described(self, before: Stall | None, tid: int, call: Records, now_ns: int) -> Stall:
        """What is known of a call (dtype HOST_CALL)."""
        pid, kind = int(call["tgid"]), LifecycleKind(int(call["kind"]))
        communicator = self._known.communicator(int(call["instance"]))
        if communicator is None and kind is LifecycleKind.INIT_WORK:
            # It began before the call had returned and told of the communicator.
            began_ns, unmade = int(call["start_ns"]), self._known.unmade(pid)
            communicator = min(unmade, key=lambda one: abs(one.first_ns - began_ns), default=None)
        op = CALL_NAMES[kind]
        comm, rank, nranks = UNKNOWN, UNKNOWN, UNKNOWN
        if kind is LifecycleKind.INIT:
            comm = self._name(call, pid)
            rank, nranks = (format_label(n if n >= 0 else None) for n in (int(call["rank"]), int(call["nranks"])))
        elif communicator is not None:
            comm, rank, nranks = communicator.name, format_label(communicator.rank), format_label(communicator.nranks)
            if kind is LifecycleKind.INIT_WORK and communicator.source == "layout":
                # It has been made: this one is split off it, shrunk or grown.
                op = CALL_NAMES[LifecycleKind.SPLIT]
        return Stall(
            instance=before.instance if before is not None else self._numbers.take(),
            comm=comm,
            rank=rank,
            nranks=nranks,
            pid=pid,
            op=op,
            payload_bytes=None,
            since_ns=int(call["start_ns"]),
            flagged_ns=now_ns if before is None else before.flagged_ns,
            realtime_offset_ns=self._realtime_offset_ns() if before is None else before.realtime_offset_ns,
            flight_strength="strong",
            diagnosis=Diagnosis(Cause.INSIDE_CALL, self._evidence(kind, tid, communicator), culprit=False),
            owner=self._known.owner(pid),
        )

    def _name(self, call: Records, pid: int) -> str:
        """Of the communicator that is being made: what NCCL will call it, or what its unique id alone makes of it.

        The second is no name that anything else has, but the same on all hosts.
        """
        if not call["has_unique_id"]:
            return UNKNOWN
        unique_id, process = call["unique_id"].tobytes(), self._known.process(pid)
        found = comm_hash(unique_id, process.nccl_version) if process is not None else None
        return f"id-{two_lane_hash(unique_id):016x}" if found is None else f"{found:016x}"

    def _evidence(self, kind: LifecycleKind, tid: int, communicator: Communicator | None) -> tuple[str, ...]:
        if kind is LifecycleKind.CONNECT:
            last = self._last_op(communicator.instance) if communicator is not None else UNKNOWN
            call = "an operation" if last == UNKNOWN else f"nccl{last}"
            sentence = f"thread {tid} connects the ranks that {call} needs, inside its call or the end of its group"
            return sentence, "ranks are connected when they first exchange something: both must come to it"
        if kind is LifecycleKind.INIT_WORK:
            return (
                f"thread {tid} of NCCL makes a communicator in a group or without blocking",
                "the call itself has returned; the communicator cannot be used before this is done",
            )
        return (f"thread {tid} has not returned from {CALL_NAMES[kind]}",)


class _Owners:
    """To whom the names belong that unique ids give, at one look; calls come oldest first."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._first: dict[str, int] = {}
        """Pids, by name."""
        self._ranks: dict[tuple[str, str], int] = {}

    def take(self, stall: Stall) -> bool:
        """Whether a call may have its name; if so, it and its rank are taken."""
        if stall.comm == UNKNOWN:
            return True
        first = self._first.setdefault(stall.comm, stall.pid)
        if self._are_apart(first, stall.pid):
            return False
        return self._ranks.setdefault((stall.comm, stall.rank), stall.pid) == stall.pid

    def _are_apart(self, one: int, other: int) -> bool:
        mine, its = self._known.process(one), self._known.process(other)
        return mine is not None and its is not None and mine.tenant.is_other_user(its.tenant)


def _without_parts(tids: Records, calls: Records) -> tuple[Records, Records]:
    """Without what threads of NCCL do for a call of their process that is there itself, as ncclCommInitAll's do."""
    makes = np.isin(calls["kind"], _MAKES)
    first: dict[int, int] = {}
    for tgid, start_ns in zip(calls["tgid"][makes].tolist(), calls["start_ns"][makes].tolist(), strict=True):
        first[tgid] = min(start_ns, first.get(tgid, start_ns))
    part = np.array(
        [
            kind == LifecycleKind.INIT_WORK and first.get(tgid, start_ns + 1) <= start_ns
            for kind, tgid, start_ns in zip(
                calls["kind"].tolist(), calls["tgid"].tolist(), calls["start_ns"].tolist(), strict=True
            )
        ],
        bool,
    )
    return tids[~part], calls[~part]
