"""The reference is prometheus-client: its parsers read what we write, and its own renderer says the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as ClientMetric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus
from prometheus_client.registry import Collector

from railscope.agent.facts.catalogue import Kind, Metric
from railscope.agent.facts.histogram import Histogram
from railscope.exporters.series.collector import to_client_metrics
from railscope.exporters.series.families import make_families
from railscope.exporters.series.family import Family, LabelValues
from railscope.exporters.series.text import LINES_PER_CHUNK, Format, Renderer
from tests.unit.exporters_snapshots import full_snapshot, large_snapshot

GOLDEN = Path(__file__).parent / "data" / "metrics.golden.txt"

Line = tuple[str, frozenset[tuple[str, str]], float]
"""Name, labels (`le` as a number's text), value."""


def line(name: str, labels: Iterable[tuple[str, str]], value: float) -> Line:
    shown = {label: repr(float(text)) if label == "le" else text for label, text in labels}
    return name, frozenset(shown.items()), value


def same(left: list[Line], right: list[Line]) -> bool:
    """Equal, in any order, where a NaN equals a NaN."""

    def comparable(lines: list[Line]) -> list[tuple[str, list[tuple[str, str]], str]]:
        return sorted((name, sorted(labels), repr(float(value))) for name, labels, value in lines)

    return comparable(left) == comparable(right)


def parsed(text: bytes, format: Format) -> list[Line]:
    parse = parse_prometheus if format is Format.PROMETHEUS else parse_openmetrics
    return [
        line(sample.name, sample.labels.items(), sample.value)
        for family in parse(text.decode())
        for sample in family.samples
    ]


def lines_of(shown: Iterable[Family], format: Format) -> Iterator[Line]:
    """What the families mean, worked out without the renderer."""
    for family in shown:
        name = family.metric.name

        def labels(values: LabelValues, of: Family = family) -> list[tuple[str, str]]:
            return [(label, text) for label, text in zip(of.labels, values, strict=True) if text is not None]

        for values, value in family.samples:
            yield line(name, labels(values), float(value))
        for values, histogram in family.histograms:
            cumulative = list(accumulate(histogram.counts))
            for bound, number in zip((*histogram.bounds, math.inf), cumulative, strict=True):
                yield line(f"{name}_bucket", [*labels(values), ("le", repr(float(bound)))], number)
            if histogram.sum is not None:
                yield line(f"{name}_sum", labels(values), histogram.sum)
            if histogram.sum is not None or format is Format.PROMETHEUS:
                yield line(f"{name}_count", labels(values), cumulative[-1])


# What parsers of both formats take: a carriage return would be a line's end to Python's own line reader.
texts = st.text(st.characters(exclude_categories=("Cs", "Cc")) | st.sampled_from('\n\\"{},= '), max_size=12)
names = st.from_regex(r"[a-z][a-z0-9]{0,6}(_bytes|_seconds|_ratio|_bytes_per_second|)", fullmatch=True)
label_names = st.lists(
    st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True).filter(lambda n: n != "le"), unique=True, max_size=3
)
numbers = st.integers(0, 2**53) | st.floats(min_value=0)
histograms = st.builds(
    lambda bounds, counts, sum: Histogram(tuple(sorted(bounds)), tuple(counts[: len(bounds) + 1]), sum),
    st.lists(st.floats(0, 1e18), unique=True, max_size=5),
    st.lists(st.integers(0, 2**40), min_size=6, max_size=6),
    st.none() | st.floats(0, 1e300),
)


