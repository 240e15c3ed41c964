"""Finds the iterations of a job: where its series of calls repeats, without hints about the job.

A job repeats its calls from iteration to iteration, and within one also from micro-batch to micro-batch and layer to
layer; now and then there is a call more (logging, a checkpoint), and the first iterations differ (DDP orders its
buckets anew).  Calls on different communicators interleave as threads and streams happen to run; within a communicator
NCCL demands the same order every time.  So:

1. Sizes that are never the same (uneven all-to-alls) are left out of the comparison, operation and peer stay.
2. Calls that move next to nothing are no evidence: all those that together make a thousandth of the bytes.  Those of
   unknown size are; where nothing repeats with them, it is looked for without them.
3. What is left is cut into segments, in many ways (`cuts`), and the way is chosen that makes them iterations
   (`choice`): evaluations and checkpoints between them are no part of it.
4. An iteration begins at the call of the segment before which the GPU was silent longest (median): since the call
   before it was made, or since all operations before it had ended.  A segment with less than half of the calls of a
   usual one is none, as a batch of an evaluation.
5. An iteration within which other calls lie, and which is longer than half as long again as usual, was interrupted:
   what it took itself is not known.

A repetition of a single call proves nothing by itself: there gaps in time decide.  Calls that come in bursts of the
same number, with silence between, make an iteration a burst; otherwise the calls must come regularly.  So must calls
that repeat only without their sizes, unless there are several different ones and they hardly ever leave their order.

All steps are numpy over whole columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from railscope.agent.rhythm.choice import choose_cut
from railscope.agent.rhythm.cuts import (
    GOOD_ENOUGH,
    LEAST,
    SILENCE,
    VARIED_SIZES,
    Cut,
    Encode,
    Evidence,
    Flags,
    begins_after_silence,
    recurring,
    silences,
)
from railscope.agent.rhythm.series import CallSeries, Codes, Integers, dense_codes, mixed

_LIGHT: Final = 0.001
_TELLING: Final = 4
"""So many different calls, in the same order throughout, make a repetition without their sizes and at any distance; an
AllGather and a ReduceScatter in turn may be the layers of requests that come at random."""
_OFTEN: Final = 10
"""A size that comes so often comes again, though in a part of the series only."""
_NEAR_MEDIAN: Final = 0.5
_LEAST_REGULAR_TIME: Final = 0.8
"""Periods are regular if those within half of the median around it make up so much of the time."""
_NEIGHBOURS: Final = 64
"""Periods whose median is one of them compared with: a busy machine's pace drifts."""
ENOUGH: Final = 0.5
"""Of the calls of a usual segment: with fewer it is no iteration."""
INTERRUPTED: Final = 1.5
"""So many times the usual length."""
_LEAST_USUAL: Final = 0.5
"""Of iterations: where fewer make equal calls, others are nothing unusual."""
_TRIAL: Final = 300_000
"""A long series is looked at as a whole only if so many calls from its middle repeat themselves; so an iteration of a
GPU may have a third of that."""
_LEAST_SILENT_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """By what the iterations of a series were found, so that they can be found in the calls that follow it.

    All places are places in the series.
    """

    symbol: Codes
    """What stood for each call in the comparison."""
    sizeless: Flags
    """By kind: its sizes were not looked at."""
    evidence: Flags
    """The calls that were compared; the others move next to nothing."""
    anchor: Integers
    """Places of the calls of one anchor, in a row on one communicator."""
    by_silence: bool
    """Segments begin at the longest silence from one anchor to the next, else at the anchor."""
    usual: Integers
    """Places of the calls of a most frequent segment."""
    offset: int
    """An iteration begins at so many calls behind the beginning of a segment that is like that one."""
    burst_ns: int | None
    """Equal calls: an iteration begins where none came for so long; None: at each of them."""
    telling: bool
    """The order proves the repetition at any distance; else calls must come regularly as well."""
    after_silence: bool
    """An iteration begins after a silence as there is none within it."""


@dataclass(frozen=True, slots=True, eq=False)
class Repetition:
    """A series cut into iterations."""

    starts: Integers
    """Places in the series of the first calls of iterations; the last one's end is not known."""
    interrupted: Flags
    """By iteration that has an end: other calls lie within it, and make it longer."""
    sizes_vary: bool
    """The calls repeat only if sizes of some or all are not looked at."""
    by_gaps: bool
    """Found by silence between bursts of one and the same call."""
    rule: Rule
    parts: int
    """An iteration holds so many equal stretches of calls that may be the steps themselves; 0: none."""


