"""When the agent takes its time. No clock: moments are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.daemon.tick_pace import FOLLOWED_NS, STEADY_NS, Pace

SECOND_NS = 1_000_000_000


def test_all_is_calm_when_nothing_happened_for_long_enough() -> None:
    pace = Pace(7 * SECOND_NS)
    assert not pace.calm(7 * SECOND_NS)
    assert not pace.calm(7 * SECOND_NS + STEADY_NS - 1)
    assert pace.calm(7 * SECOND_NS + STEADY_NS)


@given(st.lists(st.integers(0, 100 * SECOND_NS), min_size=1))
def test_whatever_happens_ends_the_calm_for_as_long_as_ever(moments: list[int]) -> None:
    pace = Pace(0)
    for at_ns in sorted(moments):
        pace.disturb(at_ns, "news")
        assert not pace.calm(at_ns)
        assert not pace.calm(at_ns + STEADY_NS - 1)
        assert pace.calm(at_ns + STEADY_NS)


@pytest.mark.parametrize(
    ("every_ns", "calm"), [(SECOND_NS, False), (FOLLOWED_NS // 2, False), (FOLLOWED_NS // 2 + 1, True)]
)
def test_whoever_asks_again_soon_follows_what_happens(every_ns: int, calm: bool) -> None:
    pace = Pace(0)
    for at_ns in range(0, 60 * SECOND_NS, every_ns):
        pace.asked(at_ns)
    assert pace.calm(60 * SECOND_NS) is calm
    assert pace.calm(60 * SECOND_NS + STEADY_NS)


@pytest.mark.parametrize("every_s", [5, 15])
@pytest.mark.parametrize("apart_ns", [0, SECOND_NS, 2_500_000_000])
def test_two_servers_that_scrape_one_right_after_the_other_follow_nothing(every_s: int, apart_ns: int) -> None:
    pace = Pace(0)
    for at_ns in range(0, 60 * SECOND_NS, every_s * SECOND_NS):
        pace.asked(at_ns)
        pace.asked(at_ns + apart_ns)
        assert at_ns < STEADY_NS or pace.calm(at_ns + apart_ns)
