"""Dashboards as they open on a fleet of 128 simulated nodes: how many lines each panel has, and what it costs a server.

A real Prometheus holds the fleet's last minutes and what the rules record of them.  Panels are asked for as many points
as an hour has, which is what dashboards open with, within the minute that is there.
"""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

import pytest

from railscope.agent.cluster.fleet.prometheus import PrometheusStore, parse_duration
from railscope.dashboards import build, documents, expressions
from tests.fleet.past import END, Past, began, past
from tests.fleet.simulation import Fault, Fleet
from tests.stack.prometheus import store_at

# The first test makes the server, which takes minutes on a busy machine.
pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]

NODES: Final = 128
MOST_LINES: Final = 500
MOST_CPU_SECONDS: Final = 1.0
MOST_BELOW: Final = 8
"""Lines whose names may stand below them; more would leave the lines no height."""
SECONDS: Final = 60.0
"""Of what is there, asked for in as many steps as an hour has."""
DOCUMENTS: Final = documents.read_documents(build.COMMITTED)
PANELS: Final = [
    pytest.param(document, panel, id=f"{document.identifier}: {panel.title}")
    for document in DOCUMENTS.values()
    for panel in document.panels
    if panel.queries
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    folder = tmp_path_factory.mktemp("fleet") / "past"
    with past(folder, Fleet(NODES, began()), Fault.BEHIND, seconds=105, passes_of_rules=2) as made:
        yield made


@pytest.fixture(scope="module")
def chosen(server: Past) -> dict[str, dict[str, str]]:
    """What each dashboard's variables are as it opens, by its identifier."""
    store = store_at(server.url)
    return {one.identifier: _opens_with(store, one) for one in DOCUMENTS.values()}


def _opens_with(store: PrometheusStore, document: documents.Document) -> dict[str, str]:
    values: dict[str, str] = {}
    for one in document.variables:
        if one.kind != "query":
            continue
        selector, label = expressions.parse_label_values(one.query)
        asked = expressions.substitute_variables(selector, "1m", values)
        there = sorted({found.labels.get(label, "") for found in store.query(asked, END)})
        if one.everything is None:
            values[one.name] = re.escape(there[0])
        else:
            values[one.name] = one.everything or "|".join(map(re.escape, there))
        values[one.name] = values[one.name].replace("\\", "\\\\")
    return values


def lines(server: Past, panel: documents.Panel, values: dict[str, str]) -> int:
    step = max(parse_duration(panel.least_step) if panel.least_step else 15.0, 15.0) * SECONDS / 3600
    return sum(
        len(_ask(server, expressions.substitute_variables(one.expression, "1m", values), one.instant, step))
        for one in panel.queries
    )


def _ask(server: Past, expression: str, instant: bool, step: float) -> list[Any]:
    given: dict[str, object] = {"query": expression}
    given |= {"time": END} if instant else {"start": END - SECONDS, "end": END, "step": f"{step:.3f}"}
    url = f"{server.url}/api/v1/{'query' if instant else 'query_range'}"
    with urllib.request.urlopen(url, urllib.parse.urlencode(given).encode(), timeout=300) as answer:
        found: list[Any] = json.load(answer)["data"]["result"]
    return found


@pytest.mark.parametrize(("document", "panel"), PANELS)
def test_a_panel_opens_with_few_lines_and_little_work(
    server: Past, chosen: dict[str, dict[str, str]], document: documents.Document, panel: documents.Panel
) -> None:
    took: list[float] = []
    # The server also collects garbage, of what other panels left.
    while not took or (took[-1] > MOST_CPU_SECONDS and len(took) < 3):
        before = server.cpu_seconds()
        found = lines(server, panel, chosen[document.identifier])
        took.append(server.cpu_seconds() - before)
    print(f"{min(took):.2f} CPU s, {found} lines")
    assert found <= MOST_LINES
    if panel.kind == "timeseries" and found > MOST_BELOW:
        assert panel.legend != "bottom"
    assert min(took) <= MOST_CPU_SECONDS


def test_dashboards_open_with_something_of_one_job_host_and_communicator(chosen: dict[str, dict[str, str]]) -> None:
    assert chosen["railscope-fleet"] == dict.fromkeys(("cluster", "namespace", "job", "comm", "host"), ".*")
    job = chosen["railscope-job"]
    assert job["job"] == "pretrain\\\\-A"
    assert job["host"].count("|") == NODES // 2 - 1
    assert chosen["railscope-node"]["host"] == "node0000:9779"
    assert re.fullmatch("[0-9a-f]{16}", chosen["railscope-stall"]["comm"])
