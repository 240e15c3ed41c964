"""Whether NCCL's proxy works, read from the memory of a real process: this one, laid out as NCCL does it."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator

import pytest

from railscope.probes.nccl.layouts.layout import TABLE, Layouts, Structure
from railscope.probes.nccl.memory.proxy_work import ProxyWorkLayout, proxy_has_work, proxy_work_layout

LAYOUT = ProxyWorkLayout(comm_proxy_state=16, state_active=8)


class State(ctypes.Structure):
    _fields_ = (("before", ctypes.c_uint64), ("active", ctypes.c_uint64))


class Comm(ctypes.Structure):
    _fields_ = (("before", ctypes.c_uint64 * 2), ("state", ctypes.c_uint64))


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.open("/proc/self/mem", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize(("active", "works"), [(0, False), (0x7F0012345678, True)])
def test_a_list_that_is_not_empty_is_work(memory: int, active: int, works: bool) -> None:
    state = State(0, active)
    comm = Comm((0, 0), ctypes.addressof(state))
    assert proxy_has_work(memory, ctypes.addressof(comm), LAYOUT) is works


def test_what_cannot_be_read_is_not_known(memory: int) -> None:
    nowhere = 16
    assert proxy_has_work(memory, nowhere, LAYOUT) is None
    assert proxy_has_work(memory, ctypes.addressof(Comm((0, 0), 0)), LAYOUT) is None, "it has no proxy"
    assert proxy_has_work(memory, ctypes.addressof(Comm((0, 0), nowhere)), LAYOUT) is None


def test_every_known_build_with_a_proxy_state_tells_where_its_list_is() -> None:
    layouts = Layouts.load()
    known = [
        layout
        for build_id in json.loads(TABLE.read_text())["builds"]
        if (layout := proxy_work_layout(layouts.structures(build_id))) is not None
    ]
    assert known
    assert all(layout.comm_proxy_state > 0 and layout.state_active > 0 for layout in known)


@pytest.mark.parametrize("missing", ["ncclComm", "ncclProxyState", "proxyState", "progressState.active"])
def test_a_build_that_lacks_a_field_is_not_looked_into(missing: str) -> None:
    structures = {
        "ncclComm": Structure(1000, {"proxyState": 8}),
        "ncclProxyState": Structure(100, {"progressState.active": 16}),
    }
    assert proxy_work_layout(structures) == ProxyWorkLayout(8, 16)
    structures.pop(missing, None)
    structures = {
        name: Structure(one.size_bytes, {key: at for key, at in one.offsets.items() if key != missing})
        for name, one in structures.items()
    }
    assert proxy_work_layout(structures) is None
