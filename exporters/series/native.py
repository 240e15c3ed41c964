"""Converts histograms to Prometheus' native histograms if their buckets match.

A native histogram of schema 0 has a bucket between each two powers of two.  Of our histograms those of bytes and of
bytes per second have exactly these, so what is exported is what was counted.  Those of times have not: the kernel
counts powers of two of nanoseconds, and a second is no power of two of them, so every bound lies 7 % beside one of the
native ones; and rates have the round numbers of link speeds.  A finer schema does not help: its bounds are roots of
powers of two, which 2^k/10^9 never is.  Nor could the kernel count by native bounds: it finds a bucket by the highest
bit of a number of nanoseconds, in one instruction.  Counts cannot be moved between buckets without inventing something,
so these stay classic.

A Prometheus that takes native histograms leaves their classic buckets away, so queries must ask for both
(dashboards/job.py).

Source: https://prometheus.io/docs/specs/native_histograms/.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.histogram import Histogram

METRICS: Final = frozenset({catalogue.COLLECTIVE_SIZE_BYTES, catalogue.COLLECTIVE_BUS_BANDWIDTH})
"""Those that come as native histograms where these are asked for."""


@dataclass(frozen=True, slots=True)
class NativeHistogram:
    """Buckets of schema 0, bounds powers of two: bucket k holds what lies above 2^(k-1), up to and including 2^k."""

    zero_threshold: float
    """What lies from 0 to here, this included, is not told apart."""
    zero_count: int
    offset: int
    """Number of the first bucket that `counts` has."""
    counts: tuple[int, ...]
    """Without empty ones at either end."""


def to_native(histogram: Histogram) -> NativeHistogram | None:
    """The counts of a classic histogram as a native one; None: that would not be the same.

    It would not where bounds are no powers of two, where something lies above all of them, since native buckets have
    no open end, and where the sum is not known.
    """
    first = _first_power(histogram.bounds)
    if first is None or histogram.counts[-1] or histogram.sum is None:
        return None
    counts = histogram.counts[1:-1]
    filled = [at for at, count in enumerate(counts) if count]
    begin, end = (filled[0], filled[-1] + 1) if filled else (0, 0)
    return NativeHistogram(histogram.bounds[0], histogram.counts[0], first + 1 + begin, counts[begin:end])


@lru_cache(maxsize=64)
def _first_power(bounds: tuple[float, ...]) -> int | None:
    """n where the bounds are 2^n, 2^(n+1), …; None: they are not."""
    if not bounds:
        return None
    fraction, exponent = math.frexp(bounds[0])
    if fraction != 0.5 or any(bound != math.ldexp(bounds[0], at) for at, bound in enumerate(bounds)):
        return None
    return exponent - 1
