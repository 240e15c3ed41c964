"""Waiting for something to become true, and not for a time in which it should."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.2


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return when something holds; fails if it does not within so many seconds, of which a busy machine takes more."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds, f"not within {seconds} s"
        pause(began)


def pause(began: float) -> None:
    """Sleep for a tenth of the time since `began` (time.monotonic()), 20 to 200 ms.

    Asking an agent for its metrics takes some milliseconds of both, and the tests wait for minutes in all.
    """
    time.sleep(min(max((time.monotonic() - began) / 10, POLL_SECONDS), _LONGEST_PAUSE_SECONDS))
