"""Reads all counters of one RDMA port, from open descriptors or one netlink request.

Names are discovered, never listed here.  One file that fails is left out of a reading and tried again after a growing
pause; what the kernel says it does not support is left out for good.  Some firmware answers every refused read with a
line in the kernel's log: hence the pauses.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from railscope.probes.netdev.sysfs import NotANumber, NotCounted, list_folder, open_attribute, read_counter
from railscope.probes.rdma.widths import COUNTERS, HW_COUNTERS, WIDE, Width, width_of

TRANSMIT: Final = "tx_bytes"
RECEIVE: Final = "rx_bytes"

_Key = tuple[str, str]
"""(folder, counter)"""

_BYTE_SOURCES: Final[Mapping[str, tuple[tuple[int, tuple[_Key, ...]], ...]]] = {
    TRANSMIT: (
        (1, ((HW_COUNTERS, "tx_bytes"),)),
        (4, ((COUNTERS, "port_xmit_data"),)),
        (1, ((HW_COUNTERS, "ip4OutOctets"), (HW_COUNTERS, "ip6OutOctets"))),
        (1, ((HW_COUNTERS, "hw_tx_bytes_cnt"),)),
        (1, ((HW_COUNTERS, "tx_rdma_ucast_bytes"), (HW_COUNTERS, "tx_rdma_mcast_bytes"))),
        (1, ((HW_COUNTERS, "tx_rdma_ucast_bytes"),)),
    ),
    RECEIVE: (
        (1, ((HW_COUNTERS, "rx_bytes"),)),
        (4, ((COUNTERS, "port_rcv_data"),)),
        (1, ((HW_COUNTERS, "ip4InOctets"), (HW_COUNTERS, "ip6InOctets"))),
        (1, ((HW_COUNTERS, "hw_rx_bytes_cnt"),)),
        (1, ((HW_COUNTERS, "rx_rdma_ucast_bytes"), (HW_COUNTERS, "rx_rdma_mcast_bytes"))),
        (1, ((HW_COUNTERS, "rx_rdma_ucast_bytes"),)),
    ),
}
"""(bytes of one unit, counters to add up); the first that a port has whole counts.  In this order: bnxt_re, efa
and mana_ib; mlx5, mlx4 and hfi1, whose unit is InfiniBand's 4 octets; irdma; erdma; ionic.  A driver that has its own
bytes and InfiniBand's derives the latter from the former."""

_BYTE_KEYS: Final = frozenset(key for sources in _BYTE_SOURCES.values() for _unit, keys in sources for key in keys)

_NOT_COUNTERS: Final = ("lifespan", "active_", "watermark_")
"""Beginnings of names in hw_counters that are a setting of the kernel's cache, or numbers of things that exist now
and in bnxt_re the most there were."""

_UNSUPPORTED: Final = frozenset(
    {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT, errno.ENOSYS, errno.EISDIR, errno.ELOOP, errno.ESPIPE}
)
"""Answers at the first look that will not change: not supported by this port, or not a counter's file at all."""
_GONE: Final = frozenset({errno.ENODEV, errno.ENXIO})

COUNTERS_LIMIT: Final = 512
"""Counters of one port; the largest drivers have about a hundred."""
_MASK: Final = (1 << 64) - 1
_FIRST_PAUSE_NS: Final = 2_000_000_000
_LONGEST_PAUSE_NS: Final = 300_000_000_000

Wanted = Callable[[str, str], bool]
"""Whether the counter of a folder and name is to be read."""


def choose_all(_group: str, _name: str) -> bool:
    """The choice of all counters of an RDMA port."""
    return True


def choose_byte_counters(group: str, name: str) -> bool:
    """The choice of those counters of an RDMA port that bytes come from: two or four files, to be read more often."""
    return (group, name) in _BYTE_KEYS


class HwCounters(Protocol):
    """Reads all hw_counters of one port at once."""

    def __call__(self) -> Mapping[str, int]:
        """Counters by name.

        Raises:
            OSError, ValueError: it does not work for this port.
        """
        ...


