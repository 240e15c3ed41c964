"""Adds up TCP connections by the device that they are on.

Connections come and go: totals of a device begin at 0 and never fall.  They are columns throughout, of thousands
within a second; an object each would take most of what reading them costs.  Sums are of whole numbers, however large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from railscope.probes.netdev.counters import DeviceFailure, Flags, Values
from railscope.probes.netdev.tcp_info import APPLICATION_LIMITED, OPTION_TIMESTAMPS, Rows, TcpTable, local_addresses

MAXIMUM_CONNECTIONS: Final = 2_048
"""Of the processes, in one network namespace; more are left out, and that is said."""

_INFO_FIELDS: Final = {
    "tx_bytes": "bytes_sent",
    "rx_bytes": "bytes_received",
    "acked_bytes": "bytes_acked",
    "retransmitted_bytes": "retransmitted_bytes",
    "retransmitted_segments": "retransmitted_segments",
    "data_segments": "data_segments_sent",
    "busy_us": "busy_us",
    "receive_window_limited_us": "receive_window_limited_us",
    "send_buffer_limited_us": "send_buffer_limited_us",
    "segments_sent": "segments_sent",
    "segments_received": "segments_received",
}
"""What is added up, and what a `TcpTable` calls it."""
ACCOUNT_FIELDS: Final = (*_INFO_FIELDS, "header_bytes_sent", "header_bytes_received", "connection_changes")
"""Headers are counted as if every segment were a packet of its own, Ethernet's included; changes are connections
that came or went."""
_SEGMENTS: Final = slice(ACCOUNT_FIELDS.index("segments_sent"), ACCOUNT_FIELDS.index("segments_received") + 1)
_HEADERS: Final = slice(ACCOUNT_FIELDS.index("header_bytes_sent"), ACCOUNT_FIELDS.index("header_bytes_received") + 1)
_CHANGES: Final = ACCOUNT_FIELDS.index("connection_changes")
_WRAPS: Final = np.array([["segments" in name] for name in _INFO_FIELDS.values()])
"""Segments begin again at 2^32.  Whatever else falls has not grown."""
_HALF_BITS: Final = np.uint64(32)
_HALF: Final = np.uint64(0xFFFFFFFF)
_MASKS: Final = np.where(_WRAPS, _HALF, ~np.uint64(0))
_IPV4_HEADERS_BYTES: Final = np.uint64(14 + 20 + 20)
"""Ethernet, IP, TCP."""
_IPV6_HEADERS_BYTES: Final = np.uint64(14 + 40 + 20)
_TIMESTAMPS_BYTES: Final = np.uint64(12)
_NO_BYTES: Final = np.uint64(0)
_IPV4_ADDRESS_BYTES: Final = 4
_NOWHERE: Final = -1
_RECENT_MS: Final = 1_000

_FARE_FIELDS: Final = (
    "connections",
    "sending",
    "timed",
    "round_trips_us",
    "deviations_us",
    "rated",
    "delivery_rates",
    "application_limited",
    "unacknowledged_segments",
    "not_sent_bytes",
)
"""Sums that `DeviceConnections` are made of; they stand behind those of ACCOUNT_FIELDS but the last."""
_ROUND_TRIPS: Final = _CHANGES + _FARE_FIELDS.index("round_trips_us")
_NO_FARE: Final = ([0] * len(_FARE_FIELDS), 0)

Numbers = npt.NDArray[np.int64]
Cookies = npt.NDArray[np.uint64]


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


@dataclass(frozen=True, slots=True)
class FoundConnections:
    """Connections of the processes on the devices: arrays with one place for each."""

    rows: Rows
    """Of a `TcpTable`."""
    devices: Numbers
    """As `ConnectionAccounts.device_number` tells them."""
    ipv4: Flags
    """Whether its packets are of IPv4."""
    pids: Mapping[int, int]
    """Of their owners, by inode."""
    untold: Mapping[int, ValueError]
    """By place, as in a `TcpTable`."""

    def select(self, places: Numbers) -> FoundConnections:
        """Those at these places."""
        untold = {new: self.untold[old] for new, old in enumerate(places.tolist()) if old in self.untold}
        return FoundConnections(self.rows[places], self.devices[places], self.ipv4[places], self.pids, untold)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What there was at a read."""

    cookies: Cookies
    """One a connection, no two the same."""
    counters: Values
    """_INFO_FIELDS by connections."""
    devices: Numbers


