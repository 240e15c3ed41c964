"""Which data direct function belongs to which card: the PCI function by which a ConnectX-8 reaches GPUs.

The card's own function may be elsewhere, at a processor; NCCL puts a net that has a data direct function where that one
is (ncclIbInitDevices in src/transport/net_ib/init.cc, by mlx5dv_get_data_direct_sysfs_path).  The kernel joins the two
by a unique identifier: the driver asks the card's firmware for it, and the function has it in its vital product data
under the keyword VU (Linux drivers/infiniband/hw/mlx5/data_direct.c).  Firmware is not asked here.  But the identifier
begins with the serial number of the card, which its own function has under SN and VU: `MT2421600CDEMLNXS0D0F0`.

Vital product data are read where a machine has data direct functions, once when its devices change: each 4 bytes are a
question to firmware.  Their form: PCI Local Bus Specification 3.0, appendix I.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from railscope.probes.netdev.sysfs import read_bytes
from railscope.probes.topology.paths import Place
from railscope.probes.topology.pci import PciDevice

_LARGE_RESOURCE: Final = 0x80
_READ_ONLY: Final = 0x90
_END: Final = 0x78
_SMALL_LENGTH: Final = 0x07
_HEADER_BYTES: Final = 3
_MOST_BYTES: Final = 1024
_FUNCTION: Final = re.compile(rb"S[0-9]{1,3}D[0-9]{1,3}F[0-9]{1,3}$")
"""Socket, device and function of a card, at the end of an identifier."""
_SHORTEST_SERIAL: Final = 4


def parse_product_data(data: bytes) -> dict[str, bytes]:
    """The read-only keywords of vital product data, with their values; none of what is no such data."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(data) and data[at] != _END:
        if not data[at] & _LARGE_RESOURCE:
            at += 1 + (data[at] & _SMALL_LENGTH)
            continue
        length = int.from_bytes(data[at + 1 : at + _HEADER_BYTES], "little")
        resource = data[at + _HEADER_BYTES : at + _HEADER_BYTES + length]
        if data[at] == _READ_ONLY:
            found |= _keywords(resource)
        at += _HEADER_BYTES + length
    return found


def _keywords(resource: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    at = 0
    while at + _HEADER_BYTES <= len(resource):
        length = resource[at + 2]
        value = resource[at + _HEADER_BYTES : at + _HEADER_BYTES + length]
        found.setdefault(resource[at : at + 2].decode("latin-1"), value)
        at += _HEADER_BYTES + length
    return found


class DataDirect:
    """Knows the functions for data direct of a machine; asks the firmware again only when functions or cards change."""

    def __init__(self, sysfs: Path) -> None:
        """`sysfs`: root of the tree."""
        self._sysfs = sysfs
        self._read_for: tuple[tuple[Place, ...], tuple[str, ...]] = (), ()
        self._found: Mapping[str, Place] = {}

    def places(self, devices: Iterable[PciDevice], addresses: Iterable[str]) -> Mapping[str, Place]:
        """Where the data direct function of each card is, by the address of the card's own function.

        Args:
            devices: functions of the machine, those for data direct among them.
            addresses: of cards; empty ones are passed over.
        """
        functions = tuple(device.place for device in devices if device.is_data_direct)
        cards = tuple(dict.fromkeys(address for address in addresses if address))
        if (functions, cards) != self._read_for:
            self._found = _read_places(self._sysfs, functions, cards) if functions else {}
            self._read_for = functions, cards
        return self._found


def _read_places(sysfs: Path, functions: Iterable[Place], cards: Iterable[str]) -> dict[str, Place]:
    identifiers = {place: _read(sysfs, place.address).get("VU", b"") for place in functions}
    found = {}
    for address in cards:
        own = _read(sysfs, address)
        serial = own.get("SN", b"").strip()
        if len(serial) < _SHORTEST_SERIAL:
            continue
        of_card = {place: told for place, told in identifiers.items() if told.startswith(serial)}
        # Of a card with several functions each has one.
        tail = _tail(own.get("VU", b""))
        same = [place for place, told in of_card.items() if tail and _tail(told) == tail]
        if len(of_card) == 1 or len(same) == 1:
            found[address] = next(iter(same or of_card))
    return found


def _read(sysfs: Path, address: str) -> dict[str, bytes]:
    return parse_product_data(read_bytes(sysfs / "bus" / "pci" / "devices" / address / "vpd", _MOST_BYTES))


def _tail(identifier: bytes) -> bytes:
    match = _FUNCTION.search(identifier.rstrip(b"\0 "))
    return match[0] if match else b""
