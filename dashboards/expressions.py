"""Parses the metrics and labels that a PromQL expression names.

Dashboards hold templates: Grafana puts in the choices of variables before Prometheus sees the query, and so does
`substitute_variables`, with values that choose everything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import promql_parser

INTERVAL: Final = "1m"
_VARIABLE: Final = re.compile(r"\$\{?(\w+)(?::\w+)?\}?")
_LABEL_VALUES: Final = re.compile(r"label_values\((?:(?P<metric>.*), *)?(?P<label>\w+)\)", re.DOTALL)


class ExpressionError(ValueError):
    """The expression is not valid PromQL; the message says where."""


@dataclass(frozen=True, slots=True)
class Selector:
    """One selection of series within an expression."""

    metric: str
    """Empty where the expression selects by labels alone."""
    labels: tuple[str, ...]
    """The labels that are matched."""


def substitute_variables(expression: str, interval: str = INTERVAL, values: Mapping[str, str] | None = None) -> str:
    """A panel's expression as Prometheus would get it; variables that `values` does not give choose everything."""

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name in ("__rate_interval", "__interval", "__range"):
            return interval
        return (values or {}).get(name, ".*")

    return _VARIABLE.sub(value, expression)


def parse_label_values(query: str) -> tuple[str, str]:
    """(selector, label) of a variable's `label_values(selector, label)`.

    Raises:
        ExpressionError: it is something else.
    """
    found = _LABEL_VALUES.fullmatch(query.strip())
    if found is None or found["metric"] is None:
        raise ExpressionError(f"a variable's query should be label_values(series, label), and is {query!r}")
    return found["metric"], found["label"]


def parse_selectors(expression: str) -> tuple[Selector, ...]:
    """Every selection of series in an expression without variables, in its order.

    Raises:
        ExpressionError: it does not parse.
    """
    try:
        tree = promql_parser.parse(expression)
    except ValueError as error:
        raise ExpressionError(" ".join(str(error).split())) from None
    found: list[Selector] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            matchers = [(one.name, one.value) for one in node.matchers.matchers]
            name = node.name or next((value for label, value in matchers if label == "__name__"), "")
            found.append(Selector(name, tuple(label for label, _ in matchers if label != "__name__")))
        return True

    promql_parser.walk(tree, visit)
    return tuple(found)
