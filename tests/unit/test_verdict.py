"""Verdicts on made-up fleets: who is named for each fault, what is only waiting, and what cannot be known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.culprits import RANK_MISSING, TIERS, culprits_of
from agent.fleet_facts import Agent, LongWait, Moving, Rank
from agent.fleet_sequences import Position
from agent.verdict import has_ended, root_causes
from agent.verdict_quantities import decimal_bytes, duration, ranks_text
from agent.verdict_words import Finding, verdict_of
from tests.unit.fleets import COMM, NOW, OTHER, Fleets, stall

SIZES = pytest.mark.parametrize("hosts", [2, 4])


def only(fleets: Fleets) -> Finding:
    """The one root cause."""
    verdict = verdict_of(fleets.made())
    assert verdict.problem
    (finding,) = verdict.findings
    return finding


def waiting(hosts: int = 2) -> Fleets:
    """A communicator in which every rank waits and no host knows why."""
    return Fleets(hosts).communicator().all_say("unknown")


# Each fault of one communicator


@SIZES
def test_a_stopped_rank_is_named_by_its_own_host_and_the_waiting_ones_are_not(hosts: int) -> None:
    fleets = waiting(hosts).all_say("rank_behind").rank(1, stall=stall("process_stopped", blamed_rank="1"))
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.hosts, finding.pids) == (
        "process_stopped",
        ("1",),
        ("host1",),
        ("101",),
    )
    assert "rank 1 (pid 101, host1) is stopped" in finding.headline
    assert any(step.command == "kill -CONT 101" and step.host == "host1" for step in finding.next_steps)


@SIZES
def test_a_killed_rank_is_named_though_its_other_series_are_gone(hosts: int) -> None:
    gone = stall("process_gone", blamed_rank="1")
    fleets = waiting(hosts).all_say("rank_behind")
    fleets.rank(
        1, stall=gone, enqueued=None, completed=None, position=None, inflight_seconds=None, calls_per_second=None
    )
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.hosts) == ("process_gone", ("1",), ("host1",))
    assert "is gone" in finding.headline


def test_the_host_of_a_waiting_rank_may_name_a_stopped_neighbour() -> None:
    fleets = Fleets(2, 2).communicator().all_say("rank_behind")
    fleets.rank(0, stall=stall("process_stopped", blamed_rank="1")).rank(1, stall=None)
    assert only(fleets).ranks == ("1",)


def test_a_peer_that_closed_its_connections_is_gone_though_nobody_names_it() -> None:
    finding = only(waiting(4).all_say("rank_behind").rank(0, stall=stall("process_gone")))
    assert (finding.cause, finding.ranks, finding.hosts) == ("process_gone", (), ())
    assert "a peer that its host does not know is gone" in finding.headline


def test_a_peer_that_is_gone_and_not_named_is_the_one_that_nobody_sees_any_more() -> None:
    fleets = waiting(4).all_say("rank_behind").lose_host(2)
    fleets.rank(1, stall=stall("process_gone")).rank(3, stall=stall("process_gone"))
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.hosts) == ("process_gone", ("2",), ("host2",))


def test_two_ranks_that_wait_for_each_other_are_both_not_to_blame() -> None:
    fleets = waiting().rank(0, stall=stall("rank_behind", blamed_rank="1"))
    fleets.rank(1, stall=stall("rank_behind", blamed_rank="0"))
    assert only(fleets).cause == "unknown"


def test_a_rank_that_its_own_host_blames_is_named_without_a_difference_in_sequence() -> None:
    fleets = waiting(4).all_say("rank_behind").rank(2, stall=stall("rank_behind", blamed_rank="2"))
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.basis) == ("rank_behind", ("2",), "host")


def test_the_only_other_rank_is_named_where_it_is_seen_and_does_not_wait() -> None:
    fleets = waiting().rank(0, stall=stall("rank_behind", blamed_rank="1")).rank(1, stall=None)
    assert only(fleets).ranks == ("1",)


@SIZES
@pytest.mark.parametrize("cause", ["rail_down", "rail_filtered", "rail_lossy", "rail_slow"])
def test_a_rail_that_its_host_blames_is_named_with_host_and_device(hosts: int, cause: str) -> None:
    fleets = waiting(hosts).all_say("rank_behind").rank(1, stall=stall(cause, rail="0", device="eth0"))
    finding = only(fleets)
    assert (finding.cause, finding.rails, finding.devices, finding.hosts) == (cause, ("0",), ("eth0",), ("host1",))
    assert "rail 0 (eth0) of host1" in finding.headline
    assert (
        any("eth0" in step.command and step.host == "host1" for step in finding.next_steps) or cause == "rail_filtered"
    )
    assert finding.next_steps
    assert any("rail 1 (eth1) of host1" in line for line in finding.healthy)


def test_of_two_ends_of_a_slow_link_the_one_with_the_queue_is_named() -> None:
    blame = {"rail": "0", "device": "eth0"}
    fleets = waiting().all_say("rail_slow", **blame)
    fleets.rail(1, 0, backlog_bytes=200_000.0, round_trip_seconds=0.05)
    finding = only(fleets)
    assert finding.hosts == ("host1", "host0")
    assert "rail 0 (eth0) of host1 is slow" in finding.headline


def test_who_sends_again_behind_a_slow_rail_is_not_taken_for_the_one_with_the_queue() -> None:
    fleets = waiting().all_say("rail_slow", rail="0", device="eth0")
    fleets.rail(0, 0, retransmitted_ratio=0.03, round_trip_seconds=0.026)
    fleets.rail(1, 0, retransmitted_ratio=0.01, backlog_bytes=133_000.0, round_trip_seconds=0.020)
    assert only(fleets).hosts == ("host1", "host0")


def test_of_two_ends_without_answers_the_one_that_lets_nothing_out_has_the_filter() -> None:
    # As seen with nftables dropping what one host sends: its peer sends again and again, it does not even begin.
    fleets = waiting().all_say("rail_filtered", rail="0", device="eth0")
    fleets.rail(0, 0, unacknowledged_segments=182.0, unsent_bytes=0.0, retransmitted_ratio=0.05)
    fleets.rail(1, 0, unacknowledged_segments=0.0, unsent_bytes=524_320.0)
    finding = only(fleets)
    assert finding.hosts == ("host1", "host0")
    assert any("524 kB were never let out" in line for line in finding.evidence)


def test_of_two_ends_that_look_alike_the_one_with_strong_evidence_is_named() -> None:
    fleets = waiting().rank(0, stall=stall("rail_lossy", rail="0", device="eth0", strength="weak"))
    fleets.rank(1, stall=stall("rail_lossy", rail="0", device="eth0"))
    assert only(fleets).hosts == ("host1", "host0")


def test_both_ends_down_are_said_to_be_a_link_of_two_ends() -> None:
    fleets = waiting().all_say("rail_down", rail="0", device="eth0").rail(0, 0, up=False).rail(1, 0, up=False)
    assert any("both ends" in line for line in only(fleets).evidence)


def test_a_rail_seen_down_is_blamed_where_hosts_know_nothing() -> None:
    finding = only(waiting().rail(1, 1, up=False))
    assert (finding.cause, finding.hosts, finding.devices, finding.strength) == (
        "rail_down",
        ("host1",),
        ("eth1",),
        "weak",
    )


def test_a_port_that_never_carried_anything_is_not_blamed_for_being_down() -> None:
    assert only(waiting().rail(1, 1, up=False, usual_transmit=0.0)).cause == "unknown"


@SIZES
def test_a_rank_that_did_not_enter_what_the_others_wait_in_is_named(hosts: int) -> None:
    finding = only(waiting(hosts).all_say("rank_behind").behind(1))
    assert (finding.cause, finding.ranks, finding.hosts, finding.basis) == (
        "rank_behind",
        ("1",),
        ("host1",),
        "sequence",
    )
    assert finding.strength == "strong"
    assert "rank 1 entered 1,204 operations, completed 1,204" in finding.evidence
    assert any("program is elsewhere" in line for line in finding.evidence)
    assert any("py-spy dump --pid 101" in step.command for step in finding.next_steps)


def test_a_rank_that_skipped_a_collective_and_waits_in_another_is_told_apart() -> None:
    fleets = waiting(4).all_say("rank_behind")
    fleets.rank(2, enqueued=1204, completed=1203, position=Position(1204), stall=stall("rank_behind", op="Broadcast"))
    finding = only(fleets)
    assert finding.ranks == ("2",)
    assert any("skipped" in line for line in finding.evidence)
    assert any("AllReduce, Broadcast" in line for line in finding.evidence)


def test_operations_handed_over_ahead_blame_nobody() -> None:
    # All are inside operation 1,205; one host has only handed over more for later.
    fleets = waiting().rank(0, enqueued=1250, position=Position(1250)).rank(1, enqueued=1240, position=Position(1240))
    assert only(fleets).cause == "unknown"


def test_a_gpu_that_stands_still_is_named_by_its_host() -> None:
    finding = only(waiting().rank(1, stall=stall("gpu_not_progressing")))
    assert (finding.cause, finding.ranks) == ("gpu_not_progressing", ("1",))
    assert any("xid" in step.command for step in finding.next_steps)


def test_a_rank_that_is_behind_because_of_its_gpu_says_so() -> None:
    fleets = waiting().all_say("rank_behind").behind(1).rank(1, stall=stall("gpu_not_progressing"))
    assert only(fleets).cause == "gpu_not_progressing"


def test_few_ranks_that_completed_less_are_named_weakly() -> None:
    fleets = waiting(4)
    for number in (0, 1, 3):
        fleets.rank(number, completed=1205)
    finding = only(fleets)
    assert (finding.ranks, finding.basis, finding.strength) == (("2",), "completion", "weak")
    assert "data does not reach" in finding.headline


def test_nothing_stands_out_is_said_and_nobody_blamed() -> None:
    finding = only(waiting())
    assert (finding.cause, finding.ranks, finding.rails) == ("unknown", (), ())
    assert "not known" in finding.headline
    assert finding.next_steps


def test_unseen_operations_are_called_so() -> None:
    assert only(Fleets().communicator().all_say("unseen")).cause == "unseen"


def test_a_rail_s_host_may_know_no_device() -> None:
    finding = only(waiting().rank(1, stall=stall("rail_slow")))
    assert finding.cause == "rail_slow"
    assert "does not name" in finding.headline


# What cannot be known


@SIZES
def test_ranks_of_a_silent_host_are_missing_and_its_state_is_not_guessed(hosts: int) -> None:
    finding = only(waiting(hosts).all_say("rank_behind").lose_host(1))
    assert (finding.cause, finding.ranks, finding.hosts) == (RANK_MISSING, ("1",), ("host1",))
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


def test_a_job_whose_processes_have_all_ended_is_not_stalled() -> None:
    fleets = waiting().rank(0, stall=stall("process_gone", blamed_rank="0")).lose_host(1)
    fleets.agents[1] = Agent("host1", up=True)
    verdict = verdict_of(fleets.made())
    assert not verdict.problem
    assert any("all its processes have ended" in note for note in verdict.notes)
    # If the other host is silent, or somebody still waits, it is.
    fleets.agents[1] = Agent("host1", up=False)
    assert verdict_of(fleets.made()).problem
    assert verdict_of(waiting().rank(0, stall=stall("process_gone", blamed_rank="0")).made()).problem


def test_a_named_culprit_stays_named_while_another_host_is_silent() -> None:
    fleets = waiting(4).all_say("rank_behind").rank(1, stall=stall("process_stopped", blamed_rank="1")).lose_host(3)
    finding = only(fleets)
    assert (finding.cause, finding.ranks) == ("process_stopped", ("1",))
    assert any("rank 3 on host3" in line for line in finding.unknown)


def test_a_host_never_scraped_leaves_ranks_that_nobody_told_of() -> None:
    fleets = waiting(4)
    fleets.ranks = [one for one in fleets.ranks if one.rank != "3"]
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.hosts) == (RANK_MISSING, ("3",), ())
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
    assert any("weak" in line for line in finding.unknown)


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


# Several communicators


def test_a_communicator_that_waits_for_a_process_stuck_elsewhere_is_listed_below_the_root() -> None:
    # Process 101 is in both: its tensor-parallel group waits for a stopped process, so the data-parallel one waits.
    fleets = Fleets(4).communicator(OTHER, hosts=[1, 2]).communicator(COMM, hosts=[0, 1])
    fleets.rank(0, OTHER, pid="101").rank(1, OTHER, pid="202").rank(1, COMM, pid="101")
    fleets.all_say("rank_behind", OTHER).rank(1, OTHER, stall=stall("process_stopped", blamed_rank="1"))
    fleets.all_say("rank_behind", COMM).behind(1, COMM)
    finding = only(fleets)
    assert (finding.comm, finding.cause, finding.pids) == (OTHER, "process_stopped", ("202",))
    (dependent,) = finding.waiting
    assert dependent.comm == COMM
    assert "pid 101 on host1" in dependent.why


def test_a_chain_of_waiting_ends_at_the_first_cause() -> None:
    third = "00000000000000cc"
    fleets = (
        Fleets(4).communicator(COMM, hosts=[0, 1]).communicator(OTHER, hosts=[1, 2]).communicator(third, hosts=[2, 3])
    )
    fleets.rank(1, COMM, pid="11").rank(0, OTHER, pid="11").rank(1, OTHER, pid="22").rank(0, third, pid="22")
    fleets.all_say("rank_behind").all_say("rank_behind", OTHER).all_say("rank_behind", third)
    fleets.behind(1, COMM).behind(1, OTHER).rank(1, third, stall=stall("gpu_not_progressing"))
    finding = only(fleets)
    assert finding.comm == third
    assert {one.comm for one in finding.waiting} == {COMM, OTHER}


def test_one_stopped_process_stalls_all_its_communicators_once() -> None:
    fleets = Fleets().communicator(COMM).communicator(OTHER)
    for comm in (COMM, OTHER):
        fleets.all_say("rank_behind", comm).rank(1, comm, stall=stall("process_stopped", blamed_rank="1"))
    finding = only(fleets)
    assert [one.comm for one in finding.waiting] == [OTHER]


def test_two_jobs_on_one_sick_rail_have_one_cause() -> None:
    fleets = Fleets().communicator(COMM).communicator(OTHER, pids=500)
    for comm in (COMM, OTHER):
        fleets.all_say("rank_behind", comm).rank(1, comm, stall=stall("rail_slow", rail="0", device="eth0"))
    finding = only(fleets)
    assert finding.cause == "rail_slow"
    assert "same rail" in finding.waiting[0].why


def test_a_job_that_knows_no_cause_is_put_under_the_sick_rail_of_its_host() -> None:
    fleets = Fleets().communicator(COMM).communicator(OTHER, pids=500)
    fleets.all_say("rail_down", COMM, rail="0", device="eth0").all_say("unknown", OTHER)
    assert [one.comm for one in only(fleets).waiting] == [OTHER]


def test_two_independent_faults_are_two_root_causes() -> None:
    fleets = Fleets(4).communicator(COMM, hosts=[0, 1]).communicator(OTHER, hosts=[2, 3], pids=500)
    fleets.all_say("rank_behind", COMM).rank(1, COMM, stall=stall("process_stopped", blamed_rank="1"))
    fleets.all_say("rank_behind", OTHER).behind(0, OTHER)
    verdict = verdict_of(fleets.made())
    assert [(one.comm, one.cause) for one in verdict.findings] == [(COMM, "process_stopped"), (OTHER, "rank_behind")]
    assert "1 more root cause below" in verdict.headline


def test_a_rank_behind_for_its_own_reasons_is_not_excused_by_a_sick_rail_of_another_job() -> None:
    fleets = Fleets().communicator(COMM).communicator(OTHER, pids=500)
    fleets.all_say("rail_slow", COMM, rail="0", device="eth0")
    fleets.all_say("rank_behind", OTHER).behind(1, OTHER)
    assert {one.cause for one in verdict_of(fleets.made()).findings} == {"rail_slow", "rank_behind"}


def test_a_circle_of_waiting_is_called_a_deadlock() -> None:
    # Process 11 waits in COMM and has not entered OTHER; process 22 the other way round.
    fleets = Fleets().communicator(COMM).communicator(OTHER)
    for comm in (COMM, OTHER):
        fleets.rank(0, comm, pid="11").rank(1, comm, pid="22").all_say("rank_behind", comm)
    fleets.behind(1, COMM).behind(0, OTHER)
    finding = only(fleets)
    assert "deadlock" in finding.headline
    assert len(finding.waiting) == 1


def test_communicators_that_miss_ranks_of_the_same_host_are_one_finding() -> None:
    fleets = Fleets(2).communicator(COMM).communicator(OTHER, pids=500)
    fleets.all_say("unknown", COMM).all_say("unknown", OTHER).lose_host(1)
    assert len(only(fleets).waiting) == 1


def test_of_stalls_that_nobody_can_explain_the_first_in_a_job_is_the_root() -> None:
    fleets = (
        Fleets(4).communicator(COMM, hosts=[0, 1]).communicator(OTHER, hosts=[1, 2]).communicator("cc", hosts=[2, 3])
    )
    fleets.rank(0, OTHER, pid="101").rank(0, "cc", pid="101").rank(1, OTHER, pid="7").rank(1, "cc", pid="8")
    fleets.all_say("unknown").all_say("unknown", OTHER).all_say("unseen", "cc").rank(1, "cc", pid="7")
    fleets.rank(0, OTHER, inflight_seconds=90.0)
    fleets.rank(0, "cc", host="host2", pid="7").rank(1, "cc", pid="9")
    assert [one.comm for one in only(fleets).waiting] == [COMM, OTHER]


def test_a_healthy_job_beside_the_sick_one_is_shown() -> None:
    fleets = waiting().rank(1, stall=stall("process_stopped", blamed_rank="1"))
    fleets.moving.append(Moving("00000000000000ff", "host1", 900.0))
    assert "communicator 00000000000000ff goes on at 900.0 calls/s on host1" in only(fleets).healthy


# Controls


def test_a_fleet_without_stalls_is_fine() -> None:
    verdict = verdict_of(Fleets(4).made())
    assert not verdict.problem
    assert verdict.findings == ()


def test_differences_between_sequences_alone_are_no_stall() -> None:
    assert not verdict_of(Fleets(4).communicator().behind(1).made()).problem


def test_a_rail_down_without_a_stall_is_no_stall() -> None:
    assert not verdict_of(Fleets().communicator().rail(0, 0, up=False).made()).problem


def test_silent_hosts_are_told_even_where_nothing_is_stalled() -> None:
    verdict = verdict_of(Fleets(4).communicator().lose_host(2).made())
    assert not verdict.problem
    assert "1 of 4 hosts say nothing" in verdict.headline
    assert any(note.startswith("host2") for note in verdict.notes)


def test_a_communicator_asked_for_that_is_not_stalled_is_described() -> None:
    verdict = verdict_of(Fleets().communicator().made(), COMM)
    assert not verdict.problem
    assert any("ranks 0-1 entered 1,205 operations" in line for line in verdict.asked)


def test_asked_for_a_waiting_communicator_the_root_is_shown_and_others_are_not() -> None:
    fleets = (
        Fleets(4).communicator(COMM, hosts=[0, 1]).communicator(OTHER, hosts=[0, 1]).communicator("cc", hosts=[2, 3])
    )
    for comm in (COMM, OTHER):
        fleets.all_say("rank_behind", comm).rank(1, comm, stall=stall("process_stopped", blamed_rank="1"))
    fleets.rank(0, "cc", pid="9").rank(1, "cc", pid="8").all_say("unknown", "cc")
    assert [one.comm for one in verdict_of(fleets.made(), OTHER).findings] == [COMM]


# Notes


def note_of(fleets: Fleets) -> str:
    return " | ".join(verdict_of(fleets.made()).notes)


def test_a_clock_that_is_off_is_told_and_a_small_difference_is_not() -> None:
    fleets = Fleets()
    fleets.agents[0] = replace(fleets.agents[0], clock_offset_seconds=-90.0)
    assert "host0: its clock is 90 s behind the store's" in note_of(fleets)
    fleets.agents[0] = replace(fleets.agents[0], clock_offset_seconds=-3.0)
    assert note_of(fleets) == ""


def test_slow_scrapes_failing_collectors_and_long_waits_are_told() -> None:
    fleets = Fleets(scrape_seconds=60.0)
    fleets.agents[1] = Agent("host1", up=True, failing=("rdma",))
    fleets.waiting.append(LongWait(COMM, "0", "host0", 400.0))
    notes = note_of(fleets)
    assert "scraped every 60 s" in notes
    assert "host1: rdma cannot be read" in notes
    assert "6 min 40 s" in notes


# Properties

CAUSES = st.sampled_from([*(cause for cause in TIERS if cause != RANK_MISSING), "some_new_cause"])


@st.composite
def fleets_of_any_kind(draw: st.DrawFn) -> Fleets:
    """Communicators over two to four hosts, with any mixture of what hosts may say."""
    fleets = Fleets(draw(st.integers(2, 4)))
    for index in range(draw(st.integers(1, 4))):
        comm = f"{index:016x}"
        fleets.communicator(comm, pids=draw(st.sampled_from([100, 101, 500])))
        for number in range(fleets.hosts):
            entered = draw(st.integers(1200, 1206))
            fleets.ranks = [
                replace(
                    one,
                    stall=draw(st.none() | st.builds(stall, CAUSES, blamed_rank=st.sampled_from(["", "0", "1", "9"]))),
                    enqueued=entered,
                    completed=draw(st.none() | st.integers(1199, entered)),
                    position=draw(st.none() | st.just(Position(entered)) | st.just(Position(entered, 2, True))),
                    present=draw(st.sampled_from([True, True, True, False])),
                )
                if (one.comm, one.rank) == (comm, str(number))
                else one
                for one in fleets.ranks
            ]
    fleets.rails = draw(st.lists(st.sampled_from(fleets.rails), unique=True))
    return fleets


@given(fleets_of_any_kind())
def test_every_stalled_communicator_appears_exactly_once(fleets: Fleets) -> None:
    fleet = fleets.made()
    by_comm = {comm: [one for one in fleet.ranks if one.comm == comm] for comm in sorted({r.comm for r in fleet.ranks})}
    stalled = [c for c, ranks in by_comm.items() if any(r.stall for r in ranks) and not has_ended(ranks, fleet)]
    shown = [
        comm
        for cause in root_causes(fleet)
        for comm in (cause.stalled.comm, *(d.stalled.comm for d in cause.dependents))
    ]
    assert sorted(shown) == stalled
    assert verdict_of(fleet).problem == bool(stalled)


@given(fleets_of_any_kind())
def test_the_best_evidence_comes_first_and_the_order_of_series_does_not_matter(fleets: Fleets) -> None:
    fleet = fleets.made()
    tiers = [one.stalled.culprit.tier for one in root_causes(fleet)]
    assert tiers == sorted(tiers)
    turned = replace(fleet, ranks=tuple(reversed(fleet.ranks)), rails=tuple(reversed(fleet.rails)))
    assert [one.stalled.comm for one in root_causes(turned)] == [one.stalled.comm for one in root_causes(fleet)]


@given(st.permutations(["rank_behind", "unknown", "process_stopped", "rail_slow"]))
def test_whoever_says_it_the_stopped_process_is_the_cause(said: list[str]) -> None:
    fleets = Fleets(4).communicator()
    for number, cause in enumerate(said):
        fleets.rank(number, stall=stall(cause, blamed_rank=str(number) if cause == "process_stopped" else ""))
    finding = only(fleets)
    assert finding.ranks == (str(said.index("process_stopped")),)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=8))
def test_only_ranks_that_entered_least_are_called_behind(lags: list[int]) -> None:
    ranks = [
        Rank(
            COMM,
            str(number),
            "host0",
            len(lags),
            enqueued=100 - lag,
            position=Position(100 - lag),
            stall=stall("unknown"),
        )
        for number, lag in enumerate(lags)
    ]
    culprit = culprits_of(ranks, Fleets().made())[0]
    if max(lags) == 0 or len(set(lags)) == 1:
        assert culprit.cause == "unknown"
    else:
        assert {rank.rank for rank in culprit.ranks} == {str(n) for n, lag in enumerate(lags) if lag == max(lags)}


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_written_so_that_they_can_be_read_back(numbers: set[int]) -> None:
    text = ranks_text(map(str, numbers)).split(" ", 1)[1]
    read: set[int] = set()
    for part in text.split(", "):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == numbers


def test_amounts_are_written_as_link_speeds_are() -> None:
    assert [decimal_bytes(x) for x in (0, 999, 1e3, 1.25e9)] == ["0 B", "999 B", "1 kB", "1.25 GB"]


def test_who_is_in_the_communicator_is_told_first() -> None:
    assert only(waiting(4).rank(0, job="4711")).evidence[0] == "4 ranks on host0, host1, host2, host3; job 4711"


def test_weak_signs_of_a_stall_do_not_make_a_stopped_process_doubtful() -> None:
    fleets = waiting().rank(1, stall=stall("process_stopped", strength="weak"))
    assert "weak" not in only(fleets).headline
    assert "weak" in only(waiting().rank(1, stall=stall("rail_slow", device="eth0", strength="weak"))).headline


def test_lengths_of_time_are_short() -> None:
    assert [duration(x) for x in (0.04, 9.96, 42.4, 185, 7800)] == [
        "0.0 s",
        "10.0 s",
        "42 s",
        "3 min 5 s",
        "2 h 10 min",
    ]


def test_a_rail_that_nothing_is_known_of_is_shown_as_such() -> None:
    fleets = waiting().rank(1, stall=stall("rail_slow", rail="7", device="ib7"))
    assert any("nothing is known" in line for line in only(fleets).evidence)
