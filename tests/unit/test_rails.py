"""Which devices are rails, and their numbers; simulated devices."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from railscope.agent.config.rail_patterns import parse_rail_pattern
from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.node.rails.ethernet_facts import RailEthernet, ethernet_counters
from railscope.agent.node.rails.ethernet_rules import StatisticRules
from railscope.agent.node.rails.netdev_facts import members_of_bond, netns_labels, rail_facts
from railscope.agent.node.rails.selection import (
    RdmaNoRail,
    RdmaPorts,
    RdmaRail,
    decide_rails,
    natural_order,
    socket_interface_matches,
)
from railscope.agent.node.sampling.state import DeviceTotals
from railscope.agent.node.sampling.totals import RATE_BOUNDS
from railscope.probes.netdev.ethtool_stats import DeviceStatistics
from railscope.probes.netdev.inventory import NetworkDevice


def device(
    name: str,
    kind: str = "physical",
    *,
    netns: int = 1,
    up: bool | None = True,
    carrier: bool | None = True,
    master: str = "",
    speed: int | None = 50_000_000_000,
) -> NetworkDevice:
    return NetworkDevice(
        name=name,
        index=0,
        netns=netns,
        kind=kind,
        link_layer="Ethernet",
        driver="mlx5_core",
        pci="0000:18:00.0",
        numa_node=0,
        up=up,
        carrier=carrier,
        speed_bytes_per_second=speed,
        mtu=9000,
        master=master,
        slaves=(),
        carrier_changes=2,
    )


LO = device("lo", "loopback")


def rails(
    devices: Sequence[NetworkDevice],
    *,
    configured: Sequence[str] = (),
    jobs: Mapping[int, Sequence[str]] | None = None,
    known: Sequence[tuple[int, str]] = (),
) -> dict[str, str]:
    """Rail number by device name."""
    decisions = decide_rails(
        devices, patterns=[parse_rail_pattern(text) for text in configured], socket_interfaces=jobs or {}, known=known
    )
    return {decision.device.name: decision.rail for decision in decisions if decision.rail is not None}


def reason(name: str, decisions: Sequence[RailDecision]) -> str:
    return next(decision.reason for decision in decisions if decision.device.name == name)


def test_rails_are_numbered_in_natural_order_whatever_the_order_of_the_kernel() -> None:
    devices = [device(f"eth{number}") for number in range(12)]
    random.Random(7).shuffle(devices)
    assert rails([LO, *devices]) == {f"eth{number}": str(number) for number in range(12)}


def test_natural_order_compares_numbers_inside_names() -> None:
    names = ["ibp192s0", "ibp24s0", "eth10", "eth2", "rail", "eth2.100", "10g0", "eth2f1"]
    assert sorted(names, key=natural_order) == [
        "eth2",
        "eth2.100",
        "eth2f1",
        "eth10",
        "ibp24s0",
        "ibp192s0",
        "rail",
        "10g0",
    ]


def test_nccls_own_choice_prefers_devices_named_ib() -> None:
    assert rails([LO, device("eth0"), device("ibp64s0"), device("ibp24s0")]) == {"ibp24s0": "0", "ibp64s0": "1"}


def test_nccls_own_choice_takes_docker_then_loopback_only_when_there_is_nothing_else() -> None:
    assert rails([LO, device("docker0", "bridge"), device("eth0", "veth")]) == {"eth0": "0"}
    assert rails([LO, device("docker0", "bridge")]) == {"docker0": "0"}
    assert rails([LO]) == {"lo": "0"}


def test_containers_ends_and_bridges_are_no_rails_beside_hardware_but_are_without() -> None:
    virtual = [device("vethabc", "veth"), device("br0", "bridge"), device("eth0_rep", "representor")]
    assert rails([LO, device("eth0"), *virtual]) == {"eth0": "0"}
    assert rails([LO, device("rail0", "veth"), device("rail1", "veth")]) == {"rail0": "0", "rail1": "1"}


def test_a_card_that_is_switched_off_does_not_make_the_veths_of_a_namespace_less() -> None:
    assert rails([device("eth0", up=False), device("rail0", "veth")]) == {"rail0": "0"}


def test_a_bond_is_one_rail_and_its_members_are_none() -> None:
    devices = [device("bond0", "bond"), device("eth0", master="bond0"), device("eth1", master="bond0")]
    assert rails(devices) == {"bond0": "0"}
    assert reason("eth1", decide_rails(devices)) == "part of bond0"
    assert rails(devices, jobs={1: ["eth,bond"]}) == {"bond0": "0"}


def test_what_was_never_switched_on_is_no_rail_but_a_rail_that_is_switched_off_stays_one() -> None:
    devices = [device("eth0"), device("eth1", up=False)]
    assert rails(devices) == {"eth0": "0"}
    assert rails(devices, known=[(1, "eth0"), (1, "eth1")]) == {"eth0": "0", "eth1": "1"}
    assert rails(devices, known=[(2, "eth1")]) == {"eth0": "0"}
    lost = [device("eth0", carrier=False), device("eth1")]
    assert rails(lost) == {"eth0": "0", "eth1": "1"}


def test_the_environment_of_a_job_adds_rails_also_one_that_is_switched_off() -> None:
    devices = [device("eth0"), device("rail0", "veth"), device("rail1", "veth", up=False)]
    assert rails(devices, jobs={1: ["rail0,rail1"]}) == {"eth0": "0", "rail0": "1", "rail1": "2"}
    decisions = decide_rails(devices, socket_interfaces={1: ["rail0,rail1"]})
    assert reason("rail1", decisions) == "NCCL_SOCKET_IFNAME=rail0,rail1"
    assert reason("eth0", decisions) == "NCCL's own choice: all but docker,lo,virbr"
    assert {one.device.name: (one.requested, one.carries) for one in decisions} == {
        "eth0": (False, False),  # the job left it out, and does not own the machine
        "rail0": (True, True),
        "rail1": (True, True),
    }


def test_a_job_on_the_loopback_device_takes_no_rail_from_a_job_beside_it() -> None:
    devices = [LO, device("eth0"), device("eth1")]
    beside = decide_rails(devices, socket_interfaces={1: ["", "=lo"]})
    assert numbers(beside) == {"eth0": "0", "eth1": "1", "lo": "2"}
    assert {one.device.name: one.carries for one in beside} == {"lo": False, "eth0": True, "eth1": True}
    alone = decide_rails(devices, socket_interfaces={1: ["=lo"]})
    assert numbers(alone) == {"eth0": "0", "eth1": "1", "lo": "2"}
    assert all(one.carries for one in alone), "nothing else was named, and what it carries leaves no host"


def test_jobs_that_name_different_devices_add_theirs_and_renumber_nobody() -> None:
    devices = [device("a0", "bridge"), device("b0", "bridge"), device("eth0"), device("eth1")]
    one = decide_rails(devices, socket_interfaces={1: ["=b0"]})
    assert numbers(one) == {"eth0": "0", "eth1": "1", "b0": "2"}
    both = decide_rails(devices, socket_interfaces={1: ["=a0", "=b0"]}, held={(1, "b0"): "2"})
    assert numbers(both) == {"eth0": "0", "eth1": "1", "b0": "2", "a0": "3"}
    other = decide_rails(devices, socket_interfaces={1: ["=a0"]}, held={(1, "a0"): "3", (1, "b0"): "2"})
    assert numbers(other) == {"eth0": "0", "eth1": "1", "a0": "3"}
    taken = decide_rails(devices, socket_interfaces={1: ["=a0"]}, held={(1, "a0"): "1"})
    assert numbers(taken) == {"eth0": "0", "eth1": "1", "a0": "2"}


def test_an_environment_that_only_excludes_does_not_make_every_bridge_a_rail() -> None:
    devices = [LO, device("eth0"), device("br0", "bridge"), device("eth1", up=False), device("docker0", "bridge")]
    assert rails(devices, jobs={1: ["^lo,docker"]}) == {"eth0": "0"}
    decisions = decide_rails(devices, socket_interfaces={1: ["^lo,docker"]})
    assert reason("br0", decisions) == "bridge beside hardware"


def test_jobs_of_one_namespace_share_their_rails_and_each_namespace_numbers_its_own() -> None:
    devices = [device(name, "veth", netns=netns) for netns in (1, 2) for name in ("rail0", "rail1", "rail2")]
    decisions = decide_rails(devices, socket_interfaces={1: ["rail2", "=rail0"], 2: ["rail1"]})
    assert {(d.device.netns, d.device.name): d.rail for d in decisions} == {
        (netns, f"rail{number}"): str(number) for netns in (1, 2) for number in range(3)
    }
    assert {(d.device.netns, d.device.name) for d in decisions if d.carries} == {
        (1, "rail0"),
        (1, "rail2"),
        (2, "rail1"),
    }


@pytest.mark.parametrize(
    ("value", "used"),
    [
        ("eth1", {"eth1", "eth10"}),
        ("=eth1", {"eth1"}),
        ("=eth1,ib0", {"eth1", "ib0"}),
        ("eth1,ib", {"eth1", "eth10", "ib0"}),
        ("^eth1", {"ib0", "lo"}),
        ("^=eth1", {"eth10", "ib0", "lo"}),
        ("^lo,ib", {"eth1", "eth10"}),
        ("eth1:4000", {"eth1", "eth10"}),
        ("nothing", set()),
    ],
)
def test_nccl_socket_ifname_is_read_as_nccl_reads_it(value: str, used: set[str]) -> None:
    assert {name for name in ("eth1", "eth10", "ib0", "lo") if socket_interface_matches(value, name)} == used


def test_a_value_of_one_character_is_ignored_as_nccl_ignores_it() -> None:
    assert rails([LO, device("eth0")], jobs={1: ["^", ""]}) == {"eth0": "0"}


def test_the_configuration_overrules_the_job_and_gives_numbers() -> None:
    devices = [device(f"eth{number}") for number in range(4)]
    numbers = rails(devices, configured=["eth3=0", "eth0", "eth2=7"], jobs={1: ["eth1"]})
    assert numbers == {"eth3": "0", "eth0": "1", "eth2": "7"}
    decisions = decide_rails(devices, patterns=[parse_rail_pattern("eth[02]")])
    assert reason("eth2", decisions) == "configured: eth[02]"
    assert reason("eth1", decisions) == "matches no configured rail"


@pytest.mark.parametrize("text", ["", "=0", "eth0=", "eth*=1", "eth0=x", "eth0=-1", "eth0,eth1"])
def test_a_pattern_that_cannot_be_meant_is_refused_with_what_to_write(text: str) -> None:
    remedy = "(write a device name|give a rail number to one|a rail is a number|write each device)"
    with pytest.raises(ValueError, match=rf"^rail pattern '.*': {remedy}"):
        parse_rail_pattern(text)


def numbers(decisions: Sequence[RailDecision]) -> dict[str, str]:
    return {decision.device.name: decision.rail for decision in decisions if decision.rail is not None}


def test_a_rail_that_vanished_keeps_its_number_for_the_others_sake() -> None:
    devices = [device(f"eth{number}") for number in range(4)]
    known = [(1, one.name) for one in devices]
    del devices[1]
    assert rails(devices, known=known) == {"eth0": "0", "eth2": "2", "eth3": "3"}
    assert rails(devices, known=[(2, "eth1")]) == {"eth0": "0", "eth2": "1", "eth3": "2"}


RDMA = RdmaPorts(
    rails=(
        RdmaRail("0", "0000:18:00.0", ("ens24np0",)),
        RdmaRail("3", "0000:40:00.0", ("ens64np0", "ens64np0.7")),
        RdmaRail("4", "0000:05:00.0", ("ib0",)),
        RdmaRail("5", "0000:05:00.0", ("ib1",)),
    )
)


def test_a_network_device_beside_rdma_rails_has_its_own_port_s_number_or_one_that_no_port_has() -> None:
    devices = [
        replace(device("eth0"), pci="0000:03:00.0"),
        replace(device("ens24np0"), pci="0000:18:00.0"),
        replace(device("ens64np0"), pci=""),
        replace(device("renamed"), pci="0000:40:00.0"),
        replace(device("ib1"), pci="0000:05:00.0"),
        replace(device("other"), pci="0000:05:00.0"),
    ]
    assert numbers(decide_rails(devices, rdma=RDMA, home=[1], patterns=[parse_rail_pattern("*")])) == {
        "ens24np0": "0",
        "ens64np0": "3",
        "ib1": "5",
        "eth0": "1",
        "other": "2",  # of two ports on one PCI function: nobody knows which
        "renamed": "6",  # a second network device of the port: the first one, by order, has its number
    }


def test_of_two_ports_on_one_card_a_network_device_has_the_number_of_neither() -> None:
    """By itself: with numbers in use, the one that it may not have is often given to another device anyway."""
    card = replace(device("other"), pci="0000:05:00.0")
    assert [RDMA.rail_of(card, home=home) for home in (True, False)] == [None, None]
    assert RDMA.rail_of(replace(card, name="ib1"), home=True) == RDMA.rails[3]


def test_in_another_namespace_a_name_says_nothing_and_the_card_does() -> None:
    devices = [
        replace(device("ens24np0", netns=7), pci=""),
        replace(device("net1", netns=7), pci="0000:40:00.0"),
    ]
    assert numbers(decide_rails(devices, rdma=RDMA, home=[1], sockets=[7])) == {"ens24np0": "1", "net1": "3"}
    assert numbers(decide_rails(devices, rdma=RDMA, home=[1])) == {"net1": "3"}


def test_beside_rdma_rails_a_network_device_is_what_its_port_is() -> None:
    devices = [
        replace(device("eth0"), pci="0000:03:00.0"),
        replace(device("ibp41s0"), pci="0000:29:00.0", link_layer="InfiniBand"),
        replace(device("ib0"), pci="0000:05:00.0", link_layer="InfiniBand"),
        replace(device("pod0", "veth", netns=7), pci=""),
    ]
    others = (RdmaNoRail("leads to NVSwitches", "0000:29:00.0", ("ibp41s0",)),)
    rdma = replace(RDMA, others=others)
    asked = {1: ["eth0"], 7: [""]}
    decisions = decide_rails(devices, rdma=rdma, home=[1], socket_interfaces=asked)
    assert numbers(decisions) == {"ib0": "4"}
    assert reason("ibp41s0", decisions) == "its RDMA port is no rail: leads to NVSwitches"
    # NCCL_SOCKET_IFNAME only tells ranks where to find each other, where the bytes go through RDMA.
    assert reason("eth0", decisions) == "of no RDMA port, and NCCL sends through those"
    # A namespace whose job uses sockets has what NCCL takes there.
    assert numbers(decide_rails(devices, rdma=rdma, home=[1], socket_interfaces=asked, sockets=[7])) == {
        "ib0": "4",
        "pod0": "1",
    }
    assert numbers(decide_rails(devices, rdma=rdma, home=[1], socket_interfaces=asked, sockets=[1])) == {
        "eth0": "2",
        "ib0": "4",
        "ibp41s0": "1",
    }


def test_the_network_device_of_a_virtual_function_has_its_port_s_number_beside_that_of_the_port() -> None:
    rdma = RdmaPorts(rails=(RdmaRail("0", "0000:18:00.0", ("ens24np0",)), RdmaRail("0", "0000:18:00.2", ("ens24v0",))))
    devices = [replace(device("ens24np0"), pci="0000:18:00.0"), replace(device("ens24v0"), pci="0000:18:00.2")]
    assert numbers(decide_rails(devices, rdma=rdma, home=[1])) == {"ens24np0": "0", "ens24v0": "0"}


def test_a_configured_number_is_given_whatever_rdma_says() -> None:
    decisions = decide_rails(
        [device("ens24np0"), replace(device("eth0"), pci="")],
        rdma=RDMA,
        home=[1],
        patterns=[parse_rail_pattern("ens24np0=9"), parse_rail_pattern("eth0")],
    )
    assert numbers(decisions) == {"ens24np0": "9", "eth0": "1"}


def test_devices_where_no_job_runs_take_numbers_that_rails_of_jobs_do_not_have() -> None:
    devices = [device("eth0", netns=1), device("net1", netns=2), device("net2", netns=2), device("net1", netns=3)]

    def found(*numbers_of_jobs: str) -> list[tuple[int, str, str | None]]:
        decisions = decide_rails(devices, idle=[1], numbers_of_jobs=numbers_of_jobs)
        return [(decision.device.netns, decision.device.name, decision.rail) for decision in decisions]

    jobs = [(2, "net1", "0"), (2, "net2", "1"), (3, "net1", "0")]
    assert found() == [(1, "eth0", "2"), *jobs]
    assert found("2", "3") == [(1, "eth0", "4"), *jobs]


def test_the_members_of_a_bond_are_up_as_the_bond_sees_them_or_else_by_their_carrier() -> None:
    bond = replace(device("bond0", "bond"), slaves=("eth0", "eth1", "eth2", "gone"))
    members = [
        replace(device("eth0", master="bond0"), bond_link=False),
        device("eth1", master="bond0", carrier=False),
        device("eth2", master="bond0"),
    ]
    devices = {(one.netns, one.name): one for one in (bond, *members)}
    assert members_of_bond(bond, devices) == (("eth0", False), ("eth1", False), ("eth2", True), ("gone", None))
    bridge = replace(device("br0", "bridge"), slaves=("eth0",))
    assert members_of_bond(bridge, devices) == ()


def test_every_device_gets_a_decision_with_a_reason() -> None:
    devices = [LO, device("eth0"), device("veth1", "veth"), device("eth9", up=False)]
    decisions = decide_rails(devices)
    assert {decision.device.name for decision in decisions} == {"lo", "eth0", "veth1", "eth9"}
    assert all(decision.reason for decision in decisions)
    assert reason("eth9", decisions) == "switched off"
    assert reason("veth1", decisions) == "veth beside hardware"


def test_a_name_in_several_namespaces_gets_a_label_and_a_unique_one_none() -> None:
    devices = [device("rail0", netns=1), device("rail0", netns=2), device("eth0", netns=1)]
    assert netns_labels(devices, {2: "host1"}) == {(1, "rail0"): "net:[1]", (2, "rail0"): "host1", (1, "eth0"): ""}


def test_the_facts_of_a_rail_carry_totals_wire_and_severities() -> None:
    histogram = Histogram(RATE_BOUNDS, (1,) * 20, 5.0)
    totals = DeviceTotals(1, "eth0", 700, 300, (("rx_errors", 2), ("rx_packets", 9)), histogram, histogram, True)
    facts = rail_facts(
        RailDecision(device("eth0"), "3", ""),
        totals,
        netns_label="host1",
        gpu="4",
        carrier_changes=3,
        transmit_wire_bytes=600,
        transmit_explained_ratio=0.857,
    )
    assert (facts.rail, facts.device, facts.netdev, facts.netns, facts.gpu) == ("3", "eth0", "eth0", "host1", "4")
    assert (facts.transmit_bytes, facts.receive_bytes) == (700, 300)
    assert (facts.transmit_wire_bytes, facts.receive_wire_bytes) == (600, None)
    assert (facts.transmit_explained_ratio, facts.receive_explained_ratio) == (0.857, None)
    assert (facts.up, facts.numa, facts.speed_bytes_per_second) == (True, "0", 50_000_000_000)
    assert facts.counters == (
        ("rx_errors", "warn", 2),
        ("rx_packets", "context", 9),
        ("carrier_changes", "page", 3),  # the total, not the 2 that the kernel counts of this device
    )
    assert facts.transmit_rate is histogram


def test_a_statistic_of_the_driver_that_is_one_of_the_kernels_is_told_once() -> None:
    histogram = Histogram(RATE_BOUNDS, (1,) * 20, 5.0)
    of_kernel = (("rx_errors", 5), ("rx_dropped", 7))
    totals = DeviceTotals(1, "eth0", 0, 0, of_kernel, histogram, histogram, True)
    shown = DeviceStatistics("eth0", ("rx_errors", "rx_dropped", "rx_discards_phy"), (100, 3, 4))
    counted = replace(totals, counters=(("rx_errors", 100), ("rx_dropped", 3), ("rx_discards_phy", 4)))
    ethernet = RailEthernet(1, "0", "eth0", ethernet_counters(shown, counted, StatisticRules()), (), None, None)
    decision = RailDecision(device("eth0"), "0", "")
    assert rail_facts(decision, totals, netns_label="", ethernet=ethernet).counters == (
        ("rx_errors", "warn", 5),
        ("rx_dropped", "context", 7),
        ("rx_dropped", "warn", 3),  # what the card dropped, without what nobody listens to
        ("rx_discards_phy", "warn", 4),
    )
    bare = rail_facts(decision, replace(totals, counters=()), netns_label="", ethernet=ethernet).counters
    assert ("rx_errors", "warn", 100) in bare, "the kernel's is not to be had"
    before = rail_facts(decision, None, netns_label="", ethernet=ethernet).counters
    assert "rx_errors" not in {name for name, _, _ in before}, "the kernel's, which comes next, would seem to fall"


@pytest.mark.parametrize(
    ("up", "carrier", "works"),
    [(True, True, True), (True, False, False), (False, None, False), (None, None, None), (True, None, None)],
)
def test_a_rail_is_up_when_switched_on_and_connected_and_unknown_is_not_down(
    up: bool | None, carrier: bool | None, works: bool | None
) -> None:
    decision = RailDecision(device("eth0", up=up, carrier=carrier), "0", "")
    assert rail_facts(decision, None, netns_label="").up is works


def test_a_rail_that_was_not_read_yet_has_unknown_bytes_and_empty_histograms() -> None:
    """Zero would be a lie, and the first real value a burst."""
    facts = rail_facts(RailDecision(device("eth0", speed=None), "0", ""), None, netns_label="")
    assert (facts.transmit_bytes, facts.receive_bytes) == (None, None)
    assert (sum(facts.receive_rate.counts), facts.speed_bytes_per_second) == (0, None)


def test_facts_are_only_made_of_rails() -> None:
    with pytest.raises(ValueError, match="lo is not a rail: excluded"):
        rail_facts(RailDecision(LO, None, "excluded"), None, netns_label="")
