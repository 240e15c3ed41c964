"""Totals of devices that differ in what they count, and whose counters have different ends.

As agent/node/sampling/totals.py, for readings with a shape.  A counter is compared only with an earlier value of its
own, so that one which comes, goes or fails for a while does no harm to its neighbours.  By counter:

* One that a device shows for the first time begins with its value, also if others of the device were read before.
* One that begins again at 0 after its maximum adds what it counted through the end, unless that were more than half
  its range: nothing counts that far between two reads, so it was set back, and stands still.
* One that stops at its maximum is pinned there: it adds nothing, and that says nothing.  When it falls somebody
  cleared it, and what it shows is new.
* A gauge is what it shows: nothing is added, and nothing follows from its fall.
* A total that would pass 64 bits, because a driver shows all ones in place of a number, stands still.
* A device whose bytes fall, or whose other counters fall while none rises, has begun anew: nothing is added for it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from railscope.agent.node.sampling.totals import IMPLAUSIBLE_BYTES_PER_SECOND, Totals, midpoints
from railscope.probes.netdev.counters import CounterBlock, CounterReading, Flags, Values

_WIDEST: Final = np.uint64(2**64 - 1)


def totals_for(reading: CounterReading) -> Totals:
    """Totals for a counter source that gives readings such as this one."""
    return Totals(reading.fields) if reading.shape is None else ShapedTotals(reading.fields)


class ShapedTotals(Totals):
    """Totals and histograms of one source's devices, as `Totals`; every reading must have a shape."""

    def _allocate(self, count: int) -> None:
        super()._allocate(count)
        shape = (count, len(self.fields))
        self._baseline: Flags = np.zeros(shape, dtype=np.bool_)
        """Whether `_previous` holds a value of this device."""
        self._known: Flags = np.zeros(shape, dtype=np.bool_)
        """Whether the last reading had one."""
        self._counted: Flags = np.zeros(shape, dtype=np.bool_)
        self._pinned: Flags = np.zeros(shape, dtype=np.bool_)

    @property
    def counted(self) -> Flags:
        return self._counted

    @property
    def pinned(self) -> Flags:
        return self._pinned

    def _widen(self, more: int) -> None:
        super()._widen(more)
        room = ((0, 0), (0, more))
        self._baseline, self._known = np.pad(self._baseline, room), np.pad(self._known, room)
        self._counted, self._pinned = np.pad(self._counted, room), np.pad(self._pinned, room)

    def add(self, reading: CounterReading, *, rates: bool) -> None:
        """See `Totals.add`.

        Raises:
            ValueError: the reading has no shape.
        """
        shape = reading.shape
        if shape is None:
            raise ValueError("a reading without a shape among others with one")
        now_ns = (reading.before_ns + reading.after_ns) // 2
        if reading.names != self.names or reading.generations != self._generations:
            self._arrange(reading, now_ns)
        self._known[len(reading.names) :] = False
        self._pinned[len(reading.names) :] = False
        count = len(reading.names)
        if count == 0:
            return
        values, previous, previous_ns = reading.values, self._previous[:count], self._previous_ns[:count]
        baseline, known = self._baseline[:count], self._known[:count]
        baseline[previous_ns < 0] = known[previous_ns < 0] = False
        compared = baseline & shape.known
        if shape.gauges is not None:
            compared &= ~shape.gauges
        fallen = compared & (values < previous)
        delta = values - previous  # wraps where it fell
        rate = delta[:, self._directions] / (np.maximum(now_ns - previous_ns[:, np.newaxis], 1) / 1e9)
        anew = self._begun_anew(compared, fallen, delta, rate, shape.maxima, shape.saturating)
        self.resets += int(anew.sum())
        added = _added(compared, fallen, delta, values, shape.maxima, shape.saturating)
        totals = self.totals[:count]
        risen = totals + np.where(anew[:, np.newaxis], np.uint64(0), added)
        shown = shape.known & ~self._counted[:count]
        if shape.gauges is not None:
            shown |= shape.known & shape.gauges
        totals[:] = np.where(shown, values, np.maximum(totals, risen))
        if rates:
            both = (known & compared)[:, self._directions].all(axis=1)
            self._observe(rate, both & ~anew)
        previous[shape.known] = values[shape.known]
        baseline[anew] = False
        baseline |= shape.known
        known[:] = shape.known
        self._counted[:count] |= shape.known
        self._pinned[:count] = shape.known & shape.saturating & (values >= shape.maxima)
        previous_ns[:] = now_ns

    def add_block(self, block: CounterBlock, *, rates: bool) -> None:
        """See `Totals.add_block`.

        Raises:
            ValueError: the block has no shape.
        """
        if not self._add_rising(block, rates=rates):
            for number in range(len(block.times_ns)):
                self.add(block.reading(number), rates=rates or number > 0)

    def _add_rising(self, block: CounterBlock, *, rates: bool) -> bool:
        """Add readings of the same shape as the last one, if no counter falls; False: nothing was done."""
        count, shape, values = len(block.names), block.shape, block.values
        if count == 0 or shape is None or block.names != self.names or block.generations != self._generations:
            return False
        known, previous, previous_ns = shape.known, self._previous[:count], self._previous_ns[:count]
        if (self._known[:count] != known).any() or (known & ~self._baseline[:count]).any() or previous_ns.min() < 0:
            return False
        gauges = np.zeros_like(known) if shape.gauges is None else known & shape.gauges
        if (known & ~gauges & ((values[0] < previous) | (values[1:] < values[:-1]).any(axis=0))).any():
            return False
        now_ns = midpoints(block.times_ns)
        carrying = known[:, self._directions]
        read_ns = np.concatenate((previous_ns[np.newaxis], np.repeat(now_ns[:, np.newaxis], count, axis=1)))
        rate = np.where(carrying, self._rates(values, read_ns[1:] - read_ns[:-1]), 0.0)
        totals = self.totals[:count]
        risen = totals + np.where(known & ~gauges, values[-1] - previous, np.uint64(0))
        if rate.max() > IMPLAUSIBLE_BYTES_PER_SECOND or (risen < totals).any():
            return False
        totals[:] = np.where(gauges, values[-1], risen)
        previous[known] = values[-1][known]
        previous_ns[:] = now_ns[-1]
        self._pinned[:count] = known & shape.saturating & (values[-1] >= shape.maxima)
        self._observe_many(rate if rates else rate[1:], np.asarray(carrying.all(axis=1)))
        return True

    def _begun_anew(
        self,
        compared: Flags,
        fallen: Flags,
        delta: Values,
        rate: npt.NDArray[np.float64],
        maxima: Values,
        saturating: Flags,
    ) -> Flags:
        """Rows whose device counts from the start again, or was set to what no link could carry."""
        bytes_compared = compared[:, self._directions]
        jumped = (bytes_compared & (rate > IMPLAUSIBLE_BYTES_PER_SECOND)).any(axis=1)
        risen = compared & ~fallen & (delta > 0)
        set_back = fallen & ~saturating & ~_wrapped(fallen, delta, maxima, saturating)
        together = set_back.any(axis=1) & ~risen.any(axis=1)
        return np.asarray(fallen[:, self._directions].any(axis=1) | jumped | together)

    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return *super()._arrays(), self._baseline, self._known, self._counted, self._pinned


def _wrapped(fallen: Flags, delta: Values, maxima: Values, saturating: Flags) -> Flags:
    """Counters that went through their end."""
    return fallen & ~saturating & (maxima < _WIDEST) & ((delta & maxima) <= maxima // np.uint64(2))


def _added(compared: Flags, fallen: Flags, delta: Values, values: Values, maxima: Values, saturating: Flags) -> Values:
    """What each counter counted since it was last seen."""
    added = np.where(compared & ~fallen, delta, np.uint64(0))
    added = np.where(_wrapped(fallen, delta, maxima, saturating), delta & maxima, added)
    return np.where(fallen & saturating, values, added)
