"""The observer's snapshot stands when the kernel refuses a reading (simulated programs)."""

from __future__ import annotations

from typing import cast

import pytest

from agent.config import Config
from agent.observer import Observer
from agent.snapshot import Snapshot
from probes.clock import SystemClock
from probes.nccl.programs import NcclPrograms
from tests.unit.collectives_kernel import SimulatedPrograms


def collective_success(snapshot: Snapshot) -> bool:
    (result,) = [result for result in snapshot.collectors if result.collector == "collective"]
    return result.success


@pytest.mark.parametrize("what", ["totals", "calls", "communicators"])
def test_a_refused_reading_is_a_failed_collector_and_not_a_broken_scrape(what: str) -> None:
    kernel = SimulatedPrograms()
    kernel.call(2**22 - 1, 0, 3)
    observer = Observer(Config(collectors=frozenset({"collective"})), cast(NcclPrograms, kernel), SystemClock(), "0")
    try:
        before = observer.snapshot()
        assert collective_success(before)
        kernel.refuses_totals = what == "totals"
        kernel.aggregates.refuses = what == "calls"
        kernel.communicators.refuses = what == "communicators"
        refused = observer.snapshot()
        assert not collective_success(refused)
        assert refused.collectives == before.collectives
        assert refused.events_lost == before.events_lost
        observer.tick()
        kernel.refuses_totals = kernel.aggregates.refuses = kernel.communicators.refuses = False
        assert collective_success(observer.snapshot())
        assert observer.snapshot().collectives == before.collectives
    finally:
        observer.close()
