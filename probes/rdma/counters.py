"""What every RDMA port has counted: a `CounterSource` with one row a port, called `mlx5_0/1`.

`tx_bytes` and `rx_bytes` are bytes, whatever unit the driver counts in; a port that does not count bytes (soft-RoCE)
says so in the reading's `shape`.  All other columns are what the kernel shows, under its own names.  Devices that
come, go or are registered again are noticed within a second: a device's folder then has another inode, which is the
row's generation.

As long as every file of every port can be read, they are read one after the other and understood later, many readings
at once.  With the first that cannot, or shows no number, everything is looked at one by one again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from railscope.probes.clock import Clock
from railscope.probes.native.beats import Answer, FilesQuestion
from railscope.probes.netdev.counters import CounterBlock, CounterReading, CounterShape, DeviceFailure, Flags, Values
from railscope.probes.netdev.sysfs import read_link_name
from railscope.probes.rdma.inventory import class_folder, device_names, port_name, port_numbers
from railscope.probes.rdma.kept_files import KeptFiles
from railscope.probes.rdma.netlink import RdmaNetlink
from railscope.probes.rdma.port import (
    RECEIVE,
    TRANSMIT,
    HwCounters,
    PortCounters,
    PortGone,
    PortValues,
    Wanted,
    choose_all,
    pause_ns,
)
from railscope.probes.rdma.widths import WIDE

_LOOK_PERIOD_NS: Final = 900_000_000
"""Less than a second: who comes once a second, a little early, shall not come in vain."""
_COLUMNS_LIMIT: Final = 4096
_INODE_MASK: Final = (1 << 63) - 1


@dataclass(slots=True, eq=False)
class _Port:
    name: str
    device: str
    number: int
    first: bool
    generation: int
    counters: PortCounters | None = None
    """None while the device cannot be opened."""
    settled: bool = False
    """Whether it still was as it was opened when the devices were looked at again."""
    failures: int = 0
    retry_ns: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the values of a reading stand, which only changes with what the ports show."""

    key: tuple[object, ...]
    shape: CounterShape
    places: npt.NDArray[np.intp]
    """Of each value that has a column: where in the reading, row by row."""
    placed: Flags
    """Which values have a column."""


_NO_VALUES: Final = np.zeros((0, 0), dtype=np.uint64)
_NO_FLAGS: Final = np.zeros((0, 0), dtype=np.bool_)
_NO_LAYOUT: Final = _Layout(
    (),
    CounterShape(_NO_FLAGS, _NO_VALUES, _NO_FLAGS, _NO_FLAGS),
    np.zeros(0, dtype=np.intp),
    np.zeros(0, dtype=np.bool_),
)


