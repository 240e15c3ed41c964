"""Simulated machines: PCI trees in sysfs with GPUs and RDMA devices, made by code, named by scenario.

Addresses of `dgx_h100` are those of the real machine; bridges, and the other machines, are made up in the form that
Linux shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from railscope.probes.rdma.inventory import read_ports
from railscope.probes.topology.data_direct import DataDirect
from railscope.probes.topology.machine import Gpu, Nic, gpus_of_pci, read_machine
from railscope.probes.topology.pci import pci_devices

GPU_CLASS, VGA_CLASS, INFINIBAND_CLASS, ETHERNET_CLASS, BRIDGE_CLASS = (
    "0x030200",
    "0x030000",
    "0x020700",
    "0x020000",
    "0x060400",
)
NVIDIA, ASPEED, MELLANOX, AMAZON = "0x10de", "0x1a03", "0x15b3", "0x1d0f"


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """A sysfs root, and how to put devices into its PCI tree."""

    sysfs: Path

    def function(
        self, path: str, class_code: str, vendor: str, numa_node: int = -1, speed: str = "32.0 GT/s PCIe"
    ) -> Path:
        """Make a PCI function and the bridges above it; `path`: addresses from the host bridge down, by slash."""
        links = self.sysfs / "bus/pci/devices"
        links.mkdir(parents=True, exist_ok=True)
        folder = self.sysfs / "devices"
        host_bridge, *addresses = path.split("/")
        folder /= host_bridge
        for address in addresses:
            folder /= address
            folder.mkdir(parents=True, exist_ok=True)
            last = address == addresses[-1]
            attributes = {
                "class": class_code if last else BRIDGE_CLASS,
                "vendor": vendor if last else "0x1000",
                "numa_node": str(numa_node),
                "current_link_speed": speed,
                "current_link_width": "16",
            }
            for name, text in attributes.items():
                (folder / name).write_text(f"{text}\n")
            link = links / address
            if not link.is_symlink():
                link.symlink_to(folder)
        return folder

    def gpu(self, path: str, numa_node: int = -1) -> None:
        self.function(path, GPU_CLASS, NVIDIA, numa_node)

    def rdma(
        self,
        device: str,
        path: str,
        numa_node: int = -1,
        *,
        ports: int = 1,
        gigabits: float = 400,
        state: str = "4: ACTIVE",
        class_code: str = INFINIBAND_CLASS,
        vendor: str = MELLANOX,
        link: str = "4X NDR",
        link_layer: str = "",
        driver: str = "",
        board: str = "",
        physical_function: str = "",
        scalable: int | None = None,
        product_data: bytes = b"",
        attributes: Mapping[str, str] | None = None,
    ) -> Path:
        """An RDMA device on a PCI function; returns the function's folder.

        `attributes` are more of that function's files; `scalable` is the number of a scalable function, which has a
        folder of its own below it.
        """
        function = self.function(path, class_code, vendor, numa_node)
        for name, text in (attributes or {}).items():
            (function / name).write_text(f"{text}\n")
        if product_data:
            (function / "vpd").write_bytes(product_data)
        if physical_function:
            (function / "physfn").symlink_to(self.sysfs / "bus/pci/devices" / physical_function)
        parent = function if scalable is None else function / f"mlx5_core.sf.{scalable}"
        folder = parent / "infiniband" / device
        for port in range(1, ports + 1):
            (folder / f"ports/{port}").mkdir(parents=True)
            (folder / f"ports/{port}/rate").write_text(f"{gigabits:g} Gb/sec ({link})\n")
            (folder / f"ports/{port}/state").write_text(f"{state}\n")
            (folder / f"ports/{port}/link_layer").write_text(f"{link_layer}\n")
        if board:
            (folder / "board_id").write_text(f"{board}\n")
        if driver and not (parent / "driver").is_symlink():
            drivers = self.sysfs / "bus/pci/drivers" / driver
            drivers.mkdir(parents=True, exist_ok=True)
            (parent / "driver").symlink_to(drivers)
        (folder / "device").symlink_to(parent)
        classes = self.sysfs / "class/infiniband"
        classes.mkdir(parents=True, exist_ok=True)
        (classes / device).symlink_to(folder)
        return function

    def gpus(self) -> tuple[Gpu, ...]:
        return gpus_of_pci(pci_devices(self.sysfs))

    def nics(self) -> tuple[Nic, ...]:
        return read_machine(self.sysfs, read_ports(self.sysfs), DataDirect(self.sysfs))[1]


def behind_switch(bus: int, slot: int, address: str) -> str:
    """The path of a function at a downstream port of the switch whose upstream port is on `bus`."""
    root = f"pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.0"
    return f"{root}/0000:{bus:02x}:00.0/0000:{bus + 1:02x}:{slot:02x}.0/{address}"


DGX_H100_NICS = {0: "18", 3: "40", 4: "4f", 5: "5e", 6: "9a", 9: "c0", 10: "ce", 11: "dc"}
"""Number of the mlx5 device of each GPU in turn, and its PCI bus."""
_DGX_H100_GPUS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")


def dgx_h100(sysfs: Path) -> SimulatedMachine:
    """Eight GPUs with a card each behind a switch of their own; two dual-port storage cards; a display controller."""
    machine = SimulatedMachine(sysfs)
    for index, ((number, nic), gpu) in enumerate(zip(DGX_H100_NICS.items(), _DGX_H100_GPUS, strict=True)):
        node, upstream = index // 4, int(nic, 16) - 2
        machine.gpu(behind_switch(upstream, 4, f"0000:{gpu}:00.0"), node)
        machine.rdma(f"mlx5_{number}", behind_switch(upstream, 0, f"0000:{nic}:00.0"), node)
    for numbers, bus, node in (((1, 2), "29", 0), ((7, 8), "aa", 1)):
        for function, number in enumerate(numbers):
            path = behind_switch(int(bus, 16) - 2, 0, f"0000:{bus}:00.{function}")
            machine.rdma(f"mlx5_{number}", path, node)
    machine.function("pci0000:00/0000:00:1c.0/0000:02:00.0/0000:03:00.0", VGA_CLASS, ASPEED, 0)
    return machine


def p4d(sysfs: Path, missing: frozenset[int] = frozenset()) -> SimulatedMachine:
    """Four switches, each with two GPUs and one card; cards in `missing` are not there."""
    machine = SimulatedMachine(sysfs)
    for index, bus in enumerate((0x10, 0x20, 0x90, 0xA0)):
        for slot in (0xC, 0xD):
            machine.gpu(behind_switch(bus - 2, slot, f"0000:{bus:02x}:1{slot:x}.0"), index // 2)
        if index not in missing:
            machine.rdma(
                f"rdmap{bus}s27",
                behind_switch(bus - 2, 0xB, f"0000:{bus:02x}:1b.0"),
                index // 2,
                gigabits=100,
                class_code=ETHERNET_CLASS,
                vendor=AMAZON,
            )
    return machine


def p5(sysfs: Path) -> SimulatedMachine:
    """Two switches, each with one GPU and four cards."""
    machine = SimulatedMachine(sysfs)
    for bus in (0x50, 0x60):
        machine.gpu(behind_switch(bus - 4, 0, f"0000:{bus - 1:02x}:00.0"), 0)
        for card in range(4):
            path = behind_switch(bus - 4, card + 1, f"0000:{bus + card:02x}:00.0")
            machine.rdma(f"rdmap{bus + card}s0", path, 0, gigabits=100, class_code=ETHERNET_CLASS, vendor=AMAZON)
    return machine


def workstation(sysfs: Path, *, gpu: bool = True) -> SimulatedMachine:
    """One GPU and one card, each at a root port of the only CPU, which reports no NUMA node."""
    machine = SimulatedMachine(sysfs)
    if gpu:
        machine.gpu("pci0000:00/0000:00:01.0/0000:01:00.0")
    machine.rdma("mlx5_0", "pci0000:00/0000:00:02.0/0000:02:00.0", gigabits=100)
    return machine


def two_sockets(sysfs: Path) -> SimulatedMachine:
    """Two GPUs and two cards on each of two NUMA nodes, no switches: nothing but the node brings them together."""
    machine = SimulatedMachine(sysfs)
    for node, first in ((0, 0x10), (1, 0x80)):
        for number in range(2):
            bus = first + 0x10 * number
            machine.gpu(f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0", node)
            bus += 4
            device = f"mlx5_{2 * node + number}"
            machine.rdma(device, f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0", node)
    return machine


def without_gpus(sysfs: Path, cards: int = 12) -> SimulatedMachine:
    """Cards at root ports, no GPU."""
    machine = SimulatedMachine(sysfs)
    for card in range(cards):
        machine.rdma(f"mlx5_{card}", f"pci0000:10/0000:10:{card + 1:02x}.0/0000:{card + 0x20:02x}:00.0", 0)
    return machine
