"""The calls of one rank as they come: learns their pattern, and follows it.

A pattern counts once two readings agree on it, the second of more calls and of ten seconds at least: a first forward
pass repeats too, layer by layer.  What came before it was found is told then as well, as far as the calls are kept.  A
pattern that no longer fits is given up, and another is looked for in the calls that came since the last iteration.  One
of much less payload does not take its place while the communicators of the job live: that is an evaluation.  Where most
of the payload is in no usual iteration any more, a heavier pattern is looked for in what comes from then on, and takes
its place: what was learnt then was an evaluation, and the job trains now.

Patterns are looked for on another thread, each time that twice as many calls have come, and at growing intervals once
there is no place for more.  Calls that were lost while there is no pattern end what was learnt from those before.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Final

import numpy as np

from railscope.agent.rhythm.pattern import Calls, Pattern, find_pattern
from railscope.agent.rhythm.tracker import ITERATION, Iterations, Tracker

LEAST_NS: Final = 10_000_000_000
"""A pattern is told of calls that span so much."""
_FIRST: Final = 24
"""Calls that the first reading needs."""
_LEAST_ITERATIONS: Final = {True: 5, False: 16}
"""Of a pattern that is told, by whether it is telling."""
_MORE: Final = 1.25
"""So many times the calls of the reading before."""
_SHORTEST_REST_NS: Final = 30_000_000_000
_LONGEST_REST_NS: Final = 120_000_000_000
_MISSED: Final = 8
"""So many times an iteration's length without one, and the next pattern is looked for."""
_LEAST_MISSED_NS: Final = 30_000_000_000
_AS_HEAVY: Final = 0.5
"""Of the payload of an iteration before: what takes its place moves as much."""
_HEAVIER: Final = 2.0
"""The same, of one that takes its place while it is still seen."""


