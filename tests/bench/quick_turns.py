"""What an agent takes from a job, and what programs do by themselves, in turns that are seconds apart.

A bare job's rate wanders by percents within a minute, and a whole agent needs most of one to come, rest and go: next to
each other must stand what comes and goes at once.  Programs are attached and detached within milliseconds.  For a whole
agent there are two jobs alike, of which it observes one.  Only one of them goes on at a time, and the agent goes on and
stops with the one that it observes; its probes are in that one only.  What makes one of the two faster than the other,
where its memory lies perhaps, falls out when the agent has observed each of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from railscope.agent.node.daemon.schedule import CALM_NS
from tests.bench.many_communicators import pause, resume

_TURN_SECONDS: Final = CALM_NS / 1e9
"""A tick of an agent at rest is in every one; of its scans of all processes, which are rarer still, one in some.  A job
that went on is a little slow at first: turns of different lengths would not compare."""

_PROGRAM_SECONDS: Final = 1.0
"""A program costs the same at every call: the shorter the windows, the less the bare rate has wandered between them."""
_STOP_SECONDS: Final = 0.5
"""So long the job is stopped, who ever comes or goes: programs come within milliseconds, and go within 200 of them."""
_RESUMED_SECONDS: Final = 1.0
"""What it takes a job to go on is on both sides of a pair, and most of it is over by then; so is what an agent that
goes on finds fallen due."""

Programs = Callable[[], AbstractContextManager[None]]
"""Attaches programs that are loaded, and detaches them at the end of the block; or nobody comes, for comparison."""


@dataclass(frozen=True, slots=True)
class RatedJob:
    """A job, and how its rate is measured over so many seconds, in calls per second."""

    pids: tuple[int, ...]
    rate: Callable[[float], float]
    hold: Callable[[], None] | None = None
    """Stops the job between two operations; None: its processes are stopped wherever they are."""
    release: Callable[[], None] | None = None
    """Lets a job go on that was held."""

    def stop(self) -> None:
        """Have it make no calls."""
        if self.hold is None:
            pause(self.pids)
        else:
            self.hold()

    def go_on(self) -> None:
        """Have it make calls again."""
        if self.release is None:
            resume(self.pids)
        else:
            self.release()


def kept_beside_agent(
    agent: int | None,
    observed: RatedJob,
    other: RatedJob,
    *,
    turns: int,
    turn_seconds: float = _TURN_SECONDS,
    resumed_seconds: float = _RESUMED_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> list[float]:
    """The observed job's rate beside the agent over the mean of the other's before and after it; one a turn.

    Args:
        agent: the pid of an agent that observes one job and not the other, and has come to rest; or None, for
            comparison.  It goes on when this returns or raises.
        observed: goes on when this returns or raises.
        other: is stopped when this returns or raises.
        turns: how often the observed job and the agent have their turn.
        turn_seconds: how long each rate is measured.
        resumed_seconds: how long before that a job has gone on.
        sleep: waits so many seconds.

    Raises:
        BenchError: a job ended, or makes no call.
        ProcessLookupError: agent or job have ended.
    """
    agents = () if agent is None else (agent,)

    def beside_it() -> float:
        other.stop()
        resume(agents)
        observed.go_on()
        sleep(resumed_seconds)
        return observed.rate(turn_seconds)

    def without_it() -> float:
        pause(agents)
        observed.stop()
        other.go_on()
        sleep(resumed_seconds)
        return other.rate(turn_seconds)

    kept = []
    try:
        before = without_it()
        for _ in range(turns):
            beside = beside_it()
            after = without_it()
            kept.append(beside / ((before + after) / 2))
            before = after
    finally:
        resume(agents)
        observed.go_on()
        other.stop()
    return kept


def whichever_is_observed(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """What a job keeps, of what the first of two kept while it was observed and the second while it was.

    Turn by turn the geometric mean: by as much as one job is faster, the first ratio is too high and the second too
    low.
    """
    return [math.sqrt(one * other) for one, other in zip(first, second, strict=True)]


def kept_beside_programs(
    programs: Mapping[str, Programs],
    job: tuple[int, ...],
    rate: Callable[[float], float],
    *,
    turns: int,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[float]]:
    """By name: the rate beside programs over the mean of the bare rates before and after; one a turn of each.

    Args:
        programs: who comes and goes, every second time in the other order.
        job: the processes whose rate it is; they are stopped while programs come or go, always for as long, and go on
            when this returns or raises.
        rate: measures the job over so many seconds, in calls per second.
        turns: how often each comes.
        sleep: waits so many seconds.
        clock: tells seconds that pass.

    Raises:
        BenchError: programs cannot be attached, or counted nothing.
        ProcessLookupError: the job has ended.
    """

    def stop() -> float:
        pause(job)
        return clock()

    def measured(stopped: float) -> float:
        sleep(max(0.0, stopped + _STOP_SECONDS - clock()))
        resume(job)
        sleep(_RESUMED_SECONDS)
        return rate(_PROGRAM_SECONDS)

    kept: dict[str, list[float]] = {name: [] for name in programs}
    try:
        before = measured(stop())
        for turn in range(turns):
            for name in list(programs)[:: 1 if turn % 2 == 0 else -1]:
                stopped = stop()
                with programs[name]():
                    beside = measured(stopped)
                    stopped = stop()
                after = measured(stopped)
                kept[name].append(beside / ((before + after) / 2))
                before = after
    finally:
        resume(job)
    return kept
