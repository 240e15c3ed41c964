"""What is shown without being asked for, and that nothing moves unseen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.config.options import OPTIONS
from railscope.agent.facts.hardware import NodeGpus, NvlinkFacts
from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.snapshot import RailFacts, RailTcp, Snapshot
from railscope.agent.node.rails.counter_rules import rule_of
from railscope.agent.node.rails.ethernet_rules import statistic_rule
from railscope.dashboards.typical_node import DRIVER_COUNTERS, RDMA_COUNTERS
from railscope.exporters.series.families import make_families
from railscope.exporters.series.family import Family
from railscope.exporters.series.selection import ALL, DETAILS, Selection
from tests.unit.exporters_snapshots import rail

EMPTY = Snapshot(realtime_ns=0, version="0.1.0", kernel="6.8.0")
NO_TCP = RailTcp(0, 0, None, None, None, None, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
RATES = Histogram((1e6,), (1, 0), 5.0)
Counter = tuple[str, str, int]


def values(shown: Iterable[Family], name: str, *labels: str) -> dict[str, float]:
    """By the values of some labels, of `railscope_<name>`."""
    return {
        " ".join(str(given[family.labels.index(label)]) for label in labels): value
        for family in shown
        if family.metric.name == f"railscope_{name}"
        for given, value in family.samples
    }


def counters(shown: Iterable[Family]) -> set[str]:
    return set(values(shown, "rail_events_total", "counter"))


def node(*given: Counter) -> Snapshot:
    return replace(EMPTY, rails=(replace(rail(), counters=given),))


def test_a_counter_of_which_any_increase_matters_is_there_before_it_rises() -> None:
    assert counters(make_families(node(("link_downed", "page", 0)))) == {"link_downed"}


def test_other_errors_are_shown_once_they_counted() -> None:
    assert counters(make_families(node(("symbol_error", "warn", 0), ("port_rcv_errors", "warn", 1)))) == {
        "port_rcv_errors"
    }


def test_of_context_what_tells_of_congestion_is_shown_and_traffic_on_request() -> None:
    traffic, congestion = ("unicast_rcv_packets", "context", 9), ("np_cnp_sent", "context", 9)
    silent = ("rp_cnp_handled", "context", 0)
    assert counters(make_families(node(traffic, congestion, silent))) == {"np_cnp_sent"}
    detailed = make_families(node(traffic, congestion, silent), selection=Selection(["counters"]))
    assert counters(detailed) == {"unicast_rcv_packets", "np_cnp_sent", "rp_cnp_handled"}


def kinds() -> Iterator[tuple[str, str]]:
    """(counter, kind) of what the agent knows to be congestion or traffic, of an mlx5 port."""
    for name in RDMA_COUNTERS:
        if rule_of(name).severity == "context":
            yield name, rule_of(name).kind
    for name in DRIVER_COUNTERS:
        rule = statistic_rule(name)
        assert rule is not None
        if rule.severity == "context":
            yield name, rule.kind


@pytest.mark.parametrize(("name", "kind"), list(kinds()))
def test_names_of_congestion_are_those_that_the_agent_has_rules_for(name: str, kind: str) -> None:
    shown = counters(make_families(node((name, "context", 1)))) == {name}
    if kind in ("congestion", "pause", "ecn"):
        assert shown
    if kind in ("packets", "bytes", "port_bytes", "rdma_bytes", "rdma_packets"):
        assert not shown


def test_the_sum_of_a_severity_moves_with_a_counter_that_was_not_shown() -> None:
    selection = Selection()

    def summed(*given: Counter) -> dict[str, float]:
        return values(make_families(node(*given), selection=selection), "rail_events_by_severity_total", "severity")

    assert summed(("a", "warn", 0), ("b", "warn", 700), ("c", "page", 3), ("d", "context", 5)) == {"page": 0, "warn": 0}
    assert summed(("a", "warn", 2), ("b", "warn", 701), ("c", "page", 3), ("d", "context", 6)) == {"page": 0, "warn": 3}
    assert summed(("a", "warn", 2), ("b", "warn", 701), ("c", "page", 4)) == {"page": 1, "warn": 3}


def test_a_counter_that_comes_late_or_is_away_for_a_while_does_not_lift_the_sum() -> None:
    selection = Selection()
    seen = [
        selection.total_increase(("0",), given)
        for given in (
            [("a", 5)],
            [("a", 6), ("late", 1_000)],
            [("late", 1_001)],
            [("a", 9), ("late", 1_001)],
            [],
        )
    ]
    assert seen == [0, 1, 2, 5, 5]


def test_counters_of_one_name_move_the_sum_by_what_they_rose_together() -> None:
    selection = Selection()
    readings = [[5, 100], [6, 100], [7, 101], [101, 9], [101], [102], [102, 9], [103, 9]]
    assert [selection.total_increase(("0",), [("a", value) for value in reading]) for reading in readings] == [
        0,
        1,
        3,
        5,
        5,  # one of them is away
        6,
        6,  # and comes back
        7,
    ]


def test_the_sum_of_rails_with_the_same_labels_is_told_once() -> None:
    selection = Selection()

    def summed(*given: int) -> dict[str, float]:
        rails = tuple(replace(rail(), counters=(("x", "warn", value),)) for value in given)
        shown = list(make_families(replace(EMPTY, rails=rails), selection=selection))
        assert sum(len(one.samples) for one in shown if one.metric.name.endswith("events_by_severity_total")) == 1
        return values(shown, "rail_events_by_severity_total", "severity")

    assert [summed(*given)["warn"] for given in ((5, 100), (6, 100), (7, 101))] == [0, 1, 3]


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=4), max_size=12))
def test_a_sum_never_falls(readings: list[list[tuple[str, int]]]) -> None:
    selection = Selection()
    seen = [selection.total_increase(("0",), reading) for reading in readings]
    assert seen == sorted(seen)


def test_owners_that_went_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("railscope.exporters.series.selection._MOST_OWNERS", 3)
    selection = Selection()
    for container in range(5):
        selection.total_increase((f"net:[{container}]",), [("a", 0)])
        assert selection.total_increase(("eth0",), [("a", container)]) == container, "this one is always there"
    assert selection.total_increase(("net:[4]",), [("a", 2)]) == 2
    assert selection.total_increase(("net:[0]",), [("a", 2)]) == 0


def face(tcp: RailTcp | None, port: str = "") -> RailFacts:
    return replace(rail("0", "ens0"), port=port, tcp=tcp, transmit_rate=RATES, receive_rate=RATES)


def has_rates(shown: Iterable[Family], device: str) -> bool:
    return any(
        given[family.labels.index("device")] == device
        for family in shown
        if family.metric.name == "railscope_rail_rate_bytes_per_second"
        for given, _ in family.histograms
    )


@pytest.mark.parametrize(
    ("rails", "shown"),
    [
        ((rail("0"), face(NO_TCP)), False),
        ((rail("0"), face(replace(NO_TCP, connections=1))), True),
        ((rail("0"), face(replace(NO_TCP, received_bytes=1))), True),
        # Nobody looks at TCP: it is not known whether a job uses the device.
        ((rail("0"), face(None)), True),
        # Not known yet.
        ((rail("0"), replace(face(None), tcp_awaited=True)), False),
        # No RDMA at all, or of another rail.
        ((face(NO_TCP),), True),
        ((rail("1"), face(NO_TCP)), True),
    ],
)
def test_rates_of_a_network_device_that_only_rdma_uses_are_left_out(rails: tuple[RailFacts, ...], shown: bool) -> None:
    snapshot = replace(EMPTY, rails=rails)
    assert has_rates(make_families(snapshot), "ens0") is shown
    assert has_rates(make_families(snapshot, selection=Selection(["devices"])), "ens0")
    assert "ens0" in values(make_families(snapshot), "rail_transmit_bytes_total", "device")


def test_rates_that_were_shown_stay() -> None:
    selection = Selection()
    used = replace(NO_TCP, connections=1)

    def shown(device: RailFacts) -> bool:
        return has_rates(make_families(replace(EMPTY, rails=(rail("0"), device)), selection=selection), "ens0")

    unread = replace(face(None), tcp_awaited=True)
    assert [shown(one) for one in (unread, face(NO_TCP), face(used), face(NO_TCP), unread)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert not shown(replace(face(NO_TCP), netns="other")), "another device of that name was not used"


def test_devices_that_went_long_ago_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("railscope.exporters.series.selection._MOST_OWNERS", 2)
    selection = Selection()
    used = replace(NO_TCP, connections=1)

    def rates(netns: str, tcp: RailTcp) -> bool:
        (_, found) = selection.select_rails((rail("0"), replace(face(tcp), netns=netns)))
        return bool(found.transmit_rate.counts)

    assert all(rates(netns, used) for netns in "abc")
    assert [rates(netns, NO_TCP) for netns in "abc"] == [False, True, True]


def link(number: int, errors: int = 0, utilization: float | None = 0.5, speed: int | None = 100) -> NvlinkFacts:
    return NvlinkFacts(
        "0", str(number), True, 1, 1, "data", (("crc", errors),), speed, "0000:0c:00.0", "switch", utilization, None
    )


def with_links(*links: NvlinkFacts) -> Snapshot:
    return replace(EMPTY, gpus=NodeGpus(nvlinks=links))


def test_of_nvlinks_errors_are_told_of_the_gpu_and_of_those_that_had_some() -> None:
    selection = Selection()
    make_families(with_links(link(0), link(1, errors=7)), selection=selection)
    shown = make_families(with_links(link(0, errors=2), link(1, errors=7)), selection=selection)
    assert values(shown, "gpu_nvlink_errors_total", "gpu", "kind") == {"0 crc": 2}
    assert values(make_families(with_links(link(0), link(1, errors=7))), "nvlink_errors_total", "link") == {"1": 7}


def test_speed_and_utilization_are_told_of_the_gpu_and_of_links_on_request() -> None:
    snapshot = with_links(link(0, utilization=0.25), link(1, utilization=0.75), link(2, 0, None, None))
    shown = make_families(snapshot)
    assert values(shown, "gpu_nvlink_speed_bytes_per_second", "gpu") == {"0": 200}
    assert values(shown, "gpu_nvlink_utilization_ratio", "direction", "stat") == {
        "transmit mean": 0.5,
        "transmit max": 0.75,
    }
    assert not values(shown, "nvlink_speed_bytes_per_second", "link")
    assert not values(shown, "nvlink_utilization_ratio", "link")
    detailed = make_families(snapshot, selection=Selection(["nvlinks"]))
    assert values(detailed, "nvlink_speed_bytes_per_second", "link") == {"0": 100, "1": 100}
    assert values(detailed, "nvlink_utilization_ratio", "link", "direction") == {"0 transmit": 0.25, "1 transmit": 0.75}
    assert set(values(detailed, "nvlink_errors_total", "link")) == {"0", "1", "2"}


def test_the_option_knows_every_detail_and_no_other() -> None:
    (option,) = (one for one in OPTIONS if one.field == "series_detail")
    for name in (*DETAILS, ALL):
        assert option.read(name) == name
        Selection([name])
        assert name in option.help
    with pytest.raises(ValueError, match="choose"):
        option.read("everything")
    with pytest.raises(ValueError, match="everything"):
        Selection(["everything"])


def test_help_of_a_metric_names_no_detail_that_there_is_not() -> None:
    text = (Path(__file__).parents[2] / "agent/facts/catalogue.py").read_text()
    assert set(re.findall(r"--series\.detail=(\w+)", text)) <= set(DETAILS)
