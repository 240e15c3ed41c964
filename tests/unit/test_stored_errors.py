"""Errors that a job never asks for are read from its memory: of living communicators, and of all of them in turn.

The memory is this process's own, laid out as a made-up build has it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.node.collectives.events import StoredErrors
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT
from railscope.agent.node.targets.memory import ProcessMemory
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.records.calls import COMMUNICATOR, COMMUNICATOR_KEY
from railscope.probes.nccl.records.errors import COMMUNICATOR_MAGIC, ErrorLayout

LAYOUT = ErrorLayout(comm_async_result=8, comm_proxy_state=None, state_async_result=None)
KNOWN, STRANGE = 3, 4
"""Libraries: of one the layout is known."""
SUCCESS, SYSTEM, IN_PROGRESS, REMOTE = 0, 2, 7, 6


class Communicator(ctypes.Structure):
    _fields_ = (("magic", ctypes.c_uint64), ("result", ctypes.c_int32), ("padding", ctypes.c_int32))


def table(results: Sequence[int], **fields: int) -> tuple[Records, Records, object]:
    """Communicators 1, 2, … of this process, confirmed, of the known library; and what keeps them in memory."""
    kept = (Communicator * len(results))(*(Communicator(COMMUNICATOR_MAGIC, result, 0) for result in results))
    keys, values = np.zeros(len(results), COMMUNICATOR_KEY), np.zeros(len(results), COMMUNICATOR)
    keys["tgid"] = os.getpid()
    keys["comm"] = [ctypes.addressof(kept) + at * ctypes.sizeof(Communicator) for at in range(len(results))]
    values["instance"], values["library"] = np.arange(1, len(results) + 1), KNOWN
    values["confirmed"] = 1
    for name, value in fields.items():
        values[name] = value
    return keys, values, kept


@pytest.fixture
def stored() -> StoredErrors:
    return StoredErrors(ProcessMemory(Path("/proc"), InProcess(), lambda _pid: UNKNOWN_TENANT), {KNOWN: LAYOUT}.get)


def test_errors_are_told_and_what_is_none_is_not(stored: StoredErrors) -> None:
    keys, values, _kept = table([SUCCESS, SYSTEM, IN_PROGRESS, REMOTE])
    assert list(stored.read((keys, values))) == [(2, SYSTEM), (4, REMOTE)]


@pytest.mark.parametrize(("field", "value"), [("confirmed", 0), ("destroyed_ns", 5), ("library", STRANGE)])
def test_who_has_ended_or_is_not_known_is_not_read(stored: StoredErrors, field: str, value: int) -> None:
    keys, values, _kept = table([SYSTEM], **{field: value})
    assert list(stored.read((keys, values))) == []


def test_a_process_that_has_gone_leaves_the_others_errors(stored: StoredErrors) -> None:
    keys, values, _kept = table([SYSTEM, REMOTE])
    keys["tgid"][0] = 2**22 - 1
    assert list(stored.read((keys, values))) == [(2, REMOTE)]


def test_of_more_than_can_be_read_at_once_all_come_round(stored: StoredErrors) -> None:
    keys, values, _kept = table([SYSTEM] * 1200)
    readings = [[instance for instance, _ in stored.read((keys, values))] for _ in range(3)]
    assert [len(reading) for reading in readings] == [512] * 3
    assert set().union(*map(set, readings)) == set(range(1, 1201))


def test_an_error_of_a_user_with_one_communicator_is_read_each_time_whatever_others_make(stored: StoredErrors) -> None:
    keys, values, _kept = table([SYSTEM] * 3000)
    values["uid"] = 5000
    values["uid"][[7, 1500]] = 1000, 1001
    readings = [{instance for instance, _ in stored.read((keys, values))} for _ in range(6)]
    assert all({8, 1501} <= reading for reading in readings)
    assert set().union(*readings) == set(range(1, 3001))
