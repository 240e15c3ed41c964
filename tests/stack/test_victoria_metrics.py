"""VictoriaMetrics instead of Prometheus: it scrapes by itself, its vmalert evaluates the shipped rules.

Agents are simulated.  Every query of every dashboard and every rule must find there what it finds in Prometheus, and
`railscope diagnose` must come to the same verdict.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from railscope.agent.cluster.fleet.prometheus import PrometheusStore
from railscope.dashboards import build, documents, expressions, rules_files
from tests.stack.agents import HOSTS, served
from tests.stack.fleet import SimulatedFleet
from tests.stack.fleet import served as served_fleet
from tests.stack.prometheus import prometheus, store_at, tool, until
from tests.stack.stack import lay_out
from tests.stack.test_dashboards import WITHOUT_DATA
from tests.stack.victoria_metrics import victoria_metrics, vmalert

pytestmark = pytest.mark.stack

DOCUMENTS = documents.read_documents(build.COMMITTED)
RULES = sorted(rules_files.SHIPPED.glob("*.yml"))
INTERVAL = "5s"
RECORDED_LAST = "count_over_time(rail:railscope_transmit_utilization:ratio[1m]) > 3"
"""Made from what another rule makes of two scrapes."""

Stores = tuple[PrometheusStore, PrometheusStore]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    """VictoriaMetrics and Prometheus side by side, both with the shipped rules; neither knows of the other."""
    folder = tmp_path_factory.mktemp("victoria-metrics")
    # By default answers keep 30 s of distance from now, and the rules' inputs would be as old.
    prompt = ["-search.latencyOffset=0s"]
    with (
        served() as scrapes,
        victoria_metrics(folder, scrapes, prompt) as url,
        vmalert(folder, url, RULES),
        prometheus(tmp_path_factory.mktemp("prometheus"), scrapes, RULES) as other,
    ):
        both = (
            store_at(url),
            store_at(other),
        )
        # What vmalert records was found after half a minute as a rule, and after more than one on a busy host.
        for store, name in zip(both, ("VictoriaMetrics", "Prometheus"), strict=True):
            until(partial(recorded, store), f"the recording rules in {name}", 120)
        yield both


def found_by_both(stores: Stores, expression: str) -> list[set[frozenset[tuple[str, str]]]]:
    """What either finds, as soon as both find the same, or after a minute and a half.

    The first minute is not alike: Prometheus divides a rate by its whole window, VictoriaMetrics by what it has of it,
    and vmalert writes what it makes of a rule some evaluations later.
    """
    end = time.monotonic() + 90
    while True:
        found = [series_of(store, expression) for store in stores]
        if found[0] == found[1] or time.monotonic() > end:
            return found
        time.sleep(0.2)


def recorded(store: PrometheusStore) -> bool:
    return {one.labels["instance"] for one in store.query(RECORDED_LAST)} == set(HOSTS)


def series_of(store: PrometheusStore, expression: str) -> set[frozenset[tuple[str, str]]]:
    """The labels of what an expression finds, NaN left out, and what is empty, which is no label in PromQL."""
    return {
        frozenset((name, value) for name, value in one.labels.items() if value)
        for one in store.query(expression)
        if not math.isnan(one.value)
    }


QUERIES = [
    pytest.param(query.expression, id=f"{document.identifier}: {panel.title} {at}")
    for document in DOCUMENTS.values()
    for panel in document.panels
    for at, query in enumerate(panel.queries)
    if (document.identifier, panel.title) not in WITHOUT_DATA
]


@pytest.mark.parametrize("expression", QUERIES)
def test_a_panel_shows_what_it_shows_on_prometheus(stores: Stores, expression: str) -> None:
    asked = expressions.substitute_variables(expression, INTERVAL)
    until(lambda: bool(series_of(stores[0], asked)), "anything in VictoriaMetrics")
    victoria, other = found_by_both(stores, asked)
    assert victoria == other


EXPRESSIONS = [
    pytest.param(rule["expr"], id=rule.get("record") or rule["alert"])
    for file in RULES
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_rule_finds_what_it_finds_in_prometheus(stores: Stores, expression: str) -> None:
    victoria, other = found_by_both(stores, expression)
    assert victoria == other


def test_its_own_evaluator_takes_the_rules_as_they_are() -> None:
    command = [tool("vmalert", "victoria-metrics"), "-dryRun", *(f"-rule={file}" for file in RULES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_takes_the_shipped_configuration_and_leaves_out_what_is_not_for_it(tmp_path: Path) -> None:
    lay_out(tmp_path)
    arguments = ["-dryRun", f"-promscrape.config={tmp_path / 'prometheus.yml'}", "-promscrape.config.strictParse=false"]
    command = [tool("victoria-metrics", "victoria-metrics"), f"-storageDataPath={tmp_path / 'data'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_diagnose_names_the_stopped_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As it comes, with the distance from now that it keeps by default."""
    job = SimulatedFleet("stop")
    with served_fleet([job]) as scrapes, victoria_metrics(tmp_path_factory.mktemp("fleet"), scrapes) as url:

        def diagnosed() -> list[tuple[str, list[int], list[str]]]:
            command = [sys.executable, "-m", "railscope.agent.cli.main", "diagnose", "--prometheus", url, "--json"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode in (0, 1), done.stderr
            findings = json.loads(done.stdout)["findings"]
            return [(one["cause"], one["ranks"], one["hosts"]) for one in findings]

        store = store_at(url)
        until(lambda: len(store.query("count_over_time(railscope_build_info[1m]) > 5")) == 2, "scrapes of both hosts")
        assert diagnosed() == []
        job.behind = 1
        job.stall(rank0="rank_behind", rank1="process_stopped;blamed_rank=1")
        until(lambda: diagnosed() == [("process_stopped", [1], ["stop1"])], "the verdict")