class CallStream:
    """Not thread-safe; `executor` runs what is pure computation."""

    def __init__(self, executor: Executor, most: int, *, least_ns: int = LEAST_NS) -> None:
        """`most`: calls that are kept, 40 bytes each; twice as many for a moment."""
        self._executor = executor
        self._least_ns = least_ns
        self.most = most
        self._window = Calls.nothing()
        """What is known to have no pattern, or not known yet; while one is followed, what came since it is doubtful."""
        self._tracker: Tracker | None = None
        self._reading: Future[Pattern | None] | None = None
        self._read = 0
        self._span_ns = 0
        """Calls that the reading under way has, or the last one had, and how long they took to come."""
        self._candidate: Pattern | None = None
        """What the last reading found."""
        self._added = 0
        """Calls since the beginning of what is read."""
        self._next = _FIRST
        self._rest_until_ns = 0
        self._rest_ns = _SHORTEST_REST_NS
        self._told_ns = 0
        """When the last iteration ended that was told."""

    @property
    def pattern(self) -> Pattern | None:
        """What is followed; None: the calls have no pattern, or none that is known."""
        return self._tracker.pattern if self._tracker is not None else None

    def record_loss(self, time_ns: int) -> None:
        """Calls up to this moment were lost since the last ones that were added."""
        if self._tracker is not None:
            self._tracker.record_loss(time_ns)
        if self._tracker is None or len(self._window):
            self._window = Calls.nothing()
            self._begin()

    def end(self) -> None:
        """No more calls come: what is kept of them is not needed."""
        self._window, self._tracker = Calls.nothing(), None
        self._candidate, self._reading = None, None

    def add(self, calls: Calls, *, all_ended: bool = False) -> Iterations:
        """Take the next calls; returns the iterations that are known now and were not before (dtype ITERATION).

        `all_ended`: no communicator of the pattern lives any more.
        """
        self._added += len(calls)
        found = np.zeros(0, ITERATION)
        if self._tracker is not None:
            found = self._not_told(self._tracker.add(calls))
            self._doubt(calls)
            if self._tracker.failed:
                self._window = self._searched
                self._tracker = None
                self._begin()
            elif self.kept > self.most:
                self._tracker.drop_waiting(self.most // 2)
        else:
            self._window = self._window.followed_by(calls)
            if len(self._window) > self.most:
                self._window = self._window.part(len(self._window) - self.most // 2)
        if self._is_searching():
            pattern = self._search(all_ended)
            if pattern is not None:
                window = self._searched
                self._tracker, self._window = Tracker(pattern), Calls.nothing()
                found = np.concatenate((found, self._not_told(self._tracker.add(window))))
                self._begin()
        elif self._added > self._next:
            self._begin()  # all is well: a search begins with what comes then
        return found

    def _not_told(self, found: Iterations) -> Iterations:
        """Without those that a pattern before told of."""
        new: Iterations = found[found["start_ns"] >= self._told_ns]
        if len(new):
            self._told_ns = int(new["end_ns"][-1])
        return new

    def _doubt(self, calls: Calls) -> None:
        """Keep what comes while the pattern is doubtful: the job may have gone on to something heavier."""
        assert self._tracker is not None
        if not self._tracker.is_doubtful:
            if len(self._window):
                self._window = Calls.nothing()
                self._begin()
            return
        begins = not len(self._window)
        self._window = self._window.followed_by(calls)
        if len(self._window) > self.most // 4:
            self._window = self._window.part(len(self._window) - self.most // 8)
        if begins:
            self._begin()

    def _begin(self) -> None:
        """Search anew, in the calls that are kept and those that come."""
        self._candidate, self._reading = None, None
        self._added, self._next = len(self._searched), _FIRST
        self._rest_until_ns, self._rest_ns = 0, _SHORTEST_REST_NS

    @property
    def kept(self) -> int:
        """Calls that are kept."""
        return len(self._window) + (len(self._tracker.waiting) if self._tracker is not None else 0)

    @property
    def _searched(self) -> Calls:
        """In which a pattern is looked for."""
        return self._window if self._tracker is None or len(self._window) else self._tracker.waiting

    def _is_searching(self) -> bool:
        """Whether there is no pattern, it is doubtful, or none of its iterations has been seen for long."""
        return self._tracker is None or len(self._window) > 0 or self._is_missed()

    def _is_missed(self) -> bool:
        """Whether no iteration of the pattern has been seen for long."""
        assert self._tracker is not None
        waiting = self._tracker.waiting
        if not len(waiting):
            return False
        missed_ns = int(waiting.time_ns[-1] - waiting.time_ns[0])
        return missed_ns > max(_LEAST_MISSED_NS, _MISSED * self._tracker.pattern.median_ns)

    def _search(self, all_ended: bool) -> Pattern | None:
        window = self._searched
        if not len(window):
            return None
        now_ns = int(window.time_ns[-1])
        found = self._finish(now_ns) if self._reading is not None and self._reading.done() else None
        if found is not None and self._replaces(found, all_ended):
            return found
        # A candidate that lacks nothing but time is looked at again when that has passed.
        long_enough = (
            self._candidate is not None
            and self._span_ns < self._least_ns <= now_ns - int(window.time_ns[0])
            and self._added >= _MORE * self._read
        )
        due = self._added >= self._next or long_enough
        if self._reading is None and due and now_ns >= self._rest_until_ns:
            read = window.part(max(0, len(window) - self.most // 2))
            self._read = len(read)
            self._reading = self._executor.submit(find_pattern, read)
            self._span_ns = int(read.time_ns[-1] - read.time_ns[0])
        return None

    def _finish(self, now_ns: int) -> Pattern | None:
        """End the reading under way; returns a pattern that two readings have in common."""
        assert self._reading is not None
        pattern, before = self._reading.result(), self._candidate
        self._reading, self._candidate = None, pattern
        full = self._read >= self.most // 2
        self._next = self._added + self._read // 2 if full else max(2 * self._read, _FIRST)
        if pattern is None:
            if full:
                self._rest_until_ns = now_ns + self._rest_ns
                self._rest_ns = min(2 * self._rest_ns, _LONGEST_REST_NS)
            return None
        proved = (
            before is not None
            and pattern.is_same(before)
            and pattern.iterations >= _LEAST_ITERATIONS[pattern.telling]
            and (full or self._span_ns >= self._least_ns)
        )
        return pattern if proved else None

    def _replaces(self, found: Pattern, all_ended: bool) -> bool:
        if self._tracker is None or all_ended:
            return True
        least = _AS_HEAVY if self._is_missed() else _HEAVIER
        return found.payload_bytes >= least * self._tracker.pattern.payload_bytes
