"""What a verdict does not claim: hosts that are silent, numbers that do not compare; on made-up fleets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from railscope.agent.cluster.fleet.facts import Agent, Rank, Stall
from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.cluster.verdict.verdict import has_ended, is_idle
from railscope.agent.cluster.verdict.words import verdict_of
from railscope.agent.facts.causes import Cause
from tests.unit.fleets import COMM, NOW, Fleets, only, stall, waiting

SIZES = pytest.mark.parametrize("hosts", [2, 4])


@SIZES
def test_ranks_of_a_silent_host_are_missing_and_its_state_is_not_guessed(hosts: int) -> None:
    finding = only(waiting(hosts).all_say("rank_behind").lose_host(1))
    assert (finding.cause, finding.ranks, finding.hosts) == (Cause.RANK_MISSING, ("1",), ("host1",))
    assert "cannot tell" in finding.headline
    assert any("rank 1 on host1: its agent has said nothing for 50 s" in line for line in finding.unknown)
    assert any("ping" in step.command for step in finding.next_steps)


def test_what_a_host_said_before_its_agent_was_restarted_still_counts() -> None:
    fleets = waiting().all_say("rank_behind").rank(1, stall=stall("process_stopped", blamed_rank="1"))
    said = fleets.ranks[1].stall
    fleets.lose_host(1).rank(1, last_said=said)
    fleets.agents[1] = Agent("host1", up=True)
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.hosts, finding.basis) == (
        "process_stopped",
        ("1",),
        ("host1",),
        "history",
    )
    assert "when its host last told of it, rank 1 (pid 101, host1) was stopped" in finding.headline


def test_a_rail_of_a_host_that_fell_silent_is_named_as_it_was_last_told() -> None:
    fleets = waiting().all_say("rank_behind").lose_host(1)
    fleets.rank(1, last_said=stall("rail_down", rail="0", device="eth0"))
    finding = only(fleets)
    assert (finding.cause, finding.hosts, finding.devices) == ("rail_down", ("host1",), ("eth0",))


def test_a_count_of_ranks_that_no_job_has_is_not_believed() -> None:
    fleets = waiting()
    for number in (0, 1):
        fleets.rank(number, nranks=(1 << 20) + 1)
    finding = only(fleets)
    assert (finding.nranks, finding.cause) == (None, "unknown")
    assert any("how many ranks the communicator has is not known" in line for line in finding.unknown)


def test_ranks_of_hosts_that_fell_silent_stand_in_a_line_for_each_host() -> None:
    finding = only(Fleets(4, 2).communicator().all_say("rank_behind").lose_host(1).lose_host(3))
    assert [line.partition(":")[0] for line in finding.unknown[:2]] == ["ranks 2-3 on host1", "ranks 6-7 on host3"]


def test_a_job_whose_processes_have_all_ended_is_not_stalled() -> None:
    last = waiting().rank(0, stall=stall("process_gone", blamed_rank="0"), ended=True)
    for up in (True, False):
        fleets = last.rank(1, ended=True).lose_host(1)
        fleets.agents[1] = Agent("host1", up=up)
        verdict = verdict_of(fleets.made())
        assert not verdict.problem
        assert any("nobody waits any more" in note for note in verdict.notes)
    # If the other host did not tell of its rank's end, or somebody still waits, it is.
    assert verdict_of(waiting().rank(0, stall=gone(0), ended=True).made()).problem


def test_a_rank_that_a_restarted_agent_cannot_see_may_still_wait() -> None:
    """Who hangs makes no call, by which an agent that comes later would find its communicator."""
    fleets = waiting().rank(0, stall=gone(0), ended=True).lose_host(1)
    fleets.agents[1] = Agent("host1", up=True)
    assert verdict_of(fleets.made()).problem


@pytest.mark.parametrize(("comm", "number"), [("unknown", "0"), (COMM, "unknown")])
def test_of_what_has_no_name_or_number_nobody_knows_that_all_have_ended_or_are_idle(comm: str, number: str) -> None:
    for said in (stall("process_gone", blamed_rank=number), stall("process_stopped", strength="weak")):
        rank = Rank(comm, number, "host0", pid="100", enqueued=5, completed=5, ended=True, stall=said)
        fleet = replace(waiting().made(), ranks=(rank,))
        assert not has_ended(fleet.ranks)
        assert not is_idle(fleet.ranks)


def gone(blaming: int) -> Stall:
    return stall("process_gone", blamed_rank=str(blaming))


def killed(*first: int) -> Fleets:
    """A job with two ranks a host whose processes are all gone; of each host, the rank that went first."""
    fleets = Fleets(len(first), 2).communicator()
    for number in range(2 * len(first)):
        fleets.rank(number, stall=gone(first[number // 2]), ended=True, inflight_seconds=None)
    return fleets


@pytest.mark.parametrize("first", [(0, 2), (1, 2), (1, 3)])
def test_a_job_with_two_ranks_a_host_has_ended_though_hosts_blame_only_the_first_that_went(
    first: tuple[int, int],
) -> None:
    verdict = verdict_of(killed(*first).made())
    assert not verdict.problem
    assert any("all its processes have ended" in note for note in verdict.notes)


def failed_last() -> Fleets:
    """A job of four ranks that have all ended, the last of which failed."""
    fleets = Fleets(2, 2).communicator()
    for number in range(4):
        fleets.rank(number, ended=True, inflight_seconds=None)
    return fleets.rank(3, stall=gone(3))


def test_a_rank_that_fails_when_the_others_have_left_is_a_note_and_no_stall() -> None:
    verdict = verdict_of(failed_last().made())
    assert not verdict.problem
    assert f"communicator {COMM}: rank 3 ended within it, ranks 0-2 left it, nobody waits any more" in verdict.notes
    # Of those that left and whose host has been taken down since, it is known that they did.
    silent = failed_last().lose_host(0)
    assert not verdict_of(silent.made()).problem
    assert verdict_of(silent.rank(0, ended=False).made()).problem


def test_whoever_has_not_left_a_communicator_of_which_a_rank_is_gone_keeps_it_stalled() -> None:
    finding = only(failed_last().rank(1, ended=False, inflight_seconds=40.0, stall=gone(3)))
    assert (finding.cause, finding.ranks) == ("process_gone", ("3",))
    assert verdict_of(failed_last().rank(1, ended=False, completed=None).made()).problem


def test_of_a_communicator_that_all_ranks_left_it_is_not_said_that_somebody_is_gone() -> None:
    left = failed_last().rank(3, stall=None)
    verdict = verdict_of(left.made(), COMM)
    assert (verdict.problem, verdict.notes) == (False, ())


def test_whoever_waits_for_a_rank_that_is_gone_keeps_the_job_stalled() -> None:
    seen = only(killed(1, 2).rank(0, ended=False, inflight_seconds=4.0))
    assert (seen.cause, seen.ranks) == ("process_gone", ("1", "2"))
    # At the level of counts its operation is not seen, and that it waits follows from other signs.
    signs = replace(gone(1), strength="weak")
    assert verdict_of(killed(1, 2).rank(0, ended=False, stall=signs, completed=None).made()).problem
    assert verdict_of(killed(1, 2).rank(0, ended=False, stall=None).made()).problem


def idle(**changes: Any) -> Fleets:
    """Every rank completed its 1,205 operations, and then the process of rank 1 was stopped."""
    fleets = Fleets(2).communicator()
    for number in (0, 1):
        fleets.rank(number, completed=1205, inflight_seconds=0.0)
    return fleets.rank(1, stall=stall("process_stopped", blamed_rank="1", strength="weak")).rank(0, **changes)


def test_a_process_that_is_stopped_while_nobody_waits_is_no_stall() -> None:
    verdict = verdict_of(idle().made())
    assert not verdict.problem
    assert any("nobody waits" in note and "stopped: rank 1" in note for note in verdict.notes)


@pytest.mark.parametrize(
    "changes",
    [
        {"enqueued": 1206, "position": Position(1206), "inflight_seconds": 3.0},
        {"enqueued": 1206, "completed": 1206, "position": Position(1206)},
        {"completed": 1204},
        {"completed": None, "inflight_seconds": None},
        {"position": None},
        {"position": Position(1205, 3, learnt=True)},
        {"moving": True},
        {"stall": stall("rank_behind", blamed_rank="1", strength="weak")},
        {"nranks": 3},
        {"nranks": None},
    ],
    ids=[
        "waits",
        "went on",
        "incomplete",
        "unseen",
        "nowhere",
        "about there",
        "a moment ago",
        "says so",
        "missing",
        "how many",
    ],
)
def test_a_process_that_is_stopped_is_to_blame_where_anybody_may_wait(changes: dict[str, object]) -> None:
    fleets = idle(**changes)
    if "nranks" in changes:
        fleets.rank(1, nranks=changes["nranks"])
    finding = only(fleets)
    assert (finding.cause, finding.ranks) == ("process_stopped", ("1",))


@pytest.mark.parametrize("more", [{"strength": "strong"}, {"strength": "weak", "op": ""}], ids=["within", "elsewhere"])
def test_a_process_that_is_stopped_within_an_operation_or_perhaps_in_another_communicator_is_to_blame(
    more: dict[str, str],
) -> None:
    said = stall("process_stopped", blamed_rank="1", **more)
    assert only(idle().rank(1, stall=said)).cause == "process_stopped"


def test_a_named_culprit_stays_named_while_another_host_is_silent() -> None:
    fleets = waiting(4).all_say("rank_behind").rank(1, stall=stall("process_stopped", blamed_rank="1")).lose_host(3)
    finding = only(fleets)
    assert (finding.cause, finding.ranks) == ("process_stopped", ("1",))
    assert any("rank 3 on host3" in line for line in finding.unknown)


def test_a_host_never_scraped_leaves_ranks_that_nobody_told_of() -> None:
    fleets = waiting(4)
    fleets.ranks = [one for one in fleets.ranks if one.rank != "3"]
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.hosts) == (Cause.RANK_MISSING, ("3",), ())
    assert any("no host told of them" in line for line in finding.unknown)


def test_sequences_are_not_compared_where_an_agent_was_restarted_beside_the_job() -> None:
    fleets = waiting().rank(1, enqueued=3, completed=2, position=None)
    finding = only(fleets)
    assert finding.cause == "unknown"
    assert any("rank 1 (on host1)" in line and "not compared" in line for line in finding.unknown)


def test_a_learnt_position_counts_only_beyond_its_uncertainty() -> None:
    near = waiting().rank(1, position=Position(1200, uncertainty=10, learnt=True), enqueued=5, completed=5)
    assert only(near).cause == "unknown"
    far = waiting().rank(1, position=Position(1190, uncertainty=10, learnt=True), enqueued=5, completed=5)
    finding = only(far)
    assert (finding.ranks, finding.strength) == (("1",), "weak")
    assert "weak" in finding.headline


def test_an_idle_rank_is_named_weakly_where_its_sequence_is_too_vague() -> None:
    fleets = waiting(4).all_say("rank_behind").behind(2)
    fleets.rank(2, position=Position(1204, uncertainty=3, learnt=True), enqueued=50, completed=50)
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.basis, finding.strength) == ("rank_behind", ("2",), "idle", "weak")
    assert "rank 2 (pid 102, host2) is not inside any operation" in finding.headline
    # Since its agent was started it made no call: it may have been inside the operation before.
    assert only(fleets.rank(2, enqueued=0, completed=0)).cause == "unknown"


def test_an_idle_rank_that_is_not_behind_is_not_blamed() -> None:
    fleets = waiting(4).rank(2, stall=None, inflight_seconds=0.0, completed=1205)
    assert "2" not in only(fleets).ranks


def test_a_rank_scraped_before_the_stall_is_not_behind() -> None:
    fleets = waiting().behind(1).rank(1, scraped=NOW - 60)
    finding = only(fleets)
    assert finding.cause == "unknown"
    assert any("before the stall" in line for line in finding.unknown)


@pytest.mark.parametrize("op", ["Send", "Recv", "SendRecv"])
def test_sequences_of_point_to_point_are_not_compared(op: str) -> None:
    fleets = waiting().all_say("unknown", op=op).rank(1, position=Position(900), enqueued=900, completed=900)
    finding = only(fleets)
    assert finding.cause == "unknown"
    assert any("point to point" in line for line in finding.unknown)


def test_sequences_of_a_communicator_that_goes_on_slowly_are_not_compared() -> None:
    fleets = waiting().behind(1).rank(1, moving=True).rank(0, inflight_seconds=0.4)
    finding = only(fleets)
    assert finding.cause == "unknown"
    assert any("still entered operations" in line for line in finding.unknown)


def test_a_rank_that_stands_since_a_moment_ago_is_compared() -> None:
    fleets = waiting().behind(1).rank(1, moving=True).rank(0, moving=True, inflight_seconds=2.5)
    assert only(fleets).ranks == ("1",)


def test_ranks_that_always_call_at_different_rates_are_not_compared() -> None:
    fleets = waiting().behind(1, by=600).rank(1, mean_calls_per_second=20.0).rank(0, mean_calls_per_second=40.0)
    assert only(fleets).cause == "unknown"


def test_without_completions_it_is_said_that_only_entries_are_compared() -> None:
    fleets = waiting().behind(1)
    for number in (0, 1):
        fleets.rank(number, completed=None, inflight_seconds=None)
    finding = only(fleets)
    assert finding.ranks == ("1",)
    assert any("no host tells what completed" in line for line in finding.unknown)


def test_weak_evidence_is_called_so() -> None:
    finding = only(Fleets().communicator().all_say("unknown", strength="weak"))
    assert any("evidence marked weak rests on" in line for line in finding.unknown)
    assert any(line.endswith("(weak evidence)") for line in finding.evidence)


def test_what_is_marked_weak_is_only_explained_where_something_is_marked() -> None:
    # The rail that its host names is what matters, and weak words of others are not shown beside it.
    fleets = waiting().all_say("unknown", strength="weak").rank(1, stall=stall("rail_down", rail="0", device="eth0"))
    finding = only(fleets)
    assert finding.cause == "rail_down"
    assert not any("weak" in line for line in (*finding.evidence, *finding.unknown, finding.headline))
    # Weak for another reason: its sequence is learnt from history, and hosts are sure of what they say.
    learnt = waiting().rank(1, position=Position(1190, 10, learnt=True), enqueued=5, completed=5)
    assert "(weak evidence)" in only(learnt).headline
    assert not any("marked weak" in line for line in only(learnt).unknown)


@pytest.mark.parametrize("which", [{"comm": "unknown"}, {"rank": "unknown"}])
def test_what_has_no_identity_is_neither_compared_nor_missed(which: Any) -> None:
    fleets = waiting(4).behind(1)
    fleets.ranks = [replace(one, **which, nranks=9) for one in fleets.ranks]
    finding = only(fleets)
    assert finding.cause == "unknown"
    assert any("cannot read which communicator or rank" in line for line in finding.unknown)


def test_an_unknown_number_of_ranks_is_said() -> None:
    fleets = waiting()
    for number in (0, 1):
        fleets.rank(number, nranks=None)
    assert any("how many ranks" in line for line in only(fleets).unknown)
