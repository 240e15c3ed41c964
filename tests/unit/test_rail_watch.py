"""Link events that cannot be understood do not stop the watch (simulated sources)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from agent import rail_watch
from agent.rail_watch import RailWatch
from probes.clock import SystemClock
from probes.namespaces import NetworkNamespace
from probes.netdev.counters import CounterReading
from probes.netdev.events import LinkChange, LinkEvent, LinkEvents
from probes.netdev.inventory import NetworkDevice
from probes.netdev.netlink import MalformedNetlink
from probes.netdev.sources import DeviceSources

NETNS = 7


class SimulatedEvents:
    """Each element is what one `read` gives, or raises."""

    def __init__(self) -> None:
        self.coming: list[list[LinkEvent] | Exception] = []

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
    def __init__(self) -> None:
        self.names = ["eth0"]
        self.changes = 40

    def read(self) -> tuple[NetworkDevice, ...]:
        return tuple(
            NetworkDevice(
                name, index, NETNS, "physical", "Ethernet", "", "", None, True, True, None, None, "", (), self.changes
            )
            for index, name in enumerate(self.names)
        )

    def close(self) -> None:
        pass


class NoCounters:
    def read(self) -> CounterReading:
        return CounterReading(0, 0, (), (), ("tx_bytes", "rx_bytes"), np.zeros((0, 2), np.uint64))

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass


class Watch:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events, self.inventory = SimulatedEvents(), SimulatedInventory()
        sources = DeviceSources(NETNS, self.inventory, NoCounters(), cast(LinkEvents, self.events), "netlink", "")
        monkeypatch.setattr(rail_watch, "open_namespace", lambda *_, **__: sources)
        self.rails = RailWatch(
            SystemClock(),
            procfs=Path("/proc"),
            sysfs=Path("/sys"),
            sample_interval_ns=100_000_000,
            window_ns=1_000_000_000,
            lifetime_ns=0,
            patterns=(),
        )
        self.rails.watch_own(NetworkNamespace(NETNS, Path("/proc/self/ns/net"), own=True))

    def devices(self) -> list[str]:
        return [decision.device.name for decision in self.rails.decisions()]

    def take(self) -> None:
        self.rails.take_events(cast(LinkEvents, self.events))


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
        watch.rails.tick(())
        watch.rails.tick(())
    assert watch.devices() == ["eth0", "eth1"]
    assert len(caplog.messages) == 1
    assert "link events" in caplog.messages[0]


def test_a_rail_s_carrier_changes_are_exported_from_zero(watch: Watch) -> None:
    def carrier_changes() -> list[int]:
        return [
            value for fact in watch.rails.rails() for counter, _, value in fact.counters if counter == "carrier_changes"
        ]

    assert carrier_changes() == [0]
    watch.inventory.changes = 42
    watch.events.coming = [[LinkEvent(NETNS, LinkChange.CARRIER, "eth0", 0, True, True, 42, 2)]]
    watch.take()
    assert carrier_changes() == [2]
