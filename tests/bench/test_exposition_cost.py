"""The bench of scrapes: as many series as asked for, the same at both servers, and lateness that misses nothing."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from railscope.exporters.series.families import make_families
from railscope.exporters.series.text import Format, Renderer
from tests.bench import exposition_cost, exposition_server
from tests.bench.results import Figure

Line = tuple[str, tuple[tuple[str, str], ...], float]


def lines(text: str) -> set[Line]:
    """Every sample, without labels that are empty: those are as good as absent."""
    return {
        (one.name, tuple(sorted((label, value) for label, value in one.labels.items() if value)), one.value)
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


@pytest.mark.parametrize("series", [4_000, 5_001])
def test_a_node_has_as_many_series_as_are_asked_for(series: int) -> None:
    assert series <= exposition_server.series_of(exposition_server.node_with(series)) < series + 10


def test_the_peer_shows_the_same_series_with_the_same_values() -> None:
    shown = make_families(exposition_server.node_with(3_500))
    ours = lines(Renderer().render(shown, Format.PROMETHEUS).decode())
    peers = lines(generate_latest(exposition_server.gauges(shown)).decode())

    def named(found: set[Line]) -> set[Line]:
        # Bounds of buckets may be written in two ways.
        return {
            (name, tuple((label, str(float(text)) if label == "le" else text) for label, text in labels), value)
            for name, labels, value in found
        }

    assert named(peers) == named(ours)
    assert len(ours) > 3_000


def test_a_beat_that_was_missed_was_late() -> None:
    on_time, late, next_one = (1_000, 1_010), (2_000, 4_500), (5_000, 5_020)
    assert exposition_server.late_ns([on_time, late, next_one], 1_000) == [10, 2_500, 1_500, 500, 20]
    without_room = (4_000, 4_030)
    assert exposition_server.late_ns([on_time, without_room], 1_000) == [10, 2_030, 1_030, 30]


def test_a_beat_is_seldom_late_by_a_second() -> None:
    assert 0 < exposition_server.lateness_ns(0.2) < 1_000_000_000


def test_how_much_later_a_thread_is_is_told_round_by_round() -> None:
    late = {"alone": [0.1, 3.0], "ours": [0.6, 3.5], "peers": [9.0, 9.0]}
    costs = {"ours": [20.0, 20.0], "peers": [180.0, 200.0], "most": [260.0, 260.0]}
    found = {
        line.name: line
        for line in exposition_cost.lines_of(costs, late, [0.0, 0.0], 20_001, 100_004)
        if isinstance(line, Figure)
    }
    assert found["by how much later"].median == pytest.approx(0.5)
    assert found["by how much later"].verdict == "met"
    assert found["a scrape of 20,001 series"].verdict == "met"
    assert found["a scrape of 100,004 series"].verdict == "MISSED"
    assert found["prometheus-client / ours"].median == 9.5
