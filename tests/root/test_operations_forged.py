"""What is kept of each operation between its hand-over and its end, on forged structures of the newest fetched NCCL.

What differs between versions is in test_internals_forged.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.maps import Map
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.records.calls import owned
from railscope.probes.nccl.records.internals import COMPLETION_EVENT, InternalStat
from railscope.testbed.nccl.library import nccl_library
from tests.root.forged_proxy import (
    IDENTITY,
    NET,
    OPERATION,
    OTHER,
    PAGE_BYTES,
    PAYLOAD_BYTES,
    SEND_OPERATION,
    Forged,
    Probed,
    forged,
    probed,
)
from tests.root.probe_targets import attached, loaded, target

pytestmark = [pytest.mark.root, pytest.mark.nccl]

SECOND_NS = 1_000_000_000
RING_BYTES, RECORD_HEADER_BYTES = 1 << 21, 8
"""Of completion_events (proxy_tables.h), and of each record in a ring of the kernel's."""
LAUNCHES_BETWEEN_LOOKS = 256
GONE = 77
"""Of a communicator that ended: its number, and its address."""
FAR = 1000
"""A place in the pool that lies in other pages than the first ones."""


@pytest.fixture(scope="module")
def made() -> Iterator[Forged]:
    layouts, path = Layouts.load(), nccl_library()
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        structures = layouts.structures(elf.build_id)
    with target(path, layouts) as to:
        yield forged(to, structures)


@pytest.fixture
def probes(made: Forged) -> Iterator[Probed]:
    with loaded(made.target) as programs, attached(programs, made.target), probed(programs, made) as found:
        yield found


def copied(table: Map, number: str, numbers: range) -> None:
    """Fill a table with copies of its one entry, `number` being the field of the key in which they differ."""
    keys, values = (rows.copy() for rows in Map.read(table))
    for each in numbers:
        keys[number] = each
        table.update(keys.tobytes(), values.tobytes())


def test_each_connection_tells_what_it_was_given_and_what_it_is_done_with(probes: Probed) -> None:
    sends, receives = probes.forged.connections
    probes.forged.post(sends, receives, sends, operations=(6, 6, 8))
    probes.forged.complete(sends)
    keys, values = probes.internals.connections()
    found = {
        address: (posted, completed)
        for address, posted, completed in zip(
            keys["connection"].tolist(), values["posted"].tolist(), values["completed"].tolist(), strict=True
        )
    }
    assert found == {sends: (2, 1), receives: (1, 0)}
    assert (values["last_ns"] > 0).tolist() == (values["completed"] == 1).tolist()


def test_a_completed_operation_is_told_with_all_that_is_known_of_it(probes: Probed) -> None:
    sends, other = (probes.forged.connection(sends=True, device=device) for device in (3, 5))
    probes.forged.post(sends, other)
    for connection in (sends, other):
        probes.forged.complete(connection)
    (event,) = probes.events()
    assert (event["tgid"], event["comm"]) == (probes.forged.target.caller.pid, probes.forged.comm)
    assert (event["instance"], event["sequence"]) == (probes.progress().instance, 1)
    assert (event["op"], event["payload_bytes"], event["net_devices"]) == (Op.AllReduce, PAYLOAD_BYTES, 1 << 3 | 1 << 5)


def test_calls_handed_over_in_several_launches_are_complete_when_the_last_of_them_is(probes: Probed) -> None:
    """A group of calls may become several plans: not one of its calls is known to be complete before all are."""
    sends, _ = probes.forged.connections
    probes.forged.post(sends)
    probes.forged.complete(sends)
    for _ in range(3):
        probes.forged.enqueue()
    for operation in (8, 10):
        probes.forged.hand_over(sends, operations=(operation,))
    assert probes.completed() == 1
    probes.forged.complete(sends, 8)
    assert probes.completed() == 1
    probes.forged.complete(sends, 10)
    assert probes.completed() == 4


def test_parts_that_go_to_another_proxy_later_are_found_within_some_launches(probes: Probed) -> None:
    """Without a connection that is new here: another communicator that shares them may have made them."""
    sends, _ = probes.forged.connections
    probes.forged.post(sends)
    assert not probes.progress().elsewhere
    probes.forged.store(probes.forged.list_of(OTHER), "ncclProxyOps", 8, pool=probes.forged.pool)
    probes.forged.hand_over(sends)
    assert not probes.progress().elsewhere
    for _ in range(LAUNCHES_BETWEEN_LOOKS):
        probes.forged.hand_over(sends)
    assert probes.progress().elsewhere
    probes.forged.store(probes.forged.list_of(OTHER), "ncclProxyOps", 8, pool=0)


def test_an_operation_runs_from_the_end_of_the_launch_before_it(probes: Probed) -> None:
    """Those of one launch run beside each other, and what ends after a later launch ran from its own hand-over."""
    sends, _ = probes.forged.connections
    probes.forged.post(sends, sends, sends, operations=(6, 8, 10))
    probes.forged.post(sends, operations=(12,))
    for operation in (6, 8, 12, 10):
        probes.forged.complete(sends, operation)
    first, second, later, last = probes.events()
    for event in (first, second, last):
        assert event["duration_ns"] == event["time_ns"] - event["posted_ns"]
    assert later["posted_ns"] < second["time_ns"]
    assert later["duration_ns"] == later["time_ns"] - second["time_ns"]
    probes.forged.post(sends, operations=(14,))
    probes.forged.complete(sends, 14)
    (after,) = probes.events()
    assert after["duration_ns"] == after["time_ns"] - after["posted_ns"]


