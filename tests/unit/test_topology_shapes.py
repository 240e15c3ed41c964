"""Topology files of the shapes that clouds and vendors publish, and the map of each, worked out by hand.

The machines are simulated: names, addresses and numbers are made up, the trees have the form of the public files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.inspection.answers import decode, encode
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.rails.gpu_affinity import MappedNic, map_rails
from railscope.agent.node.rails.job_settings import JobSettings, TopologyFiles, believe
from railscope.agent.node.targets.processes import Describe, Description
from railscope.probes.netdev.sysfs import read_bytes
from railscope.probes.rdma.inventory import read_ports
from railscope.probes.topology.data_direct import DataDirect, parse_product_data
from railscope.probes.topology.machine import gpus_of_topology, nics_of_topology
from railscope.probes.topology.nccl_xml import parse_topology
from railscope.probes.topology.paths import PathType
from railscope.probes.topology.pci import pci_devices
from tests.trees.pci import SimulatedMachine

ADA = Tenant(uid=1001)

BRIDGE, GPU, AMD_GPU, ETHERNET, INFINIBAND, DMA = "0x060400", "0x030200", "0x120000", "0x020000", "0x020700", "0x080100"


def pci(busid: str, code: str, *inside: str) -> str:
    return f'<pci busid="{busid}" class="{code}" link_speed="32.0 GT/s PCIe" link_width="16">{"".join(inside)}</pci>'


def switch(busid: str, *inside: str) -> str:
    return pci(busid, BRIDGE, *inside)


def gpu(busid: str, *numbers: int, code: str = GPU) -> str:
    return pci(busid, code, *(f'<gpu dev="{number}" rank="{number}" sm="90" gdr="1"/>' for number in numbers))


def net(name: str, port: int = 1, speed: int = 400_000, more: str = "") -> str:
    return f'<net name="{name}" dev="0" speed="{speed}" port="{port}" gdr="1" {more}/>'


def nic(busid: str, *nets: str, code: str = INFINIBAND) -> str:
    return pci(busid, code, f"<nic>{''.join(nets)}</nic>" if nets else "")


def cpu(numa: int, *inside: str, host: str = "") -> str:
    return f'<cpu numaid="{numa}"{f" host_hash={host!r}" if host else ""} arch="x86_64">{"".join(inside)}</cpu>'


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    inside: tuple[str, ...]
    ports: dict[str, tuple[int, ...]]
    """GPUs of each rail's port, rails in order; a port that is not its device's first is named with it."""
    others: tuple[str, ...] = ()
    """Ports that are no rails."""
    version: int = 1
    rails: tuple[str, ...] = ()
    """Numbers, where they are not 0, 1, 2, …"""

    @property
    def data(self) -> bytes:
        return f'<system version="{self.version}">{"".join(self.inside)}</system>'.encode()


def nodes_of_pairs() -> tuple[str, ...]:
    """Virtual machine with eight GPUs: a made-up switch a node, with two GPUs and two cards; nodes out of order."""
    return tuple(
        cpu(
            node,
            switch(
                f"ffff:ff:0{place + 1}.0",
                *(pci(f"000{2 * place + one}:00:00.0", GPU) for one in (1, 2)),
                *(pci(f"010{2 * place + one}:00:00.0", INFINIBAND) for one in (1, 2)),
            ),
        )
        for place, node in enumerate((1, 0, 3, 2))
    )


def one_switch_each(count: int, *, functions: int = 1, speed: int = 400_000) -> tuple[str, ...]:
    """A GPU and a card behind two levels of switches each, cards of one or two functions with a port each."""
    return tuple(
        cpu(
            node,
            *(
                switch(
                    f"0000:{16 * number:02x}:00.0",
                    switch(f"0000:{16 * number + 1:02x}:00.0", gpu(f"0000:{16 * number + 2:02x}:00.0", number)),
                    switch(
                        f"0000:{16 * number + 3:02x}:00.0",
                        nic(
                            f"0000:{16 * number + 4:02x}:00.0",
                            *(net(f"mlx5_{functions * number + one}", one + 1, speed) for one in range(functions)),
                        ),
                    ),
                )
                for number in range(node * count // 2, (node + 1) * count // 2)
            ),
        )
        for node in (0, 1)
    )


def switch_of_four(bus: int, first: int, *cards: str, speed: int = 100_000) -> str:
    """Two GPUs and some cards at one switch."""
    return switch(
        f"0000:{bus:02x}:00.0",
        *(gpu(f"0000:{bus + 1 + one:02x}:00.0", first + one) for one in (0, 1)),
        *(nic(f"0000:{bus + 8 + at:02x}:00.0", net(name, 1, speed), code=ETHERNET) for at, name in enumerate(cards)),
    )


def data_direct(host: str, prefix: str) -> tuple[str, ...]:
    """Four GPUs, each with the data direct function of a card that is elsewhere; rail names cross in each node."""
    return tuple(
        cpu(
            node,
            *(
                switch(
                    f"00{node}{domain}:01:00.0",
                    nic(f"00{node}{domain}:03:00.0", net(f"{prefix}{2 * node + (9 - domain)}_dma"), code=DMA),
                    switch(f"00{node}{domain}:04:00.0", gpu(f"00{node}{domain}:06:00.0", 2 * node + domain - 8)),
                )
                for domain in (8, 9)
            ),
            host=host,
        )
        for node in (0, 1)
    )


def accelerators(count: int) -> tuple[str, ...]:
    """RCCL: accelerators behind a bridge of their own, beside a card at the same switch."""
    return tuple(
        cpu(
            node,
            *(
                switch(
                    f"0000:{8 * number + 1:02x}:00.0",
                    switch(
                        f"0000:{8 * number + 2:02x}:00.0",
                        pci(
                            f"0000:{8 * number + 3:02x}:00.0",
                            AMD_GPU,
                            f'<gpu dev="{number}" sm="94" gcn="gfx942" arch="1" rank="{number}" gdr="1">'
                            '<xgmi target="0000:03:00.0" count="1" tclass="0x120000"/></gpu>',
                        ),
                    ),
                    nic(f"0000:{8 * number + 4:02x}:00.0", net(f"rdma{number}"), code=ETHERNET),
                )
                for number in range(node * count // 2, (node + 1) * count // 2)
            ),
        )
        for node in (0, 1)
    )


SHAPES = (
    Shape(
        "cards without names, nodes out of order",
        nodes_of_pairs(),
        {f"010{number}:00:00.0": (number - 1,) for number in range(1, 9)},
    ),
    Shape(
        "one card for a node's GPUs",
        (
            cpu(0, *(pci(f"000{one}:00:00.0", GPU) for one in range(1, 5)), pci("0101:00:00.0", INFINIBAND)),
            cpu(1, *(pci(f"000{one}:00:00.0", GPU) for one in range(5, 9))),
        ),
        {"0101:00:00.0": (0, 1, 2, 3)},
    ),
    Shape(
        "a network device of no PCI function",
        (
            cpu(0, gpu("0001:00:00.0", 0), "<nic>" + net("eth0", 0, 100_000) + "</nic>"),
            cpu(1, gpu("0002:00:00.0", 1)),
        ),
        {"eth0": (0,)},
    ),
    Shape(
        "two GPUs to a card",
        tuple(
            cpu(
                node,
                *(switch_of_four(32 * (2 * node + one), 4 * node + 2 * one, f"rdmap{one}s{node}") for one in (0, 1)),
            )
            for node in (0, 1)
        ),
        {"rdmap0s0": (0, 1), "rdmap1s0": (2, 3), "rdmap0s1": (4, 5), "rdmap1s1": (6, 7)},
    ),
    Shape(
        "four cards to a GPU",
        (
            cpu(
                0,
                *(
                    switch(
                        f"0000:{bus:02x}:00.0",
                        *(
                            nic(f"0000:{bus + 1 + at:02x}:00.0", net(f"rdmap{bus + 1 + at}s0", 1, 100_000))
                            for at in range(4)
                        ),
                        gpu(f"0000:{bus + 8:02x}:00.0", number),
                    )
                    for number, bus in enumerate((0x50, 0x60))
                ),
            ),
        ),
        {f"rdmap{bus + at}s0": (number,) for number, bus in enumerate((0x51, 0x61)) for at in range(4)},
    ),
    Shape(
        "two GPUs and two cards at a switch, and storage at none",
        (
            cpu(
                0,
                switch_of_four(0x20, 0, "mlx5_0", "mlx5_1", speed=200_000),
                switch("0000:40:00.0", nic("0000:41:00.0", net("mlx5_4", 1, 200_000), net("mlx5_5", 2, 200_000))),
            ),
            cpu(1, switch_of_four(0x60, 2, "mlx5_2", "mlx5_3", speed=200_000)),
        ),
        {f"mlx5_{number}": (number,) for number in range(4)},
        ("mlx5_4", "mlx5_5"),
    ),
    Shape("a card to a GPU", one_switch_each(8), {f"mlx5_{number}": (number,) for number in range(8)}),
    Shape(
        "a card of two functions to a GPU",
        one_switch_each(8, functions=2, speed=200_000),
        {f"mlx5_{2 * number + one}": (number,) for number in range(8) for one in (0, 1)},
    ),
    Shape(
        "two ports of one device",
        (
            cpu(
                0,
                switch("0000:10:00.0", gpu("0000:11:00.0", 0), nic("0000:12:00.0", net("mlx4_0", 1), net("mlx4_0", 3))),
            ),
        ),
        {"mlx4_0": (0,), "mlx4_0:2": (0,)},
    ),
    Shape(
        "rails and planes of a card's functions",
        (
            cpu(
                0,
                *(
                    switch(
                        f"0000:{16 * number + 16:02x}:00.0",
                        gpu(f"0000:{16 * number + 17:02x}:00.0", number),
                        nic(
                            f"0000:{16 * number + 18:02x}:00.0",
                            *(
                                net(f"mlx5_{2 * number + one}", one + 1, more=f'rail="{number}" plane="{one}"')
                                for one in (0, 1)
                            ),
                        ),
                    )
                    for number in (0, 1)
                ),
            ),
        ),
        {"mlx5_0": (0,), "mlx5_1": (0,), "mlx5_2": (1,), "mlx5_3": (1,)},
        rails=("0", "0", "1", "1"),
    ),
    Shape(
        "a card's own switch, with the GPU below it",
        tuple(
            cpu(
                node,
                *(
                    switch(
                        f"0000:{16 * at + 128 * node:02x}:00.0",
                        switch(
                            f"0000:{16 * at + 128 * node + 1:02x}:00.0",
                            nic(
                                f"0000:{16 * at + 128 * node + 2:02x}:00.0", net(f"vf_rail{2 * node + at}", 1, 800_000)
                            ),
                            switch(
                                f"0000:{16 * at + 128 * node + 3:02x}:00.0",
                                gpu(f"0000:{16 * at + 128 * node + 4:02x}:00.0", 2 * node + at),
                            ),
                        ),
                    )
                    for at in (0, 1)
                ),
            )
            for node in (0, 1)
        ),
        {f"vf_rail{number}": (number,) for number in range(4)},
    ),
    Shape(
        "data direct functions, crossed",
        data_direct("0x5", "fab"),
        {"fab1_dma": (0,), "fab0_dma": (1,), "fab3_dma": (2,), "fab2_dma": (3,)},
    ),
    Shape(
        "GPUs and cards at roots of their own",
        tuple(
            cpu(
                node,
                *(gpu(f"00{node}{8 + at}:01:00.0", 2 * node + at) for at in (0, 1)),
                *(nic(f"00{node}{2 * at}:03:00.0", net(f"mlx5_{2 * node + at}")) for at in (0, 1)),
            )
            for node in (0, 1)
        ),
        {f"mlx5_{number}": (number,) for number in range(4)},
    ),
    Shape("accelerators of RCCL", accelerators(8), {f"rdma{number}": (number,) for number in range(8)}, version=2),
    Shape(
        "a function of two GPUs",
        (cpu(0, switch("0008:01:00.0", gpu("0008:06:00.0", 0, 1), nic("0008:03:00.0", net("mlx5_0")))),),
        {"mlx5_0": (0, 1)},
    ),
    Shape(
        "cards that NCCL merged",
        (
            cpu(
                0,
                switch("0000:10:00.0", gpu("0000:11:00.0", 0), nic("0000:12:00.0", net("mlx5_0+mlx5_1", 1, 800_000))),
            ),
        ),
        {"mlx5_0": (0,), "mlx5_1": (0,)},
    ),
    Shape(
        "virtual bridges of a cloud, whose links say nothing",
        (
            cpu(
                0,
                *(
                    f'<pci busid="0000:{bus:02x}:00.0" class="{BRIDGE}" link_speed="2.5 GT/s PCIe" link_width="1">'
                    f'<pci busid="0000:{bus + 1:02x}:00.0" class="{ETHERNET}" link_speed="32.0 GT/s PCIe" '
                    f'link_width="0"><nic>{net(name, 1, 200_000)}</nic></pci>'
                    f"{gpu(f'0000:{bus + 2:02x}:00.0', number)}</pci>"
                    for number, (bus, name) in enumerate(((0xA0, "mlx5_7"), (0xE0, "mlx5_0")))
                ),
            ),
        ),
        {"mlx5_7": (0,), "mlx5_0": (1,)},
    ),
    Shape(
        "devices that put and signal only are no ports",
        (
            cpu(
                0,
                switch(
                    "0000:10:00.0",
                    gpu("0000:11:00.0", 0),
                    nic("0000:12:00.0", net("mlx5_0", more='net="1" gin="1"'), net("gin_0", more='net="0" gin="1"')),
                ),
            ),
        ),
        {"mlx5_0": (0,)},
    ),
    Shape(
        "ports of a switch that were given one address",
        (
            cpu(
                0,
                switch(
                    "0000:c1:00.0",
                    *(
                        switch(
                            "0000:c5:00.0",
                            gpu(f"0000:d{number}:00.0", number),
                            nic(f"0000:c{9 - number}:00.0", net(f"mlx5_{9 - number}")),
                        )
                        for number in range(4)
                    ),
                ),
            ),
        ),
        {"mlx5_9": (0,), "mlx5_8": (1,), "mlx5_7": (2,), "mlx5_6": (3,)},
    ),
    Shape(
        "an address that is a bridge's and a card's",
        (
            cpu(
                0,
                switch(
                    "0000:a1:00.0", switch("0000:a9:00.0", gpu("0000:aa:00.0", 0), nic("0000:a0:00.0", net("mlx5_0")))
                ),
                switch(
                    "0000:81:00.0", switch("0000:89:00.0", gpu("0000:8a:00.0", 1), nic("0000:a1:00.0", net("mlx5_1")))
                ),
            ),
        ),
        {"mlx5_0": (0,), "mlx5_1": (1,)},
    ),
)


def mapped(data: bytes) -> list[tuple[MappedNic, ...]]:
    return [
        map_rails(nics_of_topology(machine), gpus_of_topology(machine), topology=machine)
        for machine in parse_topology(data).machines
    ]


def label(entry: MappedNic) -> str:
    return entry.nic.device if entry.nic.port in (None, 1) else f"{entry.nic.device}:{entry.nic.port}"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_map_is_the_one_worked_out_by_hand_and_nothing_is_sick(shape: Shape) -> None:
    (found,) = mapped(shape.data)
    ports = [entry for entry in found if entry.rail is not None]
    assert {label(entry): entry.gpus for entry in ports} == shape.ports
    assert [label(entry) for entry in ports] == list(shape.ports)
    assert tuple(entry.rail for entry in ports) == (shape.rails or tuple(map(str, range(len(ports)))))
    assert tuple(label(entry) for entry in found if entry.rail is None) == shape.others
    assert [entry.problem for entry in ports] == [""] * len(ports)


def test_machines_that_nvlink_joins_are_told_apart() -> None:
    inside = "".join((*data_direct("0xaa", "fab"), *data_direct("0xbb", "other")))
    first, second = mapped(f'<system version="1">{inside}</system>'.encode())
    assert [entry.nic.device for entry in first] == ["fab1_dma", "fab0_dma", "fab3_dma", "fab2_dma"]
    assert next((entry.nic.device, entry.gpus) for entry in second) == ("other1_dma", (0,))


def test_a_card_of_a_file_that_is_slower_than_its_siblings_is_sick() -> None:
    model = 'vendor="0x15b3" device="0x1021" subsystem_vendor="0x15b3" subsystem_device="0x0023"'
    nodes = "".join(
        switch(
            f"0000:{bus:02x}:00.0",
            gpu(f"0000:{bus + 1:02x}:00.0", number),
            f'<pci busid="0000:{bus + 2:02x}:00.0" class="{INFINIBAND}" {model} link_speed="32.0 GT/s PCIe" '
            f'link_width="{width}"><nic>{net(f"mlx5_{number}", 1, speed)}</nic></pci>',
        )
        for number, (bus, speed, width) in enumerate(((0x10, 400_000, 16), (0x20, 10_000, 16), (0x30, 400_000, 8)))
    )
    (found,) = mapped(f'<system version="1">{cpu(0, nodes)}</system>'.encode())
    assert [entry.rail for entry in found] == ["0", "1", "2"]
    assert [entry.problem for entry in found] == [
        "",
        "10 Gb/s, and its siblings run at 400 Gb/s",
        "its PCI link runs at 32.0 GT/s x8, and that of its siblings at 32.0 GT/s x16",
    ]


def described(machine: SimulatedMachine, data: bytes) -> tuple[MappedNic, ...]:
    """The machine's own ports, with the file of the only job that runs, as the agent believes it."""
    files = TopologyFiles()
    said = JobSettings("", False, ADA, files.file_with(parse_topology(data), ADA))
    nics, gpus = machine.nics(), machine.gpus()
    topology = believe([said]).topology(nics, gpus)
    assert topology is not None
    return map_rails(nics, gpus, topology=topology)


