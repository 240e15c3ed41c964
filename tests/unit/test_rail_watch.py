"""Rails of namespaces as the watch keeps them: events, numbers, trouble that is said (simulated sources)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.node.inspection.tenants import ROOT, Tenant
from railscope.agent.node.rails import netdev_rails as rail_watch
from railscope.agent.node.rails.ethernet_facts import RailEthernet
from railscope.agent.node.rails.namespace_shares import MOST_SETTINGS, NamespaceShares
from railscope.agent.node.rails.netdev_facts import rail_facts
from railscope.agent.node.rails.netdev_rails import NetdevRails
from railscope.agent.node.rails.selection import RdmaPorts, RdmaRail, decide_rails
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.counters import CounterReading
from railscope.probes.netdev.events import LinkChange, LinkEvent, LinkEvents
from railscope.probes.netdev.inventory import NetworkDevice
from railscope.probes.netdev.netlink import MalformedNetlink
from railscope.probes.netdev.sources import DeviceSources
from railscope.probes.processes.namespaces import NetworkNamespace

NETNS = 7


class SimulatedEvents:
    """Each element is what one `read` gives, or raises."""

    def __init__(self) -> None:
        self.coming: list[list[LinkEvent] | Exception] = []
        self.postponed = 0

    def postpone(self) -> None:
        self.postponed += 1

    def read(self) -> list[LinkEvent]:
        if not self.coming:
            return []
        step = self.coming.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def close(self) -> None:
        pass


class SimulatedInventory:
    def __init__(self, netns: int = NETNS) -> None:
        self.netns = netns
        self.names = ["eth0"]
        self.changes = 40

    def read(self) -> tuple[NetworkDevice, ...]:
        return tuple(
            NetworkDevice(
                name,
                index,
                self.netns,
                "physical",
                "Ethernet",
                "",
                "",
                None,
                True,
                True,
                None,
                None,
                "",
                (),
                self.changes,
            )
            for index, name in enumerate(self.names)
        )

    def close(self) -> None:
        pass


class NoCounters:
    def __init__(self) -> None:
        self.error = ""

    def read(self) -> CounterReading:
        if self.error:
            raise OSError(self.error)
        return CounterReading(0, 0, (), (), ("tx_bytes", "rx_bytes"), np.zeros((0, 2), np.uint64))

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass


class Watch:
    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        awaits_connections: bool = False,
        clock: SystemClock | None = None,
        lifetime_ns: int = 0,
    ) -> None:
        self.events, self.inventory, self.counters = SimulatedEvents(), SimulatedInventory(), NoCounters()
        sources = DeviceSources(NETNS, self.inventory, self.counters, cast(LinkEvents, self.events), "netlink", "")
        monkeypatch.setattr(rail_watch, "open_namespace", lambda *_, **__: sources)
        self.rails = NetdevRails(
            clock or SystemClock(),
            procfs=Path("/proc"),
            sysfs=Path("/sys"),
            sample_interval_ns=100_000_000,
            window_ns=1_000_000_000,
            lifetime_ns=lifetime_ns,
            patterns=(),
            awaits_connections=awaits_connections,
        )
        self.rails.watch_own(NetworkNamespace(NETNS, Path("/proc/self/ns/net"), own=True))

    def devices(self) -> list[str]:
        return [decision.device.name for decision in self.rails.decisions()]

    def numbers(self) -> dict[str, str]:
        return {facts.device: facts.rail for facts in self.rails.rails()}

    def take(self) -> None:
        self.rails.handle_link_events(cast(LinkEvents, self.events))


def elsewhere(inode: int) -> NetworkNamespace:
    """A namespace whose process has ended; the owner of one that is there would be read."""
    return NetworkNamespace(inode, Path("/proc/0/ns/net"), own=False)


def add_job_elsewhere(watch: Watch, monkeypatch: pytest.MonkeyPatch, devices: list[str]) -> None:
    """A job in network namespace 8, which has these devices."""
    there = SimulatedInventory(8)
    there.names = devices
    sources = DeviceSources(8, there, NoCounters(), cast(LinkEvents, SimulatedEvents()), "netlink", "")
    monkeypatch.setattr(rail_watch, "open_namespace", lambda *_, **__: sources)
    watch.rails.add_process(42, elsewhere(8), "")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    one = Watch(monkeypatch)
    yield one
    one.rails.close()


ADDED = LinkEvent(NETNS, LinkChange.ADDED, "eth1", 1, True, True, 0, 0)


@pytest.mark.parametrize("error", [MalformedNetlink("netlink: a message of 3 bytes in 16"), OSError(105, "no room")])
def test_events_that_cannot_be_read_are_one_line_and_are_read_again_at_the_next_tick(
    watch: Watch, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    watch.inventory.names.append("eth1")
    watch.events.coming = [error, error, [ADDED]]
    with caplog.at_level(logging.WARNING):
        watch.take()
        assert watch.devices() == ["eth0"]
        watch.rails.update(())
        watch.rails.update(())
    assert watch.devices() == ["eth0", "eth1"]
    assert len(caplog.messages) == 1
    assert "link events" in caplog.messages[0]


def test_a_rail_s_carrier_changes_are_the_kernels(watch: Watch) -> None:
    def carrier_changes() -> list[int]:
        return [
            value for fact in watch.rails.rails() for counter, _, value in fact.counters if counter == "carrier_changes"
        ]

    assert carrier_changes() == [40]
    watch.inventory.changes = 42
    watch.events.coming = [[LinkEvent(NETNS, LinkChange.CARRIER, "eth0", 0, True, True, 42, 2)]]
    watch.take()
    assert carrier_changes() == [42]


def test_a_rail_that_vanishes_and_comes_back_moves_no_number(watch: Watch) -> None:
    numbers = {"eth0": "0", "eth1": "1", "eth2": "2"}
    for names in (["eth0", "eth1", "eth2"], ["eth0", "eth2"], ["eth0", "eth1", "eth2"]):
        watch.inventory.names = names
        watch.events.coming = [[ADDED]]
        watch.take()
        assert watch.numbers() == {name: numbers[name] for name in names}


def test_numbers_of_rdma_rails_are_left_to_them_when_they_come(watch: Watch) -> None:
    assert watch.numbers() == {"eth0": "0"}
    watch.rails.set_rdma_ports(RdmaPorts(("mlx5_0",), (RdmaRail("0", "0000:18:00.0", ("ib0",)),)))
    assert watch.numbers() == {}, "NCCL sends through RDMA"
    watch.rails.add_process(43, HOME, "", sockets_only=True)
    assert watch.numbers() == {"eth0": "1"}, "but this job does not"
    watch.rails.set_rdma_ports(RdmaPorts(("rxe0",), (RdmaRail("3", "", ("eth0",)),)))
    assert watch.numbers() == {"eth0": "3"}


def test_the_agent_s_own_devices_take_other_numbers_than_the_rails_of_a_job_elsewhere(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job_elsewhere(watch, monkeypatch, ["net1", "net2"])
    assert watch.numbers() == {"eth0": "2", "net1": "0", "net2": "1"}
    own = NetworkNamespace(NETNS, Path("/proc/self/ns/net"), own=True)
    watch.rails.add_process(43, own, "")
    assert watch.numbers() == {"eth0": "0", "net1": "0", "net2": "1"}, "a job runs here too"


def test_a_rail_keeps_the_name_of_its_namespace_when_that_is_removed_before_its_processes(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job_elsewhere(watch, monkeypatch, ["eth0"])

    def labels() -> list[str]:
        return sorted(facts.netns for facts in watch.rails.rails())

    named: dict[int, str] = {}
    monkeypatch.setattr(rail_watch, "named_namespaces", lambda: named)
    assert labels() == ["net:[7]", "net:[8]"]
    named[8] = "host1"
    assert labels() == ["host1", "net:[7]"]
    named.clear()
    assert labels() == ["host1", "net:[7]"]
    named[8] = "host2"
    assert labels() == ["host2", "net:[7]"]


def test_counters_that_cannot_be_read_are_one_line_and_so_is_their_return(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    def until(count: int) -> None:
        deadline = time.monotonic() + 60
        while len(caplog.messages) < count:
            assert time.monotonic() < deadline, caplog.messages
            watch.rails.update(())
            time.sleep(0.01)

    caplog.set_level(logging.INFO)
    watch.counters.error = "Input/output error"
    watch.rails.start()
    until(1)
    assert [(result.collector, result.success) for result in watch.rails.collectors()] == [("netdev", False)]
    watch.counters.error = ""
    until(2)
    assert caplog.messages == ["netdev: Input/output error", "netdev: is read again"]


def test_bytes_are_related_only_when_it_is_said_what_was_expected(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    related: list[object] = []
    monkeypatch.setattr(watch.rails, "_relate", lambda *expected: related.append(expected))
    watch.inventory.names.append("eth1")
    watch.events.coming.append(MalformedNetlink("short"))
    watch.take()
    watch.events.coming.append([ADDED])
    watch.rails.update(None)
    assert (related, watch.devices()) == ([], ["eth0", "eth1"])
    watch.rails.update([])
    assert len(related) == 1


def test_it_is_known_of_a_rail_whether_its_connections_are_still_to_be_read(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def awaited() -> list[bool]:
        return [facts.tcp_awaited for facts in watch.rails.rails()]

    assert awaited() == [False], "nobody is to read them"
    watch.rails.close()
    watch.rails = Watch(monkeypatch, awaits_connections=True).rails
    assert awaited() == [True]
    read = RailEthernet(NETNS, "0", "eth0", (), (), None, None)
    watch.rails.set_ethernet([replace(read, awaited=True)])
    assert awaited() == [True]
    watch.rails.set_ethernet([read])
    assert awaited() == [False], "they cannot be read"


class OwnTime(SystemClock):
    """Monotonic time that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns


