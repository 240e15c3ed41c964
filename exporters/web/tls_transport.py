"""Bytes through TLS, by Python's `ssl` on a socket that does not block.  Only loaded where TLS is configured."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable


class CertificateRefusedError(OSError):
    """The peer's certificate has none of the names that the configuration allows."""


class TlsTransport:
    """The server's end of one TLS connection."""

    def __init__(
        self, accepted: socket.socket, context: ssl.SSLContext, allows_peer: Callable[[ssl.SSLSocket], bool]
    ) -> None:
        """`accepted` does not block, and belongs to this object from now on.

        Raises:
            OSError: the peer has gone.
        """
        self._socket = context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        self._allows_peer = allows_peer
        self.blocked_on = select.EPOLLIN
        self.certified = False

    @property
    def costly_handshake(self) -> bool:
        return True

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        return self._socket.pending() > 0

    def shake_hands(self) -> bool:
        """Go on with the handshake; whether it is complete.

        Raises:
            CertificateRefusedError: it is, and the client's certificate has no allowed name.
        """
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            self.blocked_on = select.EPOLLIN
            return False
        except ssl.SSLWantWriteError:
            self.blocked_on = select.EPOLLOUT
            return False
        if not self._allows_peer(self._socket):
            raise CertificateRefusedError("its certificate has no allowed name")
        # Without verification there is none here, whatever the peer has sent.
        self.certified = bool(self._socket.getpeercert())
        return True

    def receive(self, most: int) -> bytes | None:
        self.blocked_on = select.EPOLLIN
        try:
            return self._socket.recv(most)
        except (BlockingIOError, ssl.SSLWantReadError):  # the first once sending has ended: then there is no TLS
            return None
        except ssl.SSLWantWriteError:
            self.blocked_on = select.EPOLLOUT
            return None

    def send(self, data: memoryview) -> int:
        self.blocked_on = select.EPOLLOUT
        try:
            return self._socket.send(data)
        except ssl.SSLWantWriteError:
            return 0
        except ssl.SSLWantReadError:
            self.blocked_on = select.EPOLLIN
            return 0

    def end_sending(self) -> None:
        self.blocked_on = select.EPOLLIN
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()
