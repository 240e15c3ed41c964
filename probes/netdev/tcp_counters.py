"""What the TCP connections of given processes carried on each network device, and how they fare.

A connection belongs to the device that has its local address, or that its socket is bound to.  Connections come and
go, so their counters are added up here: totals of a device begin at 0 and never fall.  What a connection did before
its process was first looked at is left out, and so is what it did in its last second, after it was read for the last
time.  Sockets of other processes are listed by the kernel and passed over.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from probes.clock import Clock
from probes.netdev.addresses import read_addresses
from probes.netdev.counters import CounterReading, DeviceFailure, Values
from probes.netdev.links import read_links
from probes.netdev.netlink import NetlinkSocket
from probes.netdev.tcp_info import NETLINK_SOCK_DIAG, TcpInfo, TcpSocket, info_of, read_sockets
from probes.socket_owners import SocketOwners

MAXIMUM_CONNECTIONS: Final = 2_048
"""Of the processes, in one network namespace; more are left out, and that is said.

One costs some 20 µs of this thread at every read.
"""

TCP_FIELDS: Final = (
    "tx_bytes",
    "rx_bytes",
    "acked_bytes",
    "retransmitted_bytes",
    "retransmitted_segments",
    "data_segments",
    "busy_us",
    "receive_window_limited_us",
    "send_buffer_limited_us",
)
_SEGMENTS: Final = frozenset({TCP_FIELDS.index("retransmitted_segments"), TCP_FIELDS.index("data_segments")})
_SEGMENTS_MASK: Final = 0xFFFFFFFF
_RECENT_MS: Final = 1_000
_NOWHERE: Final = TcpInfo(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class DeviceConnections:
    """The connections of one device at the last read."""

    device: str
    connections: int
    sending: int
    """Those that sent data within the last second, or have data under way; the next four are of these."""
    round_trip_mean_us: float | None
    """Smoothed round-trip times; None: none is measured."""
    round_trip_maximum_us: int | None
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
        self._wanted: tuple[tuple[str, ...], frozenset[int]] = ((), frozenset())
        self._accounts = ConnectionAccounts()
        self.last: tuple[DeviceConnections, ...] = ()
        """Of the last read, replaced as a whole; one a device."""

    def close(self) -> None:
        self._route.close()
        self._diag.close()

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
        if devices and pids:
            found, failed = self._sockets(devices, pids)
        after_ns = self._clock.monotonic_ns()
        failed += self._accounts.take(devices, pids, found)
        self.last = self._accounts.last
        values: Values = np.array([self._accounts.totals(device) for device in devices], dtype=np.uint64)
        return CounterReading(
            before_ns,
            after_ns,
            devices,
            (0,) * len(devices),
            TCP_FIELDS,
            values.reshape(len(devices), len(TCP_FIELDS)),
            tuple(failed),
        )

    def _sockets(
        self, devices: Sequence[str], pids: frozenset[int]
    ) -> tuple[list[tuple[str, int, TcpSocket]], list[DeviceFailure]]:
        """(device, pid, socket) of every connection of the processes on the devices, and what failed."""
        names = {link.index: link.name for link in read_links(self._route).values() if link.name in devices}
        failed = [DeviceFailure(device, "no such device") for device in devices if device not in names.values()]
        places = {local.address: names[local.index] for local in read_addresses(self._route) if local.index in names}
        if not places:
            return [], failed
        sockets = read_sockets(self._diag, list(places))
        owners = self._owners.owners(pids, (socket.inode for socket in sockets))
        unreadable = self._owners.unreadable
        if unreadable and len(unreadable) == len(pids):
            raise PermissionError(errno.EACCES, unreadable[0].reason)
        failed += [DeviceFailure(f"process {process.pid}", process.reason) for process in unreadable]
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
        """`TCP_FIELDS` of one device; never fall."""
        return list(self._totals.get(device, [0] * len(TCP_FIELDS)))

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
            if before is not None:
                self._add(device, before.seen, counters)
            elif pid in self._pids:  # opened since the last read
                self._add(device, _counters(_NOWHERE), counters)
            connections[socket.cookie] = _Connection(device, counters)
        self._connections = connections
        self._pids = pids
        self.last = tuple(_fare(device, members) for device, members in infos.items())
        return list(dict.fromkeys(failed))

    def _add(self, device: str, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        totals = self._totals.setdefault(device, [0] * len(TCP_FIELDS))
        if before == after:
            return
        for column, (old, new) in enumerate(zip(before, after, strict=True)):
            totals[column] += (new - old) & _SEGMENTS_MASK if column in _SEGMENTS else max(0, new - old)


def _counters(info: TcpInfo) -> tuple[int, ...]:
    """In the order of TCP_FIELDS."""
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
    )


def _sends(info: TcpInfo) -> bool:
    if info.unacknowledged_segments or info.not_sent_bytes:
        return True
    return info.data_segments_sent > 0 and info.last_sent_ms <= _RECENT_MS


def _fare(device: str, infos: Sequence[TcpInfo]) -> DeviceConnections:
    sending = [info for info in infos if _sends(info)]
    times = [info.round_trip_us for info in sending if info.round_trip_us]
    rated = [info for info in sending if info.delivery_rate_bytes_per_second]
    return DeviceConnections(
        device=device,
        connections=len(infos),
        sending=len(sending),
        round_trip_mean_us=sum(times) / len(times) if times else None,
        round_trip_maximum_us=max(times, default=None),
        delivery_rate_bytes_per_second=sum(info.delivery_rate_bytes_per_second for info in rated) if rated else None,
        application_limited=sum(info.application_limited for info in rated),
        unacknowledged_segments=sum(info.unacknowledged_segments for info in infos),
        not_sent_bytes=sum(info.not_sent_bytes for info in infos),
    )
