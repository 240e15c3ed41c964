"""Where time comes from.

Every reader and sampler takes a `Clock`, so that a test can hand it one whose time only moves when told to.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time as the kernel's probes and Prometheus see it."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of CLOCK_MONOTONIC, the clock of `bpf_ktime_get_ns`; never goes back."""
        ...

    def realtime_ns(self) -> int:
        """Nanoseconds since the Unix epoch; may jump."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait at least this long."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def realtime_ns(self) -> int:
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
