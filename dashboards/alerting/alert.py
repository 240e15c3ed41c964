"""One alerting rule, and the text of a group of them in Prometheus' rules file.

An alert ends when its fault does.  So no expression compares with a window of its own past, which would end with the
window: what was before stands in recorded series that remember (`instance:`, `rail:` and `gpu:` in
rules/railscope-recording.yml). Where an event is the fault (a counter rose), the window is how long it is told.

Source of the format: Prometheus' documentation, "Alerting rules".
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from railscope.agent.facts.causes import Severity

_WIDTH: Final = 118
PREFIX: Final = "Railscope"
"""Of every alert's name: others load rules of other products beside ours."""
RUNBOOKS: Final = "https://railscope.example/runbooks"
"""Stands in the shipped file for the address under which a site serves dashboards/runbooks."""


class Group(StrEnum):
    """Rules that Prometheus evaluates one after the other."""

    STALLS = "railscope-stalls"
    RAILS = "railscope-rails"
    NVLINKS = "railscope-nvlinks"
    HARDWARE = "railscope-hardware"
    ITSELF = "railscope-itself"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule."""

    group: Group
    name: str
    severity: Severity
    expression: str
    holds_for: str
    """How long the expression must give something before the alert fires, as in `15s`."""
    because: str
    """Why it must hold so long; a sentence or more."""
    summary: str
    description: str
    page: str
    """Of dashboards/runbooks, without its ending."""
    about: str = ""
    """What a reader of the expression has to know."""
    more_labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        """What the alert has besides the labels of its series."""
        return {"severity": self.severity.value, **self.more_labels}

    def annotations(self, runbooks: str) -> dict[str, str]:
        """What it says; `runbooks`: the address under which dashboards/runbooks is served, empty: nowhere."""
        said = {"summary": self.summary, "description": self.description}
        return said | ({"runbook_url": f"{runbooks.rstrip('/')}/{self.page}.md"} if runbooks else {})


def promql(text: str) -> str:
    """An expression as it stands in an indented literal."""
    return textwrap.dedent(text).strip()


def render_groups(alerts: Iterable[Alert], runbooks: str) -> str:
    """The groups of these alerts, as YAML."""
    groups: dict[Group, list[Alert]] = {}
    for one in alerts:
        groups.setdefault(one.group, []).append(one)
    parts = ["groups:"]
    for group, members in groups.items():
        rules = "\n\n".join("\n".join(_rule(one, runbooks)) for one in members)
        parts.append(f"  - name: {group.value}\n    rules:\n{rules}\n")
    return "\n".join(parts)


def _rule(alert: Alert, runbooks: str) -> Iterator[str]:
    yield f"      - alert: {alert.name}"
    yield from _comment(alert.about)
    yield "        expr: |"
    yield textwrap.indent(alert.expression, " " * 10)
    yield from _comment(alert.because)
    yield f"        for: {alert.holds_for}"
    yield "        labels:"
    yield from _pairs(alert.labels)
    yield "        annotations:"
    yield from _pairs(alert.annotations(runbooks))


def _comment(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent=" " * 8 + "# ", subsequent_indent=" " * 8 + "# ")


def _pairs(texts: Mapping[str, str]) -> Iterator[str]:
    for name, text in texts.items():
        yield f"          {name}: {_quoted(text)}"


def _quoted(text: str) -> str:
    """A YAML scalar of one line."""
    return text if text.isalpha() else "'" + text.replace("'", "''") + "'"
