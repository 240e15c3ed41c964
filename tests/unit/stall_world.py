"""A host whose ranks, rails and clock do what a test says, up to four looks a second, as fast as the machine can.

Simulated: the kernel's tables, what /proc and the network devices tell, and time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from railscope.agent.facts.hardware import NvlinkFacts
from railscope.agent.facts.stall import Disagreement, LastCollectives, Stall
from railscope.agent.node.collectives.communicators import Communicator
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.agent.node.stalls.detector import StallLimits
from railscope.agent.node.stalls.evidence import ProcessFacts, RailSigns
from railscope.agent.node.stalls.stacks import Stacks
from railscope.agent.node.stalls.watchdog import EVALUATION_NS, Watchdog
from railscope.agent.node.targets.jobs import JobFacts
from railscope.agent.node.targets.memory import ProcessMemory
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.clock import Clock
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import DataType, Op
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.memory.proxy_work import ProxyWorkLayout
from railscope.probes.nccl.programs.internals import Sent
from railscope.probes.nccl.records.calls import CALL_EVENT, COMMUNICATOR, COMMUNICATOR_KEY
from railscope.probes.nccl.records.internals import (
    CONNECTION,
    CONNECTION_KEY,
    HISTORY,
    HISTORY_KEY,
    OPERATION,
    OPERATION_KEY,
    NetworkKind,
)
from railscope.probes.processes.owner import ProcessOwner
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit.collectives_kernel import SimulatedHostCalls
from tests.unit.driver_tables import SimulatedDriverCalls

COMM_HASH = 0xABCD
START_NS = 1_000_000_000_000
MIB = 1 << 20
LOOK_S = EVALUATION_NS / 1e9
LOOKS_A_SECOND = 1_000_000_000 // EVALUATION_NS
FLOOR_S = 2.0
AFTER_S = 30.0
RUNNING = ProcessFacts("running", 0, 0.1, 0.0, 0, None)
COMPUTING = replace(RUNNING, busy_ratio=1.0)
WRITING = replace(RUNNING, busy_ratio=0.2, written_bytes=500 * MIB)
STOPPED = replace(RUNNING, condition="stopped", busy_ratio=0.0)
STARVED = replace(RUNNING, busy_ratio=0.01, waited_ratio=1.5)
MOVING = replace(RUNNING, moved_bytes=100 * MIB)
STANDING = replace(RUNNING, moved_bytes=0)
RAILS = (
    RailSigns("0", "rail0", "", up=True, window_ns=0, connections=2, speed_bytes_per_second=10**10),
    RailSigns("1", "rail1", "", up=True, window_ns=0, connections=2, speed_bytes_per_second=10**10),
)
_WINDOW_NS = 1_500_000_000
_READ_NS = 400_000_000


class SimulatedClock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now_ns = START_NS
        self.day_ns = 10**18
        """The time of day less the other one."""

    def monotonic_ns(self) -> int:
        return self.now_ns

    def realtime_ns(self) -> int:
        return self.now_ns + self.day_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@dataclass(slots=True)
class Rank:
    """One rank of this host, and its process: of those with the same pid the first one's."""

    world: World
    instance: int
    rank: int
    pid: int
    comm_hash: int = COMM_HASH
    op: Op | None = None
    """Of its last call, as `World.tell_calls` tells it; None: that of all."""
    process: ProcessFacts = RUNNING
    """As the closer look shows it; the window is filled in."""
    rails: tuple[RailSigns, ...] = RAILS
    waits_in: tuple[str, ...] = ()
    hidden: str = ""
    sequence: int = 0
    last_ns: int = START_NS
    posted: tuple[int, int, int] | None = None
    """When the operation in flight was handed over, its op and payload."""
    done: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    messages: int = 0
    ahead: int = 0
    """Calls made since the one in flight."""
    sent_ns: int = 0
    """When the last of them was handed over."""
    written_bytes: int = 0
    """To storage, since it began."""
    ended: bool = False
    ending: bool = False
    """Its process was killed, and gives back its memory."""
    gone: bool = False
    library: int = 0

    def work(self, operations: int, each_s: float, op: Op = Op.AllReduce, size: int = MIB) -> None:
        """Call and complete some operations within the last look."""
        self.sequence += operations
        self.last_ns = self.world.clock.now_ns
        self._complete(operations, int(each_s * 1e9), op, size)

    def replay(self, operations: int, each_s: float) -> None:
        """The same from a graph: no call is made."""
        self._complete(operations, int(each_s * 1e9), Op.AllReduce, MIB)

    def begin(self, op: Op = Op.AllReduce, size: int = MIB, *, sends: bool = True) -> None:
        """Call an operation and hand it over."""
        self.sequence += 1
        self.last_ns = self.world.clock.now_ns
        self.posted = self.last_ns, op, size
        if sends:
            self._send(1)

    def complete(self) -> None:
        """The operation in flight is complete."""
        assert self.posted is not None
        posted_ns, op, size = self.posted
        self.posted = None
        self._complete(1, self.world.clock.now_ns - posted_ns, Op(op), size)

    def _complete(self, operations: int, each_ns: int, op: Op, size: int) -> None:
        sums = self.done.setdefault((op, max(size - 1, 0).bit_length()), [0, 0, 0])
        sums[0] += operations
        sums[1] += operations * each_ns
        sums[2] += operations * size
        self._send(operations)

    def _send(self, messages: int) -> None:
        self.messages += messages
        self.sent_ns = self.world.clock.now_ns


