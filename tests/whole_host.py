"""An agent that observes all processes of this machine puts probes into those of other workers' tests as well.

Tests of what no probe may meet wait until no such agent runs, and such agents wait for them.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FILE = Path(tempfile.gettempdir(), "railscope-tests-whole-host")


@contextmanager
def observing_all() -> Iterator[None]:
    """While an agent observes all processes; any number of them do at a time."""
    with _locked(fcntl.LOCK_SH):
        yield


@contextmanager
def observed_by_nobody_else() -> Iterator[None]:
    """While no agent observes all processes."""
    with _locked(fcntl.LOCK_EX):
        yield


@contextmanager
def _locked(how: int) -> Iterator[None]:
    descriptor = os.open(_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