def test_send_and_receive_of_a_launch_end_together_and_leave_nothing_behind(probes: Probed) -> None:
    sends, receives = probes.forged.connections
    probes.forged.post(sends, sends, receives, operations=[SEND_OPERATION] * 3)
    keys, parts = probes.internals._parts.read()
    assert dict(zip(keys["connection"].tolist(), parts["posted"].tolist(), strict=True)) == {sends: 2, receives: 1}
    for connection in (sends, receives):
        probes.forged.complete(connection, SEND_OPERATION)
    assert probes.completed() == 0
    probes.forged.complete(sends, SEND_OPERATION)
    assert probes.completed() == 1
    assert len(probes.internals._parts.read()[0]) == 0


@pytest.mark.parametrize(
    ("table", "number", "entries", "operation"),
    [
        ("_operations", "operation", 65536, OPERATION),
        ("_operations", "operation", 65536, SEND_OPERATION),
        ("_parts", "operation", 131072, SEND_OPERATION),
        ("_connections", "connection", 131072, OPERATION),
    ],
)
def test_what_no_table_has_room_for_is_counted_and_never_waited_for(
    probes: Probed, table: str, number: str, entries: int, operation: int
) -> None:
    full: Map = getattr(probes.internals, table)
    sends, receives = probes.forged.connections
    probes.forged.post(sends, operations=(operation,))
    copied(full, number, range(1 << 20, (1 << 20) + entries - 1))
    posted = probes.progress().posted
    probes.forged.post(receives, operations=(operation + 2,))
    assert probes.internals.stats()[InternalStat.FULL] == 1
    assert probes.progress().posted == posted
    # Nothing tells when it ends, so it is not said to be complete, nor to be in flight.
    assert (probes.progress().posted_sequence, probes.progress().completed_sequence) == (1, 0)


@pytest.mark.parametrize("what", ["operation", "connection"])
def test_what_cannot_be_read_of_a_launch_is_complete_when_a_later_one_is(probes: Probed, what: str) -> None:
    sends, _ = probes.forged.connections
    connection = probes.forged.target.caller.pages(2 * PAGE_BYTES)
    probes.forged.store(connection, "ncclProxyConnection", send=1, transport=NET)
    probes.forged.post(sends)
    probes.forged.complete(sends)
    probes.forged.enqueue()
    away = {"operation": probes.forged.operation(FAR), "connection": connection}[what]
    probes.forged.hand_over(sends, connection, operations=(8, 8), places=(0, FAR), away=away)
    assert probes.internals.stats()[InternalStat.UNREADABLE] == 1
    assert probes.completed() == 1
    probes.forged.complete(sends, 8)
    assert probes.completed() == 1
    probes.forged.post(sends, connection, operations=(10, 10))
    for each in (sends, connection):
        assert probes.completed() == 1
        probes.forged.complete(each, 10)
    assert probes.completed() == 3


def test_a_connection_that_cannot_be_read_is_not_taken_for_the_one_that_was_at_its_address(probes: Probed) -> None:
    connection = probes.forged.target.caller.pages(2 * PAGE_BYTES)
    probes.forged.store(connection, "ncclProxyConnection", send=1, transport=NET)
    probes.forged.post(connection)
    probes.forged.complete(connection)
    keys, values = (rows.copy() for rows in Map.read(probes.internals._connections))
    values["value"]["comm"] = values["value"]["instance"] = GONE
    probes.internals._connections.update(keys.tobytes(), values.tobytes())
    probes.forged.enqueue()
    probes.forged.hand_over(connection, operations=(8,), away=connection)
    assert len(probes.internals.connections()[0]) == 0
    assert (probes.progress().posted, probes.completed()) == (1, 1)
    assert probes.internals.stats()[InternalStat.UNREADABLE] == 1


def test_completions_that_the_ring_has_no_room_for_are_counted_as_lost_and_as_completions(probes: Probed) -> None:
    sends, _ = probes.forged.connections
    probes.forged.post(sends)
    # A process may fill a third.
    room = -(-(RING_BYTES // (owned(COMPLETION_EVENT).itemsize + RECORD_HEADER_BYTES)) // 3)
    operations = range(1 << 20, (1 << 20) + 2 * (room + 50), 2)
    probes.forged.hand_over(*[sends] * len(operations), operations=operations)
    for operation in operations:
        probes.forged.complete(sends, operation)
    lost = probes.internals.stats()[InternalStat.RING_FULL]
    assert lost == 50
    assert len(probes.events()) == room + 50 - lost
    assert probes.progress().completed == room + 50


def test_the_bandwidth_of_an_operation_of_many_seconds_is_told_to_the_byte(probes: Probed) -> None:
    """Its bus bytes times 1e9 leave 64 bits; the age and size of what stands in the table are made up."""
    sends, _ = probes.forged.connections
    probes.forged.post(sends)
    keys, values = (rows.copy() for rows in Map.read(probes.internals._operations))
    values["value"]["posted_ns"] -= 40 * SECOND_NS
    values["value"]["payload_bytes"] = 40 * SECOND_NS
    probes.internals._operations.update(keys.tobytes(), values.tobytes())
    probes.forged.complete(sends)
    (event,) = probes.events()
    bus_bytes = 40 * SECOND_NS * 2 * (IDENTITY["nranks"] - 1) // IDENTITY["nranks"]
    exact = bus_bytes * SECOND_NS // int(event["duration_ns"])
    whole = bus_bytes // int(event["duration_ns"]) * SECOND_NS
    told = int(probes.internals.bandwidths()[Op.AllReduce]["sum"])
    # Divided in whole seconds, of which there are at least 17: off by no more than a second's share.
    assert abs(told - exact) <= (exact - whole) / 17
    assert exact - whole > SECOND_NS // 10
