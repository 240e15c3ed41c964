"""The kernel's own list of network devices: RTM_GETLINK, and the messages of the same form that announce changes.

Source: the kernel's include/uapi/linux/if_link.h and rtnetlink.h, and rtnetlink(7).
"""

from __future__ import annotations

import errno
import fcntl
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from railscope.probes.netdev.bonds import LINK_UP
from railscope.probes.netdev.netlink import MalformedNetlink, NetlinkSocket, attributes, chosen_attributes, messages

RTM_NEWLINK: Final = 16
RTM_DELLINK: Final = 17
_RTM_GETLINK: Final = 18

RTNLGRP_LINK_MASK: Final = 1

_INFO: Final = struct.Struct("=BxHiII")
"""struct ifinfomsg: family, hardware type, index, flags, changed flags."""
_AF_UNSPEC: Final = 0
"""Bridges announce their ports in messages of another family, where RTM_DELLINK means "left the bridge"."""

_IFLA_IFNAME: Final = 3
_IFLA_MTU: Final = 4
_IFLA_MASTER: Final = 10
_IFLA_LINKINFO: Final = 18
_IFLA_EXT_MASK: Final = 29
_IFLA_CARRIER: Final = 33
_IFLA_CARRIER_CHANGES: Final = 35
_IFLA_PHYS_PORT_NAME: Final = 38
_IFLA_INFO_KIND: Final = 1
_IFLA_INFO_SLAVE_KIND: Final = 4
_IFLA_INFO_SLAVE_DATA: Final = 5
_IFLA_BOND_SLAVE_MII_STATUS: Final = 2

_WANTED: Final = frozenset(
    {
        _IFLA_IFNAME,
        _IFLA_MTU,
        _IFLA_MASTER,
        _IFLA_LINKINFO,
        _IFLA_CARRIER,
        _IFLA_CARRIER_CHANGES,
        _IFLA_PHYS_PORT_NAME,
    }
)

_SIOCGIFINDEX: Final = 0x8933
_INDEX_REQUEST: Final = struct.Struct("=16si20x")
"""struct ifreq: name, index."""

_RTEXT_FILTER_SKIP_STATS: Final = 8
_REQUEST: Final = _INFO.pack(_AF_UNSPEC, 0, 0, 0, 0) + struct.pack("=HHI", 8, _IFLA_EXT_MASK, _RTEXT_FILTER_SKIP_STATS)

_BYTES_EACH: Final = 2048
"""Of an answer, for each device that is expected: the kernel's message of one takes 600 to 1,500."""

_IFF_UP: Final = 0x1
ARPHRD_ETHER: Final = 1
ARPHRD_INFINIBAND: Final = 32
ARPHRD_LOOPBACK: Final = 772
_REPRESENTOR: Final = re.compile(r"(c\d+)?pf\d+(vf|sf)\d+")


@dataclass(frozen=True, slots=True)
class Link:
    """One network device as rtnetlink shows it."""

    index: int
    name: str
    hardware_type: int
    """ARPHRD_*."""
    up: bool
    """Switched on by the administrator (IFF_UP); says nothing about the cable."""
    carrier: bool | None
    carrier_changes: int | None
    mtu: int | None
    master: int | None
    """Index of the bond or bridge that it belongs to."""
    declared_kind: str
    """`veth`, `bond`, `vlan`, …; empty for what was not made by `ip link add`: hardware, loopback."""
    port_name: str
    """The port that a switch or a card with virtual functions gives it: `p0`, `pf0vf3`."""
    bond_link: bool | None = None
    """Whether the bond that it belongs to takes its link for up; None: it belongs to none."""

    @property
    def kind(self) -> str:
        """`physical`, `loopback`, `representor` (of a virtual function), or the type given to `ip link add`."""
        if self.declared_kind:
            return self.declared_kind
        return kind_of_undeclared(self.hardware_type, self.port_name)

    @property
    def link_layer(self) -> str:
        return link_layer(self.hardware_type)


def kind_of_undeclared(hardware_type: int, port_name: str) -> str:
    """What kind a network device is that no `ip link add` made."""
    if hardware_type == ARPHRD_LOOPBACK:
        return "loopback"
    return "representor" if _REPRESENTOR.fullmatch(port_name) else "physical"


def link_layer(hardware_type: int) -> str:
    """The link layer of a network device, `Ethernet`, `InfiniBand`, or `unknown`, from ARPHRD_*."""
    return {ARPHRD_ETHER: "Ethernet", ARPHRD_INFINIBAND: "InfiniBand"}.get(hardware_type, "unknown")