HOME = NetworkNamespace(NETNS, Path("/proc/self/ns/net"), own=True)


def test_rails_that_only_a_job_asked_for_expire_with_it_and_stay_readable_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = OwnTime()
    watch = Watch(monkeypatch, clock=clock, lifetime_ns=10**9)
    watch.inventory.names = ["eth0", "lo"]
    watch.events.coming = [[ADDED]]
    watch.take()
    assert watch.numbers() == {"eth0": "0"}
    watch.rails.add_process(50, HOME, "")
    for pid in (51, 52):
        watch.rails.add_process(pid, HOME, "=lo")
    assert watch.numbers() == {"eth0": "0", "lo": "1"}

    def shown_after(ns: int) -> list[str]:
        clock.now_ns += ns
        watch.rails.update(())
        return [decision.device.name for decision in watch.rails.decisions() if decision.rail is not None]

    watch.rails.remove_process(51)
    assert shown_after(10**9) == ["eth0", "lo"], "another process of the job runs"
    watch.rails.remove_process(52)
    assert shown_after(299_000_000) == ["eth0", "lo"], "its last bytes are read"
    assert shown_after(2_000_000) == ["eth0"]
    assert watch.numbers() == {"eth0": "0", "lo": "1"}, "what it carried stays readable"
    assert shown_after(10**9) == ["eth0"]
    assert watch.numbers() == {"eth0": "0"}
    watch.rails.close()


