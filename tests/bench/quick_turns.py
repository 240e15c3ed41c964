"""What a part of an agent takes from a job by itself: it comes and goes in turns, and nothing else changes.

Neighbours are seconds apart, so that many pairs fit where a whole agent's coming, its rest and its going leave time for
one: its process is stopped and goes on, and all that it attached stays; programs are attached and detached, and no
agent is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Final

from agent.pace import CALM_NS
from tests.bench.many_communicators import pause, resume

_TURNS: Final = 4
"""How often the process goes on between two stops."""
_WINDOW_SECONDS: Final = CALM_NS / 1e9
"""A tick of an agent at rest is in every one; of its scans of all processes, which are rarer still, one in some."""
_WITHOUT_SECONDS: Final = _WINDOW_SECONDS / 2
"""Each on one side of such a window; and events that nobody reads meanwhile must find room."""
_STOPPED_SECONDS: Final = 0.3
"""From a stop to what is measured without the process."""
_CAUGHT_UP_SECONDS: Final = 0.7
"""From its going on to what is measured beside it: first it does what had fallen due."""

_PROGRAM_SECONDS: Final = 1.0
"""A program costs the same at every call: the shorter the windows, the less the bare rate has wandered between them."""
_STOP_SECONDS: Final = 0.5
"""So long the job is stopped, who ever comes or goes: programs come within milliseconds, and go within 200 of them."""
_RESUMED_SECONDS: Final = 1.0
"""What it takes the job to go on is on both sides of a pair, and most of it is over by then."""

Programs = Callable[[], AbstractContextManager[None]]
"""Attaches programs that are loaded, and detaches them at the end of the block; or nobody comes, for comparison."""


def kept_beside_process(
    pid: int,
    rate: Callable[[float], float],
    *,
    turns: int = _TURNS,
    sleep: Callable[[float], None] = time.sleep,
) -> list[float]:
    """The rate beside the process over the mean of the rates before and after, while it is stopped; one a turn.

    Args:
        pid: a process of the caller's, which goes on when this returns or raises.
        rate: measures the job over so many seconds, in calls per second.
        turns: how often the process goes on between two stops.
        sleep: waits so many seconds.

    Raises:
        ProcessLookupError: the process has ended.
    """

    def without() -> float:
        pause([pid])
        try:
            sleep(_STOPPED_SECONDS)
            return rate(_WITHOUT_SECONDS)
        finally:
            resume([pid])

    kept = []
    before = without()
    for _ in range(turns):
        sleep(_CAUGHT_UP_SECONDS)
        beside = rate(_WINDOW_SECONDS)
        after = without()
        kept.append(beside / ((before + after) / 2))
        before = after
    return kept


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
