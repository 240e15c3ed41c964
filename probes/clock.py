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
    """The machine's own clock.  A sampler looks at it thousands of times a second: the functions are C's own."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    realtime_ns = staticmethod(time.time_ns)
    sleep = staticmethod(time.sleep)
