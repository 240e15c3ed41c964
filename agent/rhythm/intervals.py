"""Unions of time intervals, and how much of them lies in given windows.

A union counts a moment once however many intervals cover it: so its length is at most the sum of theirs, and at most
the length of the window.  Times are whole nanoseconds; intervals begin at `begin_ns` and end before `end_ns`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]

BURST_GAP: Final = 20
"""What follows within this part of a period (1/20) belongs to the same burst."""


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Intervals that do not touch, in order of time."""

    begin_ns: Times
    end_ns: Times

    @property
    def length_ns(self) -> int:
        return int((self.end_ns - self.begin_ns).sum())

    def length_before(self, moments_ns: Times) -> Times:
        """How much of the union lies before each moment."""
        if not len(self.begin_ns):
            return np.zeros(len(moments_ns), np.int64)
        lengths = self.end_ns - self.begin_ns
        before = np.concatenate(([0], np.cumsum(lengths)))
        place = np.searchsorted(self.begin_ns, moments_ns, side="right")
        last = np.maximum(place - 1, 0)
        # Of the last interval that has begun, what lies behind the moment does not count.
        behind = np.where(place > 0, np.maximum(self.end_ns[last] - moments_ns, 0), 0)
        result: Times = before[place] - behind
        return result

    def length_in(self, from_ns: Times, to_ns: Times) -> Times:
        """How much of the union lies in each window."""
        return self.length_before(to_ns) - self.length_before(from_ns)

    def fill_gaps(self, gap_ns: int) -> Intervals:
        """These intervals, with gaps shorter than `gap_ns` filled."""
        if not len(self.begin_ns):
            return self
        apart = self.begin_ns[1:] - self.end_ns[:-1] >= gap_ns
        return Intervals(self.begin_ns[np.concatenate(([True], apart))], self.end_ns[np.concatenate((apart, [True]))])

    def intersection(self, other: Intervals) -> Intervals:
        """The moments that both cover."""
        low = np.searchsorted(other.end_ns, self.begin_ns, side="right")
        high = np.searchsorted(other.begin_ns, self.end_ns, side="left")
        meets = np.maximum(high - low, 0)
        own = np.repeat(np.arange(len(meets)), meets)
        theirs = np.arange(len(own)) - np.repeat(np.cumsum(meets) - meets - low, meets)
        return Intervals(
            np.maximum(self.begin_ns[own], other.begin_ns[theirs]), np.minimum(self.end_ns[own], other.end_ns[theirs])
        )

    def difference(self, other: Intervals) -> Intervals:
        """The moments that this one covers and the other does not."""
        if not len(self.begin_ns):
            return self
        # The gaps between the other's, from before everything to behind everything.
        everything = np.concatenate((self.begin_ns[:1], self.end_ns[-1:], other.begin_ns[:1], other.end_ns[-1:]))
        begin_ns = np.concatenate(([everything.min() - 1], other.end_ns))
        end_ns = np.concatenate((other.begin_ns, [everything.max() + 1]))
        return self.intersection(Intervals(begin_ns, end_ns))


def union(begin_ns: Times, end_ns: Times) -> Intervals:
    """The union of intervals in any order; those that end before they begin, or at once, cover nothing."""
    some = end_ns > begin_ns
    begin_ns, end_ns = begin_ns[some], end_ns[some]
    if not len(begin_ns):
        return Intervals(begin_ns, end_ns)
    if (begin_ns[1:] < begin_ns[:-1]).any():
        order = np.argsort(begin_ns, kind="stable")
        begin_ns, end_ns = begin_ns[order], end_ns[order]
    end_ns = np.maximum.accumulate(end_ns)
    first = np.concatenate(([True], begin_ns[1:] > end_ns[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(begin_ns[first], end_ns[last])
