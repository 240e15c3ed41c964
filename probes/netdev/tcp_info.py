"""What TCP knows of its connections: the kernel's `tcp_info`, for all sockets of a network namespace in one question.

Round-trip time, retransmissions, and how long a sender was busy or waited for its peer tell a slow rail from a fast one
where bytes do not.  The question names local addresses, so that the kernel neither locks nor lists other sockets.

Source: sock_diag(7), and the kernel's include/uapi/linux/inet_diag.h and tcp.h.  No capability is needed.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from probes.netdev.addresses import plain_address
from probes.netdev.netlink import MalformedNetlink, NetlinkSocket, attributes, messages

NETLINK_SOCK_DIAG: Final = 4
_TCP_SOCKETS: Final = 18
"""TCPDIAG_GETSOCK.  SOCK_DIAG_BY_FAMILY, which came after it, asks for one family: the kernel would walk twice through
its table of all connections, which has half a million places on a large host."""
_SOCKET: Final = struct.Struct("=4BHH16s16sIII5I")
"""struct inet_diag_msg: family, state, timer, retransmits; ports, addresses, device, cookie; expires, queues, user,
inode."""
_QUESTION: Final = struct.Struct("=xxxB48xI4x")
"""struct inet_diag_req: family and two lengths that are not looked at, extensions, socket, states, what is not used."""
_ATTRIBUTE: Final = struct.Struct("=HH")
_INET_DIAG_INFO: Final = 2
_BYTECODE: Final = 1
_ESTABLISHED, _FIN_WAIT_1, _CLOSE_WAIT = 1, 4, 8
_STATES: Final = 1 << _ESTABLISHED | 1 << _FIN_WAIT_1 | 1 << _CLOSE_WAIT
"""Where a process may still hold the socket and data may be on its way."""

_NO_TCP_DIAG: Final = frozenset({errno.ENOENT, errno.EOPNOTSUPP})
"""Without tcp_diag, and without inet_diag, on which that builds."""

_CONDITION: Final = struct.Struct("=BBHBBxxi")
"""struct inet_diag_bc_op and struct inet_diag_hostcond: operation, jumps; family, bits that count, port."""
_JUMP: Final = struct.Struct("=BBH")
_SOURCE_IS: Final = 7
_GO_ON: Final = 1
MAXIMUM_ADDRESSES: Final = 256
"""In one question; with more the kernel lists every socket."""

_INFO_OFFSETS: Final = {
    "bytes_sent": (200, "u8"),
    "bytes_acked": (120, "u8"),
    "bytes_received": (128, "u8"),
    "retransmitted_bytes": (208, "u8"),
    "retransmitted_segments": (100, "u4"),
    "data_segments_sent": (156, "u4"),
    "busy_us": (168, "u8"),
    "receive_window_limited_us": (176, "u8"),
    "send_buffer_limited_us": (184, "u8"),
    "round_trip_us": (68, "u4"),
    "round_trip_deviation_us": (72, "u4"),
    "minimum_round_trip_us": (148, "u4"),
    "delivery_rate_bytes_per_second": (160, "u8"),
    "flags": (7, "u1"),
    "unacknowledged_segments": (24, "u4"),
    "not_sent_bytes": (144, "u4"),
    "last_sent_ms": (44, "u4"),
    "segments_sent": (136, "u4"),
    "segments_received": (140, "u4"),
    "options": (5, "u1"),
}
"""Where the fields of `TcpInfo` stand in struct tcp_info, in its order."""
_FIELD_NAMES: Final = tuple(_INFO_OFFSETS)
_INFO: Final = np.dtype(
    {
        "names": list(_FIELD_NAMES),
        "formats": [form for _offset, form in _INFO_OFFSETS.values()],
        "offsets": [offset for offset, _form in _INFO_OFFSETS.values()],
        "itemsize": 216,
    }
)
OPTION_TIMESTAMPS: Final = 1
"""TCPI_OPT_TIMESTAMPS."""
_APPLICATION_LIMITED: Final = 0x01 if sys.byteorder == "little" else 0x80
"""The first bit field of its byte."""


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """One socket, as the kernel lists it."""

    inode: int
    """As in `socket:[inode]` of /proc/PID/fd; 0: no process holds it, or not yet."""
    cookie: int
    """The kernel's number for it, never used again."""
    local: bytes
    """Local address, 4 bytes of IPv4 or 16 of IPv6."""
    interface: int
    """Number of the device that it is bound to; 0: any."""
    attributes: bytes
    """What else the kernel said, for `info_of`: looked at only for sockets that matter."""
    state: int = _ESTABLISHED
    """TCP_ESTABLISHED (1), TCP_FIN_WAIT1 (4) or TCP_CLOSE_WAIT (8: the peer has closed its side)."""
    timer: int = 0
    """1: waits for an acknowledgement; 4: asks again and again whether the peer takes more; 0: neither."""
    unread_bytes: int = 0
    """Received and acknowledged, not read by the process."""
    ports: tuple[int, int] = (0, 0)
    """Of this side, and of the other."""


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """One connection; the counters since it was opened."""

    bytes_sent: int
    """Payload, retransmissions included."""
    bytes_acked: int
    bytes_received: int
    retransmitted_bytes: int
    retransmitted_segments: int
    """Begins again at 2^32."""
    data_segments_sent: int
    """Begins again at 2^32."""
    busy_us: int
    """Time with data under way; this and the next two advance in the kernel's ticks of 1 to 10 ms."""
    receive_window_limited_us: int
    """Of that, waiting because the peer did not read fast enough."""
    send_buffer_limited_us: int
    """Of that, waiting because this host's send buffer was full."""
    round_trip_us: int
    """Smoothed; 0: not measured yet."""
    round_trip_deviation_us: int
    """Mean deviation from it, smoothed as well."""
    minimum_round_trip_us: int
    delivery_rate_bytes_per_second: int
    """At the last acknowledgement; 0: not measured yet."""
    application_limited: bool
    """The application sent less than the connection would have carried when that rate was measured."""
    unacknowledged_segments: int
    not_sent_bytes: int
    """Given to the socket, not yet sent for the first time."""
    last_sent_ms: int
    """Time since data was last sent."""
    segments_sent: int
    """All of them, acknowledgements included; begins again at 2^32, as the next."""
    segments_received: int
    options: int
    """What both ends agreed upon: `OPTION_TIMESTAMPS` and others."""


