"""Memory that answers when its process likes: reading it holds up its own tenant's inspection, and nothing else.

A page of a file that a tenant serves himself is simulated by a pipe that nobody writes to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.agent.node.inspection.inspection import InspectionProcesses
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.targets.memory import ProcessMemory, ProxyWork
from railscope.probes.nccl.memory.proxy_work import ProxyWorkLayout
from tests.waiting import eventually

HOLDS, PLAIN, GONE = 10, 11, 12
TENANTS = {HOLDS: Tenant(5000), PLAIN: Tenant(5001), GONE: Tenant(5001)}
WORK = [ProxyWork(0, ProxyWorkLayout(0, 0))]


@pytest.fixture
def procfs(tmp_path: Path) -> Path:
    for pid in (HOLDS, PLAIN):
        (tmp_path / str(pid)).mkdir()
    os.mkfifo(tmp_path / str(HOLDS) / "mem")
    (tmp_path / str(PLAIN) / "mem").write_bytes((8).to_bytes(8, "little") + (1).to_bytes(8, "little"))
    return tmp_path


@pytest.fixture
def inspection() -> Iterator[InspectionProcesses]:
    made = InspectionProcesses(["railscope.agent.node.targets.memory"])
    yield made
    made.close()


def test_a_page_that_never_comes_holds_up_nobody_else(procfs: Path, inspection: InspectionProcesses) -> None:
    memory = ProcessMemory(procfs, inspection, TENANTS.__getitem__)

    def plain_is_read() -> bool:
        inspection.collect()
        try:
            return memory.read(PLAIN, WORK) == (True,)
        except NotYet:
            return False

    eventually(plain_is_read)
    began = time.monotonic()
    with pytest.raises(NotYet):
        memory.read(HOLDS, WORK)
    # Who waited for the page would wait until its process is given up, after three seconds.
    assert time.monotonic() - began < 2.5
    eventually(plain_is_read)
    assert TENANTS[HOLDS] not in inspection.late()

    def is_given_up() -> bool:
        inspection.collect()
        return TENANTS[HOLDS] in inspection.late()

    eventually(is_given_up)
    assert plain_is_read()
    with pytest.raises(NotYet):
        memory.read(HOLDS, WORK)


def test_memory_of_a_process_that_has_gone_is_refused(procfs: Path, inspection: InspectionProcesses) -> None:
    memory = ProcessMemory(procfs, inspection, TENANTS.__getitem__)

    def is_refused() -> bool:
        try:
            memory.read(GONE, WORK, moment=1)
        except NotYet:
            inspection.collect()
            return False
        except Refused as refused:
            return refused.gone
        return False

    eventually(is_refused)
