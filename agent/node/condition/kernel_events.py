"""What the kernel's log said of ill hardware so far: how often, when last, and how much it matters.

A machine that boots trains its links, loads firmware and resets devices: what the log says of PCIe and network cards
within five minutes of the boot is passed over.  Tables are bounded: a device that is made up, or a flood of different
codes, is counted under the code `other`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.agent.config.counter_severity import Severity
from railscope.agent.facts.snapshot import CollectorResult, HardwareEvent
from railscope.probes.clock import Clock
from railscope.probes.kernel_log import KernelEvent, KernelLog

_log = logging.getLogger("railscope.condition")

COLLECTOR: Final = "kmsg"
_BOOT_NS: Final = 300_000_000_000
_QUIET_AT_BOOT: Final = frozenset({"pcie", "nic"})
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
        number = int(event.code)
        return next((severity for severity, numbers in _XIDS.items() if number in numbers), "warn")
    if event.kind == "sxid":
        return "page" if event.fatal else "warn"
    return _OTHERS.get((event.kind, event.code), "warn")


@dataclass(slots=True)
class _Seen:
    severity: Severity
    count: int
    last_monotonic_ns: int


class KernelEvents:
    """Not thread-safe: one thread reads; what it found is replaced as a whole, and anyone may take it."""

    def __init__(self, clock: Clock, device: Path) -> None:
        self._clock = clock
        self._device = device
        self._open: KernelLog | None = None
        self._seen: dict[tuple[str, str, str], _Seen] = {}
        self._lost = 0
        self._said = ""
        self.facts: tuple[HardwareEvent, ...] = ()
        self.result: CollectorResult | None = None
        """None: the log was not read yet, or cannot be on this host."""

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
            if event.monotonic_ns < _BOOT_NS and event.kind in _QUIET_AT_BOOT:
                continue
            key = (event.kind, event.code, event.pci)
            if key not in self._seen and len(self._seen) >= _MOST_KEYS:
                key = (event.kind, _OTHER, "")
            severity = severity_of(event)
            seen = self._seen.setdefault(key, _Seen(severity, 0, 0))
            seen.count += 1
            seen.last_monotonic_ns = event.monotonic_ns
            # The 1st, 2nd, 4th, 8th …: a link that fails all the time must not fill our log as it does the kernel's.
            if severity != "context" and seen.count & (seen.count - 1) == 0:
                _log.warning(
                    "the kernel's log: %s %s of %s, %d so far",
                    event.kind,
                    event.code,
                    event.pci or "the host",
                    seen.count,
                )
        booted_ns = self._clock.realtime_ns() - self._clock.monotonic_ns()
        self.facts = tuple(
            HardwareEvent(kind, code, pci, seen.severity, seen.count, (booted_ns + seen.last_monotonic_ns) / 1e9)
            for (kind, code, pci), seen in self._seen.items()
        )

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _refused(self, error: OSError) -> None:
        self.close()
        text = f"{self._device} is not read: {error.strerror}"
        if text != self._said:
            self._said = text
            _log.info("%s; XIDs and PCIe errors in the kernel's log are not seen", text)
        self.result = None
