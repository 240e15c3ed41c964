"""Reports when a network device appears, disappears, is renamed, or gains or loses its carrier.

The kernel announces changes to the multicast group RTNLGRP_LINK, but merges quick ones and drops messages when a
listener is slow.  So a message is never the last word: after each batch the whole table is read again and compared,
`carrier_changes` counts the flaps that no message told of, and a device is never missed for want of a message.

The socket is our own because its descriptor must sit in the daemon's selector.  pyroute2 0.9.7's synchronous sockets
lose events when bound in one thread and read in another, and its asynchronous ones want an event loop.
"""

from __future__ import annotations

import enum
import errno
from dataclasses import dataclass
from typing import Final

from railscope.probes.netdev.links import (
    RTM_DELLINK,
    RTM_NEWLINK,
    RTNLGRP_LINK_MASK,
    Link,
    answer_bytes,
    parse_link,
    read_links,
)
from railscope.probes.netdev.netlink import MalformedNetlink, NetlinkSocket, messages

_BATCH_LIMIT: Final = 1024
"""Datagrams handled by one call; more stay for the next, so that a storm of events cannot hold the daemon."""


class LinkChange(enum.Enum):
    """What happened to a device."""

    ADDED = "added"
    REMOVED = "removed"
    RENAMED = "renamed"
    CARRIER = "carrier"
    """Gained or lost its carrier, perhaps several times: see `LinkEvent.flaps`; or its bond thinks so."""
    ADMIN = "admin"
    """Switched on or off."""
    OVERFLOW = "overflow"
    """The kernel dropped messages: read everything again."""


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """One change of one device; for OVERFLOW of the whole namespace, with an empty name."""

    netns: int
    change: LinkChange
    name: str
    index: int
    up: bool
    carrier: bool | None
    carrier_changes: int | None
    """Total since the device was made."""
    flaps: int
    """Changes of the carrier that this event stands for."""


class LinkEvents:
    """Changes in the network namespace of the thread that makes it; to be read by one thread, any one."""

    def __init__(self, netns: int, most_devices: int | None = None) -> None:
        """Devices that are there already make no event; `most_devices`: None, or how many are looked at, about.

        Raises:
            OSError: the kernel refuses a socket.
            AnswerTooLong: there are more devices.
            MalformedNetlink: its first answer is not netlink.
        """
        self._waiting: list[bytes] = []
        self._overflow = False
        self._announcements = NetlinkSocket(RTNLGRP_LINK_MASK)
        try:
            self._questions = NetlinkSocket(most_bytes=answer_bytes(most_devices))
        except OSError:
            self._announcements.close()
            raise
        try:
            self._table = LinkTable(netns, read_links(self._questions))
        except (OSError, MalformedNetlink):
            self.close()
            raise

    def fileno(self) -> int:
        """Readable when there is something to `read`."""
        return self._announcements.fileno()

    def close(self) -> None:
        self._announcements.close()
        self._questions.close()

    def postpone(self) -> None:
        """Take what has come out of the way without looking at it: the next `read` compares the whole table.

        Raises:
            OSError: the kernel does not answer.
        """
        for _ in range(_BATCH_LIMIT):
            try:
                if self._announcements.receive_now() is None:
                    return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
            self._overflow = True

    def read(self) -> list[LinkEvent]:
        """Every change since the last call, in order; never waits for one.

        Raises:
            AnswerTooLong: there are more devices than are looked at: close this.
            OSError, MalformedNetlink: the kernel does not answer; call again later, whatever `fileno` says: nothing
                is lost by it.
        """
        for _ in range(_BATCH_LIMIT - len(self._waiting)):
            try:
                data = self._announcements.receive_now()
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                self._overflow = True
                continue
            if data is None:
                break
            self._waiting.append(data)
        if not self._waiting and not self._overflow:
            return []
        events = self._table.changes(self._waiting, read_links(self._questions), overflow=self._overflow)
        self._waiting = []
        self._overflow = False
        return events


class LinkTable:
    """The devices last seen, and what messages and a fresh table make of them."""

    def __init__(self, netns: int, links: dict[int, Link]) -> None:
        self._netns = netns
        self._links = dict(links)
        self._early: set[int] = set()
        """Devices that a fresh table showed to be gone before the message that says so was read."""

    def changes(self, datagrams: list[bytes], fresh: dict[int, Link], *, overflow: bool = False) -> list[LinkEvent]:
        """Events from messages, then from what the messages did not tell.

        `fresh` was read after the last of the messages arrived.  A datagram that is cut short counts as an overflow.
        """
        events: list[LinkEvent] = []
        for data in datagrams:
            try:
                for kind, _flags, _sequence, payload in messages(data):
                    if kind in (RTM_NEWLINK, RTM_DELLINK) and (link := parse_link(payload)) is not None:
                        events += self._removed(link.index) if kind == RTM_DELLINK else self._announced(link)
            except MalformedNetlink:
                overflow = True
        for index in sorted(self._links.keys() - fresh.keys()):
            events += self._removed(index)
            self._early.add(index)
        for link in fresh.values():
            self._early.discard(link.index)
            events += self._seen(link)
        if overflow:
            self._early.clear()
            events.append(LinkEvent(self._netns, LinkChange.OVERFLOW, "", 0, False, None, None, 0))
        return events

    def _removed(self, index: int) -> list[LinkEvent]:
        link = self._links.pop(index, None)
        if link is None:
            self._early.discard(index)
            return []
        return [self._event(LinkChange.REMOVED, link, 0)]

    def _announced(self, link: Link) -> list[LinkEvent]:
        """A message may be older than the table read after the last batch: then it tells nothing new."""
        before = self._links.get(link.index)
        if link.index in self._early:
            return []
        if before is not None and (link.carrier_changes or 0) <= (before.carrier_changes or 0):
            return []  # a change of name or of the switch is taken from the fresh table, in its last state
        return self._seen(link)

    def _seen(self, link: Link) -> list[LinkEvent]:
        before = self._links.get(link.index)
        self._links[link.index] = link
        if before is None:
            return [self._event(LinkChange.ADDED, link, 0)]
        events: list[LinkEvent] = []
        if link.name != before.name:
            events.append(self._event(LinkChange.RENAMED, link, 0))
        if link.up != before.up:
            events.append(self._event(LinkChange.ADMIN, link, 0))
        flaps = (link.carrier_changes or 0) - (before.carrier_changes or 0)
        if link.carrier != before.carrier or link.bond_link != before.bond_link or flaps > 0:
            events.append(self._event(LinkChange.CARRIER, link, max(flaps, 0)))
        return events

    def _event(self, change: LinkChange, link: Link, flaps: int) -> LinkEvent:
        return LinkEvent(self._netns, change, link.name, link.index, link.up, link.carrier, link.carrier_changes, flaps)
