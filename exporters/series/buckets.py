"""Reduces the buckets of a histogram unless all are selected.

The agent counts in more buckets than a fleet's Prometheus should store: a series each, for every operation or rail of
every node.  So some bounds are left out, and what lay below them is counted below the next one.  Which ones is decided
once and for all hosts, never by what was counted: Prometheus adds buckets of many series by their bound, and where one
series has a bound that another has not, the sum is wrong.  For the same reason the bounds of rates are absolute speeds
and not shares of what each rail can do.

Kept is the finest step where people look, and coarse steps beyond:

* sizes: every power of two from 1 KiB to 8 GiB, where the choice of an algorithm turns;
* durations: every power of two from 8 µs to 9 s, then up to 2 minutes, where operations are given up;
* bus bandwidths: every power of two from 1 MB/s to 1 TB/s;
* host time in calls: every second power of two, as it is sampled and nothing is decided by it;
* rates of rails: decades up to 10 Gb/s, then every speed that links have, so that a burst at line rate differs from
  one below it.

Native histograms are made of all buckets (exporters/series/native.py), whatever is shown here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import Metric
from railscope.agent.facts.histogram import Exemplar, Histogram

_NANOSECONDS: Final = 1e9
_MEGABIT_BYTES: Final = 125_000.0


def _powers(*exponents: int, unit: float = 1.0) -> frozenset[float]:
    return frozenset((1 << exponent) / unit for exponent in exponents)


LEFT_OUT: Final[Mapping[str, frozenset[float]]] = {
    catalogue.COLLECTIVE_SIZE_BYTES.name: _powers(0, 1, 2, 3, 5, 6, 8, 9, 34, 35, 37, 38, 39),
    catalogue.COLLECTIVE_DURATION_SECONDS.name: _powers(10, 12, 34, 36, 38, 39, 40, unit=_NANOSECONDS),
    catalogue.COLLECTIVE_BUS_BANDWIDTH.name: _powers(*range(16, 20), *range(41, 47)),
    catalogue.COLLECTIVE_ENQUEUE_SECONDS.name: _powers(7, *range(8, 36, 2), 35, 36, 37, unit=_NANOSECONDS),
    catalogue.RAIL_RATE.name: frozenset(
        megabits * _MEGABIT_BYTES for megabits in (1, 2.5, 5, 25, 50, 250, 500, 2_500, 5_000)
    ),
}
"""By metric: bounds that are not shown."""


@dataclass(frozen=True, slots=True)
class Merged(Histogram):
    """What is shown of a histogram, and what it was made of."""

    counted: Histogram | None = None


def reduce_buckets(metric: Metric, histogram: Histogram) -> Histogram:
    """The histogram without the bounds that are left out: every other bucket, the count and the sum stay."""
    bounds, ends = _kept(histogram.bounds, LEFT_OUT.get(metric.name, frozenset()))
    if len(bounds) == len(histogram.bounds):
        return histogram
    parts = list(pairwise((0, *ends)))
    return Merged(
        bounds,
        tuple(sum(histogram.counts[begin:end]) for begin, end in parts),
        histogram.sum,
        tuple(_latest(histogram.exemplars[begin:end]) for begin, end in parts) if histogram.exemplars else (),
        counted=histogram,
    )


def full_histogram(histogram: Histogram) -> Histogram:
    """A histogram as it was counted, if that is what is shown of it."""
    return histogram.counted or histogram if isinstance(histogram, Merged) else histogram


@lru_cache(maxsize=64)
def _kept(bounds: tuple[float, ...], left_out: frozenset[float]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The bounds that are shown, and for each bucket where the counts that it holds end."""
    places = [place for place, bound in enumerate(bounds) if bound not in left_out]
    return tuple(bounds[place] for place in places), (*(place + 1 for place in places), len(bounds) + 1)


def _latest(exemplars: tuple[Exemplar | None, ...]) -> Exemplar | None:
    return max((one for one in exemplars if one is not None), key=lambda one: one.realtime_ns, default=None)
