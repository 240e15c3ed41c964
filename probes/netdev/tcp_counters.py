"""What the TCP connections of given processes carried on each network device, and how they fare.

A connection belongs to the device that has its local address, or that its socket is bound to.  Connections come and
go, so their counters are added up here: totals of a device begin at 0 and never fall.  What a connection did before
its process was first looked at is left out, and so is what it did in its last second, after it was read for the last
time.  Sockets of other processes are listed by the kernel and passed over.

The device's own counters are read just before the connections: what it carried beside them shows only where both are
of one moment, and read in this order the device never seems to have carried more than it had.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from probes.clock import Clock
from probes.netdev.addresses import read_addresses
from probes.netdev.counters import CounterReading, DeviceFailure, Values
from probes.netdev.links import device_indexes
from probes.netdev.netlink import NetlinkSocket
from probes.netdev.rtnetlink_counters import LINK_STATS_FIELDS, NetlinkCounters
from probes.netdev.tcp_info import (
    NETLINK_SOCK_DIAG,
    OPTION_TIMESTAMPS,
    TcpInfo,
    TcpSocket,
    info_of,
    read_sockets,
)
from probes.socket_owners import SocketOwners

MAXIMUM_CONNECTIONS: Final = 2_048
"""Of the processes, in one network namespace; more are left out, and that is said.

