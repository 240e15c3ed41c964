"""Communicators that share resources share connections: what one of them leaves must serve the others.

The kernel's tables are real, what stands in them is made up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from probes.nccl import internal_records as records
from probes.nccl.internals import _COMMUNICATOR_KEY, Internals
from probes.nccl.programs import NcclPrograms, ProgramSettings

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
    internals._connections.update(key.tobytes(), value.tobytes())


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
