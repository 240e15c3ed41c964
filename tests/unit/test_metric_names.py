"""Whoever names a metric names one of the catalogue: in code, rules, dashboards, runbooks and documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from railscope.dashboards import rules_files
from railscope.exporters.series.catalogue import METRICS
from tests.nccl.library import REPOSITORY

FOLDERS: Final = ("agent", "dashboards", "deploy", "docs", "exporters", "probes", "testbed")
KINDS: Final = (".py", ".yml", ".md", ".json")
_NAME: Final = re.compile(r"(?<![\w./:-])railscope_[a-z0-9_]*[a-z0-9](?![\w*…/-])")
_SUFFIXES: Final = ("_bucket", "_sum", "_count")
NO_METRICS: Final = {
    "railscope_recording": "an importer's module",
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
    recorded = {name.rpartition(":")[0].rpartition(":")[2] for name in rules_files.recorded()}
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


def test_a_name_that_no_metric_has_is_found() -> None:
    assert _NAME.findall("rate(railscope_comm_enqueud_total[1m])") == ["railscope_comm_enqueud_total"]
    assert _NAME.findall("railscope_rail_* and /var/railscope_x") == []


def test_what_is_no_metric_is_still_somewhere() -> None:
    assert NO_METRICS.keys() <= {name for name, _ in named()}
