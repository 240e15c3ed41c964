"""Hours of healthy jobs in which nobody may be called stalled.

Simulated: see stall_world.  Every job lives where completion is seen, and where only calls are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.stall import Stall
from railscope.agent.node.stalls.watchdog import EVALUATION_NS
from railscope.probes.nccl.abi import Op
from tests.unit.stall_world import (
    AFTER_S,
    COMPUTING,
    LOOK_S,
    LOOKS_A_SECOND,
    MIB,
    MOVING,
    RAILS,
    RUNNING,
    STANDING,
    STOPPED,
    WRITING,
    World,
    steady,
)

HOUR_LOOKS = int(3600 / LOOK_S)

Life = Callable[[World], Iterator[None]]
"""Does something before each look, for ever."""


def live(world: World, life: Life, looks: int) -> list[tuple[int, Stall]]:
    """Let somebody live for so long; returns who was called stalled meanwhile."""
    doing = life(world)
    for _ in range(looks):
        next(doing)
        world.step()
    return world.begun


def idle(world: World) -> Iterator[None]:
    """Works for a minute, and then nobody asks anything of it for the rest of the hour; its threads read sockets."""
    for rank in world.ranks:
        rank.process = RUNNING
    while True:
        for _ in range(240):
            for rank in world.ranks:
                rank.work(8, 0.005)
            yield
        for _ in range(HOUR_LOOKS - 240):
            yield


def computes_between_calls(world: World) -> Iterator[None]:
    """Ten seconds of computing, then a second of collectives."""
    while True:
        for rank in world.ranks:
            rank.process = COMPUTING
        for _ in range(40):
            yield
        for rank in world.ranks:
            rank.process = MOVING
        for _ in range(4):
            for rank in world.ranks:
                rank.work(10, 0.01)
            yield


def hands_over_ahead_of_the_gpu(world: World) -> Iterator[None]:
    """A collective is handed over while the GPU still computes for ten seconds: it sends nothing before."""
    for _ in range(80):
        for rank in world.ranks:
            rank.work(10, 0.005)
        yield
    while True:
        for rank in world.ranks:
            rank.process = STANDING
            rank.begin(sends=False)
        for _ in range(40):
            yield
        for rank in world.ranks:
            rank.messages += 1
            rank.complete()
        for _ in range(4):
            for rank in world.ranks:
                rank.work(10, 0.005)
            yield


def one_rank_writes_checkpoints(world: World) -> Iterator[None]:
    """For five minutes of every ten the first rank writes, and the others of the host are in the next collective."""
    first, *others = world.ranks
    while True:
        for _ in range(1200):
            for rank in world.ranks:
                rank.process = MOVING
                rank.work(8, 0.005)
            yield
        first.process = WRITING
        for rank in others:
            rank.process = STANDING
            rank.begin()
        for _ in range(1200):
            yield
        first.work(1, 0.005)
        for rank in others:
            rank.complete()


def warms_up(world: World) -> Iterator[None]:
    """Every two minutes a new kind of collective, whose first call takes four seconds instead of 0.2; ranks wait."""
    size = 1
    while True:
        size *= 2
        for rank in world.ranks:
            rank.process = STANDING
            rank.begin(size=size)
        for _ in range(16):
            yield
        for rank in world.ranks:
            rank.complete()
        for _ in range(464):
            for rank in world.ranks:
                rank.process = MOVING
                rank.work(1, 0.2, size=size)
            yield


def starts_with_a_late_rank(world: World) -> Iterator[None]:
    """The last rank of the host sleeps for twenty seconds before its first call."""
    *others, last = world.ranks
    for rank in others:
        rank.begin()
    for _ in range(80):
        yield
    last.begin()
    for rank in world.ranks:
        rank.complete()
    while True:
        for rank in world.ranks:
            rank.work(8, 0.005)
        yield


def a_slow_ring(world: World) -> Iterator[None]:
    """After ten minutes everything takes ten times as long, on all rails alike: others use the network too."""
    for _ in range(2400):
        for rank in world.ranks:
            rank.process = MOVING
            rank.work(2, 0.1)
        yield
    slow = tuple(
        replace(rail, round_trip_ns=40_000_000, least_round_trip_ns=100_000, busy_ratio=0.9, sent_bytes=50 * MIB)
        for rail in RAILS
    )
    while True:
        for rank in world.ranks:
            rank.rails = slow
            rank.begin()
        for _ in range(12):
            yield
        for rank in world.ranks:
            rank.complete()


def small_collectives_on_one_rail(world: World) -> Iterator[None]:
    """Eight bytes a few times a second, which need one rail of two and hardly move anything."""
    used = replace(RAILS[0], sent_bytes=800, moved_bytes=1600, busy_ratio=0.01, round_trip_ns=100_000)
    while True:
        for rank in world.ranks:
            rank.process = replace(RUNNING, moved_bytes=2000)
            rank.rails = used, RAILS[1]
            rank.work(3, 0.0003, size=8)
        yield


def replays_graphs(world: World) -> Iterator[None]:
    """Calls stand for the whole hour while graphs are replayed; now and then bytes lie unread for a moment."""
    chance = random.Random(1)
    for rank in world.ranks:
        rank.work(8, 0.005)
    while True:
        for rank in world.ranks:
            rank.process = MOVING
            rank.replay(40, 0.005)
            unread = replace(RAILS[0], unread_bytes=chance.choice((0, 65536)), sent_bytes=MIB, moved_bytes=2 * MIB)
            rank.rails = unread, RAILS[1]
            rank.waits_in = chance.choice(((), ("recvmsg",)))
        yield


def replays_small_graphs_now_and_then(world: World) -> Iterator[None]:
    """As above, a few bytes every second: most looks find nothing in flight."""
    chance = random.Random(2)
    for rank in world.ranks:
        rank.work(8, 0.005)
    while True:
        for rank in world.ranks:
            rank.process = replace(RUNNING, moved_bytes=600)
            rank.replay(1, 0.0005)
            rank.waits_in = ("recvmsg",) if chance.random() < 0.2 else ()
        yield


LIVES: tuple[Life, ...] = (
    idle,
    computes_between_calls,
    hands_over_ahead_of_the_gpu,
    one_rank_writes_checkpoints,
    warms_up,
    starts_with_a_late_rank,
    a_slow_ring,
    small_collectives_on_one_rail,
    replays_graphs,
    replays_small_graphs_now_and_then,
)


@pytest.mark.parametrize("seen", [True, False], ids=["completion", "counts"])
@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
def test_healthy_jobs_are_silent_for_seven_hours_in_all(life: Life, seen: bool) -> None:
    world = World(seen=seen, ranks=2, nranks=4)
    assert live(world, life, HOUR_LOOKS // 3) == []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("often", [0.2, 0.4])
def test_who_is_found_waiting_now_and_then_has_not_waited_ever_since_the_last_call(often: float, seed: int) -> None:
    chance = random.Random(seed)

    def replays(world: World) -> Iterator[None]:
        for rank in world.ranks:
            rank.work(8, 0.005)
        while True:
            for rank in world.ranks:
                rank.replay(1, 0.0005)
                rank.waits_in = ("recvmsg",) if chance.random() < often else ()
            yield

    assert live(World(seen=False, ranks=2, nranks=4), replays, HOUR_LOOKS // 6) == []


@pytest.mark.parametrize("seen", [True, False], ids=["completion", "counts"])
def test_an_idle_job_whose_ranks_had_called_differently_often_before_the_agent_came_is_silent(seen: bool) -> None:
    world = World(seen=seen, ranks=2)
    world.whole = False
    world.ranks[0].sequence = 1
    assert live(world, idle, 2400) == []


@pytest.mark.parametrize("seen", [True, False], ids=["completion", "counts"])
def test_an_idle_pipeline_whose_ranks_send_and_receive_differently_often_is_silent(seen: bool) -> None:
    world = World(seen=seen, ranks=2, nranks=4)
    world.tell_calls(Op.Recv)
    world.ranks[0].sequence = 1000
    assert live(world, idle, 2400) == []


def pauses(world: World, seconds: int) -> list[tuple[int, Stall]]:
    """After ten seconds of work the first rank sleeps, and the other is in the next operation; who stalls then."""
    world.train(10)
    before = len(world.begun)
    sleeper, waiter = world.ranks
    waiter.begin()
    world.step(int(seconds / LOOK_S))
    waiter.complete()
    sleeper.work(1, 0.005)
    world.step()
    return world.begun[before:]


def test_who_sleeps_where_it_did_the_last_times_saves_something_that_cannot_be_seen() -> None:
    world = World(ranks=2, nranks=2)
    steady(world)
    for _ in range(2):
        assert pauses(world, 25), "it is not known yet that it goes on"
    for _ in range(5):
        assert pauses(world, 25) == []
    assert pauses(world, 60), "not for ever"


def test_who_sleeps_anywhere_else_is_named_within_seconds() -> None:
    world = World(ranks=2, nranks=2)
    steady(world)
    for _ in range(3):
        pauses(world, 25)
    world.train(7)
    began_ns = world.clock.now_ns
    (flagged_ns, stall), *_ = pauses(world, 25)
    assert flagged_ns - began_ns < 17e9
    assert (stall.diagnosis.cause, stall.diagnosis.blamed_rank) == (Cause.RANK_BEHIND, 0)


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("status", [0, 15, 143 << 8], ids=["fine", "SIGTERM", "shell's SIGTERM"])
def test_a_job_that_ends_or_is_told_to_end_is_no_stall(seen: bool, status: int) -> None:
    world = World(seen=seen)
    steady(world)
    (rank,) = world.ranks
    world.watch.processes_gone({rank.pid: status})
    rank.gone = True
    world.step(400)
    assert world.begun == []


@pytest.mark.parametrize("rests", [True, False])
def test_a_job_that_destroys_its_communicators_and_fails_later_is_no_stall(rests: bool) -> None:
    world = World()
    world.rests = rests  # without rest a look has just been, and still has them
    steady(world)
    (rank,) = world.ranks
    rank.ended = True
    world.watch.processes_gone({rank.pid: 1 << 8})
    world.step(400)
    assert world.begun == []


def test_a_checkpoint_is_no_stall_nor_are_its_pauses_but_what_follows_it_is() -> None:
    world = World(ranks=2, nranks=4)
    steady(world)
    writer, waiter = world.ranks
    waiter.begin()
    for _ in range(10):
        writer.process = WRITING
        world.step(60)
        writer.process = STANDING
        world.step(40)
        assert world.begun == []
    world.step(78)
    assert world.begun == []
    world.step(4)
    _, stall = world.begun[0]
    assert (stall.diagnosis.cause, stall.diagnosis.blamed_rank) == (Cause.RANK_BEHIND, writer.rank)


@pytest.mark.parametrize("status", [0, 15, 143 << 8], ids=["fine", "SIGTERM", "shell's SIGTERM"])
def test_a_process_that_ends_properly_long_after_the_last_look_is_no_stall(status: int) -> None:
    world = World(ranks=2)
    steady(world)
    for rank in world.ranks:
        rank.begin()
    world.step(int(2.5 / LOOK_S))
    world.clock.now_ns += EVALUATION_NS + EVALUATION_NS // 2
    (first, _) = world.ranks
    first.process = replace(RUNNING, condition="gone")
    world.watch.processes_gone({first.pid: status})
    assert world.begun == []


def test_what_was_in_flight_when_completion_was_seen_last_is_no_stall() -> None:
    world = World()
    steady(world)
    (rank,) = world.ranks
    rank.begin()
    world.step()
    world.seen, world.left_behind = False, True
    for _ in range(int(2 * AFTER_S / LOOK_S)):
        rank.sequence += 1
        rank.last_ns = world.clock.now_ns
        world.step()
        assert world.watch.current == ()


@pytest.mark.parametrize("idle_s", [5.5, 7.0, 12.0, 18.0])
@pytest.mark.parametrize("held_looks", range(1, LOOKS_A_SECOND + 1))
@pytest.mark.parametrize("rests", [True, False])
def test_an_idle_process_that_is_held_for_a_moment_is_no_stall(idle_s: float, held_looks: int, rests: bool) -> None:
    for phase in range(LOOKS_A_SECOND):
        world = World(seen=False, ranks=2, nranks=4)
        world.rests = rests
        steady(world)
        for rank in world.ranks:
            rank.process = RUNNING
        world.step(int(idle_s / LOOK_S) + phase)
        world.ranks[0].process = STOPPED
        world.step(held_looks)
        world.ranks[0].process = RUNNING
        world.step(4 * LOOKS_A_SECOND)
        assert world.begun == []
