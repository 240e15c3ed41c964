"""The inventory of network devices from sysfs and /proc, on simulated trees, and namespaces from a simulated /proc."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from railscope.probes.netdev.inventory import NetworkDevice, ProcInventory, SysfsInventory
from railscope.probes.netdev.sources import open_namespace, recorded_sources
from railscope.probes.processes.namespaces import (
    NamespaceError,
    NamespaceGone,
    NetworkNamespace,
    network_namespace,
    run_inside,
)
from tests.unit.netdev_messages import SteppedClock

PCI = "devices/pci0000:15/0000:15:01.0/0000:18:00.0"


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    return folder


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A 400 Gb/s InfiniBand card on PCI, a bond of two virtio cards, a veth."""
    card = write(tmp_path / PCI, numa_node="1")
    (tmp_path / "bus/pci/drivers/mlx5_core").mkdir(parents=True)
    (card / "driver").symlink_to(tmp_path / "bus/pci/drivers/mlx5_core")
    net = tmp_path / "class/net"
    net.mkdir(parents=True)
    (net / "bonding_masters").write_text("bond0\n")
    port = write(
        card / "net/ibp24s0",
        ifindex="5",
        type="32",
        flags="0x1003",
        carrier="1",
        speed="400000",
        mtu="4092",
        carrier_changes="3",
    )
    (port / "device").symlink_to(card)
    (net / "ibp24s0").symlink_to(port)
    bond = write(tmp_path / "devices/virtual/net/bond0", ifindex="9", type="1", flags="0x1403", speed="-1", iflink="9")
    write(bond / "bonding", slaves="eth0 eth1")
    (net / "bond0").symlink_to(bond)
    for index, name in ((2, "eth0"), (3, "eth1")):
        virtio = tmp_path / f"devices/pci0000:00/0000:00:0{index}.0/virtio{index}"
        member = write(virtio / "net" / name, ifindex=str(index), type="1", flags="0x1803")
        write(virtio.parent, numa_node="-1")
        (member / "device").symlink_to(virtio)
        (member / "master").symlink_to(bond)
        (net / name).symlink_to(member)
    veth = write(tmp_path / "devices/virtual/net/veth7", ifindex="7", type="1", flags="0x1002", iflink="2")
    (net / "veth7").symlink_to(veth)
    return tmp_path


def by_name(devices: tuple[NetworkDevice, ...]) -> dict[str, NetworkDevice]:
    return {device.name: device for device in devices}


def test_a_card_on_pci_has_its_address_driver_node_and_speed(sysfs: Path) -> None:
    card = by_name(SysfsInventory(sysfs).read())["ibp24s0"]
    assert card == NetworkDevice(
        name="ibp24s0",
        index=5,
        netns=0,
        kind="physical",
        link_layer="InfiniBand",
        driver="mlx5_core",
        pci="0000:18:00.0",
        numa_node=1,
        up=True,
        carrier=True,
        speed_bytes_per_second=50_000_000_000,
        mtu=4092,
        master="",
        slaves=(),
        carrier_changes=3,
    )


def test_a_bond_knows_its_members_and_they_know_it(sysfs: Path) -> None:
    devices = by_name(SysfsInventory(sysfs).read())
    assert (devices["bond0"].kind, devices["bond0"].slaves) == ("bond", ("eth0", "eth1"))
    assert devices["eth1"].master == "bond0"
    assert devices["eth1"].bond_link is None, "an old kernel does not say"
    for member, status in (("eth0", "up"), ("eth1", "going back")):
        write(sysfs / "class/net" / member / "bonding_slave", mii_status=status)
    devices = by_name(SysfsInventory(sysfs).read())
    assert (devices["eth0"].bond_link, devices["eth1"].bond_link, devices["bond0"].bond_link) == (True, False, None)


def test_a_virtio_card_is_found_through_its_own_bus_and_node_minus_one_is_none(sysfs: Path) -> None:
    card = by_name(SysfsInventory(sysfs).read())["eth0"]
    assert (card.kind, card.pci, card.numa_node) == ("physical", "0000:00:02.0", None)