def test_processes_that_wait_for_one_namespace_are_all_told_of_when_it_is_opened_and_wait_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = OwnTime()
    watch = Watch(monkeypatch, clock=clock)
    there, inventory = NetworkNamespace(8, tmp_path / "net", own=False), SimulatedInventory(8)
    inventory.names = ["net1", "lo"]
    sources = DeviceSources(8, inventory, NoCounters(), cast(LinkEvents, SimulatedEvents()), "netlink", "")
    monkeypatch.setattr(rail_watch, "open_namespace", lambda *_, **__: sources)
    tenant = Tenant(5000)
    watch.rails.shares.account_of_tenant(tenant).pay(clock.now_ns, clock.now_ns + 10**9)
    for pid in (61, 62):
        assert watch.rails.add_process(pid, there, "", tenant=tenant) is None
    assert not watch.rails.watches(8), "its user's share of the time is used up"
    clock.now_ns += 10**10
    watch.rails.update(())
    assert [(one.pid, one.events) for one in watch.rails.take_opened()] == [(61, sources.events), (62, None)]
    watch.rails.add_process(62, there, "=lo", tenant=tenant)
    watch.rails.update(())
    assert watch.numbers() == {"eth0": "2", "net1": "0", "lo": "1"}, "what it says later counts"
    assert watch.rails.take_opened() == []
    watch.rails.close()


