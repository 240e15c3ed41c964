"""Which device has which address: RTM_GETADDR of one network namespace.

Source: the kernel's include/uapi/linux/if_addr.h, and rtnetlink(7).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from railscope.probes.netdev.netlink import MalformedNetlink, NetlinkSocket, chosen_attributes, messages

_RTM_NEWADDR: Final = 20
_RTM_GETADDR: Final = 22
_ADDRESS_MESSAGE: Final = struct.Struct("=4BI")
"""struct ifaddrmsg: family, prefix length, flags, scope, index."""
_REQUEST: Final = _ADDRESS_MESSAGE.pack(0, 0, 0, 0, 0)
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_LENGTHS: Final = (4, 16)
_MAPPED: Final = bytes(10) + b"\xff\xff"
"""What an IPv4 address begins with in an IPv6 socket."""


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """One address of one device."""

    index: int
    """Number of the device."""
    address: bytes
    """4 bytes of IPv4 or 16 of IPv6, in network order."""


MOST_TABLE_BYTES: Final = 4 << 20
"""Of a list of devices or of addresses that is asked for again and again: thousands of devices, 40,000 addresses."""


def plain_address(address: bytes) -> bytes:
    """The IPv4 address in an IPv6 one that stands for it (`::ffff:10.0.0.1`); any other as it is."""
    return address[12:] if len(address) == 16 and address.startswith(_MAPPED) else address


def read_addresses(netlink: NetlinkSocket) -> list[LocalAddress]:
    """Every IP address of the socket's network namespace.

    Raises:
        OSError: the kernel refuses.
        MalformedNetlink: its answer is not what rtnetlink describes.
    """
    return parse_addresses(netlink.dump(_RTM_GETADDR, _REQUEST))


def parse_addresses(datagrams: Iterable[bytes]) -> list[LocalAddress]:
    """The addresses in the answer to RTM_GETADDR; other messages and other families are passed over.

    Raises:
        MalformedNetlink: a message is cut short.
    """
    found: list[LocalAddress] = []
    for data in datagrams:
        for kind, _flags, _sequence, payload in messages(data):
            if kind != _RTM_NEWADDR:
                continue
            if len(payload) < _ADDRESS_MESSAGE.size:
                raise MalformedNetlink(
                    f"netlink: an address message of {len(payload)} bytes, expected {_ADDRESS_MESSAGE.size}"
                )
            index = _ADDRESS_MESSAGE.unpack_from(payload)[4]
            values = chosen_attributes(payload, _ADDRESS_MESSAGE.size, (_IFA_ADDRESS, _IFA_LOCAL))
            # Of a point-to-point link IFA_ADDRESS is the other end's.
            address = bytes(values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS, b"")))
            if len(address) in _LENGTHS:
                found.append(LocalAddress(index, address))
    return found
