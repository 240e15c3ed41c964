"""Who is at the other end of a cable: the switch and its port, as it says itself (LLDP, IEEE 802.1AB).

A switch sends a frame every 30 s or so, which says how long it holds.  Each interface has a socket of its own here, so
that who floods one, a container behind a bridge for example, takes nothing from another; the kernel gives every
listener its own copy, so that lldpd may run beside.  A frame is believed as far as whoever is on the cable is.

The kernel's packet(7): AF_PACKET, for a user with CAP_NET_RAW.  Some cards answer LLDP in their firmware and hand none
to the host (ice: `ethtool --set-priv-flags DEVICE fw-lldp-agent off`; i40e: `disable-fw-lldp on`; mlx5: LLDP_NB_DCBX).
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Final

ETHERTYPE: Final = 0x88CC
NEAREST_BRIDGE: Final = bytes.fromhex("0180c200000e")
"""The group to which switches send, and which no bridge forwards."""

_END, _CHASSIS, _PORT, _LIFETIME, _PORT_DESCRIPTION, _SYSTEM_NAME = range(6)
_OF_CHASSIS_MAC, _OF_PORT_MAC = 4, 3
_OF_CHASSIS_ADDRESS, _OF_PORT_ADDRESS = 5, 4
_MOST_BYTES: Final = 2048
"""Of a frame; LLDP fits in one of Ethernet's."""
_MOST_PARTS: Final = 256
_MOST_FRAMES: Final = 32
"""Of one interface and reading: a switch sends one in 30 s."""
_BUFFER_BYTES: Final = 32 * 1024

_SOL_PACKET: Final = 263
_ADD_MEMBERSHIP: Final = 1
_MULTICAST: Final = 0
_MEMBERSHIP: Final = struct.Struct("=iHH8s")
"""struct packet_mreq: interface, type, length of the address, address."""
_OUTGOING: Final = 4
"""PACKET_OUTGOING: a frame that this host sends."""


class MalformedLldp(ValueError):
    """A frame is no LLDP, or is cut short."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What sent a frame."""

    switch: str
    """Its name; without one, its chassis as it calls it."""
    port: str
    """Its port's name; where it tells a MAC address alone, the port's description if there is one."""
    lifetime_seconds: int
    """For how long this holds; 0: no longer."""
    chassis: str
    """By which two switches of one name differ."""


def parse_lldp(data: bytes) -> Neighbour:
    """The sender of a frame, from what follows the Ethernet header.

    Raises:
        MalformedLldp: it is not what the standard says.
    """
    parts: dict[int, bytes] = {}
    at = 0
    for _ in range(_MOST_PARTS):
        if len(data) - at < 2:
            raise MalformedLldp("LLDP: no end")
        head = int.from_bytes(data[at : at + 2], "big")
        kind, length = head >> 9, head & 0x1FF
        if length > len(data) - at - 2:
            raise MalformedLldp(f"LLDP: a part of {length} bytes in {len(data) - at - 2}")
        if kind == _END:
            break
        # Whatever comes twice is a fault of the sender: its first word counts.
        parts.setdefault(kind, data[at + 2 : at + 2 + length])
        at += 2 + length
    else:
        raise MalformedLldp(f"LLDP: more than {_MOST_PARTS} parts")
    if not {_CHASSIS, _PORT, _LIFETIME} <= parts.keys() or len(parts[_LIFETIME]) < 2:
        raise MalformedLldp("LLDP: no chassis, port or time to live")
    chassis = _identifier(parts[_CHASSIS], _OF_CHASSIS_MAC, _OF_CHASSIS_ADDRESS)
    port = _identifier(parts[_PORT], _OF_PORT_MAC, _OF_PORT_ADDRESS)
    if not chassis or not port:
        raise MalformedLldp("LLDP: an empty chassis or port")
    if parts[_PORT][0] == _OF_PORT_MAC:
        port = _text(parts.get(_PORT_DESCRIPTION, b"")) or port
    return Neighbour(
        switch=_text(parts.get(_SYSTEM_NAME, b"")) or chassis,
        port=port,
        lifetime_seconds=int.from_bytes(parts[_LIFETIME][:2], "big"),
        chassis=chassis,
    )


def _identifier(part: bytes, mac: int, address: int) -> str:
    """A chassis or port: its kind in the first byte, and 1 to 255 bytes."""
    if not 2 <= len(part) <= 256:
        return ""
    kind, value = part[0], part[1:]
    if kind == mac and len(value) == 6:
        return value.hex(":")
    if kind == address and len(value) in (5, 17):
        family, rest = value[0], value[1:]  # IANA's address families: 1 is IPv4, 2 is IPv6
        if (family, len(rest)) in ((1, 4), (2, 16)):
            return socket.inet_ntop(socket.AF_INET if family == 1 else socket.AF_INET6, rest)
    return _text(value) or value.hex()


def _text(value: bytes) -> str:
    """Printable text; empty where it is none."""
    text = value.rstrip(b"\0").decode("utf-8", "replace").strip()
    return text if text.isprintable() and "\ufffd" not in text else ""


class LldpSocket:
    """Hears the frames that come in on one interface; never waits."""

    def __init__(self, interface: str) -> None:
        """In the network namespace of the thread that makes it.

        Raises:
            OSError: PermissionError without CAP_NET_RAW; ENODEV: there is no such interface.
        """
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_PACKET, kind, 0)  # 0: nothing comes before it is bound
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            self._socket.bind((interface, ETHERTYPE))
            wanted = _MEMBERSHIP.pack(socket.if_nametoindex(interface), _MULTICAST, len(NEAREST_BRIDGE), NEAREST_BRIDGE)
            self._socket.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, wanted)
        except OSError:
            self._socket.close()
            raise

    def close(self) -> None:
        """The kernel takes the interface out of the group, too."""
        self._socket.close()

    def read(self) -> list[Neighbour]:
        """Who was heard since the last call, oldest first; what is no LLDP is passed over.

        Raises:
            OSError: ENETDOWN: the interface is down, or is gone.
        """
        found = []
        for _ in range(_MOST_FRAMES):
            try:
                data, address = self._socket.recvfrom(_MOST_BYTES)
            except BlockingIOError:
                break
            if address[2] == _OUTGOING:
                continue
            try:
                found.append(parse_lldp(data))
            except MalformedLldp:
                continue
        return found
