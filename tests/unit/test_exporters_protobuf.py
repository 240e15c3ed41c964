"""Protobuf expositions: read back with the protobuf package, they say what the text says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from railscope.agent.facts import catalogue
from railscope.agent.facts.histogram import Histogram
from railscope.agent.node.collectives.kernel_readings import ENQUEUE_BOUNDS
from railscope.agent.node.collectives.node_totals import SIZE_BOUNDS
from railscope.agent.node.completion.completion import BANDWIDTH_BOUNDS, DURATION_BOUNDS
from railscope.agent.node.sampling.totals import RATE_BOUNDS
from railscope.exporters.series.families import make_families
from railscope.exporters.series.family import Family
from railscope.exporters.series.native import to_native
from railscope.exporters.series.protobuf import ProtobufRenderer
from railscope.exporters.series.text import Format, Renderer
from tests.unit.exporters_snapshots import full_snapshot, large_snapshot
from tests.unit.metric_families import COUNTER, GAUGE, HISTOGRAM, labels_of, read_families
from tests.unit.test_exporters_text import Line, line, parsed, same, some_families


def lines_of(read: Iterable[Any]) -> Iterator[Line]:
    """Classic series, as Prometheus makes them from the messages."""
    for family in read:
        for metric in family.metric:
            labels = list(labels_of(metric).items())
            if family.type == COUNTER:
                yield line(family.name, labels, metric.counter.value)
            elif family.type == GAUGE:
                yield line(family.name, labels, metric.gauge.value)
            else:
                assert family.type == HISTOGRAM
                histogram = metric.histogram
                for bucket in histogram.bucket:
                    bound = [*labels, ("le", repr(bucket.upper_bound))]
                    yield line(f"{family.name}_bucket", bound, bucket.cumulative_count)
                yield line(f"{family.name}_count", labels, histogram.sample_count)
                if not math.isnan(histogram.sample_sum):
                    yield line(f"{family.name}_sum", labels, histogram.sample_sum)


def native_buckets(histogram: Any) -> list[tuple[float, float, int]]:
    """(above, up to, count) of each bucket that a message's native histogram has, empty ones left out."""
    assert histogram.schema == 0
    found = [(0.0, histogram.zero_threshold, histogram.zero_count)]
    deltas, index, count = iter(histogram.positive_delta), 0, 0
    for span in histogram.positive_span:
        index += span.offset
        for _ in range(span.length):
            count += next(deltas)
            found.append((math.ldexp(1, index - 1), math.ldexp(1, index), count))
            index += 1
    assert next(deltas, None) is None
    return [bucket for bucket in found if bucket[2]]


def classic_buckets(histogram: Histogram) -> list[tuple[float, float, int]]:
    ends = (*histogram.bounds, math.inf)
    begins = (0.0, *histogram.bounds)
    return [bucket for bucket in zip(begins, ends, histogram.counts, strict=True) if bucket[2]]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(some_families())
def test_protobuf_says_what_the_text_says(shown: list[Family]) -> None:
    protobuf = list(lines_of(read_families(ProtobufRenderer().render(shown))))
    assert same(protobuf, parsed(Renderer().render(shown, Format.PROMETHEUS), Format.PROMETHEUS))


@pytest.mark.parametrize("snapshot", [full_snapshot(), large_snapshot(communicators=1200)], ids=["full", "large"])
def test_a_snapshot_says_the_same_in_protobuf_also_when_it_is_asked_again(snapshot: Any) -> None:
    shown = make_families(snapshot)
    renderer = ProtobufRenderer()
    text = parsed(Renderer().render(shown, Format.PROMETHEUS), Format.PROMETHEUS)
    for _ in range(2):
        assert same(list(lines_of(read_families(renderer.render(shown)))), text)
    read = {family.name: family for family in read_families(renderer.render(shown))}
    for family in shown:
        assert read[family.metric.name].help == family.metric.help


def test_labels_that_no_longer_come_are_forgotten() -> None:
    renderer = ProtobufRenderer()
    renderer.render(make_families(large_snapshot(communicators=1000)))
    many = renderer.cached_label_sets()
    renderer.render(make_families(large_snapshot(communicators=10)))
    assert renderer.cached_label_sets() < many - 1500
    renderer.render([])
    assert renderer.cached_label_sets() == 0


@pytest.mark.parametrize(
    ("bounds", "exact"),
    [
        (SIZE_BOUNDS, True),
        (BANDWIDTH_BOUNDS, True),
        # Powers of two of nanoseconds are none of seconds.
        (DURATION_BOUNDS, False),
        (ENQUEUE_BOUNDS, False),
        (RATE_BOUNDS, False),
        ((1.0, 4.0), False),
        ((0.25, 0.5, 1.0), True),
        ((), False),
    ],
)
def test_only_bounds_that_are_native_ones_become_native(bounds: tuple[float, ...], exact: bool) -> None:
    counts = (1,) * len(bounds) + (0,)
    assert (to_native(Histogram(bounds, counts, 1.0)) is not None) is exact


@given(st.lists(st.integers(0, 1 << 40), min_size=40, max_size=40), st.integers(0, 39))
def test_a_native_histogram_has_the_classic_one_s_buckets_exactly(counts: list[int], empty: int) -> None:
    counts[:empty] = [0] * empty
    histogram = Histogram(SIZE_BOUNDS, (*counts, 0), 5.0)
    family = Family(catalogue.COLLECTIVE_SIZE_BYTES, ("op",), histograms=((("AllReduce",), histogram),))
    (read,) = read_families(ProtobufRenderer().render([family]))
    (metric,) = read.metric
    assert native_buckets(metric.histogram) == classic_buckets(histogram)
    assert [bucket.cumulative_count for bucket in metric.histogram.bucket] == list(accumulate(histogram.counts))
    # What tells a native histogram from a classic one, also when nothing has been counted yet.
    assert metric.histogram.zero_threshold == 1.0


@pytest.mark.parametrize(
    "histogram",
    [
        Histogram(SIZE_BOUNDS, (1,) * len(SIZE_BOUNDS) + (1,), 5.0),
        Histogram(SIZE_BOUNDS, (1,) * len(SIZE_BOUNDS) + (0,), None),
    ],
    ids=["something lies above all bounds", "the sum is not known"],
)
def test_what_a_native_histogram_cannot_say_stays_classic(histogram: Histogram) -> None:
    family = Family(catalogue.COLLECTIVE_SIZE_BYTES, ("op",), histograms=((("AllReduce",), histogram),))
    (read,) = read_families(ProtobufRenderer().render([family]))
    (metric,) = read.metric
    assert not metric.histogram.zero_threshold
    assert not metric.histogram.positive_span
    assert len(metric.histogram.bucket) == len(SIZE_BOUNDS) + 1
    assert math.isnan(metric.histogram.sample_sum) is (histogram.sum is None)


def test_pieces_are_small_and_make_up_the_whole() -> None:
    shown = make_families(large_snapshot(communicators=3000))
    pieces = list(ProtobufRenderer().chunks(shown))
    assert b"".join(pieces) == ProtobufRenderer().render(shown)
    assert max(map(len, pieces)) < 200_000
