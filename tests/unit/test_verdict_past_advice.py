"""What to look at once a stall is over: what kept its traces, and nothing that only a stall that lasts shows."""

from __future__ import annotations

import re
from typing import Final

import pytest

from railscope.agent.cluster.command import as_text
from railscope.agent.cluster.verdict.advice import Step
from railscope.agent.cluster.verdict.words import Verdict, verdict_of
from tests.unit.fleets import COMM, NOW, Fleets, stall

_ONLY_NOW: Final = re.compile(r"kill -CONT|py-spy|/proc/\d+|top -H|ping|systemctl|\bwaits?\b")
_SINCE: Final = "--since '1970-01-12 13:44:32 UTC' --until '1970-01-12 13:47:08 UTC'"
"""Two minutes before 13:46:32, when it began, to half a minute after 13:46:38."""


def world(cause: str, ago: float = 2.0) -> Fleets:
    """The fleet while rank 1 of host 1 was the cause, or rail 0 there."""
    fleets = Fleets(at=NOW - ago).communicator().all_say("rank_behind")
    if cause == "rank_behind":
        return fleets.behind(1)
    if cause == "rank_missing":
        return fleets.lose_host(1)
    rail = {"rail": "0", "device": "eth0"} if cause.startswith("rail_") else {"blamed_rank": "1"}
    return fleets.rank(1, stall=stall(cause, **rail))


def judged(cause: str, *, times: int = 1, silent: bool = False) -> Verdict:
    now = Fleets().communicator().was_stalled(ago=2.0, times=times, by=stall(cause))
    for number in (0, 1):
        now.rank(number, inflight_seconds=0.01, calls_per_second=9.5, moving=True)
    if silent:
        now.lose_host(1)
    return verdict_of(now.made(), None, [world(cause).made()])


def steps(cause: str) -> tuple[Step, ...]:
    (finding,) = judged(cause).findings
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
        ("gpu_not_progressing", Step("host1", f"journalctl -k {_SINCE} | grep -i xid", "a GPU that failed said so")),
        ("rank_missing", Step("host1", f"journalctl -u railscope {_SINCE}", "why the agent said nothing")),
    ],
)
def test_after_a_stall_logs_and_counters_of_its_time_and_its_recording_are_looked_at(cause: str, first: Step) -> None:
    found = steps(cause)
    assert (found[0].host, found[0].command) == (first.host, first.command)
    assert found[0].why.startswith(first.why)
    assert not any(_ONLY_NOW.search(f"{step.command} {step.why}") for step in found)
    (recording,) = (step for step in found if step.host == "host0" and "recordings" in step.command)
    assert recording.why.startswith("what was recorded as it began, about 1970-01-12 13:46:32 UTC: ")
    text = as_text(judged(cause))
    assert all(step.command in text for step in found)


@pytest.mark.parametrize("cause", ["unknown", "unseen"])
def test_where_no_cause_was_found_the_recording_comes_first_and_what_is_not_observed_last(cause: str) -> None:
    commands = [step.command for step in steps(cause)]
    assert (commands[0], commands[-1]) == ("ls -l /var/lib/railscope/recordings", "railscope doctor")


def test_what_may_be_on_again_when_somebody_gets_there_has_the_advice_of_a_stall_that_is_on() -> None:
    for verdict in (judged("process_stopped", times=3), judged("process_stopped", silent=True)):
        (finding,) = (one for one in verdict.findings if one.comm == COMM)
        assert any(step.command == "kill -CONT 101" for step in finding.next_steps)
