"""How the daemon and its inspection processes talk: a length, what is said, and descriptors beside it.

The daemon's questions are pickled.  What comes back was made of a tenant's files by a process that such a file may have
taken over: answers.py reads it, and here stand the limits of its bytes and descriptors.
"""

from __future__ import annotations

import array
import socket
import struct
from collections.abc import Collection, Iterable
from typing import Final

MOST_ANSWER_BYTES: Final = 4 << 20
"""Read, it takes up to thirty times as much memory."""
MOST_DESCRIPTORS: Final = 16
_HEAD: Final = struct.Struct("<QI")
"""Bytes that follow; descriptors that came with the head."""
_CHUNK_BYTES: Final = 1 << 18


class WireError(Exception):
    """What came is no message; the message says in a line why."""


def send(channel: socket.socket, data: bytes, descriptors: Collection[int] = ()) -> None:
    """Send a message between the daemon and an inspection process; blocks while the other side does not read.

    Raises:
        OSError: the other side is gone.
    """
    socket.send_fds(channel, [_HEAD.pack(len(data), len(descriptors))], list(descriptors))
    channel.sendall(data)


class Incoming:
    """Messages as they arrive on a channel, read without waiting."""

    def __init__(self, channel: socket.socket, most_bytes: int = MOST_ANSWER_BYTES) -> None:
        self._channel = channel
        self._most_bytes = most_bytes
        self._data = bytearray()
        self._descriptors: list[int] = []
        self._expected: int | None = None

    def read(self) -> tuple[bytes, list[int]] | None:
        """The next message with its descriptors, which are the caller's; None: it has not come whole.

        Raises:
            WireError: it is larger than allowed, or the other side is gone.
        """
        while True:
            if self._expected is None and len(self._data) >= _HEAD.size:
                self._expected, count = _HEAD.unpack_from(self._data)
                if self._expected > self._most_bytes or count > MOST_DESCRIPTORS:
                    raise WireError(f"an inspection process sent {self._expected} bytes, more than it may")
            if self._expected is not None and len(self._data) >= _HEAD.size + self._expected:
                end = _HEAD.size + self._expected
                data, self._expected = bytes(self._data[_HEAD.size : end]), None
                del self._data[:end]
                descriptors, self._descriptors = self._descriptors, []
                return data, descriptors
            try:
                room = socket.CMSG_SPACE(MOST_DESCRIPTORS * array.array("i").itemsize)
                more, beside, _, _ = self._channel.recvmsg(_CHUNK_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return None
            except OSError as error:
                raise WireError(f"an inspection process is gone: {error.strerror}") from None
            self._descriptors += _descriptors(beside)
            if len(self._descriptors) > MOST_DESCRIPTORS:
                raise WireError(f"an inspection process sent more than {MOST_DESCRIPTORS} descriptors")
            if not more:
                raise WireError("an inspection process has ended")
            self._data += more

    def drop(self) -> list[int]:
        """Descriptors of a message that did not come whole; the caller closes them."""
        descriptors, self._descriptors = self._descriptors, []
        return descriptors


def _descriptors(beside: Iterable[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()
