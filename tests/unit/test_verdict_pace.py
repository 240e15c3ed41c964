"""What is said of ranks for which the others wait in most operations, though nothing hangs.  Fleets are made up."""

from __future__ import annotations

import pytest

from railscope.agent.cluster.verdict.words import make_verdict
from tests.unit.fleets import COMM, OTHER, Case, Fleets, named, stall

THIRD = "00000000000000cc"


def working(hosts: int = 2) -> Fleets:
    return Fleets(hosts).communicator().working()


def groups() -> Fleets:
    """Four ranks in pairs, as tensor parallel groups are, and across them, as data parallel groups are; process 103 is
    slow, and 102, its partner, comes late to its other group because it waits."""
    fleets = Fleets(4)
    for comm, hosts, pids in ((COMM, (2, 3), 102), (OTHER, (1, 3), 201), (THIRD, (0, 2), 300)):
        fleets.communicator(comm, hosts=hosts, pids=pids).working(comm)
    fleets.rank(1, OTHER, pid=103).rank(1, THIRD, pid=102)
    return fleets.slow(1, COMM).slow(1, OTHER).slow(1, THIRD)


CASES = [
    Case(
        "one of two",
        working().slow(1),
        says=(
            (
                "headline",
                f"=SLOW for 60 s: {COMM}: rank 1 (pid 101, host1) keeps the others waiting in most "
                "operations, by 0.40 s each (11 times the median).",
            ),
            ("evidence", "=by how much: the other ranks wait for rank 1 for 80% of their time, 0.40 s an operation"),
            ("evidence", "from one operation to the next rank 1 takes 11 times as long as the median of the others"),
            (
                "evidence",
                "=how often: in 12 of 12 stretches of 5.0 s in which operations completed, 120 operations in all",
            ),
            ("evidence", "since when: 13:45:40 UTC, 60 s ago"),
            ("steps", "host1: py-spy top --pid 101"),
        ),
        never=(("evidence", "or before"),),
        found={"ranks": ("1",), "hosts": ("host1",), "pids": ("101",), "seconds": 60.0, "now": True},
    ),
    Case(
        "since longer than is looked back",
        working().slow(1, of_window=True),
        says=(("evidence", "…when the window of this verdict began, or before"),),
    ),
    Case(
        "how much is not known",
        working().slow(0, waited_seconds=None, times_median=None),
        says=(
            ("headline", "…in most operations."),
            ("evidence", "=by how much: the other ranks wait for rank 0 for 80% of their time"),
        ),
    ),
    Case(
        "seen by calls alone",
        working().slow(1, stretch_seconds=None, times_median=None),
        says=(
            ("headline", "…in most operations (weak evidence), by 0.40 s each."),
            (
                "evidence",
                "=how often: of the ranks on host1 it was the last to make 12 of 12 calls; whether GPUs wait is not "
                "seen",
            ),
        ),
        found={"strength": "weak"},
    ),
    Case("two of four", working(4).slow(1).slow(2), found={"ranks": ("1", "2")}),
    Case(
        "a rank that waits elsewhere for the slow one",
        groups(),
        says=(("headline", "rank 1 (pid 103, host3)"),),
        found={"pids": ("103",)},
    ),
]


@pytest.mark.parametrize("case", named(CASES))
def test_a_slow_rank_is_named_with_how_much_how_often_and_since_when(case: Case) -> None:
    case.assert_found("rank_slow")


def test_what_waits_because_of_the_slow_rank_is_listed_below_it() -> None:
    (finding,) = make_verdict(groups().made()).findings
    assert {finding.comm, *(one.comm for one in finding.waiting)} == {COMM, OTHER, THIRD}
    assert f"{THIRD}: it waits for pid 102 on host2, which waits there again and again" in [
        f"{one.comm}: {one.why}" for one in finding.waiting
    ]


@pytest.mark.parametrize(
    "case",
    named(
        [
            Case("most ranks are", working(4).slow(1).slow(2).slow(3)),
            Case("all ranks are", working().slow(0).slow(1)),
        ]
    ),
)
def test_ranks_that_are_slow_alike_are_no_fault(case: Case) -> None:
    case.assert_silent()


def test_what_shares_a_process_with_a_stall_waits_because_of_that() -> None:
    fleets = working().slow(1).communicator(OTHER).all_say("rank_behind", OTHER)
    fleets.rank(1, OTHER, stall=stall("process_stopped", blamed_rank="1"))
    assert [one.cause for one in make_verdict(fleets.made()).findings] == ["process_stopped"]
    elsewhere = Fleets(4).communicator(hosts=(0, 1)).working().slow(1)
    elsewhere.communicator(OTHER, hosts=(2, 3), pids=900).all_say("rail_lossy", OTHER)
    assert [one.cause for one in make_verdict(elsewhere.made()).findings] == ["rail_lossy", "rank_slow"]


def test_only_what_is_asked_for_is_told() -> None:
    fleets = working().slow(1).communicator(OTHER, pids=900).working(OTHER)
    assert make_verdict(fleets.made(), COMM).problem
    assert not make_verdict(fleets.made(), OTHER).problem
