"""Counts what TCP connections carried on each network device, whose they were, and how those of given processes fare.

A connection belongs to the device that has its local address, or that its socket is bound to.  Connections come and
go, so their counters are added up here: totals of a device begin at 0 and never fall.  What a connection did before
the devices were first read is left out.  Of one that ends the kernel tells all that it carried, if it tells us
(sock_diag's destroy groups, Linux 4.2); otherwise the last second of each is missing.

Whose a connection is follows from the process that holds its socket.  One of another process that carried little is
left out until it has carried more: looking for who holds it costs more than it matters.

The device's own counters are read just before the connections: what it carried beside them shows only where both are
of one moment, and read in this order the device never seems to have carried more than it had.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from railscope.probes.clock import Clock
from railscope.probes.netdev.addresses import MOST_TABLE_BYTES, read_addresses
from railscope.probes.netdev.connection_accounts import (
    ACCOUNT_FIELDS,
    OBSERVED,
    PARTY_FIELDS,
    ConnectionAccounts,
    DeviceConnections,
    FoundConnections,
    Party,
)
from railscope.probes.netdev.counters import CounterReading, DeviceFailure, Values
from railscope.probes.netdev.ended_connections import Ended, EndedConnections
from railscope.probes.netdev.links import device_indexes
from railscope.probes.netdev.netlink import NetlinkSocket
from railscope.probes.netdev.rtnetlink_counters import LINK_STATS_FIELDS, NetlinkCounters
from railscope.probes.netdev.tcp_info import (
    DESTROYED_SOCKETS,
    DESTROYED_TCP_GROUPS,
    NETLINK_SOCK_DIAG,
    NO_SOCKETS,
    TcpTable,
    local_addresses,
    parse_table,
    read_table,
)
from railscope.probes.processes.socket_owners import Holder, HostSockets, SocketOwners

_log = logging.getLogger("railscope.tcp")

PORT_FIELDS: Final = ("port_tx_bytes", "port_rx_bytes", "port_tx_packets", "port_rx_packets")
"""The device's own, of all traffic."""
_MOST_CONNECTION_BYTES: Final = 64 << 20
"""Some 130,000 connections with an address of a rail, of whatever process."""
TCP_FIELDS: Final = (*ACCOUNT_FIELDS, *PORT_FIELDS)
_COLUMNS: Final = [LINK_STATS_FIELDS.index(name.removeprefix("port_")) for name in PORT_FIELDS]


NOBODYS: Final = Party("unknown", False)
"""Of connections of which it did not come to be known whose they are."""
_MATTERS_BYTES: Final = 64 << 10
"""What a connection of another process has carried before it is asked who holds it."""
_ESTABLISHED: Final = 1
_PATIENCE_NS: Final = 4_000_000_000
"""For so long a connection may be of nobody yet; then it is NOBODYS."""
_LONGEST_PATIENCE_NS: Final = 30_000_000_000
"""For so long where nobody has looked for it yet, as looks take long on a busy host and the next one is put off."""
_ENDS_BUFFER_BYTES: Final = 4 << 20
"""Some thousand connections that end between two readings."""

PartyOf = Callable[[Holder, bool, tuple[int, int]], Party | None]
"""Whose a connection is, by who holds it, whether that process is observed, and the ports of this side and the other;
None: that is not known yet."""


