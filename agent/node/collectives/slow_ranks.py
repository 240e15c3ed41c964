"""Finds the ranks of this host for which their communicator's other ranks here wait in most operations.

Of each stretch of a few seconds it is known for how much of it the others waited for each rank: by how long operations
took on them, where completions are seen, else by who made calls last.  A rank is slow if it is so in most stretches
(agent/facts/slowness.py).  Ranks of other hosts are compared by `railscope diagnose` (agent/cluster/fleet/slow.py).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.slowness import WAITED_RATIO, Stretch, find_slowness, medians_of_others
from railscope.agent.facts.snapshot import RankArrivals, RankPace, RankTimes

STRETCH_NS: Final = 5_000_000_000
_STRETCHES: Final = 60
"""Five minutes."""

_Key = tuple[str, str]
"""Communicator and rank."""
_Seen = Literal["completions", "calls"]


@dataclass(frozen=True, slots=True)
class _Share:
    """What the others waited for one rank within a stretch."""

    ratio: float
    """Of their time."""
    seconds: float
    """By which they waited in an operation."""
    seen: _Seen


@dataclass(frozen=True, slots=True)
class RankWait:
    """What a rank waited within the last stretch for the slowest rank of its communicator on this host."""

    seconds: float
    inside_seconds: float | None
    """In operations, waiting among it; None: `seconds` are by who made calls last."""
    stretch_seconds: float


@dataclass(frozen=True, slots=True)
class _Stretch:
    """One stretch of a communicator."""

    at: float
    """Its end, in seconds since the Unix epoch."""
    operations: int
    waited_for: Mapping[str, _Share]
    """By rank, of those for which others waited for much of it."""


_Spent = Mapping[str, Mapping[str, tuple[int, float]]]
"""By communicator and rank: operations, and seconds in them."""
_Made = dict[str, tuple[int, dict[str, _Share]]]
"""By communicator: operations, and each rank's share."""


@dataclass(slots=True)
class _Totals:
    """As of the end of the last stretch, by communicator and rank."""

    at_ns: int
    times: dict[_Key, RankTimes] = field(default_factory=dict)
    arrivals: dict[_Key, RankArrivals] = field(default_factory=dict)


class SlowRanks:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, realtime_offset_ns: Callable[[], int]) -> None:
        """`realtime_offset_ns`: the time of day less CLOCK_MONOTONIC."""
        self._realtime_offset_ns = realtime_offset_ns
        self._before: _Totals | None = None
        self._stretches: dict[str, deque[_Stretch]] = {}
        """By communicator."""
        self._found: tuple[RankPace, ...] = ()
        self._waits: Mapping[_Key, RankWait] = {}

    @property
    def waits(self) -> Mapping[_Key, RankWait]:
        """Of each rank that is compared with others of this host, by communicator and rank, as of the last stretch.

        Of a communicator that is used point to point, ranks wait for each other by design: who asks knows those.
        """
        return self._waits

    @property
    def found(self) -> tuple[RankPace, ...]:
        """The slow ranks of this host, as of the last stretch."""
        return self._found

    def is_due(self, now_ns: int) -> bool:
        """Whether a stretch is over, so that `update` is worth its cost."""
        return self._before is None or now_ns - self._before.at_ns >= STRETCH_NS

    def update(self, now_ns: int, times: Iterable[RankTimes], arrivals: Iterable[RankArrivals]) -> None:
        """End a stretch: what ranks spent in operations, and who came last, in all so far.

        Args:
            now_ns: CLOCK_MONOTONIC.
            times: of all ranks of this host.
            arrivals: of those that are compared with others of this host.
        """
        before = self._before
        now = self._before = _Totals(
            now_ns,
            {(one.comm, one.rank): one for one in times if UNKNOWN not in (one.comm, one.rank)},
            {(one.comm, one.rank): one for one in arrivals if UNKNOWN not in (one.comm, one.rank)},
        )
        if before is None or now_ns <= before.at_ns:
            return
        seconds = (now_ns - before.at_ns) / 1e9
        at = (now_ns + self._realtime_offset_ns()) / 1e9
        by_calls, spent = _by_calls(before, now, seconds), _spent(before, now)
        made = by_calls | _by_completions(spent, seconds)
        self._waits = _waits_by_calls(by_calls, now.arrivals, seconds) | _waits_by_completions(spent, seconds)
        known = {comm for comm, _ in (*now.times, *now.arrivals)}
        self._stretches = {comm: them for comm, them in self._stretches.items() if comm in known}
        for comm, (operations, shares) in made.items():
            waited = {rank: share for rank, share in shares.items() if share.ratio > WAITED_RATIO}
            kept = self._stretches.setdefault(comm, deque(maxlen=_STRETCHES))
            kept.append(_Stretch(at, operations, waited))
        self._found = tuple(
            pace for comm, kept in self._stretches.items() for pace in _slow_ranks(comm, kept, at, seconds)
        )


