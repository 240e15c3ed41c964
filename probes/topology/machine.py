"""The GPUs and network ports of a machine with their places, from sysfs or from a topology file of NCCL.

GPUs are numbered as NVML numbers them: by PCI address, unless the description gives numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from railscope.probes.rdma.inventory import RdmaPort
from railscope.probes.topology.nccl_xml import XmlTopology
from railscope.probes.topology.paths import Place
from railscope.probes.topology.pci import PciDevice, pci_device, pci_order, place_in_path


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    """NVML's number."""
    place: Place


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


def gpus_of_pci(devices: Iterable[PciDevice]) -> tuple[Gpu, ...]:
    """The NVIDIA GPUs of a machine, from its PCI functions."""
    places = sorted((device.place for device in devices if device.is_gpu), key=lambda place: pci_order(place.address))
    return tuple(Gpu(index, place) for index, place in enumerate(places))


def gpus_of_topology(topology: XmlTopology) -> tuple[Gpu, ...]:
    """The GPUs that a topology file of NCCL names."""
    functions = sorted((f for f in topology.functions if f.is_gpu), key=lambda f: pci_order(f.place.address))
    numbers = {function.gpu for function in functions}
    numbered = None not in numbers and len(numbers) == len(functions)
    gpus = [
        Gpu(function.gpu if numbered and function.gpu is not None else position, function.place)
        for position, function in enumerate(functions)
    ]
    return tuple(sorted(gpus, key=lambda gpu: gpu.index))


def nics_of_topology(topology: XmlTopology) -> tuple[Nic, ...]:
    """The network ports that a topology file of NCCL names, and the network functions in which it names none."""
    nics = [Nic(net.name, net.port, net.place, net.speed_bytes_per_second) for net in topology.nets]
    named = {net.place.address for net in topology.nets}
    nics += [
        Nic(function.place.address, None, function.place)
        for function in topology.functions
        if function.is_network and function.place.address not in named
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


def nics_of_rdma(sysfs: Path, ports: Iterable[RdmaPort]) -> tuple[Nic, ...]:
    """RDMA ports with their places in the PCI tree, of which `sysfs` is the root."""
    nics = []
    for port in ports:
        function = pci_device(sysfs, port.pci)
        place = function.place if function else Place(port.pci, (), port.numa_node)
        nics.append(Nic(port.device, port.port, place, port.rate_bytes_per_second, port.up))
    return tuple(nics)


def read_place(sysfs: Path, device: Path) -> Place:
    """The place of the PCI function that a `device` link leads to, also through a bus of its own, as virtio's."""
    place = place_in_path(Path(os.path.realpath(device)))
    function = pci_device(sysfs, place.address)
    return function.place if function else place
