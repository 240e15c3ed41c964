"""What a process takes from a job by itself: it is stopped and goes on in turns, and all that it attached stays.

Neighbours are seconds apart, and nothing begins or ends in between: many pairs fit where an observer's coming and going
leaves time for one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from agent.pace import CALM_NS
from tests.bench.many_communicators import pause, resume

_TURNS: Final = 4
"""How often the process goes on between two stops."""
_WINDOW_SECONDS: Final = CALM_NS / 1e9
"""What an agent does most seldom is in every one."""
_STOPPED_SECONDS: Final = 0.3
"""From a stop to what is measured without the process."""
_CAUGHT_UP_SECONDS: Final = 0.7
"""From its going on to what is measured beside it: first it does what had fallen due."""


def kept_beside(
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
            return rate(_WINDOW_SECONDS)
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