class WorldFacts:
    """What the rest of the agent would know of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.calls_unprobed = world.unprobed.__contains__
        self.communicator = world._communicator
        self.process = world._process
        self.completed = world._completed
        self.proxy_layout = world._layout
        self.level = world._level

    def communicator_changes(self) -> int:
        world = self._world
        return hash((world.whole, world.nranks, tuple((one.instance, one.ended, one.comm_hash) for one in world.ranks)))

    def unmade(self, pid: int) -> list[Communicator]:
        found = (self._world._communicator(rank.instance) for rank in self._world.ranks if rank.pid == pid)
        return [one for one in found if one is not None]

    def ended(self, comm: str) -> set[str]:
        return {
            str(rank.rank)
            for rank in self._world.ranks
            if f"{rank.comm_hash:016x}" == comm and (rank.ended or rank.gone)
        }

    def disagreement(self, comm: str) -> Disagreement | None:
        return self._world.disagreements.get(comm)

    def last_collectives(self, instance: int) -> LastCollectives[str] | None:
        return self._world.last_collectives.get(instance)

    def position(self, instance: int, calls: int) -> int | None:
        before = self._world.calls_before.get(instance)
        return None if before is None else before + calls

    def owner(self, pid: int) -> ProcessOwner | None:
        return self._world.owners.get(pid)

    def devices(self, _pid: int, _numbers: Collection[int]) -> frozenset[str]:
        return frozenset()


class World:
    """One host.  `seen`: completion is seen; without it calls are all there is."""

    def __init__(
        self,
        *,
        seen: bool = True,
        ranks: int = 1,
        nranks: int = 2,
        limits: StallLimits | None = None,
        procfs: Path = Path("/nowhere"),
        stacks: Callable[[Clock], Stacks] | None = None,
        driver_calls: SimulatedDriverCalls | None = None,
        nvlinks: Callable[[], Iterable[NvlinkFacts]] = tuple,
    ) -> None:
        """`procfs`: where threads are looked for that are inside calls."""
        self.clock = SimulatedClock()
        self.seen = seen
        """May change: the governor takes back what it cannot afford."""
        self.left_behind = False
        """The kernel's tables still hold what was there when completion was seen last."""
        self.nranks = nranks
        self.ranks = [Rank(self, 7 + number, number, 4711 + number) for number in range(ranks)]
        self.counts_messages = True
        self.whole = True
        """The agent was there before the communicators."""
        self.calls_before: dict[int, int] = {}
        """By instance: calls before the agent came, of ranks for which NCCL's own numbers tell them."""
        self.owners: dict[int, ProcessOwner] = {}
        self.tenants: dict[int, Tenant] = {}
        """By pid, of those that are told."""
        self.unprobed: set[int] = set()
        """Libraries whose calls meet no probe, by number."""
        self.disagreements: dict[str, Disagreement] = {}
        """By communicator: where ranks of this host did not make the same collectives."""
        self.last_collectives: dict[int, LastCollectives[str]] = {}
        self.graph_in_flight = False
        """What is in flight is of a graph: no call was made for it."""
        self.begun: list[tuple[int, Stall]] = []
        self.outdated: list[int] = []
        """Processes that were to be read again, by pid."""
        self._asked: dict[int, tuple[int, int]] = {}
        self.gap_ns = 0
        self.looks = 0
        self.rests = True
        """Only looks when the last look said so, or something came or went: as the daemon does."""
        self._living: list[int] = []
        self._next_look_ns = 0
        self.host_calls = SimulatedHostCalls()
        self.watch = Watchdog(
            self,
            self,
            WorldFacts(self),
            self.clock,
            limits or StallLimits(),
            procfs=procfs,
            memory=ProcessMemory(Path("/nowhere"), InProcess(), lambda _pid: UNKNOWN_TENANT),
            rails_of=lambda _netns: (),
            inspector=self,
            began=lambda stall: self.begun.append((self.clock.now_ns, stall)),
            host_calls=self.host_calls,
            driver_calls=driver_calls,
            nvlinks=nvlinks,
            stacks=stacks(self.clock) if stacks is not None else None,
        )

    @property
    def stall(self) -> Stall | None:
        """The only one."""
        assert len(self.watch.current) <= 1
        return next(iter(self.watch.current), None)

    def step(self, looks: int = 1) -> None:
        """Let a quarter of a second pass, and look where it is time to."""
        for _ in range(looks):
            self.clock.now_ns += EVALUATION_NS
            for rank in self.ranks:
                rank.written_bytes += rank.process.written_bytes * EVALUATION_NS // _WINDOW_NS
            living = [rank.instance for rank in self.ranks if not rank.ended and not rank.gone]
            # The daemon hears of what comes and goes.
            if self.clock.now_ns >= self._next_look_ns or living != self._living or not self.rests:
                self._living = living
                self.looks += 1
                self._next_look_ns = self.clock.now_ns + self.watch.evaluate()

    def train(self, seconds: float, operations: int = 8, each_s: float = 0.005) -> None:
        """All ranks do what they usually do."""
        for _ in range(int(seconds * 4)):
            for rank in self.ranks:
                rank.work(operations, each_s)
            self.step()

    def until_flagged(self, seconds: float) -> float:
        """Time until somebody stalls; fails if nobody does within so many seconds."""
        began_ns = self.clock.now_ns
        while not self.watch.current:
            assert self.clock.now_ns - began_ns < seconds * 1e9, "nothing was flagged"
            self.step()
        return (self.clock.now_ns - began_ns) / 1e9

    def tell_calls(self, op: Op = Op.AllReduce) -> None:
        """Write events of the last call of every rank."""
        events = np.zeros(len(self.ranks), CALL_EVENT)
        events["instance"] = [rank.instance for rank in self.ranks]
        events["sequence"] = [rank.sequence for rank in self.ranks]
        events["op"] = [op if rank.op is None else rank.op for rank in self.ranks]
        events["data_type"] = DataType.Float32
        self.watch.record_calls(events)

    # What the agent asks the kernel.

    def read(self) -> tuple[Records, Records]:
        keys, values = np.zeros(len(self.ranks), COMMUNICATOR_KEY), np.zeros(len(self.ranks), COMMUNICATOR)
        for at, rank in enumerate(self.ranks):
            keys[at]["tgid"] = rank.pid
            values[at]["instance"], values[at]["sequence"] = rank.instance, rank.sequence
            values[at]["last_ns"], values[at]["library"] = rank.last_ns, rank.library
        return keys, values

    def lookup(self, key: bytes) -> Records | None:
        raise NotImplementedError

    def delete(self, key: bytes) -> None:
        raise NotImplementedError

    def _level(self) -> Level:
        if not self.seen:
            return Level.COUNTS
        return Level.RAILS if self.counts_messages else Level.COMPLETION

    def operations(self) -> tuple[Records, Records]:
        posted = [rank for rank in self.ranks if rank.posted is not None and (self.seen or self.left_behind)]
        values = np.zeros(len(posted), OPERATION)
        for at, rank in enumerate(posted):
            assert rank.posted is not None
            values[at]["posted_ns"], values[at]["op"], values[at]["payload_bytes"] = rank.posted
            values[at]["instance"] = rank.instance
            values[at]["before_sequence"] = rank.sequence - 1 - rank.ahead
            values[at]["algorithm"], values[at]["net_devices"] = 1, 3
        return np.zeros(len(posted), OPERATION_KEY), values

    def connections(self) -> tuple[Records, Records]:
        return np.zeros(0, CONNECTION_KEY), np.zeros(0, CONNECTION)

    def histories(self) -> tuple[Records, Records]:
        rows = [(rank.instance, *kind, sums) for rank in self.ranks if self.seen for kind, sums in rank.done.items()]
        keys, values = np.zeros(len(rows), HISTORY_KEY), np.zeros(len(rows), HISTORY)
        for at, (instance, op, size, sums) in enumerate(rows):
            keys[at]["instance"], keys[at]["op"], keys[at]["size_bucket"] = instance, op, size
            values[at] = tuple(sums)
        return keys, values

    def sent(self) -> list[Sent]:
        if not self.counts_messages or not self.seen:
            return []
        return [Sent(rank.pid, 1, NetworkKind.SOCKET, 0, rank.messages, 0, rank.sent_ns) for rank in self.ranks]

    def _communicator(self, instance: int) -> Communicator | None:
        rank = next((rank for rank in self.ranks if rank.instance == instance), None)
        if rank is None:
            return None
        ended_ns = self.clock.now_ns if rank.ended else None
        return Communicator(
            instance, rank.pid, START_NS, rank.comm_hash, rank.rank, self.nranks, ended_ns=ended_ns, whole=self.whole
        )

    def _process(self, pid: int) -> ObservedProcess | None:
        rank = next((rank for rank in self.ranks if rank.pid == pid), None)
        if rank is None or rank.gone:
            return None
        tenant = self.tenants.get(pid, UNKNOWN_TENANT)
        return ObservedProcess(ProcessIdentity(pid, 1), None, JobFacts(), "", "2.27.3", tenant=tenant)

    def _completed(self, instance: int) -> int | None:
        rank = next(rank for rank in self.ranks if rank.instance == instance)
        if not self.seen:
            return None
        return rank.sequence - (rank.posted is not None and not self.graph_in_flight)

    def _layout(self, _library: int) -> ProxyWorkLayout | None:
        return None

    # What a closer look shows.

    def bridge(self, gap_ns: int) -> None:
        self.gap_ns = gap_ns

    def process(self, process: ObservedProcess) -> ProcessFacts:
        rank = self._of(process)
        since_ns, asked_ns = self._asked.get(rank.pid, (0, 0))
        now_ns = self.clock.now_ns
        if now_ns - asked_ns > _WINDOW_NS + self.gap_ns:
            since_ns = now_ns
        self._asked[rank.pid] = since_ns, now_ns
        window_ns = min((now_ns - since_ns) // _READ_NS * _READ_NS, _WINDOW_NS + self.gap_ns)
        return replace(rank.process, window_ns=window_ns)

    def rails(self, process: ObservedProcess, devices: frozenset[str]) -> tuple[RailSigns, ...]:
        rails = self._of(process).rails
        return tuple(replace(rail, window_ns=_WINDOW_NS) for rail in rails if not devices or rail.device in devices)

    def why_hidden(self, process: ObservedProcess) -> str:
        return self._of(process).hidden

    def outdate(self, process: ObservedProcess) -> None:
        self.outdated.append(process.identity.pid)

    def is_ending(self, process: ObservedProcess) -> bool:
        return self._of(process).ending

    def written_bytes(self, process: ObservedProcess, *, closely: bool) -> int | None:
        del closely
        pid = process.identity.pid
        return next((rank.written_bytes for rank in self.ranks if rank.pid == pid and not rank.gone), None)

    def waits_for_network(self, process: ObservedProcess) -> tuple[str, ...]:
        return self._of(process).waits_in

    def remember_threads(self, process: ObservedProcess) -> None:
        pass

    def forget(self, pid: int) -> None:
        pass

    @property
    def open(self) -> bool:
        return False

    def close_unused(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _of(self, process: ObservedProcess) -> Rank:
        return next(rank for rank in self.ranks if rank.pid == process.identity.pid)


def steady(world: World, seconds: float = 20.0) -> None:
    """So long that what is usual is known."""
    for rank in world.ranks:
        rank.process = MOVING
    world.train(seconds)
    for rank in world.ranks:
        rank.process = STANDING
    world.tell_calls()
