"""A job that is killed whole has ended; a process that is killed alone leaves others waiting, and is named at once.

Simulated: see stall_world.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable

import pytest

from railscope.agent.facts.causes import Cause
from tests.unit.stall_world import World, steady

KILLED = int(signal.SIGKILL)


def die(world: World, *ranks: int, status: int = KILLED) -> None:
    """These ranks' processes end, and the agent hears of it."""
    for number in ranks:
        world.watch.processes_gone({world.ranks[number].pid: status})
        world.ranks[number].gone = True


def job(*, ranks: int = 4, nranks: int = 8, seen: bool = True) -> World:
    """Some ranks of a job on this host, all within an operation."""
    world = World(seen=seen, ranks=ranks, nranks=nranks)
    steady(world)
    for rank in world.ranks:
        rank.begin()
    return world


def blamed(world: World) -> set[tuple[str, int | None]]:
    return {(stall.diagnosis.cause.value, stall.diagnosis.blamed_rank) for stall in world.watch.current}


@pytest.mark.parametrize("seen", [True, False], ids=["completion", "counts"])
@pytest.mark.parametrize("nranks", [4, 8], ids=["whole", "part"])
def test_processes_that_are_killed_together_are_an_end(
    seen: bool, nranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = job(nranks=nranks, seen=seen)
    with caplog.at_level(logging.INFO, "railscope.stalls"):
        die(world, 0, 1)
        world.step()
        die(world, 2, 3)
        world.step(20)
    assert (world.watch.current, world.begun, world.watch.busy) == ((), [], False)
    (line,) = caplog.messages
    assert "4 processes of this host that share communicators have ended together: 4711: killed by signal 9" in line


@pytest.mark.parametrize("others_end", [(), (1,), (1, 2)])
def test_a_process_that_is_killed_while_another_goes_on_is_named_within_a_second(others_end: Iterable[int]) -> None:
    world = job()
    die(world, 0, *others_end)
    assert world.until_flagged(1) < 1
    assert ("process_gone", 0) in blamed(world)


def test_the_only_process_of_a_host_has_nobody_to_be_held_against_and_is_named_at_once() -> None:
    world = job(ranks=1)
    die(world, 0)
    assert blamed(world) == {("process_gone", 0)}


def test_processes_that_give_back_their_memory_are_waited_for_and_who_hangs_in_it_is_not() -> None:
    world = job()
    for rank in world.ranks:
        rank.ending = True
    die(world, 0)
    world.step(20)
    assert world.watch.current == ()
    die(world, 1, 2, 3)
    world.step(4)
    assert world.begun == []
    hangs = job()
    hangs.ranks[1].ending = hangs.ranks[2].ending = hangs.ranks[3].ending = True
    die(hangs, 0)
    assert 29 < hangs.until_flagged(40) < 32


def test_a_job_that_hung_and_is_killed_whole_stalls_no_more() -> None:
    world = job()
    for rank in world.ranks[1:]:
        rank.complete()
        rank.begin()
    world.step(200)
    stalled = len(world.watch.current)
    assert stalled
    die(world, 0, 1, 2, 3)
    assert len(world.watch.current) == stalled, "it is not known yet whether others go on"
    world.step(3)
    assert world.watch.current == ()


def test_who_was_stalled_and_is_killed_alone_is_gone() -> None:
    world = job()
    world.step(200)
    assert world.watch.current
    begun = len(world.begun)
    die(world, 0)
    world.step(4)
    assert ("process_gone", 0) in blamed(world)
    assert len(world.begun) == begun, "it is the same stall"


def test_a_process_that_executes_another_program_is_gone() -> None:
    world = job(ranks=1, nranks=2)
    (rank,) = world.ranks
    rank.complete()
    world.watch.processes_gone({rank.pid: None}, replaced=True)
    rank.gone = True
    (stall,) = world.watch.current
    assert stall.diagnosis.cause is Cause.PROCESS_GONE
    assert "executes another program (execve)" in stall.diagnosis.evidence[0]
