"""Below the entry points of every fetched NCCL that tells of completion, 2.23 and newer: its own functions, called on
forged structures of its proxy.

No GPU, no network and no second rank take part: ncclProxyStart and ncclProfilerStopProxyOpEvent are the library's, what
they work on is memory laid out by the debug information of that build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from agent.completion import Completion
from probes.elf import Elf
from probes.nccl.abi import DATA_TYPE_BYTES, DataType, Op
from probes.nccl.internal_functions import InternalPoints, Level, internal_points
from probes.nccl.internal_records import InternalStat, NetworkKind, layout_record
from probes.nccl.internals import Internals, Progress
from probes.nccl.layout import Layouts, Structure
from probes.nccl.programs import NcclPrograms
from probes.nccl.records import COMMUNICATOR, COMMUNICATOR_KEY
from tests.nccl.library import LIBRARIES, nccl_library
from tests.root.caller import forge_communicator
from tests.root.probe_targets import FLOAT32, Target, all_reduce, attached, loaded, target

pytestmark = [pytest.mark.root, pytest.mark.nccl]

LIBRARY = 3
OWN, OTHER, LISTS = 1, 0, 4
"""Local ranks, which are the numbers of their proxies' lists here."""
IN_PROGRESS = 7
"""ncclInProgress: NCCL refuses a call once it has been counted, and touches nothing more of what is forged."""
IDENTITY = {"comm_hash": 0xABCD, "rank": 1, "nranks": 4, "n_nodes": 2, "local_rank": OWN, "local_ranks": 2}
COUNT, PAYLOAD_BYTES = 100, 400
OPERATION = 6
"""NCCL's number of the collective; odd ones are Send and Recv."""
POOL_BYTES = 256 << 20
"""More than a ncclProxyOpsPool of any version; untouched pages cost nothing."""
FUNCTIONS = ("_Z14ncclProxyStartP8ncclComm", "_Z28ncclProfilerStopProxyOpEventiP13ncclProxyArgs")
NET = 2
"""TRANSPORT_NET."""


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

    def list_of(self, rank: int) -> int:
        return self.lists + rank * self.structures["ncclProxyOps"].size_bytes

    def connection(self, *, sends: bool, device: int = 0) -> int:
        """One over the network."""
        connection = self.new("ncclProxyConnection")
        resources = self.new("sendNetResources" if sends else "recvNetResources")
        self.store(resources, "sendNetResources" if sends else "recvNetResources", netDev=device)
        self.store(connection, "ncclProxyConnection", send=int(sends), transport=NET)
        self.store(connection, "ncclProxyConnection", 8, transportResources=resources)
        return connection

    def post(self, *connections: int, operations: Sequence[int] = (), data_type: int = FLOAT32) -> None:
        """One AllReduce: the call, a proxy operation for each connection, and NCCL's own hand-over of them.

        `operations`: NCCL's number of each, where they are several collectives.
        """
        assert all_reduce(self.target, 1, self.comm, COUNT) != 0
        task = self.new("ncclTaskColl")
        self.store(task, "ncclTaskColl", 8, count=COUNT)
        self.store(task, "ncclTaskColl", func=int(Op.AllReduce), datatype=data_type)
        for at, connection in enumerate(connections):
            number = operations[at] if operations else OPERATION
            address = self.pool + at * self.structures["ncclProxyOp"].size_bytes
            self.store(address, "ncclProxyOp", 8, connection=connection, opCount=number, task__coll=task)
            self.store(address, "ncclProxyOp", next=at + 1 if at + 1 < len(connections) else -1)
            self.store(address, "ncclProxyOp", 1, coll=int(Op.AllReduce), protocol=2)
        if connections:
            self.store(self.list_of(OWN), "ncclProxyOps", nextOps=0, nextOpsEnd=len(connections) - 1)
        self.target.caller.call_at(self.start, 1, self.comm)
        # It took the list for what we take it for.
        where = self.list_of(OWN) + self.structures["ncclProxyOps"].offsets["nextOps"]
        assert self.target.caller.text(where, 4) == b"\xff" * 4

    def complete(self, connection: int) -> None:
        """The proxy is done with the operation's part on this connection, which is its third here."""
        arguments = self.new("ncclProxyArgs")
        part = arguments + 2 * self.structures["ncclProxySubArgs"].size_bytes
        self.store(part, "ncclProxySubArgs", 8, connection=connection)
        self.store(arguments, "ncclProxyArgs", 8, opCount=OPERATION)
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
    for rank in range(LISTS):
        caller.store(ranks + 4 * rank, rank, 4)
        made.store(made.list_of(rank), "ncclProxyOps", nextOps=-1, nextOpsEnd=-1)
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
        known = self.completion.of(self.progress().instance)
        return None if known is None else known.completed


