"""The rules for Prometheus: what promtool says, what their tests cover, and that alerts fire and clear for real."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from railscope.agent.facts.catalogue import METRICS
from railscope.dashboards.alerting.alert import RUNBOOKS
from tests.stack.fleet import SimulatedFleet, served
from tests.stack.narrowed import Rules
from tests.stack.prometheus import alert_annotations, prometheus, store_at, tool, until

pytestmark = pytest.mark.stack

DASHBOARDS: Final = Path(__file__).parents[2] / "dashboards"
RULES: Final = sorted((DASHBOARDS / "rules").glob("*.yml"))
TESTS: Final = sorted((DASHBOARDS / "rules/tests").glob("*.yml"))


def rules() -> Iterator[dict[str, Any]]:
    for file in RULES:
        for group in yaml.safe_load(file.read_text())["groups"]:
            yield from group["rules"]


ALERTS: Final = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def promtool(*arguments: str) -> str:
    done = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_accepts_every_rule() -> None:
    said = promtool("check", "rules", *map(str, RULES))
    assert said.count("SUCCESS") == len(RULES) == 3


@pytest.fixture(scope="module")
def shipped() -> Rules:
    return Rules.from_files(RULES)


@pytest.mark.parametrize("file", TESTS, ids=lambda file: file.stem)
def test_rules_give_what_their_tests_expect(shipped: Rules, file: Path, tmp_path: Path) -> None:
    """As `promtool test rules` of the file, which evaluates every rule at every step, at a small part of its cost."""
    tests = shipped.narrowed(yaml.safe_load(file.read_text()), tmp_path)
    assert promtool("test", "rules", *map(str, tests)).count("SUCCESS") == len(tests)


def test_every_alert_is_tested_firing_and_not_firing() -> None:
    checks = [
        check
        for file in TESTS
        for test in yaml.safe_load(file.read_text())["tests"]
        for check in test.get("alert_rule_test", ())
    ]
    assert {check["alertname"] for check in checks if check.get("exp_alerts")} == ALERTS.keys()
    assert {check["alertname"] for check in checks if not check.get("exp_alerts")} == ALERTS.keys()


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_tells_how_bad_it_is_what_it_means_and_what_to_read(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert {"summary", "description", "runbook_url"} == alert["annotations"].keys()
    site, _, page = alert["annotations"]["runbook_url"].rpartition("/")
    assert site == RUNBOOKS
    assert name in (DASHBOARDS / "runbooks" / page).read_text().splitlines()[0]


def test_every_aggregation_and_every_match_keeps_clusters_apart() -> None:
    kept = re.compile(r"\b(?:by|on) \(([^)]*)\)")
    labels = {
        (rule.get("alert", rule.get("record")), found) for rule in rules() for found in kept.findall(rule["expr"])
    }
    assert len(labels) > 30
    # Identifiers of GPUs and pods are unique in all clusters.
    apart = {"cluster", "UUID", "uid"}
    assert {(name, found) for name, found in labels if apart.isdisjoint(re.split(r"[\s,]+", found))} == set()
    # And none without: it would drop all labels.
    bare = re.compile(r"\b(?:sum|min|max|avg|count|group|topk|quantile) \(|\b(?:sum|min|max|avg|count|group)\(")
    assert [rule for rule in rules() if bare.search(rule["expr"])] == []


def test_rules_only_ask_for_metrics_that_there_are() -> None:
    known = {metric.name for metric in METRICS}
    known |= {f"{one.name}{end}" for one in METRICS if one.kind == "histogram" for end in ("_bucket", "_sum", "_count")}
    made = {rule["record"] for rule in rules() if "record" in rule}
    asked = {
        name for rule in rules() for name in re.findall(r"[\w:]*\brailscope_[\w:]+|\w+:railscope_[\w:]+", rule["expr"])
    }
    assert asked & made
    assert asked - known - made == set()


def test_alerts_fire_and_clear_in_a_real_prometheus(tmp_path: Path) -> None:
    """Simulated agents; the rules are those that are shipped, but for how long a condition must hold."""
    quick = []
    for file in RULES:
        text, changed = re.subn(r"\bfor: \w+", "for: 1s", file.read_text())
        assert changed == ("alerts" in file.name) * sum("for" in alert for alert in ALERTS.values())
        quick.append(tmp_path / file.name)
        quick[-1].write_text(text)
    names = ("stop", "down", "slow", "lost", "fine", "save")
    stop, down, slow, lost, fine, save = fleets = [SimulatedFleet(name) for name in names]
    with served(fleets) as scrapes, prometheus(tmp_path, scrapes, quick) as url:
        store = store_at(url)

        def firing() -> set[tuple[str, str]]:
            alerts = store.query('ALERTS{alertstate="firing"}')
            return {(one.labels["alertname"], one.labels.get("instance", one.labels.get("comm", ""))) for one in alerts}

        until(lambda: len(store.query("rail:railscope_transmit_bytes:rate1m > 0")) == 24, "rates of all rails")
        assert firing() == set()
        stop.behind = 1
        stop.stall(rank0="rank_behind", rank1="process_stopped;blamed_rank=1")
        # A checkpoint, told by its own host first, is none of the alerts.
        save.behind = save.writing = 0
        save.stall()
        until(lambda: len(store.query("railscope_comm_writing")) == 1, "the rank to be said to write")
        save.stall(rank1="rank_behind")
        down.rails_down.add((1, 0))
        slow.slow.add((0, 1))
        lost.silent.add(1)
        expected = {
            ("RailscopeCollectiveStalled", stop.comm),
            ("RailscopeRankBehindCommunicator", "stop1:9779"),
            ("RailscopeRailDownUnderLoad", "down1:9779"),
            ("RailscopeRailSlowerThanSiblings", "slow0:9779"),
            ("RailscopeAgentSilent", "lost1:9779"),
        }
        until(lambda: firing() == expected, "five alerts and no other")
        assert len(store.query("comm:railscope_stalled_ranks:count")) == 2
        told = alert_annotations(url, "RailscopeCollectiveStalled", stop.comm)
        assert told["summary"] == f"Communicator {stop.comm} is stalled: process_stopped, rank 1 on stop1:9779"
        assert told["description"].startswith("stop1:9779 says process_stopped of rank 1, blaming rank 1. For")
        for fleet in (stop, down, slow, save):
            fleet.recover()
        lost.silent.clear()
        until(lambda: firing() == set(), "all alerts to clear")
        assert fine.stalled_at is None
