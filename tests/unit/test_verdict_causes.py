"""What a verdict says of each cause that one stalled communicator can have, and what it does not claim.

Fleets are made up: see fleets.  A cause without a case is an error.  Causes about rails: test_verdict_rails.py,
about calls: test_verdict_calls.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from railscope.agent.cluster.fleet.facts import Moving, Rank
from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.facts.causes import RAIL_CAUSES, Cause
from railscope.agent.facts.stall import LastCollectives
from tests.unit.fleets import (
    CALL_CAUSES,
    NOW,
    SAME,
    SIZES,
    Case,
    Fleets,
    checkpoint,
    failed_last,
    gone,
    having_made,
    identity,
    idle,
    killed,
    of_cause,
    only,
    stall,
    waiting,
    waits,
)

STOPPED: Final = stall("process_stopped", blamed_rank="1")
GUESS: Final = stall("rank_behind", blamed_rank="1")
NOBODY: Final[dict[str, object]] = {"ranks": (), "hosts": ()}


def vague() -> Fleets:
    """Rank 2 has nothing under way, and where it stands is only known from history."""
    learnt = Position(1204, uncertainty=3, learnt=True)
    return waits(4).behind(2).rank(2, position=learnt, enqueued=50, completed=50)


def beside_a_healthy_job(fleets: Fleets) -> Fleets:
    fleets.moving.append(Moving("00000000000000ff", "host1", 900.0))
    return fleets


CASES: Final[dict[str, list[Case]]] = {
    Cause.PROCESS_GONE: [
        *(
            Case(
                f"killed, its other series are gone too, of {hosts} hosts",
                waits(hosts).rank(
                    1,
                    stall=gone(1),
                    enqueued=None,
                    completed=None,
                    position=None,
                    inflight_seconds=None,
                    calls_per_second=None,
                ),
                says=(("headline", "is gone"),),
                found={"ranks": ("1",), "hosts": ("host1",)},
            )
            for hosts in SIZES
        ),
        Case(
            "a peer closed its connections, and nobody names it",
            waits(4).rank(0, stall=stall("process_gone")),
            says=(("headline", "a peer that its host does not know is gone"),),
            found=NOBODY,
        ),
        Case(
            "who waits for the peer that is gone is not taken for it where the age of its wait is not known",
            waits(4).rank(0, stall=stall("process_gone"), inflight_seconds=None),
            found={"ranks": ()},
        ),
        Case(
            "whoever has not left its communicator waits",
            failed_last().rank(1, ended=False, inflight_seconds=40.0, stall=gone(3)),
            found={"ranks": ("3",)},
        ),
        Case("nor has who completed nobody knows what", failed_last().rank(1, ended=False, completed=None)),
        Case(
            "of those that left and are not seen one is not known to have",
            failed_last().lose_host(0).rank(0, ended=False),
        ),
        Case(
            "whoever waits keeps a job stalled whose others are gone",
            killed(1, 2).rank(0, ended=False, inflight_seconds=4.0),
            found={"ranks": ("1", "2")},
        ),
        Case(
            "at the level of counts, where that it waits follows from other signs",
            killed(1, 2).rank(0, ended=False, stall=replace(gone(1), strength="weak"), completed=None),
        ),
        Case("whoever has not left though nothing is said of it", killed(1, 2).rank(0, ended=False, stall=None)),
        Case("the other host does not tell of its rank's end", waiting().rank(0, stall=gone(0), ended=True)),
        Case(
            "a rank that a restarted agent cannot see may still wait: who hangs makes no call that shows it",
            waiting().rank(0, stall=gone(0), ended=True).restart_agent(1),
        ),
        Case(
            "the log of its number in the job is looked at",
            waiting().rank(1, world_rank="9", stall=gone(1)),
            says=(("why", "log of rank 9:"),),
        ),
        Case("beside a checkpoint", checkpoint().rank(1, stall=gone(1))),
    ],
    Cause.PROCESS_STOPPED: [
        *(
            Case(
                f"named by its own host, and the waiting ones are not, of {hosts} hosts",
                waits(hosts).rank(1, stall=STOPPED),
                says=(("headline", "rank 1 (pid 101, host1) is stopped"), ("steps", "=host1: kill -CONT 101")),
                found={"ranks": ("1",), "hosts": ("host1",), "pids": ("101",)},
            )
            for hosts in SIZES
        ),
        Case(
            "named by the host of a neighbour that waits",
            Fleets(2, 2).communicator().all_say("rank_behind").rank(0, stall=STOPPED).rank(1, stall=None),
            found={"ranks": ("1",)},
        ),
        Case(
            "what its host said before its agent was restarted still counts",
            waits().restart_agent(1).rank(1, last_said=STOPPED),
            says=(("headline", "when its host last told of it, rank 1 (pid 101, host1) was stopped"),),
            found={"ranks": ("1",), "hosts": ("host1",), "basis": "history"},
        ),
        *(
            Case(f"somebody may wait: {name}", idle(**changes), found={"ranks": ("1",)})
            for name, changes in (
                ("waits", {"enqueued": 1206, "position": Position(1206), "inflight_seconds": 3.0}),
                ("went on", {"enqueued": 1206, "completed": 1206, "position": Position(1206)}),
                ("incomplete", {"completed": 1204}),
                ("unseen", {"completed": None, "inflight_seconds": None}),
                ("nowhere", {"position": None}),
                ("about there", {"position": Position(1205, 3, learnt=True)}),
                ("a moment ago", {"moving": True}),
                ("says so", {"stall": stall("rank_behind", blamed_rank="1", strength="weak")}),
            )
        ),
        Case("somebody may wait: missing", idle().each(nranks="3"), found={"ranks": ("1",)}),
        Case("somebody may wait: how many", idle().each(nranks="unknown"), found={"ranks": ("1",)}),
        Case("within an operation", idle().rank(1, stall=stall("process_stopped", blamed_rank="1", strength="strong"))),
        Case(
            "perhaps in another communicator",
            idle().rank(1, stall=stall("process_stopped", blamed_rank="1", strength="weak", op="")),
        ),
        Case(
            "stays named while another host is silent",
            waits(4).rank(1, stall=STOPPED).lose_host(3),
            says=(("unknown", "rank 3 on host3"),),
            found={"ranks": ("1",)},
        ),
        Case(
            "is strong evidence, whatever the stall is known by",
            waiting().rank(1, stall=stall("process_stopped", strength="weak")),
            says=(("evidence", "=host1 says process_stopped of rank 1"),),
            never=(("headline", "weak"), ("evidence", "weak"), ("unknown", "weak")),
            found={"strength": "strong"},
        ),
        Case(
            "named as the logs of its job number it too",
            waiting().rank(1, world_rank="9", stall=stall("process_stopped")),
            says=(("headline", "rank 1 (rank 9 of the job, pid 101, host1) is stopped"),),
            found={"world_ranks": ("9",)},
        ),
        Case(
            "named with its user, where the batch system tells",
            waiting().rank(1, user="ada", stall=stall("process_stopped")),
            says=(("headline", "rank 1 (pid 101 of ada, host1) is stopped"),),
        ),
        Case(
            "of two one has a number in the job",
            waiting(3)
            .rank(0, stall=stall("process_stopped", blamed_rank=""))
            .rank(1, stall=stall("process_stopped", blamed_rank=""), world_rank="9"),
            found={"ranks": ("0", "1"), "world_ranks": ("", "9")},
        ),
        Case(
            "numbered alike in both",
            waiting().rank(1, world_rank="1", stall=stall("process_stopped")),
            says=(("headline", "rank 1 (pid 101, host1) is stopped"),),
        ),
        Case(
            "a healthy job beside it is shown",
            beside_a_healthy_job(waiting().rank(1, stall=STOPPED)),
            says=(("healthy", "=communicator 00000000000000ff goes on at 900.0 calls/s on host1"),),
        ),
        Case("beside a checkpoint", checkpoint().rank(1, stall=STOPPED)),
    ],
    Cause.PROCESS_FROZEN: [
        Case(
            "named by its own host",
            waits(4).rank(1, stall=stall("process_frozen", blamed_rank="1")),
            says=(
                ("headline", "rank 1 (pid 101, host1) is frozen by the control group"),
                ("steps", "/proc/101/cgroup)/cgroup.freeze"),
            ),
            never=(("steps", "kill -CONT"),),
            found={"ranks": ("1",), "hosts": ("host1",)},
        ),
    ],
    Cause.GPU_NOT_PROGRESSING: [
        Case(
            "named by its host",
            waiting().rank(1, stall=stall("gpu_not_progressing")),
            says=(("steps", "xid"),),
            found={"ranks": ("1",)},
        ),
        Case(
            "why its rank is behind",
            waits().behind(1).rank(1, stall=stall("gpu_not_progressing")),
            found={"ranks": ("1",), "basis": "sequence"},
        ),
    ],
    Cause.RANK_BEHIND: [
        Case(
            "what it made is the same as what the others made",
            having_made(waits(2), LastCollectives(1205, SAME), LastCollectives(1204, SAME[:2])).behind(1),
            never=(("headline", "do not make the same"),),
            found={"ranks": ("1",)},
        ),
        *(
            Case(
                f"did not enter what the others wait in, of {hosts} hosts",
                waits(hosts).behind(1),
                says=(
                    ("evidence", "=rank 1 entered 1,204 operations, completed 1,204"),
                    ("evidence", "program is elsewhere"),
                    ("steps", "py-spy dump --pid 101"),
                ),
                found={"ranks": ("1",), "hosts": ("host1",), "basis": "sequence", "strength": "strong"},
            )
            for hosts in SIZES
        ),
        Case(
            "blamed by its own host, without a difference in sequence",
            waits(4).rank(2, stall=stall("rank_behind", blamed_rank="2")),
            found={"ranks": ("2",), "basis": "host"},
        ),
        Case(
            "the only other rank, where it is seen and does not wait",
            waiting().rank(0, stall=GUESS).rank(1, stall=None, position=None, inflight_seconds=None),
            found={"ranks": ("1",)},
        ),
        Case(
            "skipped a collective and waits in another",
            waits(4).rank(
                2,
                enqueued=1204,
                completed=1203,
                position=Position(1204),
                stall=stall("rank_behind", op="Broadcast"),
            ),
            says=(("evidence", "skipped"), ("evidence", "AllReduce, Broadcast")),
            found={"ranks": ("2",)},
        ),
        Case(
            "its own host says so too: it is kept from going on",
            waiting().rank(0, stall=GUESS).rank(1, stall=GUESS),
            found={"basis": "host", "ranks": ("1",)},
        ),
        Case(
            "another host guesses so, and it entered fewer",
            waiting()
            .rank(0, stall=GUESS)
            .rank(1, stall=None, inflight_seconds=0.0, position=Position(1204), enqueued=1204, completed=1204),
            found={"ranks": ("1",)},
        ),
        Case(
            "another host guesses so, and nobody knows how many it entered",
            waiting().rank(0, stall=GUESS).rank(1, stall=None, inflight_seconds=0.0, position=None),
            found={"ranks": ("1",)},
        ),
        Case(
            "a learnt position beyond its uncertainty",
            waiting().rank(1, position=Position(1190, uncertainty=10, learnt=True), enqueued=5, completed=5),
            # Hosts are sure of what they say: none of it is marked.
            says=(("headline", "(weak evidence)"),),
            never=(("unknown", "marked weak"),),
            found={"ranks": ("1",), "strength": "weak"},
        ),
        Case(
            "idle, where its sequence is too vague",
            vague(),
            says=(("headline", "rank 2 (pid 102, host2) is not inside any operation"),),
            found={"ranks": ("2",), "basis": "idle", "strength": "weak"},
        ),
        Case(
            "stands since a moment ago",
            waiting().behind(1).rank(1, moving=True).rank(0, moving=True, inflight_seconds=2.5),
            found={"ranks": ("1",)},
        ),
        Case(
            "by entries alone, where no host tells of completions",
            waiting().behind(1).each(completed=None, inflight_seconds=None),
            says=(("unknown", "no host tells what completed"),),
            found={"ranks": ("1",)},
        ),
        Case(
            "it does not write to storage, as one that keeps others waiting for no fault",
            checkpoint().rank(0, writing=False),
            found={"ranks": ("0",)},
        ),
        Case(
            "beside one that entered as much as anybody and writes",
            Fleets(4).communicator().all_say("rank_behind").behind(2).rank(0, writing=True, stall=None),
            found={"ranks": ("2",)},
        ),
    ],
    Cause.RANK_MISSING: [
        *(
            Case(
                f"of a silent host, whose state is not guessed, of {hosts} hosts",
                waits(hosts).lose_host(1),
                says=(
                    ("headline", "cannot tell"),
                    ("unknown", "rank 1 on host1: its agent has not answered for 50 s"),
                    ("steps", "ping"),
                ),
                found={"ranks": ("1",), "hosts": ("host1",)},
            )
            for hosts in SIZES
        ),
        Case(
            "of a host that was never scraped",
            waiting(4).never_told_of(3),
            says=(("unknown", "no agent reported them"),),
            found={"ranks": ("3",), "hosts": ()},
        ),
        Case(
            "of several silent hosts: a line for each",
            Fleets(4, 2).communicator().all_say("rank_behind").lose_host(1).lose_host(3),
            says=(("unknown", "ranks 2-3 on host1:…"), ("unknown", "ranks 6-7 on host3:…")),
            found={"ranks": ("2", "3", "6", "7")},
        ),
    ],
    Cause.UNSEEN: [Case("hosts call it so", Fleets().communicator().all_say("unseen"))],
    Cause.UNKNOWN: [
        Case(
            "nothing stands out, and nobody is blamed",
            waiting(),
            says=(("headline", "not known"), ("steps", ": ")),
            found={"ranks": (), "rails": ()},
        ),
        Case(
            "two ranks wait for each other, and neither is to blame",
            waiting().rank(0, stall=GUESS).rank(1, stall=stall("rank_behind", blamed_rank="0")),
        ),
        Case("a port that never carried anything is down", waiting().rail(1, 1, up=False, usual_transmit=0.0)),
        # All are inside operation 1,205; one host has only handed over more for later.
        Case(
            "operations handed over ahead blame nobody",
            waiting().rank(0, enqueued=1250, position=Position(1250)).rank(1, enqueued=1240, position=Position(1240)),
        ),
        Case(
            "who is inside the operation that the others wait in, and handed over none ahead",
            waiting().rank(0, enqueued=1250, position=Position(1250)),
        ),
        Case(
            "few ranks completed less, and entered what the others entered",
            waiting(4).each(completed=1205).rank(2, completed=1204),
            says=(
                (
                    "headline",
                    "data does not reach rank 2 (pid 102, host2): the others completed more (weak evidence)",
                ),
            ),
            found={"ranks": ("2",), "basis": "completion", "strength": "weak"},
        ),
        Case(
            "a rank that came as far as any is not behind because another host guesses so",
            waiting().rank(0, stall=GUESS).rank(1, stall=None, completed=1205, inflight_seconds=0.0),
            found={"basis": "completion", "ranks": ("0",)},
        ),
        Case(
            "a count of ranks that no job has is not believed",
            waiting().each(nranks=str((1 << 20) + 1)),
            says=(("unknown", "how many ranks the communicator has is not known"),),
            found={"nranks": None},
        ),
        Case(
            "an unknown number of ranks is said",
            waiting().each(nranks="unknown"),
            says=(("unknown", "how many ranks"),),
        ),
        Case(
            "an agent was restarted beside the job",
            waiting().rank(1, enqueued=3, completed=2, position=None),
            says=(("unknown", "rank 1 (on host1): the agent began…"), ("unknown", "…its sequence is not compared")),
        ),
        Case(
            "a learnt position within its uncertainty",
            waiting().rank(1, position=Position(1200, uncertainty=10, learnt=True), enqueued=5, completed=5),
        ),
        # Since its agent was started it made no call: it may have been inside the operation before.
        Case("idle for as long as its agent runs", vague().rank(2, enqueued=0, completed=0)),
        Case(
            "idle, and not behind",
            waiting(4).rank(2, stall=None, inflight_seconds=0.0, completed=1205),
            found={"ranks": ()},
        ),
        Case(
            "scraped before the stall",
            waiting().behind(1).rank(1, scraped=NOW - 60),
            says=(("unknown", "before the stall"),),
        ),
        *(
            Case(
                f"sequences of {op} are not compared",
                waiting().all_say("unknown", op=op).rank(1, position=Position(900), enqueued=900, completed=900),
                says=(("unknown", "point to point"),),
            )
            for op in ("Send", "Recv", "SendRecv")
        ),
        Case(
            "a communicator that goes on slowly",
            waiting().behind(1).rank(1, moving=True).rank(0, inflight_seconds=0.4),
            says=(("unknown", "still entered operations"),),
        ),
        Case(
            "ranks that always call at different rates",
            waiting().behind(1, by=600).rank(1, mean_calls_per_second=20.0).rank(0, mean_calls_per_second=40.0),
        ),
        Case(
            "weak evidence is called so",
            Fleets().communicator().all_say("unknown", strength="weak"),
            says=(("unknown", "evidence marked weak rests on"), ("evidence", "…(weak evidence)")),
        ),
        *(
            Case(
                f"what has no {what} is neither compared nor missed",
                waiting(4).behind(1).each(**{what: "unknown"}, nranks="9"),
                says=(("unknown", "cannot read which communicator or rank"),),
            )
            for what in ("comm", "rank")
        ),
        Case(
            "who is in the communicator is told first",
            waiting(4).rank(0, job="4711"),
            says=(("first", "=4 ranks on host0, host1, host2, host3; job 4711"),),
        ),
        Case(
            "a rank that writes has come as far as any",
            Fleets().communicator().all_say("unknown").rank(0, writing=True),
        ),
    ],
}


@pytest.mark.parametrize(("cause", "case"), of_cause(CASES))
def test_of_each_cause_it_is_said_who_is_to_blame_and_what_to_look_at(cause: str, case: Case) -> None:
    case.assert_found(cause)


def test_every_cause_has_a_case() -> None:
    """Of a rank that writes, tests/unit/test_verdict_silence.py has them: that is no stall; of one that is slow,
    tests/unit/test_verdict_pace.py; of a transfer, which has no rank, tests/unit/test_verdict_transfers.py."""
    elsewhere = {Cause.WRITING, Cause.RANK_SLOW, Cause.TRANSFER_STUCK, *RAIL_CAUSES, *CALL_CAUSES}
    assert {cause for cause in Cause if not CASES.get(cause)} == elsewhere


def test_ranks_of_silent_hosts_stand_first_in_what_cannot_be_known_in_a_line_for_each_host() -> None:
    finding = only(Fleets(4, 2).communicator().all_say("rank_behind").lose_host(1).lose_host(3))
    assert [line.partition(":")[0] for line in finding.unknown[:2]] == ["ranks 2-3 on host1", "ranks 6-7 on host3"]


# Communicators and ranks without a name


def nameless(numbers: str, **said: str) -> Fleets:
    """Communicators whose names nobody can read, of which the first host says something; ranks with these numbers."""
    fleets = Fleets(3)
    for host, number in enumerate(numbers):
        rank = "unknown" if number == "?" else number
        fleets.ranks.append(Rank(identity("unknown", rank, pid=str(100 + host)), f"host{host}", stall=None))
    fleets.ranks[0] = replace(fleets.ranks[0], stall=stall(**said))
    return fleets


@pytest.mark.parametrize("cause", ["process_stopped", "process_gone", "gpu_not_progressing"])
@pytest.mark.parametrize(("numbers", "blamed"), [("???", ""), ("333", "3")], ids=["no number", "the same number"])
def test_what_a_host_says_of_a_rank_without_a_name_is_said_of_no_other_host_s(
    cause: str, numbers: str, blamed: str
) -> None:
    finding = only(nameless(numbers, cause=cause, blamed_rank=blamed))
    assert (finding.cause, finding.hosts, finding.pids) == (cause, ("host0",), ("100",))
    assert {step.host for step in finding.next_steps} <= {"host0", ""}


def test_a_host_that_blames_a_rank_without_a_name_for_coming_late_blames_its_own_only() -> None:
    assert only(nameless("333", cause="rank_behind", blamed_rank="3")).hosts == ("host0",)


def test_a_peer_without_a_name_that_is_gone_is_not_looked_for_among_others() -> None:
    fleets = nameless("011", cause="process_gone", blamed_rank="1")
    fleets.ranks[0] = replace(fleets.ranks[0], inflight_seconds=40.0)
    finding = only(fleets)
    assert (finding.cause, finding.ranks, finding.pids) == ("process_gone", (), ())