One costs some 20 µs of this thread at every read.
"""

_INFO_FIELDS: Final = (
    "tx_bytes",
    "rx_bytes",
    "acked_bytes",
    "retransmitted_bytes",
    "retransmitted_segments",
    "data_segments",
    "busy_us",
    "receive_window_limited_us",
    "send_buffer_limited_us",
    "segments_sent",
    "segments_received",
)
ACCOUNT_FIELDS: Final = (*_INFO_FIELDS, "header_bytes_sent", "header_bytes_received", "connection_changes")
"""Headers are counted as if every segment were a packet of its own, Ethernet's included; changes are connections
that came or went."""
PORT_FIELDS: Final = ("port_tx_bytes", "port_rx_bytes", "port_tx_packets", "port_rx_packets")
"""The device's own, whoever's traffic it was."""
TCP_FIELDS: Final = (*ACCOUNT_FIELDS, *PORT_FIELDS)
_SEGMENTS_SENT: Final = _INFO_FIELDS.index("segments_sent")
_SEGMENTS_RECEIVED: Final = _INFO_FIELDS.index("segments_received")
_SEGMENTS: Final = frozenset(
    {
        _INFO_FIELDS.index("retransmitted_segments"),
        _INFO_FIELDS.index("data_segments"),
        _SEGMENTS_SENT,
        _SEGMENTS_RECEIVED,
    }
)
_SEGMENTS_MASK: Final = 0xFFFFFFFF
_HEADERS_SENT: Final = ACCOUNT_FIELDS.index("header_bytes_sent")
_HEADERS_RECEIVED: Final = ACCOUNT_FIELDS.index("header_bytes_received")
_CHANGES: Final = ACCOUNT_FIELDS.index("connection_changes")
_COLUMNS: Final = [LINK_STATS_FIELDS.index(name.removeprefix("port_")) for name in PORT_FIELDS]
_ETHERNET_AND_TCP_BYTES: Final = 14 + 20
_IP_BYTES: Final = {4: 20, 16: 40}
"""By the length of an address."""
_TIMESTAMPS_BYTES: Final = 12
_RECENT_MS: Final = 1_000
_NOWHERE: Final = TcpInfo(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class DeviceConnections:
    """The connections of one device at the last read."""

    device: str
    connections: int
    sending: int
    """Those that sent data within the last second, or have data under way; the next five are of these."""
    round_trip_mean_us: float | None
    """Smoothed round-trip times; None: none is measured."""
    round_trip_maximum_us: int | None
    round_trip_deviation_us: float | None
    """Mean of their deviations: larger than the round trip where single ones took long."""
    delivery_rate_bytes_per_second: int | None
    """Sum of the last delivery rates; None: none is measured."""
    application_limited: int
    """How many of these rates say only what the application wanted to send."""
    unacknowledged_segments: int
    """Of all connections, as the next."""
    not_sent_bytes: int


@dataclass(slots=True)
class _Connection:
    device: str
    seen: tuple[int, ...]
    header_bytes: int
    """Of one packet."""


class TcpCounters:
    """A `CounterSource` of the devices that `watch` names: `TCP_FIELDS` of each; `last` holds how connections fare."""

    def __init__(self, clock: Clock, procfs: Path) -> None:
        """Works for good in the network namespace of the calling thread.

        Raises:
            OSError: the kernel refuses a socket.
        """
        self._clock = clock
        self._owners = SocketOwners(procfs, clock)
        self._route = NetlinkSocket()
        try:
            self._diag = NetlinkSocket(protocol=NETLINK_SOCK_DIAG)
        except OSError:
            self._route.close()
            raise
        try:
            self._ports = NetlinkCounters(clock)
        except OSError:
            self._route.close()
            self._diag.close()
            raise
        self._names: dict[int, str] = {}
        self._wanted: tuple[tuple[str, ...], frozenset[int]] = ((), frozenset())
        self._accounts = ConnectionAccounts()
        self.last: tuple[DeviceConnections, ...] = ()
        """Of the last read, replaced as a whole; one a device."""

    def close(self) -> None:
        self._route.close()
        self._diag.close()
        self._ports.close()

    def watch(self, devices: Sequence[str], pids: Collection[int]) -> None:
        """Count these processes' connections on these devices from now on; safe from any thread."""
        self._wanted = (tuple(devices), frozenset(pids))

    def refresh(self) -> None:
        """See `CounterSource.refresh`: names and addresses are read every time, so that nothing is to be forgotten."""

    def read(self) -> CounterReading:
        """See `CounterSource.read`.  A process whose sockets may not be listed is a failure called `process PID`.

        Raises:
            OSError: the kernel refuses, or not one process may be looked at.
        """
        devices, pids = self._wanted
        before_ns = self._clock.monotonic_ns()
        found: list[tuple[str, int, TcpSocket]] = []
        failed: list[DeviceFailure] = []
        ports: dict[str, list[int]] = {}
        if devices:
            names = {index: name for name, index in device_indexes(self._route, devices).items()}
            places = {
                local.address: names[local.index] for local in read_addresses(self._route) if local.index in names
            }
            before_ns = self._clock.monotonic_ns()
            ports = self._port_counters(names)
            failed = [DeviceFailure(device, "no such device") for device in devices if device not in ports]
            if pids and places:
                found, unreadable = self._sockets(names, places, pids)
                failed += unreadable
        after_ns = self._clock.monotonic_ns()
        failed += self._accounts.take(devices, pids, found)
        self.last = self._accounts.last
        present = tuple(device for device in devices if device in ports)
        rows = [[*self._accounts.totals(device), *ports[device]] for device in present]
        values: Values = np.array(rows, dtype=np.uint64)
        return CounterReading(
            before_ns,
            after_ns,
            present,
            (0,) * len(present),
            TCP_FIELDS,
            values.reshape(len(present), len(TCP_FIELDS)),
            tuple(failed),
        )

    def _port_counters(self, names: dict[int, str]) -> dict[str, list[int]]:
        """`PORT_FIELDS` of each device."""
        if names != self._names:
            self._ports.refresh()
            self._names = names
        reading = self._ports.read()
        values = reading.values[:, _COLUMNS].tolist()
        return {name: row for name, row in zip(reading.names, values, strict=True) if name in names.values()}

    def _sockets(
        self, names: Mapping[int, str], places: Mapping[bytes, str], pids: frozenset[int]
    ) -> tuple[list[tuple[str, int, TcpSocket]], list[DeviceFailure]]:
        """(device, pid, socket) of every connection of the processes on the devices, and what failed."""
        sockets = read_sockets(self._diag, list(places))
        owners = self._owners.owners(pids, (socket.inode for socket in sockets))
        unreadable = self._owners.unreadable
        if unreadable and len(unreadable) == len(pids):
            raise PermissionError(errno.EACCES, unreadable[0].reason)
        failed = [DeviceFailure(f"process {process.pid}", process.reason) for process in unreadable]
        found = []
        for socket in sockets:
            pid = owners.get(socket.inode)
            device = names.get(socket.interface) or places.get(socket.local)
            if pid is not None and device is not None:
                found.append((device, pid, socket))
        return found, failed


