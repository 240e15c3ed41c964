"""Cuts a series of calls into segments by anchors, and tells how well each cut explains the series.

An *anchor* is a call, or several in a row on one communicator.  It cuts the series into segments; segments are equal if
they hold the same calls, in any order.  The *coverage* of an anchor is the part of calls in segments that are like the
most frequent one, or the part of segments, whichever is less.

A segment that is more than twice as long as the most frequent one is an *interlude*: other calls lie in it, such as
those of an evaluation.  The *coverage between interludes* leaves these out.

Sums of random numbers by call, taken as hashes, stand for comparisons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from railscope.agent.rhythm.series import Codes, Integers, mixed

Encode = Callable[[Integers], Codes]
"""Equal numbers get equal codes, 0 … k−1 in the order of their values."""
Hashes = NDArray[np.uint64]
Flags = NDArray[np.bool_]

LEAST: Final = 3
"""So many occurrences make a repetition."""
LEAST_COVERAGE: Final = 0.5
GOOD_ENOUGH: Final = 0.98
VARIED_SIZES: Final = 8
"""Calls of one kind with more sizes have any size."""
SILENCE: Final = 3.0
"""A gap so many times as long as the next shorter ones is silence."""
_LONGEST_ANCHOR: Final = 64
_ANCHORS_OF_A_COUNT: Final = 2
_INTERLUDE: Final = 2
"""So many times the calls of the most frequent segment."""
_SAMPLED: Final = 4_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What is compared: the calls of a series that move bytes, by what stands for them."""

    time_ns: Integers
    silence_ns: Integers
    """Before each call, as of the whole series."""
    symbol: Codes
    communicator: Codes
    kind: Codes
    payload_bytes: Integers

    def __len__(self) -> int:
        return len(self.time_ns)

    def part(self, part: slice | Flags) -> Evidence:
        """Some of the calls."""
        return Evidence(
            self.time_ns[part],
            self.silence_ns[part],
            self.symbol[part],
            self.communicator[part],
            self.kind[part],
            self.payload_bytes[part],
        )

    def middle(self, length: int) -> Evidence:
        """As many calls from the middle."""
        low = (len(self) - length) // 2
        return self.part(slice(low, low + length))


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """An anchor and what it makes of the series."""

    anchors: Integers
    usual: Flags
    """By segment: it is like the most frequent one."""
    length: int
    """Calls of the most frequent segment."""
    coverage: float
    between: float
    """Coverage between interludes."""
    interludes: int
    spans: bool
    """Its anchors are found over at least half of the series, and not more often than an iteration can be."""
    distinct: int
    """Different calls of the most frequent segment."""
    anchor: Integers
    """The calls of one anchor, wherever segments begin."""
    by_silence: bool
    """Segments begin at the longest silence between anchors."""

    @property
    def usual_segment(self) -> slice:
        """The calls of a most frequent segment."""
        start = int(self.anchors[np.flatnonzero(self.usual)[0]])
        return slice(start, start + self.length)

    @property
    def usual_count(self) -> int:
        return int(self.usual.sum())


