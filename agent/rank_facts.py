"""What every rank's end of a communicator is at: its calls, the oldest operation in flight, and how it usually goes.

Where completion is seen, an operation is in flight when it was handed to NCCL's proxy and is not complete.  Where only
calls are seen, the communicator's sequence must stand, and something else must say that an operation is in flight:
NCCL's proxy has work, peers' bytes lie unread or unacknowledged, a thread that took part in collectives waits for the
network, or another rank of this host is ahead.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from agent.accounting import Table
from agent.communicators import Communicator, ObservedProcess
from agent.history import Histories
from agent.operation_times import OperationTimes
from agent.snapshot import UNKNOWN
from agent.stall_facts import InFlight, OwnHistory, ProcessFacts, RailSigns, RankFacts
from agent.stragglers import NOT_BY_ALL
from probes.maps import Records
from probes.nccl.abi import Op, op_name
from probes.nccl.internal_records import UNKNOWN_BYTES, UNKNOWN_SIZE
from probes.nccl.internals import Sent
from probes.nccl.proxy_work import ProxyWorkLayout, proxy_has_work

IDLE_NS: Final = 600_000_000_000
"""A communicator without a call for this long is idle, whatever its threads wait for."""
_HISTORY_NS: Final = 1_000_000_000
_SIGNS_NS: Final = 1_000_000_000
_SENDS_NS: Final = 1_500_000_000
"""Messages are looked at once a second."""
_BEGINS_WITH_A_SEND: Final = frozenset({Op.AllReduce, Op.AllGather, Op.ReduceScatter})
"""In a ring every rank's first step of these sends its own data, and waits for nobody."""
_RING: Final = 1


class Look(Protocol):
    """What is needed of a closer look (agent/close_look.py)."""

    @property
    def open(self) -> bool: ...
    def process(self, process: ObservedProcess) -> ProcessFacts: ...
    def waits_for_network(self, process: ObservedProcess) -> tuple[str, ...]: ...
    def remember_threads(self, process: ObservedProcess) -> None: ...
    def rails(self, process: ObservedProcess, devices: frozenset[str]) -> tuple[RailSigns, ...]: ...
    def hidden(self, process: ObservedProcess) -> str: ...
    def forget(self, pid: int) -> None: ...
    def sweep(self) -> None: ...
    def close(self) -> None: ...


class InFlightTables(Protocol):
    """What is needed of the programs below the entry points (probes/nccl/internals.py)."""

    def operations(self) -> tuple[Records, Records]: ...
    def connections(self) -> tuple[Records, Records]: ...
    def histories(self) -> tuple[Records, Records]: ...
    def sent(self) -> list[Sent]: ...


@dataclass(frozen=True, slots=True)
class Known:
    """What the rest of the agent knows."""

    communicator: Callable[[int], Communicator | None]
    """By instance."""
    process: Callable[[int], ObservedProcess | None]
    """By pid."""
    completed: Callable[[int], int | None]
    """By instance: calls that are complete; None: completion cannot be seen."""
    proxy_layout: Callable[[int], ProxyWorkLayout | None]
    """By number of the library."""
    devices: Callable[[int, set[int]], frozenset[str]]
    """Names of a process's network devices, by pid and NCCL's numbers; empty where one of them is not known."""


