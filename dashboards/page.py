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
    )
    for choice in (variables.cluster(), *choices):
        made.with_variable(choice)
    for other, title in TITLES.items():
        if other != identifier:
            made.link(_link(other, title))
    number = 0
    for section in sections:
        number += 1
        made.with_row(Row(section.title).id(number))
        for panel in section.panels:
            number += 1
            made.with_panel(panel.id(number))
    return made


def _link(identifier: str, title: str) -> DashboardLink:
    return (
        DashboardLink(title)
        .type(models.DashboardLinkType.LINK)
        .url(f"/d/{identifier}")
        .tooltip(f"railscope / {title}, with the same choices and time")
        .include_vars(True)
        .keep_time(True)
    )


def _stalls() -> AnnotationQuery:
    """Every dashboard shows when something was stalled."""
    return (
        AnnotationQuery()
        .name("Stalls")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("red")
        .expr(f"max by (cluster, comm, cause) ({catalogue.COMM_STALLED.where(variables.CLUSTER)} == 1)")
    )
