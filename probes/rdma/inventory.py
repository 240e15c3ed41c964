"""Which RDMA devices and ports there are, and what each one is.

Source: `SYSFS/class/infiniband`, described in the kernel's Documentation/ABI/stable/sysfs-class-infiniband.  A
soft-RoCE device has no `device`, a virtual function has `device/physfn`, a bond of two mlx5 ports is one device whose
network device is the bond.  What cannot be known is None, an empty string or `unknown`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from railscope.probes.netdev.bonds import BondMember, bond_members
from railscope.probes.netdev.counters import is_counter
from railscope.probes.netdev.inventory import UNKNOWN
from railscope.probes.netdev.sysfs import (
    list_folder,
    read_bytes,
    read_link_name,
    read_numa_node,
    read_pci_address,
    read_text,
)
from railscope.probes.rdma.widths import MLX5_DRIVER

STATE_ACTIVE: Final = "ACTIVE"

_DEVICES_LIMIT: Final = 1024
_PORTS_LIMIT: Final = 256
"""InfiniBand numbers ports with one byte."""
_GIDS_LIMIT: Final = 1024
_RATE: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec\b(?: \(([0-9]{1,2})X )?")
_BOARD: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
_SCALABLE: Final = re.compile(r"\.sf\.[0-9]+")
"""In the name of the auxiliary device of a scalable function: `mlx5_core.sf.4`."""
_SWITCH_MANAGEMENT: Final = b"SW_MNG"
"""What a ConnectX that leads to NVSwitches says in its vital product data: NVIDIA's Fabric Manager User Guide finds
its ports by it."""
_INFINIBAND_CLASS: Final = "0x0207"
_PRODUCT_DATA_BYTES: Final = 1024
"""Read once of a device: each 4 bytes are a question to its firmware."""
_NUMBERED: Final = re.compile(r"[0-9]{1,3}: *([\w -]{1,40})", re.ASCII)
_NATURAL: Final = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of one RDMA device."""

    device: str
    port: int
    node_type: str
    """`CA` of an adapter, `RNIC` of iWARP, `switch`, …"""
    state: str
    """`ACTIVE`, `INIT`, `DOWN`, …"""
    physical_state: str
    """`LinkUp`, `Polling`, `Disabled`, …"""
    rate_bytes_per_second: int | None
    """Signalling rate less line coding, as the kernel prints it; many drivers show a made-up one for a port that is
    not active."""
    lanes: int | None
    """In use, the `4X` of the rate; as little to be trusted as the rate while the port is not active."""
    link_layer: str
    """`InfiniBand`, `Ethernet` or `unknown`."""
    netdev: str
    """The network device of the port, of a bond the bond; empty for none in this network namespace."""
    netdevs: tuple[str, ...]
    """All that the port's addresses belong to, VLANs included; `netdev` is the first."""
    bond_members: tuple[BondMember, ...]
    """Members of `netdev` where it is a bond: the health of the links is theirs."""
    pci: str
    """PCI address, `0000:18:00.0`; empty where there is none."""
    numa_node: int | None
    driver: str
    """Driver of the PCI function, `mlx5_core`, `bnxt_en`, `ice`; empty where there is none."""
    physical_function: str
    """PCI address of the physical function that a virtual one belongs to; empty: not a virtual function."""
    scalable: bool
    """A scalable function: a part of a PCI function with RDMA and network devices of its own."""
    board: str
    """The card's product and firmware variant (PSID), `MT_0000000838`; empty where the driver does not say."""
    manages_switches: bool
    """Leads to the NVSwitches of this machine and to no network: its card calls itself so in its PCI data."""
    firmware: str
    has_counters: bool
    """Whether InfiniBand's own counters are there; a driver's own may be there without them."""

    @property
    def name(self) -> str:
        """`mlx5_0/1`, the row of its counters."""
        return port_name(self.device, self.port)

    @property
    def up(self) -> bool | None:
        """Whether the port carries traffic; None where it cannot be known."""
        return None if self.state == UNKNOWN else self.state == STATE_ACTIVE