def find_repetition(series: CallSeries, encode: Encode = dense_codes) -> Repetition | None:
    """Cut a series into iterations; None: it does not repeat itself.  `encode`: the fastest there is."""
    if len(series) < LEAST:
        return None
    silence_ns = series.silence_ns
    for sizeless, symbol, kept in _evidences(series, encode):
        evidence = Evidence(
            series.time_ns[kept],
            silence_ns[kept],
            symbol[kept],
            series.communicator[kept],
            series.kind[kept],
            series.payload_bytes[kept],
        )
        if len(evidence) > 2 * _TRIAL and choose_cut(evidence.middle(_TRIAL), encode) is None:
            continue
        choice = choose_cut(evidence, encode)
        if choice is None:
            continue
        cut = choice.cut
        offset = _offset(evidence, cut)
        starts = _starts(evidence, cut, offset)
        if len(starts) < LEAST:
            continue
        burst_ns = None
        if cut.distinct == 1:
            bursts = _bursts(evidence.time_ns[starts])
            starts, burst_ns = (starts, None) if bursts is None else (starts[bursts[0]], bursts[1])
        places = np.flatnonzero(kept)
        usual = places[cut.usual_segment]
        sizes_vary = bool(sizeless[series.kind[usual]].any())
        in_order = cut.distinct >= _TELLING and max(cut.coverage, cut.between) >= GOOD_ENOUGH
        telling = cut.distinct > 1 and (not sizes_vary or in_order)
        if not telling and not is_regular(np.diff(evidence.time_ns[starts])):
            continue
        rule = Rule(
            symbol,
            sizeless,
            kept,
            places[cut.anchor],
            cut.by_silence,
            usual,
            offset,
            burst_ns,
            telling,
            begins_after_silence(evidence, cut),
        )
        return Repetition(
            starts=places[starts],
            interrupted=_interrupted(series.time_ns, symbol, places[starts]),
            sizes_vary=sizes_vary,
            by_gaps=burst_ns is not None,
            rule=rule,
            parts=cut.length // choice.perhaps.length if choice.perhaps is not None else 0,
        )
    return None


def relative_spread(values: Integers) -> float:
    """Interquartile range over the median: 0 of equal values; infinite of a median of 0."""
    if not len(values):
        return float("inf")
    low, median, high = np.percentile(values, (25, 50, 75))
    return float((high - low) / median) if median > 0 else float("inf")


