"""The on-off rhythm of a link, from readings of its byte counter.

The counter is read at uneven moments; between readings bytes are taken to flow evenly, which makes a rate for each
slot of an even grid as fine as the readings.  A link is *on* while its rate is above a tenth of what it reaches at its
busiest (99th percentile).  Of the slots in which a burst begins and ends, so much counts as it sends at the rate of the
slots between, or at the busiest rate where there are none; bursts shorter than a slot look longer than they are.

Over a gap in the readings it is unknown when bytes passed, and behind a clock that was set there is one, too: of a
series with gaps of more than ten times the usual distance the longest piece without is looked at.

Duty cycle and bytes are those of whole periods: from the beginning of the first burst that was seen to begin up to
that of the last one, which may have been cut off.

The period is where the rate is most like itself (autocorrelation), looked for at several resolutions, as bursts that
are short against their own jitter meet only in coarse slots; then bursts have to confirm it: *regularity* is the part
of bursts after which another one begins a period later, within 15 % of the period.

Where many bursts lie in a period, one of them is near any moment: of bursts at random, b a period, 1 − 0.7^b are
followed so.  A rhythm counts only where so many kept bursts come by that chance less than three times in a thousand:
that takes six periods of one burst each, and more of many bursts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import exp, lgamma, log, log1p
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from railscope.agent.facts.counted import format_count
from railscope.agent.rhythm.intervals import BURST_GAP, Intervals, union
from railscope.agent.rhythm.series import Integers

Rates = NDArray[np.float64]

NEAR: Final = 0.15
"""A burst is a period after another one within this part of the period."""
LEAST_REGULARITY: Final = 0.6
LEAST_PERIODS: Final = 4
"""A recording has to be longer than so many."""
_ENOUGH_BURSTS: Final = 30
"""With so many and no period, a longer recording would not have one either."""
_LEAST_READINGS: Final = 32
_MOST_SLOTS: Final = 1 << 20
_ON: Final = 0.1
_ALWAYS_ON: Final = 0.98
_LEAST_LIKENESS: Final = 0.3
_COARSER: Final = (1, 4, 16, 64)
_LEAST_SLOTS: Final = 48
_GAP: Final = 10
"""Readings so many usual distances apart have a gap between them."""
_LEAST_PERIOD_SLOTS: Final = 7.5
_LEAST_SILENCE_SLOTS: Final = 1.5
"""From one burst's begin to the next, and between them; with less, bursts flow into one another."""
_NEARLY_BEST: Final = 0.8
_LEVEL: Final = 0.003


@dataclass(frozen=True, slots=True, eq=False)
class Rhythm:
    """A link's regular bursts."""

    period_ns: float
    duty_cycle: float
    bursts_per_period: float
    burst_bytes: int
    """Median of bursts."""
    period_bytes: int
    """What passes in bursts in a period, on average."""
    regularity: float
    last_begin_ns: int
    """When the last burst began, that of the end of the readings included."""
    span_ns: int
    """How long the piece of the readings is that all of this is of."""
    gaps: int
    """In the readings, which the piece lies between; 0: it is all of them."""


@dataclass(frozen=True, slots=True)
class Aperiodic:
    """A link's bursts that have no rhythm, or are too few to show one."""

    reason: str
    """Why there is no period, the end of a sentence."""
    duty_cycle: float
    """Part of the time in which it sends."""
    bursts: int
    burst_bytes: int
    """Median of bursts."""


