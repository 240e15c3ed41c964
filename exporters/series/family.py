"""A metric family before it is rendered.

`families` makes these from a `Snapshot`, `text` renders them.
"""

from __future__ import annotations

from dataclasses import dataclass

from railscope.agent.facts.catalogue import Metric
from railscope.agent.facts.histogram import Histogram

LabelValues = tuple[str | None, ...]
"""Values of the family's labels, in its order; None where this series does not have the label."""

Sample = tuple[LabelValues, int | float]
"""Labels and value of one series; a plain tuple, because a scrape makes twenty thousand of them."""

HistogramSample = tuple[LabelValues, Histogram]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric and its samples at one moment; no two samples have the same labels."""

    metric: Metric
    labels: tuple[str, ...]
    """The metric's labels, then those that only this moment has."""
    samples: tuple[Sample, ...] = ()
    """For counters and gauges."""
    histograms: tuple[HistogramSample, ...] = ()
    """For histograms."""

    def series(self) -> int:
        """How many series this family is in the exposition: a histogram is one for each bucket, count and sum."""
        return len(self.samples) + sum(
            len(histogram.counts) + (1 if histogram.sum is None else 2) for _, histogram in self.histograms
        )
