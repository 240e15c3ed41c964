"""The usual duration of operations by communicator, kind and size, from which "too long" follows.

The kernel sums up durations (probes/bpf/history.h); differences between readings are means over about a second.  The
last few of these are recent, and what they push out becomes part of what is usual, unless the communicator was stalled
at the time.  Seconds that were much slower wait: if a stall comes of them they were none of what is usual, else they
become part of it when it is faster again, or when it has been slow for so long that this is usual now.  What is usual
fades: half of its weight is gone after some minutes of work.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from railscope.agent.facts.stall import OwnHistory
from railscope.probes.loading.maps import Records

SLOWER_THAN_USUAL: Final = 1.75
"""Where only calls are seen, the pauses between them are part of it: a rail at a tenth of its speed may show as little
as twice."""
STILL_SLOWER: Final = 1.4
"""What was slower than usual is so until it falls below this."""
_RECENT_WINDOWS: Final = 3
RECENT_NS: Final = 15_000_000_000
"""What is older says nothing of the last few seconds."""
_FADING: Final = 0.995
"""Of the weight of what is usual, for each second with operations: half of it is gone after 138."""
_LEAST_OPERATIONS: Final = 20
_LEAST_MEAN_NS: Final = 200_000.0
"""Faster operations vary by more than twice for reasons that no operator cares for."""
_MOST_HELD_BACK: Final = 20
"""Slow windows in a row, each a second with operations: more than it takes to find out why."""
_CALLS: Final = (-1, -1)
"""In the place of op and size bucket."""


@dataclass(frozen=True, slots=True)
class _Window:
    end_ns: int
    operations: int
    duration_ns: int
    stalled: bool

    @property
    def mean_ns(self) -> float:
        return self.duration_ns / self.operations


@dataclass(slots=True)
class _Known:
    operations: int = 0
    duration_ns: int = 0
    """As of the last reading; of calls: when the last one was noticed."""
    seen: int = 0
    """Operations that are part of what is usual, all told."""
    weight: float = 0.0
    usual_ns: float = 0.0
    """Sum of durations, faded like the weight."""
    longest_ns: float = 0.0
    slow_ns: float = math.inf
    """Means from here on are slow compared with what is usual; infinite: not enough is known of that."""
    recent: deque[_Window] = field(default_factory=deque)
    held_back: list[_Window] = field(default_factory=list)
    """Older than those, and not known to be usual."""

    def add(self, window: _Window) -> None:
        self.recent.append(window)
        if len(self.recent) <= _RECENT_WINDOWS:
            return
        old = self.recent.popleft()
        if old.stalled:
            self.held_back.clear()
            return
        self.longest_ns = max(_FADING * self.longest_ns, old.mean_ns)
        self.held_back.append(old)
        if old.mean_ns >= self.slow_ns and len(self.held_back) < _MOST_HELD_BACK:
            return
        for window in self.held_back:
            self.seen += window.operations
            self.weight = _FADING * self.weight + window.operations
            self.usual_ns = _FADING * self.usual_ns + window.duration_ns
        self.held_back.clear()
        if self.seen >= _LEAST_OPERATIONS:
            self.slow_ns = SLOWER_THAN_USUAL * max(self.usual_ns / self.weight, _LEAST_MEAN_NS)

    def history(self, now_ns: int) -> OwnHistory | None:
        """How long operations of this size usually take; None: none has ended yet."""
        if self.seen:
            return OwnHistory(self.seen, self.usual_ns / self.weight, self.longest_ns, self._recent_mean_ns(now_ns))
        young = [window for window in self.recent if not window.stalled]
        if not young:
            return None
        operations = sum(window.operations for window in young)
        mean_ns = sum(window.duration_ns for window in young) / operations
        return OwnHistory(operations, mean_ns, max(window.mean_ns for window in young), None)

    def _recent_mean_ns(self, now_ns: int) -> float | None:
        """None: too little happened lately, or too little before."""
        if self.seen < _LEAST_OPERATIONS or len(self.recent) < _RECENT_WINDOWS:
            return None
        if self.recent[0].end_ns < now_ns - RECENT_NS:
            return None
        return sum(window.duration_ns for window in self.recent) / sum(window.operations for window in self.recent)

    @property
    def may_be_slower(self) -> bool:
        """False: the last second alone shows that it is not; cheaper than `slower`."""
        return bool(self.recent) and self.recent[-1].mean_ns >= self.slow_ns

    def slower(self, history: OwnHistory) -> bool:
        """Whether every one of the last seconds was slower than usual."""
        limit_ns = SLOWER_THAN_USUAL * max(history.mean_ns, _LEAST_MEAN_NS)
        return history.recent_mean_ns is not None and all(window.mean_ns >= limit_ns for window in self.recent)

    def still_slower(self, history: OwnHistory) -> bool:
        limit_ns = STILL_SLOWER * max(history.mean_ns, _LEAST_MEAN_NS)
        return history.recent_mean_ns is not None and history.recent_mean_ns >= limit_ns


class Baselines:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._known: dict[int, dict[tuple[int, int], _Known]] = {}
        """By instance, then op and size bucket."""

    def record(self, now_ns: int, keys: Records, values: Records, stalled: Container[int]) -> None:
        """Record a reading of the kernel's table (HISTORY_KEY, HISTORY), about once a second.

        `stalled`: instances whose last second is not usual.
        """
        for (instance, op, size, _), (operations, duration_ns, _payload) in zip(
            keys.tolist(), values.tolist(), strict=True
        ):
            known = self._get(instance, op, size)
            more = operations - known.operations
            if more > 0 and duration_ns >= known.duration_ns:
                known.add(_Window(now_ns, more, duration_ns - known.duration_ns, instance in stalled))
            known.operations, known.duration_ns = operations, duration_ns

    def record_calls(self, now_ns: int, instance: int, calls: int, *, stalled: bool) -> None:
        """The same where only calls are seen: the time from call to call stands for their duration."""
        fresh = _CALLS not in self._known.get(instance, {})
        known = self._get(instance, *_CALLS)
        more = calls - known.operations
        if more > 0 and not fresh:
            known.add(_Window(now_ns, more, now_ns - known.duration_ns, stalled))
        if more or fresh:
            known.operations, known.duration_ns = calls, now_ns

    def history_of(self, now_ns: int, instance: int, op: int, size: int) -> OwnHistory | None:
        """How long a communicator's operations of a kind and size usually take; None: none has ended yet."""
        known = self._known.get(instance, {}).get((op, size))
        return None if known is None else known.history(now_ns)

    def call_history_of(self, now_ns: int, instance: int) -> OwnHistory | None:
        """The usual time from call to call of a communicator; None: it made too few."""
        return self.history_of(now_ns, instance, *_CALLS)

    def slowest(
        self, now_ns: int, instance: int, *, stalled: bool, followed: bool = True
    ) -> tuple[int | None, OwnHistory] | None:
        """The kind (op; None: calls of any) and size that has become slower the most; None: none has.

        `stalled`: it is called slow already, and is until it is nearly as fast as before.  `followed`: operations are
        seen at present, where they ever were.
        """
        all_known = self._known.get(instance, {})
        # Where operations are seen, the time between calls is the job's own affair.
        seen = {kind: known for kind, known in all_known.items() if (kind != _CALLS) == followed} or all_known
        found = None
        for (op, _), known in seen.items():
            if not stalled and not known.may_be_slower:
                continue
            history = known.history(now_ns)
            if history is None or history.recent_mean_ns is None:
                continue
            slow = known.still_slower(history) if stalled else known.slower(history)
            if slow and (found is None or history.ratio > found[0]):
                found = history.ratio, None if op < 0 else op, history
        return None if found is None else found[1:]

    def forget(self, living: Container[int]) -> None:
        """Drop what is known of communicators that are not among the living."""
        for instance in [instance for instance in self._known if instance not in living]:
            del self._known[instance]

    def _get(self, instance: int, op: int, size: int) -> _Known:
        return self._known.setdefault(instance, {}).setdefault((op, size), _Known())
