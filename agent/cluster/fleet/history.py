"""Computes the usual, maximum and mean rate of a counter from its raw points.

Points are (seconds since the Unix epoch, value) as they were scraped.  A rate is only ever taken between two points
that are there, so a short history, or the end of it in a stall, does not make it lower; where a counter starts anew
nothing is known of that interval, and it is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

Points = Sequence[tuple[float, float]]

_STRETCHES: Final = 9
"""So many at most, so that one odd stretch is no matter and each is longer than what a job does again and again."""
_FASTEST: Final = 2.0
"""More than so many times a port's speed is a counter that jumped, and no traffic."""


@dataclass(frozen=True, slots=True)
class _Interval:
    """Between two points."""

    seconds: float
    increase: float


def usual_rate(points: Points, before: float | None = None) -> float | None:
    """How fast a counter of the store usually advances, per second, until it advances no more; None: it never did.

    The time until its last advance is cut into nine stretches of as many scrapes; the median counts of those in which
    it advanced.  So neither one jump nor a pause matters.  `before`: only what was before this moment counts, if it
    advanced then.
    """
    if before is not None:
        early = usual_rate([point for point in points if point[0] <= before])
        if early is not None:
            return early
    intervals = _intervals(points)
    while intervals and not intervals[-1].increase:
        intervals.pop()
    count = min(_STRETCHES, len(intervals))
    stretches = [
        intervals[len(intervals) * number // count : len(intervals) * (number + 1) // count] for number in range(count)
    ]
    rates = [rate for stretch in stretches if (rate := _rate(stretch))]
    return median(rates) if rates else None


def highest_rate(points: Points, over_seconds: float, speed: float | None = None) -> float | None:
    """The fastest that a counter advanced for so long, or for as long as it is known; None: that is not at all.

    `speed`: what it cannot exceed by much.
    """
    intervals = _intervals(points)
    rates = []
    first, seconds, increase = 0, 0.0, 0.0
    for interval in intervals:
        seconds += interval.seconds
        increase += interval.increase
        while seconds - intervals[first].seconds >= over_seconds:
            seconds -= intervals[first].seconds
            increase -= intervals[first].increase
            first += 1
        if seconds >= over_seconds:
            rates.append(increase / seconds)
    rates = rates or ([increase / seconds] if seconds else [])
    possible = [rate for rate in rates if speed is None or rate <= _FASTEST * speed]
    return max(possible or rates, default=None)


def mean_rate(points: Points) -> float | None:
    """How fast a counter of the store advanced over all the time that is known; None: there is none."""
    return _rate(_intervals(points))


def increase(points: Points, known_since: float | None) -> float:
    """By how much a counter of the store rose between two moments.

    `known_since`: when its host was first heard; a counter that appeared later began at 0.
    """
    began = points[0][1] if points and known_since is not None and known_since < points[0][0] else 0.0
    return began + sum(interval.increase for interval in _intervals(points))


def spans(times: Collection[float], gap_seconds: float) -> list[tuple[float, float]]:
    """First and last of moments that follow each other within `gap_seconds`, for each row of such moments."""
    found: list[tuple[float, float]] = []
    for t in sorted(times):
        if found and t - found[-1][1] <= gap_seconds:
            found[-1] = found[-1][0], t
        else:
            found.append((t, t))
    return found


def _rate(intervals: Sequence[_Interval]) -> float | None:
    seconds = sum(interval.seconds for interval in intervals)
    return sum(interval.increase for interval in intervals) / seconds if seconds else None


def _intervals(points: Points) -> list[_Interval]:
    return [
        _Interval(after - before, now - then)
        for (before, then), (after, now) in pairwise(points)
        if after > before and now >= then
    ]
