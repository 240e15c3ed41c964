"""What is usual, the most and the mean of a counter, from points as they are scraped: short, long, with oddities."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.cluster.fleet.history import Points, highest_rate, increase, mean_rate, spans, usual_rate

SCRAPES = pytest.mark.parametrize(
    ("interval", "history"), [(1.0, 12.0), (1.0, 600.0), (15.0, 60.0), (15.0, 600.0), (60.0, 300.0)]
)


def scraped(value_at: Callable[[float], float], seconds: float, interval: float = 1.0, first: float = 0.4) -> Points:
    """A counter that is `value_at` the seconds since it began."""
    times = [first + interval * number for number in range(int((seconds - first) / interval) + 1)]
    return [(t, float(int(value_at(t)))) for t in times]


def steady(pace: float, until: float) -> Callable[[float], float]:
    return lambda t: 1 + pace * min(t, until)


@SCRAPES
@pytest.mark.parametrize("stands", [0.0, 3.0, 90.0])
def test_a_steady_rank_made_its_calls_however_long_it_was_watched(
    interval: float, history: float, stands: float
) -> None:
    points = scraped(steady(10.0, history), history + stands, interval)
    assert usual_rate(points) == pytest.approx(10.0, rel=0.03)


@SCRAPES
def test_one_jump_of_the_counter_is_not_its_pace(interval: float, history: float) -> None:
    points = scraped(steady(10.0, history), history + 3, interval)
    middle = len(points) // 2
    jumped = [(t, value + (50_000 if number >= middle else 0)) for number, (t, value) in enumerate(points)]
    assert usual_rate(jumped) == pytest.approx(10.0, rel=0.03)


def test_a_pause_and_the_end_of_the_history_do_not_make_it_slower() -> None:
    # Two minutes of a checkpoint in the middle of five.
    points = scraped(lambda t: 10 * (min(t, 60) + max(0.0, min(t, 250) - 180)), 300)
    assert usual_rate(points) == pytest.approx(10.0, rel=0.1)


def test_what_a_job_does_in_bursts_counts_with_the_time_between_them() -> None:
    # Twenty a second for five seconds, nothing for five.
    points = scraped(lambda t: 100 * (t // 10) + 20 * min(t % 10, 5), 300)
    assert usual_rate(points) == pytest.approx(10.0, rel=0.15)


def test_what_was_before_the_first_stall_counts_if_anything_was() -> None:
    # Ten a second, and one a second since a rail became slow: most of the history.
    points = scraped(lambda t: 10 * min(t, 60) + max(0.0, t - 60), 300)
    assert usual_rate(points) == pytest.approx(1.0, rel=0.1)
    assert usual_rate(points, before=62.0) == pytest.approx(10.0, rel=0.1)
    assert usual_rate(points, before=-1.0) == usual_rate(points)


def test_a_counter_that_started_anew_shows_its_pace_on_both_sides() -> None:
    points = scraped(lambda t: 10 * t if t < 20 else 10 * (t - 20), 60)
    assert usual_rate(points) == pytest.approx(10.0)
    assert mean_rate(points) == pytest.approx(10.0, rel=0.01)
    assert highest_rate(points, 5) == pytest.approx(10.0, rel=0.03)
    assert increase(points, known_since=None) == pytest.approx(10 * 59, abs=11)


@pytest.mark.parametrize("points", [(), ((0.0, 5.0),), ((0.0, 5.0), (1.0, 5.0), (2.0, 5.0))])
def test_where_it_never_advanced_nothing_is_usual(points: Points) -> None:
    assert usual_rate(points) is None
    assert mean_rate(points) in (None, 0.0)


def test_the_most_is_found_wherever_the_stall_cuts_it_off() -> None:
    for until in (6.0, 7.3, 11.9, 40.0):
        points = scraped(steady(1e8, until), until + 20)
        assert highest_rate(points, 5) == pytest.approx(1e8, rel=1e-6)
    # Of less history than a rate is taken over, all of it counts.
    assert highest_rate(scraped(steady(1e8, 9.0), 3), 5) == pytest.approx(1e8, rel=1e-6)
    assert highest_rate(scraped(steady(1e8, 90.0), 90, 15.0), 60) == pytest.approx(1e8, rel=1e-6)
    assert highest_rate((), 5) is None


def test_a_port_that_jumps_beyond_its_speed_did_not_send_that_much() -> None:
    points = [(t, value + (1e13 if t > 30 else 0)) for t, value in scraped(steady(1e8, 60), 60)]
    assert highest_rate(points, 5, speed=1.25e9) == pytest.approx(1e8)
    # A virtual port is faster than it says, all the time.
    assert highest_rate(scraped(steady(1e10, 60), 60), 5, speed=1.25e9) == pytest.approx(1e10)


def test_a_counter_that_appeared_while_its_host_was_heard_began_at_0() -> None:
    appeared = ((10.0, 2.5), (11.0, 3.5))
    assert increase(appeared, known_since=1.0) == 3.5
    assert increase(appeared, known_since=10.0) == 1.0
    assert increase(appeared, known_since=None) == 1.0
    assert increase((), known_since=1.0) == 0.0


def test_moments_that_follow_each_other_are_one_span() -> None:
    assert spans([5.0, 1.0, 2.0, 3.0, 9.0], 1.5) == [(1.0, 3.0), (5.0, 5.0), (9.0, 9.0)]
    assert spans([], 1.5) == []


@given(
    pace=st.integers(1, 10_000),
    scrapes=st.integers(6, 300),
    phase=st.floats(0, 1),
    stands=st.integers(0, 30),
    jump=st.none() | st.integers(1, 5),
)
def test_whatever_the_phase_of_scrapes_the_pace_is_found(
    pace: int, scrapes: int, phase: float, stands: int, jump: int | None
) -> None:
    points = [(phase + t, pace * (phase + min(t, scrapes))) for t in range(scrapes + stands)]
    if jump is not None:
        points = [(t, value + (1e9 if index >= jump else 0)) for index, (t, value) in enumerate(points)]
    assert usual_rate(points) == pytest.approx(pace)