@dataclass(frozen=True, slots=True)
class PortValues:
    """One reading of one port."""

    values: Mapping[str, int]
    """Columns that could be read; `tx_bytes` and `rx_bytes` are bytes, and absent where a port does not count them."""
    failed: tuple[str, ...]
    """What could not be read though it should be there, a line each."""


@dataclass(frozen=True, slots=True)
class PortFiles:
    """Where all that a port counts comes from, while nothing but files is read and all of them can be."""

    descriptors: tuple[int, ...]
    """One a file."""
    columns: tuple[tuple[str, int, tuple[int, ...]], ...]
    """(column, unit, files by their place in `descriptors`): units times the sum of what the files show."""


class PortGone(OSError):
    """The device has gone, or is another one by now."""


def pause_ns(failures: int) -> int:
    """How long to leave alone a counter of an RDMA port that failed this often in a row."""
    return min(_FIRST_PAUSE_NS << min(max(failures - 1, 0), 16), _LONGEST_PAUSE_NS)


class _File:
    """One counter's file."""

    def __init__(self, path: Path, key: _Key) -> None:
        self.path = path
        self.key = key
        self.error = ""
        """Why the last look failed; empty: it did not."""
        self._descriptor = -1
        self._failures = 0
        self._retry_ns = 0

    @property
    def descriptor(self) -> int:
        """To read it from; -1 while that does not work."""
        return -1 if self._failures else self._descriptor

    def is_supported(self) -> bool:
        """First look: whether this can ever be read.  Raises PortGone."""
        try:
            self._read_first()
        except OSError as error:
            return error.errno not in _UNSUPPORTED
        except NotCounted:
            return False
        except NotANumber:
            return True
        return True

    def read(self, now_ns: int) -> int | None:
        """The counter now; None, with the reason in `error`, where it cannot be read.  Raises PortGone."""
        if self._failures and now_ns < self._retry_ns:
            return None
        try:
            value = self._read_first()
        except PortGone:
            raise
        except OSError as error:
            self._fail(error.strerror or str(error), now_ns)
        except ValueError as error:
            self._fail(str(error), now_ns)
        else:
            self._failures = 0
            self.error = ""
            return value
        return None

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_first(self) -> int:
        try:
            if self._descriptor < 0:
                self._descriptor = open_attribute(self.path)
            return read_counter(self._descriptor)
        except OSError as error:
            if error.errno in _GONE:
                raise PortGone(error.errno, error.strerror) from None
            raise

    def _fail(self, reason: str, now_ns: int) -> None:
        self._failures += 1
        self._retry_ns = now_ns + pause_ns(self._failures)
        self.error = f"{self.path.name}: {reason}"


