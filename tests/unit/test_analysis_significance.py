"""Whether a difference is chance: rank tests, means of few, and many figures at once."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.compare.significance import (
    LEVEL,
    _approximate_p,
    _doubled_ranks,
    _exact_p,
    _student_p,
    adjusted,
    mean_test,
    rank_test,
)


def brute_force(a: list[int], b: list[int]) -> float:
    """Of all ways to choose A's values, the part whose rank sum is as far from the mean."""
    pooled = a + b
    ranks = [sum(other < value for other in pooled) + (pooled.count(value) + 1) / 2 for value in pooled]
    mean = len(a) * (len(pooled) + 1) / 2
    seen = abs(sum(ranks[: len(a)]) - mean)
    sums = [abs(sum(chosen) - mean) for chosen in combinations(ranks, len(a))]
    return sum(one >= seen - 1e-9 for one in sums) / len(sums)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 6), min_size=4, max_size=6),
    st.lists(st.integers(0, 6), min_size=4, max_size=6),
)
def test_the_exact_test_counts_all_arrangements(a: list[int], b: list[int]) -> None:
    test = rank_test(a, b)
    assert test is not None
    assert test.p == pytest.approx(brute_force(a, b))


def test_a_published_example() -> None:
    # Hollander and Wolfe, Nonparametric Statistical Methods, table 4.1 (permeability of chorioamnion): W = 30 of
    # n = 5 against 10, two-sided p = 0.2544.
    term = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46]
    early = [1.15, 0.88, 0.90, 0.74, 1.21]
    test = rank_test(early, term)
    assert test is not None
    assert test.p == pytest.approx(0.2544, abs=0.00005)


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 300), min_size=20, max_size=20, unique=True),
    st.lists(st.integers(0, 300), min_size=20, max_size=20, unique=True),
)
def test_the_approximation_is_near_the_exact_test(a: list[int], b: list[int]) -> None:
    doubled, ties = _doubled_ranks(np.array(a + b, dtype=float))
    rank_sum = int(doubled[:20].sum())
    exact = _exact_p(doubled, 20, rank_sum)
    assert _approximate_p(rank_sum / 2 - 210, 20, 20, ties) == pytest.approx(exact, abs=0.01)


@settings(max_examples=60)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=60),
    st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=60),
)
def test_the_test_is_symmetric_and_looks_at_order_only(a: list[float], b: list[float]) -> None:
    there, back = rank_test(a, b), rank_test(b, a)
    assert there is not None
    assert back is not None
    assert 0 < there.p <= 1
    assert there.p == pytest.approx(back.p)
    assert there.b_is_larger == pytest.approx(1 - back.b_is_larger)
    stretched = rank_test([3 * value for value in a], [3 * value for value in b])
    assert stretched is not None
    assert stretched.p == there.p or len({*a, *b}) != len({3 * value for value in (*a, *b)})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 1000), min_size=4, max_size=18, unique=True),
    st.lists(st.integers(0, 1000), min_size=4, max_size=18, unique=True),
)
def test_without_ties_the_exact_test_is_scipys(a: list[int], b: list[int]) -> None:
    apart = [value + 0.5 for value in b]
    test = rank_test(a, apart)
    assert test is not None
    assert test.p == pytest.approx(scipy.stats.mannwhitneyu(a, apart, method="exact").pvalue)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=21, max_size=60),
    st.lists(st.integers(3, 33), min_size=21, max_size=60),
)
def test_the_test_of_many_values_is_scipys_with_ties(a: list[int], b: list[int]) -> None:
    test = rank_test(a, b)
    assert test is not None
    reference = scipy.stats.mannwhitneyu(a, b, method="asymptotic")
    assert test.p == pytest.approx(reference.pvalue)
    assert test.b_is_larger == pytest.approx(1 - reference.statistic / (len(a) * len(b)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 1000), min_size=2, max_size=9, unique=True),
    st.lists(st.integers(0, 1000), min_size=2, max_size=9, unique=True),
)
def test_the_test_of_means_is_scipys_of_unequal_variances(a: list[int], b: list[int]) -> None:
    test = mean_test(a, b)
    assert test is not None
    assert test.p == pytest.approx(scipy.stats.ttest_ind(a, b, equal_var=False).pvalue)


def test_equal_values_never_differ() -> None:
    for count in (5, 50):
        test = rank_test([7.0] * count, [7.0] * count)
        assert test is not None
        assert (test.p, test.b_is_larger) == (1.0, 0.5)


def test_clearly_apart_is_significant_and_three_values_are_not_enough() -> None:
    test = rank_test(range(10), range(100, 110))
    assert test is not None
    assert test.p < LEVEL
    assert test.b_is_larger == 1.0
    assert rank_test([1, 2, 3], range(100)) is None


def test_holms_procedure() -> None:
    # Holm 1979: the smallest times 3, the next times 2, the last times 1, never falling.
    assert adjusted([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjusted([0.5, 0.9]) == [1.0, 1.0]
    assert adjusted([]) == []


def test_a_single_recording_is_held_against_the_spread_of_the_others() -> None:
    few = mean_test([10.0, 10.2, 9.9, 10.1], [12.0])
    assert few is not None
    # t = 1.95 / (0.12910 × √(1 + 1/4)) with three degrees of freedom.
    assert few.p == pytest.approx(0.00088, abs=1e-5)
    assert few.b_is_larger == 1.0
    assert mean_test([1.0], [2.0]) is None
    assert mean_test([1.0, 1.0], [2.0, 2.0]) is None


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [(12.706, 1, 0.05), (2.571, 5, 0.05), (4.032, 5, 0.01), (1.960, 1e6, 0.05), (0.0, 3, 1.0), (0.7649, 3, 0.5)],
)
def test_students_distribution_is_that_of_the_tables(t: float, freedom: float, p: float) -> None:
    assert _student_p(t, freedom) == pytest.approx(p, rel=2e-3)
    assert _student_p(-t, freedom) == _student_p(t, freedom)


def test_a_published_example_of_two_means() -> None:
    # Hours of sleep gained (Student, Biometrika 6, 1908); Welch's test of them: t = −1.8608, ν = 17.776, p = 0.07939.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = mean_test(first, second)
    assert found is not None
    assert found.p == pytest.approx(0.07939, abs=1e-5)
