"""Reads the kernel's `tcp_info` of all sockets of a network namespace in one request.

Round-trip time, retransmissions, and how long a sender was busy or waited for its peer tell a slow rail from a fast one
where bytes do not.  The question names local addresses, so that the kernel neither locks nor lists other sockets.

There may be thousands, asked about every second: an answer becomes columns, and no object is made for a socket.

Source: sock_diag(7), and the kernel's include/uapi/linux/inet_diag.h and tcp.h.  No capability is needed.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from railscope.probes.netdev.addresses import plain_address
from railscope.probes.netdev.netlink import MalformedNetlink, NetlinkSocket, attributes, messages

NETLINK_SOCK_DIAG: Final = 4
TCP_SOCKETS: Final = 18
"""TCPDIAG_GETSOCK.  SOCK_DIAG_BY_FAMILY, which came after it, asks for one family: the kernel would walk twice through
its table of all connections, which has half a million places on a large host."""
DESTROYED_SOCKETS: Final = 20
"""SOCK_DIAG_BY_FAMILY, as which the kernel tells of a socket that was destroyed, without inode and user."""
DESTROYED_TCP_GROUPS: Final = 1 << 0 | 1 << 2
"""Multicast groups SKNLGRP_INET_TCP_DESTROY and SKNLGRP_INET6_TCP_DESTROY (include/uapi/linux/sock_diag.h)."""
_SOCKET_BYTES: Final = 72
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

_HEADER_BYTES: Final = 16
"""struct nlmsghdr."""
_SOCKET_FIELDS: Final = {
    "family": (0, "u1"),
    "state": (1, "u1"),  # TCP_ESTABLISHED (1), TCP_FIN_WAIT1 (4) or TCP_CLOSE_WAIT (8: the peer has closed its side)
    "timer": (2, "u1"),  # 1: waits for an acknowledgement; 4: asks again and again whether the peer takes more
    "ports": (4, (">u2", (2,))),  # of this side, and of the other
    "local": (8, "V16"),
    "remote": (24, "V16"),
    "interface": (40, "u4"),  # number of the device that it is bound to; 0: any
    "cookie": (44, "u8"),  # the kernel's number for it, never used again
    "unread_bytes": (56, "u4"),  # received and acknowledged, not read by the process
    "user": (64, "u4"),  # real user ID of who made it
    "inode": (68, "u4"),  # as in `socket:[inode]` of /proc/PID/fd; 0: no process holds it, or not yet
}
"""Offsets in struct inet_diag_msg."""
_INFO_FIELDS: Final = {
    "unanswered_retransmissions": (2, "u1"),  # of the oldest segment
    "unanswered_probes": (3, "u1"),  # how often the peer was asked in vain whether it takes more
    "options": (5, "u1"),  # what both ends agreed upon: OPTION_TIMESTAMPS and others
    "flags": (7, "u1"),
    "segment_bytes": (16, "u4"),  # the longest that it sends, payload alone
    "unacknowledged_segments": (24, "u4"),
    "arrived_beyond_segments": (28, "u4"),  # of these, behind one that is missing (SACK)
    "last_sent_ms": (44, "u4"),  # time since data was last sent
    "last_acknowledged_ms": (56, "u4"),  # time since the peer acknowledged anything
    "round_trip_us": (68, "u4"),  # smoothed; 0: not measured yet
    "round_trip_deviation_us": (72, "u4"),  # mean deviation from it, smoothed as well
    "retransmitted_segments": (100, "u4"),  # begins again at 2^32
    "bytes_acked": (120, "u8"),
    "bytes_received": (128, "u8"),
    "segments_sent": (136, "u4"),  # acknowledgements included; begins again at 2^32, as the next
    "segments_received": (140, "u4"),
    "not_sent_bytes": (144, "u4"),  # given to the socket, not yet sent for the first time
    "minimum_round_trip_us": (148, "u4"),
    "data_segments_sent": (156, "u4"),  # begins again at 2^32
    "delivery_rate_bytes_per_second": (160, "u8"),  # at the last acknowledgement; 0: not measured yet
    "busy_us": (168, "u8"),  # time with data under way; advances in ticks of 1 to 10 ms, as the next two
    "receive_window_limited_us": (176, "u8"),  # of that, waiting because the peer did not read fast enough
    "send_buffer_limited_us": (184, "u8"),  # of that, waiting because this host's send buffer was full
    "bytes_sent": (200, "u8"),  # payload, retransmissions included
    "retransmitted_bytes": (208, "u8"),
    "peer_window_bytes": (228, "u4"),  # what the peer said it would take; 0 before Linux 5.4
}
"""Offsets in struct tcp_info; counters since the connection was opened."""
_TABLE: Final = np.dtype([(name, kind) for name, (_offset, kind) in (_SOCKET_FIELDS | _INFO_FIELDS).items()])
_LEAST_INFO_BYTES: Final = 216
"""As of Linux 4.19."""
_WHOLE_INFO_BYTES: Final = 232
OPTION_TIMESTAMPS: Final = 1
"""TCPI_OPT_TIMESTAMPS."""
APPLICATION_LIMITED: Final = 0x01 if sys.byteorder == "little" else 0x80
"""Of `flags`, the first bit field: the application sent less than the connection would have carried when its delivery
rate was measured."""

Rows = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class TcpTable:
    """Sockets as the kernel lists them, in its order."""

    rows: Rows
    """One a socket, with the fields of _SOCKET_FIELDS and _INFO_FIELDS: may be a view of the answer."""
    untold: Mapping[int, ValueError]
    """By row, why its fields of _INFO_FIELDS are all 0: the kernel did not say, or was cut short."""


NO_SOCKETS: Final = TcpTable(np.zeros(0, _TABLE), {})


@dataclass(frozen=True, slots=True)
class _Form:
    """Where things stand in a message, which as a rule is the same for all of an answer."""

    stride: int
    """From the begin of one message to the begin of the next, in bytes."""
    info_at: int
    """Where struct tcp_info begins in the message."""
    info_bytes: int
    """What is known of it; 0: it is missing or too short."""


def read_table(netlink: NetlinkSocket, addresses: Sequence[bytes]) -> TcpTable:
    """The connected TCP sockets with one of these local addresses, in the namespace of a NETLINK_SOCK_DIAG socket.

    Raises:
        OSError: the kernel refuses; ENOENT: it has no tcp_diag.
        MalformedNetlink: its answer is not what sock_diag describes.
    """
    try:
        return parse_table(netlink.dump(TCP_SOCKETS, make_request(addresses)))
    except OSError as error:
        if error.errno not in _NO_TCP_DIAG:
            raise
        raise OSError(errno.ENOENT, "the kernel has no tcp_diag: run `modprobe tcp_diag`") from None


def make_request(addresses: Sequence[bytes]) -> bytes:
    """The sock_diag request for TCP sockets of both families with one of these local addresses."""
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
    """A sock_diag filter program for the kernel that accepts a socket with one of these local addresses.

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


