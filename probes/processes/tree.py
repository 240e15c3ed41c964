"""What a process and its descendants write: to files, whatever holds them, and how busy the descendants are.

Many programs do not write a checkpoint themselves: a child process does, while its parent sleeps.  And what is written
need not come to storage: a file below /dev/shm stays in memory.  So of each process the greater of two counts of
/proc/PID/io is taken (proc_pid_io(5)): `write_bytes`, given to storage, mapped files among it, and `wchar`, handed to
write(2) and its like.  What is sent through a socket with send(2) is in neither.

Descendants are found by /proc/PID/task/TID/children, where the kernel was built with CONFIG_PROC_CHILDREN.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from railscope.probes.processes.state import MOST_THREADS

MOST_DESCENDANTS: Final = 64
MOST_FILES: Final = 1024
"""Of threads, in which a look finds the descendants of one process: some 7 ms."""
_LIST_BYTES: Final = 4096
_IO_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class TreeTotals:
    """What a process's tree did since it was first asked about: totals that never fall."""

    written_bytes: int
    """By it and its descendants."""
    descendants_busy_ns: int
    """On processors, by the first threads of its descendants."""


@dataclass(slots=True)
class _Known:
    """Of one tree."""

    written: dict[int, int] = field(default_factory=dict)
    """By pid, as read last; of the next too."""
    busy: dict[int, int] = field(default_factory=dict)
    written_bytes: int = 0
    busy_ns: int = 0


class ProcessTrees:
    """Sums up what trees of processes do, from one reading to the next.  Not thread-safe."""

    def __init__(self, procfs: Path) -> None:
        self._procfs = procfs
        self._known: dict[int, _Known] = {}

    def totals(self, pid: int, *, look: bool) -> TreeTotals | None:
        """What the tree of a process did so far; None: it has ended, or one is not allowed to know.

        `look`: for new descendants, too, which takes a file of every thread; those that are known are asked anyway.
        """
        own = written_bytes(self._procfs, pid)
        if own is None:
            return None
        first = pid not in self._known
        known = self._known.setdefault(pid, _Known())
        written, busy = {pid: own}, {}
        for child in descendants(self._procfs, pid) if look else list(known.busy):
            count = written_bytes(self._procfs, child)
            if count is not None:
                written[child] = count
                busy[child] = _busy_ns(self._procfs, child)
        if first:
            known.written_bytes = own
        else:
            # A child that is new wrote all that it has written since the last reading.
            known.written_bytes += _growth(known.written, written)
            known.busy_ns += _growth(known.busy, busy)
        known.written, known.busy = written, busy
        return TreeTotals(known.written_bytes, known.busy_ns)

    def descendants(self, pid: int) -> Collection[int]:
        """Those that a process had when it was last asked about."""
        known = self._known.get(pid)
        return known.busy.keys() if known is not None else ()

    def forget(self, pid: int) -> None:
        """A process has ended, or is not asked about any more."""
        self._known.pop(pid, None)


def written_bytes(procfs: Path, pid: int) -> int | None:
    """What one process has written to files so far; None: it has ended, or one is not allowed to know."""
    counts = {}
    with contextlib.suppress(OSError, ValueError):
        for line in _read(f"{procfs}/{pid}/io", _IO_BYTES).splitlines():
            name, _, value = line.partition(b":")
            counts[name] = int(value)
    found = [counts[name] for name in (b"write_bytes", b"wchar") if name in counts]
    return max(found, default=None)


def descendants(procfs: Path, pid: int) -> list[int]:
    """Pids of the processes that a process has made and these have, nearest first.

    At most `MOST_DESCENDANTS`, and those that `MOST_FILES` of their threads tell of.
    """
    found: dict[int, None] = {}
    ahead = deque([pid])
    files = iter(range(MOST_FILES))
    while ahead and len(found) < MOST_DESCENDANTS:
        for child in _children(procfs, ahead.popleft(), files):
            if child not in found and len(found) < MOST_DESCENDANTS:
                found[child] = None
                ahead.append(child)
    return list(found)


def _children(procfs: Path, pid: int, files: Iterator[int]) -> list[int]:
    """`files`: one for each that may still be read."""
    found = []
    with contextlib.suppress(OSError), os.scandir(f"{procfs}/{pid}/task") as tasks:
        for task, _ in zip(islice(tasks, MOST_THREADS), files, strict=False):
            with contextlib.suppress(OSError, ValueError):
                found += [int(word) for word in _read(f"{task.path}/children", _LIST_BYTES).split()]
    return found


def _busy_ns(procfs: Path, pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_read(f"{procfs}/{pid}/schedstat", _IO_BYTES).split()[0])
    return 0


def _read(path: str, size_bytes: int) -> bytes:
    # By descriptor, which takes a third of the time: this is asked of each thread.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, size_bytes)
    finally:
        os.close(file)


def _growth(before: dict[int, int], now: dict[int, int]) -> int:
    return sum(max(0, value - before.get(pid, 0)) for pid, value in now.items())
