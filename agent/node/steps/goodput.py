"""What a job's time went into since it began on this host: steps, and what took the rest.

A step counts with what it took.  One that took more than twice the usual was interrupted: it counts with the usual, and
the rest of it is put down to what was seen meanwhile.  Before the first step the job starts, or starts again, where its
batch system or launcher gives it the same name as one that ended here.  Ranks of it that stall, or write a checkpoint,
are looked at once an update; a stall counts from the hand-over of its operation, a checkpoint from the last call of the
rank that writes, and neither while steps go on as usual.  Where operations are slow, and complete, a stall takes what
steps took beyond the usual, which is less than how long it stands.  What none of these explains is *other*: an
evaluation, or a pause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.rhythm.intervals import Intervals, union
from railscope.agent.rhythm.tracker import Iterations
from railscope.probes.shares import FairMemory

State = Literal["steps", "start", "restart", "stalled", "checkpoint", "other"]
_INTERRUPTED: Final = 2.0
"""So many times the usual length."""
_RECENT: Final = 64
"""Steps that make what is usual."""
_MOST_HELD: Final = 256
"""Stretches in which something holds a job up, behind the last step that was told."""
_LAST_OF_A_LIFE: Final[tuple[State, ...]] = ("other", "stalled", "checkpoint", "steps")
"""What a job that makes no steps any more is taken to do, the likeliest first."""
MOST_ENDED: Final = 256
"""Jobs that are remembered when they have ended; of more the oldest of whoever has most of them are forgotten."""


class Lives(NamedTuple):
    """What the lives before took of a job that begins again."""

    began_ns: int
    ended_ns: int
    """When that was seen, which may be late."""
    spent_ns: dict[State, int]
    last_step_ns: int
    """When the last step ended; 0: there was none."""


@dataclass(slots=True)
class JobTime:
    """Of one job.  Times are CLOCK_MONOTONIC."""

    began_ns: int
    """When this life of it began."""
    before: Lives | None = None
    _steps_ns: int = 0
    _first_ns: int | None = None
    """When the first step of this life began."""
    _last_ns: int = 0
    """When the last one ended."""
    _recent: list[int] = field(default_factory=list)
    _seen_ns: dict[State, int] = field(default_factory=lambda: {"stalled": 0, "checkpoint": 0})
    """From the first step of this life to the last one that was told, outside steps that took no longer than usual."""
    _held: deque[tuple[State, int, int]] = field(default_factory=lambda: deque(maxlen=_MOST_HELD))
    """What was seen behind that: what, from when, until when."""
    _held_until_ns: int = 0
    """Until when what held the job up is counted."""

    def record_steps(self, steps: Iterations) -> None:
        """Count steps (dtype ITERATION), in order of time."""
        if not len(steps):
            return
        lengths_ns = steps["end_ns"] - steps["start_ns"]
        learnt_ns = lengths_ns[~self._were_held_up(steps)]
        if not len(learnt_ns) and not self._recent:
            learnt_ns = lengths_ns
        self._recent = (self._recent + learnt_ns.tolist())[-_RECENT:]
        usual_ns = int(np.median(self._recent))
        interrupted = lengths_ns > _INTERRUPTED * usual_ns
        self._steps_ns += int(np.where(interrupted, usual_ns, lengths_ns).sum())
        if self._first_ns is None:
            self._first_ns = int(steps["start_ns"][0])
        self._last_ns = int(steps["end_ns"][-1])
        self._settle(union(steps["start_ns"][~interrupted], steps["end_ns"][~interrupted]))

    def look(self, now_ns: int, *, stalled_since_ns: int | None, writing_since_ns: int | None) -> None:
        """Record what holds ranks of the job up now, if anything does.

        Args:
            now_ns: CLOCK_MONOTONIC.
            stalled_since_ns: when the operation was handed over that stalls, the first of several; None: none does.
            writing_since_ns: the last call of a rank that writes a checkpoint, the first of several; None: none does.
        """
        # Both are told of when they have lasted for a while.
        if writing_since_ns is not None:
            state: State = "checkpoint"
            from_ns = max(writing_since_ns, self._last_ns)
            self._forget_held(from_ns)  # those that wait for the writer stall until it is seen to write
        elif stalled_since_ns is not None:
            state = "stalled"
            from_ns = max(stalled_since_ns, self._held_until_ns, self._last_ns)
        else:
            return
        if from_ns >= now_ns:
            return
        self._held_until_ns = now_ns
        if self._held and self._held[-1][0] == state and self._held[-1][2] == from_ns:
            from_ns = self._held.pop()[1]
        self._held.append((state, from_ns, now_ns))

    def spent_ns(self, now_ns: int) -> dict[State, int]:
        """What the time from the job's first beginning until now went into; the sum is that time."""
        first_ns = now_ns if self._first_ns is None else self._first_ns
        spent: dict[State, int] = dict(self.before.spent_ns) if self.before is not None else {}

        def add(state: State, time_ns: int) -> None:
            spent[state] = spent.get(state, 0) + max(0, time_ns)

        if self.before is None:
            add("start", first_ns - self.began_ns)
        else:
            # Where the end was seen late, the time from this life's beginning on is in both.
            twice_ns = max(0, self.before.ended_ns - self.began_ns)
            for state in _LAST_OF_A_LIFE:
                took = min(twice_ns, spent.get(state, 0))
                spent[state] = spent.get(state, 0) - took
                twice_ns -= took
            add("restart", first_ns - min(self.before.ended_ns, self.began_ns))
        under_way = 0
        if self._first_ns is not None:
            # The step under way is not told yet.
            under_way = min(now_ns - self._last_ns, round(_INTERRUPTED * float(np.median(self._recent))))
        steps = min(self._steps_ns + max(0, under_way), now_ns - first_ns)
        add("steps", steps)
        rest = now_ns - first_ns - steps
        seen_ns = dict(self._seen_ns)
        for state, from_ns, to_ns in self._held:
            seen_ns[state] += max(0, to_ns - max(from_ns, first_ns))
        for state, time_ns in seen_ns.items():
            took = min(rest, time_ns)
            add(state, took)
            rest -= took
        add("other", rest)
        return spent

    def follows(self, lives: Lives) -> bool:
        """Whether a job may be the one that has ended, begun again: no step of it was before the other's last."""
        return self._first_ns is None or self._first_ns >= lives.last_step_ns

    def _were_held_up(self, steps: Iterations) -> npt.NDArray[np.bool_]:
        """Of each step, whether a stall held it up: what it took tells nothing of what is usual.

        Else operations that are slow for long, as on a slow rail, would pass for usual after some steps.
        """
        stalls = [(from_ns, to_ns) for state, from_ns, to_ns in self._held if state == "stalled"]
        held = np.array(stalls, np.int64).reshape(-1, 2)
        return union(held[:, 0], held[:, 1]).length_in(steps["start_ns"], steps["end_ns"]) > 0

    def _forget_held(self, from_ns: int) -> None:
        """Take back what was seen from a moment on."""
        while self._held and self._held[-1][2] > from_ns:
            state, began_ns, _ = self._held.pop()
            if began_ns < from_ns:
                self._held.append((state, began_ns, from_ns))

    def _settle(self, usual: Intervals) -> None:
        """Count what was seen up to the last step, except in `usual` steps: what did not hold them up explains nothing.

        What lies before the first step is `start` or `restart`.
        """
        assert self._first_ns is not None
        behind = []
        for state, from_ns, to_ns in self._held:
            edges_ns = np.clip([from_ns, to_ns], self._first_ns, self._last_ns)
            self._seen_ns[state] += int(edges_ns[1] - edges_ns[0] - usual.length_in(edges_ns[:1], edges_ns[1:])[0])
            if to_ns > self._last_ns:
                behind.append((state, max(from_ns, self._last_ns), to_ns))
        self._held.clear()
        self._held.extend(behind)

    def ended(self, now_ns: int) -> Lives:
        """What a job that begins again goes on with."""
        began_ns = self.began_ns if self.before is None else self.before.began_ns
        return Lives(began_ns, now_ns, self.spent_ns(now_ns), self._last_ns)


class EndedJobs:
    """The last jobs that ended, by whose and which they were."""

    def __init__(self) -> None:
        self._lives = FairMemory[Tenant, Hashable, Lives](MOST_ENDED)

    def put(self, tenant: Tenant, job: Hashable, lives: Lives) -> None:
        """Remember a tenant's job that has ended."""
        self._lives.put(tenant, job, lives)

    def continue_by(self, job: Hashable, time: JobTime) -> None:
        """Let a job that begins again go on with what it did before, if it ended here, and not long ago."""
        lives = self._lives.get(job)
        if lives is not None and time.before is None and time.follows(lives):
            self._lives.pop(job)
            time.before = lives
