"""Of the agent the bench can leave all but its programs and a reader of their ring."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from probes.nccl.records import Stat
from tests.bench.programs_alone import programs_alone
from tests.bench.target import BenchError, Target, build

pytestmark = pytest.mark.root


def test_calls_are_counted_and_their_events_read_without_an_agent(tmp_path: Path) -> None:
    built = build(tmp_path)
    with Target(built, "counted") as target, Target(built, "silent") as silent:
        with programs_alone(target.library, (target.pid,)) as programs:
            target.call(1000)
            deadline = time.monotonic() + 10
            while programs.call_events.records_read < 1000 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert programs.call_events.records_read == programs.stats()[Stat.CALLS] == 1000
        with programs_alone(target.library, (target.pid,), write_events=False) as programs:
            target.call(1000)
            assert programs.stats()[Stat.CALLS] == 1000
            assert programs.call_events.fullness() == programs.call_events.records_read == 0
        with (
            pytest.raises(BenchError, match="counted nothing"),
            programs_alone(silent.library, (silent.pid,)),
        ):
            pass
