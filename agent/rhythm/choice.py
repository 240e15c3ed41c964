"""Chooses, of all cuts of a series, the one whose segments are the job's iterations.

1. A segment must hold calls of every communicator that moves bytes throughout: a layer repeats too, and lacks the
   gradients.  Of the cuts with the best coverage (within 6 %: one call more in every twentieth iteration does not make
   twenty iterations one) the one with the shortest segment wins; one whose segment is the same call over and over wins
   only where there is no other.
2. Training with an evaluation now and then repeats as a whole, too: where its segments are made of ten and more of a
   shorter one, which begins after a silence as there is none within it, that is the step.  Layers and micro-batches do
   not pause so, lack the gradients, or are all that an iteration is made of.  Gradients on a communicator of the
   micro-batches are told from an evaluation as those on one of their own are (`between`).
3. Evaluations may be most of a series, come at its beginning only, or at any distance, and use a communicator of their
   own (`between`).  So cuts that explain what lies between interludes count as well.  The heaviest of these segments is
   the training step, or holds some; of a lighter one that explains it, the lighter is.  It is the iteration unless what
   was found by 1 and 2 is heavier, or explains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from railscope.agent.rhythm.between import (
    CALLS_OF_A_STEP,
    LEAST_CALLS,
    NO_LAYERS,
    STEPS_BETWEEN,
    OtherCalls,
    lie_between,
)
from railscope.agent.rhythm.cuts import (
    GOOD_ENOUGH,
    LEAST,
    LEAST_COVERAGE,
    SILENCE,
    VARIED_SIZES,
    Cut,
    Encode,
    Evidence,
    Flags,
    begins_after_silence,
    find_cuts,
    recurring,
    silences,
)
from railscope.agent.rhythm.series import Integers, mixed

_AS_GOOD: Final = 0.06
_SURE: Final = 0.75
"""Coverage between interludes that shows a step."""
_LEAST_SHARE: Final = 1 / 20
"""Of the payload: what is less is no job's training, but a phase of something else."""
_EXPLAINED: Final = 0.5
"""Of a segment's calls: what explains less of them lies elsewhere."""
_MOST_LOOKED_AT: Final = 64
"""Cuts that are looked at closely, the heaviest."""
_MOST_LACKING: Final = 8
"""Communicators of what lies between steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What was chosen."""

    cut: Cut
    perhaps: Cut | None = None
    """Its segments hold ten and more of this one's, of which calls do not tell whether they are the steps."""


def choose_cut(evidence: Evidence, encode: Encode) -> Choice | None:
    """The cut whose segments are iterations; None: the series does not repeat itself.  `encode`: the fastest there is.

    Its time grows as the number of calls does.
    """
    return _Chooser(evidence).choose(encode) if len(evidence) >= LEAST else None


