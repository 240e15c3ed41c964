"""Counts what the TCP connections of given processes carried on each network device, and their condition.

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
from pathlib import Path
from typing import Final

import numpy as np

from railscope.probes.clock import Clock
from railscope.probes.netdev.addresses import MOST_TABLE_BYTES, read_addresses
from railscope.probes.netdev.connection_accounts import (
    ACCOUNT_FIELDS,
    ConnectionAccounts,
    DeviceConnections,
    FoundConnections,
)
from railscope.probes.netdev.counters import CounterReading, DeviceFailure, Values
from railscope.probes.netdev.links import device_indexes
from railscope.probes.netdev.netlink import NetlinkSocket
from railscope.probes.netdev.rtnetlink_counters import LINK_STATS_FIELDS, NetlinkCounters
from railscope.probes.netdev.tcp_info import NETLINK_SOCK_DIAG, read_table
from railscope.probes.processes.socket_owners import SocketOwners

PORT_FIELDS: Final = ("port_tx_bytes", "port_rx_bytes", "port_tx_packets", "port_rx_packets")
"""The device's own, of all traffic."""
_MOST_CONNECTION_BYTES: Final = 64 << 20
"""Some 130,000 connections with an address of a rail, of whatever process."""
TCP_FIELDS: Final = (*ACCOUNT_FIELDS, *PORT_FIELDS)
_COLUMNS: Final = [LINK_STATS_FIELDS.index(name.removeprefix("port_")) for name in PORT_FIELDS]


class TcpCounters:
    """A `CounterSource` of the devices that `watch` names: `TCP_FIELDS` of each; `last` has the connections' state."""

    def __init__(self, clock: Clock, procfs: Path, accounts: ConnectionAccounts | None = None) -> None:
        """Works in the network namespace of the thread that constructs it.

        `accounts` of one that was closed, in the same namespace: totals go on where its totals stood.

        Raises:
            OSError: the kernel refuses a socket.
        """
        self._clock = clock
        self._owners = SocketOwners(procfs, clock)
        self._route = NetlinkSocket(most_bytes=MOST_TABLE_BYTES)
        try:
            self._diag = NetlinkSocket(protocol=NETLINK_SOCK_DIAG, most_bytes=_MOST_CONNECTION_BYTES)
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
        self._accounts = accounts if accounts is not None else ConnectionAccounts()
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
        found: FoundConnections | None = None
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
                found, unreadable = self._connections(names, places, pids)
                failed += unreadable
        after_ns = self._clock.monotonic_ns()
        failed += self._accounts.add(devices, pids, found)
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

    def _connections(
        self, names: Mapping[int, str], places: Mapping[bytes, str], pids: frozenset[int]
    ) -> tuple[FoundConnections | None, list[DeviceFailure]]:
        """Every connection of the processes on the devices, None: there is none; and what failed."""
        table = read_table(self._diag, list(places))
        owners = self._owners.owners(pids, table.rows["inode"].tolist())
        unreadable = self._owners.unreadable
        if unreadable and len(unreadable) == len(pids):
            raise PermissionError(errno.EACCES, unreadable[0].reason)
        failed = [DeviceFailure(f"process {process.pid}", process.reason) for process in unreadable]
        return self._accounts.find(table, owners, names, places), failed
