"""Follows the iterations of a stream of calls whose pattern is known.

Anchors cut the stream into segments, as they did when the pattern was learnt (agent/rhythm/repetition.py).  A segment
that holds at least half of the calls of a usual one is an iteration.  One with calls that are not in the pattern, or
without some that are, is an *odd* one: an evaluation or a checkpoint lies in it, or beside it, and how long the
iteration itself took is then known only as far as that took no time.  Segments with less than half are none, such as
those of a forward pass alone; what they took makes the iteration before them odd.

An iteration is known once the segment behind its successor's beginning is whole.  Where calls were lost, the iteration
in which that was noticed is not told: its beginning or end may be among them.

All steps are numpy over columns; the calls that wait for the end of their segment are the only memory.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from railscope.agent.rhythm.pattern import Calls, Flags, Hashes, Pattern
from railscope.agent.rhythm.repetition import ENOUGH, INTERRUPTED, is_regular
from railscope.agent.rhythm.series import Integers
from railscope.agent.rhythm.strangers import Strangers

ITERATION: Final = np.dtype([("start_ns", "<i8"), ("end_ns", "<i8"), ("silence_ns", "<i8"), ("odd", "?")])
"""From its first call to the next one's; the silence before that one; and whether other calls lie within."""
Iterations = NDArray[Any]

_BLOCK: Final = 16
"""Iterations of a pattern that is not telling are told together, if they were regular."""
_MOST_HELD: Final = 512
"""Irregular ones are held back until those that follow show that the job was only disturbed; after so many it is
another."""
_PAUSE: Final = 8.0
"""So many times the usual length."""
_MOST_PAUSES: Final = 1 / 16
"""Of iterations: where more are that long, nothing about them is usual."""
_REMEMBERED: Final = 4096
"""Lengths that were told, of a pattern that is not telling: the report judges all of a recording."""
_LATELY_NS: Final = 10_000_000_000
_LATELY: Final = 16
"""What came in so much time, and so many times the usual length, is of late."""
_MOST_LATELY: Final = 1024
"""Times at which calls were added, of them."""
_RECENT: Final = 64
_LEAST_LIKE_IT: Final = 0.25
"""Of recent segments, that are as usual, or the pattern is no longer the job's."""


