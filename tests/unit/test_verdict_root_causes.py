"""Which of several stalled communicators is the cause and which only waits, on made-up fleets."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.cluster.verdict.words import make_verdict
from tests.unit.fleets import COMM, OTHER, Fleets, identity, only, stall


def test_a_communicator_that_waits_for_a_process_stuck_elsewhere_is_listed_below_the_root() -> None:
    # Process 101 is in both: its tensor-parallel group waits for a stopped process, so the data-parallel one waits.
    fleets = Fleets(4).communicator(OTHER, hosts=[1, 2]).communicator(COMM, hosts=[0, 1])
    fleets.rank(0, OTHER, pid=101).rank(1, OTHER, pid=202).rank(1, COMM, pid=101)
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
    fleets.rank(1, COMM, pid=11).rank(0, OTHER, pid=11).rank(1, OTHER, pid=22).rank(0, third, pid=22)
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
    verdict = make_verdict(fleets.made())
    assert [(one.comm, one.cause) for one in verdict.findings] == [(COMM, "process_stopped"), (OTHER, "rank_behind")]
    assert "1 more root cause below" in verdict.headline


def test_a_rank_behind_for_its_own_reasons_is_not_excused_by_a_sick_rail_of_another_job() -> None:
    fleets = Fleets().communicator(COMM).communicator(OTHER, pids=500)
    fleets.all_say("rail_slow", COMM, rail="0", device="eth0")
    fleets.all_say("rank_behind", OTHER).behind(1, OTHER)
    assert {one.cause for one in make_verdict(fleets.made()).findings} == {"rail_slow", "rank_behind"}


def test_a_circle_of_waiting_is_called_a_deadlock() -> None:
    # Process 11 waits in COMM and has not entered OTHER; process 22 the other way round.
    fleets = Fleets().communicator(COMM).communicator(OTHER)
    for comm in (COMM, OTHER):
        fleets.rank(0, comm, pid=11).rank(1, comm, pid=22).all_say("rank_behind", comm)
    fleets.behind(1, COMM).behind(0, OTHER)
    finding = only(fleets)
    assert "deadlock" in finding.headline
    assert len(finding.waiting) == 1


@pytest.mark.parametrize(("seconds", "first"), [(90.0, OTHER), (10.0, COMM)])
def test_of_equal_stalls_of_a_job_the_one_that_began_first_is_the_root(seconds: float, first: str) -> None:
    fleets = Fleets().communicator(COMM).communicator(OTHER).each(stall=stall("unknown"))
    for number in (0, 1):
        fleets.rank(number, OTHER, inflight_seconds=seconds)
    finding = only(fleets)
    assert finding.comm == first
    assert len(finding.waiting) == 1


def test_communicators_that_miss_ranks_of_the_same_host_are_one_finding() -> None:
    fleets = Fleets(2).communicator(COMM).communicator(OTHER, pids=500)
    fleets.all_say("unknown", COMM).all_say("unknown", OTHER).lose_host(1)
    assert len(only(fleets).waiting) == 1


def test_of_stalls_that_nobody_can_explain_the_first_in_a_job_is_the_root() -> None:
    fleets = (
        Fleets(4).communicator(COMM, hosts=[0, 1]).communicator(OTHER, hosts=[1, 2]).communicator("cc", hosts=[2, 3])
    )
    fleets.rank(0, OTHER, pid=101).rank(0, "cc", pid=101).rank(1, OTHER, pid=7).rank(1, "cc", pid=8)
    fleets.all_say("unknown").all_say("unknown", OTHER).all_say("unseen", "cc").rank(1, "cc", pid=7)
    fleets.rank(0, OTHER, inflight_seconds=90.0)
    fleets.rank(0, "cc", host="host2", pid=7).rank(1, "cc", pid=9)
    assert [one.comm for one in only(fleets).waiting] == [COMM, OTHER]


THIRD = "00000000000000cc"


def one_job() -> Fleets:
    """Two pairs of processes that a third communicator joins, which does not stall."""
    fleets = Fleets(4).communicator(COMM, hosts=[0, 1]).communicator(OTHER, hosts=[2, 3], pids=500)
    fleets.communicator(THIRD, hosts=[1, 2])
    return fleets.rank(1, COMM, pid=11).rank(0, THIRD, pid=11).rank(0, OTHER, pid=22).rank(1, THIRD, pid=22)


def test_a_stall_without_a_cause_is_put_under_that_of_its_job_though_what_joins_them_does_not_stall() -> None:
    fleets = one_job().all_say("rank_behind", COMM).rank(0, COMM, stall=stall("process_stopped", blamed_rank="0"))
    fleets.all_say("unknown", OTHER)
    finding = only(fleets)
    assert (finding.comm, finding.cause) == (COMM, "process_stopped")
    assert [one.comm for one in finding.waiting] == [OTHER]
    apart = Fleets(4).communicator(COMM, hosts=[0, 1]).communicator(OTHER, hosts=[2, 3], pids=500)
    apart.all_say("rank_behind", COMM).rank(0, COMM, stall=stall("process_stopped", blamed_rank="0"))
    assert len(make_verdict(apart.all_say("unknown", OTHER).made()).findings) == 2, "another job"


def test_of_ranks_one_of_which_is_gone_no_process_is_said_to_hold_up_another_communicator() -> None:
    fleets = Fleets(3).communicator(COMM).communicator(OTHER)
    for comm in (COMM, OTHER):
        fleets.all_say("rank_behind", comm).rank(0, comm, stall=stall("peer_left"))
    finding = only(fleets.lose_host(1).lose_host(2))
    assert finding.ranks == ("1", "2")
    assert [one.why for one in finding.waiting] == ["a process of the same job ended then, or soon after"]
    fleets.rank(0, OTHER, stall=stall("rank_behind"))
    assert all("to blame" not in one.why for found in make_verdict(fleets.made()).findings for one in found.waiting)


def test_processes_that_end_after_the_first_of_their_job_are_no_causes_of_their_own() -> None:
    fleets = one_job()
    for comm, seconds in ((COMM, 20.0), (OTHER, 19.0)):
        fleets.all_say("rank_behind", comm)
        fleets.rank(0, comm, stall=stall("process_gone", blamed_rank="0"), inflight_seconds=None)
        fleets.rank(0, comm, stalled_seconds=seconds).rank(1, comm, inflight_seconds=seconds)
    finding = only(fleets)
    assert (finding.comm, finding.cause) == (COMM, "process_gone")
    (later,) = finding.waiting
    assert later.comm == OTHER
    assert "pid 22 on host2 ended then, or soon after" in later.why


def test_asked_for_a_waiting_communicator_the_root_is_shown_and_others_are_not() -> None:
    fleets = (
        Fleets(4).communicator(COMM, hosts=[0, 1]).communicator(OTHER, hosts=[0, 1]).communicator("cc", hosts=[2, 3])
    )
    for comm in (COMM, OTHER):
        fleets.all_say("rank_behind", comm).rank(1, comm, stall=stall("process_stopped", blamed_rank="1"))
    fleets.rank(0, "cc", pid=9).rank(1, "cc", pid=8).all_say("unknown", "cc")
    assert [one.comm for one in make_verdict(fleets.made(), OTHER).findings] == [COMM]


# Notes


def under_one_leaf(hosts: int = 8) -> Fleets:
    """Rail 0 is down on the first half of the hosts: pairs of them stall, and a communicator of all; the other half
    only waits in the latter.  Another job has a pair there of its own."""
    half = hosts // 2
    fleets = Fleets(hosts).communicator(OTHER).all_say("unknown", OTHER, strength="weak")
    down = stall("rail_down", rail="0", device="eth0")
    for host in range(half):
        fleets.rail(host, 0, up=False).rank(host, OTHER, stall=down)
    for pair in range(half // 2):
        fleets.communicator(f"{pair:016x}", hosts=[2 * pair, 2 * pair + 1])
        for number in range(2):
            fleets.rank(number, f"{pair:016x}", pid=100 + 2 * pair + number, stall=down, inflight_seconds=41.0)
    fleets.communicator("f" * 16, hosts=[0, 1], pids=900)
    return fleets.all_say("rail_down", "f" * 16, rail="0", device="eth0")


def test_a_rail_that_is_down_on_many_hosts_is_one_cause_told_by_the_communicator_with_most_of_them() -> None:
    finding = only(under_one_leaf())
    assert finding.comm == OTHER
    assert finding.headline.endswith("rail 0 is down on 4 hosts: their leaf switch or its rail plane.")
    assert "the hosts are host0, host1, host2, host3" in finding.evidence
    assert not any("both ends" in line for line in finding.evidence)
    assert [one.comm for one in finding.waiting] == ["0" * 16, "0" * 15 + "1", "f" * 16]


def test_jobs_that_share_no_host_below_a_switch_have_one_cause_too() -> None:
    fleets = Fleets(4)
    for number, comm in enumerate((COMM, OTHER)):
        fleets.communicator(comm, hosts=[2 * number, 2 * number + 1], pids=100 * (number + 1))
        fleets.all_say("rail_down", comm, rail="1", device="eth1")
    for host in range(4):
        fleets.rail(host, 1, up=False)
    finding = only(fleets)
    assert "rail 1 is down on 4 hosts" in finding.headline
    assert len(finding.waiting) == 1


def test_a_rail_that_is_down_at_both_ends_is_a_link_and_others_of_another_number_are_their_own() -> None:
    fleets = Fleets(4).communicator(COMM, hosts=[0, 1]).communicator(OTHER, hosts=[2, 3], pids=500)
    fleets.all_say("rail_down", COMM, rail="0", device="eth0").all_say("rail_down", OTHER, rail="1", device="eth1")
    for host in range(4):
        fleets.rail(host, host // 2, up=False)
    verdict = make_verdict(fleets.made())
    assert len(verdict.findings) == 2
    assert not any("switch" in one.headline for one in verdict.findings)


def test_work_on_a_verdict_grows_as_the_communicators_do() -> None:
    def took(communicators: int) -> float:
        # One holds up all others, as where a rank stops: each host's own waits for its process that waits there.
        fleets = Fleets(communicators).communicator(COMM).all_say("rank_behind", COMM).behind(0, COMM)
        ranks = [replace(one, stall=stall("rank_behind", blamed_rank="0")) for one in fleets.ranks]
        for number in range(communicators):
            for rank in range(2):
                own = identity(f"{number:016x}", str(rank), nranks="2", pid=str(100 + number if rank == 0 else 9000))
                fleets.ranks.append(replace(ranks[number], identity=own, position=Position(7 + rank)))
        fleet = fleets.made()
        began = time.process_time()
        assert len(make_verdict(fleet).findings) >= 1
        return time.process_time() - began

    took(8)
    few, many = min(took(50) for _ in range(3)), min(took(400) for _ in range(3))
    assert math.log(many / few) / math.log(8) < 1.4, (few, many)
