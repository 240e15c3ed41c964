"""Detects processes that write to storage while no communicator of theirs is called: probably a checkpoint.

While one rank writes, the others wait in a collective on hosts that cannot know why.  So the writer's own host tells,
and `railscope diagnose` then knows that they wait for no fault.  A process is read only while it makes no call,
once a second, by one small file: `write_bytes` of /proc/PID/io (proc_pid_io(5)), which counts what it gives to the page
cache for storage.  What a process hands to a file system that has no such cache (FUSE without write-back), or has
another process write, is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from railscope.agent.node.stalls.evidence import LEAST_WRITTEN_BYTES

PERIOD_NS: Final = 1_000_000_000
_IDLE_NS: Final = 600_000_000_000
"""Who has made no call for this long, and does not write, is idle and left alone."""


@dataclass(frozen=True, slots=True)
class _Silence:
    """What a process did since its last call."""

    call_ns: int
    written_bytes: int
    """Since it began, when it was asked last."""
    wrote_ns: int | None = None
    """When it was last seen to have written; None: not since that call."""


class Checkpoints:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, written: Callable[[int], int | None], silence_ns: int, excuse_ns: int) -> None:
        """`written`: bytes that a process, by pid, gave to storage so far; None: this cannot be known.

        A process is silent when it has made no call for `silence_ns`; who wrote counts as writing for `excuse_ns`.
        """
        self._written = written
        self._silence_ns = silence_ns
        self._excuse_ns = excuse_ns
        self._looked_ns = 0
        self._silent: dict[int, _Silence] = {}

    def set_times(self, silence_ns: int, excuse_ns: int) -> None:
        """Take other times, as the constructor does."""
        self._silence_ns = silence_ns
        self._excuse_ns = excuse_ns

    def update(self, now_ns: int, last_calls: Mapping[int, int]) -> None:
        """Ask those that are silent, about once a second.

        `last_calls`: of every living process, by pid, the last on any communicator, ns.
        """
        self._looked_ns = now_ns
        silent = {}
        for pid, call_ns in last_calls.items():
            before = self._silent.get(pid)
            if before is not None and before.call_ns != call_ns:
                before = None
            wrote_ns = None if before is None else before.wrote_ns
            quiet_ns = now_ns - call_ns
            if quiet_ns < self._silence_ns or (quiet_ns > _IDLE_NS and wrote_ns is None):
                continue
            written_bytes = self._written(pid)
            if written_bytes is None:
                continue
            if before is not None and written_bytes - before.written_bytes >= LEAST_WRITTEN_BYTES:
                wrote_ns = now_ns
            silent[pid] = _Silence(call_ns, written_bytes, wrote_ns)
        self._silent = silent

    def forget(self, pid: int) -> None:
        """A process has ended."""
        self._silent.pop(pid, None)

    def writing_pids(self, now_ns: int) -> tuple[int, ...]:
        """Pids of those that write, or did so a moment ago: who writes pauses now and then."""
        if now_ns - self._looked_ns > 3 * PERIOD_NS:
            return ()  # nothing is evaluated while no communicator lives
        return tuple(
            pid
            for pid, one in self._silent.items()
            if one.wrote_ns is not None and now_ns - one.wrote_ns < self._excuse_ns
        )
