"""How bytes come from and go to a client, without ever waiting: as they are; through TLS, see tls_transport.py."""

from __future__ import annotations

import select
import socket
from typing import Protocol


class Transport(Protocol):
    """One accepted socket.  What the peer breaks is an OSError of each method but `close`."""

    blocked_on: int
    """What the last step waits for: select.EPOLLIN or select.EPOLLOUT."""

    @property
    def fd(self) -> int: ...

    @property
    def costly_handshake(self) -> bool:
        """Whether shaking hands takes much CPU time."""

    @property
    def pending(self) -> bool:
        """Whether bytes arrived already that no poll will announce."""

    @property
    def certified(self) -> bool:
        """Whether the peer has shown a certificate that was verified."""

    def shake_hands(self) -> bool:
        """Go on with what comes before the first byte; whether that is complete."""

    def receive(self, most: int) -> bytes | None:
        """At most so many bytes; none: the peer has closed its end; None: nothing came yet."""

    def send(self, data: memoryview) -> int:
        """Send what there is room for; how many bytes."""

    def end_sending(self) -> None:
        """Tell the peer that no more will come; what it sends may still be received, and means nothing."""

    def close(self) -> None: ...


class PlainTransport:
    """Bytes as they are."""

    def __init__(self, accepted: socket.socket) -> None:
        """`accepted` does not block."""
        self._socket = accepted
        self.blocked_on = select.EPOLLIN

    @property
    def costly_handshake(self) -> bool:
        return False

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        return False

    @property
    def certified(self) -> bool:
        return False

    def shake_hands(self) -> bool:
        return True

    def receive(self, most: int) -> bytes | None:
        self.blocked_on = select.EPOLLIN
        try:
            return self._socket.recv(most)
        except BlockingIOError:
            return None

    def send(self, data: memoryview) -> int:
        self.blocked_on = select.EPOLLOUT
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    def end_sending(self) -> None:
        self.blocked_on = select.EPOLLIN
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()
