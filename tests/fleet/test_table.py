"""The bench of fleets: what grows too fast, pages too often or blames the wrong one is MISSED."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.facts.causes import Cause
from tests.fleet.costs import Blame, Costs, Diagnosis
from tests.fleet.pages import Paged
from tests.fleet.rule_cost import RuleCost
from tests.fleet.servers import Page
from tests.fleet.simulation import Culprit
from tests.fleet.table import describe, rows, write_json

PAGE = Page(("RailscopeCollectiveStalled",), 2_000, linked=True)
FOUND = Blame("rank_behind", frozenset({"node0002"}), frozenset({"4005"}), "rank 2 is behind")
CULPRIT = Culprit(Cause.RANK_BEHIND, frozenset({2}), 4005)


def cost(nodes: int, **changes: Any) -> Costs:
    """A fleet in which all is as wanted, with these changes."""
    each = nodes / 500
    rules = (RuleCost("a", "one", each, nodes), RuleCost("a", "two", each, 0))
    said = Diagnosis("rank 2 is behind", (FOUND,), 1, 9.0, 2.0)
    return replace(Costs(nodes, "behind", 3_000 * nodes, rules, (CULPRIT,), said), **changes)


def paged(**changes: Any) -> Paged:
    """Pages as they are wanted, with these changes."""
    return replace(Paged(8, "behind", (CULPRIT,), (PAGE,), 0, 0, 0, 0.5, 1.0, 1 << 30), **changes)


def missed(costs: Sequence[Costs], pages: Sequence[Paged] = ()) -> dict[str, str]:
    """What is not met, and what is said of it."""
    return {row.what: row.verdict for row in rows(costs, pages) if not row.met}


def test_what_is_as_wanted_is_met() -> None:
    assert missed([cost(8), cost(512)], [paged()]) == {}
    assert "10 of 10 figures are within their bounds" in describe([cost(8), cost(512)], [paged()])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rules": (RuleCost("a", "one", 3.0, 1), RuleCost("a", "two", 2.0, 1))}, "dearest group, CPU s"),
        ({"diagnosis": Diagnosis("", (FOUND, FOUND), 1, 1.0, 1.0)}, "causes found"),
        ({"diagnosis": Diagnosis("", (replace(FOUND, hosts=frozenset({"node0003"})),), 1, 1.0, 1.0)}, "causes found"),
        ({"diagnosis": Diagnosis("", (), 1, 1.0, 1.0)}, "causes found"),
        ({"diagnosis": Diagnosis("", (FOUND,), 1, 3.1, 3.2)}, "diagnose, s"),
    ],
)
def test_costs_and_verdicts_beyond_their_bounds_are_missed(changes: dict[str, Any], what: str) -> None:
    assert missed([cost(8, **changes)]) == {f"8 nodes, behind: {what}": "MISSED"}
    assert "| MISSED |" in describe([cost(8, **changes)], ())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"pages": (PAGE,) * 4}, "pages"),
        ({"pages": ()}, "pages"),
        ({"blamed": ()}, "pages"),
        ({"pages": (replace(PAGE, size_bytes=4_000),)}, "largest page"),
        ({"pages": (replace(PAGE, linked=False),)}, "largest page"),
        ({"innocents": 1}, "innocent ranks called behind"),
    ],
)
def test_pages_beyond_their_bounds_are_missed(changes: dict[str, Any], what: str) -> None:
    assert missed((), [paged(**changes)]) == {f"8 nodes, behind: {what}": "MISSED"}


def test_growth_is_told_from_the_smallest_to_the_largest() -> None:
    dear = (RuleCost("a", "one", 4.9, 1), RuleCost("b", "two", 4.9, 1))
    fleets = [cost(8), cost(512, rules=dear)]
    assert missed(fleets) == {"8 to 512 nodes, behind: exponent of all rules": "MISSED"}
    assert "| all rules | behind | 1.38 |" in describe(fleets, ())


def test_where_scrapes_were_late_nothing_is_said_of_pages() -> None:
    late = paged(late_scrapes=3, pages=(PAGE,) * 9, innocents=4)
    assert set(missed((), [late]).values()) == {"not measured"}


def test_everything_is_in_the_json(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    write_json(file, [cost(8)], [paged()])
    found = json.loads(file.read_text())
    assert found["costs"][0]["blamed"] == [{"cause": "rank_behind", "nodes": [2], "pid": 4005}]
    assert found["costs"][0]["rules"][0]["cpu_seconds"] == 8 / 500
    assert found["pages"][0]["pages"][0]["size_bytes"] == 2_000
