"""Where the Python code of a blamed rank stands: its main thread's stack, read by py-spy without stopping the process.

Off unless a program is named: py-spy reads what a tenant's process holds, with the agent's rights.  It runs as a
process of its own, one at a time, with limits of time, memory and output, and the loop never waits for it: a stack is
asked for when a rank comes to be blamed and now and then while it is, and is told of once it is there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import subprocess
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from railscope.agent.facts.stall import ProcessStack
from railscope.probes.clock import Clock
from railscope.probes.printable import printable
from railscope.probes.processes.processes import ProcessIdentity

_log = logging.getLogger("railscope.stacks")

MOST_FRAMES: Final = 32
MOST_STACKS: Final = 64
"""That are remembered, and so processes that are followed at a time."""
MOST_STUCK: Final = 3
"""Helpers that were killed and have not ended: no further one is started meanwhile."""
_AGAIN_NS: Final = 30_000_000_000
"""A blamed rank's stack is read anew after so long."""
_LIMIT_NS: Final = 5_000_000_000
_CLOSE_SECONDS: Final = 0.5
_MOST_BYTES: Final = 1 << 20
_LONGEST_LINE: Final = 160
_MEMORY_BYTES: Final = 1 << 30
_CPU_SECONDS: Final = 5


@dataclass(slots=True)
class _Reading:
    identity: ProcessIdentity
    helper: subprocess.Popen[bytes]
    began_ns: int
    said: bytearray


class Stacks:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, program: Path, clock: Clock) -> None:
        """`program`: py-spy, 0.3.8 or newer (`dump --nonblocking --json`)."""
        self._program = program
        self._clock = clock
        self._stacks: OrderedDict[ProcessIdentity, ProcessStack] = OrderedDict()
        self._reading: _Reading | None = None
        self._ending: list[subprocess.Popen[bytes]] = []
        """Helpers that were killed: one that waits for a page of the process may take as long as its tenant likes."""

    def stack_of(self, identity: ProcessIdentity) -> ProcessStack | None:
        """The last stack of a process; None: it was not read yet."""
        return self._stacks.get(identity)

    @property
    def busy(self) -> bool:
        """Whether a stack is being read."""
        return self._reading is not None

    def follow(self, blamed: Collection[ProcessIdentity]) -> None:
        """Take what has been read, and read on; call it with every look for stalls.

        `blamed`: processes of ranks to which stalls are put down.
        """
        now_ns = self._clock.monotonic_ns()
        if self._reading is not None:
            self._take(self._reading, now_ns)
        self._ending = [one for one in self._ending if one.poll() is None]
        if self._reading is None and len(self._ending) < MOST_STUCK:
            due = [one for one in blamed if self._age_ns(one, now_ns) >= _AGAIN_NS]
            if due:
                self._ask(max(due, key=lambda one: self._age_ns(one, now_ns)), now_ns)

    def close(self) -> None:
        """End the helper, if one runs; what cannot end is waited for a moment only."""
        if self._reading is not None:
            self._end(self._reading)
        for helper in self._ending:
            with contextlib.suppress(subprocess.TimeoutExpired):
                helper.wait(_CLOSE_SECONDS)

    def _age_ns(self, identity: ProcessIdentity, now_ns: int) -> int:
        known = self._stacks.get(identity)
        return now_ns if known is None else now_ns - known.taken_ns

    def _ask(self, identity: ProcessIdentity, now_ns: int) -> None:
        command = [os.fspath(self._program), "dump", "--nonblocking", "--json", "--pid", str(identity.pid)]
        try:
            helper = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                start_new_session=True,
            )
        except OSError as error:
            self._keep(identity, ProcessStack(now_ns, (), f"{self._program}: {error.strerror}"))
            return
        for limit, most in ((resource.RLIMIT_AS, _MEMORY_BYTES), (resource.RLIMIT_CPU, _CPU_SECONDS)):
            try:
                resource.prlimit(helper.pid, limit, (most, most))
            except (OSError, ValueError) as error:  # it has ended, or the limit is lower already
                _log.debug("%s: %s", self._program, error)
        assert helper.stdout is not None
        os.set_blocking(helper.stdout.fileno(), False)
        self._reading = _Reading(identity, helper, now_ns, bytearray())

    def _take(self, reading: _Reading, now_ns: int) -> None:
        out = reading.helper.stdout
        assert out is not None
        while select.select([out], [], [], 0)[0]:
            more = out.read(1 << 16)
            if not more:
                self._keep(reading.identity, self._stack(reading, now_ns))
                self._end(reading)
                return
            reading.said += more
            if len(reading.said) > _MOST_BYTES:
                break
        else:
            if now_ns - reading.began_ns < _LIMIT_NS:
                return
        why = f"py-spy took longer than {_LIMIT_NS // 10**9} s or said more than {_MOST_BYTES >> 20} MiB"
        self._keep(reading.identity, ProcessStack(now_ns, (), why))
        self._end(reading)

    def _stack(self, reading: _Reading, now_ns: int) -> ProcessStack:
        pid = reading.identity.pid
        try:
            lines = _main_thread(json.loads(reading.said), pid)
        except (ValueError, TypeError, KeyError, RecursionError):
            return ProcessStack(now_ns, (), "py-spy finds no Python there, or may not read it")
        return ProcessStack(now_ns, lines, "" if lines else "its main thread is in no Python code")

    def _keep(self, identity: ProcessIdentity, stack: ProcessStack) -> None:
        self._stacks[identity] = stack
        self._stacks.move_to_end(identity)
        if len(self._stacks) > MOST_STACKS:
            self._stacks.popitem(last=False)

    def _end(self, reading: _Reading) -> None:
        reading.helper.kill()
        if reading.helper.stdout is not None:
            reading.helper.stdout.close()
        self._ending.append(reading.helper)
        self._reading = None


def _main_thread(threads: Any, pid: int) -> tuple[str, ...]:
    """Raises ValueError, TypeError or KeyError where that is no dump of py-spy's."""
    frames: list[Any] = next((one["frames"] for one in threads if one["os_thread_id"] == pid), [])
    return tuple(
        printable(f"{one['name']} ({one['short_filename'] or one['filename']}:{int(one['line'])})", _LONGEST_LINE)
        for one in frames[:MOST_FRAMES]
    )
