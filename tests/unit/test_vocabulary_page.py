"""The page that compares verdicts names all of theirs, and only causes, rows and tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

from railscope.agent.facts.causes import Cause
from tests.faults.matrix import MATRIX

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "vocabulary.md").read_text().splitlines()
    if line.startswith("| `")
]
THEIRS = 29
_SNAKE = re.compile(r"`([a-z]+(?:_[a-z]+)+)`")
_METRICS = frozenset({"comm_errors_total", "comm_failed_over_total"})


def test_every_verdict_of_theirs_is_there_once() -> None:
    assert len({row[0] for row in ROWS}) == len(ROWS) == THEIRS


def test_what_is_said_is_a_cause_of_ours() -> None:
    named = {name for row in ROWS for name in _SNAKE.findall(row[2])} - _METRICS
    assert named <= {cause.value for cause in Cause}
    assert {cause.value for cause in Cause if cause.value.startswith(("process", "rail_"))} <= named


def test_each_is_shown_by_a_row_or_a_test_or_said_to_be_out_of_reach() -> None:
    names = {scenario.name for scenario in MATRIX}
    for theirs, _, ours, shown in ROWS:
        assert bool(shown) != ("out of reach" in ours), theirs
        for part in filter(None, (part.strip() for part in shown.split("; "))):
            kind, colon, name = part.partition(": ")
            if colon and kind == "test":
                assert (ROOT / name).is_file(), name
            else:
                assert (name if colon else part) in names, part