def answer_bytes(most_devices: int | None) -> int | None:
    """The longest answer that a socket should take (`NetlinkSocket`), where so many devices are looked at."""
    return None if most_devices is None else _BYTES_EACH * most_devices


def read_links(netlink: NetlinkSocket) -> dict[int, Link]:
    """Every network device of the socket's namespace, by index.

    Raises:
        OSError: the kernel refuses.
        AnswerTooLong: there are more devices than the socket's user wants to know.
        MalformedNetlink: its answer is not what rtnetlink describes.
    """
    return {link.index: link for link in parse_links(netlink.dump(_RTM_GETLINK, _REQUEST))}


def device_indexes(netlink: NetlinkSocket, names: Iterable[str]) -> dict[str, int]:
    """The kernel's numbers of these devices of the socket's namespace; those that are not there are left out.

    A fraction of what the list of all devices takes (SIOCGIFINDEX, netdevice(7)).

    Raises:
        OSError: the kernel refuses.
    """
    found: dict[str, int] = {}
    for name in names:
        try:
            answer = fcntl.ioctl(netlink.fileno(), _SIOCGIFINDEX, _INDEX_REQUEST.pack(name.encode(), 0))
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
        else:
            found[name] = _INDEX_REQUEST.unpack(answer)[1]
    return found


def parse_links(datagrams: Iterable[bytes]) -> list[Link]:
    """The links in the answer to RTM_GETLINK; other messages are passed over.

    Raises:
        MalformedNetlink: a message is cut short.
    """
    links: list[Link] = []
    for data in datagrams:
        for kind, _flags, _sequence, payload in messages(data):
            if kind == RTM_NEWLINK and (link := _parsed(bytes(payload))) is not None:
                links.append(link)
    return links


@lru_cache(maxsize=256)
def _parsed(payload: bytes) -> Link | None:
    """As `parse_link`, cached: in a table that is read repeatedly, few links change."""
    return parse_link(memoryview(payload))


def parse_link(payload: memoryview) -> Link | None:
    """The network device that an RTM_NEWLINK or RTM_DELLINK message is about; None if it is about a port of a bridge.

    Raises:
        MalformedNetlink: the message is cut short, or names no device.
    """
    if len(payload) < _INFO.size:
        raise MalformedNetlink(f"netlink: a link message of {len(payload)} bytes, its header takes {_INFO.size}")
    family, hardware_type, index, flags, _changed = _INFO.unpack_from(payload)
    if family != _AF_UNSPEC:
        return None
    found = chosen_attributes(payload, _INFO.size, _WANTED)
    name = _text(found.get(_IFLA_IFNAME))
    if index <= 0 or not name:
        raise MalformedNetlink(f"netlink: a link message with index {index} and name {name[:40]!r}")
    carrier = found.get(_IFLA_CARRIER)
    info = found.get(_IFLA_LINKINFO)
    kinds = {} if info is None else dict(attributes(info))
    return Link(
        index=index,
        name=name,
        hardware_type=hardware_type,
        up=bool(flags & _IFF_UP),
        carrier=None if carrier is None or len(carrier) < 1 else bool(carrier[0]),
        carrier_changes=_number(found.get(_IFLA_CARRIER_CHANGES)),
        mtu=_number(found.get(_IFLA_MTU)),
        master=_number(found.get(_IFLA_MASTER)),
        declared_kind=_text(kinds.get(_IFLA_INFO_KIND)),
        port_name=_text(found.get(_IFLA_PHYS_PORT_NAME)),
        bond_link=_bond_link(kinds),
    )


def _bond_link(kinds: Mapping[int, memoryview]) -> bool | None:
    """What a bond thinks of its member, from the member's IFLA_LINKINFO."""
    data = kinds.get(_IFLA_INFO_SLAVE_DATA)
    if data is None or _text(kinds.get(_IFLA_INFO_SLAVE_KIND)) != "bond":
        return None
    status = dict(attributes(data)).get(_IFLA_BOND_SLAVE_MII_STATUS)
    return None if status is None or len(status) < 1 else status[0] == LINK_UP


def _number(value: memoryview | None) -> int | None:
    if value is None:
        return None
    if len(value) < 4:
        raise MalformedNetlink(f"netlink: a number of {len(value)} bytes")
    return int.from_bytes(value[:4], "little" if _LITTLE else "big")


def _text(value: memoryview | None) -> str:
    return "" if value is None else bytes(value).split(b"\0", 1)[0].decode("utf-8", "replace")


_LITTLE: Final = struct.pack("=H", 1) == b"\x01\x00"
