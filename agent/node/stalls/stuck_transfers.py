"""Finds transfers of libraries other than NCCL that do not complete: a put, a send, a flush, a collective of MPI.

The programs keep what is under way (probes/bpf/transfers.bpf.c); here it is held against the limit of a mere wait, and
described: the operation, how long it takes, and who its other end is.  NIXL names that; where a library goes over TCP,
the connection that waits tells its address; and where the other end is on this host, its process and whether that is
stopped.

A receive that waits is no stall: its message may be owed by nobody.  A request of MPI is one once its program waits for
it alone, or for others that are no receives (agent/node/transfers/waits.py).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.remarks import Remark
from railscope.agent.facts.snapshot import CollectorResult
from railscope.agent.facts.stall import Diagnosis, Stall
from railscope.agent.node.inspection.tenants import Tenant
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
from railscope.probes.processes.namespaces import NetworkNamespace
from railscope.probes.processes.processes import ProcessIdentity
from railscope.probes.shares import in_turns
from railscope.probes.transfers.functions import OPERATIONS

_log = logging.getLogger("railscope.transfers")

COLLECTOR: Final = "transfer_ends"
"""What reads the connections of processes."""
_MOST_ASKED: Final = 16
"""Processes whose connections are read for one look, tenants in turns."""
_MOST_CANDIDATES: Final = 64
"""Processes of this host that may be the other end."""
_LONGEST_NS: Final = 200_000_000
"""For one tenant: a process may have any number of descriptors, and its network namespace any number of connections."""
_PATIENCE_S: Final = 0.05

ReadConnections = Callable[[Path, int, NetworkNamespace], tuple[Connection, ...]]
_Found = tuple[tuple[Connection, ...], tuple[tuple[int, Connection], ...]]
"""Connections of a process, and processes of this host that hold the other end of one."""
_NOT_FOUND: Final[_Found] = ((), ())


class Transfers(Protocol):
    """What is needed of the watch on transfers (agent/node/transfers/watch.py)."""

    @property
    def mappers(self) -> Collection[ProcessIdentity]: ...
    def under_way(self) -> tuple[UnderWay, ...]: ...
    def name_of_peer(self, one: UnderWay) -> str: ...


@dataclass(frozen=True, slots=True)
class _Asked:
    """Whose connections are read."""

    pid: int
    namespace: NetworkNamespace
    tenant: Tenant
    candidates: tuple[tuple[int, NetworkNamespace], ...]


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
        read: ReadConnections = read_connections,
    ) -> None:
        """
        Args:
            transfers: what is under way.
            known: what the rest of the agent knows.
            procfs: where sockets are looked for.
            realtime_offset_ns: the time of day less CLOCK_MONOTONIC.
            held: that a process is stopped, traced or frozen, by its pid and rank.
            numbers: the instances of the stalls that are told of.
            read: reads the connections of a process, in a thread aside.
        """
        self._read = read
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="other ends")
        self._reading: Future[_Reading] | None = None
        self._found: dict[int, _Found] = {}
        """By pid of who waits, as last read."""
        self._remark = Remark(_log, COLLECTOR, "connections of processes are read again")
        self.result: CollectorResult | None = None
        """How the last reading of connections went; None: there was none yet."""
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
        late = _oldest(
            one for one in waiting if one.waited_ns is not None and now_ns - one.waited_ns >= limits.after_ns
        )
        of_living: list[tuple[UnderWay, Tenant]] = []
        for one in late:
            process = self._known.process(one.pid)
            if process is not None and process.ended_ns is None:
                of_living.append((one, process.tenant))
        self._take()
        waiting_for = dict.fromkeys((one.pid, tenant) for one, tenant in of_living)
        self._ask(pid for pid, _ in in_turns(waiting_for, lambda one: one[1])[:_MOST_ASKED])
        ends = {pid: self._end_of(pid) for pid in dict.fromkeys(one.pid for one, _ in of_living)}
        found = {(one.number, one.since_ns): self._describe(now_ns, one, ends[one.pid]) for one, _ in of_living}
        self._stalls = found
        return self._told.tell(now_ns, found)

    def close(self) -> None:
        """What is being read is not waited for."""
        self._aside.shutdown(wait=False, cancel_futures=True)

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
            since_ns=one.since_ns if one.waited_ns is None else one.waited_ns,
            flagged_ns=now_ns,
            realtime_offset_ns=self._realtime_offset_ns(),
            flight_strength="strong",
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
                f"{connection.unsent_bytes} bytes are not sent, "
                f"{format_count(connection.unacknowledged_segments, 'segment')} not "
                f"acknowledged{takes}"
            )
        held = own or end.held
        if held is not None:
            whose = "" if own is not None else " (the process at the other end of the connection)"
            sentences = (held.evidence[0] + whose, *held.evidence[1:], *evidence)
            return replace(held, evidence=sentences, blamed_pid=None if own is not None else end.pid)
        if end.pid is not None:
            evidence.append(f"process {end.pid} of this host holds the other end, and is not stopped")
        return Diagnosis(Cause.TRANSFER_STUCK, tuple(evidence), culprit=False)

    def _end_of(self, pid: int) -> _OtherEnd:
        """As the last reading has it."""
        every, here = self._found.get(pid, _NOT_FOUND)
        known: _OtherEnd | None = None
        for other, connection in here:
            process = self._known.process(other)
            if process is None or process.ended_ns is not None:
                continue
            held = self._held(other, None)
            if known is None or held is not None:
                known = _OtherEnd((connection,), other, held)
            if held is not None:
                break
        if known is not None:
            return known
        waiting = tuple(one for one in every if one.waits)
        # Of several that all have taken what they were sent, any may be the one that does not answer.
        return _OtherEnd(waiting or (every if len({one.remote.address for one in every}) == 1 else ()))

    def _ask(self, pids: Iterable[int]) -> None:
        """Have the connections of processes read, and wait a moment for it: as a rule it takes no longer."""
        if self._reading is not None and not self._reading.done():
            return
        asked = [one for pid in pids if (one := self._asked(pid)) is not None]
        self._reading = self._aside.submit(_read_ends, self._read, self._procfs, asked) if asked else None
        if self._reading is None:
            self._found = {}
        else:
            wait([self._reading], _PATIENCE_S)
        self._take()

    def _take(self) -> None:
        if self._reading is None or not self._reading.done():
            return
        reading, self._reading = self._reading.result(), None
        self._found = reading.found
        # A failure may tell of another process each time, and is one failure all the same.
        if not reading.error or self.result is None or self.result.success:
            self._remark.say(reading.error)
        self.result = CollectorResult(COLLECTOR, not reading.error, reading.seconds)

    def _asked(self, pid: int) -> _Asked | None:
        """What is to be read to find the other end of a process.

        Addresses are what they are called within a network namespace, and another user may give himself any in one of
        his own: only the same tenant's processes are looked for there, and nowhere those of another user.
        """
        process = self._known.process(pid)
        if process is None or process.namespace is None:
            return None
        candidates = []
        for identity in sorted(self._transfers.mappers, key=lambda one: one.pid):
            other = self._known.process(identity.pid)
            if identity.pid == pid or other is None or other.namespace is None:
                continue
            same_namespace = other.namespace.inode == process.namespace.inode
            if other.tenant == process.tenant or (same_namespace and not process.tenant.is_other_user(other.tenant)):
                candidates.append((other.tenant != process.tenant, identity.pid, other.namespace))
        candidates.sort(key=lambda one: one[:2])
        return _Asked(
            pid,
            process.namespace,
            process.tenant,
            tuple((other, namespace) for _, other, namespace in candidates[:_MOST_CANDIDATES]),
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """What was read of connections."""

    found: dict[int, _Found]
    """By pid of who waits."""
    seconds: float
    error: str = ""
    """Why nothing was read of some of them."""


def _read_ends(read: ReadConnections, procfs: Path, asked: Iterable[_Asked]) -> _Reading:
    """Each process is read once, and none for a tenant whose processes have taken long enough."""
    error = ""
    known: dict[int, tuple[Connection, ...]] = {}
    spent_ns: Counter[Tenant] = Counter()

    def connections_of(pid: int, namespace: NetworkNamespace, tenant: Tenant) -> tuple[Connection, ...]:
        nonlocal error
        if pid not in known and spent_ns[tenant] < _LONGEST_NS:
            began_ns = time.monotonic_ns()
            try:
                known[pid] = read(procfs, pid, namespace)
            except Exception as failure:  # noqa: BLE001  # whatever one process's sockets do to us ends its reading alone
                known[pid] = ()
                error = error or f"connections of process {pid} cannot be read: {type(failure).__name__}: {failure}"
            spent_ns[tenant] += time.monotonic_ns() - began_ns
        return known.get(pid, ())

    found: dict[int, _Found] = {}
    for one in asked:
        every = connections_of(one.pid, one.namespace, one.tenant)
        wanted = {(mine.remote, mine.local): mine for mine in [mine for mine in every if mine.waits] or every}
        here = []
        for pid, namespace in one.candidates if wanted else ():
            theirs = connections_of(pid, namespace, one.tenant)
            match = next((both for its in theirs if (both := wanted.get((its.local, its.remote))) is not None), None)
            if match is not None:
                here.append((pid, match))
        found[one.pid] = every, tuple(here)
    return _Reading(found, sum(spent_ns.values()) / 1e9, error)


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
