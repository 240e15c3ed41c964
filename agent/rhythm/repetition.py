"""Finds the iterations of a job: where its series of calls repeats, without hints about the job.

A job repeats its calls from iteration to iteration, and within one also from micro-batch to micro-batch and layer to
layer; now and then there is a call more (logging, a checkpoint), and the first iterations differ (DDP orders its
buckets anew).  Calls on different communicators interleave as threads and streams happen to run; within a communicator
NCCL demands the same order every time.  So:

1. Sizes that are never the same (uneven all-to-alls) are left out of the comparison, operation and peer stay.
2. Calls that move next to nothing are no evidence: all those that together make a thousandth of the bytes.  Those of
   unknown size are; where nothing repeats with them, it is looked for without them.
3. An *anchor* is a call, or several in a row on one communicator, that may occur once an iteration.  It cuts the series
   into segments; segments are equal if they hold the same calls, in any order.  The *coverage* of an anchor is the part
   of calls in segments that are like the most frequent one, or the part of segments, whichever is less.
4. That segment must hold calls of every communicator that moves bytes: a layer repeats too, and lacks the gradients.
5. Of the anchors with the best coverage (within 6 %: one call more in every twentieth iteration does not make twenty
   iterations one) the one with the shortest segment wins; one whose segment is the same call over and over wins only
   where there is no other.  Training with an evaluation now and then repeats as a whole, too: where its segments are
   made of ten and more of a shorter one, which begins after a silence as there is none within it, that is the step.
   Layers and micro-batches do not pause so, lack the gradients, or are all that an iteration is made of.
6. An iteration begins at the call of the segment before which the GPU was silent longest (median): since the call
   before it was made, or since all operations before it had ended.

A repetition of a single call proves nothing by itself: there gaps in time decide.  Calls that come in bursts of the
same number, with silence between, make an iteration a burst; otherwise the calls must come regularly.  So must calls
that repeat only without their sizes, unless there are several different ones and they hardly ever leave their order.

All steps are numpy over whole columns: sums of random numbers by call, taken as hashes, stand for comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from railscope.agent.rhythm.series import CallSeries, Codes, Integers, dense_codes, mixed

Encode = Callable[[Integers], Codes]
"""Equal numbers get equal codes, 0 … k−1 in the order of their values."""
Hashes = NDArray[np.uint64]
Flags = NDArray[np.bool_]

_LIGHT: Final = 0.001
_LEAST_COVERAGE: Final = 0.5
_AS_GOOD: Final = 0.06
_GOOD_ENOUGH: Final = 0.98
_TELLING: Final = 4
"""So many different calls, in the same order throughout, make a repetition without their sizes and at any distance; an
AllGather and a ReduceScatter in turn may be the layers of requests that come at random."""
_LEAST: Final = 3
"""So many occurrences make a repetition."""
_LONGEST_ANCHOR: Final = 64
_VARIED_SIZES: Final = 8
_NEAR_MEDIAN: Final = 0.5
_LEAST_REGULAR_TIME: Final = 0.8
"""Periods are regular if those within half of the median around it make up so much of the time."""
_NEIGHBOURS: Final = 64
"""Periods whose median is one of them compared with: a busy machine's pace drifts."""
_STEPS_OF_A_CYCLE: Final = 10
_CALLS_OF_A_STEP: Final = 6
"""So many at least, as a layer may have fewer."""
_SAMPLED: Final = 4_000_000
_ANCHORS_OF_A_COUNT: Final = 2
_TRIAL: Final = 300_000
"""A long series is looked at as a whole only if so many calls from its middle repeat themselves; so an iteration of a
GPU may have a third of that."""
_SILENCE: Final = 3.0
"""A gap so many times as long as the next shorter ones is silence."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Repetition:
    """A series cut into iterations."""

    starts: Integers
    """Places in the series of the first calls of iterations; the last one's end is not known."""
    sizes_vary: bool
    """The calls repeat only if sizes of some or all are not looked at."""
    by_gaps: bool
    """Found by silence between bursts of one and the same call."""
    rule: Rule


@dataclass(frozen=True, slots=True, eq=False)
class _Evidence:
    """What is compared: the calls of a series that move bytes, by what stands for them."""

    time_ns: Integers
    silence_ns: Integers
    """Before each call, as of the whole series."""
    symbol: Codes
    communicator: Codes

    def middle(self, length: int) -> _Evidence:
        """As many calls from the middle."""
        low = (len(self.symbol) - length) // 2
        part = slice(low, low + length)
        return _Evidence(self.time_ns[part], self.silence_ns[part], self.symbol[part], self.communicator[part])


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """An anchor and what it makes of the series."""

    anchors: Integers
    usual: Flags
    """By segment: it is like the most frequent one."""
    length: int
    """Calls of the most frequent segment."""
    coverage: float
    distinct: int
    """Different calls of the most frequent segment."""
    anchor: Integers
    """The calls of one anchor, wherever segments begin."""
    by_silence: bool
    """Segments begin at the longest silence between anchors."""


