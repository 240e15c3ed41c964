"""What the demo shows while its job runs.  The job and its stalls are made up."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from railscope.agent.cli.demo import OwnStalls, communicator_lines
from railscope.agent.facts.snapshot import CommunicatorFacts
from tests.unit.exporters_snapshots import communicator, stall


def doing(comm: str, enqueued: int, *, alive: bool = True) -> CommunicatorFacts:
    return replace(communicator(comm), enqueued=enqueued, alive=alive)


def test_the_busiest_communicators_come_first_ended_ones_last_and_the_rest_are_counted() -> None:
    idle = [doing(f"idle{number}", 1_000_000) for number in range(8)]
    shown = [*idle, doing("ended", 9_000, alive=False), doing("new", 70), doing("slow", 1_050), doing("fast", 3_000)]
    before = {(4711, facts.identity.comm): 1_000_000 for facts in idle} | {(4711, "slow"): 1_000, (4711, "fast"): 1_000}
    lines = list(communicator_lines(shown, before))
    assert [line.split()[1] for line in lines[:4]] == ["fast", "new", "slow", "idle0"]
    assert lines[0].startswith("  comm fast rank 0/4:   2,000 ops/s   AllReduce 1,200")
    assert len(lines) == 9
    assert lines[-1] == "  … and 4 more"
    few = list(communicator_lines(shown[8:], before))
    assert [line.split()[1] for line in few] == ["fast", "new", "slow", "ended"]
    assert few[-1].startswith("  comm ended rank 0/4:         ended   ")


def test_only_stalls_of_the_demo_s_own_processes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    stalls = OwnStalls()
    mine, others = replace(stall(), pid=11), replace(stall(), pid=12)
    with caplog.at_level(logging.WARNING):
        stalls.record(others)
        stalls.record(mine)
        assert not caplog.messages
        stalls.log_new((10, 11))
        stalls.log_new((10, 11))
    assert caplog.messages == [
        f"communicator {mine.comm} rank 1 stalls in AllReduce: rail_down: "
        "rail 1 (rail1) has no carrier or is switched off"
    ]
