"""Reads the driver's own statistics of a network card, which `ethtool -S` shows.

Pauses by priority, discards, ECN marks, corrected bits and RDMA traffic of a function stand nowhere else.  mlx5 asks
its firmware dozens of times for one answer, so they are read at most once a second, and only of devices asked for.

The names are a second question, so they are kept until the device is another one under the same name, as after a
reload of its driver, or has another number of statistics.  The kernel writes as many values as the driver has by then,
whatever room was offered: the number is asked for before every read, and the buffer has room to spare.

Source: the kernel's include/uapi/linux/ethtool.h and net/ethtool/ioctl.c.  No capability is needed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import numpy as np

from railscope.probes.clock import Clock
from railscope.probes.netdev.counters import CounterReading, CounterShape, DeviceFailure, Flags, Values

_SIOCETHTOOL: Final = 0x8946
_SIOCGIFINDEX: Final = 0x8933
_REQUEST: Final = struct.Struct("=16sQ8x")
"""struct ifreq on 64-bit: name, pointer to the command."""
_INDEX_REQUEST: Final = struct.Struct("=16si20x")
"""struct ifreq: name, index."""
_GET_STRINGS: Final = 0x1B
_GET_STATISTICS: Final = 0x1D
_GET_SET_SIZE: Final = 0x37
_STATISTICS_SET: Final = 1
"""ETH_SS_STATS."""
_SET_SIZE: Final = struct.Struct("=I4xQI4x")
"""struct ethtool_sset_info: command, mask of sets, size of the one set."""
_STRINGS: Final = struct.Struct("=III")
"""struct ethtool_gstrings: command, set, number; names follow."""
_STATISTICS: Final = struct.Struct("=II")
"""struct ethtool_stats: command, number; values follow."""
_NAME_BYTES: Final = 32
_MAXIMUM_STATISTICS: Final = 32_768
"""mlx5 has some forty of each queue, and 128 queues at most."""
_SPARE_STATISTICS: Final = 8_192
_COLUMNS_LIMIT: Final = 4_096
_ATTEMPTS: Final = 2
_MAXIMUM: Final = 2**64 - 1

_NO_STATISTICS: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY})


class StatisticUse(Enum):
    """What a name is taken for."""

    COUNTER = "counter"
    GAUGE = "gauge"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """What one device showed at the last read, of what is not ignored."""

    device: str
    names: tuple[str, ...]
    values: tuple[int, ...]
    """As the driver shows them, counters since it was loaded; as many as `names`."""

    def value(self, name: str) -> int | None:
        """What a statistic of the driver shows; None: the driver has none of this name."""
        return self.values[self.names.index(name)] if name in self.names else None


class EthtoolCommands(Protocol):
    """The kernel's answers to ethtool, for one network namespace."""

    def run(self, name: str, command: bytearray) -> None:
        """Run one command in place.

        Raises:
            OSError: ENODEV: the device is gone; EOPNOTSUPP: its driver does not offer this.
        """
        ...

    def index(self, name: str) -> int:
        """The kernel's number of a device; raises OSError as `run`."""
        ...

    def close(self) -> None: ...


class EthtoolSocket:
    """`EthtoolCommands` of the network namespace of the thread that makes it; usable from any thread since."""

    def __init__(self) -> None:
        """Raises OSError when the kernel refuses a socket."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def close(self) -> None:
        self._socket.close()

    def run(self, name: str, command: bytearray) -> None:
        """See `EthtoolCommands.run`."""
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(command))
        fcntl.ioctl(self._socket, _SIOCETHTOOL, _REQUEST.pack(name.encode(), pointer))

    def index(self, name: str) -> int:
        """See `EthtoolCommands.index`."""
        answer = fcntl.ioctl(self._socket, _SIOCGIFINDEX, _INDEX_REQUEST.pack(name.encode(), 0))
        return int(_INDEX_REQUEST.unpack(answer)[1])


@dataclass(slots=True)
class _Names:
    """The statistics' names of one device."""

    index: int
    count: int
    """Statistics of the driver, those ignored included."""
    positions: list[int]
    names: tuple[str, ...]
    counters: list[bool]
    """For each of `names`: a counter; otherwise a gauge."""


