"""The rules for Prometheus that are shipped, read back: which series they record, and which alerts they raise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

SHIPPED: Final = Path(__file__).parent / "rules"
"""Where the files lie in the source and in the wheel."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule."""

    group: str
    name: str
    expression: str
    holds_for: str
    """How long the expression must give something before the alert fires, as in `15s`."""
    labels: tuple[tuple[str, str], ...]
    annotations: tuple[tuple[str, str], ...]


def read_recorded_names(folder: Path = SHIPPED) -> frozenset[str]:
    """Names of the series that the recording rules make."""
    return frozenset(rule["record"] for _, rule in _rules(folder) if "record" in rule)


def read_alerts(folder: Path = SHIPPED) -> tuple[Alert, ...]:
    """All alerting rules, in the rule files' order."""
    return tuple(
        Alert(
            group=group,
            name=rule["alert"],
            expression=rule["expr"].strip(),
            holds_for=rule.get("for", "0s"),
            labels=tuple(rule.get("labels", {}).items()),
            annotations=tuple(rule.get("annotations", {}).items()),
        )
        for group, rule in _rules(folder)
        if "alert" in rule
    )


def _rules(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(folder.glob("*.yml")):
        for group in yaml.safe_load(file.read_text())["groups"]:
            for rule in group["rules"]:
                yield group["name"], rule
