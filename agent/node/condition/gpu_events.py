"""What NVML told of GPUs so far: XIDs, and what it tells besides.

The driver writes an XID into the kernel's log too.  Where that log is read, it alone counts XIDs: it has those of
before the agent came, and those of GPUs that NVML has lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from railscope.agent.config.counter_severity import Severity
from railscope.agent.facts.hardware import HardwareEvent
from railscope.agent.node.condition.event_table import EventTable, severity_of_xid
from railscope.probes.clock import Clock
from railscope.probes.nvlink.gpu_events import GpuEvent

_PAGE: Final = frozenset({"memory_retirement_failed", "fatal_poison", "unavailable"})


class GpuEventCounts:
    """For one thread; `facts` may be called from any."""

    def __init__(self, clock: Clock) -> None:
        self._table = EventTable(clock, "NVML")

    def add(self, events: Iterable[GpuEvent]) -> None:
        """Count events."""
        for event in events:
            self._table.count(event.kind, event.code, event.pci, _severity_of(event), event.monotonic_ns)
        self._table.publish()

    def facts(self, *, xids: bool) -> tuple[HardwareEvent, ...]:
        """`xids` False: those are counted elsewhere."""
        return tuple(one for one in self._table.facts if xids or one.kind != "xid")


def _severity_of(event: GpuEvent) -> Severity:
    if event.kind == "xid":
        return severity_of_xid(int(event.code))
    return "page" if event.code in _PAGE else "warn"