def test_both_functions_of_a_card_have_the_rail_and_plane_of_the_file(tmp_path: Path) -> None:
    """NCCL gives all functions of a card one place, and numbers their ports on."""
    machine = SimulatedMachine(tmp_path)
    for number in (0, 1):
        bus = 16 * number + 16
        above = f"pci0000:0{number}/0000:0{number}:01.0/0000:{bus:02x}:00.0/0000:{bus + 8:02x}"
        machine.gpu(f"{above}:00.0/0000:{bus + 1:02x}:00.0")
        for one in (0, 1):
            path = f"{above}:01.0/0000:{bus + 2:02x}:00.{one}"
            machine.rdma(f"mlx5_{2 * number + one}", path)
    (shape,) = [shape for shape in SHAPES if shape.name == "rails and planes of a card's functions"]
    found = described(machine, shape.data)
    assert [(entry.nic.device, entry.nic.port, entry.rail, entry.plane, entry.gpus) for entry in found] == [
        ("mlx5_0", 1, "0", 0, (0,)),
        ("mlx5_1", 1, "0", 1, (0,)),
        ("mlx5_2", 1, "1", 0, (1,)),
        ("mlx5_3", 1, "1", 1, (1,)),
    ]


def test_a_card_is_where_its_data_direct_function_is(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    for node in (0, 1):
        for at in (0, 1):
            domain = f"00{node}{8 + at}"
            bridge = f"pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0"
            machine.gpu(f"{bridge}/{domain}:02:03.0/{domain}:04:00.0/{domain}:05:00.0/{domain}:06:00.0", node)
            machine.function(f"{bridge}/{domain}:02:00.0/{domain}:03:00.0", DMA, "0x15b3", node)
            own = f"00{node}{2 * at}"
            machine.rdma(f"fab{2 * node + at}", f"pci{own}:00/{own}:00:00.0/{own}:03:00.0", node)
    (shape,) = [shape for shape in SHAPES if shape.name == "data direct functions, crossed"]
    found = described(machine, shape.data)
    assert {entry.nic.device: entry.gpus for entry in found} == {
        "fab1": (0,),
        "fab0": (1,),
        "fab3": (2,),
        "fab2": (3,),
    }
    assert {entry.path for entry in found} == {PathType.PXB}


def product_data(serial: str, function: int) -> bytes:
    """Vital product data as a ConnectX has them: a name, then keywords."""
    name, keywords = b"NVIDIA ConnectX-8", b""
    values = {"PN": "C8180", "SN": serial, "V0": "PCIeGen6 x16", "VU": f"{serial}MLNXS0D0F{function}", "RV": "\0"}
    for keyword, value in values.items():
        keywords += keyword.encode() + bytes([len(value)]) + value.encode()
    name = b"\x82" + len(name).to_bytes(2, "little") + name
    return name + b"\x90" + len(keywords).to_bytes(2, "little") + keywords + b"\x78"


def cards_at_the_processor(tmp_path: Path, functions: int = 1) -> SimulatedMachine:
    """GPUs with a data direct function each, whose cards' own functions are elsewhere, crossed in each node."""
    machine = SimulatedMachine(tmp_path)
    for node in (0, 1):
        for at in (0, 1):
            domain = f"00{node}{8 + at}"
            bridge = f"pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0"
            machine.gpu(f"{bridge}/{domain}:02:03.0/{domain}:04:00.0/{domain}:05:00.0/{domain}:06:00.0", node)
            for function in range(functions):
                direct = machine.function(f"{bridge}/{domain}:02:00.0/{domain}:03:00.{function}", DMA, "0x15b3", node)
                (direct / "vpd").write_bytes(product_data(f"MT2500X{node}{1 - at}", function))
                own = f"00{node}{2 * at}"
                machine.rdma(
                    f"fab{2 * node + at}{f'_{function}' if functions > 1 else ''}",
                    f"pci{own}:00/{own}:00:00.0/{own}:03:00.{function}",
                    node,
                    product_data=product_data(f"MT2500X{node}{at}", function),
                )
    return machine


def test_a_card_is_where_its_data_direct_function_is_without_a_file(tmp_path: Path) -> None:
    machine = cards_at_the_processor(tmp_path)
    found = map_rails(machine.nics(), machine.gpus())
    gpus = {"fab1": (0,), "fab0": (1,), "fab3": (2,), "fab2": (3,)}
    assert {entry.nic.device: entry.gpus for entry in found} == gpus
    assert {entry.path for entry in found} == {PathType.PXB}
    (first,) = [entry for entry in found if entry.nic.device == "fab1"]
    assert first.nic.place.address == "0002:03:00.0"
    assert first.reason.endswith("(data direct function 0008:03:00.0)")
    (shape,) = [shape for shape in SHAPES if shape.name == "data direct functions, crossed"]
    assert {entry.nic.device: entry.gpus for entry in described(machine, shape.data)} == gpus, "as with a file"


def test_of_a_card_with_two_functions_each_has_a_data_direct_one(tmp_path: Path) -> None:
    machine = cards_at_the_processor(tmp_path, functions=2)
    assert {nic.device: nic.data_direct for nic in machine.nics() if nic.device.startswith("fab0")} == {
        "fab0_0": "0009:03:00.0",
        "fab0_1": "0009:03:00.1",
    }


def test_product_data_are_read_again_only_when_functions_or_cards_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = cards_at_the_processor(tmp_path)
    read = Mock(wraps=read_bytes)
    monkeypatch.setattr("railscope.probes.topology.data_direct.read_bytes", read)
    known = DataDirect(machine.sysfs)
    devices, cards = pci_devices(machine.sysfs), [port.pci for port in read_ports(machine.sysfs)]
    found = known.places(devices, cards)
    assert len(found) == len(cards) == 4
    assert known.places(pci_devices(machine.sysfs), cards) == found
    assert read.call_count == 8, "each card and each function once"
    assert known.places(devices, cards[1:]) == {card: found[card] for card in cards[1:]}
    assert read.call_count == 15


def test_a_card_whose_product_data_cannot_be_read_stays_where_it_is(tmp_path: Path) -> None:
    machine = cards_at_the_processor(tmp_path)
    for file in tmp_path.glob("devices/**/vpd"):
        file.write_bytes(b"\x90\xff\xff")
    assert {nic.data_direct for nic in machine.nics()} == {""}
    assert {nic.place.root for nic in machine.nics()} == {"pci0000:00", "pci0002:00", "pci0010:00", "pci0012:00"}


@given(st.binary(max_size=300))
def test_any_product_data_are_keywords_or_none(data: bytes) -> None:
    assert all(len(keyword) == 2 for keyword in parse_product_data(data))


def test_keywords_are_those_of_the_read_only_part() -> None:
    found = parse_product_data(product_data("MT2421600CDE", 0))
    assert (found["SN"], found["VU"]) == (b"MT2421600CDE", b"MT2421600CDEMLNXS0D0F0")


def test_a_file_of_several_machines_reaches_the_agent_and_the_right_one_is_believed(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    machine.gpu("pci0000:0a/0000:0a:01.0/0000:10:00.0/0000:18:00.0/0000:11:00.0")
    machine.rdma("mlx5_0", "pci0000:0a/0000:0a:01.0/0000:10:00.0/0000:18:01.0/0000:12:00.0")
    here = cpu(
        0,
        switch("0000:10:00.0", gpu("0000:11:00.0", 0), nic("0000:12:00.0", net("mlx5_0", more='rail="6"'))),
        host="0x2",
    )
    there = cpu(0, switch("0000:50:00.0", gpu("0000:51:00.0", 0), nic("0000:52:00.0", net("mlx5_0"))), host="0x1")
    data = f'<system version="1">{there}{here}</system>'.encode()
    told = decode(encode(Description(topology=parse_topology(data)), Describe.builds), Describe.builds)
    assert told == Description(topology=parse_topology(data))
    assert [entry.rail for entry in described(machine, data)] == ["6"]