def find_repetition(series: CallSeries, encode: Encode = dense_codes) -> Repetition | None:
    """Cut a series into iterations; None: it does not repeat itself.  `encode`: the fastest there is."""
    if len(series) < _LEAST:
        return None
    silence_ns = series.silence_ns
    for sizeless, symbol, kept in _evidences(series, encode):
        evidence = _Evidence(series.time_ns[kept], silence_ns[kept], symbol[kept], series.communicator[kept])
        if len(evidence.symbol) > 2 * _TRIAL and _best_cut(evidence.middle(_TRIAL), encode) is None:
            continue
        cut = _best_cut(evidence, encode)
        if cut is None:
            continue
        offset = _offset(evidence, cut)
        starts = _starts(evidence, cut, offset)
        if len(starts) < _LEAST:
            continue
        burst_ns = None
        if cut.distinct == 1:
            bursts = _bursts(evidence.time_ns[starts])
            starts, burst_ns = (starts, None) if bursts is None else (starts[bursts[0]], bursts[1])
        places = np.flatnonzero(kept)
        first = int(cut.anchors[np.flatnonzero(cut.usual)[0]])
        usual = places[first : first + cut.length]
        sizes_vary = bool(sizeless[series.kind[usual]].any())
        in_order = cut.distinct >= _TELLING and cut.coverage >= _GOOD_ENOUGH
        telling = cut.distinct > 1 and (not sizes_vary or in_order)
        if not telling and not is_regular(np.diff(evidence.time_ns[starts])):
            continue
        rule = Rule(symbol, sizeless, kept, places[cut.anchor], cut.by_silence, usual, offset, burst_ns, telling)
        return Repetition(places[starts], sizes_vary, burst_ns is not None, rule)
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


def find_most_frequent(series: CallSeries, starts: Integers, symbol: Codes) -> tuple[float, int]:
    """Part of iterations whose calls are those of the most frequent one, in the same order on every communicator; and
    the calls of that one."""
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
    found, counts = np.unique(np.add.reduceat(placed, starts[:-1] - first), return_counts=True)
    hashes = np.add.reduceat(placed, starts[:-1] - first)
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
    recurring = _recurring(series.symbol, counts)
    of_kind = np.bincount(series.kind)
    # A kind most of whose calls have a size that hardly ever comes again.
    seldom = np.bincount(series.kind, weights=~recurring[series.symbol])
    odd = (seldom > of_kind / 2) & (of_kind >= _LEAST)
    yield from _without_sizes(series, odd, encode, always=True)
    of_symbol = np.zeros(len(counts), series.kind.dtype)
    of_symbol[series.symbol] = series.kind
    varied = (np.bincount(of_symbol, minlength=len(of_kind)) > _VARIED_SIZES) | odd
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


