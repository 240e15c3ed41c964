"""Waiting for something to become true, and not for a time in which it should."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_SECONDS = 0.02


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return when something holds; fails if it does not within so many seconds, of which a busy machine takes more."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(POLL_SECONDS)