class TcpCounters:
    """A `CounterSource` of the devices that `watch` names.

    `TCP_FIELDS` of each, of the processes that `watch` names; then `PARTY_FIELDS` of each party that had connections so
    far, as `PARTY/FIELD`, more of them as more come.  `last` has the connections' state.
    """

    def __init__(
        self,
        clock: Clock,
        procfs: Path,
        accounts: ConnectionAccounts | None = None,
        *,
        others: HostSockets | None = None,
        party_of: PartyOf = lambda _holder, observed, _ports: OBSERVED if observed else None,
    ) -> None:
        """Works in the network namespace of the thread that constructs it.

        `accounts` of one that was closed, in the same namespace: totals go on where its totals stood.  `others` finds
        processes that `watch` does not name; None: their connections are passed over.

        Raises:
            OSError: the kernel refuses a socket.
        """
        self._clock = clock
        self._owners = SocketOwners(procfs, clock)
        self._others = others
        self._party_of = party_of
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
        self._ends: NetlinkSocket | None = None
        try:
            self._ends = NetlinkSocket(DESTROYED_TCP_GROUPS, NETLINK_SOCK_DIAG)
            self._ends.set_room(_ENDS_BUFFER_BYTES)
        except OSError as error:
            _log.debug("the kernel does not tell of connections that end: %s", error)
        self._names: dict[int, str] = {}
        self._places: frozenset[bytes] = frozenset()
        """Local addresses that were asked for at the last read."""
        self._since_ns: dict[int, int] = {}
        """When connections were first listed of which it is not known yet whose they are, by cookie."""
        self.undecided: Mapping[str, tuple[int, int]] = {}
        """Bytes (sent, received) that these have carried, by device; replaced as a whole."""
        self._wanted: tuple[tuple[str, ...], frozenset[int]] = ((), frozenset())
        self._accounts = accounts if accounts is not None else ConnectionAccounts()
        self._ended = EndedConnections(NOBODYS)
        self.last: tuple[DeviceConnections, ...] = ()
        """Of the last read, replaced as a whole; one a device."""

    def close(self) -> None:
        self._route.close()
        self._diag.close()
        self._ports.close()
        if self._ends is not None:
            self._ends.close()
        if self._others is not None:
            self._others.forget(self)

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
        ended: FoundConnections | None = None
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
            # Before those that there are: one that ends in between is told of at the next read.
            told = self._read_ends()
            if places and (pids or self._others is not None):
                found, ends, unreadable = self._connections(names, places, pids, told)
                failed += unreadable
                ended = self._accounts.find_ended(ends.table, ends.parties, names, places)
        after_ns = self._clock.monotonic_ns()
        failed += self._accounts.add(devices, found, ended)
        if self._ends is None:
            self._accounts.count_lost_ends()
        self.last = self._accounts.last
        present = tuple(device for device in devices if device in ports)
        parties = self._accounts.parties
        rows = [
            [
                *self._accounts.totals(device),
                *ports[device],
                *(count for party in parties for count in self._accounts.totals_of_party(device, party)),
            ]
            for device in present
        ]
        fields = (*TCP_FIELDS, *(f"{party}/{field}" for party in parties for field in PARTY_FIELDS))
        values: Values = np.array(rows, dtype=np.uint64)
        return CounterReading(
            before_ns,
            after_ns,
            present,
            (0,) * len(present),
            fields,
            values.reshape(len(present), len(fields)),
            tuple(failed),
        )

    def _read_ends(self) -> TcpTable:
        """Connections that ended since the last read, as far as the kernel told."""
        if self._ends is None:
            return NO_SOCKETS
        told = []
        try:
            while (data := self._ends.receive_now()) is not None:
                told.append(data)
        except OSError as error:
            # More ended than there was room for: what each of them carried last is not known.
            _log.debug("ends of connections were lost: %s", error)
            self._accounts.count_lost_ends()
        return parse_table(told, DESTROYED_SOCKETS)

    def _port_counters(self, names: dict[int, str]) -> dict[str, list[int]]:
        """`PORT_FIELDS` of each device."""
        if names != self._names:
            self._ports.refresh()
            self._names = names
        reading = self._ports.read()
        values = reading.values[:, _COLUMNS].tolist()
        return {name: row for name, row in zip(reading.names, values, strict=True) if name in names.values()}

    def _connections(
        self, names: Mapping[int, str], places: Mapping[bytes, str], pids: frozenset[int], told: TcpTable
    ) -> tuple[FoundConnections | None, Ended, list[DeviceFailure]]:
        """Every connection of which it is known whose it is, None: there is none; those that ended; and what failed.

        `told`: what the kernel told of ends.
        """
        table = read_table(self._diag, list(places))
        if not self._places >= places.keys():
            self._accounts.begin(table)
        self._places = frozenset(places)
        rows = table.rows
        inodes: list[int] = rows["inode"].tolist()
        waiting = self._ended.sockets
        holders = self._owners.holders(pids, inodes)
        unreadable = self._owners.unreadable
        if unreadable and len(unreadable) == len(pids):
            raise PermissionError(errno.EACCES, unreadable[0].reason)
        failed = [DeviceFailure(f"process {process.pid}", process.reason) for process in unreadable]
        observed = frozenset(holders)
        unknown: dict[int, int] = {}
        if self._others is not None:
            carried = (rows["bytes_acked"] + rows["bytes_received"]) >= _MATTERS_BYTES
            users = zip(inodes, rows["user"].tolist(), carried.tolist(), strict=True)
            unknown = {inode: user for inode, user, matters in users if matters and inode and inode not in observed}
            held = self._others.holders(self, {**waiting, **unknown})
            # That nobody is found who holds one tells something only while it is open.
            holders |= {inode: one for inode, one in held.items() if one.pid is not None or inode in unknown}
        kernels = {inode for inode, holder in holders.items() if holder.pid is None}
        ends: dict[int, tuple[int, int]] = {}
        if kernels:
            ends = {
                inode: (here, there)
                for inode, (here, there) in zip(inodes, rows["ports"].tolist(), strict=True)
                if inode in kernels
            }
        by_holder: dict[tuple[Holder, bool, tuple[int, int]], Party | None] = {}
        parties: dict[int, Party] = {}
        for inode, holder in holders.items():
            key = holder, holder.pid in pids, ends.get(inode, (0, 0))
            if key not in by_holder:
                by_holder[key] = self._party_of(*key)
            if (party := by_holder[key]) is not None:
                parties[inode] = party
        ended = self._ended.take(told, self._accounts.has(told.rows["cookie"]), parties, self._clock.monotonic_ns())
        undecided: Sequence[int] = ()
        # A process that is being looked at again, as it has mapped something since, holds up no connection of before.
        asked = (holders.keys() | unknown.keys()) - parties.keys()
        if self._others is not None:
            undecided = self._wait_for(self._others, table, parties, asked, holders, names, places)
        self._ended.note(table, parties, undecided, self._clock.monotonic_ns())
        return self._accounts.find(table, parties, names, places, asked), ended, failed

    def _wait_for(
        self,
        others: HostSockets,
        table: TcpTable,
        parties: dict[int, Party],
        asked: Collection[int],
        held: Collection[int],
        names: Mapping[int, str],
        places: Mapping[bytes, str],
    ) -> list[int]:
        """Note what connections carry while it is not known whose they are, and give up on those that took too long.

        `asked`: inodes of which that is not known; `held`: those whose holders are known.  Returns the rows of `table`
        of which it was never known.
        """
        now_ns = self._clock.monotonic_ns()
        rows = table.rows
        since_ns: dict[int, int] = {}
        undecided: dict[str, tuple[int, int]] = {}
        unsettled = np.array([place for place, inode in enumerate(rows["inode"].tolist()) if inode in asked], np.int64)
        wanted = unsettled[~self._accounts.has(rows["cookie"][unsettled])].tolist()
        # Data may come in before a process has accepted a connection, which then is nobody's yet.
        waits = (rows["inode"] == 0) & (rows["state"] == _ESTABLISHED) & (rows["bytes_received"] >= _MATTERS_BYTES)
        unaccepted = waits.nonzero()[0]
        unaccepted = unaccepted[~self._accounts.has(rows["cookie"][unaccepted])].tolist()
        left = []

        def wait(row: np.void, address: bytes) -> None:
            device = names.get(int(row["interface"])) or places.get(address)
            if device is not None:
                sent, received = undecided.get(device, (0, 0))
                undecided[device] = sent + int(row["bytes_sent"]), received + int(row["bytes_received"])

        for place, address in zip(wanted, local_addresses(rows[wanted]), strict=True):
            cookie, inode = int(rows["cookie"][place]), int(rows["inode"][place])
            since_ns[cookie] = self._since_ns.get(cookie, now_ns)
            # Who holds it is known, and is going to be looked at; or was looked for, and not found.
            given_up = inode not in held and others.looked_for(inode)
            if now_ns - since_ns[cookie] >= (_PATIENCE_NS if given_up else _LONGEST_PATIENCE_NS):
                parties[inode] = NOBODYS
                continue
            left.append(place)
            wait(rows[place], address)
        for place, address in zip(unaccepted, local_addresses(rows[unaccepted]), strict=True):
            cookie = int(rows["cookie"][place])
            since_ns[cookie] = self._since_ns.get(cookie, now_ns)
            if now_ns - since_ns[cookie] < _LONGEST_PATIENCE_NS:
                wait(rows[place], address)
        held_back = self._ended.held
        for row, address in zip(held_back, local_addresses(held_back), strict=True):
            wait(row, address)
        self._since_ns, self.undecided = since_ns, undecided
        return left