def _recurring(symbol: Codes, counts: Integers) -> Flags:
    """By symbol: it occurs at least three times, and over at least half of the series."""
    n = len(symbol)
    first, last = np.full(len(counts), n), np.full(len(counts), -1)
    places = np.arange(n)
    first[symbol[::-1]] = places[::-1]
    last[symbol] = places
    result: Flags = (counts >= _LEAST) & (last - first >= n // 2)
    return result


def _heavy(symbol: Codes, payload_bytes: Integers) -> Flags:
    """The calls that are evidence: all but those of the lightest symbols, which together move a thousandth."""
    moved = np.bincount(symbol, weights=payload_bytes)
    recurring = _recurring(symbol, np.bincount(symbol))
    total = moved[recurring].sum() if recurring.any() else moved.sum()
    if total <= 0:
        return np.ones(len(symbol), np.bool_)
    order = np.argsort(moved, kind="stable")
    light = np.zeros(len(moved), np.bool_)
    light[order[np.cumsum(moved[order]) <= _LIGHT * total]] = True
    result: Flags = ~light[symbol]
    return result


def _best_cut(evidence: _Evidence, encode: Encode) -> _Cut | None:
    n = len(evidence.symbol)
    if n < _LEAST:
        return None
    moving = np.bincount(evidence.communicator)
    demanded = _recurring(evidence.communicator, moving)
    # Every iteration has a call of each of these: more iterations than calls of one there are not.
    most = int(moving[demanded].min()) + 1 if demanded.any() else n
    names = mixed(np.arange(int(evidence.symbol.max()) + 1, dtype=np.uint64))[evidence.symbol]
    sums = np.concatenate(([np.uint64(0)], np.cumsum(names)))
    order = np.argsort(evidence.communicator, kind="stable")
    gram = names[order]
    ends = np.searchsorted(evidence.communicator[order], evidence.communicator[order], side="right")
    alike = bool((evidence.symbol == evidence.symbol[0]).all())
    cuts: list[_Cut] = []
    length = 1
    while True:
        cuts += _cuts_of(evidence, sums, order, gram, length, most, demanded, encode)
        if max((cut.coverage for cut in cuts if cut.distinct > 1), default=0.0) >= _GOOD_ENOUGH:
            break
        length *= 2
        if alike or length > min(_LONGEST_ANCHOR, n):
            break
        # Twice as many calls of the communicator: what comes `length / 2` later belongs to it.
        later = np.minimum(np.arange(n) + length // 2, n - 1)
        inside = np.arange(n) + length // 2 < ends
        gram = np.where(inside, mixed(gram * np.uint64(3) + gram[later]), gram + np.uint64(length))
    for several in (True, False):
        good = [cut for cut in cuts if (cut.distinct > 1) == several]
        if good:
            least = max(cut.coverage for cut in good) - _AS_GOOD
            best = min((cut for cut in good if cut.coverage >= least), key=_rank)
            return min((cut for cut in good if _is_step(evidence, cut, best)), key=_rank, default=best)
    return None


def _usual(cut: _Cut) -> slice:
    """The calls of a most frequent segment."""
    start = int(cut.anchors[np.flatnonzero(cut.usual)[0]])
    return slice(start, start + cut.length)


def _rank(cut: _Cut) -> tuple[int, float, int]:
    return cut.length, -cut.coverage, int(cut.anchors[0])


def _is_step(evidence: _Evidence, cut: _Cut, cycle: _Cut) -> bool:
    """Whether the segments of a cut are steps of which, and of something else, those of another are made."""
    if cut.length < _CALLS_OF_A_STEP or cut.length * _STEPS_OF_A_CYCLE > cycle.length:
        return False
    size = int(evidence.symbol.max()) + 1
    step, whole = (np.bincount(evidence.symbol[_usual(one)], minlength=size) for one in (cut, cycle))
    if np.array_equal(step * (cycle.length // cut.length), whole):
        # Forwards and backwards of a pipeline's micro-batches, in another order at the ends.
        return False
    silence = np.sort(_silences(evidence, cut))
    return bool(silence[-1] >= _SILENCE * max(1.0, float(np.quantile(silence[:-1], 0.9))))


def _cuts_of(
    evidence: _Evidence,
    sums: Hashes,
    order: Integers,
    gram: Hashes,
    length: int,
    most: int,
    demanded: Flags,
    encode: Encode,
) -> list[_Cut]:
    """What the anchors of one length make of the series, as far as they explain it."""
    n = len(gram)
    codes = np.empty(n, np.int32)
    codes[order] = encode(gram.view(np.int64))
    counts = np.bincount(codes)
    possible = _recurring(codes, counts) & (counts <= most)
    # Anchors that occur equally often mostly cut the same way.
    first = np.full(len(counts), n)
    first[codes[::-1]] = np.arange(n)[::-1]
    chosen: list[int] = []
    candidates = np.flatnonzero(possible)
    previous, same = -1, 0
    for code in candidates[np.lexsort((first[candidates], -counts[candidates]))].tolist():
        same = same + 1 if counts[code] == previous else 1
        previous = int(counts[code])
        if same <= _ANCHORS_OF_A_COUNT:
            chosen.append(code)
    wanted = np.zeros(len(counts), np.bool_)
    wanted[chosen] = True
    places = np.flatnonzero(wanted[codes])
    grouped = places[np.argsort(codes[places], kind="stable")]
    bounds = np.concatenate(([0], np.cumsum(counts[np.sort(np.array(chosen, np.int64))])))
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)

    def calls_of(anchor: int) -> Integers:
        return order[place[anchor] : place[anchor] + length]

    cuts = [_cut(evidence, sums, grouped[low:high], calls_of(int(grouped[low]))) for low, high in pairwise(bounds)]
    return [
        cut for cut in cuts if cut is not None and cut.coverage >= _LEAST_COVERAGE and _holds(evidence, cut, demanded)
    ]


def _cut(evidence: _Evidence, sums: Hashes, anchors: Integers, calls: Integers) -> _Cut | None:
    """What anchors make of the series; or, where calls that lie close together change places around the anchor, what
    the longest silences between anchors make of it, if that explains more."""
    cut = _cut_at(evidence, sums, anchors, calls)
    if cut is not None and cut.coverage >= _GOOD_ENOUGH:
        return cut
    low, high = anchors[0], anchors[-1]
    silence = evidence.silence_ns[low:high]
    longest = np.maximum.reduceat(silence, anchors[:-1] - low)
    places = np.flatnonzero(silence == np.repeat(longest, np.diff(anchors))) + low
    segment = np.searchsorted(anchors, places, side="right")
    silent = places[np.unique(segment, return_index=True)[1]]
    other = _cut_at(evidence, sums, silent, calls, by_silence=True) if len(silent) >= _LEAST else None
    return max((one for one in (cut, other) if one is not None), key=lambda one: one.coverage, default=None)


def _cut_at(
    evidence: _Evidence, sums: Hashes, anchors: Integers, calls: Integers, *, by_silence: bool = False
) -> _Cut | None:
    hashes = sums[anchors[1:]] - sums[anchors[:-1]]
    found, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    lengths = np.diff(anchors)
    covered = counts * lengths[first]
    # Among equally good ones, the one that comes first.
    winner = int(np.lexsort((first, -covered))[0])
    if counts[winner] < 2:
        return None
    coverage = float(min(covered[winner] / (anchors[-1] - anchors[0]), counts[winner] / len(hashes)))
    start, length = int(anchors[first[winner]]), int(lengths[first[winner]])
    distinct = len(np.unique(evidence.symbol[start : start + length])) if coverage >= _LEAST_COVERAGE else 0
    return _Cut(anchors, hashes == found[winner], length, coverage, distinct, calls, by_silence)


def _holds(evidence: _Evidence, cut: _Cut, demanded: Flags) -> bool:
    """Whether the most frequent segment has calls of all these communicators."""
    missing = demanded.copy()
    missing[evidence.communicator[_usual(cut)]] = False
    return not missing.any()


def _offset(evidence: _Evidence, cut: _Cut) -> int:
    """Calls before the one before which a usual segment is silent longest."""
    return int(np.argmax(_silences(evidence, cut)))


def _silences(evidence: _Evidence, cut: _Cut) -> NDArray[np.float64]:
    """Before each call of a usual segment, the median."""
    usual = cut.anchors[:-1][cut.usual]
    sampled = usual[:: max(1, len(usual) * cut.length // _SAMPLED)]
    found: NDArray[np.float64] = np.median(evidence.silence_ns[sampled[:, None] + np.arange(cut.length)], axis=0)
    return found


def _starts(evidence: _Evidence, cut: _Cut, offset: int) -> Integers:
    """Where iterations begin: in every segment at the call before which it is usually silent longest."""
    usual = cut.anchors[:-1][cut.usual]
    starting = np.bincount(evidence.symbol[usual + offset]).argmax()
    found = [usual + offset]
    # Elsewhere at the anchor where that is it, or at the same call after the longest silence of the segment.
    unusual = np.flatnonzero(~cut.usual)
    if len(unusual) and not offset:
        found.append(cut.anchors[:-1][unusual])
    elif len(unusual):
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
            evidence.symbol[after] == starting or evidence.silence_ns[after] >= enough_ns
        ):
            if after > last and not np.array_equal(np.sort(evidence.symbol[last:after]), model):
                break
            found.append(np.array([after]))
    # np.unique hashes, which takes ten times as long.
    starts = np.sort(np.concatenate(found))
    return starts[np.diff(starts, prepend=-1) > 0]


def _bursts(time_ns: Integers) -> tuple[Integers, int] | None:
    """Which of equal calls begin a burst, where they come in bursts of one size, and after how much silence; None:
    they do not."""
    gaps = np.diff(time_ns)
    levels = np.unique(np.quantile(gaps, np.linspace(0, 1, 401), method="nearest"))
    if len(levels) < 2 or levels[-1] <= 0:
        return None
    ratios = levels[1:] / np.maximum(levels[:-1], 1)
    edge = int(np.argmax(ratios))
    if ratios[edge] < _SILENCE:
        return None
    silent = gaps >= levels[edge + 1]
    if gaps[silent].sum() < _LEAST_SILENT_SHARE * gaps.sum():
        return None
    starts = np.flatnonzero(silent) + 1
    if len(starts) < _LEAST:
        return None
    sizes, counts = np.unique(np.diff(starts), return_counts=True)
    usual = int(sizes[np.argmax(counts)])
    if usual < 2 or counts.max() < 0.7 * counts.sum():
        return None
    return np.concatenate(([0], starts)) if starts[0] == usual else starts, int(levels[edge + 1])