def port_name(device: str, port: int) -> str:
    """How an RDMA port is called wherever one string must do."""
    return f"{device}/{port}"


def class_folder(sysfs: Path) -> Path:
    """Where RDMA devices are listed."""
    return sysfs / "class" / "infiniband"


def device_names(sysfs: Path) -> list[str]:
    """Names of all RDMA devices, mlx5_2 before mlx5_10; empty where there is no RDMA."""
    return sorted(list_folder(class_folder(sysfs)), key=_natural_order)[:_DEVICES_LIMIT]


def port_numbers(device: Path | str) -> list[int]:
    """Ports of an RDMA device's folder, ascending."""
    numbers = sorted(
        {int(name) for name in list_folder(f"{device}/ports") if is_counter(name.encode()) and len(name) <= 3}
    )
    return numbers[:_PORTS_LIMIT]


def read_ports(sysfs: Path) -> tuple[RdmaPort, ...]:
    """Every port of every RDMA device; none where the kernel has no RDMA.

    Raises nothing: what one file does not say is unknown, and a device that goes while it is read has no ports.
    """
    return RdmaInventory(sysfs).read()


@dataclass(frozen=True, slots=True)
class _Device:
    """What stays as it is while a device is registered."""

    registered: tuple[int, int]
    """The number of its folder, and when that last changed."""
    node_type: str
    pci: str
    numa_node: int | None
    driver: str
    physical_function: str
    scalable: bool
    board: str
    manages_switches: bool
    firmware: str

    @property
    def whole(self) -> bool:
        """Whether everything is known: a device that is being registered shows it bit by bit."""
        return self.node_type != UNKNOWN and "" not in (self.pci, self.driver, self.firmware)


class RdmaInventory:
    """`read_ports` for repeated reads: what does not change is cached."""

    def __init__(self, sysfs: Path) -> None:
        self._sysfs = sysfs
        # Plain strings: with Path, putting names together takes as long as reading the files.
        self._folder = str(class_folder(sysfs))
        self._class_net = str(sysfs / "class" / "net")
        self._devices: dict[str, _Device] = {}

    def read(self) -> tuple[RdmaPort, ...]:
        """See `read_ports`."""
        known, self._devices = self._devices, {}
        ports: list[RdmaPort] = []
        for name in device_names(self._sysfs):
            folder = f"{self._folder}/{name}"
            try:
                status = os.stat(folder)  # noqa: PTH116
            except OSError:
                continue  # gone since it was listed
            device = known.get(name)
            if device is None or device.registered != (status.st_ino, status.st_ctime_ns):
                device = _device(folder, status)
            if device.whole:
                self._devices[name] = device
            ports += [self._port(name, folder, number, device) for number in port_numbers(folder)]
        return tuple(ports)

    def _port(self, name: str, folder: str, number: int, device: _Device) -> RdmaPort:
        port = f"{folder}/ports/{number}"
        netdevs = _netdevs(folder, port, number)
        rate = read_text(f"{port}/rate")
        return RdmaPort(
            device=name,
            port=number,
            node_type=device.node_type,
            state=_after_number(read_text(f"{port}/state")),
            physical_state=_after_number(read_text(f"{port}/phys_state")),
            rate_bytes_per_second=parse_rate(rate),
            lanes=parse_lanes(rate),
            link_layer=_one_of(read_text(f"{port}/link_layer"), "InfiniBand", "Ethernet"),
            netdev=netdevs[0] if netdevs else "",
            netdevs=netdevs,
            bond_members=bond_members(self._class_net, netdevs[0]) if netdevs else (),
            pci=device.pci,
            numa_node=device.numa_node,
            driver=device.driver,
            physical_function=device.physical_function,
            scalable=device.scalable,
            board=device.board,
            manages_switches=device.manages_switches,
            firmware=device.firmware,
            has_counters=os.path.isdir(f"{port}/counters"),  # noqa: PTH112
        )


