"""What profile `lean` shows of a node: few series, all that alerts and `railscope diagnose` ask, more if it matters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from railscope.agent import cluster
from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import Metric
from railscope.agent.facts.hardware import NvlinkFacts
from railscope.agent.facts.snapshot import Snapshot
from railscope.dashboards import rules_files
from railscope.dashboards.typical_node import typical_node
from railscope.exporters.series import lean
from railscope.exporters.series.families import make_families
from railscope.exporters.series.family import Family
from railscope.exporters.series.lean import STANDS_NS, LeanSeries
from railscope.exporters.web.http import MetricsServer, ServerSettings
from railscope.exporters.web.pages import Pages
from tests.unit.exporters_snapshots import full_snapshot

MOST_SERIES = 400
LEFT_OUT = {
    catalogue.RAIL_INFO: "which rails there are is told by rail_up",
    catalogue.RAIL_RECEIVE_BYTES: "no alert and no verdict rests on it",
    catalogue.RAIL_EXPLAINED_RATIO: "no alert and no verdict rests on it",
}
"""What recording rules or `railscope diagnose` ask and need not have."""


def shown(series: LeanSeries, snapshot: Snapshot) -> tuple[Family, ...]:
    return series.select(make_families(snapshot), snapshot)


def later(snapshot: Snapshot, ns: int) -> Snapshot:
    return replace(snapshot, monotonic_ns=snapshot.monotonic_ns + ns)


def entered(snapshot: Snapshot) -> Snapshot:
    """Each rank entered one operation more."""
    collectives = snapshot.collectives
    moved = tuple(replace(one, enqueued=one.enqueued + 1) for one in collectives.communicators)
    return replace(snapshot, collectives=replace(collectives, communicators=moved))


def count(families: Iterable[Family]) -> int:
    return sum(family.series() for family in families)


def of(families: Iterable[Family], metric: Metric) -> tuple[tuple[tuple[str | None, ...], int | float], ...]:
    return next((family.samples for family in families if family.metric is metric), ())


def test_a_typical_node_that_works_has_few_series() -> None:
    series, node = LeanSeries(), typical_node()
    assert count(shown(series, node)) <= MOST_SERIES
    assert count(shown(series, later(entered(node), 10 * STANDS_NS))) <= MOST_SERIES
    assert len(of(shown(series, node), catalogue.COMM_INFO)) == 64


def metrics() -> dict[str, Metric]:
    return {one.name: one for one in vars(catalogue).values() if isinstance(one, Metric)}


def asked() -> set[Metric]:
    """What rules and `railscope diagnose` ask."""
    by_name = metrics()
    rules = "\n".join(
        line.partition("#")[0] for file in rules_files.SHIPPED.glob("*.yml") for line in file.read_text().splitlines()
    )
    names = re.findall(r"(?<![:\w])railscope_\w+(?![:\w])", rules)
    found = {by_name[name] for name in names if name in by_name}
    for file in Path(cluster.__file__).parent.rglob("*.py"):
        found |= {vars(catalogue)[name] for name in re.findall(r"catalogue\.([A-Z_0-9]+)", file.read_text())}
    return found


def test_what_rules_and_diagnose_ask_is_shown_or_is_known_to_be_left_out() -> None:
    series, node = LeanSeries(), full_snapshot()
    rules = series._rules((), node)
    kept = lean.WHOLE | rules.keys()
    assert asked() - kept == LEFT_OUT.keys()
    assert len(asked()) > 50


def test_a_metric_is_shown_by_one_rule() -> None:
    groups = (lean.WHOLE, lean.WHILE_STANDING, lean.ACROSS_HOSTS, lean.OF_AWAITED, lean.NOT_OF_TWINS, lean.WHILE_SLOW)
    every = [one for group in (*groups, lean.WHILE_ANY_STANDS, lean.SOME) for one in group]
    assert len(every) == len(set(every))


def test_how_far_ranks_came_is_shown_once_their_process_stands_and_no_longer() -> None:
    series, node = LeanSeries(), typical_node()
    moving = (catalogue.COMM_COMPLETED, catalogue.COMM_SEQUENCE)
    assert [of(shown(series, node), one) for one in moving] == [(), ()]
    assert of(shown(series, later(node, STANDS_NS - 1)), moving[0]) == ()
    standing = shown(series, later(node, STANDS_NS))
    assert [len(of(standing, one)) for one in moving] == [64, 64]
    assert of(shown(series, later(entered(node), STANDS_NS + 1)), moving[0]) == ()


def test_a_process_that_moves_in_one_communicator_does_not_stand_in_another() -> None:
    series, node = LeanSeries(), typical_node()
    shown(series, node)
    first, *others = node.collectives.communicators
    moved = (replace(first, enqueued=first.enqueued + 1), *others)
    then = later(replace(node, collectives=replace(node.collectives, communicators=moved)), STANDS_NS)
    found = of(shown(series, then), catalogue.COMM_COMPLETED)
    same = {one.identity.key for one in moved if one.identity.pid == first.identity.pid}
    assert {labels for labels, _ in found} == {one.identity.key for one in moved} - same


def test_a_long_operation_is_shown_though_its_process_moves() -> None:
    series, node = LeanSeries(), typical_node()
    first, *others = node.collectives.communicators
    long = (replace(first, inflight_seconds=30.0), *others)
    then = replace(node, collectives=replace(node.collectives, communicators=long))
    assert of(shown(series, then), catalogue.COMM_INFLIGHT_SECONDS) == ((first.identity.key, 30.0),)


def test_links_that_are_down_are_named_and_all_are_counted() -> None:
    node = typical_node()
    links = [replace(one, up=one.link != "3") if one.gpu == "0" else one for one in node.gpus.nvlinks]
    assert all(isinstance(one, NvlinkFacts) for one in links)
    found = shown(LeanSeries(), replace(node, gpus=replace(node.gpus, nvlinks=tuple(links))))
    assert of(found, catalogue.NVLINK_UP) == ((("0", "3"), 0),)
    up = dict(of(found, catalogue.GPU_NVLINKS_UP))
    assert up[("0",)] == up[("1",)] - 1


def test_a_network_device_of_an_rdma_port_is_shown_only_where_it_is_down() -> None:
    node = typical_node()
    twin = next(
        one for one in node.rails if not one.port and any(port.port and port.rail == one.rail for port in node.rails)
    )
    names = {labels[1] for labels, _ in of(shown(LeanSeries(), node), catalogue.RAIL_UP)}
    assert twin.device not in names
    rails = tuple(replace(one, up=False) if one is twin else one for one in node.rails)
    found = shown(LeanSeries(), replace(node, rails=rails))
    assert (twin.device, 0) in {(labels[1], value) for labels, value in of(found, catalogue.RAIL_UP)}


def test_queues_of_all_rails_are_shown_while_one_is_long() -> None:
    node = typical_node()
    assert of(shown(LeanSeries(), node), catalogue.RAIL_QUEUE_BACKLOG_BYTES) == ()
    with_queue = [one for one in node.rails if one.queue is not None]
    first = with_queue[0]
    assert first.queue is not None
    rails = tuple(
        replace(one, queue=replace(first.queue, backlog_bytes=1 << 20)) if one is first else one for one in node.rails
    )
    found = of(shown(LeanSeries(), replace(node, rails=rails)), catalogue.RAIL_QUEUE_BACKLOG_BYTES)
    assert len(found) == len(with_queue)


@pytest.mark.parametrize(
    ("setting", "query", "profile"),
    [
        ("full", "", "full"),
        ("lean", "", "lean"),
        ("lean", "profile=full", "full"),
        ("full", "a=b&profile=lean", "lean"),
        ("lean", "profile=", "lean"),
    ],
)
def test_a_scrape_may_choose_and_else_the_setting_holds(setting: str, query: str, profile: str) -> None:
    server = MetricsServer(
        ServerSettings(listen_address="127.0.0.1:0"),
        snapshot=typical_node,
        healthy=lambda: (True, "ok"),
        ready=lambda: (True, "ready"),
        profile=lambda: setting,
    )
    pages: Pages = server._pages
    page = pages.page("/metrics", query)
    assert page is not None
    lines = [line for line in pages.render(page).body.splitlines() if not line.startswith(b"#")]
    assert (len(lines) <= MOST_SERIES) is (profile == "lean")
    server.close()
