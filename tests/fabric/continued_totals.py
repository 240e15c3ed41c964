"""The totals of an exposition that go on when the agent is restarted, and which of them fell."""

from __future__ import annotations

import re

from railscope.agent.facts import catalogue
from railscope.exporters.series.earlier import is_continued
from tests.fabric.agent_process import metrics_of

Series = tuple[str, frozenset[tuple[str, str]]]
"""Name and labels."""


def shown(text: str) -> dict[Series, float]:
    """Every total that goes on over a restart."""
    continued = re.compile(
        "|".join(
            re.escape(one.name) if one.kind == "counter" else f"{re.escape(one.name)}_(?:bucket|count|sum)"
            for one in catalogue.METRICS
            if is_continued(one) or one is catalogue.AGENT_DARK_SECONDS
        )
    )
    return {
        (name, frozenset(labels.items())): value
        for name, labels, value in metrics_of(text)
        if continued.fullmatch(name)
    }


def fallen(highest: dict[Series, float], now: dict[Series, float]) -> dict[Series, tuple[float, float]]:
    """What is less than it was, with both values; `highest` is brought up to date."""
    lower = {one: (highest[one], value) for one, value in now.items() if value < highest.get(one, 0.0) * (1 - 1e-12)}
    highest.update(now)
    return lower
