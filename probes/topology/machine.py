"""The GPUs and network ports of a machine with their places, from sysfs or from a topology file of NCCL.

GPUs are numbered as NVML numbers them: by PCI address, unless the description gives numbers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from railscope.probes.netdev.inventory import UNKNOWN
from railscope.probes.rdma.inventory import RdmaPort
from railscope.probes.topology.data_direct import DataDirect
from railscope.probes.topology.nccl_xml import XmlTopology
from railscope.probes.topology.paths import Place
from railscope.probes.topology.pci import PciDevice, pci_device, pci_devices, pci_order, place_in_path


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    """NVML's number."""
    place: Place


@dataclass(frozen=True, slots=True)
class Hardware:
    """What two cards have in common that were bought for the same use; empty where it is not known."""

    driver: str = ""
    board: str = ""
    """See `RdmaPort.board`."""
    model: str = ""
    """See `PciDevice.model`."""
    greatest_link: str = ""
    """See `PciDevice.greatest_link`."""

    def same_as(self, other: Hardware) -> bool:
        """Whether both are the same product, as far as is known, and something is."""
        pairs = [
            (self.driver, other.driver),
            (self.board, other.board),
            (self.model, other.model),
            (self.greatest_link, other.greatest_link),
        ]
        known = [one == another for one, another in pairs if one and another]
        return all(known) and any(one and one == another for one, another in pairs[:3])


@dataclass(frozen=True, slots=True)
class Nic:
    """One port of a network device."""

    device: str
    """RDMA device (`mlx5_0`), network device, or the PCI address where no name is known."""
    port: int | None
    """Port of the RDMA device, from 1; None for a network device, and where it is not known."""
    place: Place
    speed_bytes_per_second: int | None = None
    """What the port runs at; None where it is not known."""
    up: bool | None = None
    """Connected; while it is not, its speed says nothing."""
    hardware: Hardware = Hardware()
    link_layer: str = UNKNOWN
    """`InfiniBand`, `Ethernet` or `unknown`."""
    lanes: int | None = None
    """Of the link, in use; None: not known."""
    pci_link: str = ""
    """What its PCI link runs at, `32.0 GT/s x16`; empty: not known."""
    function: str = ""
    """PCI address of the function that it is a virtual or scalable part of; empty: it is none."""
    manages_switches: bool = False
    """It leads to NVSwitches, and to no network."""
    data_direct: str = ""
    """PCI address of the function by which it reaches GPUs, where `place` is; empty: its own."""


def read_machine(
    sysfs: Path, ports: Collection[RdmaPort], data_direct: DataDirect
) -> tuple[tuple[Gpu, ...], tuple[Nic, ...]]:
    """The GPUs of a machine, of which `sysfs` is the root, and its RDMA ports in their places.

    Raises:
        OSError: the PCI functions cannot be listed.
    """
    devices = pci_devices(sysfs)
    places = data_direct.places(devices, (port.pci for port in ports))
    return gpus_of_pci(devices), nics_of_rdma(sysfs, ports, places)


def gpus_of_pci(devices: Iterable[PciDevice]) -> tuple[Gpu, ...]:
    """The NVIDIA GPUs of a machine, from its PCI functions."""
    places = sorted((device.place for device in devices if device.is_gpu), key=lambda place: pci_order(place.address))
    return tuple(Gpu(index, place) for index, place in enumerate(places))


def gpus_of_topology(topology: XmlTopology) -> tuple[Gpu, ...]:
    """The GPUs that a topology file of NCCL names."""
    functions = sorted((f for f in topology.functions if f.is_gpu), key=lambda f: pci_order(f.place.address))
    # A function in which GPUs are not named is one GPU; one that is partitioned holds several.
    named = [(number, function.place) for function in functions for number in function.gpus or (None,)]
    numbers = {number for number, _place in named}
    numbered = None not in numbers and len(numbers) == len(named)
    gpus = [
        Gpu(number if numbered and number is not None else position, place)
        for position, (number, place) in enumerate(named)
    ]
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


def nics_of_topology(topology: XmlTopology) -> tuple[Nic, ...]:
    """The network ports that a topology file of NCCL names, and the network functions in which it names none."""
    functions = {function.place.address: function for function in topology.functions}
    nics = []
    for net in topology.nets:
        function = functions.get(net.place.address)
        hardware, link = (Hardware(model=function.model), function.link) if function else (Hardware(), "")
        speed = net.speed_bytes_per_second
        nics.append(Nic(net.name, net.port, net.place, speed, hardware=hardware, pci_link=link))
    named = {net.place.address for net in topology.nets}
    nics += [
        Nic(address, None, function.place, hardware=Hardware(model=function.model), pci_link=function.link)
        for address, function in functions.items()
        if function.is_network and address not in named
    ]
    return tuple(nics)


def described_places(topology: XmlTopology) -> dict[str, Place]:
    """Where a topology file of NCCL puts each PCI function that it names, by address."""
    return {function.place.address: function.place for function in topology.functions}


def find_described_place(place: Place, described: Mapping[str, Place]) -> Place | None:
    """Where a topology file (`described_places`) puts a PCI function; None: it knows neither that nor a switch above.

    A description may name the switches only: NCCL hangs what it finds in the machine below them.
    """
    if place.address in described:
        return described[place.address]
    for position in range(len(place.switches) - 1, -1, -1):
        above = described.get(place.switches[position])
        if above is not None:
            below = place.switches[position:]
            return Place(place.address, (*above.switches, *below), above.numa_node)
    return None


def nics_of_rdma(sysfs: Path, ports: Iterable[RdmaPort], data_direct: Mapping[str, Place]) -> tuple[Nic, ...]:
    """RDMA ports with their places in the PCI tree, of which `sysfs` is the root.

    `data_direct`: see `DataDirect.places`.  A card that has such a function is where that is, as for NCCL.
    """
    nics = []
    for port in ports:
        function = pci_device(sysfs, port.pci)
        place = function.place if function else Place(port.pci, (), port.numa_node)
        reached = data_direct.get(port.pci)
        if reached is not None:
            place = replace(reached, address=place.address)
        nics.append(
            Nic(
                port.device,
                port.port,
                place,
                port.rate_bytes_per_second,
                port.up,
                _hardware(port.driver, port.board, function),
                port.link_layer,
                port.lanes,
                function.link if function else "",
                port.physical_function or (port.pci if port.scalable else ""),
                port.manages_switches,
                reached.address if reached is not None else "",
            )
        )
    return tuple(nics)


def _hardware(driver: str, board: str, function: PciDevice | None) -> Hardware:
    return Hardware(driver, board, function.model if function else "", function.greatest_link if function else "")


def read_place(sysfs: Path, device: Path) -> Place:
    """The place of the PCI function that a `device` link leads to, also through a bus of its own, as virtio's."""
    place = place_in_path(Path(os.path.realpath(device)))
    function = pci_device(sysfs, place.address)
    return function.place if function else place
