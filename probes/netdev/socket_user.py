"""Which user is at the other end of a connection over the loopback.

Source: sock_diag(7), and the kernel's include/uapi/linux/inet_diag.h: `struct inet_diag_req_v2` asks for one socket by
its ends, `struct inet_diag_msg` has the uid of who made it.  No capability is needed.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import closing
from typing import Final

from railscope.probes.netdev.netlink import NetlinkSocket, messages
from railscope.probes.netdev.tcp_info import NETLINK_SOCK_DIAG

_SOCK_DIAG_BY_FAMILY: Final = 20
_QUESTION: Final = struct.Struct("=BBxxI")
"""struct inet_diag_req_v2 up to the socket: family, protocol, extensions, padding, states."""
_SOCKET: Final = struct.Struct("!HH16s16s")
"""struct inet_diag_sockid up to the device: ports and addresses of the socket's own end and of its peer's."""
_ANY_DEVICE_AND_COOKIE: Final = bytes(4) + b"\xff" * 8
_ANY_STATE: Final = 0xFFFFFFFF
_UID: Final = struct.Struct("=I")
_UID_AT: Final = 64
_MAPPED: Final = "::ffff:"


def find_peer_user(fd: int) -> int | None:
    """The uid of the socket at the other end of a connected TCP socket; None: it is not on this host, or has gone."""
    try:
        with socket.socket(fileno=os.dup(fd)) as ours:
            (host, port, *_), (own_host, own_port, *_) = ours.getpeername(), ours.getsockname()
        family = socket.AF_INET6 if ":" in host.removeprefix(_MAPPED) else socket.AF_INET
        ends = [socket.inet_pton(family, one.removeprefix(_MAPPED).partition("%")[0]) for one in (host, own_host)]
        question = (
            _QUESTION.pack(family, socket.IPPROTO_TCP, _ANY_STATE)
            + _SOCKET.pack(port, own_port, *ends)
            + _ANY_DEVICE_AND_COOKIE
        )
        with closing(NetlinkSocket(protocol=NETLINK_SOCK_DIAG)) as netlink:
            for datagram in netlink.ask(_SOCK_DIAG_BY_FAMILY, question):
                for kind, _flags, _sequence, payload in messages(datagram):
                    if kind == _SOCK_DIAG_BY_FAMILY and len(payload) >= _UID_AT + _UID.size:
                        return int(_UID.unpack_from(payload, _UID_AT)[0])
    except (OSError, ValueError):  # a socket of another kind, or netlink that is none
        return None
    return None