@contextmanager
def probed(programs: NcclPrograms, made: Forged) -> Iterator[Probed]:
    with ExitStack() as stack:
        internals = Internals.load(programs)
        stack.callback(internals.close)
        internals.describe(LIBRARY, layout_record(made.structures))
        for level in Level:
            stack.callback(internals.attach(str(made.target.path), made.points, level).close)
        completion = Completion(internals, Level.ALL)
        stack.callback(completion.levels.close)
        yield Probed(made, programs, internals, completion)


@pytest.fixture(scope="module", params=[name for name in LIBRARIES if name >= "2.23"])
def library(request: pytest.FixtureRequest) -> Iterator[tuple[Target, Mapping[str, Structure]]]:
    layouts, path = Layouts.load(), nccl_library(request.param)
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        structures = layouts.structures(elf.build_id)
    with target(Path(path), layouts) as found:
        yield found, structures


@pytest.fixture
def probes(library: tuple[Target, Mapping[str, Structure]]) -> Iterator[Probed]:
    to, structures = library
    made = forged(to, structures)
    with loaded(to) as programs, attached(programs, to), probed(programs, made) as found:
        yield found


def test_every_fetched_library_has_all_that_is_probed(probes: Probed) -> None:
    assert set(probes.forged.points.points) == {
        *("proxy_stop", "proxy_post", "plan_replay", "socket_send", "ib_send", "plan_launch")
    }


def test_an_operation_is_complete_when_its_last_part_is(probes: Probed) -> None:
    sends, receives = probes.forged.connections
    probes.forged.post(sends, receives)
    handed = probes.progress()
    assert (handed.posted, handed.completed, handed.completed_sequence, handed.oldest_op) == (1, 0, 0, Op.AllReduce)
    assert handed.oldest_posted_ns is not None
    _, operations = probes.internals.operations()
    assert operations["payload_bytes"].tolist() == [PAYLOAD_BYTES]
    probes.forged.complete(sends)
    assert probes.completed() == 0
    probes.forged.complete(receives)
    assert probes.completed() == 1
    (duration,) = (durations for op, durations in probes.internals.durations().items() if op is Op.AllReduce)
    assert int(duration["count"]) == 1
    stats = probes.internals.stats()
    assert (stats[InternalStat.STOPS_UNKNOWN], stats[InternalStat.UNREADABLE]) == (0, 0)


@pytest.mark.parametrize(
    "data_type", [DataType.Int8, DataType.Float16, DataType.Float64, DataType.Bfloat16], ids=lambda one: one.name
)
def test_payload_goes_by_the_size_of_the_data_type(probes: Probed, data_type: DataType) -> None:
    sends, _ = probes.forged.connections
    probes.forged.post(sends, data_type=data_type)
    _, operations = probes.internals.operations()
    assert operations["payload_bytes"].tolist() == [COUNT * DATA_TYPE_BYTES[data_type]]
    assert operations["data_type"].tolist() == [data_type]


def test_each_collective_of_a_launch_has_devices_of_its_own(probes: Probed) -> None:
    """What only receives sends through none, and neither does what goes through memory."""
    devices = {2: 0, 4: 3, 6: 5}
    sends = [probes.forged.connection(sends=True, device=device) for device in devices.values()]
    receives, memory = probes.forged.connection(sends=False, device=1), probes.forged.connection(sends=True, device=7)
    probes.forged.store(memory, "ncclProxyConnection", transport=NET - 1)
    probes.forged.post(*sends, receives, memory, operations=(*devices, 8, 8))
    keys, operations = probes.internals.operations()
    found = dict(zip(keys["operation"].tolist(), operations["net_devices"].tolist(), strict=True))
    assert found == {**{number: 1 << device for number, device in devices.items()}, 8: 0}
    assert operations["parts"].tolist() == [1] * 4
    assert probes.progress().posted == 4
    _, connections = probes.internals.connections()
    assert sorted(connections["net_device"][connections["network"] == 1].tolist()) == [0, 1, 3, 5]