@dataclass(slots=True)
class _Sign:
    sequence: int
    looked_ns: int
    flight: InFlight | None

    def due(self, now_ns: int, rank: RankFacts) -> bool:
        """Whether to look again: at once when calls were made, and ever more seldom while there is no sign."""
        pause_ns = _SIGNS_NS if self.flight is not None else max(_SIGNS_NS, (now_ns - rank.last_call_ns) // 10)
        return self.sequence != rank.enqueued or now_ns - self.looked_ns >= pause_ns


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one rank's end of a communicator is."""

    process: ObservedProcess
    address: int
    """Of the communicator, in the process."""
    library: int


class RankReader:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        communicators: Table,
        tables: InFlightTables | None,
        known: Known,
        look: Look,
        procfs: Path,
        suspicion_ns: int,
    ) -> None:
        """`tables` None: only calls are seen.  Signs are looked for when the calls have stood for `suspicion_ns`."""
        self._communicators = communicators
        self._tables = tables
        self._known = known
        self._look = look
        self._procfs = procfs
        self._suspicion_ns = suspicion_ns
        self._histories = Histories()
        self.times = OperationTimes()
        self._history_ns = 0
        self._slow: dict[int, tuple[int | None, OwnHistory]] = {}
        """Communicators whose operations (op; None: calls of any) have become slower, as of the last second."""
        self._connections: Records | None = None
        """As of the last look; None: nobody asked."""
        self._unusual: set[int] = set()
        """Communicators that were stalled since histories were read last."""
        self._living: set[int] = set()
        self._last_op: dict[int, int] = {}
        self._apart: set[int] = set()
        """Communicators used for what only some ranks call: their ranks' calls are numbered differently."""
        self._signs: dict[int, _Sign] = {}
        self._last_send: dict[int, tuple[int, int]] = {}
        """By pid: when the last message was handed over, and when that was read."""
        self._advanced_ns: dict[int, int] = {}
        """By pid: when operations were last seen to have completed."""
        self._operations: dict[int, int] = {}
        """By pid: operations that its communicators had completed when messages were last counted."""

    def take_calls(self, events: Records) -> None:
        """Learn what each communicator was called for last: dtype CALL_EVENT, in the order of the calls."""
        self._last_op.update(zip(events["instance"].tolist(), events["op"].tolist(), strict=True))
        apart = NOT_BY_ALL[events["op"]]
        if apart.any():
            self._apart.update(np.unique(events["instance"][apart]).tolist())

    def read(self, now_ns: int, stalled: Iterable[int]) -> list[RankFacts]:
        """Every living rank of this host; `stalled`: instances whose last moments are not usual.

        Raises:
            KernelRefusal: a table cannot be read.
        """
        keys, values = self._communicators.read()
        pids = dict(zip(values["instance"].tolist(), keys["tgid"].tolist(), strict=True))
        oldest = self._oldest()
        self._connections = None
        self._unusual.update(stalled)
        remember = now_ns - self._history_ns >= _HISTORY_NS
        if remember:
            self._history_ns = now_ns
            unusual, self._unusual = self._unusual, set()
            self._take_histories(now_ns, unusual, pids)
        found = []
        for key, value in zip(keys, values, strict=True):
            instance, pid = int(value["instance"]), int(key["tgid"])
            communicator, process = self._known.communicator(instance), self._known.process(pid)
            if communicator is None or communicator.ended_ns is not None or process is None or process.ended_ns:
                continue
            if communicator.nranks == 1:
                continue
            rank = self._rank(communicator, value)
            if remember:
                self._histories.take_calls(now_ns, instance, rank.enqueued, stalled=instance in unusual)
                if rank.completed is None and now_ns - rank.last_call_ns < _HISTORY_NS:
                    self._look.remember_threads(process)
            if instance in oldest:
                rank = self._with_operation(now_ns, rank, oldest[instance])
            found.append((rank, _Place(process, int(key["comm"]), int(value["library"]))))
        living = {rank.instance for rank, _ in found}
        if self._living - living:
            # The kernel keeps what they did for half a second more.
            self.take_times()
        self._living = living
        if remember:
            self._histories.forget(living)
            slowest = {one: self._histories.slowest(now_ns, one, stalled=one in unusual) for one in living}
            self._slow = {one: history for one, history in slowest.items() if history is not None}
        ahead = _most_calls(rank for rank, _ in found)
        return [
            self._with_signs(now_ns, rank, place, ahead) if rank.in_flight is None else rank for rank, place in found
        ]

    def take_times(self) -> None:
        """Learn now how long operations took: the kernel is about to forget some of them.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        if self._tables is not None:
            self.times.take(*self._tables.histories(), self._known.communicator)

    def op_of(self, instance: int) -> str:
        """What a communicator was called for last."""
        op = self._last_op.get(instance)
        return UNKNOWN if op is None else op_name(op)

    def ways(self, rank: RankFacts) -> tuple[frozenset[str], tuple[int, ...]]:
        """Devices that a communicator uses, and ranks that it waits to receive from."""
        if self._tables is None:
            return frozenset(), ()
        if self._connections is None:
            _, self._connections = self._tables.connections()
        connections = self._connections
        connections = connections[connections["instance"] == rank.instance]
        waiting = connections[(connections["send"] == 0) & (connections["posted"] > connections["completed"])]
        numbers = {int(number) for number in connections["net_device"].tolist() if number >= 0}
        return self._known.devices(rank.pid, numbers), tuple(sorted(set(waiting["peer"].tolist())))

    def sends(self, now_ns: int, pid: int) -> bool | None:
        """Whether a process handed anything to a network device within the last moments; None: not observed."""
        if pid not in self._last_send or not self._counted(pid):
            return None
        return now_ns - self._last_send[pid][0] < _SENDS_NS

    def forget_process(self, pid: int) -> None:
        """A process has ended."""
        self._last_send.pop(pid, None)
        self._advanced_ns.pop(pid, None)
        self._operations.pop(pid, None)

    def forget(self, instances: Iterable[int]) -> None:
        """Nobody can ask about these communicators any more."""
        gone = tuple(instances)
        self.times.forget(gone)
        for instance in gone:
            self._signs.pop(instance, None)
            self._last_op.pop(instance, None)
            self._apart.discard(instance)
            self._unusual.discard(instance)

    def _rank(self, communicator: Communicator, value: Records) -> RankFacts:
        instance = communicator.instance
        op, slow = self._slow.get(instance, (None, None))
        return RankFacts(
            instance=instance,
            comm=communicator.name,
            rank=communicator.rank,
            nranks=communicator.nranks,
            pid=communicator.tgid,
            enqueued=int(value["sequence"]),
            completed=self._known.completed(instance),
            last_call_ns=int(value["last_ns"]) or int(value["first_ns"]),
            in_flight=None,
            slow=slow,
            slow_op=self.op_of(instance) if op is None else op_name(op),
            comparable=communicator.whole and instance not in self._apart,
        )

    def _take_histories(self, now_ns: int, unusual: set[int], pids: dict[int, int]) -> None:
        if self._tables is None:
            return
        keys, values = self._tables.histories()
        self._histories.take(now_ns, keys, values, unusual)
        self.times.take(keys, values, self._known.communicator)
        operations: defaultdict[int, int] = defaultdict(int)
        for instance, count in zip(keys["instance"].tolist(), values["operations"].tolist(), strict=True):
            operations[pids.get(instance, 0)] += count
        for sent in self._tables.sent():
            last_ns = max(sent.last_ns, self._last_send.get(sent.tgid, (0, 0))[0])
            self._last_send[sent.tgid] = last_ns, now_ns
            if operations[sent.tgid] != self._operations.get(sent.tgid, 0):
                self._advanced_ns[sent.tgid] = now_ns
        self._operations = dict(operations)

    def _counted(self, pid: int) -> bool:
        """Whether messages of a process are counted: not any more where operations went on without one."""
        return self._last_send.get(pid, (0, 0))[0] + 2 * _HISTORY_NS >= self._advanced_ns.get(pid, 0)

    def _oldest(self) -> dict[int, Records]:
        """The first operation of each communicator that is not complete, by instance."""
        if self._tables is None:
            return {}
        _, operations = self._tables.operations()
        operations = operations[np.lexsort((operations["launch"], operations["instance"]))]
        instances, at = np.unique(operations["instance"], return_index=True)
        return dict(zip(instances.tolist(), operations[at], strict=True))

    def _with_operation(self, now_ns: int, rank: RankFacts, operation: Records) -> RankFacts:
        op, payload = int(operation["op"]), int(operation["payload_bytes"])
        posted_ns = int(operation["posted_ns"])
        size = UNKNOWN_SIZE if payload == UNKNOWN_BYTES else max(payload - 1, 0).bit_length()
        last_send_ns, read_ns = self._last_send.get(rank.pid, (posted_ns, 0))
        flight = InFlight(
            op=op_name(op),
            payload_bytes=None if payload == UNKNOWN_BYTES else payload,
            since_ns=posted_ns,
            strength="strong",
            sign="handed to the network and not complete",
            history=self._histories.of(now_ns, rank.instance, op, size),
            nothing_sent=op in _BEGINS_WITH_A_SEND
            and int(operation["algorithm"]) == _RING
            and int(operation["net_devices"]) != 0
            and self._counted(rank.pid)
            and last_send_ns < posted_ns < read_ns,
            calls_before=int(operation["before_sequence"]),
        )
        return replace(rank, in_flight=flight)

    def _with_signs(self, now_ns: int, rank: RankFacts, place: _Place, ahead: dict[str, int]) -> RankFacts:
        """The same with what says that something is in flight, although no operation is seen."""
        standing_ns = now_ns - rank.last_call_ns
        if not rank.enqueued or standing_ns > IDLE_NS or standing_ns < self._suspicion_ns:
            self._signs.pop(rank.instance, None)
            return rank
        known = self._signs.get(rank.instance)
        if known is None or known.due(now_ns, rank):
            sign = self._sign(rank, place, ahead)
            flight = None
            if sign:
                since_ns = rank.last_call_ns
                if known is not None and known.sequence == rank.enqueued:
                    # What the last look saw no sign of began after it: a replay of a graph makes no call.
                    since_ns = known.looked_ns if known.flight is None else known.flight.since_ns
                history = self._histories.of_calls(now_ns, rank.instance)
                flight = InFlight(self.op_of(rank.instance), None, since_ns, "weak", sign, history)
            known = self._signs[rank.instance] = _Sign(rank.enqueued, now_ns, flight)
        return replace(rank, in_flight=known.flight)

    def _sign(self, rank: RankFacts, place: _Place, ahead: dict[str, int]) -> str:
        """Why something must be in flight; empty: nothing says so."""
        process = place.process
        facts = self._look.process(process)
        if facts.condition in ("stopped", "frozen"):
            return f"its process is {facts.condition} in the middle of its calls"
        if rank.comparable and rank.comm != UNKNOWN and ahead.get(rank.comm, 0) > rank.enqueued:
            return f"another rank of this host has made {ahead[rank.comm] - rank.enqueued} calls more"
        rails = self._look.rails(process, frozenset())
        unread = sum(rail.unread_bytes for rail in rails)
        if unread:
            return f"{unread} bytes that its peers sent lie unread"
        if any(rail.unanswered for rail in rails):
            return "bytes that it sent are not acknowledged"
        if rank.completed is not None:
            return ""
        works = self._proxy_works(rank.pid, place)
        if works is not None:
            return "NCCL's proxy has operations under way" if works else ""
        waiting = self._look.waits_for_network(process)
        return f"a thread that took part in collectives waits in {', '.join(waiting)}" if waiting else ""

    def _proxy_works(self, pid: int, place: _Place) -> bool | None:
        """None: that cannot be known."""
        layout = self._known.proxy_layout(place.library)
        if layout is None:
            return None
        try:
            memory = os.open(self._procfs / str(pid) / "mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return proxy_has_work(memory, place.address, layout)
        finally:
            os.close(memory)


def _most_calls(ranks: Iterable[RankFacts]) -> dict[str, int]:
    """By communicator: the most calls that any rank of this host made, of those that can be compared."""
    most: dict[str, int] = {}
    for rank in ranks:
        if rank.comparable:
            most[rank.comm] = max(most.get(rank.comm, 0), rank.enqueued)
    return most
