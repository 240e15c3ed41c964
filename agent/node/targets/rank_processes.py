"""The owner, command line and resource use of the processes that map NCCL.

The daemon's loop only says which processes there are.  What a process chooses itself, its command line, is read on
threads of our own, once for each program that it runs, and the loop takes what is known when it asks.  A command line
may hang (probes/processes/owner.py): a thread that does is left to itself, and another one reads on, up to a few.

Processor time and memory are read on request, on the caller's thread: the longest unread first, for so long
and no longer, so that a host of thousands of processes answers too, and a later question gets what this one did not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Final

from railscope.agent.facts.rank_process import RankProcess
from railscope.probes.clock import Clock
from railscope.probes.processes.owner import ProcessOwner, owner_of, usage_of
from railscope.probes.processes.processes import ProcessIdentity

MOST_THREADS: Final = 4
"""That read command lines; more than one only where one hangs."""
HANGS_NS: Final = 2_000_000_000
"""A command line that takes as long is left to its thread."""
MOST_READING_NS: Final = 250_000_000
"""For processor time and memory, for one question."""
FRESH_NS: Final = 50_000_000
"""What was read so lately is not read again."""


class RankProcesses:
    """Safe from any thread.  `add`, `remove` and `owner` never wait for a process."""

    def __init__(self, procfs: Path, clock: Clock) -> None:
        self._procfs = procfs
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[int, RankProcess] = {}
        """By pid."""
        self._unread: deque[ProcessIdentity] = deque()
        self._reading: dict[int, int] = {}
        """By the number of a thread: since when it reads what it reads."""
        self._threads = 0
        """Ever started."""
        self._asking = threading.Lock()
        """Held while processor time and memory are read."""
        self._read_ns: dict[ProcessIdentity, int] = {}
        """When these were read, of each process; by the monotonic clock."""

    def add(self, identity: ProcessIdentity) -> None:
        """A process maps NCCL, or runs another program now."""
        with self._lock:
            self._known[identity.pid] = RankProcess(identity, None, None)
            self._unread.append(identity)
            self._go_on_reading()

    def remove(self, identity: ProcessIdentity) -> None:
        """A process has ended."""
        with self._lock:
            known = self._known.get(identity.pid)
            if known is not None and known.identity == identity:
                del self._known[identity.pid]

    def owner(self, identity: ProcessIdentity) -> ProcessOwner | None:
        """The owner of a process; None: not read yet, or not known."""
        with self._lock:
            self._go_on_reading()
            known = self._known.get(identity.pid)
            return known.owner if known is not None and known.identity == identity else None

    def read(self, wanted: Collection[ProcessIdentity] | None = None) -> tuple[RankProcess, ...]:
        """The wanted processes with what they take, by pid; None: all of them.  Not for the loop's thread.

        Where the time does not suffice for all, some are returned as of an earlier request, or without usage.
        """
        with self._asking:
            with self._lock:
                self._go_on_reading()
                known = [one.identity for one in self._known.values()]
            self._read_ns = {identity: self._read_ns.get(identity, 0) for identity in known}
            asked = [identity for identity in known if wanted is None or identity in wanted]
            began_ns = self._clock.monotonic_ns()
            for identity in sorted(asked, key=self._read_ns.__getitem__):
                now_ns = self._clock.monotonic_ns()
                last_ns = self._read_ns[identity]
                if now_ns - began_ns > MOST_READING_NS or (last_ns and now_ns - last_ns < FRESH_NS):
                    break
                self._read_ns[identity] = now_ns
                self._read_usage(identity)
            with self._lock:
                told = (self._known.get(pid) for pid in sorted(identity.pid for identity in asked))
                return tuple(one for one in told if one is not None)

    def _read_usage(self, identity: ProcessIdentity) -> None:
        usage = usage_of(self._procfs, identity, self._clock)
        with self._lock:
            known = self._known.get(identity.pid)
            if known is not None and known.identity == identity:
                self._known[identity.pid] = replace(known, usage=usage)

    def _go_on_reading(self) -> None:
        """Start a thread if something is to be read and every thread hangs; call it with the lock held."""
        now_ns = self._clock.monotonic_ns()
        hang = all(now_ns - since_ns > HANGS_NS for since_ns in self._reading.values())
        if self._unread and hang and len(self._reading) < MOST_THREADS:
            self._threads += 1
            self._reading[self._threads] = now_ns
            # A daemon's: one that hangs must not keep the agent from ending.
            threading.Thread(
                target=self._read_owners, args=(self._threads,), name="process-owners", daemon=True
            ).start()

    def _read_owners(self, thread: int) -> None:
        """Read until there is nothing left to read."""
        while (identity := self._next(thread)) is not None:
            owner = owner_of(self._procfs, identity)
            with self._lock:
                known = self._known.get(identity.pid)
                # Of two programs that it ran, the one that is read last is the one that it runs.
                if known is not None and known.identity == identity:
                    self._known[identity.pid] = replace(known, owner=owner)

    def _next(self, thread: int) -> ProcessIdentity | None:
        """What this thread is to read; None: it ends."""
        with self._lock:
            if not self._unread:
                del self._reading[thread]
                return None
            self._reading[thread] = self._clock.monotonic_ns()
            return self._unread.popleft()
