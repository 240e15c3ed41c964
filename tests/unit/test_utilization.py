"""How busy links are (simulated readings)."""

from __future__ import annotations

import pytest

from railscope.agent.node.sampling.utilization import Utilization

SECOND = 1_000_000_000


def test_a_link_that_carries_half_its_speed_is_half_utilised_however_often_it_is_read() -> None:
    often, seldom = Utilization(30 * SECOND), Utilization(30 * SECOND)
    for tenth in range(601):
        often.record("link", tenth * SECOND // 10, tenth * 50, tenth * 25)
        if tenth % 50 == 0:
            seldom.record("link", tenth * SECOND // 10, tenth * 50, tenth * 25)
    assert often.ratios_of("link", 1000) == pytest.approx((0.5, 0.25))
    assert seldom.ratios_of("link", 1000) == pytest.approx((0.5, 0.25))


def test_only_the_window_counts() -> None:
    one = Utilization(10 * SECOND)
    for second in range(100):
        one.record("link", second * SECOND, min(second, 50) * 1000, 0)
    assert one.ratios_of("link", 1000) == (0.0, 0.0)


def test_without_a_speed_or_two_readings_nothing_is_known() -> None:
    one = Utilization(10 * SECOND)
    assert one.ratios_of("link", 1000) == (None, None)
    one.record("link", SECOND, 0, 0)
    one.record("link", SECOND, 9, 9)
    assert one.ratios_of("link", 1000) == (None, None)
    one.record("link", 2 * SECOND, 9, 9)
    assert one.ratios_of("link", None) == one.ratios_of("link", 0) == (None, None)


def test_counters_that_begin_anew_begin_a_new_window() -> None:
    one = Utilization(10 * SECOND)
    one.record("link", SECOND, 10**9, 10**9)
    one.record("link", 2 * SECOND, 5, 5)
    assert one.ratios_of("link", 1000) == (None, None)
    one.record("link", 3 * SECOND, 505, 5)
    assert one.ratios_of("link", 1000) == (0.5, 0.0)


def test_links_that_have_gone_are_forgotten() -> None:
    one = Utilization(10 * SECOND)
    for second in range(3):
        one.record("gone", second * SECOND, second, second)
        one.record("here", second * SECOND, second, second)
    one.forget_others(["here"])
    assert one.ratios_of("gone", 1) == (None, None)
    assert one.ratios_of("here", 1) == (1.0, 1.0)
