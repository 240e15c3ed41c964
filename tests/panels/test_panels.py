"""Every panel of every dashboard as a browser shows it, drawn by Grafana's component packages from a real Prometheus.

The metrics are simulated: two hosts serve what the exporter makes of a made-up snapshot, with counters that rise.  No
Grafana server takes part; heat maps and state timelines, which its packages lack, are stand-ins that say so.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pytest

if os.environ.get("RAILSCOPE_TEST_PANELS") != "1":
    pytest.skip("Grafana's component packages are 500 MB: run 'make test-panels'", allow_module_level=True)

from railscope.agent.cluster.fleet.prometheus import Endpoint, PrometheusStore
from railscope.dashboards import build, documents, rules_files
from tests.panels.bundle import ICONS, bundle
from tests.panels.chromium import Browser
from tests.panels.drawing import Drawn, PanelSeen, Question, draw
from tests.panels.server import page_served
from tests.stack.agents import HOSTS, served
from tests.stack.prometheus import prometheus, until

pytestmark = [pytest.mark.browser, pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]

DOCUMENTS: Final = documents.read_documents(build.COMMITTED)
STAND_INS: Final = {"heatmap", "state-timeline"}
SECONDS: Final = 15
"""Of data: some points of each line, whose rates take four scrapes."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The page of a Prometheus, and a moment at which both hosts had been scraped for a while."""

    browser: Browser
    url: str
    end: float

    def drawn(self, identifier: str, chosen: Mapping[str, Sequence[str]] | None = None) -> Drawn:
        question = Question(identifier, self.end - SECONDS, self.end, scrape=1, chosen=chosen or {})
        return draw(self.browser, self.url, question)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    rules = sorted(rules_files.SHIPPED.glob("*.yml"))
    page = bundle()
    with served() as scrapes, prometheus(tmp_path_factory.mktemp("prometheus"), scrapes, rules) as store_url:
        store = PrometheusStore(Endpoint(store_url))
        end = 0.0

        def seen() -> bool:
            nonlocal end
            end = time.time()
            last = f"count_over_time(rail:railscope_transmit_utilization:ratio[{SECONDS}s]) > {SECONDS - 5}"
            recorded = {one.labels["instance"] for one in store.query(last, end)}
            return len(recorded) == 2 and [one.value for one in store.query("up", end)] == [1.0] * len(HOSTS)

        until(seen, "the recording rules")
        with page_served(page, ICONS, store_url) as url, Browser() as browser:
            yield Scene(browser, url, end)


@pytest.fixture(scope="module")
def everything(scene: Scene) -> Mapping[str, Drawn]:
    """All dashboards with all values chosen, by identifier."""
    return {one.identifier: scene.drawn(one.identifier) for one in DOCUMENTS.values()}


def panel(found: Drawn, title: str, kind: str = "") -> PanelSeen:
    return next(one for one in found.panels if one.title == title and kind in ("", one.kind))


def is_drawn(one: PanelSeen) -> bool:
    """Whether data stand in a panel: lines and cells as coloured pixels, numbers and rows as text."""
    if one.kind == "stat":
        return re.search(r"\d", one.text.removeprefix(one.title)) is not None
    if one.kind == "table":
        return len(one.rows) > 1  # the first is the heading
    if one.kind == "timeseries":
        return one.coloured > 0 and bool(one.rows) and all(re.search(r"\d", row) for row in one.rows)
    return one.coloured > 0


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_every_panel_is_drawn_with_data(everything: Mapping[str, Drawn], name: str) -> None:
    document = DOCUMENTS[name]
    found = everything[document.identifier]
    panels = [one for one in document.panels if one.kind != "row"]
    assert [(one.title, one.kind) for one in found.panels] == [(one.title, one.kind) for one in panels]
    assert [(one.title, one.instead) for one in found.panels if one.instead] == []
    assert [(one.title, one.text, one.coloured) for one in found.panels if not is_drawn(one)] == []
    assert set(found.offered) == {one.name for one in document.variables if one.kind == "query"}
    assert all(found.offered.values())


def test_what_grafana_does_not_draw_says_so(everything: Mapping[str, Drawn]) -> None:
    for one in (panel for found in everything.values() for panel in found.panels):
        assert one.drawn_by == ("stand-in" if one.kind in STAND_INS else "grafana")
        assert (f"stand-in for Grafana’s {one.kind}" in one.text) == (one.kind in STAND_INS)


def test_numbers_are_those_of_the_metrics_in_their_units(everything: Mapping[str, Drawn]) -> None:
    fleet, job, node = (everything[f"railscope-{name}"] for name in ("fleet", "job", "node"))
    assert panel(fleet, "Hosts").text.split() == ["Hosts", str(len(HOSTS))]
    assert panel(fleet, "Rails down").text.split() == ["Rails", "down", "2"]
    assert panel(job, "Oldest operation in flight", "stat").text.endswith("250 ms")
    assert {row.split(" 400 Gb/s")[0] for row in panel(node, "Line rate").rows if "400 Gb/s" in row} == {
        f"rail {rail} mlx5_{rail} {host}" for host in HOSTS for rail in (0, 2)
    }
    assert panel(node, "Rails").rows[0].split()[:4] == ["instance", "rail", "device", "port"]


def test_a_choice_is_put_into_the_queries(everything: Mapping[str, Drawn], scene: Scene) -> None:
    both, one = everything["railscope-node"], scene.drawn("railscope-node", {"host": [HOSTS[0]]})
    assert all(HOSTS[1] in panel(both, title).text for title in ("Sent", "Rails"))
    assert all(HOSTS[1] not in panel(one, title).text for title in ("Sent", "Rails"))
    assert all(HOSTS[0] in panel(one, title).text for title in ("Sent", "Rails"))


def test_a_panel_without_data_says_no_data(scene: Scene) -> None:
    found = scene.drawn("railscope-job", {"job": ["of-nobody"]})
    assert panel(found, "Calls").instead == "No data"
    assert panel(found, "Communicators", "table").instead == "No data"
    assert panel(found, "Hosts", "stat").instead == "No data"