@st.composite
def family(draw: st.DrawFn, name: str) -> Family:
    kind: Kind = draw(st.sampled_from(["counter", "gauge", "histogram"]))
    labels = tuple(draw(label_names))
    values = st.tuples(*(st.none() | texts for _ in labels))
    metric = Metric(
        name=f"{name}_total" if kind == "counter" else name,
        kind=kind,
        labels=labels,
        help=draw(texts.filter(lambda text: text.strip(" ") == text and text != "")),
    )
    unique: dict[frozenset[tuple[str, str]], LabelValues] = {}
    for one in draw(st.lists(values, min_size=1, max_size=6)):
        unique.setdefault(
            frozenset((label, text) for label, text in zip(labels, one, strict=True) if text is not None), one
        )
    if kind == "histogram":
        return Family(metric, labels, histograms=tuple((one, draw(histograms)) for one in unique.values()))
    any_sign = numbers if kind == "counter" else numbers | st.floats() | st.integers(-(2**53), 0)
    return Family(metric, labels, samples=tuple((one, draw(any_sign)) for one in unique.values()))


@st.composite
def some_families(draw: st.DrawFn) -> list[Family]:
    # Names that do not run into each other's suffixes.
    chosen = draw(st.lists(names, unique_by=lambda name: name.split("_")[0], max_size=5))
    return [draw(family(f"m{index}_{name}")) for index, name in enumerate(chosen)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some_families(), st.sampled_from(Format))
def test_what_we_write_reads_back_as_the_same_samples(shown: list[Family], format: Format) -> None:
    renderer = Renderer()
    once = renderer.render(shown, format)
    assert same(parsed(once, format), list(lines_of(shown, format)))
    assert renderer.render(shown, format) == once, "a second scrape, from memory, must say the same"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some_families(), st.sampled_from(Format))
def test_prometheus_clients_own_renderer_says_the_same(shown: list[Family], format: Format) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Reference(shown))
    reference = generate_latest(registry) if format is Format.PROMETHEUS else generate_openmetrics(registry)
    ours = Renderer().render(shown, format)
    theirs = parsed(reference, format)
    if format is Format.PROMETHEUS:
        # The client leaves out the count with the sum; the older format wants it always.
        known = {(name, labels) for name, labels, _ in theirs}
        extra = [one for one in parsed(ours, format) if one[:2] not in known]
        assert all(name.endswith("_count") for name, _, _ in extra)
        theirs += extra
    assert same(parsed(ours, format), theirs)
    assert metadata(ours) == metadata(reference)


class Reference(Collector):
    """Gives our families to prometheus-client."""

    def __init__(self, shown: list[Family]) -> None:
        self._shown = shown

    def collect(self) -> Iterator[ClientMetric]:
        return to_client_metrics(self._shown)


def metadata(text: bytes) -> list[str]:
    return [one for one in text.decode().split("\n") if one.startswith("# ")]


def test_the_full_snapshot_is_the_golden_file() -> None:
    """After a wanted change: `python -m tests.unit.test_exporters_text` writes the file anew; read the difference."""
    assert Renderer().render(make_families(full_snapshot()), Format.PROMETHEUS).decode() == GOLDEN.read_text()


@pytest.mark.parametrize("format", Format)
def test_the_full_snapshot_reads_back(format: Format) -> None:
    shown = make_families(full_snapshot())
    assert same(parsed(Renderer().render(shown, format), format), list(lines_of(shown, format)))


def gauge(*values: float, labels: tuple[str, ...] = (), name: str = "railscope_x") -> Family:
    samples = tuple(((str(index),) * len(labels), value) for index, value in enumerate(values))
    return Family(Metric(name, "gauge", labels, "help"), labels, samples)


def values_of(shown: list[Family]) -> list[str]:
    text = Renderer().render(shown, Format.PROMETHEUS).decode()
    return [one.rpartition(" ")[2] for one in text.splitlines() if not one.startswith("#")]


