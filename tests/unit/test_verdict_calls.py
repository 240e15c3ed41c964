"""What a verdict says of ranks that call what the others do not, wait for each other, or do not return from a call.

Fleets are made up: see fleets.  A cause of these without a case is an error.
"""

from __future__ import annotations

from typing import Final

import pytest

from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.facts.causes import Cause
from railscope.agent.facts.stall import LastCollectives
from tests.unit.fleets import (
    CALL_CAUSES,
    SAME,
    SIZES,
    Case,
    Fleets,
    having_made,
    in_unseen_work,
    inside,
    of_cause,
    only,
    stall,
    waiting,
    waits,
)


def lost_host() -> Fleets:
    """A peer closed its connections, and of two ranks nobody sees anything."""
    return Fleets(3, 2).communicator().all_say("rank_behind").lose_host(2).rank(0, stall=stall("peer_left"))


CASES: Final[dict[str, list[Case]]] = {
    Cause.DEADLOCK: [
        Case(
            "two ranks that each receive from the other",
            waiting()
            .rank(0, stall=stall("rank_behind", op="Recv", blamed_rank="1"))
            .rank(1, stall=stall("rank_behind", op="Recv", blamed_rank="0")),
            says=(
                ("headline", "rank 0 (pid 100, host0) and rank 1 (pid 101, host1) are waiting for each other"),
                ("why", "order of Send and Recv"),
            ),
            found={"ranks": ("0", "1"), "strength": "strong"},
        ),
        Case(
            "a circle of three, for which a fourth waits",
            waiting(4)
            .rank(0, stall=stall("rank_behind", op="Recv", blamed_rank="2"))
            .rank(1, stall=stall("rank_behind", op="Recv", blamed_rank="0"))
            .rank(2, stall=stall("rank_behind", op="Recv", blamed_rank="1"))
            .rank(3, stall=stall("rank_behind", op="Recv", blamed_rank="0")),
            found={"ranks": ("0", "1", "2")},
        ),
    ],
    Cause.RANKS_DISAGREE: [
        Case(
            "on two hosts, another count, with its number and both shapes",
            having_made(
                waits(2),
                LastCollectives(1205, (*SAME, "AllReduce of 16 bytes float32")),
                LastCollectives(1205, (*SAME, "AllReduce of 32 bytes float32")),
            ),
            says=(
                (
                    "headline",
                    "ranks do not make the same collectives: collective 1205 is AllReduce of 16 bytes float32 on rank "
                    "0, but AllReduce of 32 bytes float32 on rank 1",
                ),
            ),
            found={"ranks": ("0", "1"), "strength": "strong"},
        ),
        Case(
            "one rank of four is the odd one, and calls were handed over ahead of time",
            having_made(
                waits(4),
                *(
                    LastCollectives(
                        1205, ("Broadcast of 8 bytes with root 1" if rank == 2 else SAME[0], *SAME[: rank % 2])
                    )
                    if rank % 2 == 0
                    else LastCollectives(1206, SAME[:2])
                    for rank in range(4)
                ),
            ),
            says=(
                (
                    "headline",
                    "collective 1205 is AllReduce of 8 bytes float32 on ranks 0, 1, 3, but Broadcast of 8 bytes with "
                    "root 1 on rank 2",
                ),
            ),
            found={"ranks": ("2",), "hosts": ("host2",)},
        ),
        Case(
            "in one that is complete, and a later one hangs",
            having_made(
                waits(2),
                LastCollectives(1205, ("AllReduce of 16 bytes float32", *SAME)),
                LastCollectives(1205, ("AllReduce of 32 bytes float32", *SAME)),
            ),
            says=(("headline", "collective 1202 is AllReduce of 16 bytes"),),
        ),
        Case(
            "one has left, and the other waits in the next one",
            having_made(
                waits(2).rank(0, ended=True, stall=None),
                LastCollectives(1206, (*SAME, "AllReduce of 16 bytes float32", SAME[0])),
                LastCollectives(1205, (*SAME, "AllReduce of 32 bytes float32")),
            ),
            says=(
                (
                    "headline",
                    "collective 1205 is AllReduce of 16 bytes float32 on rank 0, but AllReduce of 32 bytes float32 on "
                    "rank 1",
                ),
            ),
        ),
        Case(
            "its host says so, and which collective is not told",
            waits(2).rank(1, stall=stall("ranks_disagree", blamed_rank="")),
            says=(("headline", "ranks do not make the same collectives."),),
        ),
    ],
    Cause.PEER_LEFT: [
        Case(
            "the one that nobody sees any more",
            waits(4).lose_host(2).rank(1, stall=stall("peer_left")).rank(3, stall=stall("peer_left")),
            says=(
                (
                    "headline",
                    "…rank 2 (pid 102, host2) is not in the communicator any more: a peer closed its connections, and "
                    "only this rank is seen by nobody.",
                ),
            ),
            found={"ranks": ("2",), "hosts": ("host2",), "strength": "strong"},
        ),
        *(
            Case(
                f"of several ranks that nobody sees none is said to be the one, {name}",
                fleets,
                says=(
                    (
                        "headline",
                        f"…: a peer closed its connections; it may be one of ranks 4-5{place}, which nobody sees (weak "
                        "evidence).",
                    ),
                ),
                found={"ranks": ("4", "5"), "strength": "weak", "basis": "absence", "commands": steps},
            )
            for name, fleets, place, steps in (
                (
                    "seen before",
                    Fleets(3, 2).communicator().all_say("rank_behind").lose_host(2).rank(0, stall=stall("peer_left")),
                    " (last seen on host2)",
                    ("ping -c 3 host2", "systemctl status railscope"),
                ),
                ("never seen", lost_host().never_told_of(4, 5), "", ("",)),
            )
        ),
        Case(
            "a rank that took its communicator apart and lives on",
            waits(4)
            .rank(2, stall=None, ended=True, position=None, inflight_seconds=None)
            .rank(1, stall=stall("peer_left")),
            says=(("headline", "rank 2 (pid 102, host2) is not in the communicator any more"),),
            found={"ranks": ("2",), "hosts": ("host2",)},
        ),
        Case(
            "where its peers only say that they wait, as at the level of counts",
            waits(4).rank(2, stall=None, ended=True, position=None, inflight_seconds=None),
            found={"ranks": ("2",)},
        ),
        Case(
            "the other of two, which its host does not tell to have left",
            waiting().rank(0, stall=stall("peer_left", blamed_rank="1")).rank(1, stall=None, position=None),
            found={"ranks": ("1",)},
        ),
    ],
    Cause.UNSEEN_WORK_STUCK: [
        Case(
            "a wait of one rank for its GPU, of whom nobody is named",
            in_unseen_work(1),
            says=(
                ("headline", "STALLED for 40 s: cuStreamSynchronize on "),
                ("headline", "a wait for the GPU does not return for rank 1 (pid 101, host1)"),
                ("headline", "weak"),
                ("evidence", "host1 says unseen_work_stuck of rank 1 (weak evidence)"),
                ("evidence", "rank 1 (pid 101, host1) has been inside cuStreamSynchronize for 40 s"),
                ("steps", "py-spy dump --native --pid 101"),
            ),
            found={"ranks": (), "basis": "host", "strength": "weak"},
        ),
        Case(
            "a rank that launched fewer graphs than those that wait",
            in_unseen_work(0, blamed_rank="1"),
            says=(
                ("headline", "does not return for rank 0 (pid 100, host0), and rank 1 (pid 101, host1) launched fewer"),
                ("evidence", "host0 says unseen_work_stuck of rank 0 (weak evidence)"),
            ),
            found={"ranks": ("1",), "hosts": ("host1",), "basis": "behind", "strength": "weak"},
        ),
    ],
    Cause.INSIDE_CALL: [
        *(
            Case(
                f"a peer never comes to an init, of {hosts} hosts",
                inside("ncclCommInitRank", *range(hosts - 1), hosts=hosts, made=False).never_told_of(hosts - 1),
                says=(
                    ("headline", "STALLED for 40 s: ncclCommInitRank on "),
                    ("headline", f"and rank {hosts - 1} did not call it on any observed host"),
                    ("headline", "does not return for rank"),
                    ("evidence", "rank 0 (pid 100, host0) has been inside ncclCommInitRank for 40 s"),
                    ("unknown", f"rank {hosts - 1}: no agent reported"),
                    ("first", f"={hosts} ranks, {hosts - 1} of them seen, on {', '.join(seen)}"),
                    ("why", f"rank {hosts - 1}: start the rank that is missing…"),
                ),
                found={"ranks": (str(hosts - 1),), "basis": "absence", "strength": "strong", "nranks": hosts},
            )
            for hosts in SIZES
            for seen in ([f"host{number}" for number in range(hosts - 1)],)
        ),
        Case(
            "a peer whose process is there and has no communicator",
            inside("ncclCommInitRank", 0, made=False).rank(1, awaited=True, enqueued=None, position=None),
            says=(
                ("headline", "for rank 0 (pid 100, host0), and rank 1 (pid 101, host1) did not call it"),
                ("steps", "host1: py-spy dump --pid 101"),
            ),
            found={"ranks": ("1",), "hosts": ("host1",), "basis": "outside"},
        ),
        Case(
            "who came out of an init has made the call",
            inside("ncclCommInitRank", 0, made=False).rank(1, enqueued=0, completed=0, inflight_seconds=None),
            says=(("headline", "does not return for rank 0 (pid 100, host0), and no rank is missing."),),
            found={"ranks": (), "basis": "all"},
        ),
        *(
            Case(
                f"{call} that a rank never calls",
                inside(call, 0),
                says=(
                    ("headline", f"{call} on "),
                    ("headline", "for rank 0 (pid 100, host0), and rank 1 (pid 101, host1) did not call it"),
                    ("steps", "host1: py-spy dump --pid 101"),
                ),
                found={"ranks": ("1",), "hosts": ("host1",), "basis": "outside", "strength": "strong"},
            )
            for call in ("ncclCommSplit", "ncclCommFinalize", "ncclCommDestroy", "ncclCommSuspend")
        ),
        Case(
            "not of a rank that has ended its communicator",
            inside("ncclCommDestroy", 0).rank(1, ended=True),
            found={"ranks": (), "basis": "all"},
        ),
        *(
            Case(f"{call} need not be called by all", inside(call, 0), found={"ranks": (), "basis": "host"})
            for call in ("ncclCommShrink", "ncclCommAbort", "connecting ranks")
        ),
        Case(
            "ranks that each receive first",
            inside("connecting ranks", 0, 1),
            says=(
                ("headline", "does not return for rank 0 (pid 100, host0) and rank 1 (pid 101, host1), and no rank is"),
                ("evidence", "two that each receive first wait here for ever"),
                ("steps", "py-spy dump --pid 10"),
            ),
            found={"ranks": (), "basis": "all"},
        ),
        Case(
            "of a communicator without a name",
            inside("ncclCommInitAll", 0, made=False).each(comm="unknown", rank="unknown", nranks="unknown"),
            says=(("headline", "ncclCommInitAll: it does not return for a process (pid 100, host0)"),),
            found={"ranks": (), "basis": "host"},
        ),
        Case(
            "nobody knows whether a rank is missing where the communicator has no name",
            inside("ncclCommInitRank", 0, made=False).never_told_of(1).each(comm="unknown"),
            never=(("headline", "no rank is missing"),),
            found={"ranks": (), "basis": "host"},
        ),
        Case(
            "better evidence than a host that says its rank waits",
            inside("ncclCommSplit", 0).rank(1, stall=stall("rank_behind")),
            says=(("evidence", "ranks wait in different operations (AllReduce, ncclCommSplit)"),),
            found={"ranks": ("1",)},
        ),
    ],
}