def test_what_sysfs_does_not_tell_is_none(sysfs: Path) -> None:
    devices = by_name(SysfsInventory(sysfs).read())
    assert devices["bond0"].speed_bytes_per_second is None
    assert devices["veth7"].kind == "virtual"
    assert (devices["veth7"].up, devices["veth7"].carrier, devices["veth7"].carrier_changes) == (False, None, None)


def test_garbage_in_one_file_costs_only_that_fact(sysfs: Path) -> None:
    (sysfs / PCI / "net/ibp24s0/mtu").write_bytes(b"\xff\xfe?")
    devices = by_name(SysfsInventory(sysfs).read())
    assert len(devices) == 5
    assert (devices["ibp24s0"].mtu, devices["ibp24s0"].carrier_changes) == (None, 3)


def test_a_recorded_tree_gives_inventory_and_counters_without_events(sysfs: Path) -> None:
    sources = recorded_sources(sysfs, clock=SteppedClock())
    assert (sources.level, sources.netns, sources.events) == ("sysfs", 0, None)
    assert len(sources.inventory.read()) == 5
    assert {failure.device for failure in sources.counters.read().failed} == set(by_name(sources.inventory.read()))
    sources.counters.close()
    sources.close()


def make_process(procfs: Path, pid: str, inode: int) -> None:
    folder = procfs / pid / "ns"
    folder.mkdir(parents=True)
    (folder / "net").symlink_to(f"net:[{inode}]")


def test_the_namespace_of_a_process_is_named_by_its_inode(tmp_path: Path) -> None:
    for pid, inode in (("self", 40), ("7", 40), ("8", 41)):
        make_process(tmp_path, pid, inode)
    assert network_namespace(tmp_path, 7).own
    other = network_namespace(tmp_path, 8)
    assert (other.inode, other.own, other.process_folder) == (41, False, tmp_path / "8")


def test_a_process_that_ended_is_told_from_other_errors(tmp_path: Path) -> None:
    with pytest.raises(NamespaceGone, match="the process has ended"):
        network_namespace(tmp_path, 9)
    make_process(tmp_path, "10", 40)
    (tmp_path / "10/ns/net").unlink()
    (tmp_path / "10/ns/net").symlink_to("ipc:[40]")
    with pytest.raises(NamespaceError, match=r"expected net:\[inode\], found 'ipc:\[40\]'"):
        network_namespace(tmp_path, 10)


def test_a_function_for_the_own_namespace_runs_in_the_callers_thread() -> None:
    own = network_namespace(Path("/proc"), os.getpid())
    assert own.own
    assert run_inside(own, threading.get_ident) == threading.get_ident()


def test_a_process_number_that_now_means_another_namespace_is_gone(tmp_path: Path) -> None:
    stranger = tmp_path / "net"
    stranger.write_text("")
    with pytest.raises(NamespaceGone, match="another namespace now"):
        run_inside(NetworkNamespace(inode=1, path=stranger, own=False), lambda: None)


def test_an_error_inside_a_namespace_reaches_the_caller(tmp_path: Path) -> None:
    def fails() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        run_inside(NetworkNamespace(1, tmp_path, own=True), fails)


def test_devices_by_name_are_all_that_proc_net_dev_tells(tmp_path: Path) -> None:
    write(tmp_path / "8/net", dev="Inter-|\n face |bytes\n    lo: 0 0\n rail0: 1 2")
    devices = by_name(ProcInventory(tmp_path / "8", 41).read())
    assert list(devices) == ["lo", "rail0"]
    assert (devices["rail0"].netns, devices["rail0"].kind) == (41, "unknown")
    assert (devices["rail0"].carrier, devices["rail0"].speed_bytes_per_second) == (None, None)


def test_a_namespace_whose_process_ended_is_an_error_not_an_empty_list(tmp_path: Path) -> None:
    gone = NetworkNamespace(41, tmp_path / "8/ns/net", own=False)
    with pytest.raises(NamespaceError, match="the process has ended"):
        open_namespace(gone, procfs=tmp_path, sysfs=tmp_path, clock=SteppedClock())
