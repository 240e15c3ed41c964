"""Counters of the network devices in a sysfs tree, the machine's or a recorded one, from kept descriptors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from railscope.probes.clock import Clock
from railscope.probes.netdev.counters import CounterReading, DeviceFailure, Values, is_counter
from railscope.probes.netdev.inventory import device_folders

SYSFS_FIELDS: Final = (
    "rx_bytes",
    "tx_bytes",
    "rx_packets",
    "tx_packets",
    "rx_errors",
    "tx_errors",
    "rx_dropped",
    "tx_dropped",
    "rx_crc_errors",
    "rx_missed_errors",
    "tx_carrier_errors",
)


@dataclass(slots=True)
class _OpenDevice:
    name: str
    generation: int
    descriptors: list[int]


class SysfsCounters:
    """Counters of `SYSFS/class/net`, from kept descriptors."""

    def __init__(self, sysfs: Path, clock: Clock) -> None:
        """Raises OSError when there is no `class/net`."""
        self._clock = clock
        self._folder = sysfs / "class" / "net"
        self._devices: list[_OpenDevice] = []
        self._unopened: list[DeviceFailure] = []
        self._stale = True
        self._names: tuple[str, ...] = ()
        self._generations: tuple[int, ...] = ()
        self._folder.stat()

    def close(self) -> None:
        for device in self._devices:
            _close(device.descriptors)
        self._devices = []

    def refresh(self) -> None:
        """See `CounterSource.refresh`."""
        self._stale = True

    def read(self) -> CounterReading:
        """See `CounterSource.read`."""
        if self._stale:
            self._open_all()
            self._stale = False
        before_ns = self._clock.monotonic_ns()
        rows: list[list[int]] = []
        read: list[_OpenDevice] = []
        failed = list(self._unopened)
        for device in self._devices:
            try:
                rows.append([_counter(descriptor) for descriptor in device.descriptors])
            except (OSError, ValueError) as error:
                failed.append(DeviceFailure(device.name, str(error)))
                self._stale = True  # ENODEV: gone, or another of the same name by now
            else:
                read.append(device)
        after_ns = self._clock.monotonic_ns()
        names = tuple(device.name for device in read)
        generations = tuple(device.generation for device in read)
        if (names, generations) != (self._names, self._generations):
            self._names, self._generations = names, generations
        values: Values = np.array(rows, dtype=np.uint64).reshape(len(rows), len(SYSFS_FIELDS))
        return CounterReading(before_ns, after_ns, self._names, self._generations, SYSFS_FIELDS, values, tuple(failed))

    def _open_all(self) -> None:
        self.close()
        self._unopened = []
        for folder in device_folders(self._folder):
            descriptors: list[int] = []
            try:
                for name in SYSFS_FIELDS:
                    descriptors.append(os.open(folder / "statistics" / name, os.O_RDONLY | os.O_CLOEXEC))
                generation = int((folder / "ifindex").read_text())
            except (OSError, ValueError) as error:
                _close(descriptors)
                self._unopened.append(DeviceFailure(folder.name, str(error)))
            else:
                self._devices.append(_OpenDevice(folder.name, generation, descriptors))


def _counter(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0).strip()
    if not is_counter(text):
        raise ValueError(f"expected a counter, found {text[:40]!r}")
    return int(text)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