@pytest.mark.parametrize(("cause", "case"), of_cause(CASES))
def test_of_each_cause_it_is_said_which_call_is_to_blame_and_what_to_look_at(cause: str, case: Case) -> None:
    case.assert_found(cause)


def test_the_first_step_is_to_start_the_rank_that_nobody_sees_and_names_its_job() -> None:
    fleets = inside("ncclCommInitRank", 0, made=False).never_told_of(1).each(job="4711")
    first, *others = only(fleets).next_steps
    assert first.why.startswith("rank 1 of job 4711: start the rank that is missing")
    assert (first.host, first.command) == ("", "")
    assert [step.command for step in others] == ["railscope doctor", "py-spy dump --pid 100"]


def test_a_wait_for_a_gpu_hides_nothing_that_is_better_founded() -> None:
    finding = only(in_unseen_work(0).rank(1, stall=stall("process_stopped", blamed_rank="1")))
    assert (finding.cause, finding.ranks) == (Cause.PROCESS_STOPPED, ("1",))


def test_every_cause_about_calls_has_a_case() -> None:
    assert CASES.keys() == set(CALL_CAUSES)
    assert all(CASES.values())


def test_who_is_inside_a_call_is_told_of_though_the_others_write() -> None:
    finding = only(inside("ncclCommSplit", 0).rank(1, writing=True, position=Position(1204), moving=True))
    assert finding.cause == Cause.WRITING
    assert "ncclCommSplit" in finding.headline
    assert "rank 1 (pid 101, host1) writes to storage" in finding.headline
    assert any("has been inside ncclCommSplit for 40 s" in line for line in finding.evidence)