@pytest.mark.parametrize(
    ("instance", "destroyed_ns", "serves"), [(77, 0, True), (77, 1, False), (78, 0, False)], ids=str
)
def test_a_shared_connection_is_its_first_users_as_long_as_that_lives(
    probes: Probed, instance: int, destroyed_ns: int, serves: bool
) -> None:
    """After it the address may be another connection's.  The first user stands in the kernel's tables alone."""
    sends, _ = probes.forged.connections
    probes.forged.post(sends)
    probes.forged.complete(sends)
    keys, values = (rows.copy() for rows in probes.internals.connections())
    first_user = 0x1000
    values["comm"], values["instance"] = first_user, 77
    probes.internals._connections.update(keys.tobytes(), values.tobytes())
    key, user = np.zeros(1, COMMUNICATOR_KEY), np.zeros(1, COMMUNICATOR)
    key["comm"], key["tgid"] = first_user, probes.forged.target.caller.pid
    user["instance"], user["destroyed_ns"] = instance, destroyed_ns
    probes.programs.communicators.update(key.tobytes(), user.tobytes())
    probes.forged.post(sends)
    _, values = probes.internals.connections()
    assert values["comm"].tolist() == [first_user if serves else probes.forged.comm]
    assert (values["instance"].tolist() == [77]) is serves


def test_a_discarded_call_counts_as_complete_when_those_before_it_are(probes: Probed) -> None:
    (sends, _), to, comm = probes.forged.connections, probes.forged.target, probes.forged.comm
    all_reduce(to, 2, comm, 0)
    probes.forged.post(sends)
    all_reduce(to, 3, comm, 0)
    assert probes.completed() == 2
    probes.forged.complete(sends)
    assert probes.completed() == 6
    # A Send of nothing is a message, and waits for its turn; so does what comes behind it.
    to.caller.call("ncclSend", 1, 0, 0, FLOAT32, 0, comm, 7)
    all_reduce(to, 1, comm, 0)
    assert probes.completed() == 6


def test_what_goes_through_another_ranks_proxy_is_never_taken_for_complete(probes: Probed) -> None:
    """PXN: the operation's part that sends is in the list of another rank's proxy, which tells of its end elsewhere."""
    _, receives = probes.forged.connections
    probes.forged.store(probes.forged.list_of(OTHER), "ncclProxyOps", 8, pool=probes.forged.pool)
    probes.forged.post(receives)
    assert probes.progress().elsewhere
    probes.forged.complete(receives)
    assert probes.completed() is None
    assert all(int(record["count"]) == 0 for record in probes.internals.durations().values())


def test_a_communicator_that_only_sends_through_another_proxy_is_not_known_either(probes: Probed) -> None:
    sends, _ = probes.forged.connections
    probes.forged.post(sends)
    probes.forged.complete(sends)
    assert probes.completed() == 1
    probes.forged.store(probes.forged.list_of(OTHER), "ncclProxyOps", 8, pool=probes.forged.pool)
    probes.forged.post()
    assert probes.completed() is None


def test_the_process_whose_proxy_sends_for_another_counts_no_completion_but_every_byte(probes: Probed) -> None:
    """PXN, seen from the other side: what is done was handed over by no communicator of this process."""
    (sends, _), caller = probes.forged.connections, probes.forged.target.caller
    probes.forged.post(sends)
    foreign = probes.forged.new("ncclProxyConnection")
    probes.forged.complete(foreign)
    assert probes.completed() == 0
    assert probes.internals.stats()[InternalStat.STOPS_UNKNOWN] == 1
    socket = probes.forged.new("ncclNetSocketComm")
    probes.forged.store(socket, "ncclNetSocketComm", dev=1)
    point = probes.forged.points.points["socket_send"]
    with probes.forged.target.path.open("rb") as file, Elf.open(file.fileno()) as elf:
        start = elf.symbols([point.symbol])[point.symbol].file_offset
    caller.call_at(
        caller.address_of(probes.forged.target.path, start), 1, socket, caller.memory(4096), 4096, 0, 0,
        *(caller.memory(4096) for _ in range(2)),
    )  # fmt: skip
    (sent,) = probes.internals.sent()
    assert (sent.tgid, sent.network, sent.device, sent.messages, sent.bytes) == (
        caller.pid,
        NetworkKind.SOCKET,
        1,
        1,
        4096,
    )
