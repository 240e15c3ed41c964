"""Below the entry points of every fetched NCCL that tells of completion, 2.23 and newer: its own functions, called on
forged structures of its proxy.

No GPU, no network and no second rank take part: ncclProxyStart and ncclProfilerStopProxyOpEvent are the library's, what
they work on is memory laid out by the debug information of that build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.maps import Map
from railscope.probes.nccl.abi import DATA_TYPE_BYTES, DataType, Op
from railscope.probes.nccl.layouts.layout import Layouts, Structure
from railscope.probes.nccl.records.calls import COMMUNICATOR, COMMUNICATOR_KEY
from railscope.probes.nccl.records.internals import InternalStat, NetworkKind
from railscope.testbed.nccl.library import nccl_library
from tests.nccl.library import LIBRARIES
from tests.root.forged_failover import NEWEST
from tests.root.forged_proxy import COUNT, NET, OTHER, PAYLOAD_BYTES, Probed, forged, probed
from tests.root.probe_targets import FLOAT32, Target, all_reduce, attached, loaded, target

pytestmark = [pytest.mark.root, pytest.mark.nccl]


@pytest.fixture(scope="module", params=[name for name in LIBRARIES if name >= "2.23"])
def library(request: pytest.FixtureRequest) -> Iterator[tuple[Target, Mapping[str, Structure]]]:
    layouts, path = Layouts.load(), nccl_library(request.param)
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        structures = layouts.structures(elf.build_id)
    with target(path, layouts) as found:
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


@pytest.mark.parametrize("library", [NEWEST], indirect=True)  # alone it can fail over, which takes the name
@pytest.mark.parametrize("sends", [True, False], ids=["sends", "receives"])
def test_what_the_network_plugin_calls_a_connection_is_learned_with_it(probes: Probed, sends: bool) -> None:
    structure, field = ("sendNetResources", "netSendComm") if sends else ("recvNetResources", "netRecvComm")
    made, net = probes.forged, 0xABC0
    connection, resources = made.connections[0 if sends else 1], made.new(structure)
    made.store(resources, structure, 8, **{field: net})
    made.store(connection, "ncclProxyConnection", 8, transportResources=resources)
    made.post(connection)
    keys, values = probes.internals.connections()
    assert values["net_comm"][keys["connection"] == connection].tolist() == [net]


@pytest.mark.parametrize(
    ("instance", "destroyed_ns", "moved", "serves"),
    [(77, 0, 0, True), (77, 1, 0, False), (78, 0, 0, False), (77, 0, 8, False)],
    ids=["lives", "ended", "another at its address", "shares nothing with this one"],
)
def test_a_shared_connection_is_its_first_users_as_long_as_that_lives(
    probes: Probed, instance: int, destroyed_ns: int, moved: int, serves: bool
) -> None:
    """After it the address may be another connection's.  The first user stands in the kernel's tables alone."""
    sends, _ = probes.forged.connections
    probes.forged.post(sends)
    probes.forged.complete(sends)
    keys, entries = (rows.copy() for rows in Map.read(probes.internals._connections))
    values, first_user = entries["value"], 0x1000
    values["comm"], values["instance"] = first_user, 77
    values["group"] += moved
    probes.internals._connections.update(keys.tobytes(), entries.tobytes())
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
