"""How late the loop is said to be.  The clock is simulated."""

from __future__ import annotations

from railscope.agent.facts.snapshot import LoopFacts
from railscope.agent.node.daemon.loop_lateness import LoopLateness
from tests.unit.stall_world import SimulatedClock

SECOND_NS = 1_000_000_000


class Loop:
    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.lateness = LoopLateness(self.clock)
        self.lateness.begin()

    def turn(self, waits: float, late: float = 0.0, takes: float = 0.0) -> None:
        """Wait so many seconds, wake so much later, and work for a while."""
        self.lateness.wait(self.clock.now_ns + round(waits * SECOND_NS))
        self.pass_seconds(waits + late)
        self.lateness.wake()
        self.pass_seconds(takes)

    def pass_seconds(self, seconds: float) -> None:
        self.clock.now_ns += round(seconds * SECOND_NS)

    @property
    def facts(self) -> LoopFacts:
        return self.lateness.facts()


def test_a_loop_that_waits_as_it_should_is_never_late() -> None:
    loop = Loop()
    for _ in range(100):
        loop.turn(waits=4)
    loop.turn(waits=4, late=-3)
    assert loop.facts == LoopFacts(0.0, 0.0)


def test_late_is_who_wakes_late_and_who_works_long() -> None:
    loop = Loop()
    loop.turn(waits=1, late=0.25)
    assert loop.facts == LoopFacts(0.25, 0.25)
    loop.turn(waits=1, takes=0.75)
    loop.turn(waits=1)
    assert loop.facts == LoopFacts(0.75, 0.75)


def test_what_was_due_long_ago_is_not_late_before_the_loop_could_wait() -> None:
    loop = Loop()
    loop.turn(waits=1)
    loop.turn(waits=-30)  # "now, and before all else"
    loop.turn(waits=1)
    assert loop.facts == LoopFacts(0.0, 0.0)


def test_a_turn_that_goes_on_and_a_wait_that_does_not_end_count_already() -> None:
    loop = Loop()
    loop.turn(waits=1)
    loop.pass_seconds(5)
    assert loop.facts.late_seconds == 5
    assert loop.lateness.now_ns == 5 * SECOND_NS
    loop.lateness.wait(loop.clock.now_ns + SECOND_NS)
    loop.pass_seconds(1)
    assert loop.lateness.now_ns == 0
    loop.pass_seconds(7)
    assert loop.facts == LoopFacts(7.0, 7.0)


def test_the_longest_ever_stays_and_the_recent_one_falls_after_five_minutes() -> None:
    loop = Loop()
    loop.turn(waits=1, takes=3)
    recent = []
    for _ in range(360):
        loop.turn(waits=1)
        recent.append(loop.facts.late_recent_seconds)
        assert loop.facts.late_seconds == 3
    # To a minute's grain.
    assert set(recent[:240]) == {3.0}
    assert set(recent[300:]) == {0.0}


def test_before_the_loop_begins_nothing_is_late_but_health_goes_by_it() -> None:
    clock = SimulatedClock()
    lateness = LoopLateness(clock)
    clock.now_ns += 31 * SECOND_NS
    assert lateness.facts() == LoopFacts(0.0, 0.0)
    assert lateness.now_ns == 31 * SECOND_NS
    lateness.begin()
    assert lateness.now_ns == 0
