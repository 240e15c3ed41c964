"""Communicators that share resources share connections: what one of them leaves must serve the others.

The kernel's tables are real, what stands in them is made up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from railscope.probes.nccl.programs.calls import NcclPrograms, ProgramSettings
from railscope.probes.nccl.programs.internals import _COMMUNICATOR_KEY, Internals
from railscope.probes.nccl.records import internals as records
from railscope.probes.nccl.records.calls import OWNER

pytestmark = pytest.mark.root

PARENT, CHILD, STRANGER = 1, 2, 3
TGID, OTHER_TGID = 4711, 4712
SHARED, OWN = 0x7000, 0x8000
"""Groups: addresses of the shared resources."""


@pytest.fixture
def internals() -> Iterator[Internals]:
    programs = NcclPrograms.load(ProgramSettings(only_observed_processes=True))
    internals = Internals.load(programs)
    yield internals
    internals.close()
    programs.close()


def communicator(internals: Internals, instance: int, tgid: int, group: int) -> None:
    key, value = np.zeros(1, _COMMUNICATOR_KEY), np.zeros(1, records.PROXY_COMMUNICATOR)
    key["comm"], key["tgid"] = 0x1000 * instance, tgid
    value["instance"], value["group"] = instance, group
    internals._communicators.update(key.tobytes(), value.tobytes())


def connection(internals: Internals, address: int, instance: int, tgid: int, group: int) -> None:
    key, value = np.zeros(1, records.CONNECTION_KEY), np.zeros(1, records.CONNECTION)
    key["connection"], key["tgid"] = address, tgid
    value["instance"], value["group"] = instance, group
    internals._connections.update(key.tobytes(), value.tobytes() + bytes(OWNER.itemsize))


def connections_left(internals: Internals) -> set[tuple[int, int]]:
    keys, _ = internals.connections()
    return set(zip(keys["tgid"].tolist(), keys["connection"].tolist(), strict=True))


def test_a_connection_stays_while_one_of_those_that_share_it_lives(internals: Internals) -> None:
    communicator(internals, PARENT, TGID, SHARED)
    communicator(internals, CHILD, TGID, SHARED)
    communicator(internals, STRANGER, OTHER_TGID, OWN)
    connection(internals, 1, CHILD, TGID, SHARED)
    connection(internals, 2, PARENT, TGID, SHARED)
    connection(internals, 3, STRANGER, OTHER_TGID, OWN)
    internals.forget_communicators({CHILD})
    # The child used it first, but what the parent has in flight will stop there.
    assert connections_left(internals) == {(TGID, 1), (TGID, 2), (OTHER_TGID, 3)}
    internals.forget_communicators({PARENT})
    assert connections_left(internals) == {(OTHER_TGID, 3)}


def test_the_same_address_in_another_process_is_another_group(internals: Internals) -> None:
    communicator(internals, PARENT, TGID, SHARED)
    communicator(internals, STRANGER, OTHER_TGID, SHARED)
    connection(internals, 1, PARENT, TGID, SHARED)
    connection(internals, 1, STRANGER, OTHER_TGID, SHARED)
    internals.forget_communicators({PARENT})
    assert connections_left(internals) == {(OTHER_TGID, 1)}


def operation(internals: Internals, number: int, instance: int, tgid: int, **fields: int) -> None:
    key, value = np.zeros(1, records.OPERATION_KEY), np.zeros(1, records.OPERATION)
    key["operation"], key["group"], key["tgid"] = number, instance, tgid
    value["instance"] = instance
    for name, content in fields.items():
        value[name] = content
    internals._operations.update(key.tobytes(), value.tobytes() + bytes(OWNER.itemsize))


def part(internals: Internals, connection: int, instance: int, tgid: int) -> None:
    key, value = np.zeros(1, records.PART_KEY), np.zeros(1, records.PART)
    key["connection"], key["tgid"], value["instance"] = connection, tgid, instance
    internals._parts.update(key.tobytes(), value.tobytes() + bytes(OWNER.itemsize))


def test_the_oldest_operation_of_each_communicator_tells_how_far_it_has_come(internals: Internals) -> None:
    """Wherever it stands in the table."""
    launches = range(5, 35)
    for instance in (PARENT, CHILD):
        communicator(internals, instance, TGID, SHARED)
        for launch in launches:
            fields = {"launch": launch, "posted_ns": 1000 * launch + instance, "before_sequence": 0, "op": launch % 5}
            operation(internals, 7919 * launch % 101, instance, TGID, **fields)
    key, value = np.zeros(1, _COMMUNICATOR_KEY), np.zeros(1, records.PROXY_COMMUNICATOR)
    key["comm"], key["tgid"], value["instance"], value["posted_sequence"] = 0x9000, TGID, STRANGER, 12
    internals._communicators.update(key.tobytes(), value.tobytes())
    progress = internals.progress()
    for instance in (PARENT, CHILD):
        assert (progress[instance].oldest_posted_ns, progress[instance].oldest_op) == (5000 + instance, 0)
    assert (progress[STRANGER].oldest_posted_ns, progress[STRANGER].completed_sequence) == (None, 12)


def test_an_ended_process_leaves_nothing_in_the_tables_and_others_lose_nothing(internals: Internals) -> None:
    for instance, tgid in ((PARENT, TGID), (STRANGER, OTHER_TGID)):
        communicator(internals, instance, tgid, OWN)
        connection(internals, 1, instance, tgid, OWN)
        operation(internals, 6, instance, tgid)
        part(internals, 1, instance, tgid)
    internals.forget_processes({TGID})
    for table in (internals._communicators, internals._connections, internals._operations, internals._parts):
        assert table.read()[0]["tgid"].tolist() == [OTHER_TGID]


def test_an_ended_communicator_leaves_no_operation_behind(internals: Internals) -> None:
    for instance in (PARENT, CHILD):
        communicator(internals, instance, TGID, SHARED)
        operation(internals, 6, instance, TGID)
        part(internals, instance, instance, TGID)
    internals.forget_communicators({CHILD})
    for table in (internals._communicators, internals._operations, internals._parts):
        assert table.read()[1]["instance"].tolist() == [PARENT]