_NOTHING_SEEN: Final = _Seen(np.zeros(0, np.uint64), np.zeros((len(_INFO_FIELDS), 0), np.uint64), np.zeros(0, np.int64))


class ConnectionAccounts:
    """Adds up connections by device."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._totals: list[list[int]] = []
        """By a device's number."""
        self._seen = _NOTHING_SEEN
        self._pids: frozenset[int] = frozenset()
        self.last: tuple[DeviceConnections, ...] = ()

    def device_number(self, device: str) -> int:
        """What stands for a device in `FoundConnections`, at every read."""
        number = self._numbers.setdefault(device, len(self._totals))
        if number == len(self._totals):
            self._totals.append([0] * len(ACCOUNT_FIELDS))
        return number

    def totals(self, device: str) -> list[int]:
        """`ACCOUNT_FIELDS` of one device; never fall."""
        return list(self._totals[self.device_number(device)])

    def find(
        self, table: TcpTable, owners: Mapping[int, int], names: Mapping[int, str], places: Mapping[bytes, str]
    ) -> FoundConnections | None:
        """The connections of processes on devices, for `add`; None: there is none.

        `owners` are the processes' pids by inode, `names` those of the devices by number, `places` by local address.
        """
        if not owners:
            return None
        inodes = table.rows["inode"].tolist()
        addresses = local_addresses(table.rows)
        numbers = {address: self.device_number(name) for address, name in places.items()}
        devices = np.fromiter(map(numbers.get, addresses, repeat(_NOWHERE)), np.int64, len(addresses))
        interfaces = table.rows["interface"]
        for row in interfaces.nonzero()[0].tolist():
            if (name := names.get(int(interfaces[row]))) is not None:
                devices[row] = self.device_number(name)
        ipv4 = np.fromiter(map(len, addresses), np.int64, len(addresses)) == _IPV4_ADDRESS_BYTES
        everything = FoundConnections(table.rows, devices, ipv4, owners, table.untold)
        wanted = np.fromiter(map(owners.__contains__, inodes), np.bool_, len(inodes)) & (devices != _NOWHERE)
        return everything if wanted.all() else everything.select(wanted.nonzero()[0])

    def add(self, devices: Sequence[str], pids: frozenset[int], found: FoundConnections | None) -> list[DeviceFailure]:
        """Add every current connection, None: there is none; returns failures."""
        failed: list[DeviceFailure] = []
        if found is not None:
            found = self._drop_incomplete(found, failed)
        fares: dict[int, tuple[list[int], int]] = {}
        if found is not None and len(found.rows):
            fares = self._add(found)
        else:
            self._change(self._seen.devices)
            self._seen = _NOTHING_SEEN
        self._pids = pids
        self.last = tuple(
            _fare(device, *fares.get(self.device_number(device), _NO_FARE)) for device in dict.fromkeys(devices)
        )
        return list(dict.fromkeys(failed))

    def _drop_incomplete(self, found: FoundConnections, failed: list[DeviceFailure]) -> FoundConnections:
        """Drop connections above the limit, and those that the kernel described incompletely."""
        if len(found.rows) > MAXIMUM_CONNECTIONS:
            left_out = len(found.rows) - MAXIMUM_CONNECTIONS
            failed.append(DeviceFailure("connections", f"{left_out} beyond {MAXIMUM_CONNECTIONS} are not counted"))
            found = found.select(np.arange(MAXIMUM_CONNECTIONS))
        if not found.untold:
            return found
        names = list(self._numbers)
        told: set[int] = set()
        places = []
        for place, cookie in enumerate(found.rows["cookie"].tolist()):
            error = found.untold.get(place)
            if error is None:
                told.add(cookie)
                places.append(place)
            elif cookie not in told:  # listed a second time, it is known already
                failed.append(DeviceFailure(names[found.devices[place]], str(error)))
        return found.select(np.array(places, np.int64))

    def _add(self, found: FoundConnections) -> dict[int, tuple[list[int], int]]:
        """Count on; returns the sums of _FARE_FIELDS and the largest round-trip time by device."""
        cookies = found.rows["cookie"].copy()
        known = self._seen.cookies
        alike = len(cookies) == len(known) and bool((cookies == known).all())  # as a rule, and in the same order
        if not alike:
            first = np.unique(cookies, return_index=True)[1]
            if len(first) < len(cookies):  # the kernel lists anew where its table changed meanwhile
                first.sort()
                found, cookies = found.select(first), cookies[first]
        counters: Values = np.array([found.rows[name] for name in _INFO_FIELDS.values()], np.uint64)
        before = self._seen.counters if alike else self._before(found, cookies, counters)
        self._seen = _Seen(cookies, counters, found.devices)
        more = np.where(_WRAPS | (counters > before), (counters - before) & _MASKS, _NO_BYTES)
        order = found.devices.argsort(kind="stable")
        numbers = found.devices[order]
        starts = [0, *((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist()]
        parts = _parts(found, more)[:, order]
        # Halves, as whole ones could exceed 64 bits.
        low = np.add.reduceat(parts & _HALF, starts, axis=1).T.tolist()
        high = np.add.reduceat(parts >> _HALF_BITS, starts, axis=1).T.tolist()
        maxima = np.maximum.reduceat(parts[_ROUND_TRIPS], starts).tolist()
        fares = {}
        for row, number in enumerate(numbers[starts].tolist()):
            sums = [below + (above << 32) for below, above in zip(low[row], high[row], strict=True)]
            totals = self._totals[number]
            for column in range(_CHANGES):
                totals[column] += sums[column]
            fares[number] = sums[_CHANGES:], maxima[row]
        return fares

    def _before(self, found: FoundConnections, cookies: Cookies, counters: Values) -> Values:
        """What each connection is counted on from; those that came or went are counted."""
        seen = self._seen
        _both, old, new = np.intersect1d(seen.cookies, cookies, assume_unique=True, return_indices=True)
        came = np.delete(np.arange(len(cookies)), new)
        self._change(np.delete(seen.devices, old))
        self._change(found.devices[came])
        before = counters.copy()
        before[:, new] = seen.counters[:, old]
        inodes = found.rows["inode"][came].tolist()
        opened = [place for place, inode in zip(came.tolist(), inodes, strict=True) if found.pids[inode] in self._pids]
        before[:, opened] = 0  # since the last read
        return before

    def _change(self, devices: Numbers) -> None:
        for number in devices.tolist():
            self._totals[number][_CHANGES] += 1


def _parts(found: FoundConnections, more: Values) -> Values:
    """What each connection adds to ACCOUNT_FIELDS but the last, and to _FARE_FIELDS."""
    rows = found.rows
    header_bytes = np.where(found.ipv4, _IPV4_HEADERS_BYTES, _IPV6_HEADERS_BYTES)
    header_bytes += np.where(rows["options"] & OPTION_TIMESTAMPS, _TIMESTAMPS_BYTES, _NO_BYTES)
    unacknowledged, not_sent = rows["unacknowledged_segments"], rows["not_sent_bytes"]
    times, rates = rows["round_trip_us"], rows["delivery_rate_bytes_per_second"]
    sends = (unacknowledged | not_sent) != 0
    sends |= (rows["data_segments_sent"] != 0) & (rows["last_sent_ms"] <= _RECENT_MS)
    timed = sends & (times != 0)
    rated = sends & (rates != 0)
    parts: Values = np.empty((_CHANGES + len(_FARE_FIELDS), len(rows)), np.uint64)
    parts[: len(more)] = more
    np.multiply(more[_SEGMENTS], header_bytes, out=parts[_HEADERS])
    fares = (
        1,
        sends,
        timed,
        times * timed,
        rows["round_trip_deviation_us"] * timed,
        rated,
        rates * rated,
        rated & ((rows["flags"] & APPLICATION_LIMITED) != 0),
        unacknowledged,
        not_sent,
    )
    for place, values in enumerate(fares, _CHANGES):
        parts[place] = values
    return parts


def _fare(device: str, sums: Sequence[int], round_trip_maximum_us: int) -> DeviceConnections:
    connections, sending, timed, times, deviations, rated, rates, limited, unacknowledged, not_sent = sums
    return DeviceConnections(
        device=device,
        connections=connections,
        sending=sending,
        round_trip_mean_us=times / timed if timed else None,
        round_trip_maximum_us=round_trip_maximum_us if timed else None,
        round_trip_deviation_us=deviations / timed if timed else None,
        delivery_rate_bytes_per_second=rates if rated else None,
        application_limited=limited,
        unacknowledged_segments=unacknowledged,
        not_sent_bytes=not_sent,
    )
