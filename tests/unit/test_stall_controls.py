"""Random healthy jobs, for which nobody may be paged: `make test-controls` lives a thousand of them.

Each job is a row of phases drawn by its seed, of a length, with ranks and times drawn as well.  A rank that is late in
one is at work and back within the time after which any operation is a stall; one that sleeps meanwhile is suspected
after the floor, and back before an alert would have waited long enough.  Simulated: see stall_world.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from railscope.probes.nccl.abi import Op
from tests.unit.stall_world import (
    AFTER_S,
    COMPUTING,
    FLOOR_S,
    LOOK_S,
    MIB,
    MOVING,
    RAILS,
    RUNNING,
    STANDING,
    STARVED,
    WRITING,
    Rank,
    World,
)

CONTROLS = int(os.environ.get("RAILSCOPE_TEST_CONTROLS", "60"))
ALERT_S = 15
"""For so long an alert on a stall waits before it fires."""
_HOST_RANKS = 4

Phase = Callable[[World, random.Random], Iterator[None]]


def looks(chance: random.Random, least_s: float, most_s: float) -> range:
    return range(int(chance.uniform(least_s, most_s) / LOOK_S))


def steps(world: World, chance: random.Random) -> Iterator[None]:
    """Training: collectives in each look, whose number and time vary."""
    each_s, operations = chance.uniform(0.001, 0.02), chance.randint(1, 12)
    for _ in looks(chance, 20, 90):
        calls = max(1, operations + chance.randint(-1, 1))
        for rank in world.ranks:
            rank.process = MOVING
            rank.work(calls, each_s * chance.uniform(0.7, 1.4))
        yield


def together(world: World, late: list[Rank], seconds: float, doing: Callable[[Rank], None]) -> Iterator[None]:
    """All but some ranks enter a collective; the others come when their time is over, and it completes."""
    early = [rank for rank in world.ranks if rank not in late]
    for rank in early:
        rank.process = STANDING
        rank.begin()
    for rank in late:
        doing(rank)
    for _ in range(int(seconds / LOOK_S)):
        yield
    for rank in late:
        rank.process = MOVING
        rank.work(1, 0.005)
    for rank in early:
        rank.process = MOVING
        rank.complete()


def some(world: World, chance: random.Random) -> list[Rank]:
    return chance.sample(world.ranks, chance.randint(1, len(world.ranks) - 1))


def a_checkpoint(world: World, chance: random.Random) -> Iterator[None]:
    """Some ranks write for up to five minutes, the others wait in the next collective."""

    def write(rank: Rank) -> None:
        rank.process = WRITING

    yield from together(world, some(world, chance), chance.uniform(5, 300), write)


def a_slow_batch(world: World, chance: random.Random) -> Iterator[None]:
    """Some ranks wait for their input, or compute longer than the others."""
    state = chance.choice([COMPUTING, replace(RUNNING, busy_ratio=0.6), RUNNING])
    most_s = FLOOR_S + ALERT_S - 2 if state == RUNNING else AFTER_S - 2

    def load(rank: Rank) -> None:
        rank.process = state

    yield from together(world, some(world, chance), chance.uniform(0.5, most_s), load)


def all_read_their_input(world: World, chance: random.Random) -> Iterator[None]:
    """No call at all, for minutes: an epoch ends, a data set is shuffled, a kernel is compiled."""
    for rank in world.ranks:
        rank.process = chance.choice([COMPUTING, RUNNING])
    for _ in looks(chance, 5, 300):
        yield


def an_evaluation(world: World, chance: random.Random) -> Iterator[None]:
    """Computing, and now and then a small collective of another kind."""
    for _ in range(chance.randint(2, 12)):
        for rank in world.ranks:
            rank.process = COMPUTING
        for _ in looks(chance, 1, 25):
            yield
        for rank in world.ranks:
            rank.process = MOVING
            rank.work(1, chance.uniform(0.001, 0.05), Op.AllGather, 4096)
        yield


def a_busy_host(world: World, chance: random.Random) -> Iterator[None]:
    """Everything takes somewhat longer: the processors are others' half of the time."""
    slow = chance.uniform(1.1, 1.6)
    for _ in looks(chance, 10, 60):
        for rank in world.ranks:
            rank.process = replace(STARVED, busy_ratio=0.5, waited_ratio=chance.uniform(0.1, 0.4), moved_bytes=MIB)
            rank.work(4, 0.005 * slow)
        yield


def others_fill_the_rails(world: World, chance: random.Random) -> Iterator[None]:
    """A slow network on all rails alike."""
    trip_ns = chance.randint(1_000_000, 30_000_000)
    slow = tuple(
        replace(rail, round_trip_ns=trip_ns, least_round_trip_ns=100_000, busy_ratio=0.9, sent_bytes=50 * MIB)
        for rail in RAILS
    )
    for _ in range(chance.randint(3, 12)):
        for rank in world.ranks:
            rank.process, rank.rails = MOVING, slow
            rank.begin()
        for _ in looks(chance, 0.3, 3):
            yield
        for rank in world.ranks:
            rank.complete()
    for rank in world.ranks:
        rank.rails = RAILS


def an_elastic_restart(world: World, chance: random.Random) -> Iterator[None]:
    """All communicators end, and the next ones' first collective connects for seconds."""
    number = max(rank.instance for rank in world.ranks)
    for rank in world.ranks:
        rank.ended = True
        rank.posted = None
    for _ in looks(chance, 1, 40):
        yield
    hash_ = world.ranks[0].comm_hash + 1
    world.ranks = [
        Rank(world, number + 1 + at, at, 10_000 + number + at, comm_hash=hash_, last_ns=world.clock.now_ns)
        for at in range(_HOST_RANKS)
    ]
    for rank in world.ranks:
        rank.process = RUNNING
        rank.begin(sends=False)
    for _ in looks(chance, 1, 12):
        yield
    for rank in world.ranks:
        rank.complete()


def an_uneven_end(world: World, chance: random.Random) -> Iterator[None]:
    """Some ranks have had enough and destroy their end; the others compute on, and end later."""
    done = some(world, chance)
    for rank in done:
        rank.ended = True
        rank.process = RUNNING
    for rank in world.ranks:
        if rank not in done:
            rank.process = chance.choice([COMPUTING, RUNNING])
    for _ in looks(chance, 1, 200):
        yield
    for rank in world.ranks:
        rank.ended = True
    yield


PHASES: tuple[Phase, ...] = (
    steps,
    a_checkpoint,
    a_slow_batch,
    all_read_their_input,
    an_evaluation,
    a_busy_host,
    others_fill_the_rails,
    an_elastic_restart,
)


@pytest.mark.parametrize("seed", range(CONTROLS))
def test_nobody_is_paged_for_a_healthy_job(seed: int) -> None:
    chance = random.Random(seed)
    world = World(seen=chance.random() < 0.6, ranks=_HOST_RANKS, nranks=chance.choice([4, 8, 64]))
    told: list[str] = []
    for phase in (steps, *chance.choices(PHASES, k=chance.randint(3, 8)), an_uneven_end):
        told.append(phase.__name__)
        for _ in phase(world, chance):
            world.tell_calls()
            world.step()
            paged = [
                (stall.diagnosis.cause.value, stall.op, stall.diagnosis.evidence)
                for stall in world.watch.current
                if world.clock.now_ns - stall.flagged_ns >= ALERT_S * 1e9
            ]
            assert paged == [], f"{'completion' if world.seen else 'counts'} seen: {', '.join(told)}"
