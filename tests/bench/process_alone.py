"""What a process takes from a job by itself: it is stopped and goes on in turns, and all that it attached stays.

Neighbours are seconds apart, and nothing begins or ends in between: many pairs fit where an observer's coming and going
leaves time for one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final

TURNS: Final = 4
"""How often the process goes on between two stops."""
_WINDOW_SECONDS: Final = 2.0
_STOPPED_SECONDS: Final = 0.3
"""From a stop to what is measured without the process."""
_CAUGHT_UP_SECONDS: Final = 0.7
"""From its going on to what is measured beside it: first it does what had fallen due."""


def kept_beside(
    pid: int,
    rate: Callable[[float], float],
    *,
    turns: int = TURNS,
    sleep: Callable[[float], None] = time.sleep,
) -> list[float]:
    """The rate beside the process over the mean of the rates before and after, while it is stopped; one a turn.

    Args:
        pid: a process of the caller's, which goes on when this returns or raises.
        rate: measures the job's rate over so many seconds.
    """
    without: list[float] = []
    beside: list[float] = []
    for turn in range(turns + 1):
        os.kill(pid, signal.SIGSTOP)
        try:
            sleep(_STOPPED_SECONDS)
            without.append(rate(_WINDOW_SECONDS))
        finally:
            os.kill(pid, signal.SIGCONT)
        if turn < turns:
            sleep(_CAUGHT_UP_SECONDS)
            beside.append(rate(_WINDOW_SECONDS))
    return _over_neighbours(beside, without)


def _over_neighbours(beside: Sequence[float], without: Sequence[float]) -> list[float]:
    return [
        rate / ((before + after) / 2) for rate, before, after in zip(beside, without[:-1], without[1:], strict=True)
    ]
