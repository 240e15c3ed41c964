"""Waits for a first reading of every source: before `agent --once` prints and before `record` begins.

A first result or a failure counts.  Without that a source that takes long, or that is read after others, would be left
out without a word, and what a rail carried before its first reading would be missing from a recording.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

from railscope.probes.clock import Clock

_log = logging.getLogger("railscope.first_readings")

PATIENCE_SECONDS: Final = 5.0
"""Of which the sources of Ethernet need up to one, to be read again with the rails known."""
_LOOK_SECONDS: Final = 0.02


class Host(Protocol):
    """A host whose sources are read."""

    def refresh_devices(self) -> None:
        """Read ports and links, so that the sources that need them can be read."""
        ...

    def unread_sources(self) -> tuple[str, ...]:
        """Sources that were not read yet, well or badly."""
        ...


def await_first_readings(host: Host, clock: Clock, settle_ns: int, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Wait `settle_ns`, and until all counters were read, `patience_seconds` longer at most; the rest is logged."""
    host.refresh_devices()
    clock.sleep(settle_ns / 1e9)
    last_ns = clock.monotonic_ns() + round(patience_seconds * 1e9)
    while awaited := host.unread_sources():
        if clock.monotonic_ns() >= last_ns:
            _log.warning("not read within %g s: %s", patience_seconds, ", ".join(awaited))
            return
        clock.sleep(_LOOK_SECONDS)
