"""Of the agent the bench can leave all but its programs and a reader of their rings."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from railscope.agent.node.completion.levels import Levels
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.records.calls import Stat
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import build as build_double
from tests.bench.programs_alone import ProgramsAlone
from tests.bench.target import BenchError, Target, build
from tests.nccl.job import Job

pytestmark = pytest.mark.root


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline, "not within 10 s"
        time.sleep(0.01)


def test_calls_are_counted_and_their_events_read_without_an_agent(tmp_path: Path) -> None:
    built = build(tmp_path)
    with Target(built, "counted") as target, Target(built, "silent") as silent:
        with ProgramsAlone.loaded(target.library, (target.pid,)) as alone:
            programs = alone.programs
            with alone.attached():
                target.call(1000)
                wait_for(lambda: programs.call_events.records_read == 1000)
            target.call(1000)
            assert programs.stats()[Stat.CALLS] == 1000, "nobody is attached"
            with alone.attached():
                target.call(1000)
                wait_for(lambda: programs.call_events.records_read == 2000)
            assert programs.stats()[Stat.CALLS] == 2000
            assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ring")]
        with ProgramsAlone.loaded(target.library, (target.pid,), write_events=False) as quiet:
            with quiet.attached():
                target.call(1000)
            assert quiet.programs.stats()[Stat.CALLS] == 1000
            assert quiet.programs.call_events.fullness() == quiet.programs.call_events.records_read == 0
        with (
            ProgramsAlone.loaded(silent.library, (silent.pid,)) as idle,
            pytest.raises(BenchError, match="counted nothing"),
            idle.attached(),
        ):
            pass


def test_a_library_that_cannot_be_observed_at_a_level_is_refused(tmp_path: Path) -> None:
    with (
        Target(build(tmp_path), "shallow") as target,
        pytest.raises(BenchError, match="cannot be observed at level rails"),
        ProgramsAlone.loaded(target.library, (target.pid,), Level.RAILS),
    ):
        pass


@pytest.mark.fabric
@pytest.mark.nccl
def test_what_lies_below_calls_comes_and_goes_with_them(tmp_path: Path) -> None:
    double = build_double()
    with Fabric(hosts=2, rails=2) as fabric, Job(fabric, tmp_path, double, iterations=2_000_000_000) as job:
        pids = job.ready()
        job.start()
        with ProgramsAlone.loaded(double.nccl, pids, Level.RAILS) as alone:
            internals = alone.internals
            assert internals is not None

            def messages() -> int:
                return sum(sent.messages for sent in internals.sent())

            def seen_more(sent: int, completed: int) -> bool:
                return messages() > sent and internals.completion_events.records_read > completed

            for _ in range(2):
                more = partial(seen_more, messages() + 100, internals.completion_events.records_read)
                with alone.attached():
                    wait_for(more)
                left = messages()
                calls = alone.programs.stats()[Stat.CALLS]
                time.sleep(0.2)
                assert (messages(), alone.programs.stats()[Stat.CALLS]) == (left, calls), "nobody is attached"


def test_a_reader_that_ends_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        Target(build(tmp_path), "unread") as target,
        ProgramsAlone.loaded(target.library, (target.pid,)) as alone,
    ):
        monkeypatch.setattr(alone.programs.call_events, "read", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError), alone.attached():
            target.call(1)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ring")]


def test_levels_that_cannot_be_attached_are_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Levels, "set_libraries", lambda *_: ["the file is damaged"])
    with (
        Target(build(tmp_path), "damaged") as target,
        pytest.raises(BenchError, match="the file is damaged"),
        ProgramsAlone.loaded(target.library, (target.pid,), Level.RAILS),
    ):
        pass