class _Chooser:
    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        weights = evidence.payload_bytes if evidence.payload_bytes.any() else np.ones(len(evidence), np.int64)
        self._moved = np.concatenate(([0], np.cumsum(weights)))
        """Payload before each call; where it is not known of any, calls."""
        of_communicator = np.bincount(evidence.communicator)
        self._demanded = recurring(evidence.communicator, of_communicator)
        """By communicator: calls of it are in every iteration, or between steps."""
        self._again = recurring(evidence.symbol, np.bincount(evidence.symbol))
        """By symbol: such calls come throughout."""
        rarest = of_communicator[self._demanded]
        self._most = int(rarest.min()) + 1 if len(rarest) else len(evidence)
        """Where every iteration has a call of each, more iterations than calls of one there are not."""

    def choose(self, encode: Encode) -> Choice | None:
        cuts = find_cuts(self._evidence, encode, self._most, enough=self._is_enough)
        good = [cut for cut in cuts if self._is_good(cut)]
        likely = self._likely(cuts)
        apart = [cut for cut in likely if self._is_apart(cut)]
        whole, step = self._whole(good), self._training(apart, good)
        if whole is None:
            return None if step is None else Choice(self._fullest(step, cuts))
        if step is not None and self._is_preferred(step, whole):
            return Choice(self._fullest(step, cuts))
        doubtful = [cut for cut in likely if cut not in apart and self._may_be_step(cut, whole)]
        return Choice(self._fullest(whole, good), max(doubtful, key=self._weight, default=None))

    def _is_enough(self, cut: Cut) -> bool:
        # One that may be made of steps needs longer anchors, which find these.
        return (
            cut.coverage >= GOOD_ENOUGH
            and cut.distinct > 1
            and self._is_good(cut)
            and (cut.length < STEPS_BETWEEN * CALLS_OF_A_STEP or not self._has_silences(cut))
        )

    def _has_silences(self, cut: Cut) -> bool:
        """Whether a usual segment has as many silences as one has that is made of steps."""
        silence = np.sort(silences(self._evidence, cut))
        return bool(silence[-STEPS_BETWEEN] >= SILENCE * max(1.0, float(np.median(silence))))

    def _is_good(self, cut: Cut) -> bool:
        return cut.spans and cut.coverage >= LEAST_COVERAGE and not len(self._lacking(cut))

    def _lacking(self, cut: Cut) -> Integers:
        """Communicators that calls are made on throughout, and none in a usual segment."""
        missing: Flags = self._demanded.copy()
        missing[self._evidence.communicator[cut.usual_segment]] = False
        return np.flatnonzero(missing)

    def _weight(self, cut: Cut) -> int:
        """Payload of a usual segment, the mean."""
        low, high = cut.anchors[:-1][cut.usual], cut.anchors[1:][cut.usual]
        return int((self._moved[high] - self._moved[low]).sum()) // cut.usual_count

    def _whole(self, good: Sequence[Cut]) -> Cut | None:
        """What explains the series as a whole, or the steps that this is made of."""
        for several in (True, False):
            alike = [cut for cut in good if (cut.distinct > 1) == several]
            if alike:
                best = _shortest_of_the_best(alike)
                return min((cut for cut in alike if self._is_step(cut, best)), key=_rank, default=best)
        return None

    def _likely(self, cuts: Iterable[Cut]) -> list[Cut]:
        """Cuts that explain what lies between interludes, the heaviest first; of those by equal segments, the one with
        most of them."""
        found: dict[int, Cut] = {}
        for cut in cuts:
            often = cut.usual_count >= STEPS_BETWEEN * max(1, cut.interludes)
            if cut.distinct > 1 and cut.between >= _SURE and often:
                content = self._content(cut)
                found[content] = min(found.get(content, cut), cut, key=_rank)
        return sorted(found.values(), key=lambda cut: (-self._weight(cut), _rank(cut)))[:_MOST_LOOKED_AT]

    def _content(self, cut: Cut) -> int:
        """Equal if usual segments hold the same calls."""
        return int(mixed(self._evidence.symbol[cut.usual_segment].astype(np.uint64)).sum(dtype=np.uint64))

    def _fullest(self, chosen: Cut, cuts: Iterable[Cut]) -> Cut:
        """Of the cuts by the same segments, the one with most of them: long anchors lack what lies beside others."""
        content = self._content(chosen)
        alike = [cut for cut in cuts if cut.length == chosen.length and self._content(cut) == content]
        return min(alike, key=_rank)

    def _is_apart(self, cut: Cut) -> bool:
        """Whether all calls that are in no usual segment may lie between steps."""
        weight, lacking = self._weight(cut), self._lacking(cut)
        if weight * cut.usual_count < _LEAST_SHARE * self._moved[-1] or len(lacking) > _MOST_LACKING:
            return False
        if self._has_other_sizes(cut):
            return False
        if not self._stands_alone(cut):
            return False
        if not len(lacking):
            return True
        return begins_after_silence(self._evidence, cut) and all(
            self._lie_between(cut, np.flatnonzero(self._evidence.communicator == one)) for one in lacking.tolist()
        )

    def _stands_alone(self, cut: Cut) -> bool:
        """Whether what its own communicators carry now and then lies between steps, as an evaluation does; gradients
        of several micro-batches do not."""
        evidence = self._evidence
        own = np.zeros(int(evidence.communicator.max()) + 1, np.bool_)
        own[evidence.communicator[cut.usual_segment]] = True
        others: Flags = self._again.copy()
        others[evidence.symbol[cut.usual_segment]] = False
        places = np.flatnonzero(own[evidence.communicator] & others[evidence.symbol])
        return not len(places) or self._lie_between(cut, places)

    def _lie_between(self, cut: Cut, places: Integers) -> bool:
        """Whether these calls lie between steps, if usual segments are steps."""
        lengths_ns = np.diff(self._evidence.time_ns[cut.anchors])
        usual_ns = float(np.median(lengths_ns[cut.usual]))
        return lie_between(self._others(cut, places), usual_ns, self._weight(cut), cut.usual_count, cut.length)

    def _has_other_sizes(self, cut: Cut) -> bool:
        """Whether the calls of usual segments are made elsewhere with many other sizes, as in requests."""
        evidence = self._evidence
        own = np.zeros(int(evidence.kind.max()) + 1, np.bool_)
        own[evidence.kind[cut.usual_segment]] = True
        others = ~self._in_usual(cut) & own[evidence.kind]
        symbols = np.zeros(int(evidence.symbol.max()) + 1, evidence.kind.dtype)
        symbols[evidence.symbol[others]] = evidence.kind[others] + 1
        return bool(np.bincount(symbols)[1:].max(initial=0) > VARIED_SIZES)

    def _in_usual(self, cut: Cut) -> Flags:
        """By call: it is in a usual segment."""
        marks = np.zeros(len(self._evidence) + 1, np.int64)
        marks[cut.anchors[:-1][cut.usual]] += 1
        marks[cut.anchors[1:][cut.usual]] -= 1
        found: Flags = np.cumsum(marks[:-1]) > 0
        return found

    def _others(self, cut: Cut, places: Integers) -> OtherCalls:
        """Calls that usual segments lack, but what was not recorded as a whole."""
        evidence = self._evidence
        # 0: before the first segment; one more than there are: behind the last.
        segment = np.searchsorted(cut.anchors, places, side="right")
        begins = np.flatnonzero(np.diff(segment, prepend=-2) > 1)
        ends = np.append(begins[1:], len(places)) - 1
        inner = (segment[begins] > 0) & (segment[ends] < len(cut.anchors))
        if inner.any():
            begins, ends = begins[inner], ends[inner]
        edges = np.concatenate(([0], cut.anchors, [len(evidence) - 1]))
        low, high = edges[segment[begins]], edges[segment[ends] + 1]
        own = np.zeros(int(evidence.symbol.max()) + 1, np.bool_)
        own[evidence.symbol[cut.usual_segment]] = True
        usual = np.concatenate(([0], np.cumsum(own[evidence.symbol])))
        return OtherCalls(
            segments_before=segment[begins],
            called_ns=evidence.time_ns[places[ends]] - evidence.time_ns[places[begins]],
            took_ns=evidence.time_ns[high] - evidence.time_ns[low],
            usual_calls=usual[high] - usual[low],
            payload_bytes=int(evidence.payload_bytes[places[begins[0] : ends[-1] + 1]].sum()),
        )

    def _training(self, apart: Sequence[Cut], good: Sequence[Cut]) -> Cut | None:
        """Of cuts that explain what lies between interludes: the heaviest, or what that is made of."""
        if not apart:
            return None
        heaviest = apart[0]
        lighter = [cut for cut in (*apart, *good) if cut.length < heaviest.length and cut.distinct > 1]
        steps = [cut for cut in lighter if self._is_step(cut, heaviest)]
        steps = steps or [cut for cut in lighter if self._explained(cut, heaviest) >= 1 - _AS_GOOD]
        return min(steps, key=_rank, default=heaviest)

    def _is_preferred(self, step: Cut, whole: Cut) -> bool:
        """Whether a cut that explains what lies between interludes is the training step, and not the whole one."""
        if whole.distinct == 1 or self._is_step(step, whole):
            return True
        if self._weight(step) <= self._weight(whole) or self._is_step(whole, step):
            return False
        own, other = (set(self._evidence.communicator[cut.usual_segment].tolist()) for cut in (step, whole))
        # A layer of an evaluation may be one of the training, too, and lack the gradients there.
        return not own <= other or self._explained(whole, step) < _EXPLAINED

    def _explained(self, inner: Cut, outer: Cut) -> float:
        """Which part of the calls in usual segments of one lie in usual segments of the other."""
        before = np.concatenate(([0], np.cumsum(self._in_usual(outer))))
        within = before[inner.anchors[1:]] - before[inner.anchors[:-1]]
        return float(within[inner.usual].sum() / (outer.usual_count * outer.length))

    def _is_step(self, cut: Cut, cycle: Cut) -> bool:
        """Whether the segments of a cut are steps of which, and of something else, those of another are made."""
        return self._may_be_step(cut, cycle) and not self._makes_up(cut, cycle) and self._stands_alone(cut)

    def _may_be_step(self, cut: Cut, cycle: Cut) -> bool:
        so_many = STEPS_BETWEEN if cut.length >= CALLS_OF_A_STEP else NO_LAYERS
        return (
            cut.length >= LEAST_CALLS
            and cut.length * so_many <= cycle.length
            and begins_after_silence(self._evidence, cut)
        )

    def _makes_up(self, cut: Cut, cycle: Cut) -> bool:
        """Whether segments of another hold nothing else, as forwards and backwards of a pipeline's micro-batches, which
        are in another order at the ends."""
        symbol = self._evidence.symbol
        size = int(symbol.max()) + 1
        step, whole = (np.bincount(symbol[one.usual_segment], minlength=size) for one in (cut, cycle))
        return np.array_equal(step * (cycle.length // cut.length), whole)


def _shortest_of_the_best(cuts: Sequence[Cut]) -> Cut:
    least = max(cut.coverage for cut in cuts) - _AS_GOOD
    return min((cut for cut in cuts if cut.coverage >= least), key=_rank)


def _rank(cut: Cut) -> tuple[int, int, float, int]:
    return cut.length, -cut.usual_count, -cut.coverage, int(cut.anchors[0])
