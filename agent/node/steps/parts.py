"""What the steps of a job are made of, as far as calls and completions tell: communication, waiting, silence.

Where completed operations are seen, a moment of a step is one of: an operation is under way and waits for the slowest
rank of its communicator, or goes on; or none is under way, between the step's calls, or in the silence after the last
one.  An operation is under way from its hand-over to NCCL's proxy, or the end of the one before it, to its completion.

Where none is seen (the level of counts, communicators within a machine), what lies between the calls is communication
or computation, and which of them is unknown.  How long the ranks waited is then told by who makes its calls last.

Waiting is shared out: of each stretch of a few seconds it is known how much of a rank's time in operations was spent
longer than the rank of its communicator on this host that spent least (agent/node/collectives/slow_ranks.py).  That
share of the steps' communication was waiting.  Ranks of other hosts are compared by the recording rules.

Memory, of a job at most 0.5 MiB: 16 bytes for each stretch of communication, `MOST_STRETCHES` that are merged and as
many that are not yet; 25 bytes for each step that is not told of, as many again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import numpy as np

from railscope.agent.rhythm.intervals import Intervals, Times, union
from railscope.agent.rhythm.tracker import ITERATION, Iterations

Part = Literal["waiting", "communication", "between", "silent", "unknown"]
MOST_STRETCHES: Final = 1 << 13
_LEAST_PATIENCE_NS: Final = 10_000_000_000
_PATIENCE: Final = 4
"""So many times its length after a step it is told with the operations that are known by then."""
_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Waited:
    """How long a rank waited of late for the slowest one of its communicators' ranks on this host."""

    of_communication: float | None = None
    """Of its time in operations, 0 to 1; None: none of them is compared."""
    of_time: float | None = None
    """Of all time, by who made calls last; None: no calls are compared."""


class StepParts:
    """Of one job.  Not thread-safe."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._steps: Iterations = np.zeros(0, ITERATION)
        """Those that are not told of yet."""
        self._under_way = Intervals(_NONE, _NONE)
        self._pending: list[tuple[Times, Times]] = []
        self._pending_count = 0
        self._known_from_ns: int | None = None
        """Since when all completions are known; None: none was seen."""
        self._latest_ns = 0
        """When the last operation ended."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """So far, by part; what was never known is absent."""
        return MappingProxyType(self._seconds)

    def record_completions(self, begin_ns: Times, end_ns: Times) -> None:
        """Record when operations of the rank began and ended, all that there were since the last call."""
        if not len(end_ns):
            return
        if self._known_from_ns is None:
            self._known_from_ns = int(begin_ns.min())
        self._latest_ns = max(self._latest_ns, int(end_ns.max()))
        self._pending.append((begin_ns, end_ns))
        self._pending_count += len(end_ns)
        if self._pending_count >= MOST_STRETCHES:
            self._merge()

    def add(self, steps: Iterations) -> None:
        """Take steps whose length counts (dtype ITERATION); they are told of when their operations have ended."""
        if len(steps):
            self._steps = np.concatenate((self._steps, steps))[-MOST_STRETCHES:]

    @property
    def is_settled(self) -> bool:
        """Whether no step is left to be told of."""
        return not len(self._steps)

    def settle(self, now_ns: int, waited: Waited, *, all_seen: bool) -> None:
        """Tell of the steps whose operations have ended.

        Args:
            now_ns: CLOCK_MONOTONIC.
            waited: as of the last stretch.
            all_seen: completions are seen of every communicator that a step calls.
        """
        steps = self._steps
        if not len(steps):
            return
        self._merge()
        length_ns = int(np.median(steps["end_ns"] - steps["start_ns"]))
        patience_ns = max(_LEAST_PATIENCE_NS, _PATIENCE * length_ns)
        ready = (steps["end_ns"] + length_ns <= self._latest_ns) | (steps["end_ns"] + patience_ns <= now_ns)
        due, self._steps = steps[ready], steps[~ready]
        if not len(due):
            return
        if self._known_from_ns is None or self._latest_ns < int(due["start_ns"][0]):
            self._add_unseen(due, waited)
            # Where completions are seen again, those are known that come then.
            self._known_from_ns = None
        else:
            self._add_seen(due[due["start_ns"] >= self._known_from_ns], waited, all_seen=all_seen)
        self._forget(int(due["end_ns"][-1]))

    def _add_seen(self, steps: Iterations, waited: Waited, *, all_seen: bool) -> None:
        start_ns, end_ns, silence_ns = steps["start_ns"], steps["end_ns"], steps["silence_ns"]
        under_way = int(self._under_way.length_in(start_ns, end_ns).sum())
        tail = int(self._under_way.length_in(end_ns - silence_ns, end_ns).sum())
        silent = int(silence_ns.sum()) - tail
        between = int((end_ns - start_ns).sum()) - under_way - silent
        waiting = None if waited.of_communication is None else waited.of_communication * under_way
        self._add("waiting", waiting)
        self._add("communication", under_way - (waiting or 0.0))
        self._add("silent", silent)
        self._add("between" if all_seen else "unknown", between)

    def _add_unseen(self, steps: Iterations, waited: Waited) -> None:
        length, silent = int((steps["end_ns"] - steps["start_ns"]).sum()), int(steps["silence_ns"].sum())
        waiting = None if waited.of_time is None else min(waited.of_time * length, length - silent)
        self._add("waiting", waiting)
        self._add("silent", silent)
        self._add("unknown", length - silent - (waiting or 0.0))

    def _add(self, part: Part, time_ns: float | None) -> None:
        if time_ns is not None:
            self._seconds[part] = self._seconds.get(part, 0.0) + time_ns / 1e9

    def _merge(self) -> None:
        if self._pending:
            begin_ns, end_ns = (np.concatenate(column) for column in zip(*self._pending, strict=True))
            known = self._under_way
            self._under_way = union(np.concatenate((known.begin_ns, begin_ns)), np.concatenate((known.end_ns, end_ns)))
            self._pending.clear()
            self._pending_count = 0
        excess = len(self._under_way.begin_ns) - MOST_STRETCHES
        if excess > 0:
            self._known_from_ns = int(self._under_way.end_ns[excess - 1])
            self._forget(self._known_from_ns)

    def _forget(self, before_ns: int) -> None:
        kept = self._under_way.end_ns > before_ns
        self._under_way = Intervals(self._under_way.begin_ns[kept], self._under_way.end_ns[kept])
