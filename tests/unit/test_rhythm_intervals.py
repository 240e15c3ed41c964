"""Unions of intervals, against counting every moment by itself."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.rhythm.intervals import Intervals, union

Pairs = list[tuple[int, int]]
PAIRS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(-3, 20)).map(lambda one: (one[0], one[0] + one[1])), max_size=12
)


def made(pairs: Pairs) -> Intervals:
    return union(np.array([one[0] for one in pairs], np.int64), np.array([one[1] for one in pairs], np.int64))


def moments(pairs: Pairs) -> set[int]:
    return {moment for begin, end in pairs for moment in range(begin, end)}


def moments_of(intervals: Intervals) -> set[int]:
    return moments(list(zip(intervals.begin_ns.tolist(), intervals.end_ns.tolist(), strict=True)))


@given(pairs=PAIRS, windows=st.lists(st.tuples(st.integers(-5, 90), st.integers(0, 40)), max_size=5))
@settings(max_examples=200, deadline=None)
def test_a_union_covers_each_moment_once(pairs: Pairs, windows: Pairs) -> None:
    found = made(pairs)
    covered = moments(pairs)
    assert moments_of(found) == covered
    assert found.length_ns == len(covered) <= sum(max(0, end - begin) for begin, end in pairs)
    low = np.array([window[0] for window in windows], np.int64)
    high = low + np.array([window[1] for window in windows], np.int64)
    inside = [len(covered & set(range(begin, end))) for begin, end in zip(low.tolist(), high.tolist(), strict=True)]
    assert found.length_in(low, high).tolist() == inside


@given(one=PAIRS, other=PAIRS)
@settings(max_examples=200, deadline=None)
def test_what_both_cover_and_what_one_covers_alone_make_the_whole(one: Pairs, other: Pairs) -> None:
    first, second = made(one), made(other)
    assert moments_of(first.intersection(second)) == moments(one) & moments(other)
    assert moments_of(first.difference(second)) == moments(one) - moments(other)


@given(pairs=PAIRS, seed=st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_the_order_of_intervals_makes_no_difference(pairs: Pairs, seed: object) -> None:
    shuffled = list(pairs)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    assert moments_of(made(shuffled)) == moments_of(made(pairs))


def test_short_gaps_are_bridged_and_long_ones_stay() -> None:
    bridged = made([(0, 10), (12, 20), (25, 30)]).fill_gaps(5)
    assert bridged.begin_ns.tolist() == [0, 25]
    assert bridged.end_ns.tolist() == [20, 30]
