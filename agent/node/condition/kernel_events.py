"""What the kernel's log said of ill hardware so far.

A machine that boots trains its links, loads firmware and resets devices: what the log says of PCIe and network cards
within five minutes of the boot is passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from railscope.agent.config.counter_severity import Severity
from railscope.agent.facts.hardware import HardwareEvent
from railscope.agent.facts.snapshot import CollectorResult
from railscope.agent.node.condition.event_table import EventTable, severity_of_xid
from railscope.probes.clock import Clock
from railscope.probes.kernel_log import KernelEvent, KernelLog

_log = logging.getLogger("railscope.condition")

COLLECTOR: Final = "kmsg"
_BOOT_NS: Final = 300_000_000_000
_QUIET_AT_BOOT: Final = frozenset({"pcie", "nic"})

_OTHERS: Final[dict[tuple[str, str], Severity]] = {
    ("pcie", "fatal"): "page",
    ("pcie", "non_fatal"): "warn",
    ("pcie", "correctable"): "context",
    ("nic", "firmware"): "page",
    ("nic", "module"): "warn",
    ("nic", "transmit_timeout"): "warn",
    ("nic", "reset"): "warn",
    ("machine_check", "hardware_error"): "warn",
}


def severity_of(event: KernelEvent) -> Severity:
    """How much an event of the kernel's log matters."""
    if event.kind == "xid":
        return severity_of_xid(int(event.code))
    if event.kind == "sxid":
        return "page" if event.fatal else "warn"
    return _OTHERS.get((event.kind, event.code), "warn")


class KernelEvents:
    """Not thread-safe: one thread reads; what it found is replaced as a whole, and anyone may take it."""

    def __init__(self, clock: Clock, device: Path) -> None:
        self._clock = clock
        self._device = device
        self._open: KernelLog | None = None
        self._table = EventTable(clock, "the kernel's log")
        self._newest_ns = -1
        """The newest event that was read."""
        self._counted_ns = -1
        """That event when the log failed last: opened again, the log begins with all that was counted before."""
        self._lost = 0
        self._said = ""
        self.result: CollectorResult | None = None
        """None: the log was not read yet, or cannot be on this host."""

    @property
    def facts(self) -> tuple[HardwareEvent, ...]:
        return self._table.facts

    def update(self) -> None:
        """Read what came since; where the log cannot be opened it is said once, and nothing is shown."""
        before_ns = self._clock.monotonic_ns()
        try:
            if self._open is None:
                self._open = KernelLog(self._device)
            reading = self._open.read()
        except OSError as error:
            self._refused(error)
            return
        self._lost += reading.lost
        self.add(reading.events)
        self.result = CollectorResult(COLLECTOR, not reading.lost, (self._clock.monotonic_ns() - before_ns) / 1e9)

    def add(self, events: Iterable[KernelEvent]) -> None:
        """Count events."""
        for event in events:
            if event.monotonic_ns <= self._counted_ns:
                continue
            self._newest_ns = max(self._newest_ns, event.monotonic_ns)
            if event.monotonic_ns < _BOOT_NS and event.kind in _QUIET_AT_BOOT:
                continue
            self._table.count(event.kind, event.code, event.pci, severity_of(event), event.monotonic_ns)
        self._table.publish()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _refused(self, error: OSError) -> None:
        self.close()
        self._counted_ns = self._newest_ns
        text = f"{self._device} is not read: {error.strerror}"
        if text != self._said:
            self._said = text
            _log.info("%s; XIDs and PCIe errors in the kernel's log are not seen", text)
        self.result = None
