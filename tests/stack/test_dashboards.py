"""Every query of every dashboard against a real Prometheus: it parses, runs, and finds what there is to find.

The metrics are simulated: two hosts serve what the exporter makes of a made-up snapshot, with counters that rise; one
of them as agents are, the other with every detail that can be asked for.  No Grafana server takes part: its variables
are put in as Grafana would, and Prometheus is asked what Grafana would ask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

import pytest

from railscope.agent.cluster.fleet.prometheus import PrometheusStore, Sample
from railscope.dashboards import build, documents, expressions, rules_files
from tests.stack.agents import HOSTS, served
from tests.stack.prometheus import prometheus, store_at, until

pytestmark = pytest.mark.stack

INTERVAL: Final = "5s"
"""`$__rate_interval` for a scrape interval of one second."""
DOCUMENTS: Final = documents.read_documents(build.COMMITTED)
WITHOUT_DATA: Final = {
    ("railscope-stall", "Ranks disagree"): "all ranks of the hosts tell one signature",
    ("railscope-job", "Waiting for the slowest rank"): "no rank enters another operation",
    ("railscope-node", "Transfers that do not complete"): "none of theirs is stuck",
    ("railscope-node", "Degraded links"): "no link is slower or narrower than its siblings",
    ("railscope-node", "Lanes"): "no link is slower or narrower than its siblings",
}
"""(uid, title) of panels that cannot have data on these metrics, with the reason."""
COUNTED_FROM_NOTHING: Final = "0 * max("


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusStore]:
    """A Prometheus with the shipped rules, which has seen both hosts for a while."""
    rules = sorted(rules_files.SHIPPED.glob("*.yml"))
    with served() as scrapes, prometheus(tmp_path_factory.mktemp("prometheus"), scrapes, rules) as url:
        store = store_at(url)
        until(lambda: [one.value for one in store.query("up")] == [1.0] * len(HOSTS), "both hosts to be scraped")
        # Made from two scrapes by one rule, and from that by another one.
        last = f"count_over_time(rail:railscope_transmit_utilization:ratio[{INTERVAL}]) > 3"
        until(lambda: len({one.labels["instance"] for one in store.query(last)}) == 2, "the recording rules")
        yield store


def asked(store: PrometheusStore, expression: str, **values: str) -> list[Sample]:
    return list(store.query(expressions.substitute_variables(expression, INTERVAL, values)))


QUERIES: Final = [
    pytest.param(document.identifier, panel, query, id=f"{document.identifier}: {panel.title} {at}")
    for document in DOCUMENTS.values()
    for panel in document.panels
    for at, query in enumerate(panel.queries)
]


@pytest.mark.parametrize(("identifier", "panel", "query"), QUERIES)
def test_a_panel_shows_what_there_is(
    store: PrometheusStore, identifier: str, panel: documents.Panel, query: documents.PanelQuery
) -> None:
    found = asked(store, query.expression)
    if (identifier, panel.title) in WITHOUT_DATA:
        assert not found
        return
    assert any(not math.isnan(one.value) for one in found)
    # Device names are alone in their host, but for one rail: no other has the label netns.
    named = set(re.findall(r"\{\{(\w+)\}\}", query.legend)) - {"netns"}
    assert named <= {label for one in found for label in one.labels}


def test_every_panel_has_something_to_show_of_an_agent_as_it_is(store: PrometheusStore) -> None:
    for document in DOCUMENTS.values():
        for panel in document.panels:
            if (document.identifier, panel.title) in WITHOUT_DATA:
                continue
            shown = [asked(store, query.expression, host=HOSTS[0]) for query in panel.queries]
            assert any(shown) or not shown, panel.title


def test_numbers_are_those_of_the_metrics(store: PrometheusStore) -> None:
    """Known values come out at the other end of some queries, so that they ask what their titles say."""

    def shown(identifier: str, title: str) -> list[float]:
        panel = next(one for one in DOCUMENTS[f"{identifier}.json"].panels if one.title == title)
        return [one.value for one in asked(store, panel.queries[0].expression)]

    assert shown("railscope-fleet", "Hosts") == [2]
    assert shown("railscope-fleet", "Stalled communicators") == [2]
    assert shown("railscope-fleet", "Rails down") == [2]
    assert shown("railscope-fleet", "Silent hosts") == [0]
    assert shown("railscope-fleet", "Communicators") == [2]
    assert shown("railscope-job", "Oldest operation in flight") == [0.25]
    assert shown("railscope-stall", "Ranks stalled") == [2]
    assert shown("railscope-stall", "Rails down") == [2]
    assert shown("railscope-agent", "Failing collectors") == [2]
    assert shown("railscope-agent", "Simulated inputs") == [2]


def test_a_job_that_is_chosen_is_the_only_one_that_is_shown(store: PrometheusStore) -> None:
    job = DOCUMENTS["railscope-job.json"]
    for panel in job.panels:
        if ("railscope-job", panel.title) in WITHOUT_DATA:
            continue
        for query in panel.queries:
            assert asked(store, query.expression, job="pretrain"), panel.title
            if COUNTED_FROM_NOTHING not in query.expression:
                assert not asked(store, query.expression, job="of-nobody"), panel.title


def test_a_host_that_is_chosen_is_the_only_one_that_is_shown(store: PrometheusStore) -> None:
    for document in DOCUMENTS.values():
        if "host" not in {variable.name for variable in document.variables}:
            continue
        for panel in document.panels:
            for query in panel.queries:
                hosts = {one.labels.get("instance") for one in asked(store, query.expression, host="gpu-a:9779")}
                # What is told of a communicator as a whole is so whatever host is chosen.
                if "$host" in query.expression:
                    assert hosts <= {"gpu-a:9779", None}, panel.title


def test_variables_offer_what_there_is(store: PrometheusStore) -> None:
    offered: dict[str, set[str]] = {}
    for document in DOCUMENTS.values():
        for variable in document.variables:
            if variable.kind == "query":
                selector, label = expressions.parse_label_values(variable.query)
                found = {one.labels.get(label, "") for one in asked(store, selector)}
                assert offered.setdefault(variable.name, found) == found
    assert offered == {
        "cluster": {""},  # no server above these hosts says which one they are of
        "namespace": {"ml", ""},
        "job": {"pretrain", ""},
        "pod": {"train-0", ""},
        "comm": {"00c0ffee00c0ffee", "unknown"},
        "host": set(HOSTS),
        "rail": {"0", "1", "2"},
    }


def test_stalls_are_marked_in_every_dashboard(store: PrometheusStore) -> None:
    for document in DOCUMENTS.values():
        marked = {one.labels.get("cause") for query in document.annotations for one in asked(store, query)}
        assert marked == {"inside_call", "rail_down"}


def test_restarts_and_flaps_are_marked(store: PrometheusStore) -> None:
    """These hosts have neither: what is asked for is what changes."""
    for document in DOCUMENTS.values():
        _, restarts, flaps = document.annotations
        assert asked(store, restarts.replace("> 0", ">= 0"))
        assert {one.labels["rail"] for one in asked(store, flaps.replace("> 0", ">= 0"))} == {"0", "2"}


def test_alert_rules_ask_what_prometheus_understands(store: PrometheusStore) -> None:
    fires = {one.name for one in rules_files.make_alerts() if store.query(one.expression)}
    assert {"RailscopeCollectiveStalled", "RailscopeRailCounterPinned", "RailscopeCollectorFailing"} <= fires
