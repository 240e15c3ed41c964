"""How often devices gained or lost their carrier.

A total begins with the kernel's own count, which is since the device was made, and never falls: a device that was made
anew under the same name goes on where the one before ended.  The first carrier that a device gains is left out: where a
machine boots, the agent may be there before its links are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from railscope.probes.netdev.inventory import NetworkDevice

_FORGET_NS: Final = 300_000_000_000
"""A device that is gone keeps its total this long, in case it comes back."""
MOST_GONE: Final = 256
"""Devices of one namespace that are gone and keep their totals: whoever renames devices makes any number of names."""


@dataclass(slots=True)
class _Count:
    index: int
    kernel: int
    """The kernel's count at the last reading."""
    total: int
    seen_ns: int
    had_carrier: bool
    """It had one since it is watched, or this is not known."""
    changed_ns: int | None = None
    """When a change was noticed last; None: none was."""


class CarrierChanges:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[str, _Count]] = {}
        """By namespace and name."""

    def record(self, netns: int, devices: Iterable[NetworkDevice], now_ns: int) -> None:
        """Record a list of one namespace's devices."""
        counts = self._counts.setdefault(netns, {})
        for device in devices:
            if device.carrier_changes is None:
                continue
            count = counts.get(device.name)
            if count is None:
                counts[device.name] = _Count(
                    device.index, device.carrier_changes, device.carrier_changes, now_ns, device.carrier is not False
                )
                continue
            more = max(0, device.carrier_changes - count.kernel) if device.index == count.index else 0
            if more:
                came_up = more == 1 and bool(device.carrier) and not count.had_carrier
                count.total += 0 if came_up else more
                count.changed_ns = now_ns
            count.had_carrier |= device.carrier is not False
            count.index, count.kernel, count.seen_ns = device.index, device.carrier_changes, now_ns
        gone = sorted((count.seen_ns, name) for name, count in counts.items() if count.seen_ns < now_ns)
        for at, (seen_ns, name) in enumerate(gone):
            if now_ns - seen_ns > _FORGET_NS or at < len(gone) - MOST_GONE:
                del counts[name]

    def count(self, netns: int, name: str) -> int | None:
        """Changes so far; None where the kernel does not count them for this device."""
        count = self._of(netns, name)
        return count.total if count is not None else None

    def changed_ns(self, netns: int, name: str) -> int | None:
        """When a device was last seen to have gained or lost its carrier; None: never while it was watched."""
        count = self._of(netns, name)
        return count.changed_ns if count is not None else None

    def forget(self, netns: int) -> None:
        """Drop the devices of a namespace that was closed."""
        self._counts.pop(netns, None)

    def _of(self, netns: int, name: str) -> _Count | None:
        return self._counts.get(netns, {}).get(name)