def test_what_ends_at_once_is_told_and_decided_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = OwnTime()
    watch = Watch(monkeypatch, clock=clock, lifetime_ns=10**12)
    watch.inventory.names = ["eth0", *(f"lo{at}" for at in range(50))]
    watch.events.coming = [[ADDED]]
    watch.take()
    watch.rails.add_process(50, HOME, "")
    watch.rails.add_process(51, HOME, "lo")

    def elsewhere(namespace: NetworkNamespace, **_: object) -> DeviceSources:
        there = SimulatedInventory(namespace.inode)
        return DeviceSources(there.netns, there, NoCounters(), cast(LinkEvents, SimulatedEvents()), "netlink", "")

    monkeypatch.setattr(rail_watch, "open_namespace", elsewhere)
    for pid in range(100, 110):
        watch.rails.add_process(pid, NetworkNamespace(pid, Path("/nowhere"), own=False), "", tenant=ROOT)
    before = watch.rails.rails()
    assert len(before) == 61
    decided, told = Mock(wraps=decide_rails), Mock(wraps=rail_facts)
    monkeypatch.setattr(rail_watch, "decide_rails", decided)
    monkeypatch.setattr(rail_watch, "rail_facts", told)
    for pid in (51, *range(100, 110)):
        watch.rails.remove_process(pid)
    clock.now_ns += 10**9
    assert len(watch.rails.update(())) == 10
    assert decided.call_count == 2, "settings that ended, namespaces that ended"
    assert told.call_count == len(before) + 11, "each once for what is gone: all of them, then those without lo"
    kept = watch.rails.rails()
    assert sorted((one.netns, one.device, one.rail) for one in kept) == sorted(
        (one.netns, one.device, one.rail) for one in before
    ), "what they carried stays readable"
    watch.rails.close()


def test_namespaces_without_events_are_read_at_times_and_decided_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = OwnTime()
    watch = Watch(monkeypatch, clock=clock)
    there = {netns: SimulatedInventory(netns) for netns in range(100, 110)}

    def elsewhere(namespace: NetworkNamespace, **_: object) -> DeviceSources:
        return DeviceSources(namespace.inode, there[namespace.inode], NoCounters(), None, "proc", "no right")

    monkeypatch.setattr(rail_watch, "open_namespace", elsewhere)
    for netns in there:
        watch.rails.add_process(netns, NetworkNamespace(netns, Path("/nowhere"), own=False), "", tenant=ROOT)
    for inventory in there.values():
        inventory.names = ["eth0", "eth1"]
    clock.now_ns += 10**11
    decided = Mock(wraps=decide_rails)
    monkeypatch.setattr(rail_watch, "decide_rails", decided)
    watch.rails.update(())
    assert watch.devices().count("eth1") == len(there)
    assert decided.call_count == 1
    watch.rails.close()


def test_a_setting_that_a_process_is_found_to_have_replaces_that_it_had_none(watch: Watch) -> None:
    watch.inventory.names = ["eth0", "lo"]
    watch.events.coming = [[ADDED]]
    watch.take()
    for setting in ("", "=lo"):
        watch.rails.add_process(50, HOME, setting)
    assert {one.device.name: one.rail for one in watch.rails.decisions()} == {"eth0": "0", "lo": "1"}


def test_a_namespace_whose_devices_change_without_end_takes_a_tenth_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(SimulatedInventory):
        def read(self) -> tuple[NetworkDevice, ...]:
            clock.now_ns += 1_000_000_000
            return super().read()

    class Steps(SystemClock):
        now_ns = 0

        def monotonic_ns(self) -> int:
            return self.now_ns

    clock = Steps()
    one = Watch(monkeypatch, clock=clock)
    events, there = SimulatedEvents(), Slow(8)
    sources = DeviceSources(8, there, NoCounters(), cast(LinkEvents, events), "netlink", "")
    monkeypatch.setattr(rail_watch, "open_namespace", lambda *_, **__: sources)
    one.rails.add_process(42, elsewhere(8), "")
    looks_from_ns = clock.now_ns
    for at in range(100):
        there.names = ["eth0", f"eth{at + 1}"]
        events.coming = [[ADDED]]
        one.rails.handle_link_events(cast(LinkEvents, events))
    assert clock.now_ns == looks_from_ns, "to open it took a look, and the others wait"
    assert events.postponed == 100
    clock.now_ns += 10_000_000_000
    one.rails.update(())
    assert "eth100" in one.devices(), "what waited is seen at a tick"
    one.rails.close()


