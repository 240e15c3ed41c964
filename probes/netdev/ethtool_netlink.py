"""Asks the kernel what only ethtool's netlink family tells: a module's memory, and what error correction mended.

Sources: the kernel's include/uapi/linux/ethtool_netlink.h and genetlink.h, and its
Documentation/networking/ethtool-netlink.rst.
A page of a module's memory is read from the module itself, over a bus of some kilobytes a second: seldom, and for a
user with CAP_NET_ADMIN alone.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from railscope.probes.netdev.netlink import MalformedNetlink, NetlinkSocket, attributes, messages

_NETLINK_GENERIC: Final = 16
_CONTROL: Final = 16
"""GENL_ID_CTRL."""
_GET_FAMILY: Final = 3
_FAMILY_ID: Final = 1
_FAMILY_NAME: Final = 2
_GENERIC: Final = struct.Struct("=BBH")
"""struct genlmsghdr: command, version, reserved."""
_ATTRIBUTE: Final = struct.Struct("=HH")
_NESTED: Final = 0x8000
_ERROR_TYPE: Final = 2

_FEC_GET: Final = 29
_MODULE_EEPROM_GET: Final = 31
_HEADER: Final = 1
_HEADER_DEVICE_NAME: Final = 2
_HEADER_FLAGS: Final = 3
_FLAG_STATISTICS: Final = 4

_FEC_STATISTICS: Final = 5
_FEC_CORRECTED: Final = 2
_FEC_UNCORRECTABLE: Final = 3
_FEC_CORRECTED_BITS: Final = 4
_FEC_HISTOGRAM: Final = 5
_BIN_LOW: Final = 2
_BIN_HIGH: Final = 3
_BIN_VALUE: Final = 4
_MOST_BINS: Final = 64

_EEPROM_OFFSET: Final = 2
_EEPROM_LENGTH: Final = 3
_EEPROM_PAGE: Final = 4
_EEPROM_BANK: Final = 5
_EEPROM_ADDRESS: Final = 6
_EEPROM_DATA: Final = 7
_MODULE_ADDRESS: Final = 0x50
_NAME_BYTES: Final = 15


@dataclass(frozen=True, slots=True)
class FecStatistics:
    """What forward error correction has done on a port since its driver was loaded; None: the driver does not count."""

    corrected_blocks: int | None
    uncorrectable_blocks: int | None
    corrected_bits: int | None
    histogram: tuple[tuple[int, int, int], ...]
    """(fewest, most corrected symbols of a block, blocks); empty: not counted."""


class EthtoolNetlink:
    """For the network namespace of the thread that makes it; not thread-safe."""

    def __init__(self) -> None:
        """Raises OSError: the kernel refuses the socket, or knows no ethtool over netlink (before 5.6)."""
        self._socket = NetlinkSocket(protocol=_NETLINK_GENERIC)
        try:
            self._family = self._find_family()
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def fec_statistics(self, device: str) -> FecStatistics:
        """What error correction did on a port.

        Raises:
            OSError: EOPNOTSUPP: the driver has none; ENODEV: there is no such device.
            MalformedNetlink: the answer is not netlink.
        """
        header = _attribute(_HEADER_FLAGS, struct.pack("=I", _FLAG_STATISTICS))
        for payload in self._ask(_FEC_GET, device, header):
            return parse_fec(payload)
        return FecStatistics(None, None, None, ())

    def module_page(self, device: str, page: int, offset: int, length: int, bank: int = 0) -> bytes:
        """A part of a module's memory: at most 128 bytes that do not cross from the lower half into the upper one.

        Raises:
            OSError: EOPNOTSUPP or EIO: no module, or the driver does not read it; EPERM: not without CAP_NET_ADMIN.
            MalformedNetlink: the answer is not netlink.
        """
        body = (
            _attribute(_EEPROM_OFFSET, struct.pack("=I", offset))
            + _attribute(_EEPROM_LENGTH, struct.pack("=I", length))
            + _attribute(_EEPROM_PAGE, struct.pack("=B", page))
            + _attribute(_EEPROM_BANK, struct.pack("=B", bank))
            + _attribute(_EEPROM_ADDRESS, struct.pack("=B", _MODULE_ADDRESS))
        )
        for payload in self._ask(_MODULE_EEPROM_GET, device, b"", body):
            for kind, value in attributes(payload):
                if kind == _EEPROM_DATA:
                    return bytes(value)
        return b""

    def _find_family(self) -> int:
        body = _GENERIC.pack(_GET_FAMILY, 1, 0) + _attribute(_FAMILY_NAME, b"ethtool\0")
        for payload in self._answers(_CONTROL, body):
            for kind, value in attributes(payload):
                if kind == _FAMILY_ID and len(value) == 2:
                    return int(struct.unpack("=H", value)[0])
        raise MalformedNetlink("the kernel names no number for ethtool's netlink family")

    def _ask(self, command: int, device: str, header: bytes, body: bytes = b"") -> list[memoryview]:
        name = _attribute(_HEADER_DEVICE_NAME, device.encode()[:_NAME_BYTES] + b"\0")
        request = _GENERIC.pack(command, 1, 0) + _attribute(_HEADER | _NESTED, name + header) + body
        return self._answers(self._family, request)

    def _answers(self, kind: int, body: bytes) -> list[memoryview]:
        """Attributes of each answer."""
        return [
            payload[_GENERIC.size :]
            for datagram in self._socket.ask(kind, body)
            for found, _flags, _sequence, payload in messages(datagram)
            if found == kind and len(payload) >= _GENERIC.size
        ]


def parse_fec(payload: bytes | memoryview) -> FecStatistics:
    """The statistics in an answer to ETHTOOL_MSG_FEC_GET, whose first number is the total of all lanes.

    Raises:
        MalformedNetlink: the attributes are broken.
    """
    counts: dict[int, int] = {}
    bins = []
    for kind, value in attributes(memoryview(payload)):
        if kind != _FEC_STATISTICS:
            continue
        for statistic, number in attributes(value):
            if statistic == _FEC_HISTOGRAM:
                bins.append(_bin(number))
            elif len(number) >= 8:
                counts[statistic] = int(struct.unpack_from("=Q", number)[0])
    return FecStatistics(
        counts.get(_FEC_CORRECTED),
        counts.get(_FEC_UNCORRECTABLE),
        counts.get(_FEC_CORRECTED_BITS),
        tuple(one for one in bins[:_MOST_BINS] if one is not None),
    )


def _bin(value: memoryview) -> tuple[int, int, int] | None:
    found = {kind: int.from_bytes(number, "little") for kind, number in attributes(value) if len(number) in (4, 8)}
    if not found.keys() >= {_BIN_LOW, _BIN_HIGH, _BIN_VALUE}:
        return None
    return found[_BIN_LOW], found[_BIN_HIGH], found[_BIN_VALUE]


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + b"\0" * (-len(value) % 4)
