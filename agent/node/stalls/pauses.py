"""Learns where in their programs processes pause, so that who pauses there again is not taken for one that hangs.

A rank that saves a checkpoint, evaluates or loads makes no call for a while, and does so every so many calls.  Not
everything that it does meanwhile can be seen: it may write to mapped memory, or wait for another host.  But where it
paused before, twice with as many calls in between as there are now, and went on each time, it may pause again, up to
twice as long.  A rank that hangs does so at any place, and there no longer than that unnoticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

_MOST_PAUSES: Final = 8
_LEAST_NS: Final = 2_000_000_000
"""Shorter ones are called nothing anyway."""
_FACTOR: Final = 2
_TOLERANCE: Final = 50
"""Parts of a distance by which others that count as equal may differ: a few calls more or less are logging."""


@dataclass(frozen=True, slots=True)
class _Pause:
    after_calls: int
    length_ns: int
    wrote: bool
    """It was seen to write meanwhile."""


@dataclass(frozen=True, slots=True)
class UsualPause:
    """What a process did before at the place where it pauses now."""

    longest_ns: int
    wrote: bool


@dataclass(slots=True)
class _Process:
    call_ns: int
    calls: int
    looked_ns: int
    wrote: bool = False
    """Since its last call."""
    pauses: deque[_Pause] = field(default_factory=lambda: deque(maxlen=_MOST_PAUSES))


class Pauses:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._processes: dict[int, _Process] = {}

    def update(self, now_ns: int, pid: int, call_ns: int, calls: int) -> None:
        """Learn how a process stands, about once a second: when it made its last call, and how many it has made."""
        known = self._processes.get(pid)
        if known is None or calls < known.calls:  # a communicator was destroyed with its calls
            self._processes[pid] = _Process(call_ns, calls, now_ns)
            return
        if calls == known.calls:
            known.looked_ns = now_ns
            return
        # It was silent at the last look for that long at least, and went on since.
        length_ns = known.looked_ns - known.call_ns
        if length_ns >= _LEAST_NS:
            known.pauses.append(_Pause(known.calls, length_ns, known.wrote))
        known.call_ns, known.calls, known.looked_ns, known.wrote = call_ns, calls, now_ns, False

    def record_writing(self, pid: int) -> None:
        """A process was seen to write since its last call."""
        known = self._processes.get(pid)
        if known is not None:
            known.wrote = True

    def usual(self, now_ns: int, pid: int) -> UsualPause | None:
        """What a process did before where it pauses now; None: it was not there, or pauses too long by now."""
        known = self._processes.get(pid)
        if known is None:
            return None
        alike = [
            one
            for place, second in enumerate(known.pauses)
            for first in list(known.pauses)[:place]
            if _alike(second.after_calls - first.after_calls, known.calls - second.after_calls)
            for one in (first, second)
        ]
        longest_ns = max((one.length_ns for one in alike), default=0)
        if not alike or now_ns - known.call_ns > _FACTOR * longest_ns:
            return None
        return UsualPause(longest_ns, any(one.wrote for one in alike))

    def keep(self, pids: Collection[int]) -> None:
        """Forget all other processes."""
        for pid in self._processes.keys() - set(pids):
            del self._processes[pid]


def _alike(one: int, other: int) -> bool:
    return other > 0 and abs(one - other) <= one // _TOLERANCE
