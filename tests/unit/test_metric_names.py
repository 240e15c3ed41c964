"""Whoever names a metric names one of the catalogue: in code, rules, dashboards, runbooks and documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from railscope.agent.facts.catalogue import METRICS
from railscope.dashboards import recorded, rules_files
from tests.nccl.library import REPOSITORY

FOLDERS: Final = ("agent", "dashboards", "deploy", "docs", "exporters", "probes", "testbed")
NAMING: Final = (REPOSITORY / "agent/facts/catalogue.py", REPOSITORY / "dashboards/recorded.py")
"""The modules that write names: of metrics, and of series that the rules record."""
KINDS: Final = (".py", ".yml", ".md", ".json")
_NAME: Final = re.compile(r"(?<![\w./:-])railscope_[a-z0-9_]*[a-z0-9](?![\w*…/-])")
_LITERAL: Final = re.compile(r"(?<![\w./-])railscope_\w*")
_SUFFIXES: Final = ("_bucket", "_sum", "_count")
NO_METRICS: Final = {
    "railscope_recording": "an importer's module",
    "railscope_fault_": "the beginning of a table's name in nftables",
    "railscope_": "the beginning of every metric's name, and of a package's",
    **dict.fromkeys(
        [f"railscope_{one}" for one in ("architecture", "config", "found", "hardware_events", "hosts", "packages")]
        + ["railscope_ready", "railscope_ready_url"],
        "a variable of the Ansible role",
    ),
}
"""Names of the same form, with what they are."""


def named() -> Iterator[tuple[str, str]]:
    """Every name, with the file and line where it stands."""
    files = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*") if path.suffix in KINDS]
    for path in [*files, *REPOSITORY.glob("*.md")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for name in _NAME.findall(line):
                yield name, f"{path.relative_to(REPOSITORY)}:{number}"


def test_every_metric_that_is_named_is_in_the_catalogue() -> None:
    metrics = {metric.name for metric in METRICS}
    histograms = {metric.name + suffix for metric in METRICS if metric.kind == "histogram" for suffix in _SUFFIXES}
    recorded = {name.rpartition(":")[0].rpartition(":")[2] for name in rules_files.read_recorded_names()}
    known = metrics | histograms | recorded | NO_METRICS.keys()
    wrong: dict[str, str] = {}
    seen = set()
    for name, place in named():
        seen.add(name)
        # OpenMetrics calls a counter's family without its suffix.
        if name not in known and f"{name}_total" not in known:
            wrong.setdefault(name, place)
    assert wrong == {}
    assert len(seen & metrics) > 80, "the search finds nothing"


def literals(text: str) -> Iterator[tuple[str, int]]:
    """Names that a module's strings hold, docstrings apart, with their lines; also what goes on behind `railscope_`."""
    tree = ast.parse(text)
    docstrings = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
    for one in ast.walk(tree):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in docstrings:
            for name in _LITERAL.findall(one.value):
                yield name, one.lineno


def test_no_module_but_the_catalogue_writes_a_metrics_name() -> None:
    modules: list[Path] = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py")]
    found = {
        f"{path.relative_to(REPOSITORY)}:{line}": name
        for path in modules
        if path not in NAMING
        for name, line in literals(path.read_text())
        if name not in NO_METRICS
    }
    assert found == {}
    assert all(any(literals(path.read_text())) for path in NAMING)


def test_a_literal_name_is_found_wherever_it_stands() -> None:
    text = """
def f(chosen):
    '''Of railscope_comm_info.'''
    return f"rate(railscope_comm_enqueued_total{{{chosen}}}[1m])", "max(rail:railscope_explained:ratio5m)", "railscope_"
"""
    found = {name for name, _ in literals(text)}
    assert found == {"railscope_comm_enqueued_total", "railscope_explained", "railscope_"}


def test_recorded_names_are_those_of_the_rules() -> None:
    assert {one.name for one in recorded.SERIES} == rules_files.read_recorded_names()
    assert len(recorded.SERIES) == len({one.name for one in recorded.SERIES})


def test_a_name_that_no_metric_has_is_found() -> None:
    assert _NAME.findall("rate(railscope_comm_enqueud_total[1m])") == ["railscope_comm_enqueud_total"]
    assert _NAME.findall("railscope_rail_* and /var/railscope_x") == []


def test_what_is_no_metric_is_still_somewhere() -> None:
    text = "\n".join(
        path.read_text()
        for folder in FOLDERS
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in {".py", ".yml"}
    )
    assert [name for name in NO_METRICS if name not in text] == []