class EthtoolStatistics:
    """A `CounterSource` of the devices that `watch` names; gauges stand in `last` only.

    `tx_bytes` and `rx_bytes` are known only of a driver that has statistics of these names, if they are not ignored.
    """

    def __init__(
        self, clock: Clock, use: Callable[[str], StatisticUse], commands: EthtoolCommands | None = None
    ) -> None:
        """`use` says what to take a name for; `commands` are closed with this, None: the calling thread's namespace.

        Raises:
            OSError: the kernel refuses a socket.
        """
        self._clock = clock
        self._use = use
        self._commands: EthtoolCommands = EthtoolSocket() if commands is None else commands
        self._devices: tuple[str, ...] = ()
        self._known: dict[str, _Names] = {}
        self._fields: tuple[str, ...] = ("tx_bytes", "rx_bytes")
        self._columns: dict[str, int] = {"tx_bytes": 0, "rx_bytes": 1}
        self.last: tuple[DeviceStatistics, ...] = ()
        """Of the last read, replaced as a whole; devices without statistics are left out."""

    def close(self) -> None:
        self._commands.close()

    def watch(self, devices: Sequence[str]) -> None:
        """Read these from now on; safe from any thread."""
        self._devices = tuple(devices)

    def refresh(self) -> None:
        """See `CounterSource.refresh`."""
        self._known = {}

    def read(self) -> CounterReading:
        """See `CounterSource.read`.  A device without any statistics is no failure: it has no row."""
        before_ns = self._clock.monotonic_ns()
        rows: list[tuple[_Names, DeviceStatistics]] = []
        failed: list[DeviceFailure] = []
        devices = self._devices
        for device in devices:
            try:
                found = self._device(device)
            except (OSError, ValueError) as error:
                self._known.pop(device, None)
                failed.append(DeviceFailure(device, _reason(error)))
            else:
                if found is not None:
                    rows.append(found)
        after_ns = self._clock.monotonic_ns()
        self._known = {device: names for device, names in self._known.items() if device in devices}
        self.last = tuple(statistics for _names, statistics in rows)
        return self._reading(before_ns, after_ns, rows, failed)

    def _device(self, device: str) -> tuple[_Names, DeviceStatistics] | None:
        """What one device shows; None where it has no statistics.

        Raises:
            OSError: the kernel refuses.
            ValueError: the number of statistics is absurd, or changes at every look.
        """
        index = self._commands.index(device)
        for _ in range(_ATTEMPTS):
            count = self._count(device)
            if count == 0:
                return None
            known = self._known.get(device)
            if known is None or (known.index, known.count) != (index, count):
                known = self._known[device] = self._read_names(device, index, count)
            values = self._values(device, count)
            if values is not None:
                chosen = tuple(int(values[position]) for position in known.positions)
                return known, DeviceStatistics(device, known.names, chosen)
        raise ValueError("its number of statistics keeps changing")

    def _count(self, device: str) -> int:
        command = bytearray(_SET_SIZE.size)
        _SET_SIZE.pack_into(command, 0, _GET_SET_SIZE, 1 << _STATISTICS_SET, 0)
        try:
            self._commands.run(device, command)
        except OSError as error:
            if error.errno in _NO_STATISTICS:
                return 0
            raise
        _command, mask, count = _SET_SIZE.unpack_from(command)
        if not mask & (1 << _STATISTICS_SET):
            return 0
        if count > _MAXIMUM_STATISTICS:
            raise ValueError(f"the driver claims {count} statistics, more than {_MAXIMUM_STATISTICS}")
        return int(count)

    def _read_names(self, device: str, index: int, count: int) -> _Names:
        command = bytearray(_STRINGS.size + (count + _SPARE_STATISTICS) * _NAME_BYTES)
        _STRINGS.pack_into(command, 0, _GET_STRINGS, _STATISTICS_SET, count)
        self._commands.run(device, command)
        if _STRINGS.unpack_from(command)[2] != count:
            raise ValueError("its number of statistics changed while their names were read")
        names = parse_names(memoryview(command)[_STRINGS.size :], count)
        uses = [self._use(name) if name else StatisticUse.IGNORED for name in names]
        first: dict[str, int] = {}
        for position, name in enumerate(names):
            if uses[position] is not StatisticUse.IGNORED:
                first.setdefault(name, position)
        return _Names(
            index,
            count,
            list(first.values()),
            tuple(first),
            [uses[at] is StatisticUse.COUNTER for at in first.values()],
        )

    def _values(self, device: str, count: int) -> Values | None:
        """All statistics of a device; None: there are more or fewer than expected by now."""
        command = bytearray(_STATISTICS.size + (count + _SPARE_STATISTICS) * 8)
        _STATISTICS.pack_into(command, 0, _GET_STATISTICS, count)
        self._commands.run(device, command)
        if _STATISTICS.unpack_from(command)[1] != count:
            return None
        return np.frombuffer(command, dtype=np.uint64, count=count, offset=_STATISTICS.size)

    def _reading(
        self,
        before_ns: int,
        after_ns: int,
        rows: list[tuple[_Names, DeviceStatistics]],
        failed: list[DeviceFailure],
    ) -> CounterReading:
        counters = [
            tuple(itertools.compress(zip(statistics.names, statistics.values, strict=True), names.counters))
            for names, statistics in rows
        ]
        for name in dict.fromkeys(name for row in counters for name, _value in row):
            if name not in self._columns and len(self._columns) < _COLUMNS_LIMIT:
                self._columns[name] = len(self._columns)
        if len(self._columns) != len(self._fields):
            self._fields = tuple(self._columns)
        size = (len(rows), len(self._fields))
        values: Values = np.zeros(size, dtype=np.uint64)
        known: Flags = np.zeros(size, dtype=np.bool_)
        for row, found in enumerate(counters):
            for name, value in found:
                column = self._columns.get(name)
                if column is not None:
                    values[row, column] = value
                    known[row, column] = True
        shape = CounterShape(known, np.full(size, _MAXIMUM, dtype=np.uint64), np.zeros(size, dtype=np.bool_))
        return CounterReading(
            before_ns,
            after_ns,
            tuple(statistics.device for _names, statistics in rows),
            tuple(names.index for names, _statistics in rows),
            self._fields,
            values,
            tuple(failed),
            shape,
        )


def parse_names(data: bytes | memoryview, count: int) -> list[str]:
    """The names of ethtool's statistics in a string set: 32 bytes each, ended by NUL; some drivers indent them.

    Raises:
        ValueError: there are fewer than `count`.
    """
    if len(data) < count * _NAME_BYTES:
        raise ValueError(f"{len(data)} bytes hold no {count} names of {_NAME_BYTES} bytes")
    return [
        bytes(data[at : at + _NAME_BYTES]).split(b"\0", 1)[0].decode("ascii", "replace").strip()
        for at in range(0, count * _NAME_BYTES, _NAME_BYTES)
    ]


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"ethtool: {os.strerror(error.errno)}"
    return str(error)
