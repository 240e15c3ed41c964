"""Rails that are merely slow, or lose packets: what a store's series show, and what the verdict says.  Made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.facts import Fleet, SlowRail
from railscope.agent.cluster.fleet.prometheus import Series
from railscope.agent.cluster.fleet.scrapes import read_scrapes
from railscope.agent.cluster.fleet.slow_rails import slow_rails_questions
from railscope.agent.cluster.verdict.words import make_verdict
from railscope.agent.facts.causes import Cause
from railscope.agent.facts.slowness import Slowness
from tests.unit import fleets
from tests.unit.canned_store import NOW, CannedStore, agent, bare, read
from tests.unit.fleets import COMM, OTHER, Fleets, killed

LENGTH = 5.0
STRETCHES = 60
USED = "rate(railscope_rail_tcp_sent_bytes_total)>1e+06"
BACKLOG = "max_over_time(railscope_rail_queue_backlog_bytes)"
DROPS = "increase(railscope_rail_queue_drops_total)"
AGAIN = "increase(railscope_rail_tcp_retransmitted_bytes_total)"
SENT_AGAIN_BYTES = 2_000_000
PORT = {"instance": "host1:9779", "rail": "1", "device": "eth1"}


def store(*stretches: int, pace: float | None = 0.6, again: float | None = None, drops: float = 0.0) -> CannedStore:
    """A rail that is slow, or sends much again, in these stretches, and lately."""
    made = CannedStore()
    agent(made, "host1:9779")
    questions = slow_rails_questions(read_scrapes(Asker(made, NOW)))
    moments = tuple(NOW - LENGTH * (STRETCHES - one - 1) for one in range(STRETCHES))
    made.evaluated[USED] = [Series(PORT, tuple((moment, 3e7) for moment in moments))]
    for name, value in (("slow_rails", pace), ("lossy_rails", again)):
        if value is not None:
            made.say(bare(questions[name]), value, **PORT)
            points = tuple((moments[one], value) for one in stretches)
            made.evaluated[bare(questions[name])] = [Series(PORT, points)]
    made.say(BACKLOG, 200_000.0, **PORT)
    made.say(DROPS, drops, **PORT)
    made.say(AGAIN, SENT_AGAIN_BYTES, **PORT)
    return made


def test_a_rail_that_is_slow_in_most_stretches_is_named_with_how_much_and_since_when() -> None:
    (found,) = read(store(*range(20, STRETCHES))).slow_rails
    assert (found.host, found.rail, found.device, found.cause) == ("host1", "1", "eth1", Cause.RAIL_SLOW)
    assert (found.pace_ratio, found.retransmitted_ratio, found.of_window) == (0.6, None, False)
    assert (found.slowness.waited, found.slowness.since) == (40, NOW - 200.0)


@pytest.mark.parametrize(
    ("pace", "again", "drops", "cause"),
    [
        (None, 0.02, 0, Cause.RAIL_LOSSY),
        (0.7, 0.02, 0, Cause.RAIL_LOSSY),
        (0.7, 0.02, 3, Cause.RAIL_LOSSY),
        (0.6, 0.02, 40, Cause.RAIL_SLOW),
        (0.6, None, 0, Cause.RAIL_SLOW),
    ],
    ids=[
        "sends again",
        "sends again and is slow",
        "more than its own queue dropped",
        "its own queue dropped it",
        "slow",
    ],
)
def test_a_rail_that_sends_again_is_lossy_unless_its_own_queue_dropped_it(
    pace: float | None, again: float | None, drops: float, cause: Cause
) -> None:
    (found,) = read(store(*range(STRETCHES), pace=pace, again=again, drops=drops)).slow_rails
    assert found.cause == cause


@pytest.mark.parametrize("stretches", [[STRETCHES - 1], range(40), range(0, STRETCHES, 2)])
def test_a_rail_that_is_slow_now_and_then_is_not_named(stretches: list[int]) -> None:
    assert read(store(*stretches)).slow_rails == ()


def slow_rail(host: int, **changes: Any) -> SlowRail:
    one = SlowRail(
        f"host{host}", "1", "eth1", "", Cause.RAIL_SLOW, Slowness(fleets.NOW - 60.0, 12, 12, 12.0), LENGTH, 0.6
    )
    return replace(one, **changes)


def fleet(made: Fleets, *rails: SlowRail) -> Fleet:
    return replace(made.made(), slow_rails=rails)


def test_the_verdict_names_the_rail_and_its_host_by_how_much_how_often_and_since_when() -> None:
    verdict = make_verdict(fleet(Fleets(), slow_rail(1, backlog_bytes=200_000.0), slow_rail(0, pace_ratio=0.7)))
    assert verdict.problem
    (finding,) = verdict.findings
    assert (finding.cause, finding.hosts, finding.rails, finding.devices) == (
        "rail_slow",
        ("host1", "host0"),
        ("1",),
        ("eth1",),
    )
    assert finding.headline == (
        "SLOW for 60 s: rail 1 (eth1) of host1 is slow, it carries 60% of what its best sibling does while it sends "
        "(and at host0, which may be its other end)."
    )
    assert finding.evidence[0].endswith("while it sends; 200 kB waited in its queue")
    assert "so in 12 of 12 stretches of 5.0 s in which it sent, since 13:45:40 UTC, 60 s ago" in finding.evidence[1]
    assert finding.next_steps[0].command == "tc -s qdisc show dev eth1"


def test_a_slow_way_without_a_queue_at_any_end_is_told_once_with_both_ends() -> None:
    (finding,) = make_verdict(fleet(Fleets(), slow_rail(0), slow_rail(1, pace_ratio=0.7))).findings
    assert finding.headline == (
        "SLOW for 60 s: rail 1 between host0 (eth1) and host1 (eth1) is slow, it carries 60% of what its best sibling "
        "does while it sends; at which end, or where between them, is not known."
    )
    assert (finding.strength, finding.hosts, finding.devices) == ("weak", ("host0", "host1"), ("eth1",))
    assert [step.host for step in finding.next_steps if step.command.startswith("tc ")] == ["host0", "host1"]


def test_a_lossy_rail_is_said_to_lose_packets() -> None:
    lossy = slow_rail(1, cause=Cause.RAIL_LOSSY, pace_ratio=None, retransmitted_ratio=0.021)
    (finding,) = make_verdict(fleet(Fleets(), lossy)).findings
    assert finding.headline == "SLOW for 60 s: rail 1 (eth1) of host1 loses packets, 2.1% of the bytes are sent again."


def test_what_a_stall_is_told_of_is_not_told_again() -> None:
    stalled = Fleets().communicator().all_say("rail_slow", rail="1", device="eth1")
    (finding,) = make_verdict(fleet(stalled, slow_rail(1))).findings
    assert finding.headline.startswith("STALLED")


def test_a_job_that_was_killed_on_the_same_hosts_hides_no_rail() -> None:
    made = killed(0, 2).communicator(OTHER, pids=900).working(OTHER)
    (finding,) = make_verdict(fleet(made, slow_rail(1))).findings
    assert finding.cause == "rail_slow"


def test_of_one_communicator_the_rails_of_its_hosts_are_told() -> None:
    made = Fleets(4).communicator(hosts=(0, 1)).working().communicator(OTHER, hosts=(2, 3), pids=900).working(OTHER)
    assert make_verdict(fleet(made, slow_rail(1)), COMM).problem
    assert not make_verdict(fleet(made, slow_rail(1)), OTHER).problem
