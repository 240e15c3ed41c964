"""Adds up TCP connections by the device that they are on, and by whose they are.

Connections come and go: totals of a device begin at 0 and never fall.  They are columns throughout, of thousands
within a second; an object each would take most of what reading them costs.  Sums are of whole numbers, however large.

Whose a connection is may become known late, or change.  It is left out while nobody knows; what it carried meanwhile
is counted then.  While that is being found out anew, it stays whose it was.  Where the kernel tells of connections that
end (sock_diag's destroy groups), all that they carried is counted, also of one that came and went between two reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from railscope.probes.netdev.counters import DeviceFailure, Flags, Values
from railscope.probes.netdev.tcp_info import (
    APPLICATION_LIMITED,
    NO_SOCKETS,
    OPTION_TIMESTAMPS,
    Rows,
    TcpTable,
    local_addresses,
)
from railscope.probes.shares import shared_out

MAXIMUM_CONNECTIONS: Final = 8_192
"""In one network namespace; more are left out, of the users with most, and that is said."""
_MOST_LEFT: Final = 32_768
"""Connections that are remembered until the kernel tells of their end."""

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
that went without that the kernel told what they carried to their end."""
PARTY_FIELDS: Final = (
    *("tx_bytes", "rx_bytes", "retransmitted_bytes", "segments_sent", "segments_received"),
    *("header_bytes_sent", "header_bytes_received", "connection_changes"),
)
_PARTY_PLACES: Final = tuple(ACCOUNT_FIELDS.index(name) for name in PARTY_FIELDS)
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


class Party(NamedTuple):
    """Whose connections are added up apart."""

    name: str
    observed: bool
    """Of a process that is observed: these are summed up by device, whatever the name."""


OBSERVED: Final = Party("", True)


