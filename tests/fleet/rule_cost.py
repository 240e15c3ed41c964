"""What each of the shipped rules costs a Prometheus at one moment, in processor time.

A Prometheus that does nothing else is asked each rule's expression as of that moment, one after the other in their
order; what it takes for a question that has nothing to do is left out.  Its answer is written as JSON in place of the
series that a rule records, which costs about as much.  A group's rules are evaluated one after the other, so that on a
machine with a processor to spare a group takes no longer than its rules' processor time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from railscope.dashboards import rules_files
from tests.fleet.remote_write import write_samples
from tests.fleet.server import Server

LOADED: Final = tuple(rules_files.SHIPPED / name for name in (rules_files.RECORDING, rules_files.ALERTS))
"""What deploy/prometheus/prometheus.yml loads."""
_LEAST_CPU_SECONDS: Final = 2.0
"""All rules are asked again until they took so much."""
_FEWEST, _MOST = 3, 10
_EMPTY_QUESTIONS: Final = 200


@dataclass(frozen=True, slots=True)
class Rule:
    """One of the shipped rules."""

    group: str
    name: str
    expression: str
    labels: Mapping[str, str]
    """That what it records has besides."""
    records: bool


@dataclass(frozen=True, slots=True)
class RuleCost:
    """One rule at one moment."""

    group: str
    name: str
    cpu_seconds: float
    """Of one evaluation."""
    series: int
    """That it gives."""


def read_rules(files: Sequence[Path] = LOADED) -> tuple[Rule, ...]:
    """Every rule of these files, in their order."""
    return tuple(
        Rule(group["name"], rule.get("record") or rule["alert"], rule["expr"], rule.get("labels", {}), "record" in rule)
        for file in files
        for group in yaml.safe_load(file.read_text())["groups"]
        for rule in group["rules"]
    )


def measure_rules(server: Server, rules: Sequence[Rule], at: float) -> tuple[RuleCost, ...]:
    """What one evaluation of each rule costs at a moment, seconds since the Unix epoch; the median of some.

    The first one reads blocks from the disk; a Prometheus that scrapes has the last minutes in memory.
    """
    empty = sum(_cost(server, "vector(1)", at)[0] for _ in range(_EMPTY_QUESTIONS)) / _EMPTY_QUESTIONS
    passes = [[_cost(server, rule.expression, at) for rule in rules]]
    once = sum(seconds for seconds, _ in passes[0])
    while len(passes) < min(_MOST, max(_FEWEST, math.ceil(_LEAST_CPU_SECONDS / once))):
        passes.append([_cost(server, rule.expression, at) for rule in rules])
    return tuple(
        RuleCost(
            rule.group,
            rule.name,
            max(0.0, statistics.median(one[number][0] for one in passes) - empty),
            len(passes[0][number][1]),
        )
        for number, rule in enumerate(rules)
    )


def evaluate_rules(server: Server, rules: Sequence[Rule], at: float) -> None:
    """Record what recording rules give at a moment, as Prometheus would: each finds what those before it recorded."""
    for rule in rules:
        if rule.records:
            write_samples(server.url, list(_recorded(rule, server.query(rule.expression, at))), at)


def _recorded(
    rule: Rule, given: Sequence[tuple[Mapping[str, str], float]]
) -> Iterator[tuple[Mapping[str, str], float]]:
    for labels, value in given:
        yield {**labels, **rule.labels, "__name__": rule.name}, value


def _cost(server: Server, expression: str, at: float) -> tuple[float, Sequence[object]]:
    before = server.cpu_seconds()
    answer = server.ask(expression, at)["result"]
    return server.cpu_seconds() - before, answer
