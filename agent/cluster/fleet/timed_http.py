"""Answers over HTTP that must have come as a whole by some moment: who drips would be waited for without an end."""

from __future__ import annotations

import http.client
import io
import socket
import time
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_PIECE_BYTES: Final = 1 << 20


def timed_response(connection: http.client.HTTPConnection, method: str, until: float) -> http.client.HTTPResponse:
    """The answer to a request that was sent, its head read; each piece comes within the time that is left.

    Raises:
        OSError, http.client.HTTPException: it does not come, or is none.
    """
    timed = cast("socket.socket", _Timed(connection.sock, until))
    response = http.client.HTTPResponse(timed, method=method)
    try:
        response.begin()
    except BaseException:
        response.close()
        raise
    return response


class _Timed:
    """A connection as an answer is read from it: as a whole until a moment, not piece by piece."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until = connection, until

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedBytes(self._connection, self._until))


class _TimedBytes(io.RawIOBase):
    """The bytes of a connection; raises TimeoutError once the moment has come, by the monotonic clock."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        super().__init__()
        self._connection, self._until = connection, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


def read_body(response: http.client.HTTPResponse, most_bytes: int) -> bytes:
    """The body, or a piece more than is taken of it."""
    pieces, length = [], 0
    while length <= most_bytes and (piece := response.read(_PIECE_BYTES)):
        pieces.append(piece)
        length += len(piece)
    return b"".join(pieces)
