"""Operations that complete, and take longer than they used to, are put down to who makes them slow.

Simulated: see stall_world.  Where completion is seen, and where only calls are.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from railscope.agent.facts.causes import Cause
from tests.unit.stall_world import MIB, MOVING, RAILS, STOPPED, World, steady


@pytest.mark.parametrize("seen", [True, False], ids=["completion", "counts"])
def test_a_rail_at_a_tenth_of_its_speed_is_named_though_bytes_move(seen: bool) -> None:
    world = World(seen=seen, nranks=8)
    steady(world)
    (rank,) = world.ranks
    rank.process = MOVING
    rank.rails = (
        replace(RAILS[0], round_trip_ns=1_600_000, busy_ratio=0.1, sent_bytes=5 * MIB),
        replace(RAILS[1], round_trip_ns=63_000_000, busy_ratio=1.0, sent_bytes=5 * MIB),
    )
    for look in range(40):
        if look % 2:
            rank.work(1, 0.1)
        world.step()
        if world.stall is not None:
            break
    assert look <= 24, "three seconds of slowness, and up to three to begin with them"
    stall = world.stall
    assert stall is not None
    assert (stall.diagnosis.cause, stall.diagnosis.device, stall.op) == (Cause.RAIL_SLOW, "rail1", "AllReduce")
    rank.rails = RAILS
    world.train(10)
    assert world.stall is None
    assert len(world.begun) == 1


@pytest.mark.parametrize("seen", [True, False], ids=["completion", "counts"])
def test_a_rank_that_is_stopped_again_and_again_is_named_though_no_operation_takes_long(seen: bool) -> None:
    world = World(seen=seen)
    steady(world)
    (rank,) = world.ranks
    for _ in range(8):
        if seen:
            rank.begin()
        rank.process = STOPPED
        world.step(6)
        rank.process = MOVING
        if seen:
            rank.complete()
        rank.work(10, 0.005)
        world.step()
    stall = world.stall
    assert stall is not None
    assert (stall.diagnosis.cause, stall.diagnosis.blamed_rank, stall.slow) == (Cause.PROCESS_STOPPED, 0, True)
    world.train(20)
    assert world.stall is None
    assert len(world.begun) == 1


@pytest.mark.parametrize("seen", [True, False], ids=["completion", "counts"])
@pytest.mark.parametrize("run_s", [1, 2, 4, 8])
def test_a_rank_that_is_stopped_for_long_once_more_stalls_anew_and_is_not_slow(seen: bool, run_s: int) -> None:
    # The operation that was stopped before is still in the mean of the last few seconds.
    world = World(seen=seen)
    steady(world)
    (rank,) = world.ranks
    for stops in range(1, 5):
        rank.begin() if seen else rank.work(1, 0.005)
        rank.process = STOPPED
        world.step(4 * 5)
        assert world.stall is not None
        assert len(world.begun) == stops
        if seen:
            rank.complete()
        rank.work(10, 0.005)
        world.step()
        rank.process = MOVING
        world.train(run_s)
        assert world.stall is None
    assert not any(stall.slow for _, stall in world.begun)