def _spent(before: _Totals, now: _Totals) -> _Spent:
    """Of each communicator with several ranks here: operations of each rank, and its seconds in them."""
    spent: defaultdict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
    for (comm, rank), one in now.times.items():
        earlier = before.times.get((comm, rank))
        operations = one.operations - earlier.operations if earlier is not None else 0
        if earlier is not None and operations > 0:
            spent[comm][rank] = operations, one.seconds - earlier.seconds
    return {comm: ranks for comm, ranks in spent.items() if len(ranks) > 1}


def _waits_by_completions(spent: _Spent, seconds: float) -> dict[_Key, RankWait]:
    """By how much longer operations took on a rank than on the one on which they took least."""
    found = {}
    for comm, ranks in spent.items():
        least = min(inside / operations for operations, inside in ranks.values())
        for rank, (operations, inside) in ranks.items():
            found[comm, rank] = RankWait(inside - operations * least, inside, seconds)
    return found


def _waits_by_calls(by_calls: _Made, arrivals: Iterable[_Key], seconds: float) -> dict[_Key, RankWait]:
    """For how long others alone had not made a call that the rank had made."""
    whole = {comm: sum(share.ratio for share in shares.values()) for comm, (_, shares) in by_calls.items()}
    found = {}
    for comm, rank in arrivals:
        if comm in whole:
            own = by_calls[comm][1].get(rank)
            found[comm, rank] = RankWait((whole[comm] - (own.ratio if own else 0.0)) * seconds, None, seconds)
    return found


def _by_completions(spent: _Spent, seconds: float) -> _Made:
    """Of each communicator with several ranks here: operations, and what others waited for each rank."""
    found = {}
    for comm, ranks in spent.items():
        # Where several operations are under way at once their time counts so many times.
        whole = max(seconds, *(inside for _, inside in ranks.values()))
        total = sum(inside for _, inside in ranks.values())
        others = medians_of_others([inside / operations for operations, inside in ranks.values()])
        shares = {}
        for (rank, (operations, inside)), usual in zip(ranks.items(), others, strict=True):
            ratio = ((total - inside) / (len(ranks) - 1) - inside) / whole
            shares[rank] = _Share(ratio, usual - inside / operations, "completions")
        found[comm] = max(operations for operations, _ in ranks.values()), shares
    return found


def _by_calls(before: _Totals, now: _Totals, seconds: float) -> _Made:
    """The same by who made calls last."""
    shares: defaultdict[str, dict[str, _Share]] = defaultdict(dict)
    calls: defaultdict[str, int] = defaultdict(int)
    for (comm, rank), one in now.arrivals.items():
        earlier = before.arrivals.get((comm, rank))
        last = one.last - (earlier.last if earlier is not None else 0)
        if last > 0:
            alone = one.alone_seconds - (earlier.alone_seconds if earlier is not None else 0.0)
            shares[comm][rank] = _Share(alone / seconds, alone / last, "calls")
            calls[comm] += last
    return {comm: (calls[comm], them) for comm, them in shares.items()}


def _slow_ranks(comm: str, kept: deque[_Stretch], at: float, seconds: float) -> Iterable[RankPace]:
    """Those of a communicator that has made operations of late."""
    recent = list(kept)[-2:]
    if at - recent[-1].at > 2 * seconds:
        return
    for rank in dict.fromkeys(rank for one in recent for rank in one.waited_for):
        stretches = [Stretch(one.at, one.operations, rank in one.waited_for) for one in kept]
        slowness = find_slowness(stretches, STRETCH_NS / 1e9)
        if slowness is not None:
            share = next(one.waited_for[rank] for one in reversed(recent) if rank in one.waited_for)
            yield RankPace(comm, rank, min(share.ratio, 1.0), share.seconds, slowness, share.seen)
