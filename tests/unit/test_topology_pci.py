"""Places of GPUs and cards in simulated PCI trees, and NCCL's words for the ways between them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.probes.topology.machine import gpus_of_pci
from railscope.probes.topology.paths import PathType, Place, path_type
from railscope.probes.topology.pci import normal_address, pci_device, pci_devices, pci_order, place_in_path
from tests.trees.pci import (
    ASPEED,
    ETHERNET_CLASS,
    INFINIBAND_CLASS,
    NVIDIA,
    VGA_CLASS,
    SimulatedMachine,
    behind_switch,
    dgx_h100,
)

DEVICE = "devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (("A",), ("A",), PathType.PIX),
        (("A",), ("A", "B"), PathType.PXB),
        (("A", "B"), ("A", "C"), PathType.PXB),
        (("A", "B"), ("A", "B"), PathType.PIX),
        (("A",), ("B",), PathType.PHB),
        ((), (), PathType.PHB),
    ],
)
def test_switches_on_the_way_decide_between_pix_pxb_and_phb(
    one: tuple[str, ...], other: tuple[str, ...], expected: PathType
) -> None:
    assert path_type(Place("x", one, 0), Place("y", other, 0)) is expected


def test_numa_nodes_apart_are_sys_and_one_host_bridge_is_phb_without_nodes() -> None:
    assert path_type(Place("x", (), 0, "pci0000:00"), Place("y", (), 1, "pci0000:80")) is PathType.SYS
    assert path_type(Place("x", (), None, "pci0000:00"), Place("y", (), None, "pci0000:00")) is PathType.PHB
    # Two that are not known are not the same.
    assert path_type(Place("x"), Place("y")) is PathType.SYS
    assert path_type(Place(""), Place("")) is PathType.SYS
    assert path_type(Place("x"), Place("x")) is PathType.LOC


def test_the_order_of_paths_is_nccl_s() -> None:
    assert [path.name for path in sorted(PathType)] == ["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"]
    assert [int(path) for path in sorted(PathType)] == [0, 1, 4, 5, 8, 9]


def test_a_switch_is_its_upstream_port_and_the_root_port_is_none() -> None:
    assert place_in_path(Path("/sys") / DEVICE, 0) == Place("0000:18:00.0", ("0000:16:00.0",), 0, "pci0000:15")
    nested = Path(f"/sys/{DEVICE}/0000:19:00.0/0000:1a:00.0")
    assert place_in_path(nested).switches == ("0000:16:00.0", "0000:18:00.0")
    assert place_in_path(Path("/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0")).switches == ()
    assert place_in_path(Path("/sys/devices/pci0000:00/0000:00:05.0")) == Place("0000:00:05.0", (), None, "pci0000:00")


def test_a_host_bridge_inside_another_tree_begins_its_own() -> None:
    path = Path("/sys/devices/pci0000:e0/0000:e0:00.5/pci10000:e0/10000:e0:01.0/10000:e1:00.0")
    assert place_in_path(path) == Place("10000:e1:00.0", (), None, "pci10000:e0")


def test_a_device_on_no_pci_bus_has_no_address() -> None:
    assert place_in_path(Path("/sys/devices/virtual/net/lo")) == Place("")


def test_functions_are_found_with_their_attributes(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    machine.gpu(behind_switch(0x16, 4, "0000:1b:00.0"), 1)
    (device,) = pci_devices(tmp_path)
    assert device.is_gpu
    assert not device.is_network
    assert device.class_code == 0x030200
    assert device.vendor == 0x10DE
    assert device.place == Place("0000:1b:00.0", ("0000:16:00.0",), 1, "pci0000:15")
    assert device.link == "32.0 GT/s x16"


def test_the_display_controller_of_the_board_is_no_gpu(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    machine.function("pci0000:00/0000:00:1c.0/0000:03:00.0", VGA_CLASS, ASPEED)
    machine.function("pci0000:00/0000:00:1d.0/0000:04:00.0", VGA_CLASS, NVIDIA)
    assert [gpu.place.address for gpu in gpus_of_pci(pci_devices(tmp_path))] == ["0000:04:00.0"]


def test_bridges_and_disks_are_left_out(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    machine.function(behind_switch(0x16, 0, "0000:18:00.0"), INFINIBAND_CLASS, "0x15b3")
    machine.function(behind_switch(0x16, 1, "0000:19:00.0"), "0x010802", "0x144d")
    machine.function(behind_switch(0x16, 2, "0000:1a:00.0"), ETHERNET_CLASS, "0x8086")
    assert [device.place.address for device in pci_devices(tmp_path)] == ["0000:18:00.0", "0000:1a:00.0"]


def test_gpus_are_numbered_by_address_domain_first(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    for address in ("000b:00:00.0", "0002:00:00.0", "0001:9d:00.0", "0001:1b:00.0", "10000:01:00.0"):
        machine.gpu(f"pci{address[:-5]}/{address}")
    assert [gpu.place.address for gpu in machine.gpus()] == [
        "0001:1b:00.0",
        "0001:9d:00.0",
        "0002:00:00.0",
        "000b:00:00.0",
        "10000:01:00.0",
    ]


def test_what_cannot_be_read_is_not_known_and_hides_nobody(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    machine.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", 0)
    machine.gpu("pci0000:00/0000:00:02.0/0000:02:00.0", 0)
    broken = tmp_path / "bus/pci/devices/0000:02:00.0"
    (broken / "numa_node").write_bytes(b"\xff\xfe garbage")
    (broken / "current_link_speed").write_text("Unknown\n")
    (broken / "current_link_width").unlink()
    good, bad = pci_devices(tmp_path)
    assert good.place.numa_node == 0
    assert bad.is_gpu
    assert (bad.place.numa_node, bad.link) == (None, "")


def test_a_link_that_leads_nowhere_and_a_loop_are_passed_over(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    machine.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", 0)
    devices = tmp_path / "bus/pci/devices"
    (devices / "0000:02:00.0").symlink_to(tmp_path / "gone")
    (devices / "0000:03:00.0").symlink_to(devices / "0000:03:00.0")
    (devices / "strange name").mkdir()
    assert [device.place.address for device in pci_devices(tmp_path)] == ["0000:01:00.0"]
    assert pci_device(tmp_path, "0000:02:00.0") is None
    assert pci_device(tmp_path, "../../x") is None


def test_a_machine_without_pci_or_rdma_has_no_devices(tmp_path: Path) -> None:
    assert pci_devices(tmp_path) == ()
    assert SimulatedMachine(tmp_path).nics() == ()


def test_rdma_ports_have_place_speed_and_state(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    machine.rdma("mlx4_0", behind_switch(0x16, 0, "0000:18:00.0"), 1, ports=2, gigabits=56)
    first, second = machine.nics()
    assert (first.device, first.port, second.port) == ("mlx4_0", 1, 2)
    assert first.place == Place("0000:18:00.0", ("0000:16:00.0",), 1, "pci0000:15")
    assert first.speed_bytes_per_second == 7_000_000_000
    assert first.up is True


def test_a_port_that_is_not_active_is_not_connected(tmp_path: Path) -> None:
    machine = SimulatedMachine(tmp_path)
    machine.rdma("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", state="1: DOWN")
    assert [nic.up for nic in machine.nics()] == [False]


def test_an_rdma_port_without_a_pci_function_has_no_place(tmp_path: Path) -> None:
    (tmp_path / "class/infiniband").mkdir(parents=True)
    (tmp_path / "devices/virtual/infiniband/rxe0/ports/1").mkdir(parents=True)
    (tmp_path / "class/infiniband/rxe0").symlink_to(tmp_path / "devices/virtual/infiniband/rxe0")
    assert [nic.place for nic in SimulatedMachine(tmp_path).nics()] == [Place("")]


def test_all_of_dgx_h100_is_found(tmp_path: Path) -> None:
    machine = dgx_h100(tmp_path)
    assert len(machine.gpus()) == 8
    assert len(machine.nics()) == 12


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:18:00.1", "0000:18:00.1"),
        (" 0001:00:00.0\n", "0001:00:00.0"),
        ("00010000:e1:00.0", "10000:e1:00.0"),
        ("18:00.0", ""),
        ("0000:18:00.8", ""),
        ("", ""),
    ],
)
def test_addresses_are_brought_to_the_spelling_of_sysfs(text: str, address: str) -> None:
    assert normal_address(text) == address


@settings(deadline=None)
@given(st.text(max_size=40))
def test_no_text_is_an_address_that_cannot_be_sorted(text: str) -> None:
    address = normal_address(text)
    assert not address or normal_address(address) == address
    assert pci_order(address) >= (0,)


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.from_regex(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", fullmatch=True), st.text("/:.ab0")))
)
def test_any_path_has_a_place(parts: list[str]) -> None:
    path = Path("/sys/devices/pci0000:00").joinpath(*(part.replace("/", "") for part in parts))
    place = place_in_path(path)
    assert len(place.switches) <= len(path.parts) // 2
    assert bool(place.address) or not place.switches


addresses = st.lists(st.sampled_from("ABC"), max_size=3).map(tuple)
places = st.builds(Place, st.sampled_from(["x", "y", ""]), addresses, st.sampled_from([None, 0, 1]), st.just(""))


@settings(deadline=None)
@given(places, places)
def test_the_way_back_is_as_long(one: Place, other: Place) -> None:
    assert path_type(one, other) is path_type(other, one)
