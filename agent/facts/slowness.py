"""Whether a rank is slow: the others wait for it again and again, and not once.

Time is cut into stretches of the same length, and of each it is known how many operations the communicator made in it
and whether the others waited for this rank.  A checkpoint, a warm-up step or an evaluation makes them wait in one of
many; ranks that are slow in turn, each in a few.  Hosts judge so of their own ranks, and `railscope diagnose` of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WAITED_RATIO: Final = 0.25
"""Of the others' time; less is what ranks of a healthy job wait for each other, now and then."""
_MOST: Final = 0.75
"""Of the stretches with operations, for a rank to be slow."""
_LEAST_STRETCHES: Final = 4
_LEAST_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """What came of one stretch of time."""

    at: float
    """Its end, in seconds by any clock."""
    operations: float
    """That the communicator completed in it, or its ranks called."""
    waited: bool
    """The other ranks waited for this one for much of it."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """For how long a rank has been slow, and how often it was."""

    since: float
    """In seconds, by the clock of the stretches."""
    waited: int
    """Stretches in which the others waited for it."""
    stretches: int
    """All of them since then, without those in which nothing was called."""
    operations: float
    """In the stretches in which they waited."""


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of these values, of which there are two or more: the median of the others.

    They are sorted once: a communicator may have thousands of ranks.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 2) // 2, (len(values) - 1) // 2
    found = [0.0] * len(values)
    for place, at in enumerate(order):
        lower, upper = (values[order[one + (one >= place)]] for one in middle)
        found[at] = (lower + upper) / 2
    return found


def find_slowness(stretches: Sequence[Stretch], stretch_seconds: float) -> Slowness | None:
    """Since when the others have waited for a rank in most stretches, of stretches in order; None: they do not."""
    active = [one for one in stretches if one.operations > 0 or one.waited]
    if not any(one.waited for one in active[-2:]):
        return None
    found, waited = None, 0
    for count, one in enumerate(reversed(active), start=1):
        waited += one.waited
        if one.waited and waited >= _MOST * count:
            found = count
    if found is None:
        return None
    since = active[-found:]
    begun = since[0].at - stretch_seconds
    if found < _LEAST_STRETCHES or since[-1].at - begun < _LEAST_SECONDS:
        return None
    slow = [one for one in since if one.waited]
    return Slowness(begun, len(slow), found, sum(one.operations for one in slow))
