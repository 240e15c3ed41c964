"""A share of one core, with bursts: how long a worker rests before it takes more CPU time."""

from __future__ import annotations


class CpuShare:
    """A bucket of CPU seconds that fills with time.  For one thread."""

    def __init__(self, share: float, burst_seconds: float, now: float) -> None:
        """`share` of a core may be taken for ever, `burst_seconds` more at once; `now` as everywhere in seconds."""
        self._share = share
        self._burst_seconds = burst_seconds
        self._left_seconds = burst_seconds
        self._filled = now

    def record(self, cpu_seconds: float, now: float) -> None:
        """So much was taken."""
        self._fill(now)
        self._left_seconds -= cpu_seconds

    def rest_seconds(self, now: float) -> float:
        """How long to rest before more is taken; 0: not at all."""
        self._fill(now)
        return max(0.0, -self._left_seconds / self._share)

    def _fill(self, now: float) -> None:
        gained = max(0.0, now - self._filled) * self._share
        self._left_seconds = min(self._burst_seconds, self._left_seconds + gained)
        self._filled = now
