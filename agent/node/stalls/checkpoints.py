"""Detects processes that write while no communicator of theirs is called: probably a checkpoint.

While one rank writes, the others wait in a collective on hosts that cannot know why.  So the writer's own host tells,
and `railscope diagnose` then knows that they wait for no fault.  A process is asked about only while it makes no call,
once a second: what it and its descendants wrote to files, in memory ones too (probes/processes/tree.py).  More seldom
the longer it is silent, new descendants are looked for, and what was sent to services, as to storage, is asked for
(probes/netdev/connection_state.py).  Who
pauses where it wrote the last times counts as writing (agent/node/stalls/pauses.py).

A tenant may have thousands of silent processes, each with a tree of its own: so many are asked at a time, and so many
looked at closely, and tenants take turns, each with those first that have waited longest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from railscope.agent.node.stalls.evidence import LEAST_WRITTEN_BYTES
from railscope.agent.node.stalls.pauses import Pauses
from railscope.probes.shares import in_turns

PERIOD_NS: Final = 1_000_000_000
_IDLE_NS: Final = 600_000_000_000
"""Who has made no call for this long, and does not write, is idle and left alone."""


_CLOSELY_AFTER_NS: Final = 3_000_000_000
"""Of silence: it takes a file of every thread, and all connections of a network namespace."""
_CLOSELY_PART: Final = 10
"""Of the silence so far, until the next close look."""
MOST_ASKED: Final = 256
"""At a time, with their descendants: a millisecond each at worst."""
MOST_CLOSELY: Final = 8
"""At a time: some 7 ms each at worst (probes/processes/tree.py)."""


class LastCall(NamedTuple):
    """The last call of a process on any communicator."""

    time_ns: int
    calls: int
    """That it has made on all those that live."""


class Written(Protocol):
    """What a process, by pid, wrote so far; None: this cannot be known.

    `closely`: look for its descendants, too, and at what they sent to services.
    """

    def __call__(self, pid: int, /, *, closely: bool) -> int | None: ...


@dataclass(frozen=True, slots=True)
class _Silence:
    """What a process did since its last call."""

    call_ns: int
    written_bytes: int
    """Since it began, when it was asked last."""
    asked_ns: int
    close_ns: int
    """When it was last looked at closely, or when its silence began."""
    wrote_ns: int | None = None
    """When it was last seen to have written; None: not since that call."""


class Checkpoints:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        written: Written,
        silence_ns: int,
        excuse_ns: int,
        tenant_of: Callable[[int], Hashable] = lambda _pid: None,
    ) -> None:
        """A process is silent after `silence_ns` without a call; who wrote counts as writing for `excuse_ns`.

        `tenant_of`: by pid, whose turn it takes.
        """
        self._written = written
        self._tenant_of = tenant_of
        self._silence_ns = silence_ns
        self._excuse_ns = excuse_ns
        self._looked_ns = 0
        self._silent: dict[int, _Silence] = {}
        self._pauses = Pauses()

    def set_times(self, silence_ns: int, excuse_ns: int) -> None:
        """Take other times, as the constructor does."""
        self._silence_ns = silence_ns
        self._excuse_ns = excuse_ns

    def update(self, now_ns: int, last_calls: Mapping[int, LastCall]) -> None:
        """Ask those that are silent, about once a second; `last_calls`: of every living process, by pid."""
        self._looked_ns = now_ns
        self._pauses.keep(last_calls.keys())
        silent = {}
        waiting, due = {}, {}
        for pid, (call_ns, calls) in last_calls.items():
            self._pauses.update(now_ns, pid, call_ns, calls)
            before = self._silent.get(pid)
            if before is not None and before.call_ns != call_ns:
                before = None
            quiet_ns = now_ns - call_ns
            if quiet_ns < self._silence_ns or (quiet_ns > _IDLE_NS and (before is None or before.wrote_ns is None)):
                continue
            waiting[pid] = call_ns if before is None else before.asked_ns
            close_ns = call_ns if before is None else before.close_ns
            if quiet_ns >= _CLOSELY_AFTER_NS and now_ns - close_ns >= quiet_ns // _CLOSELY_PART:
                due[pid] = close_ns
            if before is not None:
                silent[pid] = before
        closely = frozenset(self._in_turn(due)[:MOST_CLOSELY])
        for pid in {*closely, *self._in_turn(waiting)[:MOST_ASKED]}:
            written_bytes = self._written(pid, closely=pid in closely)
            before = silent.pop(pid, None)
            if written_bytes is None:
                continue
            call_ns = last_calls[pid].time_ns
            wrote_ns = None if before is None else before.wrote_ns
            if before is not None and written_bytes - before.written_bytes >= LEAST_WRITTEN_BYTES:
                wrote_ns = now_ns
                self._pauses.record_writing(pid)
            close_ns = now_ns if pid in closely else call_ns if before is None else before.close_ns
            silent[pid] = _Silence(call_ns, written_bytes, now_ns, close_ns, wrote_ns)
        self._silent = silent

    def _in_turn(self, since_ns: Mapping[int, int]) -> list[int]:
        """Pids, tenants in turns: of each those first that have waited longest, since when by pid."""
        return in_turns(sorted(since_ns, key=lambda pid: (since_ns[pid], pid)), self._tenant_of)

    def forget(self, pid: int) -> None:
        """A process has ended."""
        self._silent.pop(pid, None)

    def writing_since_ns(self, now_ns: int) -> dict[int, int]:
        """By pid of those that write, did so a moment ago, or pause where they last did: when their last call was."""
        if now_ns - self._looked_ns > 3 * PERIOD_NS:
            return {}  # nothing is evaluated while no communicator lives
        return {
            pid: one.call_ns
            for pid, one in self._silent.items()
            if (one.wrote_ns is not None and now_ns - one.wrote_ns < self._excuse_ns)
            or ((usual := self._pauses.usual(now_ns, pid)) is not None and usual.wrote)
        }

    def pauses_as_usual(self, now_ns: int, pid: int) -> bool:
        """Whether a process pauses where it did the last times, and not for much longer."""
        return self._pauses.usual(now_ns, pid) is not None
