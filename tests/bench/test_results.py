"""The bench's arithmetic: ratios are taken round by round, and a missed target is called missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.results import Bound, Line, Omission, Target, figure, ratios, table, write_json


def test_ratios_are_taken_round_by_round_so_that_a_slow_minute_cancels() -> None:
    slow_minute = [1.0, 1.0, 10.0]
    assert ratios([2 * value for value in slow_minute], slow_minute) == [2.0, 2.0, 2.0]


def test_rounds_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        ratios([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("bound", "limit", "verdict"),
    [
        (Bound.AT_MOST, 2.0, "met"),
        (Bound.BELOW, 2.0, "MISSED"),
        (Bound.AT_LEAST, 2.0, "met"),
        (Bound.AT_LEAST, 2.1, "MISSED"),
        (Bound.EXACTLY, 0.0, "MISSED"),
    ],
)
def test_the_median_is_held_against_the_target(bound: Bound, limit: float, verdict: str) -> None:
    assert figure("part", "name", "×", [1.0, 2.0, 90.0], target=Target(bound, limit)).verdict == verdict


def test_table_and_json_say_what_was_not_measured(tmp_path: Path) -> None:
    lines: list[Line] = [figure("part", "measured", "ns", [3.0]), Omission("part", "peer", "it is not installed")]
    assert "not measured: it is not installed" in table(lines)
    write_json(tmp_path / "results.json", lines)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["figures"][0]["median"] == 3.0
    assert written["omissions"] == [{"part": "part", "name": "peer", "reason": "it is not installed"}]
