"""Finds transfers of libraries other than NCCL that do not complete: a put, a send, a flush, a collective of MPI.

The programs keep what is under way (probes/bpf/transfers.bpf.c); here it is held against the limit of a mere wait, and
described: the operation, how long it takes, and who its other end is.  NIXL names that; where a library goes over TCP,
the connection that waits tells its address; and where the other end is on this host, its process and whether that is
stopped.

A receive that waits is no stall: its message may be owed by nobody.  Nor is what a thread waits for in MPI_Wait, which
may be one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.stall import Diagnosis, Stall
from railscope.agent.node.stalls.detector import Changes, StallLimits
from railscope.agent.node.stalls.sources import Known
from railscope.agent.node.stalls.told_calls import (
    MOST_OF_A_PROCESS,
    MOST_OF_A_USER,
    PAUSE_NS,
    CallKey,
    CallNumbers,
    ToldCalls,
)
from railscope.agent.node.transfers.watch import UnderWay
from railscope.probes.netdev.process_connections import Connection, read_connections
from railscope.probes.processes.processes import ProcessIdentity
from railscope.probes.transfers.functions import OPERATIONS

_MOST_ASKED: Final = 16
"""Processes whose connections are read in one look."""
_MOST_CANDIDATES: Final = 64
"""Processes of this host that may be the other end."""


class Transfers(Protocol):
    """What is needed of the watch on transfers (agent/node/transfers/watch.py)."""

    @property
    def mappers(self) -> Collection[ProcessIdentity]: ...
    def under_way(self) -> tuple[UnderWay, ...]: ...
    def name_of_peer(self, one: UnderWay) -> str: ...


@dataclass(frozen=True, slots=True)
class _OtherEnd:
    """What is known of whom a process waits for."""

    connections: tuple[Connection, ...] = ()
    """Those that may lead to it, the surest first."""
    pid: int | None = None
    """Its process, where that is on this host."""
    held: Diagnosis | None = None
    """That this process is stopped, traced or frozen."""


class StuckTransfers:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        transfers: Transfers,
        known: Known,
        procfs: Path,
        realtime_offset_ns: Callable[[], int],
        held: Callable[[int, int | None], Diagnosis | None],
        *,
        numbers: CallNumbers,
    ) -> None:
        """
        Args:
            transfers: what is under way.
            known: what the rest of the agent knows.
            procfs: where sockets are looked for.
            realtime_offset_ns: the time of day less CLOCK_MONOTONIC.
            held: that a process is stopped, traced or frozen, by its pid and rank.
            numbers: the instances of the stalls that are told of.
        """
        self._transfers = transfers
        self._known = known
        self._procfs = procfs
        self._realtime_offset_ns = realtime_offset_ns
        self._held = held
        self._numbers = numbers
        self._looked_ns: int | None = None
        self._under_way = False
        self._stalls: dict[CallKey, Stall] = {}
        self._told = ToldCalls()
        self.pop_forgotten = self._told.pop_forgotten

    @property
    def current(self) -> tuple[Stall, ...]:
        """Transfers that do not complete in time."""
        return self._told.current

    @property
    def under_way(self) -> bool:
        """Whether something that can stall was under way at the last look."""
        return self._under_way

    def update(self, now_ns: int, limits: StallLimits) -> Changes:
        """Look at what is under way, once a second at most.

        Raises:
            KernelRefusal: a table cannot be read.
        """
        if self._looked_ns is not None and now_ns - self._looked_ns < PAUSE_NS:
            return Changes((), ())
        self._looked_ns = now_ns
        waiting = [one for one in self._transfers.under_way() if OPERATIONS[one.function].awaited]
        self._under_way = bool(waiting)
        late = _oldest(one for one in waiting if now_ns - one.since_ns >= limits.after_ns)
        ends: dict[int, _OtherEnd] = {}
        found: dict[CallKey, Stall] = {}
        for one in late:
            process = self._known.process(one.pid)
            if process is None or process.ended_ns is not None:
                continue
            if one.pid not in ends and len(ends) < _MOST_ASKED:
                ends[one.pid] = self._other_end(one.pid)
            key = one.number, one.since_ns
            found[key] = self._describe(now_ns, one, ends.get(one.pid, _OtherEnd()))
        self._stalls = found
        return self._told.tell(now_ns, found)

    def _describe(self, now_ns: int, one: UnderWay, end: _OtherEnd) -> Stall:
        operation = OPERATIONS[one.function]
        op = f"{operation.library.value} {operation.op}"
        peer = self._transfers.name_of_peer(one)
        address = str(end.connections[0].remote) if end.connections else ""
        diagnosis = self._diagnose(one, op, peer, end)
        before = self._stalls.get((one.number, one.since_ns))
        if before is not None:
            return replace(before, diagnosis=diagnosis, peer=peer or address or before.peer)
        return Stall(
            instance=self._numbers.take(),
            comm=UNKNOWN,
            rank=UNKNOWN,
            nranks=UNKNOWN,
            pid=one.pid,
            op=op,
            payload_bytes=one.payload_bytes if operation.sized and one.payload_bytes else None,
            since_ns=one.since_ns,
            flagged_ns=now_ns,
            realtime_offset_ns=self._realtime_offset_ns(),
            strength="strong",
            diagnosis=diagnosis,
            owner=self._known.owner(one.pid),
            library=operation.library.value,
            peer=peer or address,
        )

    def _diagnose(self, one: UnderWay, op: str, peer: str, end: _OtherEnd) -> Diagnosis:
        own = self._held(one.pid, None)
        whom = f" to {peer}" if peer else ""
        evidence = [f"a {op}{whom} that process {one.pid} began is not complete"]
        for connection in [one for one in end.connections if one.waits][:2]:
            takes = ", and takes no more" if not connection.peer_window_bytes else ""
            evidence.append(
                f"{connection.remote} has not taken what its connection from {connection.local} holds: "
                f"{connection.unsent_bytes} bytes are not sent, {connection.unacknowledged_segments} segments not "
                f"acknowledged{takes}"
            )
        held = own or end.held
        if held is not None:
            whose = "" if own is not None else " (the other end of that connection)"
            return replace(held, evidence=(held.evidence[0] + whose, *held.evidence[1:], *evidence))
        if end.pid is not None:
            evidence.append(f"process {end.pid} of this host holds the other end, and is not stopped")
        return Diagnosis(Cause.UNKNOWN, tuple(evidence), culprit=False)

    def _other_end(self, pid: int) -> _OtherEnd:
        process = self._known.process(pid)
        if process is None or process.namespace is None:
            return _OtherEnd()
        every = read_connections(self._procfs, pid, process.namespace)
        waiting = tuple(one for one in every if one.waits)
        wanted = {(one.remote, one.local): one for one in waiting or every}
        here: _OtherEnd | None = None
        for identity in sorted(self._transfers.mappers, key=lambda one: one.pid)[:_MOST_CANDIDATES]:
            other = self._known.process(identity.pid)
            if not wanted or identity.pid == pid or other is None or other.namespace is None:
                continue
            for theirs in read_connections(self._procfs, identity.pid, other.namespace):
                if (first := wanted.get((theirs.local, theirs.remote))) is not None:
                    held = self._held(identity.pid, None)
                    if here is None or held is not None:
                        here = _OtherEnd((first,), identity.pid, held)
                    break
            if here is not None and here.held is not None:
                return here
        if here is not None:
            return here
        # Of several that all have taken what they were sent, any may be the one that does not answer.
        return _OtherEnd(waiting or (every if len({one.remote.address for one in every}) == 1 else ()))


def _oldest(several: Iterable[UnderWay]) -> list[UnderWay]:
    """The oldest of each process, function and peer, of so many of each process and user; they come oldest first."""
    of_process: Counter[int] = Counter()
    of_user: Counter[int] = Counter()
    seen: set[tuple[int, int, int]] = set()
    found = []
    for one in several:
        what = one.pid, one.function, one.peer
        if what in seen or of_process[one.pid] >= MOST_OF_A_PROCESS or of_user[one.uid] >= MOST_OF_A_USER:
            continue
        seen.add(what)
        of_process[one.pid] += 1
        of_user[one.uid] += 1
        found.append(one)
    return found
