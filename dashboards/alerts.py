"""The alerting rules for Prometheus, as alert rules that Grafana itself evaluates.

For places where Prometheus loads the recording rules and Grafana does the alerting.  A rule of Prometheus fires for
every series that its expression gives, whatever the value; Grafana wants a number above a threshold, so that each is
asked whether it is a number at all.  This is how Grafana's own import of such rules writes them.

Grafana's templates differ: `$value` is a text there, the number is `$values.query.Value`; and they cannot query, so
that what a template fetches (`{{ range … | query }}` to its end) is left out, and so is a label that fetches.

Source: Grafana's "Alerting provisioning HTTP API" and "Template annotations and labels" (11.6).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from railscope.dashboards.alerting.alert import PREFIX, Alert, Group
from railscope.dashboards.page import AGENT, NODE, STALL

EVALUATED_EVERY_SECONDS: Final = 10
"""The shortest that Grafana evaluates by default."""
_LOOKS_BACK_SECONDS: Final = 600
_ACTION: Final = re.compile(r"(\{\{.*?\}\})", re.DOTALL)
_OPENS: Final = re.compile(r"\{\{-?\s*(range|with|if|block|define)\b")
_ENDS: Final = re.compile(r"\{\{-?\s*end\b")
_FETCHES: Final = re.compile(r"\|\s*query\b")
_VALUE: Final = re.compile(r"\$value\b")

SHOWN_BY: Final[Mapping[str, tuple[str, str]]] = {
    Group.STALLS: (STALL, "What the hosts say"),
    Group.RAILS: (NODE, "Links"),
    Group.NVLINKS: (NODE, "NVLink errors"),
    Group.HARDWARE: (NODE, "Hardware events"),
    Group.ITSELF: (AGENT, "Agents up"),
}
"""The dashboard and panel that an alert leads to, by the group of its rule."""


@dataclass(frozen=True, slots=True)
class PanelAddress:
    """A panel of a dashboard."""

    dashboard: str
    number: int


def make_alert_group(
    name: str, rules: Iterable[Alert], folder: str, datasource: str, panel: PanelAddress | None, runbooks: str
) -> dict[str, Any]:
    """A group of alert rules in the form of Grafana's provisioning interface.

    `datasource` is the uid of the Prometheus, `runbooks` the address before a runbook's name; empty: without runbooks.
    """
    return {
        "title": name,
        "folderUid": folder,
        "interval": EVALUATED_EVERY_SECONDS,
        "rules": [_rule(one, name, folder, datasource, panel, runbooks) for one in rules],
    }


def _rule(
    alert: Alert, group_name: str, folder: str, datasource: str, panel: PanelAddress | None, runbooks: str
) -> dict[str, Any]:
    annotations = {key: to_grafana_template(text) for key, text in alert.annotations(runbooks).items()}
    if panel is not None:
        annotations |= {"__dashboardUid__": panel.dashboard, "__panelId__": str(panel.number)}
    return {
        "uid": f"railscope-{alert.name.removeprefix(PREFIX)}",  # Grafana takes forty characters
        "title": alert.name,
        "folderUID": folder,
        "ruleGroup": group_name,
        "condition": "fires",
        "data": _queries(alert.expression, datasource),
        "noDataState": "OK",
        "execErrState": "Error",
        "for": alert.holds_for,
        # Of a label nothing would be left but what is said where nothing is found.
        "labels": {key: to_grafana_template(text) for key, text in alert.labels.items() if not _FETCHES.search(text)},
        "annotations": annotations,
    }


def _queries(expression: str, datasource: str) -> Sequence[dict[str, Any]]:
    back = {"from": _LOOKS_BACK_SECONDS, "to": 0}
    is_given = "is_number($query) || is_nan($query) || is_inf($query)"
    return [
        {
            "refId": "query",
            "relativeTimeRange": back,
            "datasourceUid": datasource,
            "model": {"refId": "query", "expr": expression, "instant": True, "range": False},
        },
        {
            "refId": "given",
            "relativeTimeRange": back,
            "datasourceUid": "__expr__",
            "model": {"refId": "given", "type": "math", "expression": is_given},
        },
        {
            "refId": "fires",
            "relativeTimeRange": back,
            "datasourceUid": "__expr__",
            "model": {
                "refId": "fires",
                "type": "threshold",
                "expression": "given",
                "conditions": [{"evaluator": {"type": "gt", "params": [0]}}],
            },
        },
    ]


def to_grafana_template(text: str) -> str:
    """A template of Prometheus in Grafana's terms."""
    kept, inside = [], 0
    for part in _ACTION.split(text):
        if inside:
            inside += bool(_OPENS.match(part)) - bool(_ENDS.match(part))
        elif _FETCHES.search(part) and _OPENS.match(part):
            inside = 1
        else:
            kept.append(_VALUE.sub("$values.query.Value", part) if part.startswith("{{") else part)
    return " ".join("".join(kept).split())
