"""Whose TCP connections were that had ended before it was known whose they are.

The kernel tells what a connection carried until its end, and neither its inode nor its user (sock_diag's destroy
groups).  What tells all the same:

* The connection was listed while it was open, with its inode: who held that socket may come to be known yet.
* It was like others: two connections at least to the same service (address and port of one end), all of one party.
  The client that opens a connection for every object is listed with one of them now and then.

What neither tells is nobody's.  One that waits for an answer is held back, and not counted meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from railscope.probes.netdev.connection_accounts import Party
from railscope.probes.netdev.counters import Flags
from railscope.probes.netdev.tcp_info import NO_SOCKETS, Rows, TcpTable, local_addresses, remote_addresses
from railscope.probes.shares import FairMemory, Places, shared_out

PATIENCE_NS: Final = 4_000_000_000
"""For so long a connection is held back after its end."""
MOST_HELD: Final = 8_192
"""At a time, which users share; what ends beyond that is nobody's."""
MOST_SERVICES: Final = 4_096
"""Of more those are forgotten that were met longest ago, of the user with most of them."""
_LIKE: Final = 2
"""Connections that a service is known by."""

Service = tuple[bool, bytes, int]
"""Whether it is the remote end, its address and port."""


@dataclass(slots=True)
class _Seen:
    party: Party | None
    """None: of several."""
    connections: int


@dataclass(frozen=True, slots=True)
class _Listed:
    inode: int
    user: int
    until_ns: int
    """When it is forgotten, unless it is listed again."""


@dataclass(frozen=True, slots=True)
class _Held:
    row: Rows
    """A table of one."""
    inode: int
    user: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Connections that have ended, and whose each is."""

    table: TcpTable
    parties: tuple[Party, ...]


NONE_ENDED: Final = Ended(NO_SOCKETS, ())


class EndedConnections:
    """Not thread-safe: of one network namespace, asked at every reading of it."""

    def __init__(self, nobody: Party) -> None:
        self._nobody = nobody
        self._listed: dict[int, _Listed] = {}
        """By cookie, of which it is not known whose they are."""
        self._held: dict[int, _Held] = {}
        """By cookie."""
        self._places = Places[int](MOST_HELD)
        """For those, by user."""
        self._services = FairMemory[int, Service, _Seen](MOST_SERVICES)
        self._learned: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Cookies whose services are known."""

    @property
    def sockets(self) -> dict[int, int]:
        """Users by inode of those whose holders are still wanted, open ones included."""
        found = {one.inode: one.user for one in self._listed.values()}
        return found | {one.inode: one.user for one in self._held.values()}

    @property
    def held(self) -> Rows:
        """What is held back, as a table's rows."""
        return np.concatenate([one.row for one in self._held.values()]) if self._held else NO_SOCKETS.rows

    def take(self, told: TcpTable, counted: Flags, parties: Mapping[int, Party], now_ns: int) -> Ended:
        """Of those that ended since the last time, and those held back: all that are known now, or never will be.

        `told` is what the kernel tells of ends, `counted` which of its connections have an account, and `parties` those
        that are known now, by inode.
        """
        rows: list[Rows] = []
        whose: list[Party] = []
        for cookie, one in list(self._held.items()):
            party = parties.get(one.inode)
            if party is None and now_ns >= one.until_ns:
                (party,) = self._like(one.row)
            if party is not None:
                rows.append(one.row)
                whose.append(party)
                del self._held[cookie]
                self._places.leave(one.user)
        if len(told.rows):
            found = self._find(told, counted, parties, now_ns)
            rows.append(found.table.rows)
            whose += found.parties
        return Ended(TcpTable(np.concatenate(rows), {}), tuple(whose)) if rows else NONE_ENDED

    def _find(self, told: TcpTable, counted: Flags, parties: Mapping[int, Party], now_ns: int) -> Ended:
        everything = _whole(told.rows)
        left: Flags = np.ones(len(everything), np.bool_)
        left[list(told.untold)] = False
        whose = [self._nobody] * len(everything)
        unknown = (left & ~counted).nonzero()[0]
        like = self._like(everything[unknown])
        for place, other in zip(unknown.tolist(), like, strict=True):
            cookie = int(everything["cookie"][place])
            listed = self._listed.pop(cookie, None)
            inode = listed.inode if listed is not None else 0
            if (party := parties.get(inode)) is not None:
                whose[place] = party
            elif listed is not None and (cookie in self._held or self._places.take(listed.user)):
                row = everything[place : place + 1].copy()
                self._held[cookie] = _Held(row, inode, listed.user, now_ns + PATIENCE_NS)
                left[place] = False
            else:
                whose[place] = other
        kept = left.nonzero()[0].tolist()
        return Ended(TcpTable(everything[kept], {}), tuple(whose[place] for place in kept))

    def note(self, table: TcpTable, parties: Mapping[int, Party], undecided: Sequence[int], now_ns: int) -> None:
        """Remember what is open now; `undecided` are the rows of those whose holders were asked for."""
        rows = table.rows
        listed = {cookie: one for cookie, one in self._listed.items() if now_ns < one.until_ns}
        wanted = rows[list(undecided)]
        if len(wanted) > MOST_HELD:
            wanted = wanted[shared_out(wanted["user"], MOST_HELD)]
        for row in wanted:
            until_ns = now_ns + PATIENCE_NS
            listed[int(row["cookie"])] = _Listed(int(row["inode"]), int(row["user"]), until_ns)
        inodes = rows["inode"].tolist()
        known = [
            place
            for place in (~np.isin(rows["cookie"], self._learned)).nonzero()[0].tolist()
            if inodes[place] in parties
        ]
        if known:
            self._learn(rows[known], [parties[inodes[place]] for place in known])
            for cookie in rows["cookie"][known].tolist():
                listed.pop(cookie, None)
        self._listed = listed
        still = self._learned[np.isin(self._learned, rows["cookie"])]
        self._learned = np.concatenate([still, rows["cookie"][known]])

    def _learn(self, rows: Rows, parties: Sequence[Party]) -> None:
        for party, user, services in zip(parties, rows["user"].tolist(), _services(rows), strict=True):
            if party == self._nobody:
                continue
            for service in services:
                seen = self._services.pop(service) or _Seen(party, 0)
                seen.connections += 1
                if seen.party != party:
                    seen.party = None
                self._services.put(user, service, seen)

    def _like(self, rows: Rows) -> list[Party]:
        """Of each: whose others of the same service are; nobody's where that is not known."""
        found = []
        for services in _services(rows):
            known = (self._services.get(service) for service in services)
            seen = next((one for one in known if one is not None and one.connections >= _LIKE), None)
            found.append(seen.party if seen is not None and seen.party is not None else self._nobody)
        return found


def _services(rows: Rows) -> Iterator[tuple[Service, Service]]:
    """Of each: the remote end, and this one."""
    for (here, there), local, remote in zip(
        rows["ports"].tolist(), local_addresses(rows), remote_addresses(rows), strict=True
    ):
        yield (True, remote, there), (False, local, here)


def _whole(rows: Rows) -> Rows:
    """A copy, with every field of a table."""
    whole: Rows = np.zeros(len(rows), NO_SOCKETS.rows.dtype)
    for name in rows.dtype.names or ():
        whole[name] = rows[name]
    return whole
