"""One client's connection: what arrived of its next request, and what is still to be sent of its answer.

It moves bytes and knows its phase; which connections there may be, and for how long, others decide
(connection_table.py, event_loop.py).  It reads nothing while a request is under way, so it never keeps more than a
head's worth of what a client sends ahead.
"""

from __future__ import annotations

import math
import re
import select
from enum import Enum, auto
from typing import Final

from railscope.exporters.web.connection_table import Origin
from railscope.exporters.web.http_request import without_empty_lines
from railscope.exporters.web.replies import MAX_HEAD_BYTES, Reply
from railscope.exporters.web.transport import Transport
from railscope.exporters.web.unsent import Body

_END_OF_HEAD: Final = re.compile(rb"\r?\n\r?\n")
_LONGEST_END_BYTES: Final = 4
_SEND_BYTES: Final = 256 * 1024
_JOINED_BYTES: Final = 4 * 1024
"""So much of a body is copied behind its head, so that both leave together; each connection keeps its copy."""
_DRAIN_AT_ONCE_BYTES: Final = 64 * 1024
_DRAIN_BYTES: Final = 8 * 1024 * 1024


class Phase(Enum):
    HANDSHAKE = auto()
    """TLS is being agreed on."""
    ASKING = auto()
    """A request is awaited, or has come in part."""
    CHECKING = auto()
    """The request's password is being checked."""
    WAITING = auto()
    """The page is being rendered."""
    REFUSED = auto()
    """The password was wrong; the answer is kept back."""
    SENDING = auto()
    DRAINING = auto()
    """All was said; what the client still sends is thrown away, for closing on it would take the answer back."""
    CLOSED = auto()


class ClientGoneError(OSError):
    """The client has closed the connection."""


class Connection:
    """Methods that move bytes never wait, and raise OSError where the client has closed or broken the connection."""

    def __init__(self, transport: Transport, peer: str, origin: Origin, accepted: float) -> None:
        self.transport = transport
        self.peer = peer
        """Its address."""
        self.origin = origin
        self.accepted = accepted
        self.phase = Phase.HANDSHAKE
        self.deadline = math.inf
        """When its phase has lasted too long, in seconds of the monotonic clock."""
        self.half_closed = False
        """The client sends no more, and maybe is not there any more."""
        self.in_doorway = False
        """It has no place in the table."""
        self.served = False
        """It had an answer."""
        self.asked = accepted
        """When its request was complete."""
        self.reply: Reply | None = None
        """To the request that is under way."""
        self.body: Body | None = None
        """The body of the answer under way, where it is shared."""
        self.closing = False
        """The connection ends with the answer under way."""
        self.handshake_begun = False
        """Its handshake had a turn."""
        self.handshake_due = False
        """Its handshake goes on when it has its turn."""
        self.send_due = False
        """Its answer goes on when it has its turn."""
        self.mask = 0
        """What is watched for, of select.EPOLL*."""
        self._arrived = b""
        self._searched_bytes = 0
        self._empty_bytes = 0
        self._unsent = memoryview(b"")
        self._rest = memoryview(b"")
        self._left_to_drain = _DRAIN_BYTES

    @property
    def begun(self) -> bool:
        """Whether a part of the next request is here."""
        return bool(self._arrived)

    @property
    def idle(self) -> bool:
        """Whether it waits for a request of which nothing has come."""
        return self.phase is Phase.ASKING and not self._arrived

    @property
    def wanted_mask(self) -> int:
        """What to watch for in this phase."""
        if self.phase in (Phase.CHECKING, Phase.WAITING, Phase.REFUSED):
            return 0 if self.half_closed else select.EPOLLRDHUP
        if self.handshake_due:
            return 0
        return self.transport.blocked_on

    def ask_again(self) -> None:
        """An answer was sent, or TLS agreed on: a request is awaited."""
        self.phase = Phase.ASKING
        self.reply = None
        self.transport.blocked_on = select.EPOLLIN

    @property
    def more_is_here(self) -> bool:
        """Whether bytes of the next request are here that no poll will announce."""
        return bool(self._arrived) or self.transport.pending

    def receive_head(self) -> bytes | None:
        """The next request's head, up to its empty line; None: it is not complete.

        More than MAX_HEAD_BYTES where the empty line does not come; none at all after so many bytes of empty lines,
        which are passed over before a request.
        """
        while (head := self._next_head()) is None:
            more = self.transport.receive(MAX_HEAD_BYTES + 1 - len(self._arrived))
            if more is None:
                return None
            if not more:
                raise ClientGoneError("closed")
            self._arrived += more
        return head

    def _next_head(self) -> bytes | None:
        rest = without_empty_lines(self._arrived)
        self._empty_bytes += len(self._arrived) - len(rest)
        self._arrived = rest
        end = _END_OF_HEAD.search(rest, max(0, self._searched_bytes - _LONGEST_END_BYTES))
        self._searched_bytes = len(rest)
        if end is None and len(rest) <= MAX_HEAD_BYTES and self._empty_bytes <= MAX_HEAD_BYTES:
            return None
        cut = end.end() if end else len(rest)
        head = rest[:cut] if self._empty_bytes <= MAX_HEAD_BYTES else b""
        self._arrived = rest[cut:]
        self._searched_bytes = self._empty_bytes = 0
        return head

    def answer(self, head: bytes, body: bytes) -> None:
        """Begin to send; the body is not copied but for its beginning."""
        self._unsent = memoryview(head + body[:_JOINED_BYTES])
        self._rest = memoryview(body)[_JOINED_BYTES:]

    def send(self) -> bool:
        """Send what there is room for; whether any was sent."""
        sent = self.transport.send(self._unsent[:_SEND_BYTES])
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self._unsent, self._rest = self._rest, memoryview(b"")
        return sent > 0

    @property
    def is_large(self) -> bool:
        """Whether more is to be sent than what is copied."""
        return bool(self._rest)

    @property
    def all_sent(self) -> bool:
        return not self._unsent

    def drain(self) -> None:
        """Throw away what has come.

        Raises:
            OSError: that was the end of it, or it is too much.
        """
        more = self.transport.receive(min(self._left_to_drain, _DRAIN_AT_ONCE_BYTES))
        if more is None:
            return
        self._left_to_drain -= len(more)
        if not more or self._left_to_drain <= 0:
            raise ClientGoneError("closed")

    def close(self) -> None:
        """Close the socket; safe to call once."""
        self.phase = Phase.CLOSED
        self._unsent = self._rest = memoryview(b"")
        self._arrived = b""
        self.transport.close()
