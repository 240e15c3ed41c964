"""Checks dashboards: queries that do not parse, metrics that no exporter has, panels without description.

A panel that asks for a metric under an old name shows "No data" and nothing else, so every name, and every label that
is matched, is held against the catalogue of what is exported and the recording rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import Final

from railscope.agent.facts.catalogue import METRICS, Metric
from railscope.agent.node.targets.jobs import JobFacts
from railscope.dashboards import build, expressions, page, rules_files
from railscope.dashboards.documents import Document, Panel
from railscope.dashboards.expressions import ExpressionError, Selector
from railscope.exporters.series import native

COLUMNS: Final = 24
_OF_PROMETHEUS: Final = frozenset({"up", "ALERTS", "scrape_samples_scraped", "scrape_duration_seconds"})
"""Series that Prometheus makes itself."""
_OF_SCRAPE: Final = frozenset({"cluster", "job", "instance"})
"""And the label that a Prometheus has given to all it scrapes."""
_JOB_FACTS: Final = frozenset({"job", *(field.name for field in fields(JobFacts))})
_LINK: Final = re.compile(r"/d/([\w-]+)")


@dataclass(frozen=True, slots=True)
class _Known:
    """What dashboards may name."""

    identifiers: frozenset[str]
    """Of dashboards."""
    recorded: frozenset[str]
    """Series that Prometheus makes, itself or by rules."""
    exported: Mapping[str, Metric]
    """Series' names: those of histograms with what they end in, and without where they may be native."""


def find_differences(folder: Path) -> Iterator[str]:
    """How the dashboards of a folder, and the rules that are shipped, differ from what the code builds."""
    texts = build.render_dashboards()
    for name, text in texts.items():
        file = folder / name
        if not file.is_file():
            yield f"{name}: is missing: run 'railscope dashboards build'"
        elif file.read_text() != text:
            yield f"{name}: is not what the code builds: run 'railscope dashboards build'"
    for name, text in rules_files.render_rules().items():
        if (rules_files.SHIPPED / name).read_text() != text:
            yield f"{name}: is not what the code builds: run 'railscope dashboards build'"
    for file in sorted(folder.glob("*.json")):
        if file.name not in texts:
            yield f"{file.name}: no code builds it: remove it"


def find_problems(documents: Mapping[str, Document]) -> Iterator[str]:
    """Everything that is wrong with these dashboards, by the file's name; a line each."""
    known = _Known(
        identifiers=frozenset(one.identifier for one in documents.values()),
        recorded=rules_files.read_recorded_names() | _OF_PROMETHEUS,
        exported=_exported(),
    )
    seen: dict[str, str] = {}
    for name, one in documents.items():
        if not one.identifier:
            yield f"{name}: has no uid: links and bookmarks need one that stays"
        elif one.identifier in seen:
            yield f"{name}: has the uid {one.identifier}, which {seen[one.identifier]} has too"
        seen.setdefault(one.identifier, name)
        yield from (f"{name}: {what}" for what in _of_document(one, known))


def _of_document(one: Document, known: _Known) -> Iterator[str]:
    panels = [panel for panel in one.panels if panel.kind != "row"]
    numbers = [panel.number for panel in one.panels]
    if len(set(numbers)) < len(numbers):
        yield "two panels have the same id"
    for panel in panels:
        yield from (f"{panel.title or 'a panel'}: {what}" for what in _of_panel(panel, known))
    for first, second in combinations(one.panels, 2):
        if first.place.overlaps(second.place):
            yield f"{first.title} and {second.title} overlap"
    for link in (*one.links, *(link for panel in panels for link in panel.links)):
        found = _LINK.match(link)
        if found is not None and found[1] not in known.identifiers | page.OF_OTHERS.keys():
            yield f"a link leads to {found[1]}, and there is no such dashboard"
    for variable in one.variables:
        if variable.kind == "query":
            try:
                selector, _ = expressions.parse_label_values(variable.query)
            except ExpressionError as error:
                yield f"${variable.name}: {error}"
            else:
                yield from (f"${variable.name}: {what}" for what in _of_expression(selector, known))
    for expression in one.annotations:
        yield from (f"annotation: {what}" for what in _of_expression(expression, known))


def _of_panel(panel: Panel, known: _Known) -> Iterator[str]:
    if not panel.title:
        yield "has no title"
    if not panel.description:
        yield "has no description"
    if not panel.unit:
        yield "has no unit"
    if panel.place.x + panel.place.width > COLUMNS or min(panel.place.width, panel.place.height) < 1:
        yield f"does not fit into {COLUMNS} columns"
    if not panel.queries:
        yield "has no query"
    for query in panel.queries:
        yield from _of_expression(query.expression, known)


def _of_expression(expression: str, known: _Known) -> Iterator[str]:
    try:
        found = expressions.parse_selectors(expressions.substitute_variables(expression))
    except ExpressionError as error:
        yield f"{expression!r} is not PromQL: {error}"
        return
    for selector in found:
        yield from _of_selector(selector, known)


def _of_selector(selector: Selector, known: _Known) -> Iterator[str]:
    name = selector.metric
    if name in known.recorded:
        return
    metric = known.exported.get(name)
    if metric is None:
        yield f"asks for {name or 'series without a name'}, which no metric and no recording rule provides"
        return
    for label in selector.labels:
        if label not in _labels(metric, name):
            yield f"asks for the label {label} of {name}, which does not have it"


def _exported() -> dict[str, Metric]:
    series: dict[str, Metric] = {}
    for metric in METRICS:
        series |= {metric.name + ending: metric for ending in _endings(metric)}
    return series


def _endings(metric: Metric) -> tuple[str, ...]:
    if metric.kind != "histogram":
        return ("",)
    classic = ("_bucket", "_sum", "_count")
    return (*classic, "") if metric in native.METRICS else classic


def _labels(metric: Metric, name: str) -> frozenset[str]:
    """What series of the metric may have: its own, the scrape's, and those that some have more."""
    more = _OF_SCRAPE | ({"le"} if name.endswith("_bucket") else set())
    if "rail" in metric.labels:
        more |= {"netns"}
    if metric.name.endswith("_info"):
        more |= {f"exported_{label}" for label in _OF_SCRAPE} | _JOB_FACTS
    return frozenset(metric.labels) | more
