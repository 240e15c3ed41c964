"""Finds out whether a pattern lacks communicators that its job's iterations call, or whether these lie between steps.

A pattern that was learnt from a first forward pass, or from micro-batches before the first gradients, lacks some.  What
tells an evaluation or a checkpoint on a communicator of its own from them, `between` says.

Memory: of 64 communicators, five numbers of each of their last 16 stretches.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from railscope.agent.rhythm.between import OtherCalls, lie_between
from railscope.agent.rhythm.pattern import Flags, Pattern
from railscope.agent.rhythm.series import Integers

_ENOUGH: Final = 8
"""So many calls, over half of the pattern's time, tell."""
_HEAVY: Final = 0.001
"""Of all payload."""
_MOST: Final = 64
"""Communicators."""
_STRETCHES: Final = 16
"""The latest, that are looked at."""


@dataclass(slots=True)
class _Stranger:
    """One communicator that is not in the pattern."""

    first_ns: int
    last_ns: int = 0
    calls: int = 0
    payload_bytes: int = 0
    stretches: int = 0
    last_segment: int = -2
    latest: deque[tuple[int, int, int, int, int]] = field(default_factory=lambda: deque(maxlen=_STRETCHES))
    """Segments before a stretch, its first call and its last one, how long its segments took, and the calls of the
    pattern in them."""

    def others(self) -> OtherCalls:
        before, from_ns, to_ns, took_ns, usual_calls = np.array(self.latest, np.int64).T
        payload_bytes = self.payload_bytes * len(self.latest) // self.stretches
        return OtherCalls(before, to_ns - from_ns, took_ns, usual_calls, payload_bytes)


class Strangers:
    """The communicators that a pattern has not, and calls are made on.  Not thread-safe."""

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self._found: dict[int, _Stranger] = {}
        self._segments = 0
        self._usual = 0
        """Segments so far, and those that are as usual."""

    def record(
        self,
        communicator: int,
        time_ns: Integers,
        payload_bytes: int,
        segment: Integers,
        edges_ns: Integers,
        usual_calls: Integers,
    ) -> None:
        """Record calls in the segments that follow those before.

        Args:
            communicator: of all of them.
            time_ns: when each was made, ascending.
            payload_bytes: of all together.
            segment: in which each was made.
            edges_ns: when segments begin, and the last one ends.
            usual_calls: by segment, those of the pattern.
        """
        one = self._found.get(communicator)
        if one is None:
            if len(self._found) == _MOST:
                return
            one = self._found[communicator] = _Stranger(int(time_ns[0]))
        begins = np.flatnonzero(np.diff(segment, prepend=one.last_segment - self._segments) > 1)
        goes_on = not len(begins) or int(begins[0]) > 0
        firsts = np.concatenate(([0], begins)) if goes_on else begins
        lasts = np.append(firsts[1:], len(segment)) - 1
        took_ns = edges_ns[segment[lasts] + 1] - edges_ns[segment[firsts]]
        so_far = np.concatenate(([0], np.cumsum(usual_calls)))
        own = so_far[segment[lasts] + 1] - so_far[segment[firsts]]
        columns = (segment[firsts] + self._segments, time_ns[firsts], time_ns[lasts], took_ns, own)
        latest = [tuple(row) for row in np.stack(columns, axis=1)[-_STRETCHES - 1 :].tolist()]
        if goes_on and one.latest and len(firsts) <= _STRETCHES:
            before, from_ns, _, first_ns, first_calls = one.latest.pop()
            _, _, to_ns, more_ns, more_calls = latest[0]
            latest[0] = before, from_ns, to_ns, first_ns + more_ns, first_calls + more_calls
        one.latest.extend(latest)
        one.stretches += len(begins)
        one.calls += len(time_ns)
        one.payload_bytes += payload_bytes
        one.last_ns = int(time_ns[-1])
        one.last_segment = self._segments + int(segment[-1])

    def end_segments(self, usual: Flags) -> None:
        """The segments that were recorded last are over; `usual` is by segment."""
        self._segments += len(usual)
        self._usual += int(usual.sum())

    def belong(self, moved_bytes: int, *, since_ns: int) -> bool:
        """Whether the job's iterations call one of them; `moved_bytes` is the payload of all calls since then."""
        pattern = self._pattern
        for one in self._found.values():
            lasts = one.last_ns - one.first_ns > (one.last_ns - since_ns) / 2
            if one.calls < _ENOUGH or one.payload_bytes <= _HEAVY * moved_bytes or not lasts:
                continue
            if not pattern.after_silence or not lie_between(
                one.others(), pattern.median_ns, pattern.payload_bytes, self._usual, pattern.length
            ):
                return True
        return False
