"""Drafts of metric families: a metric with its values, unknown ones left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from railscope.agent.facts.catalogue import Metric
from railscope.exporters.series.family import HistogramSample, LabelValues, Sample

TRANSMIT: Final = "transmit"
RECEIVE: Final = "receive"


@dataclass(frozen=True, slots=True)
class Draft:
    """A family before its samples are made; they may still meet under one label set."""

    metric: Metric
    samples: Iterable[Sample] = ()
    histograms: Iterable[HistogramSample] = ()
    more_labels: tuple[str, ...] = ()


def make_draft(metric: Metric, values: Iterable[tuple[LabelValues, int | float | None]]) -> Draft:
    """A metric family in the making: one sample a value; None, what cannot be known, is left out."""
    return Draft(metric, ((labels, value) for labels, value in values if value is not None))


def make_draft_by_label(metric: Metric, values: Iterable[tuple[str, int | float]]) -> Draft:
    """A metric family in the making: one sample for each value of a label."""
    return Draft(metric, (((label,), value) for label, value in values))
