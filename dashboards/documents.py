"""Parses a dashboard's JSON: panels with queries and positions, variables, links.

Grafana's own format, of which only what the checks look at is read.  Rows are headings; their panels stand behind them
(or, where a row is folded, within them).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class DocumentError(ValueError):
    """A file is no dashboard; the message is one line and names it."""


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query of a panel, with Grafana's variables in it."""

    expression: str
    legend: str
    instant: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where a panel stands, in columns of 24 and lines."""

    x: int
    y: int
    width: int
    height: int

    def overlaps(self, other: Place) -> bool:
        """Whether two panels would lie on each other in a dashboard's grid."""
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; rows have the kind `row`, and neither queries nor unit."""

    number: int
    kind: str
    title: str
    description: str
    unit: str
    place: Place
    queries: tuple[PanelQuery, ...]
    least_step: str
    """Between two points, as `1m`; empty: as the range has it."""
    links: tuple[str, ...]
    legend: str
    """Where the names of lines stand: `bottom` or `right`; empty: nowhere."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One choice at the top of a dashboard."""

    name: str
    kind: str
    query: str
    everything: str | None = None
    """What stands for all values together where that may be chosen, and is at first: a regular expression, or empty
    where it is the values themselves; None: it is the first value."""


@dataclass(frozen=True, slots=True)
class Document:
    """One dashboard."""

    identifier: str
    title: str
    panels: tuple[Panel, ...]
    variables: tuple[Variable, ...]
    annotations: tuple[str, ...]
    """Queries of what is marked in all panels."""
    links: tuple[str, ...]


def read_documents(folder: Path) -> dict[str, Document]:
    """All dashboards of a folder, by the file's name.

    Raises:
        DocumentError: a file is no dashboard, or there is none.
    """
    found = {file.name: read_document(file) for file in sorted(folder.glob("*.json"))}
    if not found:
        raise DocumentError(f"{folder}: no dashboards (*.json) here: run 'railscope dashboards build' first")
    return found


def read_document(file: Path) -> Document:
    """One dashboard of a folder.

    Raises:
        DocumentError: it cannot be read, or is none.
    """
    try:
        return parse_document(json.loads(file.read_text()))
    except OSError as error:
        raise DocumentError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DocumentError(f"{file}: this is not a Grafana dashboard ({' '.join(str(error).split())[:80]})") from None


def parse_document(content: dict[str, Any]) -> Document:
    """A dashboard from its JSON.

    Raises:
        KeyError, TypeError, AttributeError: it is none.
    """
    return Document(
        identifier=content["uid"],
        title=content["title"],
        panels=tuple(_panel(one) for one in _with_folded(content["panels"])),
        variables=tuple(_variable(one) for one in content["templating"]["list"]),
        annotations=tuple(one.get("expr", "") for one in content["annotations"]["list"]),
        links=tuple(one.get("url", "") for one in content.get("links", ())),
    )


def _with_folded(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for one in panels:
        yield one
        yield from one.get("panels", ())


def _panel(content: dict[str, Any]) -> Panel:
    place, config = content["gridPos"], content.get("fieldConfig", {})
    return Panel(
        number=content["id"],
        kind=content["type"],
        title=content.get("title", ""),
        description=content.get("description", ""),
        unit=config.get("defaults", {}).get("unit", ""),
        place=Place(place["x"], place["y"], place["w"], place["h"]),
        queries=tuple(
            PanelQuery(one["expr"], one.get("legendFormat", ""), bool(one.get("instant")))
            for one in content.get("targets", ())
        ),
        least_step=content.get("interval", ""),
        links=tuple(
            link["url"]
            for override in config.get("overrides", ())
            for change in override["properties"]
            if change["id"] == "links"
            for link in change["value"]
        ),
        legend=_legend(content.get("options", {}).get("legend", {})),
    )


def _legend(content: dict[str, Any]) -> str:
    shown = content.get("showLegend", False) and content.get("displayMode") != "hidden"
    return str(content.get("placement", "")) if shown else ""


def _variable(content: dict[str, Any]) -> Variable:
    query = content.get("query", "")
    return Variable(
        content["name"],
        content["type"],
        query if isinstance(query, str) else query.get("query", ""),
        (content.get("allValue") or "") if content.get("includeAll") else None,
    )
