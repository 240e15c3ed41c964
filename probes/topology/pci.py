"""GPUs and network cards in the PCI tree of sysfs, and the switches above each.

`SYSFS/bus/pci/devices/ADDRESS` is a link into the tree, whose folders are the bridges on the way from the host bridge:
`devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0` is root port, upstream port, downstream port,
device.  Sources: Linux Documentation/ABI/testing/sysfs-bus-pci; PCI class codes of the PCI Code and ID Assignment
Specification; NVML numbers GPUs in the order of their PCI addresses.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.probes.netdev.ethtool import PCI_ADDRESS
from railscope.probes.topology.paths import Place

_HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.ASCII)
_MODEL: Final = re.compile(r"[0-9a-f]{4}", re.ASCII)
_SPEED: Final = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?) GT/s", re.ASCII)

_NVIDIA: Final = 0x10DE
_AMD: Final = 0x1002
_MELLANOX: Final = 0x15B3
_AMD_ACCELERATORS: Final = frozenset({0x0380, 0x1200})
"""Other display controllers (MI200) and processing accelerators (MI300), as they call themselves."""
_ACCELERATOR: Final = 0x12
_DMA_CONTROLLER: Final = 0x080100
"""Class of the mlx5 data direct functions (kvDictPciClass in NCCL's src/graph/topo.cc)."""
_NETWORK: Final = 0x02
_DISPLAY: Final = 0x03
_INFINIBAND: Final = 0x0C06
"""Serial bus controller, InfiniBand: what old host channel adapters call themselves."""

_MOST_DEVICES: Final = 16_384
"""PCI functions that are looked at; a large server has about a thousand."""
_LONGEST: Final = 64


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One PCI function; what cannot be read is None."""

    place: Place
    class_code: int | None
    """24 bits: base class, subclass, programming interface."""
    vendor: int | None
    link: str = ""
    """What the link runs at now: `32.0 GT/s x16`; empty: not known."""
    model: str = ""
    """Which product it is: `15b3:1021 15b3:0023`, vendor and device, then those of the card; empty: not known."""
    greatest_link: str = ""
    """The fastest link that it can have: `32.0 GT/s x16`; empty: not known."""

    @property
    def is_gpu(self) -> bool:
        """NVIDIA's, and AMD's accelerators: the display controller of a management board or a processor is none."""
        if self.vendor == _AMD:
            return self.class_code is not None and self.class_code >> 8 in _AMD_ACCELERATORS
        return self.vendor == _NVIDIA and is_display(self.class_code)

    @property
    def is_data_direct(self) -> bool:
        """The function by which a ConnectX-8 reaches GPUs while its own is elsewhere: NCCL's nets `X_dma` are here."""
        return self.vendor == _MELLANOX and self.class_code == _DMA_CONTROLLER

    @property
    def is_network(self) -> bool:
        return is_network(self.class_code)


def is_display(class_code: int | None) -> bool:
    """Whether a PCI class is that of display controllers."""
    return class_code is not None and class_code >> 16 == _DISPLAY


def is_network(class_code: int | None) -> bool:
    """Whether a PCI class is that of network controllers."""
    return class_code is not None and (class_code >> 16 == _NETWORK or class_code >> 8 == _INFINIBAND)


def normal_address(text: str) -> str:
    """A PCI address as sysfs writes it, from other spellings (NVML: `00000000:1B:00.0`); empty: it is none."""
    address = text.strip().lower()
    if not PCI_ADDRESS.fullmatch(address):
        return ""
    domain, _, rest = address.partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def pci_order(address: str) -> tuple[int, ...]:
    """Sorting key of PCI addresses: domain, bus, device, function, as NVML numbers GPUs; what is none comes last."""
    if not PCI_ADDRESS.fullmatch(address):
        return (1 << 32,)
    return tuple(int(part, 16) for part in re.split("[:.]", address))


def same_card(one: str, other: str) -> bool:
    """Whether two PCI addresses differ in the function at most; virtual functions come on devices of their own.

    NCCL takes all of them for one (ncclIbGetPciPath in src/transport/net_ib/init.cc).
    """
    return bool(one) and one.rpartition(":")[0] == other.rpartition(":")[0]


def pci_devices(sysfs: Path) -> tuple[PciDevice, ...]:
    """Every GPU, network and data direct function on PCI, by address. One that goes away meanwhile is left out.

    Raises:
        OSError: the PCI functions cannot be listed; a machine without PCI (no such folder) has none.
    """
    found = []
    try:
        folders = list(_folders(sysfs / "bus" / "pci" / "devices"))
    except FileNotFoundError:
        return ()
    for folder in folders:
        class_code = _number(folder / "class")
        if class_code is None or not (
            is_display(class_code)
            or is_network(class_code)
            or class_code >> 16 == _ACCELERATOR
            or class_code == _DMA_CONTROLLER
        ):
            continue
        found.append(_device(folder, class_code))
    return tuple(sorted(found, key=lambda device: pci_order(device.place.address)))


def pci_device(sysfs: Path, address: str) -> PciDevice | None:
    """One PCI function of any class; None where there is none."""
    folder = sysfs / "bus" / "pci" / "devices" / address
    if not PCI_ADDRESS.fullmatch(address) or not folder.exists():
        return None
    return _device(folder, _number(folder / "class"))


def place_in_path(path: Path, numa_node: int | None = None) -> Place:
    """The place of a PCI device from the real path of its folder; that of the deepest PCI function in it."""
    root = ""
    bridges: list[str] = []
    for part in path.parts:
        if _HOST_BRIDGE.fullmatch(part):
            # A host bridge inside another tree, as Intel's VMD makes, begins a tree of its own.
            root, bridges = part, []
        elif PCI_ADDRESS.fullmatch(part):
            bridges.append(part)
    if not bridges:
        return Place("", (), numa_node, root)
    *above, address = bridges
    # The first bridge is the root port; then each switch has an upstream and a downstream port.
    return Place(address, tuple(above[1::2]), numa_node, root)


def _folders(devices: Path) -> Iterator[Path]:
    """The functions' folders, by address.

    Raises:
        OSError: they cannot be listed.
    """
    names = (entry.name for entry in devices.iterdir())
    for number, name in enumerate(sorted(name for name in names if PCI_ADDRESS.fullmatch(name))):
        if number == _MOST_DEVICES:
            return
        yield devices / name


def _device(folder: Path, class_code: int | None) -> PciDevice:
    numa_node = _number(folder / "numa_node")
    place = place_in_path(
        Path(os.path.realpath(folder)), numa_node if numa_node is not None and numa_node >= 0 else None
    )
    return PciDevice(
        # In a recorded tree the link may have become a folder, which knows nothing of bridges.
        place=place if place.address == folder.name else Place(folder.name, (), place.numa_node),
        class_code=class_code,
        vendor=_number(folder / "vendor"),
        link=link_words(_text(folder / "current_link_speed"), _text(folder / "current_link_width")),
        model=model_of(*(_text(folder / name) for name in MODEL_ATTRIBUTES)),
        greatest_link=link_words(_text(folder / "max_link_speed"), _text(folder / "max_link_width")),
    )


MODEL_ATTRIBUTES: Final = ("vendor", "device", "subsystem_vendor", "subsystem_device")
"""By these names in sysfs and in NCCL's topology files."""


def model_of(vendor: str, device: str, card_vendor: str, card: str) -> str:
    """What product a PCI function is, from its hexadecimal numbers; empty where vendor or device are not known."""
    numbers = [text.strip().lower().removeprefix("0x") for text in (vendor, device, card_vendor, card)]
    if not all(_MODEL.fullmatch(number) for number in numbers[:2]):
        return ""
    product, maker = ":".join(numbers[:2]), ":".join(numbers[2:])
    return f"{product} {maker}" if all(_MODEL.fullmatch(number) for number in numbers[2:]) else product


def link_words(speed: str, width: str) -> str:
    """A PCI link as one text, `32.0 GT/s x16`, from sysfs's two; empty where it is not known."""
    match = _SPEED.match(speed)
    return (
        f"{float(match[1])} GT/s x{width}"
        if match and width.isascii() and width.isdecimal() and 0 < int(width) <= 32
        else ""
    )


def _text(file: Path) -> str:
    """The beginning of what a file holds; empty where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(_LONGEST).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    try:
        return int(_text(file), 0)
    except ValueError:
        return None