def parse_table(datagrams: Iterable[bytes], kind: int = TCP_SOCKETS) -> TcpTable:
    """The TCP sockets in messages of this kind of sock_diag; other messages are passed over.

    Raises:
        MalformedNetlink: a message is cut short.
    """
    answer = list(datagrams)
    rows = _of_one_form(answer, kind)
    return _of_several_forms(answer, kind) if rows is None else TcpTable(rows, {})


def _of_one_form(answer: Sequence[bytes], wanted: int) -> Rows | None:
    """The sockets where all their messages have one form, and tell everything; None: they have not, or do not."""
    forms: set[_Form] = set()
    pieces: list[bytes | memoryview] = []
    for data in answer:
        view = memoryview(data)
        at = 0
        while at < len(view):
            kind, _flags, _sequence, payload = next(messages(view[at:]))
            stride = _aligned(_HEADER_BYTES + len(payload))
            if kind != wanted:
                at += stride
                continue
            form, headers, _trouble = _form(payload, stride)
            forms.add(form)
            # More pieces than datagrams: what stands beside struct tcp_info differs.
            if len(forms) > 1 or form.info_bytes < _WHOLE_INFO_BYTES or len(pieces) == len(answer):
                return None
            pieces.append(_alike(view[at:], stride, headers))
            at += len(pieces[-1])
    if not pieces:
        return np.zeros(0, _TABLE)
    return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), _message_dtype(forms.pop()))