def read_sockets(netlink: NetlinkSocket, addresses: Sequence[bytes]) -> list[TcpSocket]:
    """The connected TCP sockets with one of these local addresses, in the namespace of a NETLINK_SOCK_DIAG socket.

    Raises:
        OSError: the kernel refuses; ENOENT: it has no tcp_diag.
        MalformedNetlink: its answer is not what sock_diag describes.
    """
    try:
        return parse_sockets(netlink.dump(_TCP_SOCKETS, question(addresses)))
    except OSError as error:
        if error.errno not in _NO_TCP_DIAG:
            raise
        raise OSError(errno.ENOENT, "the kernel has no tcp_diag: run `modprobe tcp_diag`") from None


def question(addresses: Sequence[bytes]) -> bytes:
    """The request for sockets of both families with one of these local addresses."""
    return _question(tuple(addresses))


@lru_cache(maxsize=16)
def _question(addresses: tuple[bytes, ...]) -> bytes:
    """As a rule that of a second ago."""
    body = _QUESTION.pack(1 << (_INET_DIAG_INFO - 1), _STATES)
    if not 0 < len(addresses) <= MAXIMUM_ADDRESSES:
        return body
    code = address_filter(addresses)
    return body + _ATTRIBUTE.pack(_ATTRIBUTE.size + len(code), _BYTECODE) + code


def address_filter(addresses: Sequence[bytes]) -> bytes:
    """A program for the kernel that accepts a socket with one of these local addresses.

    A condition that does not hold jumps over the jump behind it, which otherwise goes to the end.  The last one jumps
    four bytes past the end, which refuses.
    """
    program = b""
    for address in reversed(addresses):
        family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
        length = _CONDITION.size + len(address)
        condition = _CONDITION.pack(_SOURCE_IS, length, length + _JUMP.size, family, len(address) * 8, -1) + address
        leave = _JUMP.pack(_GO_ON, _JUMP.size, _JUMP.size + len(program)) if program else b""
        program = condition + leave + program
    return program


def parse_sockets(datagrams: Iterable[bytes]) -> list[TcpSocket]:
    """The sockets in an answer of sock_diag; other messages are passed over.

    Raises:
        MalformedNetlink: a message is cut short.
    """
    found: list[TcpSocket] = []
    for data in datagrams:
        for kind, _flags, _sequence, payload in messages(data):
            if kind != _TCP_SOCKETS:
                continue
            if len(payload) < _SOCKET.size:
                raise MalformedNetlink(f"netlink: a socket of {len(payload)} bytes, expected {_SOCKET.size}")
            fields = _SOCKET.unpack_from(payload)
            family, local, interface, low, high, inode = (
                fields[0],
                fields[6],
                fields[8],
                fields[9],
                fields[10],
                fields[15],
            )
            address = local[:4] if family == socket.AF_INET else plain_address(local)
            found.append(
                TcpSocket(
                    inode,
                    high << 32 | low,
                    address,
                    interface,
                    bytes(payload[_SOCKET.size :]),
                    state=fields[1],
                    timer=fields[2],
                    unread_bytes=fields[12],
                    ports=(socket.ntohs(fields[4]), socket.ntohs(fields[5])),
                )
            )
    return found


def info_of(connection: TcpSocket) -> TcpInfo:
    """How a connection fares.

    Raises:
        ValueError: the kernel did not say, or it was cut short.
    """
    info = next(
        (value for kind, value in attributes(memoryview(connection.attributes)) if kind == _INET_DIAG_INFO), b""
    )
    return parse_info(info)


def parse_info(data: bytes | memoryview) -> TcpInfo:
    """One struct tcp_info, of Linux 4.19 or newer; what later kernels append is passed over.

    Raises:
        ValueError: it is shorter than that.
    """
    if len(data) < _INFO.itemsize:
        raise ValueError(f"tcp_info of {len(data)} bytes, expected at least {_INFO.itemsize}")
    fields = list(np.frombuffer(data, dtype=_INFO, count=1)[0].item())
    flags = _FIELD_NAMES.index("flags")
    fields[flags] = bool(fields[flags] & _APPLICATION_LIMITED)
    return TcpInfo(*fields)