def recurring(symbol: Codes, counts: Integers) -> Flags:
    """By symbol: it occurs at least three times, and over at least half of the series."""
    n = len(symbol)
    first, last = np.full(len(counts), n), np.full(len(counts), -1)
    places = np.arange(n)
    first[symbol[::-1]] = places[::-1]
    last[symbol] = places
    result: Flags = (counts >= LEAST) & (last - first >= n // 2)
    return result


def find_cuts(evidence: Evidence, encode: Encode, most: int, *, enough: Callable[[Cut], bool]) -> list[Cut]:
    """What anchors make of the series, as far as they explain it, or what lies between interludes.

    Args:
        evidence: at least one call.
        encode: the fastest there is.
        most: occurrences of an anchor that may be in every iteration.
        enough: a cut after which no longer anchors are tried.
    """
    n = len(evidence)
    names = mixed(np.arange(int(evidence.symbol.max()) + 1, dtype=np.uint64))[evidence.symbol]
    sums = np.concatenate(([np.uint64(0)], np.cumsum(names)))
    order = np.argsort(evidence.communicator, kind="stable")
    gram = names[order]
    ends = np.searchsorted(evidence.communicator[order], evidence.communicator[order], side="right")
    alike = bool((evidence.symbol == evidence.symbol[0]).all())
    cuts: list[Cut] = []
    length = 1
    while True:
        found = _cuts_of(evidence, sums, order, gram, length, most, encode)
        cuts += found
        if any(enough(cut) for cut in found):
            return cuts
        length *= 2
        if alike or length > min(_LONGEST_ANCHOR, n):
            return cuts
        # Twice as many calls of the communicator: what comes `length / 2` later belongs to it.
        later = np.minimum(np.arange(n) + length // 2, n - 1)
        inside = np.arange(n) + length // 2 < ends
        gram = np.where(inside, mixed(gram * np.uint64(3) + gram[later]), gram + np.uint64(length))


def silences(evidence: Evidence, cut: Cut) -> NDArray[np.float64]:
    """Before each call of a usual segment, the median."""
    usual = cut.anchors[:-1][cut.usual]
    sampled = usual[:: max(1, len(usual) * cut.length // _SAMPLED)]
    found: NDArray[np.float64] = np.median(evidence.silence_ns[sampled[:, None] + np.arange(cut.length)], axis=0)
    return found


def begins_after_silence(evidence: Evidence, cut: Cut) -> bool:
    """Whether a usual segment has a silence as there is none but that one within it."""
    silence = np.sort(silences(evidence, cut))
    return bool(silence[-1] >= SILENCE * max(1.0, float(np.quantile(silence[:-1], 0.9)))) if len(silence) > 1 else False


def _cuts_of(
    evidence: Evidence, sums: Hashes, order: Integers, gram: Hashes, length: int, most: int, encode: Encode
) -> list[Cut]:
    """What the anchors of one length make of the series."""
    n = len(gram)
    codes = np.empty(n, np.int32)
    codes[order] = encode(gram.view(np.int64))
    counts = np.bincount(codes)
    spans = recurring(codes, counts) & (counts <= most)
    # Anchors that occur equally often mostly cut the same way.
    first = np.full(len(counts), n)
    first[codes[::-1]] = np.arange(n)[::-1]
    chosen: list[int] = []
    for candidates in (np.flatnonzero(spans), np.flatnonzero(~spans & (counts >= LEAST))):
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
    ascending = np.sort(np.array(chosen, np.int64))
    bounds = np.concatenate(([0], np.cumsum(counts[ascending])))
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    cuts = []
    for (low, high), code in zip(pairwise(bounds), ascending.tolist(), strict=True):
        anchors = grouped[low:high]
        calls = order[place[anchors[0]] : place[anchors[0]] + length]
        cuts += _cuts_by(evidence, sums, anchors, calls, spans=bool(spans[code]))
    return [cut for cut in cuts if max(cut.coverage, cut.between) >= LEAST_COVERAGE]


def _cuts_by(evidence: Evidence, sums: Hashes, anchors: Integers, calls: Integers, *, spans: bool) -> list[Cut]:
    """What anchors make of the series; or, where calls that lie close together change places around the anchor, what
    the longest silences between anchors make of it, if that explains more."""
    cuts = _cuts_at(evidence, sums, anchors, calls, spans=spans)
    if not spans or max((cut.coverage for cut in cuts), default=0.0) >= GOOD_ENOUGH:
        return cuts
    low, high = anchors[0], anchors[-1]
    silence = evidence.silence_ns[low:high]
    longest = np.maximum.reduceat(silence, anchors[:-1] - low)
    places = np.flatnonzero(silence == np.repeat(longest, np.diff(anchors))) + low
    segment = np.searchsorted(anchors, places, side="right")
    silent = places[np.unique(segment, return_index=True)[1]]
    others = _cuts_at(evidence, sums, silent, calls, spans=spans, by_silence=True) if len(silent) >= LEAST else []
    return max(cuts, others, key=lambda made: max((cut.coverage for cut in made), default=0.0))


def _cuts_at(
    evidence: Evidence, sums: Hashes, anchors: Integers, calls: Integers, *, spans: bool, by_silence: bool = False
) -> list[Cut]:
    """The cut by the segments that hold most calls, and by those that come most often, where these are others."""
    hashes = sums[anchors[1:]] - sums[anchors[:-1]]
    found, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    lengths = np.diff(anchors)
    covered = counts * lengths[first]
    # Among equally good ones, the one that comes first.
    winners = {int(np.lexsort((first, -covered))[0]), int(np.lexsort((first, -counts))[0])}
    cuts = []
    for winner in sorted(winners):
        if counts[winner] < 2:
            continue
        coverage = float(min(covered[winner] / (anchors[-1] - anchors[0]), counts[winner] / len(hashes)))
        start, length = int(anchors[first[winner]]), int(lengths[first[winner]])
        interlude = lengths > _INTERLUDE * length
        between = float(min(covered[winner] / lengths[~interlude].sum(), counts[winner] / (~interlude).sum()))
        explains = max(coverage, between) >= LEAST_COVERAGE
        cut = Cut(
            anchors=anchors,
            usual=hashes == found[winner],
            length=length,
            coverage=coverage,
            between=between,
            interludes=int(interlude.sum()),
            spans=spans,
            distinct=len(np.unique(evidence.symbol[start : start + length])) if explains else 0,
            anchor=calls,
            by_silence=by_silence,
        )
        cuts.append(cut)
    return cuts
