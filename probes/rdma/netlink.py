"""A port's hw_counters in one request to the kernel, instead of one file after the other.

Sysfs asks the driver anew for every file, which in mlx5 is a firmware command each; one RDMA_NLDEV_CMD_STAT_GET
refreshes all of them once.  It also shows optional counters that were switched on, which sysfs does not list.

Source: the kernel's include/uapi/rdma/rdma_netlink.h and stat_get_doit_default_counter in
drivers/infiniband/core/nldev.c.  Framing and attributes are those of probes/netdev/netlink.py.
"""

from __future__ import annotations

import struct
from typing import Final

from railscope.probes.netdev.netlink import NETLINK_RDMA, MalformedNetlink, NetlinkSocket, attributes, messages

NLDEV: Final = 5 << 10
"""RDMA_NL_NLDEV, in the upper bits of a message's type."""
NLDEV_GET: Final = NLDEV + 1
NLDEV_STAT_GET: Final = NLDEV + 17

DEV_INDEX: Final = 1
_DEV_NAME: Final = 2
PORT_INDEX: Final = 3
HWCOUNTERS: Final = 80
_HWCOUNTER_ENTRY: Final = 81
_HWCOUNTER_NAME: Final = 82
_HWCOUNTER_VALUE: Final = 83

_U32_ATTRIBUTE: Final = struct.Struct("=HHI")


class RdmaNetlink:
    """A NETLINK_RDMA socket in the network namespace of the thread that makes it; one user at a time."""

    def __init__(self) -> None:
        """Opening it loads the kernel's RDMA core where it is a module: look for `class/infiniband` first.

        Raises:
            OSError: EPROTONOSUPPORT: this kernel has no RDMA.
        """
        self._socket = NetlinkSocket(protocol=NETLINK_RDMA)

    def close(self) -> None:
        self._socket.close()

    def device_indexes(self) -> dict[str, int]:
        """The kernel's number of every RDMA device by name; a number is not used again for another device.

        Raises:
            OSError: the kernel refuses, or does not answer within five seconds.
            MalformedNetlink: the answer is not what it should be.
        """
        return parse_devices(self._socket.dump(NLDEV_GET, b""))

    def dump(self, kind: int, device_index: int, about: bytes = b"") -> list[bytes]:
        """A table about one device, as datagrams; `about` are more attributes of the question.

        Raises:
            OSError: EINVAL: no such device; otherwise as `device_indexes`.
            MalformedNetlink: the answer is not netlink.
        """
        return self._socket.dump(kind, u32_attribute(DEV_INDEX, device_index) + about)

    def port_counters(self, device_index: int, port: int) -> dict[str, int]:
        """All hw_counters of one port by name.

        Raises:
            OSError: EINVAL: no such device or port, or it has no hw_counters; otherwise as `device_indexes`.
            MalformedNetlink: the answer is not what it should be.
        """
        body = u32_attribute(DEV_INDEX, device_index) + u32_attribute(PORT_INDEX, port)
        return parse_port_counters(self._socket.ask(NLDEV_STAT_GET, body), device_index, port)


def parse_devices(datagrams: list[bytes]) -> dict[str, int]:
    """RDMA devices' names and numbers in the answer to RDMA_NLDEV_CMD_GET; other messages are passed over.

    Raises:
        MalformedNetlink: a message is cut short, or does not name its device.
    """
    found: dict[str, int] = {}
    for data in datagrams:
        for kind, _flags, _sequence, payload in messages(data):
            if kind != NLDEV_GET:
                continue
            index: int | None = None
            name = ""
            for attribute, value in attributes(payload):
                if attribute == DEV_INDEX:
                    index = number_of(value)
                elif attribute == _DEV_NAME:
                    name = text_of(value)
            if index is None or not name:
                raise MalformedNetlink("netlink: an RDMA device without number or name")
            found[name] = index
    return found


def parse_port_counters(datagrams: list[bytes], device_index: int, port: int) -> dict[str, int]:
    """Counters of an RDMA port by name in the answer to RDMA_NLDEV_CMD_STAT_GET about it.

    Raises:
        MalformedNetlink: a message is cut short, is about another port, holds a counter without name or value, or
            nothing answers.
    """
    found: dict[str, int] | None = None
    for data in datagrams:
        for kind, _flags, _sequence, payload in messages(data):
            if kind == NLDEV_STAT_GET:
                found = (found or {}) | _statistics(payload, device_index, port)
    if found is None:
        raise MalformedNetlink("netlink: no RDMA statistics in the answer")
    return found


def _statistics(payload: memoryview, device_index: int, port: int) -> dict[str, int]:
    found: dict[str, int] = {}
    about: dict[int, int] = {}
    for kind, value in attributes(payload):
        if kind in (DEV_INDEX, PORT_INDEX):
            about[kind] = number_of(value)
        elif kind == HWCOUNTERS:
            found = counters_of(value)
    if about != {DEV_INDEX: device_index, PORT_INDEX: port}:
        raise MalformedNetlink("netlink: RDMA statistics of another port than asked for")
    return found


def counters_of(nested: memoryview) -> dict[str, int]:
    """Counters by name in an attribute HWCOUNTERS.

    Raises:
        MalformedNetlink: it is cut short, or a counter has no name or value.
    """
    return dict(_entry(entry) for kind, entry in attributes(nested) if kind == _HWCOUNTER_ENTRY)


def _entry(entry: memoryview) -> tuple[str, int]:
    name = ""
    count: int | None = None
    for kind, value in attributes(entry):
        if kind == _HWCOUNTER_NAME:
            name = text_of(value)
        elif kind == _HWCOUNTER_VALUE:
            if len(value) != 8:
                raise MalformedNetlink(f"netlink: an RDMA counter of {len(value)} bytes, expected 8")
            count = struct.unpack("=Q", value)[0]
    if not name or count is None:
        raise MalformedNetlink("netlink: an RDMA counter without name or value")
    return name, count


def number_of(value: memoryview) -> int:
    """An attribute's 32 bits.

    Raises:
        MalformedNetlink: it has another length.
    """
    if len(value) != 4:
        raise MalformedNetlink(f"netlink: a number of {len(value)} bytes, expected 4")
    number: int = struct.unpack("=I", value)[0]
    return number


def text_of(value: memoryview) -> str:
    """An attribute's text, up to its first zero byte."""
    return bytes(value).split(b"\0", 1)[0].decode("utf-8", "replace")


def u32_attribute(kind: int, value: int) -> bytes:
    """An attribute of 32 bits, as it stands in a question."""
    return _U32_ATTRIBUTE.pack(_U32_ATTRIBUTE.size, kind, value)
