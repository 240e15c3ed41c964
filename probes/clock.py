"""The clocks, and the error of the time of day.

Every reader and sampler takes a `Clock`, so that a test can hand it one whose time only moves when told to.

How far the system's clock may be off, the kernel knows from who disciplines it (chrony, ntpd, timesyncd): adjtimex(2)
with `modes` 0 only reads.  `maxerror` bounds the error; it grows by 500 µs a second while the clock is not corrected,
and is 16 s with STA_UNSYNC set if it never was.  `esterror` is the daemon's own estimate.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

_STA_UNSYNC: Final = 0x0040
_TIME_ERROR: Final = 5
_MICROSECOND_NS: Final = 1_000


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


def boottime_ns() -> int:
    """Nanoseconds of CLOCK_BOOTTIME: since the machine started, also while it was suspended; never goes back."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_id(procfs: Path) -> str:
    """What names this boot of the machine among all; empty where it cannot be read."""
    try:
        return (procfs / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class _Timex(ctypes.Structure):
    """`struct timex` as far as it is read here, with room for the rest; source: timex.h of the C library."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


@dataclass(frozen=True, slots=True)
class ClockError:
    """The error of CLOCK_REALTIME at one moment."""

    synchronised: bool
    """False: the clock is not synchronised, and the numbers mean nothing."""
    maximum_ns: int
    estimated_ns: int


def clock_error() -> ClockError | None:
    """The kernel's estimate of its clock's error; None if it is not readable (a system call filter forbids it)."""
    libc = ctypes.CDLL(None, use_errno=True)
    timex = _Timex()
    if not hasattr(libc, "adjtimex"):  # not every C library has it
        return None
    state: int = libc.adjtimex(ctypes.byref(timex))
    if state < 0:
        return None
    return ClockError(
        synchronised=state != _TIME_ERROR and not timex.status & _STA_UNSYNC,
        maximum_ns=timex.maxerror * _MICROSECOND_NS,
        estimated_ns=timex.esterror * _MICROSECOND_NS,
    )
