"""What is said of ranks whose process ends.

Simulated: see stall_world.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from railscope.agent.facts.causes import Cause
from railscope.agent.node.stalls.watchdog import LOOK_NS
from railscope.probes.nccl.abi import Op
from tests.unit.stall_world import LOOK_S, RUNNING, World, steady


@pytest.mark.parametrize("status", [9, 11, 1 << 8], ids=["SIGKILL", "SIGSEGV", "exit 1"])
def test_a_killed_or_failed_rank_is_gone_at_once(status: int) -> None:
    world = World()
    steady(world)
    (rank,) = world.ranks
    world.watch.process_gone(rank.pid, status)
    rank.gone = True
    ((at_ns, stall),) = world.begun
    assert at_ns == world.clock.now_ns
    assert (stall.blame.cause, stall.blame.blamed_rank) == (Cause.PROCESS_GONE, 0)
    world.step(40)
    assert world.stall == stall
    world.watch.forget([rank.instance])
    assert world.stall is None
    assert world.watch.facts().lengths == ()


@pytest.mark.parametrize("leaves", ["ended", "gone"])
def test_a_rank_that_fails_at_the_end_of_a_job_stalls_until_the_others_have_left_for_a_minute(leaves: str) -> None:
    world = World(ranks=3, nranks=3)
    steady(world)
    *others, last = world.ranks
    world.watch.process_gone(last.pid, 1 << 8)
    last.gone = True
    setattr(others[0], leaves, True)
    world.step(4 * 100)
    assert world.stall is not None, "another rank has not left, and may wait"
    setattr(others[1], leaves, True)
    world.step()
    assert world.stall is None


@pytest.mark.parametrize("status", [0, 15, 143 << 8], ids=["fine", "SIGTERM", "shell's SIGTERM"])
def test_a_process_that_ends_properly_long_after_the_last_look_is_no_stall(status: int) -> None:
    world = World(ranks=2)
    steady(world)
    for rank in world.ranks:
        rank.begin()
    world.step(int(2.5 / LOOK_S))
    world.clock.now_ns += LOOK_NS + LOOK_NS // 2
    (first, _) = world.ranks
    first.process = replace(RUNNING, condition="gone")
    world.watch.process_gone(first.pid, status)
    assert world.begun == []


def test_of_a_process_that_dies_long_after_the_last_look_it_is_known_what_it_was_at() -> None:
    world = World()
    steady(world)
    (rank,) = world.ranks
    rank.work(8, 0.005)
    world.watch.look()
    world.clock.now_ns += LOOK_NS + LOOK_NS // 2
    rank.begin(Op.ReduceScatter)
    world.clock.now_ns += LOOK_NS
    world.watch.process_gone(rank.pid, None)
    assert world.stall is not None
    assert world.stall.op == "ReduceScatter"
