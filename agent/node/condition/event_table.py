"""What was told of ill hardware so far: how often, when last, and how much it matters.

The table is bounded: a device that is made up, or a flood of different codes, is counted under the code `other`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from railscope.agent.config.counter_severity import Severity
from railscope.agent.facts.hardware import HardwareEvent
from railscope.probes.clock import Clock

_log = logging.getLogger("railscope.condition")

_MOST_KEYS: Final = 256
_OTHER: Final = "other"

_XIDS: Final[dict[Severity, frozenset[int]]] = {
    # The GPU, its memory, its NVLinks or its firmware failed: jobs on it are over, or will be.
    "page": frozenset(
        {48, 62, 64, 74, 79, 95, 109, 119, 120, 121, 136, 140, 143, *range(144, 151), 151, 154, 155, 156}
    ),
    # A program did it, or was ended for another reason: kernels that fault, channels that are torn down.
    "context": frozenset({8, 13, 31, 32, 43, 45, 68, 69}),
}
"""Source: NVIDIA's "XID Errors".  All others are `warn`: 63 and 94 (memory errors that were contained) among them."""


def severity_of_xid(number: int) -> Severity:
    """How much an XID matters."""
    return next((severity for severity, numbers in _XIDS.items() if number in numbers), "warn")


@dataclass(slots=True)
class _Seen:
    severity: Severity
    count: int
    last_monotonic_ns: int


class EventTable:
    """Events of one source; not thread-safe, but `facts` is replaced as a whole, and anyone may take it."""

    def __init__(self, clock: Clock, source: str) -> None:
        """`source`: who tells, as our own log names it."""
        self._clock = clock
        self._source = source
        self._seen: dict[tuple[str, str, str], _Seen] = {}
        self.facts: tuple[HardwareEvent, ...] = ()

    def count(self, kind: str, code: str, pci: str, severity: Severity, monotonic_ns: int) -> None:
        """Count one event; `publish` shows it."""
        key = (kind, code, pci)
        if key not in self._seen and len(self._seen) >= _MOST_KEYS:
            key = (kind, _OTHER, "")
        seen = self._seen.setdefault(key, _Seen(severity, 0, 0))
        seen.count += 1
        seen.last_monotonic_ns = monotonic_ns
        # The 1st, 2nd, 4th, 8th …: a link that fails all the time must not fill our log as it does the kernel's.
        if severity != "context" and seen.count & (seen.count - 1) == 0:
            _log.warning("%s: %s %s of %s, %d so far", self._source, kind, code, pci or "the host", seen.count)

    def publish(self) -> None:
        """Show all that was counted."""
        booted_ns = self._clock.realtime_ns() - self._clock.monotonic_ns()
        self.facts = tuple(
            HardwareEvent(kind, code, pci, seen.severity, seen.count, (booted_ns + seen.last_monotonic_ns) / 1e9)
            for (kind, code, pci), seen in self._seen.items()
        )
