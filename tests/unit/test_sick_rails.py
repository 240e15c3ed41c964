"""Which ports of machines as they are sold are rails, and which of these are sick; simulated machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.cli.main import main
from railscope.agent.node.rails.gpu_affinity import MappedNic, map_rails
from railscope.agent.node.rails.siblings import compare_links, port_of_netdev
from railscope.probes.netdev.inventory import NetworkDevice
from railscope.probes.topology.ib_hca import parse_hca_list
from railscope.probes.topology.paths import Place
from railscope.probes.topology.pci import PciDevice
from tests.trees.pci import ETHERNET_CLASS, SimulatedMachine, behind_switch

DRIVER, BOARD = "mlx5_core", "MT_0000000838"


def pair(
    machine: SimulatedMachine, number: int, *, gpu: bool = True, slot: int = 0, name: str = "", **port: Any
) -> str:
    """A GPU and a port behind a switch of their own; returns the port's path."""
    bus = 0x10 + 0x10 * number
    if gpu:
        machine.gpu(behind_switch(bus, 4, f"0000:{bus + 8:02x}:00.0"), number // 4)
    path = behind_switch(bus, slot, f"0000:{bus + 4 + slot:02x}:00.0")
    given: dict[str, Any] = {
        "driver": DRIVER,
        "board": BOARD,
        "link_layer": "Ethernet",
        "class_code": ETHERNET_CLASS,
    } | port
    machine.rdma(name or f"qx_{number}", path, number // 4, **given)
    return path


def machine_map(machine: SimulatedMachine, hca: str | None = None) -> tuple[MappedNic, ...]:
    lists = [] if hca is None else [parse_hca_list(hca)]
    return map_rails(machine.nics(), machine.gpus(), hca_lists=lists)


def rails(mapped: tuple[MappedNic, ...]) -> dict[str, str]:
    return {entry.nic.device: entry.rail for entry in mapped if entry.rail is not None}


def gpus(mapped: tuple[MappedNic, ...]) -> dict[str, tuple[int, ...]]:
    return {entry.nic.device: entry.gpus for entry in mapped if entry.rail is not None}


def problems(mapped: tuple[MappedNic, ...]) -> dict[str, str]:
    return {entry.nic.device: entry.problem for entry in mapped if entry.problem}


def reason(mapped: tuple[MappedNic, ...], device: str) -> str:
    (entry,) = [entry for entry in mapped if entry.nic.device == device]
    return entry.reason


WHOLE = {f"qx_{number}": str(number) for number in range(4)}


@pytest.mark.parametrize(
    ("port", "problem"),
    [
        ({"gigabits": 10, "link": "4X SDR"}, "10 Gb/s, and its siblings run at 400 Gb/s"),
        ({"gigabits": 20, "link": "4X DDR"}, "20 Gb/s, and its siblings run at 400 Gb/s"),
        ({"gigabits": 100, "link": "4X EDR"}, "100 Gb/s, and its siblings run at 400 Gb/s"),
        ({"gigabits": 25, "link": "1X EDR"}, "25 Gb/s on 1 lane, and its siblings run at 400 Gb/s on 4 lanes"),
        ({"gigabits": 100, "link": "1X NDR"}, "100 Gb/s on 1 lane, and its siblings run at 400 Gb/s on 4 lanes"),
        ({"gigabits": 200, "link": "2X NDR"}, "200 Gb/s on 2 lanes, and its siblings run at 400 Gb/s on 4 lanes"),
        ({"state": "1: DOWN", "gigabits": 2.5, "link": "1X SDR"}, "its link is down"),
        ({"link_layer": "InfiniBand"}, "it is set to InfiniBand, and its siblings run Ethernet"),
        (
            {"attributes": {"current_link_width": "8", "max_link_width": "16", "max_link_speed": "32.0 GT/s PCIe"}},
            "its PCI link runs at 32.0 GT/s x8, and that of its siblings at 32.0 GT/s x16",
        ),
    ],
    ids=["sdr", "ddr", "edr", "25g", "1x", "2x", "down", "wrong-layer", "pci"],
)
def test_a_rail_that_was_sick_before_the_agent_came_is_a_rail_and_named(
    tmp_path: Path, port: dict[str, Any], problem: str
) -> None:
    machine = SimulatedMachine(tmp_path)
    whole: dict[str, Any] = {"attributes": {"max_link_width": "16", "max_link_speed": "32.0 GT/s PCIe"}}
    for number in range(4):
        pair(machine, number, **(port if number == 1 else whole))
    mapped = machine_map(machine)
    assert rails(mapped) == WHOLE
    assert problems(mapped) == {"qx_1": problem}


@pytest.mark.parametrize(
    ("vendor", "driver"), [("0x14e4", "bnxt_en"), ("0x1d0f", "efa"), ("0x8086", "ice"), ("0x1414", "mana")]
)
def test_siblings_are_told_by_their_pci_numbers_where_a_driver_has_no_board(
    tmp_path: Path, vendor: str, driver: str
) -> None:
    machine = SimulatedMachine(tmp_path)
    numbers = {"device": "0x1760", "subsystem_vendor": vendor, "subsystem_device": "0x0001"}
    for number in range(4):
        slow: dict[str, Any] = {"gigabits": 10, "link": "4X SDR"} if number == 2 else {}
        pair(machine, number, vendor=vendor, driver=driver, board="", attributes=numbers, **slow)
    mapped = machine_map(machine)
    assert rails(mapped) == WHOLE
    assert set(problems(mapped)) == {"qx_2"}


def test_a_sick_rail_among_several_of_a_gpu_is_one_and_an_extra_port_is_none(tmp_path: Path) -> None:
    """Four ports to a GPU, one of the eight is sick; the fifth of GPU 0 is slow, the same product, and storage."""
    machine = SimulatedMachine(tmp_path)
    for number in range(2):
        for slot in range(4):
            slow: dict[str, Any] = {"gigabits": 25, "link": "1X EDR"} if (number, slot) == (1, 2) else {}
            pair(machine, number * 4, gpu=slot == 0, slot=slot, name=f"qx_{number}{slot}", **slow)
    machine.rdma(
        "store", behind_switch(0x10, 6, "0000:1a:00.0"), driver=DRIVER, board=BOARD, link_layer="Ethernet", gigabits=25
    )
    mapped = machine_map(machine)
    assert set(rails(mapped)) == {f"qx_{number}{slot}" for number in range(2) for slot in range(4)}
    assert reason(mapped, "store") == "25 Gb/s, and qx_00:1, as near to the same GPU, runs at 400 Gb/s"
    assert set(problems(mapped)) == {"qx_12"}


def numa_machine(sysfs: Path, slow: Mapping[str, float], *, ports: int, nodes: int = 1) -> SimulatedMachine:
    """Four GPUs and some ports on each NUMA node, and no switches."""
    machine = SimulatedMachine(sysfs)
    for node in range(nodes):
        for number in range(4):
            bus = 0x10 + 0x40 * node + 8 * number
            machine.gpu(f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0", node)
        for number in range(ports):
            bus = 0x90 + 0x20 * node + 4 * number
            name = f"qx_{node}{number}"
            path = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
            gigabits = slow.get(name, 400)
            machine.rdma(name, path, node, gigabits=gigabits, driver=DRIVER, board=BOARD, link_layer="InfiniBand")
    return machine


def test_of_equally_near_ports_a_slow_one_is_sick_if_the_gpus_miss_it(tmp_path: Path) -> None:
    sick = machine_map(numa_machine(tmp_path / "sick", {"qx_02": 100}, ports=4))
    assert len(rails(sick)) == 4
    assert set(problems(sick)) == {"qx_02"}
    half = machine_map(numa_machine(tmp_path / "half", {"qx_01": 10, "qx_02": 100}, ports=4))
    assert set(problems(half)) == {"qx_01", "qx_02"}
    extra = machine_map(numa_machine(tmp_path / "extra", {"qx_04": 100}, ports=5))
    assert set(rails(extra)) == {"qx_00", "qx_01", "qx_02", "qx_03"}
    assert problems(extra) == {}
    beside = machine_map(numa_machine(tmp_path / "beside", {"qx_02": 100}, ports=4, nodes=2))
    assert len(rails(beside)) == 8
    assert set(problems(beside)) == {"qx_02"}


def test_a_slow_product_is_no_rail_wherever_it_sits(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    for number in range(4):
        pair(machine, number)
        pair(machine, number, gpu=False, slot=1, name=f"mgmt_{number}", gigabits=25, board="MT_0000000531")
    mapped = machine_map(machine)
    assert rails(mapped) == WHOLE
    assert reason(mapped, "mgmt_2") == "25 Gb/s where others run at 400 Gb/s"
    assert problems(mapped) == {}


def test_the_second_port_of_every_card_at_a_fraction_is_management_and_one_of_all_that_lost_its_link_is_sick(
    tmp_path: Path,
) -> None:
    def dual(sysfs: Path, of_second: Callable[[int], dict[str, Any]]) -> tuple[MappedNic, ...]:
        machine = SimulatedMachine(sysfs)
        for number in range(4):
            path = pair(machine, number)
            given: dict[str, Any] = {"driver": DRIVER, "board": BOARD, "link_layer": "Ethernet"} | of_second(number)
            machine.rdma(f"qx_{number}b", path.removesuffix("0") + "1", **given)
        return machine_map(machine)

    assert set(rails(dual(tmp_path / "a", lambda _: {"gigabits": 100}))) == set(WHOLE)
    down = {"state": "1: DOWN", "gigabits": 2.5}
    assert set(rails(dual(tmp_path / "b", lambda _: down))) == set(WHOLE)
    one = dual(tmp_path / "c", lambda number: down if number == 3 else {})
    assert len(rails(one)) == 8
    assert problems(one) == {"qx_3b": "its link is down"}


def test_virtual_and_scalable_functions_belong_to_their_port_s_rail(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    for number in range(2):
        path = pair(machine, number)
        address = path.rpartition("/")[2]
        for virtual in (1, 2):
            of: dict[str, Any] = {"driver": DRIVER, "board": BOARD, "physical_function": address}
            machine.rdma(f"qv_{number}_{virtual}", path.removesuffix("0") + str(virtual), **of)
        machine.rdma(f"qs_{number}", path, driver="mlx5_core.sf", scalable=7)
    mapped = machine_map(machine)
    assert rails(mapped) == {
        f"{name}_{number}{end}": str(number)
        for number in range(2)
        for name, end in (("qx", ""), ("qv", "_1"), ("qv", "_2"), ("qs", ""))
    }
    assert {found for name, found in gpus(mapped).items() if name[2:4] == "_1"} == {(1,)}
    assert reason(mapped, "qv_1_2").startswith("a part of qx_1:1; PIX to GPU 1")
    only = machine_map(machine, hca="=qv_0_1,qv_1_1")
    assert rails(only) == rails(mapped)
    assert {entry.nic.device for entry in only if entry.carries} == {"qv_0_1", "qv_1_1"}


def test_virtual_functions_without_their_physical_one_are_one_rail(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    for number in range(2):
        path = pair(machine, number)
        for virtual in (1, 2):
            machine.rdma(
                f"qv_{number}_{virtual}",
                path.removesuffix("0") + str(virtual),
                driver=DRIVER,
                physical_function=path.rpartition("/")[2],
            )
        (tmp_path / f"class/infiniband/qx_{number}").unlink()
    assert rails(machine_map(machine)) == {"qv_0_1": "0", "qv_0_2": "0", "qv_1_1": "1", "qv_1_2": "1"}


def test_storage_ethernet_is_no_rail_beside_infiniband_and_the_other_way_round(tmp_path: Path) -> None:
    def mixed(sysfs: Path, *, infiniband: int, ethernet: int) -> tuple[MappedNic, ...]:
        machine = numa_machine(sysfs, {}, ports=0)
        for layer, count in (("InfiniBand", infiniband), ("Ethernet", ethernet)):
            for number in range(count):
                bus = {"InfiniBand": 0x90, "Ethernet": 0xC0}[layer] + 4 * number
                path = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
                machine.rdma(f"{layer}_{number}", path, 0, driver=DRIVER, board=BOARD, link_layer=layer)
        return machine_map(machine)

    found = mixed(tmp_path / "a", infiniband=4, ethernet=2)
    assert gpus(found) == {f"InfiniBand_{number}": (number,) for number in range(4)}
    assert reason(found, "Ethernet_0") == "Ethernet where the rails run InfiniBand: storage or management"
    assert problems(found) == {}


def test_gpus_are_paired_among_the_ports_that_nccl_ib_hca_leaves(tmp_path: Path) -> None:
    machine = numa_machine(tmp_path, {}, ports=8)
    whole = machine_map(machine)
    assert gpus(whole)["qx_06"] == (3,)
    mapped = machine_map(machine, hca="=qx_00,qx_02,qx_04,qx_06")
    assert rails(mapped) == rails(whole)
    assert {name: found for name, found in gpus(mapped).items() if int(name[-1]) % 2 == 0} == {
        "qx_00": (0,),
        "qx_02": (1,),
        "qx_04": (2,),
        "qx_06": (3,),
    }


def test_what_leads_to_nvswitches_is_no_rail(tmp_path: Path) -> None:
    machine = numa_machine(tmp_path, {}, ports=4)
    for number in range(2):
        path = f"pci0000:d{number}/0000:d{number}:01.0/0000:e{number}:00.0"
        data = b"\x82\x0a\x00NVLink mgt\x90\x10\x00V0\x0dSMDL:SW_MNG.."
        machine.rdma(f"sw_{number}", path, 0, driver=DRIVER, board=BOARD, link_layer="InfiniBand", product_data=data)
    mapped = machine_map(machine)
    assert len(rails(mapped)) == 4
    assert reason(mapped, "sw_0") == "leads to NVSwitches and to no network: their management"


def test_one_lane_of_infiniband_is_wrong_without_siblings(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    pair(machine, 0, link_layer="InfiniBand", gigabits=100, link="1X NDR")
    assert problems(machine_map(machine)) == {"qx_0": "100 Gb/s on 1 lane, and an InfiniBand link has 4"}
    ethernet = SimulatedMachine(tmp_path / "ethernet")
    pair(ethernet, 0, gigabits=100, link="1X NDR")
    assert problems(machine_map(ethernet)) == {}


def test_two_fast_lanes_are_as_good_as_four(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    for number in range(2):
        pair(machine, number, link="2X XDR" if number else "4X NDR")
    assert problems(machine_map(machine)) == {}


def test_the_doctor_names_a_sick_rail_and_is_silent_on_a_sound_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sound", "sick"):
        machine = SimulatedMachine(tmp_path / name)
        (tmp_path / name / "class/net").mkdir(parents=True)
        for number in range(4):
            slow: dict[str, Any] = {"gigabits": 10, "link": "4X SDR"} if (name, number) == ("sick", 1) else {}
            pair(machine, number, **slow)
    assert main(["doctor", "--topology", "--path.sysfs", str(tmp_path / "sound")]) == 0
    assert "PROBLEM" not in capsys.readouterr().out
    assert main(["doctor", "--topology", "--path.sysfs", str(tmp_path / "sick")]) == 1
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("PROBLEM")]
    assert len(said) == 1
    assert "1 is qx_1:1: 10 Gb/s, and its siblings run at 400 Gb/s  → check its module" in said[0]


def test_network_rails_of_one_product_are_compared_too() -> None:
    """Without RDMA, and not with what an unknown product or another port's RDMA device is."""
    sick = NetworkDevice(
        *("eth1", 2, 1, "physical", "Ethernet", "gve", "0000:02:00.0", 0, True, True, 3_125_000_000, 9000, "", (), 1)
    )
    devices = [replace(sick, name="eth0", pci="0000:01:00.0", speed_bytes_per_second=25_000_000_000), sick]

    def compared(model: str) -> list[str]:
        functions = [PciDevice(Place(one.pci), 0x020000, 0x1AE0, model=model) for one in devices]
        ports = [port_of_netdev(*pair) for pair in zip(devices, functions, strict=True)]
        return [state.problem for state in compare_links(ports).values()]

    assert compared("1ae0:0042 1ae0:0058") == ["", "25 Gb/s, and its siblings run at 200 Gb/s"]
    assert compared("") == ["", ""]