class PortCounters:
    """What one port counts."""

    def __init__(
        self, device: Path, port: int, driver: str, *, first: bool, wanted: Wanted, hw_counters: HwCounters | None
    ) -> None:
        """`device` is the device's folder; its `first` port also shows what is counted for the device as a whole.

        Raises:
            PortGone: the device has gone meanwhile.
        """
        self._driver = driver
        self._wanted = wanted
        self._hw_counters = hw_counters
        self._files: list[_File] = []
        self._listed: dict[Path, list[str]] = {}
        """Names in each folder, whether they are counters or not."""
        self._overflow = ""
        self._columns: dict[_Key, str] = {}
        self._widths: dict[str, Width] = {TRANSMIT: WIDE, RECEIVE: WIDE}
        self._bytes: dict[str, tuple[int, tuple[_Key, ...]]] | None = None
        port_folder = device / "ports" / str(port)
        self._hw_folders = [port_folder / HW_COUNTERS, *([device / HW_COUNTERS] if first else [])]
        try:
            self._open(COUNTERS, port_folder / COUNTERS)
            if hw_counters is None:
                self._open_hw_counters()
        except PortGone:
            self.close()
            raise

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    def width(self, column: str) -> Width:
        """Where a column ends that this port has shown."""
        return self._widths[column]

    def read(self, now_ns: int) -> PortValues:
        """Everything now; what failed is left out and named.

        Raises:
            PortGone: the device has gone, or is another one by now.
        """
        raw: dict[_Key, int] = {}
        failed = [self._overflow] if self._overflow else []
        if self._hw_counters is not None:
            raw = self._read_at_once(self._hw_counters)
        for file in self._files:
            value = file.read(now_ns)
            if value is not None:
                raw[file.key] = value
            elif file.error:
                failed.append(file.error)
        if self._bytes is None:
            self._bytes = _byte_sources({*raw, *(file.key for file in self._files)})
        values: dict[str, int] = {}
        for column, (unit, keys) in self._bytes.items():
            if all(key in raw for key in keys):
                values[column] = sum(raw[key] for key in keys) * unit & _MASK
        taken = _taken(self._bytes)
        for key, value in raw.items():
            if key not in taken:
                values[self._column(key)] = value
        return PortValues(values, tuple(failed))

    @property
    def whole(self) -> bool:
        """Whether its folders list what they did when it was opened: a port that is being registered gets more."""
        return all(list_folder(folder) == names for folder, names in self._listed.items())

    def files(self) -> PortFiles | None:
        """What to read for the same as the last `read` gave; None: not only files are read, or some cannot be."""
        places = {file.key: place for place, file in enumerate(self._files)}
        descriptors = tuple(file.descriptor for file in self._files)
        if self._hw_counters is not None or self._overflow or self._bytes is None or min(descriptors, default=-1) < 0:
            return None
        columns = [(column, unit, tuple(places[key] for key in keys)) for column, (unit, keys) in self._bytes.items()]
        taken = _taken(self._bytes)
        columns += [(self._column(key), 1, (place,)) for key, place in places.items() if key not in taken]
        return PortFiles(descriptors, tuple(columns))

    def _read_at_once(self, hw_counters: HwCounters) -> dict[_Key, int]:
        try:
            found = hw_counters()
        except (OSError, ValueError):
            # Files say the same, only dearer: also why they fail, if they do.
            self._hw_counters = None
            self._open_hw_counters()
            return {}
        names = [name for name in found if self._counts(HW_COUNTERS, name)]
        if len(names) > COUNTERS_LIMIT:
            self._overflow = _overflow(HW_COUNTERS)
        return {(HW_COUNTERS, name): found[name] for name in names[:COUNTERS_LIMIT]}

    def _open_hw_counters(self) -> None:
        for folder in self._hw_folders:
            self._open(HW_COUNTERS, folder)

    def _open(self, group: str, folder: Path) -> None:
        present = {file.key for file in self._files}
        listed = self._listed[folder] = list_folder(folder)
        names = [name for name in listed if self._counts(group, name) and (group, name) not in present]
        if len(names) > COUNTERS_LIMIT:
            self._overflow = _overflow(group)
        for name in names[:COUNTERS_LIMIT]:
            file = _File(folder / name, (group, name))
            self._files.append(file)
            if not file.is_supported():
                file.close()
                self._files.pop()

    def _counts(self, group: str, name: str) -> bool:
        return self._wanted(group, name) and not (group == HW_COUNTERS and name.startswith(_NOT_COUNTERS))

    def _column(self, key: _Key) -> str:
        column = self._columns.get(key)
        if column is None:
            group, name = key
            column = f"{group}/{name}" if name in self._widths else name
            self._columns[key] = column
            self._widths[column] = width_of(self._driver, group, name)
        return column


def _overflow(group: str) -> str:
    return f"{group}: more than {COUNTERS_LIMIT} counters; the others are left out"


def _byte_sources(present: Iterable[_Key]) -> dict[str, tuple[int, tuple[_Key, ...]]]:
    """Where a port's bytes come from; chosen once, so that a total never mixes two sources."""
    there = set(present)
    return {
        column: next((unit, keys) for unit, keys in sources if there.issuperset(keys))
        for column, sources in _BYTE_SOURCES.items()
        if any(there.issuperset(keys) for _unit, keys in sources)
    }


def _taken(byte_sources: Mapping[str, tuple[int, tuple[_Key, ...]]]) -> frozenset[_Key]:
    """Counters that are shown as bytes, and not under their own names."""
    return frozenset(key for _unit, keys in byte_sources.values() for key in keys)
