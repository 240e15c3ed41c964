"""Who takes the processor: processes, threads of our own, everybody else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_SCHED_CLOCK: Final = 2
"""CPUCLOCK_SCHED of linux/posix-timers.h: user and system time of all threads."""

DISTURBED: Final = "above 5 % the figures below say little"
"""What a figure of `others_percent` is noted with."""


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads: proc(5), fields 14 and 15 of stat."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def seconds_of_others(pids: Iterable[int]) -> float:
    """CPU time that the machine has spent on anything but these processes: proc(5), the first line of stat."""
    ticks = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    busy = sum(ticks) - ticks[3] - ticks[4]  # without idle and iowait
    return busy / _TICKS - sum(cpu_seconds(pid) for pid in pids)


class Others:
    """What others than some processes take of the machine, from now on."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._began, self._busy = time.monotonic(), seconds_of_others(self._pids)

    def percent(self) -> float:
        """Of the time of all processors, since this was made."""
        took = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return (seconds_of_others(self._pids) - self._busy) / took * 100


@dataclass(frozen=True, slots=True)
class ThreadTime:
    """A thread, or all threads of a process, at one moment."""

    cpu_ns: int
    monotonic_ns: int

    def core_percent(self, since: ThreadTime) -> float:
        """Of one processor, from `since` to now."""
        return (self.cpu_ns - since.cpu_ns) / (self.monotonic_ns - since.monotonic_ns) * 100


def thread_time(thread: threading.Thread) -> ThreadTime:
    """What a running thread of this process has taken so far."""
    assert thread.ident is not None
    return ThreadTime(time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident)), time.monotonic_ns())


def process_time(pid: int) -> ThreadTime:
    """What another process has taken so far, to the nanosecond: by its clock, as clock_getcpuclockid(3) finds it.

    Raises:
        OSError: there is no such process.
    """
    return ThreadTime(time.clock_gettime_ns((~pid << 3) | _SCHED_CLOCK), time.monotonic_ns())