def is_regular(lengths_ns: Integers) -> bool:
    """Whether most of the time is made of periods about as long as those around them."""
    rows = max(1, len(lengths_ns) // _NEIGHBOURS)
    each = min(len(lengths_ns), _NEIGHBOURS)
    medians = np.median(lengths_ns[: rows * each].reshape(rows, each), axis=1)
    median = medians[np.minimum(np.arange(len(lengths_ns)) // each, rows - 1)]
    near = np.abs(lengths_ns - median) <= _NEAR_MEDIAN * median
    return bool(lengths_ns[near].sum() >= _LEAST_REGULAR_TIME * lengths_ns.sum() > 0)


def find_most_frequent(
    series: CallSeries, starts: Integers, symbol: Codes, among: Flags | None = None
) -> tuple[float, int]:
    """Part of iterations whose calls are those of the most frequent one, in the same order on every communicator; and
    the calls of that one.  `among`: which iterations are looked at; None: all."""
    first, end = int(starts[0]), int(starts[-1])
    lengths = np.diff(starts)
    iteration = np.repeat(np.arange(len(lengths)), lengths)
    communicator = series.communicator[first:end]
    order = np.argsort(communicator, kind="stable")
    new = np.ones(len(order), np.bool_)
    new[1:] = (np.diff(communicator[order]) != 0) | (np.diff(iteration[order]) != 0)
    place = np.arange(len(order))
    place -= np.maximum.accumulate(np.where(new, place, 0))
    placed = np.empty(len(order), np.uint64)
    # Communicator and symbol go together: what is hashed is (symbol, how many calls came before on its communicator).
    placed[order] = mixed(symbol[first:end][order].astype(np.uint64) << np.uint64(32) | place.astype(np.uint64))
    hashes = np.add.reduceat(placed, starts[:-1] - first)
    if among is not None:
        hashes, lengths = hashes[among], lengths[among]
    found, counts = np.unique(hashes, return_counts=True)
    # Of two that are as frequent, the one that came first.
    most = found[counts == counts.max()]
    winner = hashes[np.flatnonzero(np.isin(hashes, most))[0]]
    equal = hashes == winner
    return float(equal.mean()), int(lengths[np.flatnonzero(equal)[0]])


def _evidences(series: CallSeries, encode: Encode) -> Iterator[tuple[Flags, Codes, Flags]]:
    """As `_readings`, with which calls are evidence: those of unknown size, too, unless nothing comes of that."""
    sized = series.sized
    for sizeless, symbol in _readings(series, encode):
        heavy = _heavy(symbol, series.payload_bytes)
        if sized is None:
            yield sizeless, symbol, heavy
            continue
        if not sized.all():
            yield sizeless, symbol, heavy | ~sized
        if sized.any():
            yield sizeless, symbol, heavy & sized


def _readings(series: CallSeries, encode: Encode) -> Iterator[tuple[Flags, Codes]]:
    """What may stand for the calls: with all sizes, without those that vary, without any."""
    counts = np.bincount(series.symbol)
    again = recurring(series.symbol, counts) | (counts >= _OFTEN)
    of_kind = np.bincount(series.kind)
    # A kind most of whose calls have a size that hardly ever comes again.
    seldom = np.bincount(series.kind, weights=~again[series.symbol])
    odd = (seldom > of_kind / 2) & (of_kind >= LEAST)
    yield from _without_sizes(series, odd, encode, always=True)
    of_symbol = np.zeros(len(counts), series.kind.dtype)
    of_symbol[series.symbol] = series.kind
    varied = (np.bincount(of_symbol, minlength=len(of_kind)) > VARIED_SIZES) | odd
    if (varied != odd).any():
        yield from _without_sizes(series, varied, encode)
    if not varied.all():
        yield from _without_sizes(series, np.ones_like(odd), encode)


def _without_sizes(
    series: CallSeries, kinds: Flags, encode: Encode, *, always: bool = False
) -> Iterator[tuple[Flags, Codes]]:
    if not kinds.any():
        if always:
            yield kinds, series.symbol
        return
    yield kinds, encode(np.where(kinds[series.kind], -1 - series.kind.astype(np.int64), series.symbol))


def _heavy(symbol: Codes, payload_bytes: Integers) -> Flags:
    """The calls that are evidence: all but those of the lightest symbols, which together move a thousandth."""
    moved = np.bincount(symbol, weights=payload_bytes)
    throughout = recurring(symbol, np.bincount(symbol))
    total = moved[throughout].sum() if throughout.any() else moved.sum()
    if total <= 0:
        return np.ones(len(symbol), np.bool_)
    order = np.argsort(moved, kind="stable")
    light = np.zeros(len(moved), np.bool_)
    light[order[np.cumsum(moved[order]) <= _LIGHT * total]] = True
    result: Flags = ~light[symbol]
    return result


def _offset(evidence: Evidence, cut: Cut) -> int:
    """Calls before the one before which a usual segment is silent longest."""
    return int(np.argmax(silences(evidence, cut)))


def _starts(evidence: Evidence, cut: Cut, offset: int) -> Integers:
    """Where iterations begin: in every segment at the call before which it is usually silent longest."""
    usual = cut.anchors[:-1][cut.usual]
    starting = np.bincount(evidence.symbol[usual + offset]).argmax()
    found = [usual + offset]
    # Elsewhere at the anchor where that is it, or at the same call behind the longest silence of the segment.
    unusual = np.flatnonzero(~cut.usual)
    unusual = unusual[_shared(evidence, cut, unusual) >= ENOUGH * cut.length]
    if len(unusual) and not offset:
        found.append(cut.anchors[:-1][unusual])
    elif len(unusual):
        # As far from its end as usual, if the same calls are behind that.
        names = mixed(np.arange(int(evidence.symbol.max()) + 1, dtype=np.uint64))[evidence.symbol]
        sums = np.concatenate(([np.uint64(0)], np.cumsum(names)))
        ends, late = cut.anchors[unusual + 1], cut.anchors[unusual + 1] - (cut.length - offset)
        behind = names[usual[0] + offset : usual[0] + cut.length].sum(dtype=np.uint64)
        as_usual = (late >= cut.anchors[unusual]) & (sums[ends] - sums[late] == behind)
        found.append(late[as_usual])
        unusual = unusual[~as_usual]
        low, high = cut.anchors[0], cut.anchors[-1]
        silence = np.where(evidence.symbol[low:high] == starting, evidence.silence_ns[low:high], -1)
        longest = np.maximum.reduceat(silence, cut.anchors[:-1] - low)
        reached = (silence == np.repeat(longest, np.diff(cut.anchors))) & (silence >= 0)
        places = np.flatnonzero(reached)
        segment = np.searchsorted(cut.anchors, places + low, side="right") - 1
        own, first = np.unique(segment, return_index=True)
        found.append(places[first][np.isin(own, unusual)] + low)
    # Before the first anchor there may be another iteration, and so behind the last.
    model = np.sort(evidence.symbol[usual[0] : usual[0] + cut.length])
    before = int(cut.anchors[0]) + offset - cut.length
    if before >= 0 and np.array_equal(np.sort(evidence.symbol[before : before + cut.length]), model):
        found.append(np.array([before]))
    last = int(cut.anchors[-1]) + offset
    enough_ns = np.median(evidence.silence_ns[usual + offset]) / 2
    for after in (last, last + cut.length):
        if after < len(evidence.symbol) and (
            evidence.symbol[after] == starting
            or (evidence.silence_ns[after] >= enough_ns and evidence.symbol[after] in model)
        ):
            if after > last and not np.array_equal(np.sort(evidence.symbol[last:after]), model):
                break
            found.append(np.array([after]))
    # np.unique hashes, which takes ten times as long.
    starts = np.sort(np.concatenate(found))
    return starts[np.diff(starts, prepend=-1) > 0]


def _shared(evidence: Evidence, cut: Cut, segments: Integers) -> Integers:
    """How many calls of a usual segment each of these has."""
    lengths = np.diff(cut.anchors)[segments]
    places = np.repeat(cut.anchors[segments] - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
    size = int(evidence.symbol.max()) + 1
    usual = np.bincount(evidence.symbol[cut.usual_segment], minlength=size)
    own = np.repeat(np.arange(len(segments)), lengths) * size + evidence.symbol[places]
    own, counts = np.unique(own[usual[own % size] > 0], return_counts=True)
    found: Integers = np.bincount(
        own // size, weights=np.minimum(counts, usual[own % size]), minlength=len(segments)
    ).astype(np.int64)
    return found


def _interrupted(time_ns: Integers, symbol: Codes, starts: Integers) -> Flags:
    """Which iterations are longer than others because of calls that these have not, also such that move nothing."""
    names = mixed(np.arange(int(symbol.max()) + 1, dtype=np.uint64))[symbol]
    sums = np.concatenate(([np.uint64(0)], np.cumsum(names)))[starts]
    hashes, lengths_ns = np.diff(sums), np.diff(time_ns[starts])
    found, counts = np.unique(hashes, return_counts=True)
    usual = hashes == found[np.argmax(counts)]
    if usual.mean() < _LEAST_USUAL:
        return np.zeros(len(usual), np.bool_)
    result: Flags = ~usual & (lengths_ns > INTERRUPTED * np.median(lengths_ns[usual]))
    return result


def _bursts(time_ns: Integers) -> tuple[Integers, int] | None:
    """Which of equal calls begin a burst, where they come in bursts of one size, and after how much silence; None:
    they do not."""
    gaps = np.diff(time_ns)
    levels = np.unique(np.quantile(gaps, np.linspace(0, 1, 401), method="nearest"))
    if len(levels) < 2 or levels[-1] <= 0:
        return None
    ratios = levels[1:] / np.maximum(levels[:-1], 1)
    edge = int(np.argmax(ratios))
    if ratios[edge] < SILENCE:
        return None
    silent = gaps >= levels[edge + 1]
    if gaps[silent].sum() < _LEAST_SILENT_SHARE * gaps.sum():
        return None
    starts = np.flatnonzero(silent) + 1
    if len(starts) < LEAST:
        return None
    sizes, counts = np.unique(np.diff(starts), return_counts=True)
    usual = int(sizes[np.argmax(counts)])
    if usual < 2 or counts.max() < 0.7 * counts.sum():
        return None
    return np.concatenate(([0], starts)) if starts[0] == usual else starts, int(levels[edge + 1])