@dataclass(frozen=True, slots=True)
class FoundConnections:
    """Connections on the devices: arrays with one place for each."""

    rows: Rows
    """Of a `TcpTable`."""
    accounts: Numbers
    """As `ConnectionAccounts.account_number` tells them."""
    ipv4: Flags
    """Whether its packets are of IPv4."""
    untold: Mapping[int, ValueError]
    """By place, as in a `TcpTable`."""

    def select(self, places: Numbers) -> FoundConnections:
        """Those at these places."""
        untold = {new: self.untold[old] for new, old in enumerate(places.tolist()) if old in self.untold}
        return FoundConnections(self.rows[places], self.accounts[places], self.ipv4[places], untold)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What there was at a read."""

    cookies: Cookies
    """One a connection, no two the same."""
    counters: Values
    """_INFO_FIELDS by connections."""
    accounts: Numbers


def _counters_of(rows: Rows) -> Values:
    counters: Values = np.array([rows[name] for name in _INFO_FIELDS.values()], np.uint64)
    return counters


_NOTHING_SEEN: Final = _Seen(np.zeros(0, np.uint64), np.zeros((len(_INFO_FIELDS), 0), np.uint64), np.zeros(0, np.int64))


class ConnectionAccounts:
    """Adds up connections by device and party.

    A connection counts from when the table was first read, or from its own beginning, whichever is later, also where it
    comes to be known only later whose it is.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, Party], int] = {}
        self._totals: list[list[int]] = []
        """By an account's number."""
        self._seen = _NOTHING_SEEN
        self._left: dict[int, tuple[int, list[int]]] = {}
        """By cookie, of connections that are not listed any more, or not counted for want of room: their account, and
        what they had counted.  Those that left longest ago come first."""
        self._first: dict[int, list[int]] | None = None
        """By cookie, what connections had counted that were there when the table was read first; None: it was not."""
        self.last: tuple[DeviceConnections, ...] = ()

    def account_number(self, device: str, party: Party = OBSERVED) -> int:
        """What stands for a device and a party in `FoundConnections`, at every read."""
        number = self._numbers.setdefault((device, party), len(self._totals))
        if number == len(self._totals):
            self._totals.append([0] * len(ACCOUNT_FIELDS))
        return number

    def totals(self, device: str) -> list[int]:
        """`ACCOUNT_FIELDS` of the observed processes' connections on one device; never fall."""
        found = [self._totals[number] for (one, party), number in self._numbers.items() if one == device and party[1]]
        return [sum(column) for column in zip(*found, strict=True)] if found else [0] * len(ACCOUNT_FIELDS)

    @property
    def parties(self) -> tuple[str, ...]:
        """Names of those that connections were counted of so far, in the order in which they first were."""
        return tuple(dict.fromkeys(party.name for _device, party in self._numbers if party.name))

    def totals_of_party(self, device: str, name: str) -> list[int]:
        """`PARTY_FIELDS` of a party's connections on one device; never fall."""
        found = [
            self._totals[number]
            for (one, party), number in self._numbers.items()
            if (one, party.name) == (device, name)
        ]
        sums = [sum(column) for column in zip(*found, strict=True)] if found else [0] * len(ACCOUNT_FIELDS)
        return [sums[place] for place in _PARTY_PLACES]

    def begin(self, table: TcpTable) -> None:
        """These connections, if they are new, carried something before anything was counted of their devices."""
        known = {*self._seen.cookies.tolist(), *self._left}
        first = self._first or {}
        for cookie, counters in zip(table.rows["cookie"].tolist(), _counters_of(table.rows).T.tolist(), strict=True):
            if cookie not in known:
                first.setdefault(cookie, counters)
        self._first = first

    def find(
        self,
        table: TcpTable,
        parties: Mapping[int, Party],
        names: Mapping[int, str],
        places: Mapping[bytes, str],
        asked: Collection[int] = (),
    ) -> FoundConnections | None:
        """The connections on devices of which it is known whose they are, for `add`; None: there is none.

        `parties` by inode; a connection that its process has closed is whose it was.  `names` are those of the devices
        by number, `places` by local address.  `asked` are inodes of connections of which it is being found out whose
        they are: until then each is whose it was, too.
        """
        inodes = table.rows["inode"].tolist()
        known: dict[Party, int] = {party: number for number, party in enumerate(dict.fromkeys(parties.values()))}
        by_inode = {inode: known[party] for inode, party in parties.items()}
        whose = np.fromiter(map(by_inode.get, inodes, repeat(_NOWHERE)), np.int64, len(inodes))
        addresses = local_addresses(table.rows)
        devices = {name: number for number, name in enumerate(dict.fromkeys((*places.values(), *names.values())))}
        numbers = {address: devices[name] for address, name in places.items()}
        where = np.fromiter(map(numbers.get, addresses, repeat(_NOWHERE)), np.int64, len(addresses))
        interfaces = table.rows["interface"]
        for row in interfaces.nonzero()[0].tolist():
            if (name := names.get(int(interfaces[row]))) is not None:
                where[row] = devices[name]
        accounts: Numbers = np.full(len(inodes), _NOWHERE, np.int64)
        pairs = where * max(1, len(known)) + whose
        here = (where != _NOWHERE) & (whose != _NOWHERE)
        listed_devices, listed_parties = list(devices), list(known)
        for pair in set(pairs[here].tolist()):
            device, party = divmod(pair, len(known))
            number = self.account_number(listed_devices[device], listed_parties[party])
            accounts[here & (pairs == pair)] = number
        kept = table.rows["inode"] == 0
        if asked:
            kept |= np.fromiter(map(asked.__contains__, inodes), np.bool_, len(inodes))
        kept &= (where != _NOWHERE) & (accounts == _NOWHERE)
        if kept.any():
            self._keep(table, kept.nonzero()[0], accounts)
        wanted = accounts != _NOWHERE
        if not wanted.any():
            return None
        ipv4 = np.fromiter(map(len, addresses), np.int64, len(addresses)) == _IPV4_ADDRESS_BYTES
        everything = FoundConnections(table.rows, accounts, ipv4, table.untold)
        return everything if wanted.all() else everything.select(wanted.nonzero()[0])

    def has(self, cookies: Cookies) -> Flags:
        """Which of these connections an account is known of."""
        found: Flags = np.isin(cookies, self._seen.cookies)
        for place in (~found).nonzero()[0].tolist():
            found[place] = int(cookies[place]) in self._left
        return found

    def find_ended(
        self, table: TcpTable, parties: Sequence[Party], names: Mapping[int, str], places: Mapping[bytes, str]
    ) -> FoundConnections | None:
        """Connections that the kernel told of at their end, for `add`; None: there is none.

        Each is its party's where no account of it is known, and nobody's where it was on none of the devices.
        """
        if not len(table.rows):
            return None
        addresses = local_addresses(table.rows)
        accounts: Numbers = np.full(len(addresses), _NOWHERE, np.int64)
        interfaces = table.rows["interface"].tolist()
        for place, (address, interface, party) in enumerate(zip(addresses, interfaces, parties, strict=True)):
            if (name := names.get(interface) or places.get(address)) is not None:
                accounts[place] = self.account_number(name, party)
        ipv4 = np.fromiter(map(len, addresses), np.int64, len(addresses)) == _IPV4_ADDRESS_BYTES
        return FoundConnections(table.rows, accounts, ipv4, table.untold)

    def _keep(self, table: TcpTable, places: Numbers, accounts: Numbers) -> None:
        """Set the accounts of these connections to those that they had."""
        seen = dict(zip(self._seen.cookies.tolist(), self._seen.accounts.tolist(), strict=True))
        cookies = table.rows["cookie"][places].tolist()
        for place, cookie in zip(places.tolist(), cookies, strict=True):
            accounts[place] = self._left[cookie][0] if cookie in self._left else seen.get(cookie, _NOWHERE)

    def add(
        self, devices: Sequence[str], found: FoundConnections | None, ended: FoundConnections | None = None
    ) -> list[DeviceFailure]:
        """Add every current connection, None: there is none; returns failures.

        `ended` are those that the kernel told of at their end, with the accounts that they get if nothing else is
        known: nothing of what these carried is lost.
        """
        failed: list[DeviceFailure] = []
        if self._first is None:
            self.begin(TcpTable(found.rows, found.untold) if found is not None else NO_SOCKETS)
        if found is not None:
            found = self._drop_incomplete(found, failed)
        fares: dict[int, tuple[list[int], int]] = {}
        if found is not None and len(found.rows):
            fares = self._add(found)
        else:
            self._leave(self._seen, np.arange(len(self._seen.cookies)))
            self._seen = _NOTHING_SEEN
        if ended is not None:
            self._end(ended)
        self.last = tuple(self._fare_of(device, fares) for device in dict.fromkeys(devices))
        return list(dict.fromkeys(failed))

    def count_lost_ends(self) -> None:
        """The kernel does not tell, or had to drop, how connections ended: what is gone counts as changes."""
        for account, _counters in self._left.values():
            self._totals[account][_CHANGES] += 1
        self._left.clear()

    def _fare_of(self, device: str, fares: Mapping[int, tuple[list[int], int]]) -> DeviceConnections:
        own = [number for (one, party), number in self._numbers.items() if one == device and party.observed]
        found = [fares[number] for number in own if number in fares]
        if not found:
            return _fare(device, *_NO_FARE)
        return _fare(
            device,
            [sum(column) for column in zip(*(sums for sums, _ in found), strict=True)],
            max(one[1] for one in found),
        )

    def _drop_incomplete(self, found: FoundConnections, failed: list[DeviceFailure]) -> FoundConnections:
        """Drop connections above the limit, and those that the kernel described incompletely."""
        if len(found.rows) > MAXIMUM_CONNECTIONS:
            left_out = len(found.rows) - MAXIMUM_CONNECTIONS
            failed.append(DeviceFailure("connections", f"{left_out} beyond {MAXIMUM_CONNECTIONS} are not counted"))
            found = found.select(shared_out(found.rows["user"], MAXIMUM_CONNECTIONS))
        if not found.untold:
            return found
        names = {number: device for (device, _party), number in self._numbers.items()}
        told: set[int] = set()
        places = []
        for place, cookie in enumerate(found.rows["cookie"].tolist()):
            error = found.untold.get(place)
            if error is None:
                told.add(cookie)
                places.append(place)
            elif cookie not in told:  # listed a second time, it is known already
                failed.append(DeviceFailure(names[int(found.accounts[place])], str(error)))
        return found.select(np.array(places, np.int64))

    def _add(self, found: FoundConnections) -> dict[int, tuple[list[int], int]]:
        """Count on; returns the sums of _FARE_FIELDS and the largest round-trip time by account."""
        cookies = found.rows["cookie"].copy()
        known = self._seen.cookies
        alike = len(cookies) == len(known) and bool((cookies == known).all())  # as a rule, and in the same order
        if not alike:
            first = np.unique(cookies, return_index=True)[1]
            if len(first) < len(cookies):  # the kernel lists anew where its table changed meanwhile
                first.sort()
                found, cookies = found.select(first), cookies[first]
        counters = _counters_of(found.rows)
        before = self._seen.counters if alike else self._before(cookies, counters)
        self._seen = _Seen(cookies, counters, found.accounts)
        more = _growth(before, counters)
        order = found.accounts.argsort(kind="stable")
        numbers = found.accounts[order]
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

    def _before(self, cookies: Cookies, counters: Values) -> Values:
        """What each connection is counted on from; those that went are remembered."""
        seen = self._seen
        _both, old, new = np.intersect1d(seen.cookies, cookies, assume_unique=True, return_indices=True)
        before: Values = np.zeros_like(counters)
        before[:, new] = seen.counters[:, old]
        first = self._first or {}
        came = np.delete(np.arange(len(cookies)), new)
        for place, cookie in zip(came.tolist(), cookies[came].tolist(), strict=True):
            if (left := self._left.pop(cookie, None)) is not None:
                before[:, place] = left[1]
            elif (counted := first.pop(cookie, None)) is not None:
                before[:, place] = counted
        self._leave(seen, np.delete(np.arange(len(seen.cookies)), old))
        return before

    def _leave(self, seen: _Seen, places: Numbers) -> None:
        """Remember connections that were seen and are not any more, as far as there is room."""
        for cookie, account, counters in zip(
            seen.cookies[places].tolist(),
            seen.accounts[places].tolist(),
            seen.counters[:, places].T.tolist(),
            strict=True,
        ):
            self._left[cookie] = account, counters
        while len(self._left) > _MOST_LEFT:
            account, _counters = self._left.pop(next(iter(self._left)))
            self._totals[account][_CHANGES] += 1

    def _end(self, ended: FoundConnections) -> None:
        """Count what connections carried until their end."""
        rows, first = ended.rows, self._first or {}
        header_bytes = _header_bytes(ended).tolist()
        counters = _counters_of(rows)
        for place, cookie in enumerate(rows["cookie"].tolist()):
            if place in ended.untold:
                continue
            account, before = self._left.pop(cookie, (int(ended.accounts[place]), None))
            if before is None:
                before = first.pop(cookie, [0] * len(_INFO_FIELDS))
                self._miss(account)
            if account == _NOWHERE:
                continue
            more = _growth(np.array([before], np.uint64).T, counters[:, place : place + 1])[:, 0].tolist()
            more += [segments * header_bytes[place] for segments in more[_SEGMENTS]]
            totals = self._totals[account]
            for column, value in enumerate(more):
                totals[column] += value

    def _miss(self, account: int) -> None:
        """A connection ended before it was known whose it is: it may have been an observed process's."""
        device = next((device for (device, _), number in self._numbers.items() if number == account), None)
        for (one, party), number in self._numbers.items():
            if one == device and party.observed:
                self._totals[number][_CHANGES] += 1


def _growth(before: Values, now: Values) -> Values:
    """What _INFO_FIELDS grew by."""
    grown: Values = np.where(_WRAPS | (now > before), (now - before) & _MASKS, _NO_BYTES)
    return grown


def _header_bytes(found: FoundConnections) -> Values:
    """Of one packet of each connection."""
    header_bytes: Values = np.where(found.ipv4, _IPV4_HEADERS_BYTES, _IPV6_HEADERS_BYTES)
    header_bytes += np.where(found.rows["options"] & OPTION_TIMESTAMPS, _TIMESTAMPS_BYTES, _NO_BYTES)
    return header_bytes


def _parts(found: FoundConnections, more: Values) -> Values:
    """What each connection adds to ACCOUNT_FIELDS but the last, and to _FARE_FIELDS."""
    rows = found.rows
    header_bytes = _header_bytes(found)
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
