"""RDMA devices and ports, from simulated sysfs trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.probes.netdev.bonds import BondMember
from railscope.probes.netdev.sysfs import read_text
from railscope.probes.rdma.inventory import RdmaInventory, RdmaPort, parse_rate, read_ports
from tests.trees import rdma
from tests.trees.rdma import RdmaTree, break_kind, break_open, write


def ports(tree: RdmaTree) -> dict[str, RdmaPort]:
    return {port.name: port for port in read_ports(tree.sysfs)}


def test_eight_rails_of_a_dgx_are_listed_in_natural_order_with_their_places(tmp_path: Path) -> None:
    found = read_ports(rdma.mlx5_roce_8rails(tmp_path).sysfs)
    assert [port.device for port in found] == [f"mlx5_{number}" for number in (0, 1, 3, 4, 5, 6, 9, 10, 11)]
    assert found[-1] == RdmaPort(
        device="mlx5_11",
        port=1,
        node_type="CA",
        state="ACTIVE",
        physical_state="LinkUp",
        rate_bytes_per_second=50_000_000_000,
        lanes=4,
        link_layer="Ethernet",
        netdev="ens220np0",
        netdevs=("ens220np0",),
        bond_members=(),
        pci="0000:dc:00.0",
        numa_node=1,
        driver="mlx5_core",
        physical_function="",
        scalable=False,
        board="",
        manages_switches=False,
        firmware="28.39.1002",
        has_counters=True,
    )
    assert found[-1].up is True


def test_an_infiniband_port_finds_its_network_device_through_the_pci_function(tmp_path: Path) -> None:
    port = ports(rdma.mlx5_ib_ndr(tmp_path))["ibp24s0/1"]
    assert (port.link_layer, port.netdev) == ("InfiniBand", "ib0")


def test_two_ports_of_one_function_have_a_network_device_and_a_state_each(tmp_path: Path) -> None:
    found = ports(rdma.two_ports(tmp_path))
    assert {name: (port.netdev, port.up, port.physical_state) for name, port in found.items()} == {
        "mlx4_0/1": ("ib0", True, "LinkUp"),
        "mlx4_0/2": ("ens5d1", False, "Disabled"),
    }


def test_a_virtual_function_names_its_physical_one(tmp_path: Path) -> None:
    found = ports(rdma.vf(tmp_path))
    assert (found["mlx5_2/1"].pci, found["mlx5_2/1"].physical_function) == ("0000:18:00.2", "0000:18:00.0")
    assert found["mlx5_0/1"].physical_function == ""


def test_a_bond_is_one_port_that_names_its_slaves(tmp_path: Path) -> None:
    port = ports(rdma.bond(tmp_path))["mlx5_bond_0/1"]
    assert (port.netdev, port.netdevs) == ("bond0", ("bond0", "bond0.100"))
    assert port.bond_members == (BondMember("ens24f0np0", True), BondMember("ens24f1np1", False))


def test_soft_roce_has_no_hardware_and_knows_its_parent(tmp_path: Path) -> None:
    port = ports(rdma.rxe(tmp_path))["rxe0/1"]
    assert (port.pci, port.driver, port.numa_node, port.netdev) == ("", "", None, "eth0")
    assert port.has_counters is False


def test_a_numa_node_of_minus_one_is_unknown(tmp_path: Path) -> None:
    assert ports(rdma.hfi1(tmp_path))["hfi1_0/1"].numa_node is None


def test_a_device_without_network_device_or_link_layer_is_listed(tmp_path: Path) -> None:
    port = ports(rdma.efa(tmp_path))["rdmap16s27/1"]
    assert (port.netdev, port.link_layer, port.node_type) == ("", "unknown", "unspecified")


def test_a_host_without_rdma_has_no_ports(tmp_path: Path) -> None:
    assert read_ports(tmp_path) == ()


@pytest.mark.parametrize("kind", ["folder", "pipe", "endless", "huge"])
@pytest.mark.parametrize("name", ["state", "phys_state", "rate", "link_layer"])
def test_a_file_that_is_none_leaves_only_its_own_fact_unknown(tmp_path: Path, kind: str, name: str) -> None:
    tree = rdma.mlx5_ib_ndr(tmp_path)
    good = read_ports(tree.sysfs)[0]
    break_kind(tree.counter("ibp24s0/1", name), kind)
    broken = read_ports(tree.sysfs)[0]
    facts = {"state": "state", "phys_state": "physical_state", "rate": "rate_bytes_per_second"}
    changed = facts.get(name, name)
    assert getattr(broken, changed) in ("unknown", None)
    told = {changed, "lanes"} if name == "rate" else {changed}
    others = [field for field in RdmaPort.__dataclass_fields__ if field not in told]
    assert [getattr(broken, field) for field in others] == [getattr(good, field) for field in others]
    assert name != "state" or broken.up is None


def test_a_device_that_went_while_listed_and_a_port_that_is_no_number_are_passed_over(tmp_path: Path) -> None:
    tree = rdma.mlx5_ib_ndr(tmp_path)
    (tree.sysfs / "class/infiniband/mlx5_9").symlink_to(tmp_path / "gone")
    break_open(tree.sysfs / "class/infiniband/mlx5_8")
    for name in ("x", "-1", "9999", "٣"):
        (tree.sysfs / "class/infiniband/ibp24s0/ports" / name).mkdir()
    assert list(ports(tree)) == ["ibp24s0/1"]


def test_an_address_without_network_device_or_with_a_path_for_a_name_is_passed_over(tmp_path: Path) -> None:
    tree = RdmaTree(tmp_path)
    device = tree.device("mlx5_0", pci="0000:18:00.0")
    tree.port(device, netdevs=("", "../../../etc", ".", "eth 0", "eth10", "eth2", "eth10"))
    assert ports(tree)["mlx5_0/1"].netdevs == ("eth10", "eth2")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400 Gb/sec (4X NDR)", 50_000_000_000),
        ("800 Gb/sec (8X NDR)", 100_000_000_000),
        ("2.5 Gb/sec (1X SDR)", 312_500_000),
        ("10 Gb/sec (4X)", 1_250_000_000),
        ("0 Gb/sec", None),
        ("", None),
        ("fast", None),
        ("-1 Gb/sec", None),
        ("400 Gb/second", None),
        ("99999999999 Gb/sec (4X)", None),
    ],
)
def test_a_rate_is_in_bytes_per_second(text: str, rate: int | None) -> None:
    assert parse_rate(text) == rate


@settings(deadline=None)
@given(st.integers(1, 999_999), st.integers(0, 999), st.text(max_size=10))
def test_every_rate_is_exact(whole: int, thousandths: int, rest: str) -> None:
    assert parse_rate(f"{whole}.{thousandths:03} Gb/sec {rest}") == (whole * 1000 + thousandths) * 125_000


@settings(deadline=None)
@given(st.text(max_size=40))
def test_no_text_breaks_the_rate(text: str) -> None:
    rate = parse_rate(text)
    assert rate is None or rate > 0


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_no_content_of_a_file_breaks_the_inventory(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.mktemp("tree")
    tree = rdma.rxe(root)
    port = tree.sysfs / "class/infiniband/rxe0/ports/1"
    for file in (port / "state", port / "rate", port / "link_layer", port.parent.parent / "parent"):
        file.write_bytes(content)
    assert len(read_ports(root)) == 1


def test_text_of_a_file_does_not_wait_and_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path / "file", " text ")
    assert [read_text(tmp_path / name) for name in ("pipe", "file", "absent", "")] == ["", "text", "", ""]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


class TestAskedAgain:
    """What does not change is not read again; what can is."""

    def test_a_port_that_goes_down_is_seen_and_so_is_a_device_that_comes(self, tmp_path: Path) -> None:
        tree = rdma.mlx5_ib_ndr(tmp_path)
        inventory = RdmaInventory(tree.sysfs)
        (before,) = inventory.read()
        folder = tree.sysfs / "class/infiniband/ibp24s0/ports/1"
        (folder / "state").write_text("1: DOWN\n")
        (folder / "rate").write_text("10 Gb/sec (4X SDR)\n")
        tree.port(tree.device("mlx5_9", pci="0000:99:00.0"), counters={}, hw_counters={})
        after, other = inventory.read()
        assert (before.state, after.state, after.rate_bytes_per_second) == ("ACTIVE", "DOWN", 1_250_000_000)
        assert (after.pci, after.driver, other.device) == (before.pci, before.driver, "mlx5_9")
        assert (after, other) == read_ports(tree.sysfs)

    def test_a_device_that_is_registered_anew_is_read_anew(self, tmp_path: Path) -> None:
        tree = rdma.mlx5_ib_ndr(tmp_path)
        inventory = RdmaInventory(tree.sysfs)
        inventory.read()
        tree.unplug("ibp24s0")
        assert inventory.read() == ()
        tree.port(tree.device("ibp24s0", pci="0000:40:00.0"), counters={}, hw_counters={})
        (again,) = inventory.read()
        assert again.pci == "0000:40:00.0"

    def test_what_a_device_does_not_show_yet_is_looked_for_again(self, tmp_path: Path) -> None:
        tree = rdma.mlx5_ib_ndr(tmp_path)
        firmware = tree.sysfs / "class/infiniband/ibp24s0/fw_ver"
        text = firmware.read_text()
        firmware.write_text("")
        inventory = RdmaInventory(tree.sysfs)
        assert inventory.read()[0].firmware == ""
        firmware.write_text(text)
        assert inventory.read()[0].firmware == text.strip()
