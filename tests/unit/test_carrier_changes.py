"""Carrier changes begin with the kernel's count and never fall (simulated devices)."""

from __future__ import annotations

from dataclasses import replace

from railscope.agent.node.rails.carrier_changes import MOST_GONE, CarrierChanges
from railscope.probes.netdev.inventory import NetworkDevice

SECOND_NS = 1_000_000_000
ETH0 = NetworkDevice("eth0", 2, 1, "physical", "Ethernet", "", "", None, True, True, None, None, "", (), 41)


def device(changes: int | None, index: int = 2) -> NetworkDevice:
    return replace(ETH0, carrier_changes=changes, index=index)


def test_a_total_begins_with_the_kernels_count_and_rises_with_it() -> None:
    changes = CarrierChanges()
    changes.record(1, [device(41)], 0)
    assert changes.count(1, "eth0") == 41
    changes.record(1, [device(43)], SECOND_NS)
    assert changes.count(1, "eth0") == 43
    assert changes.count(2, "eth0") is None


def test_a_total_goes_on_when_the_device_is_made_anew_or_its_count_falls() -> None:
    changes = CarrierChanges()
    for kernel, index in ((41, 2), (42, 2), (1, 3), (2, 3), (0, 3), (9, 4)):
        changes.record(1, [device(kernel, index)], SECOND_NS)
    assert changes.count(1, "eth0") == 43, "what another device of the name counted before is not its own"


def test_a_device_that_is_gone_keeps_its_total_for_a_while_and_another_namespace_keeps_its_own() -> None:
    changes = CarrierChanges()
    changes.record(1, [device(1)], 0)
    changes.record(2, [device(1)], 0)
    changes.record(1, [device(2)], SECOND_NS)
    changes.record(1, [], 200 * SECOND_NS)
    assert changes.count(1, "eth0") == 2
    changes.record(1, [], 302 * SECOND_NS)
    assert (changes.count(1, "eth0"), changes.count(2, "eth0")) == (None, 1)
    changes.forget(2)
    assert changes.count(2, "eth0") is None


def test_a_device_whose_changes_are_not_counted_has_none() -> None:
    changes = CarrierChanges()
    changes.record(1, [device(None)], 0)
    assert changes.count(1, "eth0") is None


def test_the_first_carrier_after_a_boot_is_no_change_and_every_later_one_is() -> None:
    changes = CarrierChanges()
    down = replace(device(1), carrier=False)
    changes.record(1, [down], 0)
    changes.record(1, [device(2)], SECOND_NS)
    assert changes.count(1, "eth0") == 1
    assert changes.changed_ns(1, "eth0") == SECOND_NS, "who waits for it is told"
    changes.record(1, [replace(device(3), carrier=False)], 2 * SECOND_NS)
    changes.record(1, [device(4)], 3 * SECOND_NS)
    assert changes.count(1, "eth0") == 3


def test_a_link_that_flaps_while_it_comes_up_counts_each_time() -> None:
    changes = CarrierChanges()
    changes.record(1, [replace(device(1), carrier=False)], 0)
    changes.record(1, [device(4)], SECOND_NS)
    assert changes.count(1, "eth0") == 4


def test_of_names_that_devices_had_the_newest_are_kept() -> None:
    changes = CarrierChanges()
    for at in range(1000):
        changes.record(1, [replace(ETH0, name=f"eth{at}")], at * SECOND_NS // 100)
    known = [at for at in range(1000) if changes.count(1, f"eth{at}") is not None]
    assert known == list(range(999 - MOST_GONE, 1000))
