"""The owner, program and resource use of the processes that map NCCL.

What a process chooses itself comes to be known with its description (agent/node/targets/processes.py).  The name of its
user is this host's to tell, and may take a directory server that does not answer: threads of their own ask for it, once
for each user, and until then the user's number is told.

Processor time and memory are read on request, on the caller's thread: the longest unread first, for so long
and no longer, so that a host of thousands of processes answers too, and a later question gets what this one did not.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.agent.facts.rank_process import RankProcess
from railscope.probes.clock import Clock
from railscope.probes.processes.owner import ProcessOwner, ProcessUsage, usage_of, user_name
from railscope.probes.processes.processes import PROCFS, ProcessIdentity

MOST_THREADS: Final = 4
"""That ask for names of users; more than one only where one hangs."""
MOST_USERS: Final = 4096
"""Whose names are kept."""
MOST_READING_NS: Final = 250_000_000
"""For processor time and memory, for one question."""
FRESH_NS: Final = 50_000_000
"""What was read so lately is not read again."""


class UserNames:
    """Safe from any thread; never waits for a directory server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._asked: set[int] = set()

    def name_of(self, uid: int) -> str:
        """A user's name on this host; the number until it is known, and where there is none."""
        with self._lock:
            name = self._names.get(uid)
            room = len(self._asked) < MOST_THREADS and len(self._names) < MOST_USERS
            if name is None and uid not in self._asked and room:
                self._asked.add(uid)
                # A daemon's: one that hangs must not keep the agent from ending.
                threading.Thread(target=self._learn, args=(uid,), name="user-name", daemon=True).start()
        return str(uid) if name is None else name

    def _learn(self, uid: int) -> None:
        name = user_name(uid)
        with self._lock:
            self._names[uid] = name
            self._asked.discard(uid)


@dataclass(slots=True)
class _Known:
    identity: ProcessIdentity
    uid: int | None
    program: str | None = None
    """None: not known yet."""
    usage: ProcessUsage | None = None
    read_ns: int = 0
    """When usage was read last, by the monotonic clock; 0: never."""


class RankProcesses:
    """Safe from any thread.  All but `read` never waits for a process."""

    def __init__(self, procfs: Path, clock: Clock, users: UserNames) -> None:
        self._procfs = procfs
        self._clock = clock
        self._users = users
        self._lock = threading.Lock()
        self._known: dict[int, _Known] = {}
        """By pid."""
        self._asking = threading.Lock()
        """Held while processor time and memory are read."""

    def add(self, identity: ProcessIdentity, uid: int | None) -> None:
        """A process maps NCCL, or runs another program now; `uid` is its real user ID."""
        with self._lock:
            self._known[identity.pid] = _Known(identity, uid)
        if uid is not None:
            self._users.name_of(uid)

    def set_program(self, identity: ProcessIdentity, program: str) -> None:
        """What a process runs is known."""
        with self._lock:
            known = self._of(identity)
            if known is not None:
                known.program = program

    def remove(self, identity: ProcessIdentity) -> None:
        """A process has ended."""
        with self._lock:
            if self._of(identity) is not None:
                del self._known[identity.pid]

    def owner(self, identity: ProcessIdentity) -> ProcessOwner | None:
        """The owner of a process; None: not known."""
        with self._lock:
            known = self._of(identity)
            return self._owner(known) if known is not None else None

    def read(self, wanted: Collection[ProcessIdentity] | None = None) -> tuple[RankProcess, ...]:
        """The wanted processes with what they take, by pid; None: all of them.  Not for the loop's thread.

        Where the time does not suffice for all, some are returned as of an earlier request, or without usage.
        """
        with self._asking:
            with self._lock:
                asked = [one for one in self._known.values() if wanted is None or one.identity in wanted]
            began_ns = self._clock.monotonic_ns()
            for known in sorted(asked, key=lambda one: one.read_ns):
                now_ns = self._clock.monotonic_ns()
                if now_ns - began_ns > MOST_READING_NS or (known.read_ns and now_ns - known.read_ns < FRESH_NS):
                    break
                known.read_ns = now_ns
                known.usage = usage_of(self._procfs, known.identity, self._clock)
            with self._lock:
                told = (self._known.get(pid) for pid in sorted(one.identity.pid for one in asked))
                return tuple(RankProcess(one.identity, self._owner(one), one.usage) for one in told if one is not None)

    def _of(self, identity: ProcessIdentity) -> _Known | None:
        known = self._known.get(identity.pid)
        return known if known is not None and known.identity == identity else None

    def _owner(self, known: _Known) -> ProcessOwner | None:
        if known.program is None:
            return None
        # Users are numbered by this host: of another one's recorded processes nobody can name them.
        user = self._users.name_of(known.uid) if known.uid is not None and self._procfs == PROCFS else ""
        return ProcessOwner(known.identity, user, known.program, known.uid)
