"""A communicator with a proxy of its own, forged in the memory of a process that has an NCCL library loaded.

ncclProxyStart and ncclProfilerStopProxyOpEvent are the library's; what they work on is laid out by the debug
information of that build.  No GPU, no network and no second rank take part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

from railscope.agent.node.completion.completion import Completion
from railscope.agent.node.inspection.inspection import InProcess
from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.functions.internals import InternalPoints, Level, internal_points
from railscope.probes.nccl.layouts.layout import Structure
from railscope.probes.nccl.programs.calls import NcclPrograms
from railscope.probes.nccl.programs.internals import Internals, Progress
from railscope.probes.nccl.records.internals import layout_record
from tests.root.caller import forge_communicator
from tests.root.probe_targets import FLOAT32, Target, all_reduce

LIBRARY = 3
LISTS = 4
"""Proxies that this rank can hand something to."""
OTHER, OWN = LIST_OF_LOCAL_RANK = (3, 2)
"""Number of each local rank's list; this rank is the second."""
IN_PROGRESS = 7
"""ncclInProgress: NCCL refuses a call once it has been counted, and touches nothing more of what is forged."""
IDENTITY = {"comm_hash": 0xABCD, "rank": 1, "nranks": 4, "n_nodes": 2, "local_rank": 1, "local_ranks": 2}
COUNT, PAYLOAD_BYTES = 100, 400
OPERATION = 6
"""NCCL's number of the collective; odd ones are Send and Recv."""
SEND_OPERATION = 7
POOL_BYTES = 256 << 20
"""More than a ncclProxyOpsPool of any version; untouched pages cost nothing."""
FUNCTIONS = ("_Z14ncclProxyStartP8ncclComm", "_Z28ncclProfilerStopProxyOpEventiP13ncclProxyArgs")
NET = 2
"""TRANSPORT_NET."""
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Forged:
    """A communicator with a proxy of its own, in the caller's memory."""

    target: Target
    structures: Mapping[str, Structure]
    points: InternalPoints
    start: int
    """Address of ncclProxyStart."""
    stop: int
    comm: int
    lists: int
    pool: int
    connections: tuple[int, ...]
    """One that sends, one that receives."""

    def store(self, address: int, structure: str, size_bytes: int = 4, **fields: int) -> None:
        for name, value in fields.items():
            offset = self.structures[structure].offsets[name.replace("__", ".")]
            self.target.caller.store(address + offset, value, size_bytes)

    def new(self, structure: str) -> int:
        return self.target.caller.memory(self.structures[structure].size_bytes)

    def list_of(self, number: int) -> int:
        return self.lists + number * self.structures["ncclProxyOps"].size_bytes

    def connection(self, *, sends: bool, device: int = 0) -> int:
        """One over the network."""
        connection = self.new("ncclProxyConnection")
        resources = self.new("sendNetResources" if sends else "recvNetResources")
        self.store(resources, "sendNetResources" if sends else "recvNetResources", netDev=device)
        self.store(connection, "ncclProxyConnection", send=int(sends), transport=NET)
        self.store(connection, "ncclProxyConnection", 8, transportResources=resources)
        return connection

    @contextmanager
    def swapped_out(self, address: int) -> Iterator[None]:
        """The page there, and the next one."""
        start, size_bytes = address & -PAGE_BYTES, 2 * PAGE_BYTES
        self.target.caller.show(start, size_bytes, visible=False)
        try:
            yield
        finally:
            self.target.caller.show(start, size_bytes, visible=True)

    def enqueue(self) -> None:
        """One AllReduce."""
        assert all_reduce(self.target, 1, self.comm, COUNT) != 0

    def operation(self, index: int) -> int:
        """Address of a proxy operation in the pool."""
        return self.pool + index * self.structures["ncclProxyOp"].size_bytes

    def hand_over(
        self,
        *connections: int,
        operations: Sequence[int] = (),
        data_type: int = FLOAT32,
        places: Sequence[int] = (),
        away: int | None = None,
    ) -> None:
        """A proxy operation for each connection, and NCCL's own hand-over of them.

        `operations`: NCCL's number of each, where they are several; odd ones are Send.  `places`: where in the pool
        they lie.  `away`: what lies at this address is swapped out meanwhile.
        """
        task = self.new("ncclTaskColl")
        self.store(task, "ncclTaskColl", 8, count=COUNT)
        self.store(task, "ncclTaskColl", func=int(Op.AllReduce), datatype=data_type)
        places = places or range(len(connections))
        for at, connection in enumerate(connections):
            number = operations[at] if operations else OPERATION
            function = int(Op.Send if number % 2 else Op.AllReduce)
            address = self.operation(places[at])
            self.store(address, "ncclProxyOp", 8, connection=connection, opCount=number, task__coll=task)
            self.store(address, "ncclProxyOp", next=places[at + 1] if at + 1 < len(connections) else -1)
            self.store(address, "ncclProxyOp", 1, coll=function, protocol=2)
            if "collAPI" in self.structures["ncclProxyOp"].offsets:
                self.store(address, "ncclProxyOp", 1, collAPI=function)
        if connections:
            self.store(self.list_of(OWN), "ncclProxyOps", nextOps=places[0], nextOpsEnd=places[-1])
        with self.swapped_out(away) if away is not None else nullcontext():
            self.target.caller.call_at(self.start, 1, self.comm)
        # It took the list for what we take it for.
        where = self.list_of(OWN) + self.structures["ncclProxyOps"].offsets["nextOps"]
        assert self.target.caller.text(where, 4) == b"\xff" * 4

    def post(self, *connections: int, operations: Sequence[int] = (), data_type: int = FLOAT32) -> None:
        """One AllReduce: the call and the hand-over."""
        self.enqueue()
        self.hand_over(*connections, operations=operations, data_type=data_type)

    def complete(self, connection: int, operation: int = OPERATION) -> None:
        """The proxy is done with the operation's part on this connection, which is its third here."""
        arguments = self.new("ncclProxyArgs")
        part = arguments + 2 * self.structures["ncclProxySubArgs"].size_bytes
        self.store(part, "ncclProxySubArgs", 8, connection=connection)
        self.store(arguments, "ncclProxyArgs", 8, opCount=operation)
        self.target.caller.call_at(self.stop, 1, 2, arguments)


