"""A checkpoint is no stall: what is said where ranks wait for one that writes to storage.  On made-up fleets."""

from __future__ import annotations

import pytest

from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.cluster.verdict.words import verdict_of
from tests.unit.fleets import COMM, NOW, OTHER, Fleets, only, stall

WORDS = f"communicator {COMM} waits for rank 0 (pid 100, host0), which writes to storage: a checkpoint?"


def checkpoint(hosts: int = 2, comm: str = COMM, at: float = NOW) -> Fleets:
    """Rank 0 writes while all others wait for it."""
    fleets = Fleets(hosts, at=at).communicator(comm).all_say("rank_behind", comm)
    return fleets.behind(0, comm).rank(0, comm, writing=True)


def test_a_checkpoint_is_no_stall_and_is_told_in_a_line() -> None:
    verdict = verdict_of(checkpoint(4).made())
    assert not verdict.problem
    assert verdict.findings == ()
    assert verdict.headline == f"No stall: {WORDS}"


def test_without_the_writing_it_is_one() -> None:
    finding = only(checkpoint().rank(0, writing=False))
    assert (finding.cause, finding.ranks) == ("rank_behind", ("0",))


def test_asked_for_the_communicator_the_same_is_said() -> None:
    assert verdict_of(checkpoint().made(), COMM).headline == f"No stall: {WORDS}"


@pytest.mark.parametrize("cause", ["process_gone", "process_stopped", "rail_down", "rail_filtered", "rail_slow"])
def test_what_is_broken_beside_it_is_a_stall_all_the_same(cause: str) -> None:
    fleets = checkpoint().rank(1, stall=stall(cause, blamed_rank="1", device="eth0"))
    assert only(fleets).cause == cause


def test_who_entered_as_much_as_anybody_and_writes_keeps_nobody_waiting() -> None:
    finding = only(Fleets(4).communicator().all_say("rank_behind").behind(2).rank(0, writing=True, stall=None))
    assert (finding.cause, finding.ranks) == ("rank_behind", ("2",))
    fleets = Fleets().communicator().all_say("unknown").rank(0, writing=True)
    assert only(fleets).cause == "unknown"


def test_where_numbers_do_not_compare_who_writes_is_waited_for() -> None:
    fleets = Fleets().communicator().all_say("rank_behind").rank(0, writing=True, stall=None, position=None)
    assert not verdict_of(fleets.made()).problem
    learnt = Fleets().communicator().all_say("rank_behind").rank(0, writing=True, position=Position(1205, 2, True))
    assert not verdict_of(learnt.made()).problem


def test_a_host_scraped_before_the_others_began_to_wait_is_believed_that_it_writes() -> None:
    fleets = Fleets().communicator().all_say("rank_behind").rank(0, writing=True, stall=None, scraped=NOW - 40.0)
    assert not verdict_of(fleets.made()).problem


def test_who_has_just_gone_on_is_still_meant_by_hosts_that_were_scraped_before() -> None:
    gone_on = checkpoint().rank(0, enqueued=1300, completed=1300, position=Position(1300), moving=True)
    assert not verdict_of(gone_on.made()).problem


def test_what_waits_only_because_of_a_checkpoint_is_no_stall_either() -> None:
    """Rank 1 of the first communicator is rank 0 of the other: there nobody comes, because it waits here."""
    fleets = checkpoint(3).communicator(OTHER, pids=101, hosts=[1, 2]).all_say("rank_behind", OTHER).behind(0, OTHER)
    verdict = verdict_of(fleets.made())
    assert not verdict.problem
    assert verdict.headline == f"No stall: {WORDS.replace(COMM, f'{COMM} (and {OTHER} because of it)')}"


def test_a_stall_elsewhere_comes_first_and_the_checkpoint_is_a_note() -> None:
    fleets = checkpoint().communicator(OTHER, pids=300).all_say("rank_behind", OTHER)
    verdict = verdict_of(fleets.rank(1, OTHER, stall=stall("process_stopped", blamed_rank="1")).made())
    assert [one.comm for one in verdict.findings] == [OTHER]
    assert WORDS in verdict.notes


def test_several_ranks_that_write_are_named_together() -> None:
    fleets = Fleets(4).communicator().all_say("rank_behind")
    for number in (0, 1):
        fleets.behind(number).rank(number, writing=True)
    headline = verdict_of(fleets.made()).headline
    assert "waits for rank 0 (pid 100, host0) and rank 1 (pid 101, host1), which write to storage" in headline


def test_a_checkpoint_that_has_just_ended_was_no_stall() -> None:
    now = Fleets().communicator().was_stalled(ago=1.2, by=stall("rank_behind"))
    verdict = verdict_of(now.made(), None, [checkpoint(at=NOW - 1.2).made()])
    assert not verdict.problem
    assert verdict.headline.startswith("No stall: no host calls the only")
    (note,) = verdict.notes
    assert note == (
        f"communicator {COMM} waited until 1.2 s ago for rank 0 (pid 100, host0), which wrote to storage: a checkpoint?"
    )


def test_one_that_ended_minutes_ago_is_not_called_a_stall_in_the_notes() -> None:
    fleets = Fleets().communicator().was_stalled(ago=200.0, by=stall("rank_behind", blamed_rank="0"))
    assert "was stalled until" in verdict_of(fleets.made()).notes[0]
    fleets.wrote(COMM)
    (note,) = verdict_of(fleets.made()).notes
    assert note.startswith(f"communicator {COMM} waited, while one of its ranks wrote to storage, until ")
    broken = Fleets().communicator().was_stalled(ago=200.0, by=stall("rail_down", device="eth0")).wrote(COMM)
    assert "was stalled until" in verdict_of(broken.made()).notes[0]


def crossing_groups() -> Fleets:
    """Rank 1 of a group within host 0 waits for its writer, and rank 1 of another host for that rank, as with tensor
    and data parallel groups; the host of the writer calls nobody stalled."""
    fleets = Fleets(2).communicator(COMM, hosts=[0, 0]).behind(0).rank(0, writing=True).rank(0, pid="100")
    fleets.rank(1, pid="101", inflight_seconds=None)
    fleets.communicator(OTHER, pids=200).all_say("rank_behind", OTHER).behind(0, OTHER).rank(0, OTHER, pid="101")
    return fleets


def test_who_waits_on_the_writers_own_host_keeps_others_waiting_and_that_is_no_stall() -> None:
    verdict = verdict_of(crossing_groups().made())
    assert not verdict.problem
    assert verdict.headline.startswith(
        f"No stall: communicator {COMM} (and {OTHER} because of it) waits for rank 0 (pid 100"
    )
    assert not verdict_of(crossing_groups().made(), OTHER).problem


def test_who_shares_a_group_with_a_writer_and_did_not_come_there_either_is_not_excused() -> None:
    fleets = crossing_groups().behind(1)
    assert [(one.comm, one.cause) for one in verdict_of(fleets.made()).findings] == [(OTHER, "rank_behind")]


def test_a_checkpoint_that_nobody_elsewhere_waits_for_is_not_told_of() -> None:
    alone = Fleets(2).communicator(COMM, hosts=[0, 0]).behind(0).rank(0, writing=True)
    verdict = verdict_of(alone.made())
    assert verdict.headline.startswith("No stall: no host calls the only")
    assert COMM not in " ".join(verdict.notes)
