"""A `Collector` for prometheus-client over a snapshot: for other exporters and for pushes from an epilog.

    registry.register(SnapshotCollector(observer.snapshot))

The agent itself does not come this way: text.py renders 20,000 series in a twelfth of the time, and the tests hold it
to what prometheus-client makes of this collector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as ClientMetric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from railscope.agent.facts.snapshot import Snapshot
from railscope.exporters.series.families import make_families
from railscope.exporters.series.family import Family, LabelValues
from railscope.exporters.series.printable_labels import PrintableLabels
from railscope.exporters.series.selection import Selection
from railscope.exporters.series.text import UNITS

_KINDS: Final = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class SnapshotCollector(Collector):
    """Gives prometheus-client every family of a snapshot, taken anew at each collection."""

    def __init__(self, snapshot: Callable[[], Snapshot], selection: Selection | None = None) -> None:
        """Args:
        snapshot: gives the snapshot; called from whatever thread collects.
        selection: which series beyond the usual; None: the usual.
        """
        self._snapshot = snapshot
        self._selection = selection if selection is not None else Selection()
        self._printable = PrintableLabels()

    def collect(self) -> Iterator[ClientMetric]:
        """The families, in the catalogue's order."""
        return to_client_metrics(make_families(self._snapshot(), selection=self._selection, labels=self._printable))


def to_client_metrics(shown: Iterable[Family]) -> Iterator[ClientMetric]:
    """Families as prometheus-client has them: names without `_total`, labels that a series lacks left out."""
    for one in shown:
        metric = one.metric
        name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        unit = next((unit for unit in UNITS if name.endswith(f"_{unit}")), "")
        made = _KINDS[metric.kind](name, metric.help, unit=unit)
        for values, value in one.samples:
            made.add_sample(metric.name, _labels(one, values), value)
        for values, histogram in one.histograms:
            labels = _labels(one, values)
            for bound, count in zip((*histogram.bounds, math.inf), accumulate(histogram.counts), strict=True):
                made.add_sample(f"{name}_bucket", {**labels, "le": floatToGoString(bound)}, count)
            if histogram.sum is not None:
                made.add_sample(f"{name}_count", labels, sum(histogram.counts))
                made.add_sample(f"{name}_sum", labels, histogram.sum)
        yield made


def _labels(one: Family, values: LabelValues) -> dict[str, str]:
    return {label: text for label, text in zip(one.labels, values, strict=True) if text is not None}
