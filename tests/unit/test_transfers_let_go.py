"""Requests that programs let go of are looked at in time that grows with their number, no faster.

Simulated: the kernel's tables and inspection processes, which have no answer yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from railscope.agent.node.inspection.questions import NotYet
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.transfers.watch import TransferWatch
from railscope.probes.clock import SystemClock
from railscope.probes.processes.processes import Mapping, ProcessIdentity
from railscope.probes.transfers.programs import TransferTables
from railscope.probes.transfers.records import REQUEST, REQUEST_KEY, THREAD, TRANSFER_KEY, TRANSFER_TOTAL

PROCESSES = 50


class Once(dict[Any, Any]):
    """Counts how often all of it is gone through."""

    rounds = 0

    def items(self) -> Any:
        self.rounds += 1
        return super().items()


class Silent:
    asked = 0

    def ask(self, _tenant: Tenant, _question: object) -> Any:
        self.asked += 1
        raise NotYet


def test_many_processes_that_let_go_of_requests_are_gone_through_once() -> None:
    keys, requests = np.zeros(PROCESSES, REQUEST_KEY), np.zeros(PROCESSES, REQUEST)
    keys["tgid"], keys["request"], requests["let_go"] = np.arange(1, PROCESSES + 1), 4096, 260
    requests["start_ns"] = 1
    none = (np.zeros(0, TRANSFER_KEY), np.zeros(0, TRANSFER_TOTAL))
    tables = TransferTables(*none, keys, requests, np.zeros(0, np.uint32), np.zeros(0, THREAD))
    inspection = Silent()
    watch = TransferWatch(lambda: cast(Any, None), Path("/proc"), cast(Any, inspection), SystemClock())
    file = Mapping(0, 4096, (8, 1), 7, "/libucp.so", deleted=False)
    for pid in range(1, PROCESSES + 1):
        watch.sighted(ProcessIdentity(pid, 1), Tenant(1000), [file])
    mappers = watch._mappers = Once(watch._mappers)
    watch._programs = cast(Any, type("Programs", (), {"read": lambda _self: tables, "waited_for": None})())
    try:
        assert len(watch.under_way()) == PROCESSES
    finally:
        watch._programs = None
        watch.close()
    assert (inspection.asked, mappers.rounds) == (PROCESSES, 1)