class Tracker:
    """Of one GPU's calls.  Not thread-safe."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self._waiting = Calls.nothing()
        """From the beginning of the last segment on, which is not whole."""
        self._before_ns: int | None = None
        """When the call before those was made."""
        self._begun = False
        """The first call that waits is the beginning of a segment."""
        self._open: tuple[int, bool, bool] | None = None
        """When the last iteration began, whether it is odd so far, and whether other calls than usual lie in it that
        are no evidence."""
        self._lost_ns: list[int] = []
        self._held: Iterations = np.zeros(0, ITERATION)
        """Of a pattern that is not telling, what was not told yet."""
        self._judged = 0
        """Of those, how many were found irregular."""
        self._told_ns: Integers = np.zeros(0, np.int64)
        """Of such a pattern, how long the last ones were that were told."""
        self._recent: list[bool] = []
        """Whether each of the last segments is as usual."""
        self._first_ns: int | None = None
        self._strangers = Strangers(pattern)
        self._moved_bytes = 0
        self._lately: deque[tuple[int, int, int]] = deque()
        """When calls were added, the payload of all of them, and that of usual segments which ended there."""
        self.segment_ns = 0
        """When the last segment that is whole ended; 0: none has."""
        self.failed = False
        """The pattern is not the job's, or no longer."""

    @property
    def waiting(self) -> Calls:
        """The calls of the segment that is not whole."""
        return self._waiting

    @property
    def is_doubtful(self) -> bool:
        """Whether less than half of the payload of late was that of usual iterations, as in an evaluation, or where
        the pattern is an evaluation's and the job goes on to train."""
        if not self._lately or self._lately[-1][0] - self._lately[0][0] < self._lately_ns / 2:
            return False
        return sum(usual for _, _, usual in self._lately) < sum(moved for _, moved, _ in self._lately) / 2

    def record_loss(self, time_ns: int) -> None:
        """Calls up to this moment were lost since the last ones that were added."""
        self._lost_ns.append(time_ns)

    def add(self, calls: Calls) -> Iterations:
        """Take the next calls; returns the iterations that are known now and were not before (dtype ITERATION)."""
        if not len(calls):
            return np.zeros(0, ITERATION)
        if self._first_ns is None:
            self._first_ns = int(calls.time_ns[0])
        self._count(int(calls.time_ns[-1]), int(calls.payload_bytes.sum()), 0)
        waiting = self._waiting = self._waiting.followed_by(calls)
        pattern = self.pattern
        name, index, evidence = self._names(waiting)
        places = np.flatnonzero(evidence)
        before_ns = self._before_ns if self._before_ns is not None else int(waiting.time_ns[0])
        silence_ns = np.diff(waiting.time_ns, prepend=before_ns)[places]
        begins = self._segments(name[places], waiting.communicator[places], silence_ns)
        if len(begins) < 2:
            return np.zeros(0, ITERATION)
        low, high = int(begins[0]), int(begins[-1])
        lengths = np.diff(begins)
        segment = np.repeat(np.arange(len(lengths)), lengths)
        own = index[places[low:high]]
        size = len(pattern.names)
        cells = np.bincount(segment * (size + 1) + own, minlength=len(lengths) * (size + 1))
        shared = np.minimum(cells.reshape(-1, size + 1)[:, :size], pattern.counts).sum(axis=1)
        usual = (shared == pattern.length) & (lengths == pattern.length)
        starts = self._starts(begins, usual, name[places], silence_ns)
        counted = shared >= ENOUGH * pattern.length
        edges = places[begins]
        # Calls that are no evidence, as of a metric, tell of an evaluation where an iteration is longer as well.
        light = np.diff(edges) - lengths != pattern.light_calls
        found = self._close(waiting.time_ns[places[starts]], silence_ns[starts], counted, usual, light)
        strange = own == size
        named = np.bincount(segment[~strange], minlength=len(lengths))
        self._learn(waiting, places[low:high][strange], segment[strange], usual, waiting.time_ns[edges], named)
        self._moved_bytes += int(waiting.payload_bytes[places[low:high]].sum())
        self._count(int(calls.time_ns[-1]), 0, int(waiting.payload_bytes[places[low:high]][usual[segment]].sum()))
        self.segment_ns = int(waiting.time_ns[places[high]])
        cut = int(places[high])
        self._before_ns = int(waiting.time_ns[cut - 1]) if cut else self._before_ns
        self._waiting = waiting.part(cut)
        self._begun = True
        return self._told(found)

    def _count(self, now_ns: int, moved_bytes: int, usual_bytes: int) -> None:
        """Remember what was moved, as far as that was of late."""
        self._lately.append((now_ns, moved_bytes, usual_bytes))
        while now_ns - self._lately[0][0] > self._lately_ns or len(self._lately) > _MOST_LATELY:
            self._lately.popleft()

    @property
    def _lately_ns(self) -> int:
        return max(_LATELY_NS, _LATELY * self.pattern.median_ns)

    def drop_waiting(self, kept: int) -> None:
        """Keep only the latest of the calls that wait: the iteration under way is not told."""
        cut = len(self._waiting) - kept
        if cut > 0:
            self._before_ns = int(self._waiting.time_ns[cut - 1])
            self._waiting = self._waiting.part(cut)
            self._begun, self._open = False, None

    def _names(self, calls: Calls) -> tuple[Hashes, Integers, Flags]:
        """The name of each call, its place among the pattern's (as many: none), and whether it is evidence."""
        pattern = self.pattern
        name = calls.symbol
        if len(pattern.sizeless):
            name = np.where(_among(calls.kind, pattern.sizeless), calls.kind, name)
        index = np.searchsorted(pattern.names, name)
        index[pattern.names[np.minimum(index, len(pattern.names) - 1)] != name] = len(pattern.names)
        strange = index == len(pattern.names)
        light = strange & ((calls.payload_bytes <= pattern.light_bytes) | _among(name, pattern.light))
        if pattern.burst_ns is not None:
            light |= strange  # only silence between equal calls tells iterations apart
        return name, index, ~light

    def _segments(self, name: Hashes, communicator: Integers, silence_ns: Integers) -> Integers:
        """Places among the evidence at which segments begin, the last one's included."""
        pattern = self.pattern
        if pattern.burst_ns is not None:
            begins = np.flatnonzero(silence_ns >= pattern.burst_ns)
            return self._with_first(begins)
        own = np.flatnonzero(communicator == pattern.anchor_communicator)
        long = len(pattern.anchor)
        at = np.arange(max(0, len(own) - long + 1))
        for place, wanted in enumerate(pattern.anchor):
            at = at[name[own[at + place]] == wanted]
        anchors = own[at]
        if not pattern.by_silence:
            return anchors
        if len(anchors) < 2:
            return anchors[:0]
        low, high = int(anchors[0]), int(anchors[-1])
        silence = silence_ns[low:high]
        longest = np.maximum.reduceat(silence, anchors[:-1] - low)
        places = np.flatnonzero(silence == np.repeat(longest, np.diff(anchors))) + low
        longest_at: Integers = places[np.unique(np.searchsorted(anchors, places, side="right"), return_index=True)[1]]
        return self._with_first(longest_at)

    def _with_first(self, begins: Integers) -> Integers:
        """With the first call that waits, if a segment begins there."""
        if not self._begun or (len(begins) and not begins[0]):
            return begins
        return np.concatenate((np.zeros(1, np.int64), begins))

    def _starts(self, begins: Integers, usual: Flags, name: Hashes, silence_ns: Integers) -> Integers:
        """Where the iteration of each segment begins: as usual; in odd ones as far from its end as usual, if the same
        calls are behind that, else at the longest silence before the call that usually is the first."""
        pattern = self.pattern
        lengths = np.diff(begins)
        starts: Integers = begins[:-1] + np.minimum(pattern.offset, lengths - 1)
        if not pattern.offset or usual.all():
            return starts
        sums = np.concatenate(([np.uint64(0)], np.cumsum(name)))
        late = begins[1:] - (pattern.length - pattern.offset)
        as_usual = (late >= begins[:-1]) & (sums[begins[1:]] - sums[late] == pattern.behind_start)
        starts[~usual & as_usual] = late[~usual & as_usual]
        low, high = int(begins[0]), int(begins[-1])
        silence = np.where(name[low:high] == pattern.starting, silence_ns[low:high], -1)
        longest = np.maximum.reduceat(silence, begins[:-1] - low)
        places = np.flatnonzero((silence == np.repeat(longest, np.diff(begins))) & (silence >= 0))
        segment, first = np.unique(np.searchsorted(begins, places + low, side="right") - 1, return_index=True)
        odd = ~(usual | as_usual)[segment]
        starts[segment[odd]] = places[first[odd]] + low
        return starts

    def _close(self, time_ns: Integers, silence_ns: Integers, counted: Flags, usual: Flags, light: Flags) -> Iterations:
        """The iterations between the beginnings of these segments, and the one that was open.

        `light`: there are other calls in a segment that are no evidence.
        """
        at = np.flatnonzero(counted)
        if not len(at):
            if self._open is not None:
                self._open = self._open[0], True, self._open[2]
            return np.zeros(0, ITERATION)
        begin_ns = time_ns[at]
        ends_ns, silences_ns = begin_ns[1:], silence_ns[at[1:]]
        starts_ns = begin_ns[:-1]
        odd, lighter = (_any_between(flags, at) for flags in (~usual, light))
        if self._open is not None:
            opened_ns, opened_odd, opened_light = self._open
            starts_ns = np.concatenate(([opened_ns], starts_ns))
            ends_ns = np.concatenate((begin_ns[:1], ends_ns))
            silences_ns = np.concatenate((silence_ns[at[:1]], silences_ns))
            first = int(at[0]) + 1
            odd = np.concatenate(([opened_odd or bool((~usual[:first]).any())], odd))
            lighter = np.concatenate(([opened_light or bool(light[:first].any())], lighter))
        found = np.zeros(len(starts_ns), ITERATION)
        long = ends_ns - starts_ns > INTERRUPTED * self.pattern.median_ns
        found["start_ns"], found["end_ns"], found["silence_ns"] = starts_ns, ends_ns, silences_ns
        found["odd"] = odd | (lighter & long)
        last = int(at[-1])
        self._open = int(begin_ns[-1]), bool((~usual[last:]).any()), bool(light[last:].any())
        return self._without_lost(found)

    def _without_lost(self, found: Iterations) -> Iterations:
        if not self._lost_ns or not len(found):
            return found
        lost_ns = np.sort(np.array(self._lost_ns, np.int64))
        within = np.searchsorted(lost_ns, found["end_ns"], side="right") - np.searchsorted(lost_ns, found["start_ns"])
        self._lost_ns = [moment for moment in self._lost_ns if moment >= int(found["end_ns"][-1])]
        whole: Iterations = found[within == 0]
        return whole

    def _learn(
        self, calls: Calls, strange: Integers, segment: Integers, usual: Flags, edges_ns: Integers, named: Integers
    ) -> None:
        """Find out whether the pattern is still the job's.

        Args:
            calls: those that wait.
            strange: places of calls that are not in the pattern.
            segment: in which each of these is.
            usual: by segment.
            edges_ns: when segments begin, and the last one ends.
            named: by segment, calls that are in the pattern.
        """
        self._recent = (self._recent + usual.tolist())[-_RECENT:]
        if len(self._recent) == _RECENT and sum(self._recent) < _LEAST_LIKE_IT * _RECENT:
            self.failed = True
        own = calls.communicator[strange]
        for communicator in np.unique(own).tolist():
            if communicator not in self.pattern.communicators:
                places = strange[own == communicator]
                self._strangers.record(
                    communicator,
                    calls.time_ns[places],
                    int(calls.payload_bytes[places].sum()),
                    segment[own == communicator],
                    edges_ns,
                    named,
                )
        self._strangers.end_segments(usual)
        if self._strangers.belong(self._moved_bytes, since_ns=self._first_ns or 0):
            self.failed = True

    def _told(self, found: Iterations) -> Iterations:
        """Hold back what proves nothing unless it is regular, together with what was told before."""
        if self.pattern.telling or not len(found):
            return found
        held = self._held = np.concatenate((self._held, found))
        if len(held) - self._judged < _BLOCK:
            return found[:0]
        self._judged = len(held)
        lengths_ns = np.concatenate((self._told_ns, held["end_ns"] - held["start_ns"]))
        if not _are_regular(lengths_ns):
            self.failed |= len(held) >= _MOST_HELD
            return found[:0]
        self._held, self._judged, self._told_ns = found[:0], 0, lengths_ns[-_REMEMBERED:]
        return held


def _are_regular(lengths_ns: Integers) -> bool:
    """Whether iterations are about as long as those around them, but for a few pauses of the whole job."""
    pauses = lengths_ns > _PAUSE * np.median(lengths_ns)
    return is_regular(lengths_ns[~pauses] if pauses.mean() <= _MOST_PAUSES else lengths_ns)


def _any_between(flags: Flags, at: Integers) -> Flags:
    """Whether any is set from each of these places to the next one, both included."""
    so_far = np.concatenate(([0], np.cumsum(flags)))
    result: Flags = so_far[at[1:] + 1] - so_far[at[:-1]] > 0
    return result


def _among(values: Hashes, known: Hashes) -> Flags:
    """Whether each is one of these, which ascend."""
    if not len(known):
        return np.zeros(len(values), np.bool_)
    found: Flags = known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values
    return found
