"""Whether two sets of measured values differ by more than chance: the rank-sum test.

Times of iterations and operations are skewed and have outliers, so ranks are compared and not means: the test of
Wilcoxon (1945) and of Mann and Whitney (Annals of Mathematical Statistics 18, 1947), two-sided, ties sharing their mean
rank.  Up to 40 values in all, p is exact: of all ways to choose which of the values are A's, the part whose rank sum is
at least as far from its mean.  Beyond, it is the normal approximation with the correction for ties and for continuity
(Lehmann, *Nonparametrics*, 1975, sections 1.2 and 1.4).

Of many figures that are tested at once some differ by chance; p is therefore adjusted by Holm's step-down procedure
(Scandinavian Journal of Statistics 6, 1979).

What it does not know: values that depend on the one before (a slow minute makes a hundred slow iterations) look surer
than they are.  Operations are therefore not tested one by one: what is tested are medians of stretches of time.  And
values of one run say nothing of how much another run would differ, on other machines or in another hour.

Where runs were repeated, each gives one value, and these are few: Student's t-test of their means, with each side's own
spread (Welch, Biometrika 34, 1947); of a side with a single run, with the other side's.  scipy computes its tail.

The rank test is not scipy's, which tests hold it against: scipy's exact p knows no ties, and what it gives instead is
off by up to 0.2 for sides of four to six values; loading `scipy.stats` takes 0.45 s and 73 MiB, more than all else of
`railscope compare`; and a test of two sides of 200 values takes 0.8 ms there and 0.03 ms here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LEVEL: Final = 0.01
"""A difference is called significant if chance makes one as large less often than this."""
_MOST_EXACT: Final = 40
FEWEST: Final = 4
"""Values of a side; with fewer on both sides nothing can be significant."""


@dataclass(frozen=True, slots=True)
class ChanceTest:
    """How surely two sets differ."""

    a_count: int
    b_count: int
    p: float
    """How often chance alone makes a difference at least so large."""
    b_is_larger: float
    """How often a value of B is larger than one of A, equal ones counting half: 0 to 1."""


def rank_test(a: Sequence[float] | NDArray[Any], b: Sequence[float] | NDArray[Any]) -> ChanceTest | None:
    """Test two sets of values; None: one of them has fewer than `FEWEST`."""
    first, second = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    n, m = len(first), len(second)
    if min(n, m) < FEWEST:
        return None
    doubled, ties = _doubled_ranks(np.concatenate([first, second]))
    rank_sum = int(doubled[:n].sum())
    # U of A: pairs in which A's value is larger, equal ones counting half.
    u = rank_sum / 2 - n * (n + 1) / 2
    p = _exact_p(doubled, n, rank_sum) if n + m <= _MOST_EXACT else _approximate_p(u, n, m, ties)
    return ChanceTest(n, m, p, 1 - u / (n * m))


def mean_test(a: Sequence[float] | NDArray[Any], b: Sequence[float] | NDArray[Any]) -> ChanceTest | None:
    """Test the means of two sets; None: neither of them has two values, or none of them varies."""
    first, second = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    n, m = len(first), len(second)
    if min(n, m) < 1 or max(n, m) < 2:
        return None
    spreads = [float(values.var(ddof=1)) if len(values) > 1 else None for values in (first, second)]
    known = [spread for spread in spreads if spread is not None]
    in_a, in_b = ((known[0] if spread is None else spread) / many for spread, many in zip(spreads, (n, m), strict=True))
    if in_a + in_b <= 0:
        return None
    freedom = (in_a + in_b) ** 2 / (in_a**2 / (n - 1) + in_b**2 / (m - 1)) if min(n, m) > 1 else max(n, m) - 1.0
    t = (float(second.mean()) - float(first.mean())) / math.sqrt(in_a + in_b)
    larger = np.sign(second[:, None] - first[None, :])
    return ChanceTest(n, m, _student_p(t, freedom), float((larger.mean() + 1) / 2))


def _student_p(t: float, freedom: float) -> float:
    """How often |t| is at least so large by chance."""
    # 100 ms and 26 MiB, and only comparisons of repeated runs need it.
    from scipy.special import stdtr

    return 2 * float(stdtr(freedom, -abs(t)))


def adjusted(values: Sequence[float]) -> list[float]:
    """p of figures that were tested together, in the same order, by Holm's procedure."""
    result = [1.0] * len(values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(values)), key=lambda index: values[index])):
        largest = max(largest, min(1.0, (len(values) - place) * values[index]))
        result[index] = largest
    return result


def _doubled_ranks(values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Twice the rank of each value, which is whole also where ties share their mean; and how many each tie has."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    doubled_of_place = 2 * last - counts + 1
    return doubled_of_place[places].astype(np.int64), counts.astype(np.int64)


def _exact_p(doubled: NDArray[np.int64], n: int, rank_sum: int) -> float:
    total = int(doubled.sum())
    # ways[k, s]: in how many ways k of the values seen so far have the doubled rank sum s.
    ways = np.zeros((n + 1, total + 1), dtype=np.int64)
    ways[0, 0] = 1
    for rank in doubled.tolist():
        ways[1:, rank:] += ways[:-1, : total + 1 - rank].copy()
    # |s − mean| with mean = n·total/N, times N, so that everything stays whole.
    count = len(doubled)
    distance = np.abs(count * np.arange(total + 1) - n * total)
    as_far = distance >= abs(count * rank_sum - n * total)
    return float(ways[n, as_far].sum() / ways[n].sum())


def _approximate_p(u: float, n: int, m: int, ties: NDArray[np.int64]) -> float:
    count = n + m
    tied = float((ties.astype(float) ** 3 - ties).sum())
    variance = n * m / 12 * (count + 1 - tied / (count * (count - 1)))
    if variance <= 0:
        return 1.0
    distance = max(abs(u - n * m / 2) - 0.5, 0.0)
    return min(1.0, math.erfc(distance / math.sqrt(2 * variance)))