def test_integers_are_written_exactly_and_floats_by_their_shortest_form() -> None:
    values = [2**64 - 1, 0.1, 1e300, math.inf, -math.inf, math.nan, np.uint64(2**64 - 1), np.float64(0.1), True]
    assert values_of([gauge(*values, labels=("n",))]) == [  # type: ignore[arg-type]
        *("18446744073709551615", "0.1", "1e+300", "+Inf", "-Inf", "NaN", "18446744073709551615", "0.1", "1"),
    ]


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        (1, "1.0"),
        (1024, "1024.0"),
        (100000, "100000.0"),
        (2**20, "1.048576e+06"),
        (2**40, "1.099511627776e+12"),
        (1e6, "1e+06"),
        (0.5, "0.5"),
        (1e-6, "1e-06"),
        (2.5e10, "2.5e+10"),
        (123456789.5, "1.234567895e+08"),
    ],
)
def test_bounds_of_buckets_are_written_as_go_writes_them(bound: float, text: str) -> None:
    histogram = Family(Metric("h", "histogram", (), "help"), (), histograms=(((), Histogram((bound,), (1, 0), 1.0)),))
    assert f'h_bucket{{le="{text}"}} 1\n' in Renderer().render([histogram], Format.OPENMETRICS).decode()


def test_openmetrics_names_a_counters_family_without_total_and_gives_the_unit() -> None:
    counter = Family(Metric("x_bytes_total", "counter", (), "help"), (), (((), 1),))
    assert Renderer().render([counter], Format.OPENMETRICS).decode() == (
        "# HELP x_bytes help\n# TYPE x_bytes counter\n# UNIT x_bytes bytes\nx_bytes_total 1\n# EOF\n"
    )


def test_help_is_escaped_as_each_format_wants_it() -> None:
    shown = [Family(Metric("x", "gauge", (), 'a "b" \\ c\nd'), (), (((), 1),))]
    assert Renderer().render(shown, Format.PROMETHEUS).startswith(b'# HELP x a "b" \\\\ c\\nd\n')
    assert Renderer().render(shown, Format.OPENMETRICS).startswith(b'# HELP x a \\"b\\" \\\\ c\\nd\n')


def test_a_histogram_without_a_sum_has_no_count_in_openmetrics_and_one_in_the_older_format() -> None:
    histogram = Family(Metric("h", "histogram", (), "help"), (), histograms=(((), Histogram((1.0,), (2, 1), None)),))
    assert b"h_count" not in Renderer().render([histogram], Format.OPENMETRICS)
    text = Renderer().render([histogram], Format.PROMETHEUS)
    assert b"h_count 3\n" in text
    assert b"h_sum" not in text


def test_half_a_character_in_a_label_does_not_stop_the_scrape() -> None:
    odd = Family(Metric("x", "gauge", ("user",), "help"), ("user",), ((("ad\udc80a",), 1),))
    assert b'x{user="ad&#56448;a"} 1\n' in Renderer().render([odd], Format.PROMETHEUS)


def test_a_change_of_bounds_and_of_label_names_is_seen() -> None:
    renderer = Renderer()
    metric = Metric("h", "histogram", (), "help")
    for bound in (1.0, 2.0):
        shown = [Family(metric, (), histograms=(((), Histogram((bound,), (1, 0), 1.0)),))]
        assert f'le="{bound}"' in renderer.render(shown, Format.PROMETHEUS).decode()
    for label in ("job", "pod"):
        shown = [gauge(1, labels=(label,))]
        assert f'railscope_x{{{label}="0"}} 1' in renderer.render(shown, Format.PROMETHEUS).decode()


def test_series_that_went_away_are_forgotten() -> None:
    renderer = Renderer()
    renderer.render([gauge(*range(1000), labels=("n",)), gauge(1, name="railscope_gone")], Format.PROMETHEUS)
    renderer.render([gauge(*range(10), labels=("n",))], Format.PROMETHEUS)
    assert renderer.cached_label_sets() == 10


def test_a_large_exposition_comes_in_pieces_of_bounded_size() -> None:
    shown = make_families(large_snapshot(communicators=1500, rails=8))
    pieces = list(Renderer().chunks(shown, Format.PROMETHEUS))
    assert b"".join(pieces) == Renderer().render(shown, Format.PROMETHEUS)
    assert max(piece.count(b"\n") for piece in pieces) < 2 * LINES_PER_CHUNK + 100
    assert len(pieces) >= 6


if __name__ == "__main__":
    GOLDEN.write_bytes(Renderer().render(make_families(full_snapshot()), Format.PROMETHEUS))