def forged(to: Target, structures: Mapping[str, Structure]) -> Forged:
    caller = to.caller
    with to.path.open("rb") as file, Elf.open(file.fileno()) as elf:
        points, symbols = internal_points(elf, LIBRARY), elf.symbols(FUNCTIONS)
    start, stop = (caller.address_of(to.path, symbols[name].file_offset) for name in FUNCTIONS)
    comm = forge_communicator(
        caller, to.layout, structures["ncclComm"].size_bytes, {**IDENTITY, "async_result": IN_PROGRESS}
    )
    lists = caller.memory(LISTS * structures["ncclProxyOps"].size_bytes)
    made = Forged(to, structures, points, start, stop, comm, lists, caller.memory(POOL_BYTES), (0, 0))
    state, ranks = made.new("ncclProxyState"), caller.memory(4 * LISTS)
    for number in range(LISTS):
        made.store(made.list_of(number), "ncclProxyOps", nextOps=-1, nextOpsEnd=-1)
    for local_rank, number in enumerate(LIST_OF_LOCAL_RANK):
        caller.store(ranks + 4 * local_rank, number, 4)
    made.store(made.list_of(OWN), "ncclProxyOps", 8, pool=made.pool)
    made.store(state, "ncclProxyState", 8, proxyOps=lists)
    made.store(state, "ncclProxyState", tpRank=OWN)
    if "peerArraySize" in structures["ncclProxyState"].offsets:
        made.store(state, "ncclProxyState", peerArraySize=LISTS)
    shared = caller.memory(1 << 16, word=LISTS << 32 | LISTS)  # before 2.30 the number of lists lies somewhere there
    made.store(comm, "ncclComm", 8, proxyState=state, topParentLocalRanks=ranks, sharedRes=shared)
    return replace(made, connections=(made.connection(sends=True), made.connection(sends=False)))


@dataclass(frozen=True, slots=True)
class Probed:
    forged: Forged
    programs: NcclPrograms
    internals: Internals
    completion: Completion

    def progress(self) -> Progress:
        (progress,) = self.internals.progress().values()
        return progress

    def completed(self) -> int | None:
        """As the agent would show it."""
        self.completion.read()
        known = self.completion.progress_of(self.progress().instance)
        return None if known is None else known.completed

    def events(self) -> Records:
        """Operations completed since the last look: dtype COMPLETION_EVENT."""
        return self.internals.completion_events.read()


@contextmanager
def probed(programs: NcclPrograms, made: Forged) -> Iterator[Probed]:
    with ExitStack() as stack:
        internals = Internals.load(programs, write_events=True)
        stack.callback(internals.close)
        internals.describe(LIBRARY, layout_record(made.structures))
        for level in Level:
            stack.callback(internals.attach(str(made.target.path), made.points, level).close)
        completion = Completion(internals, Level.ALL, inspection=InProcess())
        stack.callback(completion.levels.close)
        yield Probed(made, programs, internals, completion)
