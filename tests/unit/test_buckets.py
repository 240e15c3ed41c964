"""Fewer buckets say the same as all of them, at the bounds that stay."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts import catalogue
from railscope.agent.facts.catalogue import Metric
from railscope.agent.facts.histogram import Exemplar, Histogram
from railscope.agent.node.collectives.kernel_readings import ENQUEUE_BOUNDS
from railscope.agent.node.collectives.node_totals import SIZE_BOUNDS
from railscope.agent.node.completion.completion import BANDWIDTH_BOUNDS, DURATION_BOUNDS
from railscope.agent.node.sampling.totals import RATE_BOUNDS
from railscope.exporters.series import buckets
from railscope.exporters.series.native import METRICS, to_native

BOUNDS = {
    catalogue.COLLECTIVE_SIZE_BYTES: (SIZE_BOUNDS, 27),
    catalogue.COLLECTIVE_DURATION_SECONDS: (DURATION_BOUNDS, 24),
    catalogue.COLLECTIVE_BUS_BANDWIDTH: (BANDWIDTH_BOUNDS, 21),
    catalogue.COLLECTIVE_ENQUEUE_SECONDS: (ENQUEUE_BOUNDS, 13),
    catalogue.RAIL_RATE: (RATE_BOUNDS, 10),
}
METRIC_BOUNDS = [pytest.param(metric, bounds, kept, id=metric.name) for metric, (bounds, kept) in BOUNDS.items()]


@pytest.mark.parametrize(("metric", "bounds", "kept"), METRIC_BOUNDS)
def test_what_is_left_out_are_bounds_that_the_agent_has(metric: Metric, bounds: tuple[float, ...], kept: int) -> None:
    left_out = buckets.LEFT_OUT[metric.name]
    assert left_out <= set(bounds)
    assert len(bounds) - len(left_out) == kept
    shown = buckets.reduce_buckets(metric, Histogram(bounds, (1,) * (len(bounds) + 1), 1.0))
    assert shown.bounds == tuple(bound for bound in bounds if bound not in left_out)


@pytest.mark.parametrize(("metric", "bounds", "kept"), METRIC_BOUNDS)
@given(st.data())
def test_at_a_bound_that_stays_as_much_lies_below_as_before(
    metric: Metric, bounds: tuple[float, ...], kept: int, data: st.DataObject
) -> None:
    counts = data.draw(st.lists(st.integers(0, 9), min_size=len(bounds) + 1, max_size=len(bounds) + 1))
    histogram = Histogram(bounds, tuple(counts), 12.5)
    shown = buckets.reduce_buckets(metric, histogram)
    before = dict(zip((*bounds, "+Inf"), accumulate(counts), strict=True))
    after = dict(zip((*shown.bounds, "+Inf"), accumulate(shown.counts), strict=True))
    assert after.items() <= before.items()
    assert len(after) == kept + 1
    assert shown.sum == histogram.sum


def test_every_speed_that_rails_have_and_every_power_of_two_of_usual_sizes_stays() -> None:
    rates = {bound / 125e6 for bound in BOUNDS[catalogue.RAIL_RATE][0]} - {
        bound / 125e6 for bound in buckets.LEFT_OUT[catalogue.RAIL_RATE.name]
    }
    assert {10, 25, 50, 100, 200, 400, 800} <= rates
    assert not {float(1 << power) for power in range(10, 34)} & buckets.LEFT_OUT[catalogue.COLLECTIVE_SIZE_BYTES.name]


def test_the_last_exemplar_of_what_is_put_together_stays() -> None:
    metric = catalogue.COLLECTIVE_DURATION_SECONDS
    first, last = Exemplar((("rank", "0"),), 1e-6, 1), Exemplar((("rank", "1"),), 2e-6, 2)
    exemplars = (last, first, None, *[None] * (len(DURATION_BOUNDS) - 2))
    shown = buckets.reduce_buckets(
        metric, Histogram(DURATION_BOUNDS, (1,) * (len(DURATION_BOUNDS) + 1), 1.0, exemplars)
    )
    assert shown.exemplars[0] == last
    assert set(shown.exemplars[1:]) == {None}


@pytest.mark.parametrize(("metric", "bounds"), [(metric, bounds) for metric, (bounds, _) in BOUNDS.items()])
def test_native_histograms_are_made_of_everything_that_was_counted(metric: Metric, bounds: tuple[float, ...]) -> None:
    histogram = Histogram(bounds, (*(1,) * len(bounds), 0), 1.0)
    shown = buckets.reduce_buckets(metric, histogram)
    assert buckets.full_histogram(shown) is histogram
    assert (to_native(buckets.full_histogram(shown)) is not None) is (metric in METRICS)


def test_a_histogram_with_other_bounds_is_left_as_it_is() -> None:
    histogram = Histogram((3.0, 5.0), (1, 1, 1), 1.0)
    assert buckets.reduce_buckets(catalogue.COLLECTIVE_SIZE_BYTES, histogram) is histogram
    assert buckets.full_histogram(histogram) is histogram
