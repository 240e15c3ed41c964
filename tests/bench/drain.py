"""Emptying the rings of loaded programs in the background, as the agent does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from probes.nccl.programs import NcclPrograms

POLL_SECONDS = 0.01


@contextmanager
def drained(programs: NcclPrograms) -> Iterator[None]:
    """Read both rings every 10 ms inside the block."""
    stop = threading.Event()

    def read() -> None:
        while not stop.wait(POLL_SECONDS):
            programs.call_events.read()
            programs.lifecycle_events.read()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        programs.call_events.read()
        programs.lifecycle_events.read()
