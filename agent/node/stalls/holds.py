"""Hears from the kernel that processes were stopped or frozen.

Stop signals are told by a BPF program (probes/nccl/programs/stops.py), with the moment.  Of a control group of version
2 the kernel announces in `cgroup.events` that all of it is frozen (Linux Documentation/admin-guide/cgroup-v2.rst), by
inotify(7), without a moment: that of the reading stands for it.  Groups of version 1, and those that this agent cannot
see, announce nothing: who is frozen there is found by looking.

A user may freeze and thaw his own groups, and stop his processes, in a loop.  A group that announced something is not
listened to until it is `rearm`ed, which happens once a second; stop signals wake no more than ten times a second for
one user (probes/bpf/stops.bpf.c).
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from railscope.probes.clock import Clock
from railscope.probes.libraries.files import FileChanges
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.processes.state import CGROUPS, group_events, is_frozen

_log = logging.getLogger("railscope.stalls")

_REST_NS: Final = 800_000_000
"""A group that announced something rests for so long: all but a second, so that no tick comes a moment early."""


class StopEvents(Protocol):
    """What is needed of the program that sees stop signals (probes/nccl/programs/stops.py)."""

    def fileno(self) -> int: ...
    def watch(self, pid: int) -> None: ...
    def forget(self, pid: int) -> None: ...
    def read(self) -> Mapping[int, int]: ...
    def close(self) -> None: ...


class Holds:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, stops: StopEvents | None, procfs: Path, clock: Clock, cgroups: Path = CGROUPS) -> None:
        """`stops` None: of stop signals nothing is heard.

        Raises:
            OSError: too many open files.
        """
        self._stops = stops
        self._procfs = procfs
        self._cgroups = cgroups
        self._clock = clock
        self._groups = FileChanges()
        self._epoll = select.epoll()
        self._epoll.register(self._groups.fileno(), select.EPOLLIN)
        if stops is not None:
            self._epoll.register(stops.fileno(), select.EPOLLIN)
        self._told: dict[int, int] = {}
        """By pid: the stop signal that was told of last."""
        self._file_of: dict[int, Path] = {}
        """By pid: the file that announces."""
        self._members: dict[Path, set[int]] = {}
        """The inverse of that."""
        self._watched: dict[int, Path] = {}
        """By the number of its watch."""
        self._watch_of: dict[Path, int] = {}
        """The inverse of that."""
        self._resting: dict[Path, int] = {}
        """Files that announced something, and when."""

    def fileno(self) -> int:
        """Readable when there is something to `read`."""
        return self._epoll.fileno()

    def watch(self, pid: int) -> None:
        """Hear of a process from now on, as far as the kernel tells."""
        try:
            if self._stops is not None:
                self._stops.watch(pid)
            file = group_events(self._procfs, pid, self._cgroups)
            if file is None:
                return
            if file not in self._members:
                self._listen(file)
            self._file_of[pid] = file
            self._members.setdefault(file, set()).add(pid)
        except OSError as error:
            _log.debug("process %d: that it is stopped is found by looking: %s", pid, error)

    def forget(self, pid: int) -> None:
        """A process has ended."""
        try:
            if self._stops is not None:
                self._stops.forget(pid)
        except KernelRefusal as refusal:
            _log.debug("process %d: %s", pid, refusal)
        self._told.pop(pid, None)
        file = self._file_of.pop(pid, None)
        if file is None:
            return
        self._members[file].discard(pid)
        if not self._members[file]:
            del self._members[file]
            self._resting.pop(file, None)
            self._ignore(file)

    def read(self) -> dict[int, int]:
        """Processes that were stopped or frozen since the last call, by pid, and when, CLOCK_MONOTONIC, ns.

        Whether they still are is another question.
        """
        found = self._stopped()
        # Once more: that a file is not watched any more is an event too.
        while written := self._groups.drain() & self._watched.keys():
            for file in [self._watched[watch] for watch in written]:
                self._ignore(file)
                self._resting[file] = self._clock.monotonic_ns()
                found |= self._frozen(file)
        return found

    def rearm(self) -> dict[int, int]:
        """Listen again to groups that announced something a while ago; returns what `read` does, of what was missed."""
        now_ns = self._clock.monotonic_ns()
        found: dict[int, int] = {}
        for file in [file for file, announced_ns in self._resting.items() if now_ns - announced_ns >= _REST_NS]:
            del self._resting[file]
            try:
                self._listen(file)
            except OSError as error:
                _log.debug("%s: %s", file, error.strerror)
                continue
            found |= self._frozen(file)
        return found

    def _stopped(self) -> dict[int, int]:
        if self._stops is None:
            return {}
        try:
            times = self._stops.read()
        except KernelRefusal as refusal:
            _log.error("which processes were stopped cannot be read: %s", refusal.strerror)
            return {}
        found = {pid: time_ns for pid, time_ns in times.items() if self._told.get(pid) != time_ns}
        self._told |= found
        return found

    def _frozen(self, file: Path) -> dict[int, int]:
        if not is_frozen(file):
            return {}
        return dict.fromkeys(self._members.get(file, ()), self._clock.monotonic_ns())

    def _listen(self, file: Path) -> None:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            watch = self._groups.watch(descriptor)
        finally:
            os.close(descriptor)
        self._watched[watch], self._watch_of[file] = file, watch

    def _ignore(self, file: Path) -> None:
        watch = self._watch_of.pop(file, None)
        if watch is not None:
            del self._watched[watch]
            self._groups.unwatch(watch)

    def close(self) -> None:
        self._epoll.close()
        self._groups.close()
        if self._stops is not None:
            self._stops.close()
