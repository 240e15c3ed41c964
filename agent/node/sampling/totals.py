"""Turns counter readings into totals that never fall, and rates.

A total begins with what the device itself shows when it is first read, so that totals here are those of other tools,
and go on where they were when the agent is started anew.  From then on it only rises: a counter that fell, a device
that is another one under the same name, or a step that no link could carry starts a new baseline, for which nothing
is added, and which is counted.  A rate is the difference of bytes over the measured time between two reads, sorted
into a histogram per device and direction.
"""

from __future__ import annotations

import heapq
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from railscope.probes.netdev.counters import CounterBlock, CounterReading, Flags, Values

_MEGABITS: Final = (
    *(1, 2.5, 5, 10, 25, 50, 100, 250, 500),
    *(1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 200_000, 400_000, 800_000),
)
RATE_BOUNDS: Final = tuple(megabits * 125_000.0 for megabits in _MEGABITS)
"""Bytes per second; the upper ones are the speeds of links, so that a full link is distinguished from one above it."""

IMPLAUSIBLE_BYTES_PER_SECOND: Final = 1e12
"""Ten times the fastest link: a step beyond it is a counter that was set, not traffic."""
FORGET_NS: Final = 300_000_000_000
"""A device that is gone keeps its totals this long, in case it comes back."""
MOST_GONE: Final = 256
"""Devices of one source that are gone and keep their totals: whoever may rename devices makes any number of names."""

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class Totals:
    """Totals and histograms of one source's devices.

    The rows of the last reading come first, in its order; those of devices that are gone follow.  So a reading like
    the one before, by far the usual case, touches the arrays as they are.
    """

    def __init__(self, fields: tuple[str, ...]) -> None:
        self.fields = fields
        self.rows: dict[str, int] = {}
        self.names: tuple[str, ...] = ()
        """Devices of the last reading."""
        self.resets = 0
        self._generations: tuple[int, ...] = ()
        self._bounds = np.array(RATE_BOUNDS)
        self._directions = [fields.index("tx_bytes"), fields.index("rx_bytes")] if fields else []
        self._read_ns = 0
        """When the devices of the last reading were read."""
        self._steady = False
        """Whether all of them have a baseline from then."""
        self._allocate(0)

    @property
    def counted(self) -> Flags | None:
        """Rows by columns: whether the device has ever shown this counter; None: all devices show all."""
        return None

    @property
    def pinned(self) -> Flags | None:
        """Rows by columns: whether the counter is saturated, so that more may have happened; None: none."""
        return None

    def add_columns(self, fields: tuple[str, ...]) -> bool:
        """Add columns that a source appended; False: these are other columns than before."""
        before = len(self.fields)
        if fields[:before] != self.fields:
            return False
        if more := len(fields) - before:
            self.fields = fields
            self._widen(more)
        return True

    def _allocate(self, count: int) -> None:
        self.totals: Values = np.zeros((count, len(self.fields)), dtype=np.uint64)
        self.counts: Counts = np.zeros((count, 2, len(RATE_BOUNDS) + 1), dtype=np.int64)
        self.sums: Floats = np.zeros((count, 2))
        self._previous: Values = np.zeros((count, len(self.fields)), dtype=np.uint64)
        self._previous_ns: Counts = np.full(count, -1, dtype=np.int64)
        """When `_previous` was read; -1: no baseline.  Up to date only between steady times."""
        self._generation: Counts = np.zeros(count, dtype=np.int64)
        self._first_bucket = np.arange(count * 2).reshape(count, 2) * (len(RATE_BOUNDS) + 1)

    def _widen(self, more: int) -> None:
        """Make room for so many columns more."""
        room = ((0, 0), (0, more))
        self.totals = np.pad(self.totals, room)
        self._previous = np.pad(self._previous, room)

    def add(self, reading: CounterReading, *, rates: bool) -> None:
        """Add one reading; `rates` is False after a gap, whose average is not a short-interval rate."""
        now_ns = (reading.before_ns + reading.after_ns) // 2
        if reading.names != self.names or reading.generations != self._generations:
            self._arrange(reading, now_ns)
        count = len(reading.names)
        if count == 0:
            return
        values, previous = reading.values, self._previous[:count]
        elapsed: Floats | float
        if self._steady:
            elapsed = max(now_ns - self._read_ns, 1) / 1e9
        else:
            elapsed = np.maximum(now_ns - self._previous_ns[:count, np.newaxis], 1) / 1e9
        fallen = values < previous
        delta = values - previous  # wraps where it fell
        rate = delta[:, self._directions] / elapsed
        if self._steady and not fallen.any() and rate.max() <= IMPLAUSIBLE_BYTES_PER_SECOND:
            self.totals[:count] += delta
            if rates:
                self._observe(rate, slice(None))
        else:
            self._add_some(fallen, delta, rate, rates=rates)
        previous[:] = values
        self._read_ns = now_ns
        self._steady = True

    def add_block(self, block: CounterBlock, *, rates: bool) -> None:
        """Add several readings; the same as `add` for each, at little more than the cost of one."""
        count = len(block.names)
        same = block.names == self.names and block.generations == self._generations
        if not (same and self._steady and self._add_steady(block.values, block.times_ns, count, rates=rates)):
            for number in range(len(block.times_ns)):
                self.add(block.reading(number), rates=rates or number > 0)

    def _add_steady(self, values: Values, times_ns: tuple[tuple[int, int], ...], count: int, *, rates: bool) -> bool:
        """Add readings of the last one's devices, if no counter falls; False: nothing was done."""
        if count == 0:
            return False
        now_ns = midpoints(times_ns)
        previous = self._previous[:count]
        if (values[0] < previous).any() or (values[1:] < values[:-1]).any():
            return False
        rate = self._rates(values, np.diff(now_ns, prepend=self._read_ns)[:, np.newaxis])
        if rate.max() > IMPLAUSIBLE_BYTES_PER_SECOND:
            return False
        self.totals[:count] += values[-1] - previous
        previous[:] = values[-1]
        self._read_ns = int(now_ns[-1])
        self._observe_many(rate if rates else rate[1:])
        return True

    def _rates(self, values: Values, elapsed_ns: Counts) -> Floats:
        """Bytes per second (readings by rows by directions) over these times, of bytes that do not fall."""
        carried = values[:, :, self._directions]
        before = self._previous[np.newaxis, : values.shape[1], self._directions]
        return np.diff(carried, axis=0, prepend=before) / (np.maximum(elapsed_ns, 1) / 1e9)[:, :, np.newaxis]

    def _observe_many(self, rate: Floats, rows: npt.NDArray[np.bool_] | None = None) -> None:
        """Add rates of many readings (readings by rows by directions), of these rows only; None: of all."""
        count = rate.shape[1]
        buckets = np.searchsorted(self._bounds, rate, side="left") + self._first_bucket[:count]
        if rows is not None:
            buckets = buckets[:, rows]
        self.counts.reshape(-1)[:] += np.bincount(buckets.reshape(-1), minlength=self.counts.size)
        self.sums[:count] += np.where(True if rows is None else rows[:, np.newaxis], rate.sum(axis=0), 0.0)

    def _add_some(self, fallen: npt.NDArray[np.bool_], delta: Values, rate: Floats, *, rates: bool) -> None:
        """As `add` when some device has no baseline or gets a new one."""
        count = len(delta)
        known = np.ones(count, dtype=np.bool_) if self._steady else self._previous_ns[:count] >= 0
        good = known & ~fallen[:, self._directions].any(axis=1) & (rate <= IMPLAUSIBLE_BYTES_PER_SECOND).all(axis=1)
        self.resets += int((known & ~good).sum())
        # An error counter that a driver corrects downwards stands still; only bytes that fall mean a new beginning.
        self.totals[:count] += np.where(fallen | ~good[:, np.newaxis], np.uint64(0), delta)
        if rates:
            self._observe(rate, good)

    def _observe(self, rate: Floats, which: slice | npt.NDArray[np.bool_]) -> None:
        count = len(rate)
        buckets = np.searchsorted(self._bounds, rate, side="left")
        buckets += self._first_bucket[:count]
        self.counts.reshape(-1)[buckets[which]] += 1
        self.sums[:count][which] += rate[which]

    def _arrange(self, reading: CounterReading, now_ns: int) -> None:
        """Put the rows in the reading's order, with new ones; drop those of devices that have been gone for long."""
        if self._steady:
            self._previous_ns[: len(self.names)] = self._read_ns
        self._steady = False
        current = set(reading.names)
        seen_ns = self._previous_ns.tolist()
        gone = [name for name, row in self.rows.items() if name not in current and now_ns - seen_ns[row] < FORGET_NS]
        if len(gone) > MOST_GONE:
            gone = heapq.nlargest(MOST_GONE, gone, key=lambda name: seen_ns[self.rows[name]])
        order = {name: row for row, name in enumerate((*reading.names, *gone))}
        kept = [name for name in order if name in self.rows]
        sources, targets = [self.rows[name] for name in kept], [order[name] for name in kept]
        before = self._arrays()
        self._allocate(len(order))
        for source, target in zip(before, self._arrays(), strict=True):
            target[targets] = source[sources]
        new = [row for row, name in enumerate(reading.names) if name not in self.rows]
        self.totals[new] = reading.values[new]
        self.rows = order
        generations = np.array(reading.generations, dtype=np.int64)
        known = self._previous_ns[: len(generations)]
        another = (self._generation[: len(generations)] != generations) & (known >= 0)
        self.resets += int(another.sum())
        known[another] = -1
        self._generation[: len(generations)] = generations
        self.names = reading.names
        self._generations = reading.generations

    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """What belongs to a row and moves with it."""
        return self.totals, self.counts, self.sums, self._previous, self._previous_ns, self._generation


def midpoints(times_ns: tuple[tuple[int, int], ...]) -> Counts:
    """The time that each of these readings of counters (began, ended) is taken to have happened at."""
    found: Counts = np.array(times_ns, dtype=np.int64).sum(axis=1) // 2
    return found