def _device(folder: str, status: os.stat_result) -> _Device:
    hardware = f"{folder}/device"
    pci = read_pci_address(hardware)
    driver = read_link_name(f"{hardware}/driver")
    virtual = bool(read_link_name(f"{hardware}/physfn"))
    board = read_text(f"{folder}/board_id")
    return _Device(
        registered=(status.st_ino, status.st_ctime_ns),
        node_type=_after_number(read_text(f"{folder}/node_type")),
        pci=pci,
        numa_node=read_numa_node(hardware) if pci else None,
        driver=driver,
        physical_function=read_pci_address(f"{hardware}/physfn") if virtual else "",
        scalable=_SCALABLE.search(read_link_name(hardware)) is not None,
        board=board if _BOARD.fullmatch(board) else "",
        manages_switches=not virtual and driver == MLX5_DRIVER and _manages_switches(hardware),
        firmware=read_text(f"{folder}/fw_ver"),
    )


def _manages_switches(hardware: str) -> bool:
    """Whether an adapter leads to NVSwitches; only root may ask, and others take it for a usual one."""
    if not read_text(f"{hardware}/class").startswith(_INFINIBAND_CLASS):
        return False
    return _SWITCH_MANAGEMENT in read_bytes(f"{hardware}/vpd", _PRODUCT_DATA_BYTES)


@lru_cache(maxsize=64)
def parse_rate(text: str) -> int | None:
    """Bytes per second of an RDMA port's rate, `400 Gb/sec (4X NDR)`; None for anything else, and for 0."""
    match = _RATE.match(text)
    if match is None:
        return None
    whole, _, fraction = match[1].partition(".")
    megabits = int(whole) * 1000 + int(fraction.ljust(3, "0"))
    return megabits * 125_000 or None


@lru_cache(maxsize=64)
def parse_lanes(text: str) -> int | None:
    """Lanes of an RDMA port's rate, 4 of `400 Gb/sec (4X NDR)`; None for anything else, and for 0."""
    match = _RATE.match(text)
    return int(match[2]) or None if match is not None and match[2] else None


@lru_cache(maxsize=64)
def _after_number(text: str) -> str:
    """`ACTIVE` of `4: ACTIVE`."""
    match = _NUMBERED.fullmatch(text)
    return match[1].strip() or UNKNOWN if match else UNKNOWN


def _one_of(text: str, *known: str) -> str:
    return text if text in known else UNKNOWN


def _netdevs(device: str, port: str, number: int) -> tuple[str, ...]:
    """Network devices of a port: of its addresses, else of its PCI function, else the parent of soft-RoCE."""
    folder = f"{port}/gid_attrs/ndevs"
    indexes = sorted(list_folder(folder), key=_natural_order)[:_GIDS_LIMIT]
    found = dict.fromkeys(name for index in indexes if _is_netdev(name := read_text(f"{folder}/{index}")))
    if found:
        return tuple(found)
    network = f"{device}/device/net"
    candidates = sorted(list_folder(network), key=_natural_order)
    # The ports of a device share its PCI function: dev_port tells their network devices apart (mlx4).
    own = [name for name in candidates if read_text(f"{network}/{name}/dev_port") in ("", str(number - 1))]
    parent = read_text(f"{device}/parent")
    return tuple(own) or ((parent,) if _is_netdev(parent) else ())


def _is_netdev(name: str) -> bool:
    """Whether the kernel would let a network device have this name; it also becomes a part of a path."""
    return (
        0 < len(name) <= 15 and "/" not in name and name not in (".", "..") and name.isprintable() and " " not in name
    )


@lru_cache(maxsize=1024)
def _natural_order(name: str) -> tuple[tuple[bool, int, str], ...]:
    return tuple(
        (part.isdecimal(), int(part) if part.isdecimal() and part.isascii() else 0, part)
        for part in _NATURAL.split(name)
        if part
    )
