"""Computes each rank's position in its communicator's sequence of operations, on one scale for all ranks.

An agent that saw a communicator begin counts from its first operation: such numbers compare as they are.  One that
was started, or started again, beside a running job counts from then on.  Where it can, it says where its ranks stand
by NCCL's own numbers (agent/node/collectives/sequences.py), which is another scale, as NCCL does not number everything:
either all ranks are compared by it or none.

Else ranks are off by a constant, which shows while the communicator advances, so it is learnt from the history in the
store: the median of the difference to another rank over moments at which both advanced, with the spread of that
difference as the uncertainty, since hosts are scraped at different instants.  Where there is too little history a rank
is not compared at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from operator import itemgetter
from statistics import median
from typing import Final

from railscope.agent.cluster.fleet.history import Points
from railscope.agent.cluster.fleet.prometheus import Sample, Series

_FEWEST_MOMENTS: Final = 5
"""Fewer moments at which both ranks advanced say nothing of their difference."""

StoredRankKey = tuple[str, str, str]
"""Scrape instance, communicator and rank: what a series of a rank's numbers carries in the store."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a rank came: operations entered, on its communicator's common scale."""

    entered: int
    uncertainty: int = 0
    """It may be so many more or fewer."""
    learnt: bool = False
    """By history, since the agent did not count from the first operation."""


def stored_rank_key(one: Sample | Series) -> StoredRankKey:
    """The key by which the store's samples and series of one rank belong together; empty where a label is missing."""
    return one.labels.get("instance", ""), one.labels.get("comm", ""), one.labels.get("rank", "")


def find_positions(
    *,
    now: Mapping[StoredRankKey, float],
    from_start: Mapping[StoredRankKey, float],
    sequence: Mapping[StoredRankKey, float],
    resets: Mapping[StoredRankKey, float],
    history: Mapping[StoredRankKey, Points],
) -> dict[StoredRankKey, Position]:
    """The position of every rank that can be compared with others of its communicator.

    `from_start` says 1 of ranks that were counted from their first operation on; where it says nothing, so does a
    counter that did not start anew of late (`resets`).  `sequence` are positions by NCCL's own numbers, of ranks that
    have one.  `history` are earlier values of the counters that `now` shows.
    """
    exact = {key for key in now if (from_start[key] == 1 if key in from_start else not resets.get(key))}
    found = {key: Position(int(now[key])) for key in exact}
    others = [key for key in now if key not in exact]
    if not others:
        return found
    members: dict[str, list[StoredRankKey]] = defaultdict(list)
    for key in now:
        members[key[1]].append(key)
    for keys in members.values():
        inexact = [key for key in keys if key not in exact]
        if not inexact or len(keys) < 2:
            continue
        numbered = _numbered(keys, exact, sequence)
        for key in keys if numbered else ():
            found.pop(key, None)
        found.update((key, Position(int(sequence[key]))) for key in numbered)
        if len(numbered) == len(keys):
            continue
        if numbered:
            found.update(_beside(numbered[0], sequence, [key for key in keys if key not in found], now, history))
            continue
        # The first that counts exactly is the scale; else the one that has been heard for longest.
        scale = min((key for key in keys if key in exact), default=max(keys, key=lambda key: len(history.get(key, ()))))
        if scale in inexact:
            found[scale] = Position(int(now[scale]), learnt=True)
        for key in inexact:
            if key == scale:
                continue
            learnt = usual_lead(history.get(scale, ()), history.get(key, ()))
            if learnt is not None:
                shift, uncertainty = learnt
                found[key] = Position(int(now[key]) - shift, uncertainty, learnt=True)
        if scale in inexact and not any(key in found for key in inexact if key != scale):
            del found[scale]
    return found


def _numbered(
    keys: Sequence[StoredRankKey], exact: Collection[StoredRankKey], sequence: Mapping[StoredRankKey, float]
) -> list[StoredRankKey]:
    """The ranks of a communicator that are compared by NCCL's own numbers; none where that would compare fewer."""
    numbered = [key for key in keys if key in sequence]
    counted = [key for key in keys if key in exact]
    return numbered if set(numbered) > set(counted) or len(numbered) > len(counted) else []


def _beside(
    scale: StoredRankKey,
    sequence: Mapping[StoredRankKey, float],
    keys: Iterable[StoredRankKey],
    now: Mapping[StoredRankKey, float],
    history: Mapping[StoredRankKey, Points],
) -> Iterator[tuple[StoredRankKey, Position]]:
    """Ranks without such a number, by their usual distance to one that has it; those without history are left out."""
    for key in keys:
        learnt = usual_lead(history.get(scale, ()), history.get(key, ()))
        if learnt is not None:
            shift, uncertainty = learnt
            entered = int(sequence[scale]) + int(now[key]) - shift - int(now[scale])
            yield key, Position(entered, uncertainty, learnt=True)


def usual_lead(scale: Points, counter: Points) -> tuple[int, int] | None:
    """How far a counter is usually ahead of another, and by how much that varies; None: too little is known.

    Points are (seconds, value) as they were scraped; between two of them a counter is taken to advance evenly.  Only
    moments count at which both advanced and went on to, after the last restart of either: while all stand still, one
    may be behind, and that is what is looked for.
    """
    reference = _since_reset(scale)
    points = [
        (value, value_there)
        for t, value in _since_reset(counter)
        if (value_there := _value_at(reference, t)) is not None
    ]
    advances = [later > before and there > then for (before, then), (later, there) in pairwise(points)]
    # The last advance before all stood still may be where a rank fell behind.
    moving = [
        value - there
        for (value, there), advanced, goes_on in zip(points[1:], advances, advances[1:], strict=False)
        if advanced and goes_on
    ]
    if len(moving) < _FEWEST_MOMENTS:
        return None
    middle = round(median(moving))
    return middle, ceil(max(abs(one - middle) for one in moving))


def _value_at(points: Points, t: float) -> float | None:
    """A counter's value at a moment between two points; None: it is before the first or after the last."""
    index = bisect_left(points, t, key=itemgetter(0))
    if index == len(points):
        return None
    after, value = points[index]
    if after == t:
        return value
    if index == 0:
        return None
    before, start = points[index - 1]
    return start + (value - start) * (t - before) / (after - before)


def _since_reset(points: Points) -> Points:
    last = 0
    for index in range(1, len(points)):
        if points[index][1] < points[index - 1][1]:
            last = index
    return points[last:]