def find_rhythm(time_ns: Integers, total_bytes: Integers) -> Rhythm | Aperiodic | str:
    """The rhythm of bursts in one direction of a link, from running totals in order of time; or why there is none."""
    piece, gaps = _longest_piece(time_ns)
    time_ns, total_bytes = time_ns[piece], total_bytes[piece]
    if len(time_ns) < _LEAST_READINGS or time_ns[-1] <= time_ns[0]:
        between = f" between {format_count(gaps, 'gap')}" if gaps else ""
        every_s = float(np.median(np.diff(time_ns))) / 1e9 if len(time_ns) > 1 else 0.0
        needed = f": record at least {_LEAST_READINGS * every_s:.3g} s without a gap" if every_s > 0 else ""
        return f"it was read {format_count(len(time_ns), 'time')}{between}, and {_LEAST_READINGS} are needed{needed}"
    moved = np.diff(total_bytes)
    # A total that falls began anew.
    moved = np.where(moved >= 0, moved, total_bytes[1:])
    if not moved.any():
        return "nothing passed"
    span_ns = int(time_ns[-1] - time_ns[0])
    slots = max(1, min(_MOST_SLOTS, span_ns // max(1, int(np.median(np.diff(time_ns))))))
    edges = np.linspace(0, span_ns, slots + 1)
    sums = np.concatenate(([0], np.cumsum(moved)))
    slot_bytes = np.diff(np.interp(edges, time_ns - time_ns[0], sums))
    busiest = np.quantile(slot_bytes, 0.99) or slot_bytes.max()
    on = slot_bytes > _ON * busiest
    slot_ns = span_ns / slots
    if on.mean() > _ALWAYS_ON:
        return (
            f"it is busy whenever it is read, every {slot_ns / 1e6:.3g} ms: it has no bursts, or bursts too short to "
            "see: record with a shorter --rail.sample-interval"
        )
    begin = np.rint(edges[:-1][on]).astype(np.int64) + time_ns[0]
    end = np.rint(edges[1:][on]).astype(np.int64) + time_ns[0]
    raw = union(begin, end)
    for coarser in _COARSER:
        period_ns = _period_slots(slot_bytes, coarser) * slot_ns
        if not period_ns:
            continue
        bursts = raw.fill_gaps(max(1, round(period_ns / BURST_GAP)))
        period_ns, kept, asked = confirm_period(bursts.begin_ns, period_ns)
        if not asked or kept < LEAST_REGULARITY * asked or span_ns <= LEAST_PERIODS * period_ns:
            continue
        if chance_probability(kept, asked, len(bursts.begin_ns) * period_ns / span_ns) < _LEVEL:
            whole = _whole_periods(bursts.begin_ns, period_ns, cut_off=bool(on[0]))
            silence_ns = float(np.median(bursts.begin_ns[1:] - bursts.end_ns[:-1]))
            distance_ns = period_ns / whole.bursts_each
            if distance_ns < _LEAST_PERIOD_SLOTS * slot_ns or silence_ns < _LEAST_SILENCE_SLOTS * slot_ns:
                return (
                    f"its bursts come about every {distance_ns / 1e6:.3g} ms, and it was read every "
                    f"{slot_ns / 1e6:.3g} ms, too seldom to tell how long they are: record with a shorter "
                    "--rail.sample-interval"
                )
            counted = bursts.begin_ns[whole.first : whole.last]
            window_ns = int(bursts.begin_ns[whole.last] - counted[0])
            at = np.interp(np.stack([bursts.begin_ns, bursts.end_ns]) - time_ns[0], time_ns - time_ns[0], sums)
            of_burst = (at[1] - at[0])[whole.first : whole.last]
            sent_ns = _sent_slots(slot_bytes, on, bursts, time_ns[0], slot_ns)[whole.first : whole.last] * slot_ns
            return Rhythm(
                period_ns=period_ns,
                duty_cycle=float(sent_ns.sum()) / window_ns,
                bursts_per_period=len(counted) * period_ns / window_ns,
                burst_bytes=round(float(np.median(of_burst))),
                period_bytes=round(float(of_burst.sum()) * period_ns / window_ns),
                regularity=kept / asked,
                last_begin_ns=int(bursts.begin_ns[-1]),
                span_ns=span_ns,
                gaps=gaps,
            )
    at = np.interp(np.stack([raw.begin_ns, raw.end_ns]) - time_ns[0], time_ns - time_ns[0], sums)
    sent_ns = _sent_slots(slot_bytes, on, raw, time_ns[0], slot_ns) * slot_ns
    return Aperiodic(
        reason=_why_aperiodic(len(raw.begin_ns), span_ns),
        duty_cycle=float(sent_ns.sum()) / span_ns,
        bursts=len(raw.begin_ns),
        burst_bytes=round(float(np.median(at[1] - at[0]))),
    )


def _why_aperiodic(bursts: int, span_ns: int) -> str:
    if bursts == 1:
        return f"all its traffic passed in one burst of the {span_ns / 1e9:.3g} s recorded, and a period needs several"
    seen = f"its {format_count(bursts, 'burst')} in {span_ns / 1e9:.3g} s come at irregular intervals"
    if bursts >= _ENOUGH_BURSTS:
        return f"{seen}: its traffic is aperiodic"
    needed_s = span_ns / 1e9 * _ENOUGH_BURSTS / bursts
    return f"{seen}, and are too few to tell a period: record about {needed_s:.3g} s"


def _longest_piece(time_ns: Integers) -> tuple[slice, int]:
    """The readings that have no gap between them for the longest time, and how many gaps there are in all."""
    apart = np.diff(time_ns)
    if not len(apart):
        return slice(0, len(time_ns)), 0
    gaps = np.flatnonzero(apart > _GAP * max(1.0, float(np.median(apart)))) + 1
    edges = [0, *gaps.tolist(), len(time_ns)]
    pieces = [slice(low, high) for low, high in pairwise(edges)]
    return max(pieces, key=lambda piece: int(time_ns[piece.stop - 1] - time_ns[piece.start])), len(gaps)


@dataclass(frozen=True, slots=True)
class _WholePeriods:
    """Which bursts make whole periods."""

    first: int
    last: int
    """The first one that is in none of them any more."""
    bursts_each: int


def _whole_periods(begins_ns: Integers, period_ns: float, *, cut_off: bool) -> _WholePeriods:
    """The bursts of whole periods; of the first one the beginning was not seen where it is cut off."""
    nearest = _nearest(begins_ns, begins_ns + period_ns)
    later = (nearest - np.arange(len(begins_ns)))[
        np.abs(begins_ns[nearest] - begins_ns - period_ns) <= NEAR * period_ns
    ]
    each = max(1, round(float(np.median(later))))
    first = int(cut_off and len(begins_ns) > each + 1)
    return _WholePeriods(first, first + max(1, (len(begins_ns) - 1 - first) // each) * each, each)


def _sent_slots(slot_bytes: Rates, on: NDArray[np.bool_], bursts: Intervals, from_ns: int, slot_ns: float) -> Rates:
    """How many slots each burst sends: of its first and last slot what they hold of the usual rate between them."""
    first = np.rint((bursts.begin_ns - from_ns) / slot_ns).astype(np.int64)
    last = np.rint((bursts.end_ns - from_ns) / slot_ns).astype(np.int64) - 1
    idle = float(np.median(slot_bytes[~on]))
    busiest = float(np.quantile(slot_bytes[on], 0.99))
    sent = np.empty(len(first))
    for place, (low, high) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        between = slot_bytes[low + 1 : high][on[low + 1 : high]]
        rate = (float(np.median(between)) if len(between) else busiest) - idle
        edges = slot_bytes[[low, high] if high > low else [low]] - idle
        # Short gaps within a burst are part of it.
        sent[place] = max(high - low - 1, 0) + np.clip(edges / rate, 0, 1).sum()
    return sent


def chance_probability(kept: int, asked: int, bursts_per_period: float) -> float:
    """How probably at least `kept` of `asked` bursts at random are followed by another one a period later."""
    missed = bursts_per_period * log(1 - 2 * NEAR)
    followed = log1p(-exp(missed))
    return sum(
        exp(lgamma(asked + 1) - lgamma(some + 1) - lgamma(asked - some + 1) + some * followed + (asked - some) * missed)
        for some in range(kept, asked + 1)
    )


def confirm_period(begins_ns: Integers, period_ns: float) -> tuple[float, int, int]:
    """The period as bursts keep it, how many bursts are followed by another one a period later, and of how many."""
    if len(begins_ns) < 2:
        return period_ns, 0, 0
    due = begins_ns + period_ns
    asked = due <= begins_ns[-1] + NEAR * period_ns
    nearest = begins_ns[_nearest(begins_ns, due)]
    kept = asked & (np.abs(nearest - due) <= NEAR * period_ns) & (nearest > begins_ns)
    if not kept.any():
        return period_ns, 0, int(asked.sum())
    return float(np.median((nearest - begins_ns)[kept])), int(kept.sum()), int(asked.sum())


def _nearest(begins_ns: Integers, due_ns: NDArray[np.floating[Any]]) -> Integers:
    """Which burst begins nearest to each moment."""
    after = np.searchsorted(begins_ns, due_ns)
    near = np.stack([np.clip(after - 1, 0, None), np.clip(after, None, len(begins_ns) - 1)])
    found: Integers = near[np.argmin(np.abs(begins_ns[near] - due_ns), axis=0), np.arange(len(due_ns))]
    return found


def _period_slots(slot_bytes: Rates, coarser: int) -> float:
    """After how many slots the series is most like itself; 0: after none."""
    slots = len(slot_bytes) // coarser
    if slots < _LEAST_SLOTS:
        return 0.0
    rate = slot_bytes[: slots * coarser].reshape(slots, coarser).sum(axis=1)
    rate = rate - rate.mean()
    spectrum = np.fft.rfft(rate, 2 * slots)
    products = np.fft.irfft(spectrum * spectrum.conj())[: slots // (LEAST_PERIODS - 1) + 1]
    likeness = products / np.arange(slots, slots - len(products), -1)
    if likeness[0] <= 0:
        return 0.0
    likeness /= likeness[0]
    unlike = np.flatnonzero(likeness <= 0)
    if not len(unlike):
        return 0.0
    first = int(unlike[0])
    tail = likeness[first:]
    best = float(tail.max())
    if best < max(_LEAST_LIKENESS, 4 / np.sqrt(slots)):
        return 0.0
    peaks = np.flatnonzero((tail[1:-1] >= tail[:-2]) & (tail[1:-1] >= tail[2:]) & (tail[1:-1] >= _NEARLY_BEST * best))
    return float((first + 1 + peaks[0]) * coarser) if len(peaks) else 0.0
