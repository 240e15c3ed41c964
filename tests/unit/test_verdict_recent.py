"""Stalls that are not on at the moment at which somebody asks, and what is left to look at; on made-up fleets."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import pytest

from railscope.agent.cluster.command import as_text
from railscope.agent.cluster.fleet.facts import BriefStall, Fleet
from railscope.agent.cluster.verdict.advice import Step
from railscope.agent.cluster.verdict.finding import Verdict
from railscope.agent.cluster.verdict.quantities import format_calls
from railscope.agent.cluster.verdict.recent import next_read_time, to_past_tense
from railscope.agent.cluster.verdict.words import make_verdict
from tests.unit.fleets import COMM, NOW, OTHER, Fleets, checkpoint, stall

SLOW = stall("rail_slow", rail="0", device="eth0")


def going(*comms: str) -> Fleets:
    """Communicators that go on as ever."""
    fleets = Fleets()
    for number, comm in enumerate(comms or (COMM,)):
        fleets.communicator(comm, pids=100 + 50 * number)
    for one in list(fleets.ranks):
        fleets.rank(int(one.rank), one.comm, inflight_seconds=0.01, calls_per_second=9.5, moving=True)
    return fleets


def slow(ago: float, comm: str = COMM) -> Fleets:
    """The fleet as it was then, while rail 0 of host 1 was slow."""
    return Fleets(at=NOW - ago).communicator(comm).all_say("rank_behind", comm).rank(1, comm, stall=SLOW)


def judged(fleets: Fleets, *then: Fleets, comm: str | None = None) -> Verdict:
    return make_verdict(fleets.made(), comm, [one.made() for one in then])


def test_who_asks_a_moment_after_the_stall_gets_its_verdict() -> None:
    verdict = judged(going().was_stalled(ago=1.2, for_=6.0, by=SLOW), slow(1.2))
    (finding,) = verdict.findings
    assert verdict.problem
    assert verdict.headline == (
        f"STALLED until 1.2 s ago for 6.0 s, not at this moment: AllReduce on {COMM}: rail 0 (eth0) of host1 was slow."
    )
    assert (finding.cause, finding.hosts, finding.devices) == ("rail_slow", ("host1",), ("eth0",))
    assert (finding.now, finding.times, finding.last) == (False, 1, NOW - 1.2)
    assert finding.evidence[0] == (
        "what follows was so at 13:46:38 UTC, while it was stalled; now its ranks make 9.5 calls/s, 50.0 calls/s "
        "before it"
    )
    assert "host1 says rail_slow of rank 1 (strong evidence)" in finding.evidence
    assert finding.next_steps
    assert not any("was stalled until" in note for note in verdict.notes), "it is said once"


def crawling(ago: float, *rates: float) -> Fleets:
    """It was stalled until so long ago, made 18 calls a second before, and makes so many now."""
    fleets = going().was_stalled(ago=ago, for_=12.0, by=SLOW).each(usual_calls_per_second=18.0)
    for number, rate in enumerate(rates):
        fleets.rank(number, calls_per_second=rate)
    return fleets


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((0.0, 0.2), "and goes on at 1% of its former pace: "),
        ((0.0, 0.01), "and goes on at less than 1% of its former pace: "),
        ((2.0, 4.0), "and goes on at 22% of its former pace: "),
        ((0.0, 0.0), "and makes no calls since: "),
        ((2.0, 9.0), "not at this moment: "),
    ],
)
def test_what_goes_on_at_a_fraction_of_its_pace_is_not_said_to_be_over(rates: tuple[float, float], said: str) -> None:
    (finding,) = judged(crawling(36.0, *rates), slow(36.0)).findings
    assert finding.headline.startswith(f"STALLED until 36 s ago for 12 s, {said}")
    assert finding.evidence[0].endswith(f"; now its ranks make {format_calls(rates)}, 18.0 calls/s before it")
    over = said.startswith("not")
    assert any("recordings" in step.command for step in finding.next_steps) == over, "what it is now is looked at"


def test_a_rate_that_has_the_stall_in_it_tells_nothing_of_the_pace_after() -> None:
    (finding,) = judged(crawling(4.0, 0.0, 0.2), slow(4.0)).findings
    assert "not at this moment" in finding.headline


def test_a_pace_of_two_ends_is_one_number_where_both_read_the_same() -> None:
    assert format_calls([3.2, 3.21]) == "3.2 calls/s"
    assert format_calls([3.2, 4.0, 3.5]) == "3.2 to 4.0 calls/s"


def test_a_stall_that_is_on_and_off_is_told_with_how_often_and_how_long() -> None:
    fleets = going().was_stalled(ago=0.8, for_=12.0, times=3, by=SLOW).rank(0, stalled_seconds=7.4)
    then = slow(0.8).was_stalled(ago=0.0, for_=12.0, times=3, by=SLOW)
    (finding,) = judged(fleets, then).findings
    assert finding.headline.startswith(
        "STALLED on and off, 3 times and for 7.4 s in the last 13 s, not at this moment: "
    )
    assert finding.times == 3
    assert not any("3 times" in line for line in finding.evidence), "it is said once"


def test_a_stall_that_is_on_again_says_how_often_it_was() -> None:
    fleets = slow(0.0).was_stalled(ago=0.0, for_=12.0, times=3, by=SLOW).rank(1, stalled_seconds=7.4)
    (finding,) = judged(fleets).findings
    assert (finding.now, finding.times, finding.last) == (True, 3, None)
    assert finding.headline.startswith("STALLED for 40 s: ")
    assert "it was stalled 3 times in the last 12 s, for 7.4 s in all" in finding.evidence


@pytest.mark.parametrize(("ago", "problem"), [(59.0, True), (61.0, False), (120.0, False)])
def test_what_ended_longer_ago_than_a_minute_is_no_stall_but_a_line(ago: float, problem: bool) -> None:
    fleets = going().was_stalled(ago=ago, by=SLOW)
    then = [slow(ago)] if next_read_time(fleets.made(), ()) is not None else []
    verdict = judged(fleets, *then)
    assert verdict.problem is problem
    if not problem:
        assert verdict.headline == "No stall: no host calls the only communicator stalled."
        (note,) = verdict.notes
        assert note.startswith(f"communicator {COMM} was stalled until 13:4")
        assert "ago: host1 said rail_slow of rank 1 by rail 0 (eth0); --time 1970-01-12T13:4" in note


def test_that_a_stall_is_over_is_not_said_where_nobody_is_heard() -> None:
    fleets = going().was_stalled(ago=120.0, by=SLOW).lose_host(0)
    assert (
        judged(fleets).headline
        == "No stall: no host calls the only communicator stalled; 1 of 2 agents does not answer."
    )
    verdict = judged(fleets.lose_host(1))
    assert not verdict.heard
    assert verdict.headline == "Unknown whether anything is stalled: none of 2 agents answers."
    assert any("was stalled when last heard of at 13:4" in note for note in verdict.notes)


def test_where_hosts_are_scraped_seldom_a_moment_is_longer() -> None:
    seldom = replace(going().was_stalled(ago=100.0, by=SLOW).made(), scrape_seconds=60.0, recent_seconds=120.0)
    assert next_read_time(seldom, ()) == NOW - 100.0


def test_stalls_of_now_come_first_and_those_of_a_moment_ago_after_them() -> None:
    fleets = going(COMM, OTHER).was_stalled(ago=2.0, by=SLOW)
    for number in (0, 1):
        fleets.rank(number, OTHER, inflight_seconds=40.0, calls_per_second=0.0, moving=False)
    fleets.all_say("unknown", OTHER)
    verdict = judged(fleets, slow(2.0))
    assert [(one.comm, one.now) for one in verdict.findings] == [(OTHER, True), (COMM, False)]
    assert verdict.headline.startswith("STALLED for 40 s: ")
    assert [one.comm for one in judged(fleets, slow(2.0), comm=COMM).findings] == [COMM]


def test_what_waited_because_of_a_stall_that_is_still_on_is_no_cause_of_its_own() -> None:
    stopped = stall("process_stopped", blamed_rank="1")
    fleets = going(COMM, OTHER).was_stalled(OTHER, ago=2.0, by=stall("rank_behind"))
    fleets.all_say("rank_behind").rank(1, stall=stopped)
    then = Fleets(at=NOW - 2.0).communicator(COMM).communicator(OTHER)
    then.all_say("rank_behind").all_say("rank_behind", OTHER).rank(1, stall=stopped).rank(1, OTHER, pid=101)
    verdict = judged(fleets, then)
    assert [(one.comm, one.now) for one in verdict.findings] == [(COMM, True)]
    assert any(note.startswith(f"communicator {OTHER} was stalled until") for note in verdict.notes)


@pytest.mark.parametrize(("said", "told"), [(SLOW, True), (stall("process_gone", blamed_rank="1"), False)])
def test_a_job_that_has_ended_since_waits_no_more(said: object, told: bool) -> None:
    fleets = going().was_stalled(ago=5.0, by=said)  # type: ignore[arg-type]
    for number in (0, 1):
        fleets.rank(number, present=False, enqueued=None, position=None)
    assert next_read_time(fleets.made(), ()) is None
    verdict = judged(fleets)
    assert not verdict.problem
    assert any("its processes have ended since" in note for note in verdict.notes) == told


def test_while_a_host_is_silent_nobody_knows_whether_the_job_has_ended() -> None:
    fleets = going().was_stalled(ago=5.0, by=SLOW).lose_host(1).rank(0, present=False)
    assert next_read_time(fleets.made(), ()) == NOW - 5.0
    # Nor does an agent that came after it.
    fleets = going().was_stalled(ago=5.0, by=SLOW).rank(0, present=False).rank(1, present=False)
    fleets.agents[1] = replace(fleets.agents[1], started=NOW - 3.0)
    assert next_read_time(fleets.made(), ()) == NOW - 5.0


def test_a_stall_of_which_only_a_silent_host_told_may_still_be_on() -> None:
    fleets = going().was_stalled(ago=20.0, for_=6.0, by=SLOW).lose_host(1)
    headline = judged(fleets, slow(20.0)).headline
    assert headline.startswith(f"STALLED when last heard of, 20 s ago, for 6.0 s: AllReduce on {COMM}: rail 0")
    assert "not at this moment" not in headline


def test_every_recent_stall_is_looked_at_once_and_not_too_many() -> None:
    comms = [f"{number:016x}" for number in range(8)]
    fleets = going(*comms)
    for number, comm in enumerate(comms):
        fleets.was_stalled(comm, ago=1.0 + number, by=SLOW)
    fleet, earlier = fleets.made(), list[Fleet]()
    while (moment := next_read_time(fleet, earlier)) is not None:
        # At the first moment the first two are stalled, later one each.
        then = slow(NOW - moment, comms[len(earlier) + bool(earlier)])
        if not earlier:
            then.communicator(comms[1], pids=500).all_say("unknown", comms[1])
        earlier.append(then.made())
    assert [NOW - then.at for then in earlier] == [1.0, 3.0, 4.0]
    verdict = make_verdict(fleet, None, earlier)
    shown = {one.comm for one in verdict.findings} | {w.comm for one in verdict.findings for w in one.waiting}
    assert shown == set(comms[:4])
    assert sum("was stalled until" in note for note in verdict.notes) == 4


def test_a_stall_that_no_scrape_shows_is_a_line_beside_the_verdict() -> None:
    fleets = going()
    fleets.brief.append(BriefStall(COMM, "host1", "rail_slow", 2.6))
    verdict = judged(fleets)
    assert not verdict.problem
    assert verdict.notes == (
        f"communicator {COMM} was stalled for about 2.6 s within the last 60 s, between two scrapes: host1 said "
        "rail_slow",
    )


def test_what_was_so_is_told_as_past() -> None:
    assert to_past_tense("rank 1 did not enter the operation that the others wait in").endswith("the others waited in")
    assert to_past_tense("ranks 1-3 (on wait-1, is, b) keep the others waiting") == (
        "ranks 1-3 (on wait-1, is, b) kept the others waiting"
    )
    assert to_past_tense("packets on rail 1 are dropped on the way") == "packets on rail 1 were dropped on the way"


# Checkpoints


def test_a_checkpoint_that_has_just_ended_was_no_stall() -> None:
    now = Fleets().communicator().was_stalled(ago=1.2, by=stall("rank_behind"))
    verdict = make_verdict(now.made(), None, [checkpoint(at=NOW - 1.2).made()])
    assert not verdict.problem
    assert verdict.headline.startswith("No stall: no host calls the only")
    (note,) = verdict.notes
    assert note == (
        f"communicator {COMM} waited until 1.2 s ago for rank 0 (pid 100, host0), which wrote to storage: a checkpoint?"
    )


def test_one_that_ended_minutes_ago_is_not_called_a_stall_in_the_notes() -> None:
    fleets = Fleets().communicator().was_stalled(ago=200.0, by=stall("rank_behind", blamed_rank="0"))
    assert "was stalled until" in make_verdict(fleets.made()).notes[0]
    fleets.wrote(COMM)
    (note,) = make_verdict(fleets.made()).notes
    assert note.startswith(f"communicator {COMM} waited, while one of its ranks wrote to storage, until ")
    broken = Fleets().communicator().was_stalled(ago=200.0, by=stall("rail_down", device="eth0")).wrote(COMM)
    assert "was stalled until" in make_verdict(broken.made()).notes[0]


# What to look at

_ONLY_NOW: Final = re.compile(r"kill -CONT|py-spy|/proc/\d+|top -H|ping|systemctl|\bwaits?\b")
_SINCE: Final = "--since '1970-01-12 13:44:32 UTC' --until '1970-01-12 13:47:08 UTC'"
"""Two minutes before 13:46:32, when it began, to half a minute after 13:46:38."""


def world_of(cause: str, ago: float = 2.0) -> Fleets:
    """The fleet while rank 1 of host 1 was the cause, or rail 0 there."""
    fleets = Fleets(at=NOW - ago).communicator().all_say("rank_behind")
    if cause == "rank_behind":
        return fleets.behind(1)
    if cause == "rank_missing":
        return fleets.lose_host(1)
    rail = {"rail": "0", "device": "eth0"} if cause.startswith("rail_") else {"blamed_rank": "1"}
    return fleets.rank(1, stall=stall(cause, **rail))


def judged_for(cause: str, *, times: int = 1, silent: bool = False) -> Verdict:
    now = Fleets().communicator().was_stalled(ago=2.0, times=times, by=stall(cause))
    for number in (0, 1):
        now.rank(number, inflight_seconds=0.01, calls_per_second=9.5, moving=True)
    if silent:
        now.lose_host(1)
    return make_verdict(now.made(), None, [world_of(cause).made()])


def steps(cause: str) -> tuple[Step, ...]:
    (finding,) = judged_for(cause).findings
    assert not finding.now
    return finding.next_steps


@pytest.mark.parametrize(
    ("cause", "first"),
    [
        ("process_stopped", Step("host1", f"journalctl {_SINCE}", "who stopped process 101 and let it go on: ")),
        ("process_gone", Step("host1", f"journalctl -k {_SINCE}", "the OOM killer")),
        ("rail_down", Step("host1", f"journalctl -k {_SINCE}", "when eth0 lost its link and got it back")),
        ("rail_filtered", Step("", "", "whether the link at the other end of this rail was up")),
        ("rail_lossy", Step("host1", "ethtool -S eth0", "which error or discard counter has counted")),
        ("rail_slow", Step("host1", "ethtool -S eth0", "pauses and congestion marks that were counted")),
        (
            "rank_behind",
            Step("", "", "the job's log of rank 1, from 1970-01-12 13:46:32 UTC to 1970-01-12 13:46:38 UTC"),
        ),
        ("gpu_not_progressing", Step("host1", f"journalctl -k {_SINCE} | grep -i xid", "a failed GPU reported")),
        ("rank_missing", Step("host1", f"journalctl -u railscope {_SINCE}", "why the agent did not answer")),
    ],
)
def test_after_a_stall_logs_and_counters_of_its_time_and_its_recording_are_looked_at(cause: str, first: Step) -> None:
    found = steps(cause)
    assert (found[0].host, found[0].command) == (first.host, first.command)
    assert found[0].why.startswith(first.why)
    assert not any(_ONLY_NOW.search(f"{step.command} {step.why}") for step in found)
    (recording,) = (step for step in found if step.host == "host0" and "recordings" in step.command)
    assert recording.why.startswith("what was recorded as it began, about 1970-01-12 13:46:32 UTC: ")
    text = as_text(judged_for(cause))
    assert all(step.command in text for step in found)


@pytest.mark.parametrize("cause", ["unknown", "unseen"])
def test_where_no_cause_was_found_the_recording_comes_first_and_what_is_not_observed_last(cause: str) -> None:
    commands = [step.command for step in steps(cause)]
    assert (commands[0], commands[-1]) == ("ls -l /var/lib/railscope/recordings", "railscope doctor")


def test_what_may_be_on_again_when_somebody_gets_there_has_the_advice_of_a_stall_that_is_on() -> None:
    for verdict in (judged_for("process_stopped", times=3), judged_for("process_stopped", silent=True)):
        (finding,) = (one for one in verdict.findings if one.comm == COMM)
        assert any(step.command == "kill -CONT 101" for step in finding.next_steps)
