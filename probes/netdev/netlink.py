"""Netlink messages, as far as network and RDMA devices need them: framing, attributes, one question at a time.

Source: the kernel's include/uapi/linux/netlink.h and netlink(7).

Why not pyroute2, which knows all of netlink: importing any part of it imports the whole package, 17 MiB and 0.13 to
0.26 s of the agent's 60 MiB and 1 s; and a list of four links takes it 880 µs, and 15 µs here.  So these lines stand
here, and pyroute2 is the reference in the tests.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import struct
from collections.abc import Container, Iterator
from typing import Final

from railscope.probes.native.beats import TableQuestion

NETLINK_ROUTE: Final = 0
NETLINK_RDMA: Final = 20

NLMSG_ERROR: Final = 2
NLMSG_DONE: Final = 3
_NLM_F_REQUEST: Final = 0x1
_NLM_F_ACK: Final = 0x4
_NLM_F_DUMP_INTR: Final = 0x10
_NLM_F_DUMP: Final = 0x300
_NLA_TYPE_MASK: Final = 0x3FFF

_HEADER: Final = struct.Struct("=IHHII")
"""struct nlmsghdr: length with header, type, flags, sequence, port."""
_ATTRIBUTE: Final = struct.Struct("=HH")
"""struct nlattr: length with header, type."""
_ERROR: Final = struct.Struct("=i")

_DONE_BYTES: Final = _HEADER.size + _ERROR.size

_RECEIVE_BYTES: Final = 256 * 1024
_DUMP_LIMIT: Final = 4096
"""Datagrams in one dump."""
_MOST_BYTES: Final = 16 << 20
"""Of one answer: far above any table of a machine, but whoever has a network namespace of his own may fill them."""
_DUMP_ATTEMPTS: Final = 3
_SO_RCVBUFFORCE: Final = 33
_ANSWER_SECONDS: Final = 5


class MalformedNetlink(ValueError):
    """A message does not hold what its lengths and types say."""


class AnswerTooLong(MalformedNetlink):
    """A table is longer than its reader wants it; the socket is closed, so that the kernel lists no more of it."""


def messages(data: bytes | memoryview) -> Iterator[tuple[int, int, int, memoryview]]:
    """Yield (type, flags, sequence, payload) of every netlink message in one datagram.

    Raises:
        MalformedNetlink: a length points outside the datagram.
    """
    view = memoryview(data)
    at = 0
    while at < len(view):
        if len(view) - at < _HEADER.size:
            raise MalformedNetlink(f"netlink: {len(view) - at} bytes left over, a header takes {_HEADER.size}")
        length, kind, flags, sequence, _port = _HEADER.unpack_from(view, at)
        if length < _HEADER.size or length > len(view) - at:
            raise MalformedNetlink(f"netlink: a message of {length} bytes in {len(view) - at}")
        yield kind, flags, sequence, view[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def attributes(payload: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (type, value) of every netlink attribute, without the nested and byte-order flags.

    Raises:
        MalformedNetlink: a length points outside the payload.
    """
    at = 0
    while len(payload) - at >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(payload, at)
        if length < _ATTRIBUTE.size or length > len(payload) - at:
            raise MalformedNetlink(f"netlink: an attribute of {length} bytes in {len(payload) - at}")
        yield kind & _NLA_TYPE_MASK, payload[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3


def chosen_attributes(payload: memoryview, start: int, kinds: Container[int]) -> dict[int, memoryview]:
    """The netlink attributes of these kinds from `start` on, as `attributes` tells them; the last one of a kind counts.

    Of the fifty attributes of a link a handful matters, and to put each into hands takes longest.

    Raises:
        MalformedNetlink: a length points outside the payload.
    """
    found: dict[int, memoryview] = {}
    end = len(payload)
    last = end - _ATTRIBUTE.size
    unpack = _ATTRIBUTE.unpack_from
    at = start
    while at <= last:
        length, kind = unpack(payload, at)
        if length < _ATTRIBUTE.size or length > end - at:
            raise MalformedNetlink(f"netlink: an attribute of {length} bytes in {end - at}")
        kind &= _NLA_TYPE_MASK
        if kind in kinds:
            found[kind] = payload[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return found


class NetlinkSocket:
    """A netlink socket in the network namespace of the thread that makes it; usable from any thread since.

    One user at a time: a dump reads until its own answer is complete.
    """

    def __init__(self, groups: int = 0, protocol: int = NETLINK_ROUTE, *, most_bytes: int | None = None) -> None:
        """`groups` is a mask of multicast groups to subscribe to; `most_bytes` is the longest answer that is taken,
        None: 16 MiB.

        Raises:
            OSError: the kernel refuses the socket; EPROTONOSUPPORT: it does not know the protocol.
        """
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        try:
            self._socket.bind((0, groups))
            # The kernel's timeout, not Python's, which would add a poll() to every receive.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("=qq", _ANSWER_SECONDS, 0))
        except OSError:
            self._socket.close()
            raise
        self._most_bytes = most_bytes or _MOST_BYTES
        # Of a mapping only the pages that answers fill are ever there, mostly one; a bytearray takes them all.
        self._buffer: mmap.mmap | bytearray = mmap.mmap(-1, _RECEIVE_BYTES)
        self._sequence = 0
        self._unfinished = False
        self._asked: tuple[int, bytes] | None = None
        """The last question, if it was for a table and was answered with one datagram."""
        self._request = self._end = b""
        """What was sent then, and how the answer ended: the same question ends so again."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def set_room(self, size_bytes: int) -> None:
        """How much may wait to be received, beyond the limit of the system where we may (CAP_NET_ADMIN)."""
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size_bytes)
        except OSError:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size_bytes)

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """Ask for a table; returns its datagrams, whose last message is NLMSG_DONE.

        A table that changed while the kernel listed it is asked for again.

        Raises:
            OSError: the kernel refuses, or does not answer within five seconds.
            AnswerTooLong: the table has more than `most_bytes`; this socket answers nothing any more.
            MalformedNetlink: the answer is not netlink.
        """
        if (kind, body) == self._asked and (whole := self._ask_again()) is not None:
            return [whole]
        for _ in range(_DUMP_ATTEMPTS):
            datagrams, consistent = self._exchange(kind, body, _NLM_F_DUMP)
            if consistent:
                break
        return datagrams

    def ask(self, kind: int, body: bytes) -> list[bytes]:
        """Ask for one thing; returns the datagrams of the answer, whose last message is the acknowledgement.

        Raises:
            OSError: the kernel refuses, or does not answer within five seconds.
            MalformedNetlink: the answer is not netlink.
        """
        return self._exchange(kind, body, _NLM_F_ACK)[0]

    def table_question(self, kind: int, body: bytes) -> TableQuestion | None:
        """The request for a table, for another thread to send from now on; None: its answer takes several datagrams.

        This socket is theirs then: no other caller may use it until they have ended.

        Raises:
            OSError, MalformedNetlink: see `dump`.
        """
        whole = self.dump(kind, body)
        if self._asked is None or len(whole) != 1:
            return None
        self._unfinished = True  # what they leave is read away
        self._asked = None
        return TableQuestion(self.fileno(), self._request, len(whole[0]))

    def _exchange(self, kind: int, body: bytes, flags: int) -> tuple[list[bytes], bool]:
        if self._unfinished:
            self._discard()
        self._unfinished = True
        self._asked = None
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        header = _HEADER.pack(_HEADER.size + len(body), kind, _NLM_F_REQUEST | flags, self._sequence, 0)
        request = header + body
        self._socket.send(request)
        datagrams: list[bytes] = []
        consistent = True
        size = 0
        for _ in range(_DUMP_LIMIT):
            data = self._receive()
            size += len(data)
            if size > self._most_bytes:
                self.close()
                raise AnswerTooLong(f"netlink: a table of more than {self._most_bytes} bytes")
            if not datagrams and self._is_whole(data):
                self._unfinished = False
                if flags == _NLM_F_DUMP:
                    self._asked, self._request, self._end = (kind, body), request, data[-_DONE_BYTES:]
                return [data], True
            ours, done, interrupted = self._scan(data)
            if not ours:
                continue  # the rest of an answer that an earlier caller gave up on
            datagrams.append(data)
            consistent = consistent and not interrupted
            if done:
                self._unfinished = False
                return datagrams, consistent
        raise MalformedNetlink(f"netlink: no end of the table after {_DUMP_LIMIT} datagrams")

    def _ask_again(self) -> bytes | None:
        """Resend the last request, which is cheap; None: the answer is not a whole table.

        It bears the same number.  Nothing of the earlier answer can be left over, as that was whole.
        """
        asked, self._asked = self._asked, None
        self._unfinished = True
        self._socket.send(self._request)
        count = self._socket.recv_into(self._buffer)
        data = bytes(memoryview(self._buffer)[:count])
        if not data.endswith(self._end):
            return None
        self._asked = asked
        self._unfinished = False
        return data

    def _discard(self) -> None:
        """Read away the rest of an answer that was given up on; until then the kernel answers EBUSY."""
        for _ in range(_DUMP_LIMIT):
            if self.receive_now() is None:
                return

    def receive_now(self) -> bytes | None:
        """The next datagram if one waits, else None.

        Raises:
            OSError: ENOBUFS when the kernel had to drop messages for want of room.
        """
        try:
            count = self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        return bytes(memoryview(self._buffer)[:count])

    def _receive(self) -> bytes:
        count = self._socket.recv_into(self._buffer)
        return bytes(memoryview(self._buffer)[:count])

    def _is_whole(self, data: bytes) -> bool:
        """Whether this datagram is a whole table, which then cannot have changed meanwhile; as a rule it is.

        What lies between the first and the last message is for others to understand.
        """
        end = len(data) - _DONE_BYTES
        if end < _HEADER.size or _HEADER.unpack_from(data)[3] != self._sequence:
            return False
        length, kind, flags, sequence, _port = _HEADER.unpack_from(data, end)
        return (
            (length, kind, sequence) == (_DONE_BYTES, NLMSG_DONE, self._sequence)
            and not flags & _NLM_F_DUMP_INTR
            and not any(data[-_ERROR.size :])
        )

    def _scan(self, data: bytes) -> tuple[bool, bool, bool]:
        """(whether this datagram answers the current question, whether the table ends here, whether it changed)."""
        at = 0
        done = interrupted = False
        while len(data) - at >= _HEADER.size:  # not messages(): slices would double what a read of counters costs
            length, kind, flags, sequence, _port = _HEADER.unpack_from(data, at)
            if length < _HEADER.size or length > len(data) - at:
                raise MalformedNetlink(f"netlink: a message of {length} bytes in {len(data) - at}")
            if sequence != self._sequence:
                return False, False, False
            if flags & _NLM_F_DUMP_INTR:
                interrupted = True
            if kind in (NLMSG_ERROR, NLMSG_DONE):
                _check(memoryview(data)[at + _HEADER.size : at + length])
                done = True
            at += (length + 3) & ~3
        return at > 0, done, interrupted


def _check(payload: memoryview) -> None:
    number = -_ERROR.unpack_from(payload)[0] if len(payload) >= _ERROR.size else errno.EPROTO
    if number > 0:
        raise OSError(number, f"netlink: {os.strerror(number)}")
