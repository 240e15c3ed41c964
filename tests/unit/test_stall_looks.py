"""How often the agent looks for stalls: seldom where all is well, and never so seldom that a stall is found later.

Simulated: see stall_world.
"""

from __future__ import annotations

import pytest

from agent.stall_watch import LOOK_NS
from probes.nccl.abi import Op
from tests.unit.stall_world import LOOK_S, RUNNING, STOPPED, World, steady

LOOKS_A_SECOND = 1_000_000_000 // LOOK_NS

levels = pytest.mark.parametrize("seen", [True, False], ids=["completion", "counts"])


def looks_during(world: World, seconds: float) -> int:
    """While ranks do nothing new."""
    before = world.looks
    world.step(int(seconds / LOOK_S))
    return world.looks - before


@levels
def test_beside_a_job_that_works_a_look_a_second_will_do(seen: bool) -> None:
    world = World(seen=seen, ranks=2)
    steady(world)
    before = world.looks
    world.train(20)
    assert 19 <= world.looks - before <= 21


@levels
def test_what_is_usual_is_learnt_once_a_second_all_the_same(seen: bool) -> None:
    seldom, always = World(seen=seen), World(seen=seen)
    always.rests = False
    for world in (seldom, always):
        steady(world)
        world.train(20)
        world.ranks[0].begin()
        world.ranks[0].waits_in = ("poll",)
        world.until_flagged(40)
    (one,), (other,) = (world.watch._reader.every() for world in (seldom, always))
    assert one.in_flight is not None
    assert other.in_flight is not None
    assert one.in_flight.history is not None
    assert other.in_flight.history is not None
    assert one.in_flight.history.operations == pytest.approx(other.in_flight.history.operations, rel=0.2)
    assert one.in_flight.history.mean_ns == pytest.approx(other.in_flight.history.mean_ns, rel=0.1)


@levels
@pytest.mark.parametrize("phase", range(LOOKS_A_SECOND))
@pytest.mark.parametrize("fault", ["stopped", "waits"])
def test_a_stall_is_flagged_as_soon_as_if_there_had_been_every_look(seen: bool, phase: int, fault: str) -> None:
    took = []
    for rests in (True, False):
        world = World(seen=seen, ranks=2, nranks=4)
        world.rests = rests
        steady(world)
        world.train(phase * LOOK_S)
        for rank in world.ranks:
            rank.begin()
            rank.waits_in = ("poll",)
        if fault == "stopped":
            world.ranks[1].process = STOPPED
        took.append(world.until_flagged(60))
    assert abs(took[0] - took[1]) <= LOOK_S


@levels
def test_what_is_suspected_is_looked_at_as_often_as_can_be(seen: bool) -> None:
    world = World(seen=seen, ranks=2)
    steady(world)
    for rank in world.ranks:
        rank.begin()
        rank.waits_in = ("poll",)
    world.step(LOOKS_A_SECOND)
    assert looks_during(world, 20) == 20 * LOOKS_A_SECOND


@levels
def test_idle_communicators_without_a_sign_of_an_operation_do_not_keep_the_agent_busy(seen: bool) -> None:
    world = World(seen=seen, ranks=2)
    steady(world)
    for rank in world.ranks:
        rank.process = RUNNING
    world.step(10 * LOOKS_A_SECOND)
    assert looks_during(world, 20) <= 21


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