def _of_several_forms(answer: Sequence[bytes], wanted: int) -> TcpTable:
    """The sockets, one form after another: a run of equal messages may be a single one, as where MPTCP is in use."""
    found: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    """By length of the message: where it begins, in words, and its row."""
    total = at = 0
    padded = []  # the last message of a datagram needs no padding
    for data in answer:
        begin = at
        for kind, _flags, _sequence, payload in messages(data):
            length = _HEADER_BYTES + len(payload)
            if kind == wanted:
                _check_length(payload)
                begins, places = found[length]
                begins.append(at // 4)
                places.append(total)
                total += 1
            at += _aligned(length)
        padded.append(data.ljust(_aligned(len(data)), b"\0"))
        at = begin + len(padded[-1])
    rows: Rows = np.zeros(total, _TABLE)
    untold: dict[int, ValueError] = {}
    words = np.frombuffer(b"".join(padded), np.uint32)
    for length, (begins, numbers) in found.items():
        stride = _aligned(length)
        rest = words[np.array(begins)[:, np.newaxis] + np.arange(stride // 4)]
        left = np.array(numbers)
        while len(left):
            form, headers, trouble = _form(memoryview(rest[0].tobytes())[_HEADER_BYTES:length], stride)
            alike = (rest[:, headers] == rest[0, headers]).all(axis=1)
            part = np.frombuffer(rest[alike].tobytes(), _message_dtype(form))
            for name in part.dtype.names or ():
                rows[name][left[alike]] = part[name]
            if trouble is not None:
                untold.update(dict.fromkeys(left[alike].tolist(), trouble))
            rest, left = rest[~alike], left[~alike]
    return TcpTable(rows, untold)


def _aligned(length: int) -> int:
    """Bytes from the begin of a message or attribute of this length to the next one's."""
    return (length + 3) & ~3


def _check_length(payload: memoryview) -> None:
    if len(payload) < _SOCKET_BYTES:
        raise MalformedNetlink(f"netlink: a socket of {len(payload)} bytes, expected {_SOCKET_BYTES}")


def _form(payload: memoryview, stride: int) -> tuple[_Form, list[int], ValueError | None]:
    """(form, numbers of the 4-byte words that show whether another message has it, what is wrong) of a message."""
    _check_length(payload)
    at = _HEADER_BYTES + _SOCKET_BYTES
    headers = [0, 1]  # the message's length, its type and flags
    info_bytes = 0
    try:
        for kind, value in attributes(payload[_SOCKET_BYTES:]):
            headers.append(at // 4)
            if kind == _INET_DIAG_INFO:
                info_bytes = len(value)
                break
            at += _aligned(_ATTRIBUTE.size + len(value))
    except MalformedNetlink as error:
        # The header that makes no sense counts as well: only those with the same one are alike.
        return _Form(stride, 0, 0), [*headers, at // 4], error
    if info_bytes < _LEAST_INFO_BYTES:
        reason = f"tcp_info of {info_bytes} bytes, expected at least {_LEAST_INFO_BYTES}"
        return _Form(stride, 0, 0), headers, ValueError(reason)
    return _Form(stride, at + _ATTRIBUTE.size, min(info_bytes, _WHOLE_INFO_BYTES)), headers, None


def _alike(view: memoryview, stride: int, headers: list[int]) -> bytes | memoryview:
    """The messages at the start of a datagram that have the form of the first one."""
    count = len(view) // stride
    if count == 0:
        return bytes(view).ljust(stride, b"\0")  # the last one, which needs no padding
    words = np.frombuffer(view, np.uint32, count * stride // 4).reshape(count, stride // 4)[:, headers]
    alike = (words == words[0]).all(axis=1)
    return view[: (count if alike.all() else int(alike.argmin())) * stride]


@lru_cache(maxsize=64)
def _message_dtype(form: _Form) -> np.dtype[Any]:
    """One message; without what struct tcp_info is too short for."""
    places = {name: (_HEADER_BYTES + offset, kind) for name, (offset, kind) in _SOCKET_FIELDS.items()}
    for name, (offset, kind) in _INFO_FIELDS.items():
        if offset + np.dtype(kind).itemsize <= form.info_bytes:
            places[name] = (form.info_at + offset, kind)
    return np.dtype(
        {
            "names": list(places),
            "formats": [kind for _offset, kind in places.values()],
            "offsets": [offset for offset, _kind in places.values()],
            "itemsize": form.stride,
        }
    )


def local_addresses(rows: Rows) -> list[bytes]:
    """Local addresses of TCP sockets, 4 bytes of IPv4 or 16 of IPv6; IPv4 also where the socket is one of IPv6."""
    return _addresses(rows, "local")


def remote_addresses(rows: Rows) -> list[bytes]:
    """The addresses of the other ends; see `local_addresses`."""
    return _addresses(rows, "remote")


def _addresses(rows: Rows, end: str) -> list[bytes]:
    families = rows["family"].tolist()
    return [
        address[:4] if family == socket.AF_INET else plain_address(address)
        for family, address in zip(families, rows[end].tolist(), strict=True)
    ]