class ConnectionAccounts:
    """Adds up connections by device."""

    def __init__(self) -> None:
        self._connections: dict[int, _Connection] = {}
        self._totals: dict[str, list[int]] = {}
        self._pids: frozenset[int] = frozenset()
        self.last: tuple[DeviceConnections, ...] = ()

    def totals(self, device: str) -> list[int]:
        """`ACCOUNT_FIELDS` of one device; never fall."""
        return list(self._totals.get(device, [0] * len(ACCOUNT_FIELDS)))

    def take(
        self, devices: Sequence[str], pids: frozenset[int], found: Sequence[tuple[str, int, TcpSocket]]
    ) -> list[DeviceFailure]:
        """Take in every connection (device, pid, socket) that there is now; returns what could not be."""
        failed: list[DeviceFailure] = []
        if len(found) > MAXIMUM_CONNECTIONS:
            left_out = len(found) - MAXIMUM_CONNECTIONS
            failed.append(DeviceFailure("connections", f"{left_out} beyond {MAXIMUM_CONNECTIONS} are not counted"))
            found = found[:MAXIMUM_CONNECTIONS]
        infos: dict[str, list[TcpInfo]] = {device: [] for device in devices}
        connections: dict[int, _Connection] = {}
        for device, pid, socket in found:
            if socket.cookie in connections:
                continue
            try:
                info = info_of(socket)
            except ValueError as error:
                failed.append(DeviceFailure(device, str(error)))
                continue
            infos[device].append(info)
            counters = _counters(info)
            before = self._connections.get(socket.cookie)
            connection = _Connection(device, counters, _header_bytes(socket, info))
            if before is not None:
                self._add(connection, before.seen)
            elif pid in self._pids:  # opened since the last read
                self._add(connection, _counters(_NOWHERE))
            connections[socket.cookie] = connection
        for old, new in ((self._connections, connections), (connections, self._connections)):
            for cookie in old.keys() - new.keys():
                self._of(old[cookie].device)[_CHANGES] += 1
        self._connections = connections
        self._pids = pids
        self.last = tuple(_fare(device, members) for device, members in infos.items())
        return list(dict.fromkeys(failed))

    def _of(self, device: str) -> list[int]:
        return self._totals.setdefault(device, [0] * len(ACCOUNT_FIELDS))

    def _add(self, connection: _Connection, before: tuple[int, ...]) -> None:
        totals = self._of(connection.device)
        if before == connection.seen:
            return
        for column, (old, new) in enumerate(zip(before, connection.seen, strict=True)):
            more = (new - old) & _SEGMENTS_MASK if column in _SEGMENTS else max(0, new - old)
            totals[column] += more
            if column == _SEGMENTS_SENT:
                totals[_HEADERS_SENT] += more * connection.header_bytes
            elif column == _SEGMENTS_RECEIVED:
                totals[_HEADERS_RECEIVED] += more * connection.header_bytes


def _counters(info: TcpInfo) -> tuple[int, ...]:
    """In the order of _INFO_FIELDS."""
    return (
        info.bytes_sent,
        info.bytes_received,
        info.bytes_acked,
        info.retransmitted_bytes,
        info.retransmitted_segments,
        info.data_segments_sent,
        info.busy_us,
        info.receive_window_limited_us,
        info.send_buffer_limited_us,
        info.segments_sent,
        info.segments_received,
    )


def _header_bytes(socket: TcpSocket, info: TcpInfo) -> int:
    """Of one packet of a connection."""
    timestamps = _TIMESTAMPS_BYTES if info.options & OPTION_TIMESTAMPS else 0
    return _ETHERNET_AND_TCP_BYTES + _IP_BYTES[len(socket.local)] + timestamps


def _sends(info: TcpInfo) -> bool:
    if info.unacknowledged_segments or info.not_sent_bytes:
        return True
    return info.data_segments_sent > 0 and info.last_sent_ms <= _RECENT_MS


def _fare(device: str, infos: Sequence[TcpInfo]) -> DeviceConnections:
    sending = [info for info in infos if _sends(info)]
    times = [info.round_trip_us for info in sending if info.round_trip_us]
    deviations = [info.round_trip_deviation_us for info in sending if info.round_trip_us]
    rated = [info for info in sending if info.delivery_rate_bytes_per_second]
    return DeviceConnections(
        device=device,
        connections=len(infos),
        sending=len(sending),
        round_trip_mean_us=sum(times) / len(times) if times else None,
        round_trip_maximum_us=max(times, default=None),
        round_trip_deviation_us=sum(deviations) / len(deviations) if deviations else None,
        delivery_rate_bytes_per_second=sum(info.delivery_rate_bytes_per_second for info in rated) if rated else None,
        application_limited=sum(info.application_limited for info in rated),
        unacknowledged_segments=sum(info.unacknowledged_segments for info in infos),
        not_sent_bytes=sum(info.not_sent_bytes for info in infos),
    )
