"""One dashboard: its sections, where panels stand, their numbers, and the links to the other dashboards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    QueryVariable,
    Row,
    TimePicker,
)
from grafana_foundation_sdk.models import dashboard as models

from railscope.agent.facts import catalogue
from railscope.dashboards import variables
from railscope.dashboards.panels import AnyPanel
from railscope.dashboards.variables import DATASOURCE

FLEET, JOB, NODE, STALL, AGENT = (f"railscope-{name}" for name in ("fleet", "job", "node", "stall", "agent"))
"""The dashboards' identifiers: links, bookmarks and alerts hold them, so they never change."""

TITLES: Final = {FLEET: "Fleet", JOB: "Job", NODE: "Node", STALL: "Stall", AGENT: "Agent"}
_TAG: Final = "railscope"
OF_OTHERS: Final = {
    "Oxed_c6Wz": ("GPUs (DCGM)", "NVIDIA DCGM Exporter Dashboard, number 12239 of those that Grafana's users share"),
    "rYdddlPWk": ("Host (node_exporter)", "Node Exporter Full, number 1860 of those that Grafana's users share"),
}
"""Dashboards of other exporters, by identifier: title and what it is.  A Grafana without one says so."""
_COLUMNS: Final = 24

_CHOICES: Final = "var-datasource=${datasource}&${cluster:queryparam}"
TO_COMMUNICATOR: Final = f"/d/{STALL}?{_CHOICES}&var-comm=${{__value.text}}&${{__url_time_range}}"
TO_HOST: Final = f"/d/{NODE}?{_CHOICES}&var-host=${{__value.text}}&${{__url_time_range}}"
TO_JOB: Final = f"/d/{JOB}?{_CHOICES}&var-job=${{__value.text}}&${{__url_time_range}}"
"""Where a cell of a table leads."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the panels below it, which fill lines of 24 columns in order."""

    title: str
    panels: Sequence[AnyPanel]
    folded: bool = False
    """A folded section asks nothing before somebody opens it."""
    repeated_by: str = ""
    """A variable: the section comes once for each of its chosen values."""


def page(identifier: str, description: str, choices: Sequence[QueryVariable], sections: Sequence[Section]) -> Dashboard:
    """One dashboard; `choices` are its variables, after the data source and the cluster."""
    made = (
        Dashboard(f"railscope / {TITLES[identifier]}")
        .uid(identifier)
        .description(description)
        .tags([_TAG])
        .readonly()
        .timezone("browser")
        .refresh("30s")
        .time("now-1h", "now")
        .timepicker(TimePicker().refresh_intervals(["5s", "10s", "30s", "1m", "5m"]))
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(variables.datasource())
        .annotation(_stalls())
        .annotation(_restarts())
        .annotation(_flaps())
    )
    for choice in (variables.cluster(), *choices):
        made.with_variable(choice)
    for other, title in TITLES.items():
        if other != identifier:
            made.link(_link(other, title, f"railscope / {title}, with the same choices and time").include_vars(True))
    for other, (title, about) in OF_OTHERS.items():
        made.link(_link(other, title, about).target_blank(True))
    number = 0
    for section in sections:
        number += 1
        row = Row(section.title).id(number).collapsed(section.folded)
        if section.repeated_by:
            row.repeat(section.repeated_by)
        _fill_lines(section.panels)
        for panel in section.panels:
            number += 1
            panel.id(number)
            if section.folded:
                row.with_panel(panel)
        made.with_row(row)
        if not section.folded:
            for panel in section.panels:
                made.with_panel(panel)
    return made


def _fill_lines(panels: Sequence[AnyPanel]) -> None:
    """Widen the last panel of each line that would leave columns empty."""
    used = 0
    last = None
    for panel in panels:
        place = panel.build().grid_pos
        assert place is not None
        if last is not None and used + place.w > _COLUMNS:
            last.w += _COLUMNS - used
            used = 0
        used = (used + place.w) % _COLUMNS
        last = place
    if last is not None and used:
        last.w += _COLUMNS - used


def _link(identifier: str, title: str, tooltip: str) -> DashboardLink:
    return (
        DashboardLink(title)
        .type(models.DashboardLinkType.LINK)
        .url(f"/d/{identifier}")
        .tooltip(tooltip)
        .keep_time(True)
    )


def _annotation(name: str, colour: str, expression: str) -> AnnotationQuery:
    return AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(colour).expr(expression)


def _stalls() -> AnnotationQuery:
    """When something was stalled."""
    stalled = catalogue.COMM_STALLED.where(variables.CLUSTER)
    return _annotation("Stalls", "red", f"max by (cluster, comm, cause) ({stalled} == 1)")


def _restarts() -> AnnotationQuery:
    """When agents of the chosen hosts were started anew, twenty at most: a roll-out is one mark, not a thousand."""
    began = catalogue.AGENT_START_TIME.where(variables.HOST)
    return _annotation("Restarts of agents", "blue", f"topk(20, max by (cluster, instance) (changes({began}[2m]) > 0))")


def _flaps() -> AnnotationQuery:
    """When links of the chosen hosts' rails went down or came back."""
    link = catalogue.RAIL_UP.where(variables.HOST)
    return _annotation(
        "Flaps of links", "orange", f"topk(20, max by (cluster, instance, rail, device) (changes({link}[2m]) > 0))"
    )
