"""When a verdict says that nothing is stalled, and what it says then: healthy fleets, jobs that ended, checkpoints.

Fleets are made up: see fleets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from railscope.agent.cluster.fleet.facts import Agent, LongWait, Rank
from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.cluster.verdict.verdict import has_ended, is_idle
from railscope.agent.cluster.verdict.words import make_verdict
from tests.unit.fleets import (
    COMM,
    NOW,
    OTHER,
    Case,
    Fleets,
    checkpoint,
    failed_last,
    gone,
    identity,
    idle,
    killed,
    named,
    stall,
    waiting,
)

LATE: Final = (("headline", "No stall yet"), ("notes", "behind"))
WRITER: Final = f"communicator {COMM} waits for rank 0 (pid 100, host0), which writes to storage: a checkpoint?"


def last_ended(*, up: bool) -> Fleets:
    """The process of rank 0 is gone, rank 1 has left, and its host was restarted, or is silent."""
    fleets = waiting().rank(0, stall=gone(0), ended=True).rank(1, ended=True)
    return fleets.restart_agent(1) if up else fleets.lose_host(1)


def writes(**changes: Any) -> Fleets:
    """Rank 0 writes, and all say that they wait."""
    return Fleets().communicator().all_say("rank_behind").rank(0, writing=True, **changes)


def several_writers() -> Fleets:
    fleets = Fleets(4).communicator().all_say("rank_behind")
    for number in (0, 1):
        fleets.behind(number).rank(number, writing=True)
    return fleets


def crossing_groups() -> Fleets:
    """Rank 1 of a group within host 0 waits for its writer, and rank 1 of another host for that rank, as with tensor
    and data parallel groups; the host of the writer calls nobody stalled."""
    fleets = Fleets(2).communicator(COMM, hosts=[0, 0]).behind(0).rank(0, writing=True).rank(0, pid=100)
    fleets.rank(1, pid=101, inflight_seconds=None)
    fleets.communicator(OTHER, pids=200).all_say("rank_behind", OTHER).behind(0, OTHER).rank(0, OTHER, pid=101)
    return fleets


def clock_off(seconds: float) -> Fleets:
    fleets = Fleets().communicator()
    fleets.agents[0] = replace(fleets.agents[0], clock_offset_seconds=seconds)
    return fleets


def slow_to_hear_of() -> Fleets:
    fleets = Fleets(scrape_seconds=60.0)
    fleets.agents[1] = Agent("host1", up=True, failing=("rdma",))
    fleets.waiting.append(LongWait(COMM, "0", "host0", 400.0))
    return fleets


CASES: Final = [
    Case("nothing runs", Fleets(4)),
    Case("differences between sequences alone", Fleets(4).communicator().behind(1)),
    Case("a rail is down and nothing stalls", Fleets().communicator().rail(0, 0, up=False)),
    Case(
        "silent hosts are told",
        Fleets(4).communicator().lose_host(2),
        says=(("headline", "1 of 4 agents does not answer"), ("notes", "host2…")),
    ),
    Case("a clock is off", clock_off(-90.0), says=(("notes", "host0: its clock is 90 s behind the store's"),)),
    Case("a clock is hardly off", clock_off(-3.0), never=(("notes", ""),)),
    Case(
        "slow scrapes, failing collectors and long waits",
        slow_to_hear_of(),
        says=(("notes", "scraped every 60 s"), ("notes", "host1: rdma cannot be read"), ("notes", "6 min 40 s")),
    ),
    # Jobs that ended
    *(
        Case(f"all processes have ended, {name}", last_ended(up=up), says=(("notes", "nobody waits any more"),))
        for name, up in (("one host was started anew", True), ("one host is silent", False))
    ),
    *(
        Case(
            f"two ranks a host, which blames only the first that went: {first}",
            killed(*first),
            says=(("notes", "all its processes have ended"),),
        )
        for first in ((0, 2), (1, 2), (1, 3))
    ),
    Case(
        "a rank failed when the others had left",
        failed_last(),
        says=(("notes", f"=communicator {COMM}: rank 3 ended within it, ranks 0-2 left it, nobody waits any more"),),
    ),
    Case(
        "of those that left it is known that they did when their host has been taken down", failed_last().lose_host(0)
    ),
    Case("all ranks left, and nobody is said to be gone", failed_last().rank(3, stall=None), never=(("notes", ""),)),
    Case(
        "a process is stopped while nobody waits",
        idle(),
        says=(("notes", "nobody waits"), ("notes", "stopped: rank 1")),
    ),
    Case(
        "a job was suspended in the middle of an operation",
        waiting().all_say("process_stopped").rank(1, stall=stall("process_frozen", blamed_rank="1")),
        says=(("notes", f"=communicator {COMM}: all its ranks are stopped or frozen, as when a job is suspended"),),
    ),
    # Before a host calls it a stall
    Case(
        "a rank is behind",
        Fleets(4).communicator().behind(2).standing(),
        says=(
            (
                "headline",
                f"=No stall yet: communicator {COMM} waits for rank 2 (pid 102, host2), which is 1 operation behind; "
                "the oldest wait is 40 s old.",
            ),
        ),
    ),
    Case(
        "two ranks are behind, and how long the others wait is not seen",
        Fleets(4)
        .communicator()
        .behind(1, by=3)
        .behind(2, by=3)
        .rank(0, inflight_seconds=None, completed=None)
        .rank(3, inflight_seconds=None, completed=None)
        .standing(),
        says=(("headline", "which are 3 operations behind."),),
    ),
    Case(
        "another communicator is told of beside it",
        Fleets(2).communicator().behind(1).standing().communicator(OTHER, pids=200).behind(0, OTHER).standing(OTHER),
        says=(("headline", "No stall yet: …"), ("notes", f"communicator {OTHER} waits for rank 0")),
    ),
    Case("one that is behind goes on", Fleets(4).communicator().behind(2).rank(2, moving=True).standing(), never=LATE),
    Case("one that is behind writes", Fleets(4).communicator().behind(2).rank(2, writing=True).standing(), never=LATE),
    Case("no rank waits", Fleets(4).communicator().each(inflight_seconds=0.0).behind(2).standing(), never=LATE),
    Case("all are in one operation", Fleets(4).communicator().standing(), never=LATE),
    Case("it moves between scrapes", Fleets(4).communicator().behind(2), never=LATE),
    # Checkpoints
    Case("a checkpoint", checkpoint(4), says=(("headline", f"=No stall: {WRITER}"),)),
    Case("one of whom no number is known writes", writes(stall=None, position=None)),
    Case("one of whom hardly a number is known writes", writes(position=Position(1205, 2, True))),
    Case("the writer was scraped before the others began to wait", writes(stall=None, scraped=NOW - 40.0)),
    Case(
        "who has just gone on is still meant by hosts that were scraped before",
        checkpoint().rank(0, enqueued=1300, completed=1300, position=Position(1300), moving=True),
    ),
    # Rank 1 of the first communicator is rank 0 of the other: there nobody comes, because it waits here.
    Case(
        "what waits only because of a checkpoint",
        checkpoint(3).communicator(OTHER, pids=101, hosts=[1, 2]).all_say("rank_behind", OTHER).behind(0, OTHER),
        says=(("headline", f"=No stall: {WRITER.replace(COMM, f'{COMM} (and {OTHER} because of it)')}"),),
    ),
    Case(
        "several ranks that write",
        several_writers(),
        says=(("headline", "waits for rank 0 (pid 100, host0) and rank 1 (pid 101, host1), which write to storage"),),
    ),
    Case(
        "who waits on the writer's own host keeps others waiting",
        crossing_groups(),
        says=(("headline", f"No stall: communicator {COMM} (and {OTHER} because of it) waits for rank 0 (pid 100…"),),
    ),
    Case(
        "a checkpoint that nobody elsewhere waits for",
        Fleets(2).communicator(COMM, hosts=[0, 0]).behind(0).rank(0, writing=True),
        says=(("headline", "No stall: no host calls the only…"),),
        never=(("notes", COMM),),
    ),
]


@pytest.mark.parametrize("case", named(CASES))
def test_what_is_no_stall_is_not_called_one(case: Case) -> None:
    case.assert_silent()


@pytest.mark.parametrize(
    "case",
    named(
        [
            Case("a checkpoint", checkpoint(), says=(("headline", f"=No stall: {WRITER}"),)),
            Case("all ranks left", failed_last().rank(3, stall=None), never=(("notes", ""),)),
        ]
    ),
)
def test_asked_for_the_communicator_the_same_is_said(case: Case) -> None:
    case.assert_silent(COMM)


def test_asked_for_what_waits_because_of_a_checkpoint_there_is_no_stall() -> None:
    assert not make_verdict(crossing_groups().made(), OTHER).problem


def test_a_communicator_asked_for_that_is_not_stalled_is_described() -> None:
    verdict = make_verdict(Fleets().communicator().made(), COMM)
    assert not verdict.problem
    assert any("ranks 0-1 entered 1,205 operations" in line for line in verdict.asked)


@pytest.mark.parametrize(("comm", "number"), [("unknown", "0"), (COMM, "unknown")])
def test_of_what_has_no_name_or_number_nobody_knows_that_all_have_ended_or_are_idle(comm: str, number: str) -> None:
    for said in (stall("process_gone", blamed_rank=number), stall("process_stopped", strength="weak")):
        rank = Rank(identity(comm, number, pid="100"), "host0", enqueued=5, completed=5, ended=True, stall=said)
        fleet = replace(waiting().made(), ranks=(rank,))
        assert not has_ended(fleet.ranks)
        assert not is_idle(fleet.ranks)


def test_a_stall_elsewhere_comes_first_and_the_checkpoint_is_a_note() -> None:
    fleets = checkpoint().communicator(OTHER, pids=300).all_say("rank_behind", OTHER)
    verdict = make_verdict(fleets.rank(1, OTHER, stall=stall("process_stopped", blamed_rank="1")).made())
    assert [one.comm for one in verdict.findings] == [OTHER]
    assert WRITER in verdict.notes


def test_who_shares_a_group_with_a_writer_and_did_not_come_there_either_is_not_excused() -> None:
    fleets = crossing_groups().behind(1)
    assert [(one.comm, one.cause) for one in make_verdict(fleets.made()).findings] == [(OTHER, "rank_behind")]
