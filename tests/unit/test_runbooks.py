"""What runbook pages tell of, compared with what their alerts count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import yaml

from railscope.agent.node.rails import counter_rules, ethernet_rules
from railscope.agent.node.rails.counter_rules import rule_of
from railscope.agent.node.rails.ethernet_rules import statistic_rule
from railscope.agent.node.rails.netdev_facts import SEVERITIES

DASHBOARDS: Final = Path(__file__).parents[2] / "dashboards"


def counters_told_of() -> set[str]:
    """Those in the first column of the page's table."""
    page = (DASHBOARDS / "runbooks/RailErrors.md").read_text()
    cells = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def pages(name: str) -> bool:
    statistic = statistic_rule(name)
    of_driver = statistic is not None and statistic.severity == "page"
    return of_driver or "page" in (SEVERITIES.get(name), rule_of(name).severity)


def test_every_counter_that_rail_errors_counts_is_told_of_on_its_page_and_no_other() -> None:
    groups = yaml.safe_load((DASHBOARDS / "rules/railscope-alerts.yml").read_text())["groups"]
    (alert,) = (rule for group in groups for rule in group["rules"] if rule["alert"] == "RailscopeRailErrors")
    assert 'increase(railscope_rail_events_total{severity="page"}[5m]) > 0\n' in alert["expr"]
    told = counters_told_of()
    assert {name for name, severity in SEVERITIES.items() if severity == "page"} - told == set()
    assert {name for name, rule in counter_rules._RULES.items() if rule.severity == "page"} - told == set()
    expressions = [expression for expression, rule in ethernet_rules._PATTERNS if rule.severity == "page"]
    assert [one.pattern for one in expressions if not any(map(one.fullmatch, told))] == []
    assert {name for name in told if not pages(name)} == set()
