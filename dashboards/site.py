"""What a site's Prometheus calls things: which targets are agents, and the label that tells clusters apart.

Dashboards and rules are written for a Prometheus in which `railscope_*` is nobody else's and clusters differ by the
label `cluster`.  A site that has it otherwise builds its own with `--selector` and `--cluster-label`, as mixins do
(https://monitoring.mixins.dev): every selection of agents' series gets the selector, every `cluster` the site's name.
Series that rules record need no selector, as they are made of selected ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from railscope.dashboards.alerting.alert import Alert
from railscope.dashboards.expressions import ExpressionError, parse_selectors

CLUSTER: Final = "cluster"
_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_METRIC: Final = re.compile(r"(?<![\w:$])(railscope_\w+)(?![\w:])(\{)?")
"""Not within the name of a recorded series, which has colons."""
_LABEL: Final = re.compile(r"(?<![\w$:])(?<!\$\{)cluster(?![\w:])")
"""The label, and neither the variable of dashboards nor the name of a recorded series."""
_TEMPLATE: Final = re.compile(r"\{\{.*?\}\}", re.DOTALL)
_QUERIES: Final = frozenset({"expr", "query", "definition"})
_NAMES: Final = frozenset({"indexByName", "renameByName", "excludeByName"})


class SiteError(ValueError):
    """What was asked for is no selector or no label; the message is one line."""


@dataclass(frozen=True, slots=True)
class Site:
    """The names of one site; the defaults are those of the shipped files."""

    selector: str = ""
    """PromQL's label matchers, as in `job="railscope"`; empty: none."""
    cluster_label: str = CLUSTER

    def __post_init__(self) -> None:
        """Refuse what would make PromQL that nothing parses.

        Raises:
            SiteError: it is no list of label matchers, or no name of a label.
        """
        if not _NAME.fullmatch(self.cluster_label):
            raise SiteError(f"--cluster-label {self.cluster_label}: write a label's name, as in k8s_cluster")
        try:
            found = parse_selectors(f"up{{{self.selector}}}")
        except ExpressionError as error:
            raise SiteError(
                f'--selector {self.selector}: write label matchers, as in job="railscope" ({error})'
            ) from None
        if len(found) != 1 or "\n" in self.selector:
            raise SiteError(f'--selector {self.selector}: write label matchers, as in job="railscope"')

    def expression(self, text: str) -> str:
        """A PromQL expression in the site's names."""
        return _LABEL.sub(self.cluster_label, _METRIC.sub(self._selected, text) if self.selector else text)

    def template(self, text: str) -> str:
        """A legend or an annotation, in which the label stands within braces, in the site's names."""
        return _TEMPLATE.sub(lambda found: _LABEL.sub(self.cluster_label, found[0]), text)

    def alert(self, alert: Alert) -> Alert:
        """An alerting rule in the site's names."""
        return replace(
            alert,
            expression=self.expression(alert.expression),
            summary=self.template(alert.summary),
            description=self.template(alert.description),
            more_labels={name: self.template(value) for name, value in alert.more_labels.items()},
        )

    def rules(self, text: str) -> str:
        """A file of rules, written by hand, in the site's names; its comments stay."""
        return "\n".join(line if line.lstrip().startswith("#") else self.expression(line) for line in text.split("\n"))

    def dashboard(self, content: Any) -> Any:
        """A dashboard's JSON in the site's names."""
        if isinstance(content, dict):
            return dict(self._members(content))
        return [self.dashboard(one) for one in content] if isinstance(content, list) else content

    def _members(self, content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in content.items():
            if key in _QUERIES and isinstance(value, str):
                yield key, self.expression(value)
            elif key == "legendFormat" and isinstance(value, str):
                yield key, self.template(value)
            elif key in _NAMES and isinstance(value, dict):
                yield key, {self.cluster_label if name == CLUSTER else name: one for name, one in value.items()}
            else:
                yield key, self.dashboard(value)

    def _selected(self, metric: re.Match[str]) -> str:
        return f"{metric[1]}{{{self.selector}" + ("," if metric[2] else "}")
