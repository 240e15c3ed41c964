"""Network devices of another namespace, for real: veth pairs made with `ip`, read from outside."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from railscope.agent.node.rails.netdev_facts import netns_labels
from railscope.agent.node.rails.selection import decide_rails
from railscope.agent.node.sampling.sampler import Sampler
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.counters import CounterReading
from railscope.probes.netdev.events import LinkChange, LinkEvent
from railscope.probes.netdev.sources import DeviceSources, open_namespace, recorded_sources
from railscope.probes.processes.namespaces import (
    NamespaceDenied,
    NetworkNamespace,
    named_namespaces,
    network_namespace,
    run_inside,
)

pytestmark = pytest.mark.root

PROCFS, SYSFS = Path("/proc"), Path("/sys")
NAME = f"railscope-test-{os.getpid()}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def host() -> Iterator[NetworkNamespace]:
    """A namespace with rail0 and rail1, both ends of each pair inside, and a process that lives there."""
    ip("netns", "add", NAME)
    try:
        # Without IPv6 nothing is sent but what a test sends.
        still = [f"net.ipv6.conf.{which}.disable_ipv6=1" for which in ("all", "default")]
        ip("netns", "exec", NAME, "sysctl", "-q", "-w", *still)
        ip("-n", NAME, "link", "set", "lo", "up")
        for rail in (0, 1):
            ip("-n", NAME, "link", "add", f"rail{rail}", "type", "veth", "peer", "name", f"peer{rail}")
            ip("-n", NAME, "addr", "add", f"10.99.{rail}.1/24", "dev", f"rail{rail}")
            for name in (f"rail{rail}", f"peer{rail}"):
                ip("-n", NAME, "link", "set", name, "up")
        resident = subprocess.Popen(["ip", "netns", "exec", NAME, "sleep", "600"])
        try:
            while (namespace := network_namespace(PROCFS, resident.pid)).own:
                pass  # until `ip` has moved there
            yield namespace
        finally:
            resident.kill()
            resident.wait()
    finally:
        ip("netns", "del", NAME)


@pytest.fixture
def sources(host: NetworkNamespace) -> Iterator[DeviceSources]:
    opened = open_namespace(host, procfs=PROCFS, sysfs=SYSFS, clock=SystemClock())
    yield opened
    opened.counters.close()
    opened.close()


def value(reading: CounterReading, device: str, field: str) -> int:
    return int(reading.values[reading.names.index(device), reading.fields.index(field)])


def send(namespace: NetworkNamespace, rail: int, count: int, size: int = 1000) -> None:
    """Datagrams out of a rail to an address that its other end need not have."""
    ip("-n", NAME, "neigh", "replace", f"10.99.{rail}.2", "lladdr", "02:00:00:00:00:09", "dev", f"rail{rail}")

    def transmit() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            for _ in range(count):
                udp.sendto(bytes(size), (f"10.99.{rail}.2", 9))

    run_inside(namespace, transmit)


def test_only_the_visiting_thread_moves_and_what_it_opened_keeps_working(host: NetworkNamespace) -> None:
    before = os.readlink("/proc/thread-self/ns/net")  # noqa: PTH115
    inside, visitor = run_inside(host, lambda: (Path("/proc/thread-self/ns/net").readlink(), threading.get_ident()))
    assert str(inside) == f"net:[{host.inode}]"
    assert visitor != threading.get_ident()
    assert os.readlink("/proc/thread-self/ns/net") == before  # noqa: PTH115
    assert not host.own
    assert named_namespaces()[host.inode] == NAME


def test_the_inventory_of_another_namespace_is_complete(sources: DeviceSources) -> None:
    assert (sources.level, sources.reason) == ("netlink", "")
    devices = {device.name: device for device in sources.inventory.read()}
    assert devices.keys() == {"lo", "rail0", "rail1", "peer0", "peer1"}
    rail = devices["rail1"]
    assert (rail.kind, rail.link_layer, rail.driver, rail.pci) == ("veth", "Ethernet", "veth", "")
    assert (rail.up, rail.carrier, rail.mtu, rail.speed_bytes_per_second) == (True, True, 1500, 1_250_000_000)
    assert rail.carrier_changes is not None
    assert rail.carrier_changes >= 1
    assert devices["lo"].speed_bytes_per_second is None


def test_a_bridge_and_its_ports_know_each_other(host: NetworkNamespace, sources: DeviceSources) -> None:
    ip("-n", NAME, "link", "add", "br0", "type", "bridge")
    ip("-n", NAME, "link", "set", "peer0", "master", "br0")
    devices = {device.name: device for device in sources.inventory.read()}
    assert (devices["br0"].kind, devices["br0"].slaves) == ("bridge", ("peer0",))
    assert devices["peer0"].master == "br0"
    assert devices["br0"].netns == host.inode


def test_the_inventory_equals_pyroute2s(host: NetworkNamespace, sources: DeviceSources) -> None:
    def reference() -> dict[str, tuple[object, ...]]:
        with IPRoute() as route:
            return {
                link.get("ifname"): (link["index"], link.get("mtu"), link.get("carrier_changes"), link.get("master"))
                for link in route.get_links()
            }

    devices = sources.inventory.read()
    index_of = {device.name: device.index for device in devices}
    assert {
        device.name: (device.index, device.mtu, device.carrier_changes, index_of.get(device.master))
        for device in devices
    } == run_inside(host, reference)


def test_netlink_proc_and_the_kernel_agree_on_every_counter(host: NetworkNamespace, sources: DeviceSources) -> None:
    unprivileged = open_unprivileged(host)
    send(host, 1, 50)
    exact, outside = sources.counters.read(), unprivileged.counters.read()
    # What was sent is at rest once sendto has returned: veth hands packets over synchronously.
    assert value(exact, "rail1", "tx_bytes") >= 50 * (1000 + 42)
    for name in exact.names:
        for field in set(exact.fields) & set(outside.fields):
            assert value(exact, name, field) == value(outside, name, field), (name, field)
    unprivileged.counters.close()
    unprivileged.close()


def open_unprivileged(namespace: NetworkNamespace) -> DeviceSources:
    """As an agent without CAP_SYS_ADMIN: the capability leaves the thread that asks, which then ends."""

    def drop_and_open() -> None:
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.capget(header, data) == 0
        data[0] &= ~(1 << 21)
        assert libc.capset(header, data) == 0
        with pytest.raises(NamespaceDenied, match="grant CAP_SYS_ADMIN"):
            run_inside(namespace, lambda: None)
        opened.append(open_namespace(namespace, procfs=PROCFS, sysfs=SYSFS, clock=SystemClock()))

    opened: list[DeviceSources] = []
    thread = threading.Thread(target=drop_and_open)
    thread.start()
    thread.join()
    return opened[0]


def test_without_the_right_to_enter_names_and_bytes_remain_and_the_loss_is_said(host: NetworkNamespace) -> None:
    unprivileged = open_unprivileged(host)
    assert (unprivileged.level, unprivileged.events) == ("proc", None)
    assert "CAP_SYS_ADMIN" in unprivileged.reason
    devices = {device.name: device for device in unprivileged.inventory.read()}
    assert devices.keys() == {"lo", "rail0", "rail1", "peer0", "peer1"}
    assert (devices["rail0"].carrier, devices["rail0"].speed_bytes_per_second) == (None, None)
    unprivileged.counters.close()
    unprivileged.close()


def wait_for(sources: DeviceSources, *wanted: tuple[LinkChange, str]) -> list[LinkEvent]:
    assert sources.events is not None
    found: list[LinkEvent] = []
    poll = select.poll()
    poll.register(sources.events.fileno(), select.POLLIN)
    while not set(wanted) <= {(event.change, event.name) for event in found}:
        assert poll.poll(10_000), f"only {[(event.change.value, event.name) for event in found]}"
        found += sources.events.read()
    return found


def test_carrier_switch_and_removal_are_told_and_every_flap_is_counted(sources: DeviceSources) -> None:
    assert sources.events is not None
    assert sources.events.read() == []
    before = {device.name: device.carrier_changes for device in sources.inventory.read()}
    for state in ("down", "up", "down", "up", "down"):
        ip("-n", NAME, "link", "set", "peer1", state)
    told = wait_for(sources, (LinkChange.CARRIER, "rail1"), (LinkChange.ADMIN, "peer1"))
    after = {device.name: device.carrier_changes for device in sources.inventory.read()}
    while sum(event.flaps for event in told if event.name == "rail1") < (after["rail1"] or 0) - (before["rail1"] or 0):
        told += wait_for(sources, (LinkChange.CARRIER, "rail1"))
    last = [event for event in told if event.name == "rail1"][-1]
    assert (last.carrier, last.carrier_changes) == (False, after["rail1"])
    ip("-n", NAME, "link", "del", "rail0")
    wait_for(sources, (LinkChange.REMOVED, "rail0"), (LinkChange.REMOVED, "peer0"))
    ip("-n", NAME, "link", "add", "rail9", "type", "bridge")
    wait_for(sources, (LinkChange.ADDED, "rail9"))


def test_messages_that_the_kernel_dropped_are_told_and_cost_no_device(sources: DeviceSources) -> None:
    assert sources.events is not None
    flood = [f"link set rail0 mtu {1400 + number % 2}" for number in range(600)]
    lines = [*flood, "link add late type bridge", "link del rail1"]
    subprocess.run(["ip", "-n", NAME, "-batch", "-"], input="\n".join(lines), check=True, text=True)
    told: list[LinkEvent] = []
    while events := sources.events.read():
        told += events
    changes = [(event.change, event.name) for event in told]
    assert changes.count((LinkChange.ADDED, "late")) == 1
    assert changes.count((LinkChange.REMOVED, "rail1")) == 1
    assert (LinkChange.OVERFLOW, "") in changes


def test_a_device_that_is_made_again_does_not_lower_its_total(host: NetworkNamespace, sources: DeviceSources) -> None:
    clock = SystemClock()
    sampler = Sampler(clock)
    sampler.add("netdev", host.inode, sources.counters, 0.001)

    def total() -> int:
        due_ns = sampler.read_due(clock.monotonic_ns())
        assert due_ns is not None
        clock.sleep(max(0, due_ns - clock.monotonic_ns()) / 1e9)  # later than in a millisecond, if reads take long
        sampler.read_due(clock.monotonic_ns())
        found = sampler.state().device(host.inode, "rail1")
        assert found is not None
        return found.transmit_bytes

    first = total()
    send(host, 1, 30)
    sent = total()
    assert sent - first >= 30 * 1042
    ip("-n", NAME, "link", "del", "rail1")
    assert total() == sent
    ip("-n", NAME, "link", "add", "rail1", "type", "veth", "peer", "name", "peer1")
    ip("-n", NAME, "addr", "add", "10.99.1.1/24", "dev", "rail1")
    ip("-n", NAME, "link", "set", "peer1", "up")
    ip("-n", NAME, "link", "set", "rail1", "up")
    again = total()
    assert again >= sent
    send(host, 1, 60)
    assert total() - again >= 60 * 1042
    assert not sources.counters.read().failed


def test_the_rails_of_a_namespace_without_hardware_are_its_veths(sources: DeviceSources) -> None:
    devices = sources.inventory.read()
    decisions = decide_rails(devices, socket_interfaces={sources.netns: ["rail"]})
    names = ("peer0", "peer1", "rail0", "rail1")
    assert {decision.device.name: decision.rail for decision in decisions if decision.rail} == {
        name: str(number) for number, name in enumerate(names)
    }
    assert {decision.device.name for decision in decisions if decision.rail and decision.carries} == {"rail0", "rail1"}
    own = recorded_sources(SYSFS, clock=SystemClock())
    labels = netns_labels([*devices, *own.inventory.read()], named_namespaces())
    assert (labels[sources.netns, "rail0"], labels[sources.netns, "lo"]) == ("", NAME)
    own.counters.close()
    own.close()


def test_sysfs_and_netlink_agree_in_the_agents_own_namespace() -> None:
    own = network_namespace(PROCFS, "self")
    netlink = open_namespace(own, procfs=PROCFS, sysfs=SYSFS, clock=SystemClock())
    sysfs = recorded_sources(SYSFS, clock=SystemClock())
    first = {device.name: device for device in netlink.inventory.read()}
    second = {device.name: device for device in sysfs.inventory.read()}
    assert first.keys() == second.keys()
    for name, device in first.items():
        other = second[name]
        assert (device.index, device.pci, device.numa_node, device.up, device.mtu) == (
            other.index,
            other.pci,
            other.numa_node,
            other.up,
            other.mtu,
        )
        assert device.speed_bytes_per_second == other.speed_bytes_per_second
    for opened in (netlink, sysfs):
        opened.counters.close()
        opened.close()
