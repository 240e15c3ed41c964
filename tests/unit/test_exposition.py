"""The reader of expositions against prometheus-client's."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from railscope.agent.facts.snapshot import Snapshot
from railscope.exporters.top.exposition import ExpositionError, parse_samples
from tests.unit.exporters_snapshots import full_snapshot, large_snapshot
from tests.unit.nodes import exposition

Samples = dict[str, list[tuple[dict[str, str], float]]]


def by_prometheus_client(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not math.isnan(sample.value):
                found.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
    return found


def by_us(text: str, names: frozenset[str]) -> Samples:
    return {
        name: [(dict(labels), value) for labels, value in samples]
        for name, samples in parse_samples(text, names).items()
    }


@pytest.mark.parametrize("snapshot", [full_snapshot(), large_snapshot(400, 4)], ids=["full", "large"])
def test_it_finds_what_prometheus_client_finds(snapshot: Snapshot) -> None:
    text = exposition(snapshot)
    expected = by_prometheus_client(text)
    assert by_us(text, frozenset(expected)) == expected


@given(st.text(st.characters(blacklist_categories=["Cs"]), max_size=20), st.floats(allow_nan=False))
def test_any_value_of_a_label_comes_back(value: str, number: float) -> None:
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    text = f'x{{a="{escaped}",b="}} 1"}} {number!r}\nx_total 7\n'
    assert by_us(text, frozenset({"x", "x_total"})) == {
        "x": [({"a": value, "b": "} 1"}, number)],
        "x_total": [({}, 7.0)],
    }


def test_names_that_nobody_asked_for_are_passed_over_even_where_they_are_broken() -> None:
    assert by_us('y{a="1"} 1\nz{{{ nonsense\n# HELP y\n', frozenset({"y"})) == {"y": [({"a": "1"}, 1.0)]}


def test_a_timestamp_is_no_part_of_the_value_and_nan_is_left_out() -> None:
    assert by_us('y{a="1"} 5 1750000000000\ny{a="2"} NaN\n', frozenset({"y"})) == {"y": [({"a": "1"}, 5.0)]}


@pytest.mark.parametrize("line", ['y{a="1" 5', "y{a=1} 5", 'y{a="1"} five', 'y{a="1"}', "y", 'y{a="1"b="2"} 1'])
def test_a_broken_line_of_a_wanted_name_is_named(line: str) -> None:
    with pytest.raises(ExpositionError, match="y"):
        parse_samples(line, {"y"})