def test_a_namespace_that_its_tenant_has_no_time_for_is_opened_at_a_later_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Steps(SystemClock):
        now_ns = 0

        def monotonic_ns(self) -> int:
            return self.now_ns

    clock, opened = Steps(), []
    one = Watch(monkeypatch, clock=clock)

    def slowly(namespace: NetworkNamespace, **_: object) -> DeviceSources:
        clock.now_ns += 200_000_000
        opened.append(namespace.inode)
        inventory = SimulatedInventory(namespace.inode)
        return DeviceSources(
            namespace.inode, inventory, NoCounters(), cast(LinkEvents, SimulatedEvents()), "netlink", ""
        )

    monkeypatch.setattr(rail_watch, "open_namespace", slowly)
    places = {pid: elsewhere(pid) for pid in range(1000, 1005)}
    for pid, namespace in places.items():
        one.rails.add_process(pid, namespace, "", tenant=Tenant(5000))
    one.rails.add_process(2000, elsewhere(2000), "", tenant=Tenant(5001))
    assert opened == [1000, 2000], "another tenant waits for nobody"
    one.rails.remove_process(1004)
    later = []
    for _ in range(3):
        clock.now_ns += 2_000_000_000
        one.rails.update(())
        later.append([(one_of.pid, one_of.events is not None) for one_of in one.rails.take_opened()])
    assert later == [[(1001, True)], [(1002, True)], [(1003, True)]]
    assert set(opened) == {1000, 1001, 1002, 1003, 2000}, "one whose process has ended is not opened"
    one.rails.close()


def test_a_tenant_has_so_many_devices_in_all_namespaces_and_others_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Watch(monkeypatch)
    most = []

    def crowded(namespace: NetworkNamespace, *, most_devices: int | None, **_: object) -> DeviceSources:
        most.append(most_devices)
        inventory = SimulatedInventory(namespace.inode)
        inventory.names = [f"eth{at}" for at in range(100)]
        return DeviceSources(
            namespace.inode, inventory, NoCounters(), cast(LinkEvents, SimulatedEvents()), "netlink", ""
        )

    monkeypatch.setattr(rail_watch, "open_namespace", crowded)
    for number, tenant in ((1000, Tenant(5000)), (1001, Tenant(5000)), (1002, Tenant(0)), (1003, Tenant(5001))):
        place = elsewhere(number)
        one.rails.add_process(number, place, "", tenant=tenant)
    assert most == [256, 156, None, 256]
    one.rails.close()


def test_settings_of_a_tenant_that_bring_news_all_the_time_wait_for_the_next_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Steps(SystemClock):
        now_ns = 0

        def monotonic_ns(self) -> int:
            return self.now_ns

    clock, decided = Steps(), list[int]()

    def slowly(*devices: Iterable[NetworkDevice], **known: Any) -> tuple[RailDecision, ...]:
        clock.now_ns += 200_000_000
        decided.append(clock.now_ns)
        return decide_rails(*devices, **known)

    one = Watch(monkeypatch, clock=clock)
    one.inventory.names = ["docker9", "eth0"]
    one.events.coming = [[ADDED]]
    one.take()
    monkeypatch.setattr(rail_watch, "decide_rails", slowly)
    for at in range(10):
        one.rails.add_process(100 + at, HOME, f"=x{at}", tenant=Tenant(5000))
    assert len(decided) == 1
    one.rails.add_process(43, HOME, "=docker9", tenant=Tenant(5001))
    assert len(decided) == 2
    assert set(one.numbers()) == {"docker9", "eth0"}, "another tenant waits for nobody"
    one.rails.add_process(200, HOME, "", tenant=Tenant(5000))
    one.rails.update(())
    assert len(decided) == 3
    one.rails.update(())
    assert len(decided) == 3
    one.rails.close()


def test_each_tenants_first_setting_counts_before_anybodys_second_whoever_came_first(watch: Watch) -> None:
    watch.inventory.names = ["docker9", "eth0"]
    watch.events.coming = [[ADDED]]
    watch.take()
    for at in range(100):
        watch.rails.add_process(100 + at, HOME, f"!{at:03}", tenant=Tenant(5000))
    watch.rails.add_process(43, HOME, "=docker9", tenant=Tenant(5001))
    assert set(watch.numbers()) == {"docker9", "eth0"}
    lost = watch.rails.shares.unread_by_user
    assert lost == {5000: 100 - MOST_SETTINGS + 1}, "only who has many loses, and it is counted once"


def test_what_is_lost_is_counted_by_user_however_many_containers_come_and_go() -> None:
    shares = NamespaceShares(SystemClock())
    for at in range(100):
        shares.refuse(at, Tenant(0, f"{at:064x}"))
    assert shares.refused_by_user == {0: 100}


def test_settings_of_later_processes_take_no_rail_from_a_job_that_runs(watch: Watch) -> None:
    watch.inventory.names = ["docker9", "eth0"]
    watch.events.coming = [[ADDED]]
    watch.take()
    watch.rails.add_process(43, HOME, "=docker9")
    assert set(watch.numbers()) == {"docker9", "eth0"}
    for at in range(100):
        watch.rails.add_process(100 + at, HOME, f"!{at:03}")
    assert set(watch.numbers()) == {"docker9", "eth0"}