class RdmaCounters:
    """Counters of all ports in `SYSFS/class/infiniband`."""

    def __init__(
        self,
        sysfs: Path,
        clock: Clock,
        *,
        netlink: RdmaNetlink | None = None,
        wanted: Wanted = choose_all,
        excluded: Sequence[str] = (),
    ) -> None:
        """`netlink` fetches hw_counters where it can, and is closed with this; `excluded` are patterns of devices and
        counters that are never opened: `mlx5_1`, `mlx5_*/port_xmit_wait`.

        Raises:
            OSError: there is no `class/infiniband`.
        """
        self._sysfs = sysfs
        self._clock = clock
        self._netlink = netlink
        self._wanted = wanted
        self._excluded = excluded
        self._folder = class_folder(sysfs)
        self._ports: dict[str, _Port] = {}
        self._looked_ns: int | None = None
        self._fields: tuple[str, ...] = (TRANSMIT, RECEIVE)
        self._columns: dict[str, int] = {TRANSMIT: 0, RECEIVE: 1}
        self._layout = _NO_LAYOUT
        self._names: tuple[str, ...] = ()
        self._generations: tuple[int, ...] = ()
        self._kept: KeptFiles | None = None
        """Everything, while all of it can be read."""
        self._taken: KeptFiles | None = None
        """Where the last answer came from."""
        self._folder.stat()

    def close(self) -> None:
        self._close_ports()
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None

    def refresh(self) -> None:
        """See `CounterSource.refresh`."""
        self._close_ports()
        self._looked_ns = None

    def read(self) -> CounterReading:
        """See `CounterSource.read`."""
        self._compare_when_due()
        answer = self.read_raw()
        return self._read_one_by_one() if answer is None else self.parse_raw([answer])[0].reading(0)

    def read_raw(self) -> Answer | None:
        """See `DeferringSource.read_raw`."""
        if self._kept is not None:
            self._compare_when_due()
        kept, before_ns = self._kept, self._clock.monotonic_ns()
        if kept is None:
            return None
        try:
            texts = kept.read()
        except OSError:
            texts = None
        if texts is None:
            self._kept = None
            return None
        self._taken = kept
        return Answer(before_ns, self._clock.monotonic_ns(), (texts,))

    def question(self) -> FilesQuestion | None:
        """See `DeferringSource.question`; None while ports have to be read one by one."""
        if self._kept is not None:
            self._compare_when_due()
        self._taken = self._kept or self._taken
        return None if self._kept is None else self._kept.question

    def parse_raw(self, answers: Sequence[Answer]) -> list[CounterBlock]:
        """See `DeferringSource.parse_raw`."""
        kept = self._taken
        assert kept is not None, "nothing was taken"
        times_ns = tuple((answer.before_ns, answer.after_ns) for answer in answers)
        values = kept.parse([answer.datagrams[0] for answer in answers])
        return [CounterBlock(times_ns, kept.names, kept.generations, kept.fields, values, kept.shape)]

    def _read_one_by_one(self) -> CounterReading:
        before_ns = self._clock.monotonic_ns()
        rows: list[tuple[_Port, PortCounters, PortValues]] = []
        failed: list[DeviceFailure] = []
        for port in self._ports.values():
            values = self._read(port, before_ns)
            if values is None or port.counters is None:
                failed.append(DeviceFailure(port.name, port.reason))
                continue
            failed += [DeviceFailure(port.name, reason) for reason in values.failed]
            if values.values or not values.failed:
                rows.append((port, port.counters, values))
        after_ns = self._clock.monotonic_ns()
        if failed and not rows:
            raise OSError(f"{failed[0].device}: {failed[0].reason}")
        reading = self._reading(before_ns, after_ns, rows, failed)
        files = [counters.files() for _port, counters, _values in rows]
        known = [found for found in files if found is not None]
        if reading.shape is not None and not failed and len(known) == len(files) > 0:
            self._kept = KeptFiles.from_files(known, reading.names, reading.generations, reading.fields, reading.shape)
        return reading

    def _read(self, port: _Port, now_ns: int) -> PortValues | None:
        if port.counters is None and now_ns < port.retry_ns:
            return None
        try:
            if port.counters is None:
                port.counters = self._open(port)
            values = port.counters.read(now_ns)
        except PortGone as error:
            if port.counters is not None:
                port.counters.close()
                port.counters = None
            port.settled = False
            port.failures += 1
            port.retry_ns = now_ns + pause_ns(port.failures)
            port.reason = error.strerror or str(error)
            self._looked_ns = None  # another device may have taken its name
            return None
        port.failures = 0
        return values

    def _excluded_of(self, device: str) -> tuple[str, ...]:
        """Patterns of the counters of a device that are not read; `*`: none is."""
        patterns = [pattern.partition("/") for pattern in self._excluded]
        return tuple(counter or "*" for name, _slash, counter in patterns if fnmatchcase(device, name))

    def _open(self, port: _Port) -> PortCounters:
        folder = self._folder / port.device
        excluded = self._excluded_of(port.device)

        def wanted(group: str, name: str) -> bool:
            named = any(fnmatchcase(name, one) or fnmatchcase(f"{group}/{name}", one) for one in excluded)
            return not named and self._wanted(group, name)

        return PortCounters(
            folder,
            port.number,
            read_link_name(folder / "device" / "driver"),
            first=port.first,
            wanted=wanted,
            hw_counters=self._hw_counters(port),
        )

    def _hw_counters(self, port: _Port) -> HwCounters | None:
        """One request for all of the port's hw_counters; None where files must do, as where one is not to be read."""
        if (
            self._netlink is None
            or self._excluded_of(port.device)
            or not (self._folder / port.device / "ports" / str(port.number) / "hw_counters").is_dir()
        ):
            return None
        try:
            index = self._netlink.device_indexes().get(port.device)
        except (OSError, ValueError):
            return None
        return None if index is None else partial(self._netlink.port_counters, index, port.number)

    def _compare_when_due(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if self._looked_ns is None or now_ns - self._looked_ns >= _LOOK_PERIOD_NS:
            self._compare_devices()
            self._looked_ns = now_ns

    def _compare_devices(self) -> None:
        """Compare the devices with those known: open what is new, close what has gone or is another one by now."""
        self._folder.stat()
        root = str(self._folder)
        found: dict[str, _Port] = {}
        ports_of: dict[str, list[_Port]] = {}
        for port in self._ports.values():
            ports_of.setdefault(port.device, []).append(port)
        for device in device_names(self._sysfs):
            if "*" in self._excluded_of(device):
                continue
            folder = f"{root}/{device}"
            try:
                generation = os.stat(folder).st_ino & _INODE_MASK  # noqa: PTH116 -- a Path takes longer than the call
            except OSError:
                continue  # gone since it was listed, or a link to nothing
            members = ports_of.get(device, ())
            if members and all(port.settled and port.generation == generation for port in members):
                # A registered device gets no other ports: to list them takes longest here.
                found.update({port.name: port for port in members})
                continue
            for position, number in enumerate(port_numbers(folder)):
                name = port_name(device, number)
                known = self._ports.get(name)
                if known is not None and known.generation == generation:
                    found[name] = known
                    self._reopen_port(known)
                else:
                    found[name] = _Port(name, device, number, position == 0, generation)
        for name, port in self._ports.items():
            if found.get(name) is not port and port.counters is not None:
                port.counters.close()
        if list(found.values()) != list(self._ports.values()):
            self._kept = None
        self._ports = found

    def _reopen_port(self, port: _Port) -> None:
        """Let a port be opened anew that was opened before all of its counters were there."""
        if port.settled or port.counters is None:
            return
        port.settled = port.counters.whole
        if not port.settled:
            port.counters.close()
            port.counters = None
            self._kept = None

    def _close_ports(self) -> None:
        for port in self._ports.values():
            if port.counters is not None:
                port.counters.close()
        self._ports = {}
        self._kept = None

    def _reading(
        self,
        before_ns: int,
        after_ns: int,
        rows: list[tuple[_Port, PortCounters, PortValues]],
        failed: list[DeviceFailure],
    ) -> CounterReading:
        self._append_fields(rows, failed)
        layout = self._layout_of(rows)
        values: Values = np.zeros((len(rows), len(self._fields)), dtype=np.uint64)
        found = np.array([value for _port, _counters, read in rows for value in read.values.values()], dtype=np.uint64)
        values.reshape(-1)[layout.places] = found[layout.placed]
        names = tuple(port.name for port, _counters, _values in rows)
        generations = tuple(port.generation for port, _counters, _values in rows)
        if (names, generations) != (self._names, self._generations):
            self._names, self._generations = names, generations
        return CounterReading(
            before_ns,
            after_ns,
            self._names,
            self._generations,
            self._fields,
            values,
            tuple(failed),
            layout.shape,
        )

    def _layout_of(self, rows: list[tuple[_Port, PortCounters, PortValues]]) -> _Layout:
        """Where the values of these ports stand; as a rule where they stood in the last reading."""
        key = (self._fields, tuple((port.name, port.generation, *read.values) for port, _counters, read in rows))
        if key == self._layout.key:
            return self._layout
        size = (len(rows), len(self._fields))
        maxima: Values = np.full(size, WIDE.maximum, dtype=np.uint64)
        known: Flags = np.zeros(size, dtype=np.bool_)
        saturating: Flags = np.zeros(size, dtype=np.bool_)
        gauges: Flags = np.zeros(size, dtype=np.bool_)
        columns: list[int | None] = []
        places: list[int] = []
        for row, (_port, counters, read) in enumerate(rows):
            for name in read.values:
                column = self._columns.get(name)
                columns.append(column)
                if column is None:
                    continue
                width = counters.width(name)
                places.append(row * len(self._fields) + column)
                maxima[row, column] = width.maximum
                known[row, column] = True
                saturating[row, column] = width.saturates
                gauges[row, column] = width.gauge
        placed: Flags = np.array([column is not None for column in columns], dtype=np.bool_)
        shape = CounterShape(known, maxima, saturating, gauges)
        self._layout = _Layout(key, shape, np.array(places, dtype=np.intp), placed)
        return self._layout

    def _append_fields(self, rows: list[tuple[_Port, PortCounters, PortValues]], failed: list[DeviceFailure]) -> None:
        new = dict.fromkeys(
            name for _port, _counters, read in rows for name in read.values if name not in self._columns
        )
        if not new:
            return
        for name in list(new)[: max(0, _COLUMNS_LIMIT - len(self._fields))]:
            self._columns[name] = len(self._columns)
        if len(self._columns) < len(self._fields) + len(new):
            failed.append(DeviceFailure("all ports", f"more than {_COLUMNS_LIMIT} different counters"))
        self._fields = tuple(self._columns)
