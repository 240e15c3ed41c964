"""What the agent tells of its own process, under the names that every Prometheus client uses."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from railscope.agent.facts.snapshot import AgentHealth, Snapshot
from railscope.agent.node.daemon.own_process import OwnProcess
from railscope.exporters.series.families import make_families
from railscope.exporters.series.text import Format, Renderer


def exported(snapshot: Snapshot) -> dict[str, tuple[str, float]]:
    text = Renderer().render(make_families(snapshot), Format.PROMETHEUS).decode()
    return {
        sample.name: (family.type, float(sample.value))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("process_")
    }


def test_series_are_those_of_prometheus_client_with_the_values_of_this_process() -> None:
    own = OwnProcess()
    with Path("/dev/null").open():
        seen = exported(Snapshot(realtime_ns=1, version="0", kernel="6", health=AgentHealth(own_process=own.read())))
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    theirs = {sample.name: (one.type, sample.value) for one in registry.collect() for sample in one.samples}
    assert seen.keys() == theirs.keys()
    assert {name: kind for name, (kind, _) in seen.items()} == {name: kind for name, (kind, _) in theirs.items()}
    for name in ("process_start_time_seconds", "process_max_fds", "process_virtual_memory_bytes"):
        assert seen[name][1] == pytest.approx(theirs[name][1], rel=0.01)
    assert seen["process_resident_memory_bytes"][1] == pytest.approx(
        theirs["process_resident_memory_bytes"][1], rel=0.1
    )
    assert seen["process_open_fds"][1] == pytest.approx(len(list(Path("/proc/self/fd").iterdir())), abs=2)


def test_processor_time_grows_with_work() -> None:
    own = OwnProcess()
    first = own.read()
    ends = time.process_time() + 0.1
    while time.process_time() < ends:
        pass
    second = own.read()
    assert first is not None
    assert second is not None
    assert second.cpu_seconds >= first.cpu_seconds + 0.05


def test_what_cannot_be_read_is_absent_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = OwnProcess()

    def refused(_: psutil.Process) -> object:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "num_fds", refused)
    assert own.read() is None
    assert own.read() is None
    assert len(caplog.records) == 1
    assert exported(Snapshot(realtime_ns=1, version="0", kernel="6")) == {}
