"""Which clients have a place among the connections, and which one gives it up for a newcomer.

A client that holds a place without need gives it up first: one that has gone, a request that is not complete (half-open
heads, handshakes), a client that does not take its answer, a wrong password whose answer is kept back, and clients
between two requests, strangers before those with a password.  Of each kind it is the one that has been so for longest.
A complete request that waits for its answer never gives up its place.

An eighth of the places is kept for clients that have shown a password or a certificate, another one for the loopback:
however many connect from elsewhere, the node's own tools and a scrape that has authenticated once stay served.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from enum import Enum, IntEnum, auto
from typing import Final, Generic, TypeVar

_RESERVED: Final = 8
"""One place in so many is reserved, for each of the two."""
_OLD_SECONDS: Final = 1.0
"""A request that has taken longer to arrive is one that does not mean to."""
_STUCK_SECONDS: Final = 0.25
"""So long no byte of an answer was taken."""


class Origin(Enum):
    """Who is at the other end, as far as that gives a right to a place."""

    LOOPBACK = auto()
    REMOTE = auto()
    AUTHENTICATED = auto()
    """By a password or a certificate, from anywhere."""


class Use(IntEnum):
    """What a place is used for."""

    GONE = auto()
    """By a client that has closed its end, or was told to."""
    HALF_OPEN = auto()
    SENDING = auto()
    REFUSED = auto()
    """A wrong password, whose answer is kept back."""
    IDLE = auto()
    """Between two requests."""
    HELD = auto()
    """By a complete request that waits for its answer, or an answer that waits for its turn to be sent."""


C = TypeVar("C")
_Line = OrderedDict[C, float]


class ConnectionTable(Generic[C]):
    """Places, bounded.  `C` is a connection, compared by identity and hash; times are of one monotonic clock."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._reserved = places // _RESERVED
        self._lines: dict[tuple[Use, Origin], _Line[C]] = {
            (use, origin): OrderedDict() for use in Use for origin in Origin
        }
        self._where: dict[C, tuple[Use, Origin]] = {}
        self._counts = dict.fromkeys(Origin, 0)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, connection: C) -> bool:
        return connection in self._where

    def put(self, connection: C, use: Use, origin: Origin, since: float) -> None:
        """It has a place, and uses it so since then; `since` is not before that of others with the same use."""
        self.remove(connection)
        self._where[connection] = use, origin
        self._lines[use, origin][connection] = since
        self._counts[origin] += 1

    def remove(self, connection: C) -> None:
        """It has no place any more, if it had one."""
        where = self._where.pop(connection, None)
        if where is not None:
            del self._lines[where][connection]
            self._counts[where[1]] -= 1

    def use_of(self, connection: C) -> Use:
        """What a connection in the table uses its place for."""
        return self._where[connection][0]

    def has_room(self, origin: Origin) -> bool:
        """Whether one more of this origin has a place without taking another's."""
        return len(self) < self._places and (origin is Origin.AUTHENTICATED or self._crowd_before(origin) is None)

    def replaceable(self, origin: Origin, now: float) -> C | None:
        """The connection that gives up its place for one of this origin; None: all are kept."""
        among = self._crowd_before(origin) or tuple(Origin)
        half_open = self._oldest(Use.HALF_OPEN, among)
        sending = self._oldest(Use.SENDING, among)
        gone = self._oldest(Use.GONE, among)
        if gone is not None:
            return gone[1]
        if half_open is not None and half_open[0] <= now - _OLD_SECONDS:
            return half_open[1]
        if sending is not None and sending[0] <= now - _STUCK_SECONDS:
            return sending[1]
        busy = [one for one in (half_open, sending) if one is not None]
        if busy:
            return min(busy, key=lambda one: one[0])[1]
        strangers = [origin for origin in among if origin is not Origin.AUTHENTICATED]
        for use, whose in ((Use.REFUSED, among), (Use.IDLE, strangers), (Use.IDLE, among)):
            found = self._oldest(use, whose)
            if found is not None:
                return found[1]
        return None

    def longest_unread(self) -> C | None:
        """Of those that an answer is being sent to, the one that has taken no byte for longest."""
        found = self._oldest(Use.SENDING, tuple(Origin))
        return found[1] if found is not None else None

    def _crowd_before(self, origin: Origin) -> tuple[Origin, ...] | None:
        """Those who share a bound that is reached and that one more of this origin would pass; None: no such bound."""
        if origin is Origin.AUTHENTICATED:
            return None
        if origin is Origin.REMOTE and self._counts[origin] >= self._places - 2 * self._reserved:
            return (Origin.REMOTE,)
        strangers = (Origin.LOOPBACK, Origin.REMOTE)
        return strangers if sum(self._counts[one] for one in strangers) >= self._places - self._reserved else None

    def _oldest(self, use: Use, among: Collection[Origin]) -> tuple[float, C] | None:
        heads = []
        for origin in among:
            line = self._lines[use, origin]
            if line:
                connection = next(iter(line))
                heads.append((line[connection], connection))
        return min(heads, key=lambda head: head[0], default=None)
