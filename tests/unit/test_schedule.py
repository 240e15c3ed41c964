"""When the loop does what, and when it takes its time.  No clock: moments are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.daemon.ring_pace import UNUSED_NS
from railscope.agent.node.daemon.schedule import BRISK_NS, CALM_NS, FOLLOWED_NS, STEADY_NS, Pace, Schedule
from railscope.agent.node.stalls.watchdog import EVALUATION_NS, REST_NS

SECOND_NS = 1_000_000_000


def test_all_is_calm_when_nothing_happened_for_long_enough() -> None:
    pace = Pace(7 * SECOND_NS)
    assert not pace.is_calm(7 * SECOND_NS)
    assert not pace.is_calm(7 * SECOND_NS + STEADY_NS - 1)
    assert pace.is_calm(7 * SECOND_NS + STEADY_NS)


@given(st.lists(st.integers(0, 100 * SECOND_NS), min_size=1))
def test_whatever_happens_ends_the_calm_for_as_long_as_ever(moments: list[int]) -> None:
    pace = Pace(0)
    for at_ns in sorted(moments):
        pace.record_change(at_ns, "news")
        assert not pace.is_calm(at_ns)
        assert not pace.is_calm(at_ns + STEADY_NS - 1)
        assert pace.is_calm(at_ns + STEADY_NS)


@pytest.mark.parametrize(
    ("every_ns", "calm"), [(SECOND_NS, False), (FOLLOWED_NS // 2, False), (FOLLOWED_NS // 2 + 1, True)]
)
def test_whoever_asks_again_soon_follows_what_happens(every_ns: int, calm: bool) -> None:
    pace = Pace(0)
    for at_ns in range(0, 60 * SECOND_NS, every_ns):
        pace.record_request(at_ns)
    assert pace.is_calm(60 * SECOND_NS) is calm
    assert pace.is_calm(60 * SECOND_NS + STEADY_NS)


@pytest.mark.parametrize("every_s", [5, 15])
@pytest.mark.parametrize("apart_ns", [0, SECOND_NS, 2_500_000_000])
def test_two_servers_that_scrape_one_right_after_the_other_follow_nothing(every_s: int, apart_ns: int) -> None:
    pace = Pace(0)
    for at_ns in range(0, 60 * SECOND_NS, every_s * SECOND_NS):
        pace.record_request(at_ns)
        pace.record_request(at_ns + apart_ns)
        assert at_ns < STEADY_NS or pace.is_calm(at_ns + apart_ns)


MS = 1_000_000
SCAN_NS = 5 * SECOND_NS


def in_use(now_ns: int = 0, *, shown: bool = True) -> Schedule:
    """A loop that has begun, beside a communicator."""
    schedule = Schedule(now_ns, scan_interval_ns=SCAN_NS, shown=shown)
    schedule.begin(now_ns)
    schedule.set_in_use(now_ns, used=True)
    return schedule


def test_everything_but_a_scan_is_due_when_the_loop_begins() -> None:
    schedule = Schedule(7, scan_interval_ns=SCAN_NS)
    schedule.begin(7)
    plan = schedule.plan(drained_ns=0)
    assert (plan.drain_ns, plan.look_ns, plan.tick_ns, plan.scan_ns) == (7, 7, 7, 7 + SCAN_NS)
    assert plan.wake_ns == 7


def test_what_is_due_at_about_one_moment_is_due_at_the_later_one() -> None:
    schedule = in_use()
    schedule.tick_begins(0)
    schedule.stalls_evaluated(0, 0, BRISK_NS - 20 * MS, None)
    schedule.drained(0, BRISK_NS - 100 * MS)
    plan = schedule.plan(drained_ns=0)
    assert plan.tick_ns == plan.look_ns == plan.drain_ns == BRISK_NS


def test_rings_are_read_before_a_look_however_long_they_could_wait() -> None:
    schedule = in_use()
    schedule.tick_begins(0)
    schedule.stalls_evaluated(0, 0, 300 * MS, None)
    schedule.drained(0, 900 * MS)
    assert schedule.plan(drained_ns=0).drain_ns == 300 * MS


def test_a_look_that_has_time_goes_with_the_tick_before_it() -> None:
    schedule = in_use()
    schedule.tick_begins(0)
    schedule.stalls_evaluated(0, 0, 3 * BRISK_NS, None)
    plan = schedule.plan(drained_ns=0)
    assert plan.look_ns == plan.tick_ns == BRISK_NS


def test_ticks_rest_once_all_has_been_as_it_was_and_go_on_at_the_first_news() -> None:
    schedule = in_use()
    now_ns = STEADY_NS
    assert schedule.tick_is_due(now_ns, schedule.plan(0))
    assert schedule.tick_begins(now_ns)
    schedule.tick_ended(now_ns, None)
    assert schedule.resting
    assert schedule.plan(0).tick_ns == now_ns + CALM_NS
    soon_ns = now_ns + 10 * MS
    schedule.record_change(soon_ns, "a link has changed")
    assert not schedule.tick_is_due(soon_ns, schedule.plan(0)), "ticks are never closer than a second"
    assert not schedule.resting
    assert schedule.plan(0).tick_ns == now_ns + BRISK_NS
    assert schedule.last_change == "a link has changed"


@pytest.mark.parametrize("ends", ["nobody uses it", "it streams", "a tick found something"])
def test_ticks_do_not_rest_where_somebody_waits_for_them(ends: str) -> None:
    schedule = in_use()
    if ends == "nobody uses it":
        schedule.set_in_use(1, used=False)
    if ends == "it streams":
        schedule.keep_pace()
    schedule.tick_is_due(STEADY_NS, schedule.plan(0))
    schedule.tick_begins(STEADY_NS)
    schedule.tick_ended(STEADY_NS, "bytes do not settle" if ends == "a tick found something" else None)
    assert not schedule.resting


def test_without_a_communicator_looks_and_ticks_are_seldom_and_come_at_once_with_the_first() -> None:
    schedule = Schedule(0, scan_interval_ns=SCAN_NS)
    schedule.begin(0)
    schedule.tick_begins(0)
    schedule.stalls_evaluated(0, 0, EVALUATION_NS, None)
    assert schedule.plan(0).tick_ns == schedule.plan(0).look_ns == UNUSED_NS
    schedule.set_in_use(5 * MS, used=True)
    plan = schedule.plan(0)
    assert plan.tick_ns == plan.look_ns == plan.drain_ns == 5 * MS


def test_looks_are_no_closer_than_is_of_use_to_whoever_waits() -> None:
    for shown, least_ns in ((True, EVALUATION_NS), (False, REST_NS)):
        schedule = in_use(shown=shown)
        schedule.tick_begins(0)
        schedule.stalls_evaluated(0, 0, 1, None)
        assert schedule._next_look_ns == least_ns
        schedule.stalls_evaluated(0, 0, 10 * REST_NS, None)
        schedule.evaluate_soon(SECOND_NS)
        assert schedule._next_look_ns == SECOND_NS + least_ns


@pytest.mark.parametrize(("spent_ms", "pause_ms"), [(0, 250), (5, 250), (10, 500), (50, 2500), (500, 3000)])
def test_looks_take_a_fiftieth_of_a_core_and_none_is_put_off_for_long(spent_ms: int, pause_ms: int) -> None:
    schedule = in_use()
    schedule.tick_begins(0)
    schedule.stalls_evaluated(0, spent_ms * MS, 0, None)
    assert schedule._next_look_ns == pause_ms * MS
    assert schedule.plan(0).look_ns >= pause_ms * MS, "nor does it go with the tick before it"
    schedule.evaluate_soon(MS)
    assert schedule._next_look_ns == pause_ms * MS, "nor does news bring it forward"


@pytest.mark.parametrize(
    ("spent_ms", "shown", "heard", "pause_s"),
    [
        (10, True, True, 5),
        (100, True, True, 10),
        (100, True, False, 10),
        (100, False, False, 10),
        (100, False, True, 50),
    ],
)
def test_scans_take_less_than_a_share_of_a_core(spent_ms: int, shown: bool, heard: bool, pause_s: int) -> None:
    schedule = in_use(shown=shown)
    schedule.scan_begins(0)
    assert schedule.plan(0).scan_ns == SCAN_NS
    schedule.scanned(0, spent_ms * MS, mappings_heard=heard)
    assert schedule.plan(0).scan_ns == pause_s * SECOND_NS


def test_a_scan_that_left_processes_goes_on_after_as_long_a_pause_and_at_once_when_the_loop_begins() -> None:
    schedule = Schedule(0, scan_interval_ns=SCAN_NS)
    schedule.first_scanned(complete=False)
    schedule.begin(7)
    assert schedule.plan(0).scan_ns == 7
    schedule.scan_begins(7)
    schedule.scanned(7, 300 * MS, mappings_heard=True, complete=False)
    assert schedule.plan(0).scan_ns == 7 + 600 * MS
    schedule.scanned(SECOND_NS, 10 * MS, mappings_heard=True)
    assert schedule.plan(0).scan_ns == SECOND_NS + SCAN_NS


@given(st.integers(1, 10**10), st.integers(1, 10**10), st.integers(1, 10**10), st.integers(0, 10**9))
def test_whatever_is_due_the_loop_wakes_for_it(drain_ns: int, look_ns: int, now_ns: int, drained_ns: int) -> None:
    schedule = in_use()
    schedule.tick_begins(0)
    schedule.drained(0, drain_ns)
    schedule.stalls_evaluated(0, 0, look_ns, None)
    plan = schedule.plan(min(drained_ns, drain_ns))
    assert plan.wake_ns <= min(plan.drain_ns, plan.look_ns, plan.tick_ns, plan.scan_ns)
    assert plan.tick_ns >= BRISK_NS, "a tick never comes early"
    assert plan.drain_ns <= plan.look_ns
    schedule.drain_now(now_ns, drained_ns=0)
    assert schedule.plan(0).drain_ns <= 0
