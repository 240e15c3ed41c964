"""Whom a verdict names for each fault of one communicator, on made-up fleets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from railscope.agent.cluster.fleet.facts import Rank
from railscope.agent.cluster.fleet.sequences import Position
from tests.unit.fleets import NOW, Fleets, only, stall, waiting

SIZES = pytest.mark.parametrize("hosts", [2, 4])


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


def test_who_waits_for_a_peer_that_is_gone_is_not_taken_for_it_where_the_age_of_its_wait_is_not_known() -> None:
    fleets = waiting(4).all_say("rank_behind").rank(0, stall=stall("process_gone"), inflight_seconds=None)
    assert only(fleets).ranks == ()


def test_a_peer_that_is_gone_and_not_named_is_the_one_that_nobody_sees_any_more() -> None:
    fleets = waiting(4).all_say("rank_behind").lose_host(2)
    fleets.rank(1, stall=stall("process_gone")).rank(3, stall=stall("process_gone"))
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.hosts) == ("process_gone", ("2",), ("host2",))
    assert finding.strength == "strong"
    assert finding.headline.endswith(
        "rank 2 (pid 102, host2) is gone: the process ended (a peer's did, and only this rank is seen by nobody)."
    )


@pytest.mark.parametrize("known", [True, False], ids=["seen before", "never seen"])
def test_of_several_ranks_that_nobody_sees_none_is_said_to_be_the_one_that_is_gone(known: bool) -> None:
    fleets = Fleets(3, 2).communicator().all_say("rank_behind").lose_host(2).rank(0, stall=stall("process_gone"))
    if not known:
        del fleets.ranks[4:]
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.strength, finding.basis) == (
        "process_gone",
        ("4", "5"),
        "weak",
        "absence",
    )
    place = " (last seen on host2)" if known else ""
    assert finding.headline.endswith(
        f": a peer is gone; it may be one of ranks 4-5{place}, which nobody sees (weak evidence)."
    )
    commands = [step.command for step in finding.next_steps]
    assert commands == (["ping -c 3 host2", "systemctl status railscope"] if known else [""])


def nameless(**said: str) -> Fleets:
    """Communicators whose names nobody can read, of which the first host says something."""
    fleets = Fleets(3)
    for host in range(3):
        fleets.ranks.append(Rank("unknown", "unknown", f"host{host}", pid=str(100 + host), stall=None))
    fleets.ranks[0] = replace(fleets.ranks[0], stall=stall(**said))
    return fleets


@pytest.mark.parametrize("cause", ["process_stopped", "process_gone", "gpu_not_progressing"])
@pytest.mark.parametrize("number", ["unknown", "3"])
def test_what_a_host_says_of_a_rank_without_a_name_is_said_of_no_other_host_s(cause: str, number: str) -> None:
    fleets = nameless(cause=cause, blamed_rank="" if number == "unknown" else number)
    fleets.ranks = [replace(rank, rank=number) for rank in fleets.ranks]
    finding = only(fleets)
    assert (finding.cause, finding.hosts, finding.pids) == (cause, ("host0",), ("100",))
    assert {step.host for step in finding.next_steps} <= {"host0", ""}


def test_a_host_that_blames_a_rank_without_a_name_for_coming_late_blames_its_own_only() -> None:
    fleets = nameless(cause="rank_behind", blamed_rank="3")
    fleets.ranks = [replace(rank, rank="3") for rank in fleets.ranks]
    assert only(fleets).hosts == ("host0",)


def test_a_peer_without_a_name_that_is_gone_is_not_looked_for_among_others() -> None:
    fleets = nameless(cause="process_gone", blamed_rank="1")
    fleets.ranks = [replace(rank, rank=number) for rank, number in zip(fleets.ranks, "011", strict=True)]
    fleets.ranks[0] = replace(fleets.ranks[0], inflight_seconds=40.0)
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.pids) == ("process_gone", (), ())


@pytest.mark.parametrize("early", [0, 500])
def test_thousands_of_ranks_are_not_compared_each_with_each(early: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fleets = Fleets(64, 16).communicator().all_say("rank_behind", blamed_rank="1023")
    before: dict[str, Any] = {
        "enqueued": 1204,
        "completed": 1204,
        "position": Position(1204),
        "inflight_seconds": 0.0,
        "stall": None,
    }
    for number, rank in enumerate(fleets.ranks):
        if number < 500:
            fleets.ranks[number] = replace(rank, **before)
        elif number < 500 + early:
            fleets.ranks[number] = replace(rank, **before, scraped=NOW - 45)
    compared = 0
    equal = Rank.__eq__

    def counted(one: Rank, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(one, other)

    monkeypatch.setattr(Rank, "__eq__", counted)
    finding = only(fleets)
    assert finding.ranks == tuple(map(str, range(500)))
    assert len(finding.evidence) < 20
    assert compared < 10 * len(fleets.ranks)


def test_two_ranks_that_wait_for_each_other_are_both_not_to_blame() -> None:
    fleets = waiting().rank(0, stall=stall("rank_behind", blamed_rank="1"))
    fleets.rank(1, stall=stall("rank_behind", blamed_rank="0"))
    assert only(fleets).cause == "unknown"


def test_a_rank_that_its_own_host_blames_is_named_without_a_difference_in_sequence() -> None:
    fleets = waiting(4).all_say("rank_behind").rank(2, stall=stall("rank_behind", blamed_rank="2"))
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.basis) == ("rank_behind", ("2",), "host")


def test_the_only_other_rank_is_named_where_it_is_seen_and_does_not_wait() -> None:
    fleets = waiting().rank(0, stall=stall("rank_behind", blamed_rank="1"))
    fleets.rank(1, stall=None, position=None, inflight_seconds=None)
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
    assert "data does not reach rank 2 (pid 102, host2): the others completed more (weak evidence)" in finding.headline
    assert finding.cause == "unknown", "it entered what the others entered"


def test_a_rank_that_came_as_far_as_any_is_not_behind_because_another_host_guesses_so() -> None:
    guess = stall("rank_behind", blamed_rank="1")
    fleets = waiting().rank(0, stall=guess).rank(1, stall=None, completed=1205, inflight_seconds=0.0)
    finding = only(fleets)
    assert (finding.cause, finding.basis, finding.ranks) == ("unknown", "completion", ("0",))
    # Its own host says so of it: it is kept from going on.
    own = only(waiting().rank(0, stall=guess).rank(1, stall=guess))
    assert (own.cause, own.basis, own.ranks) == ("rank_behind", "host", ("1",))
    # It entered fewer, or nobody knows how many.
    for told in ({"position": Position(1204), "enqueued": 1204, "completed": 1204}, {"position": None}):
        said = only(waiting().rank(0, stall=guess).rank(1, stall=None, inflight_seconds=0.0, **told))
        assert (said.cause, said.ranks) == ("rank_behind", ("1",))


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
