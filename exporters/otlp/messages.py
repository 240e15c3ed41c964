"""Makes OpenTelemetry's metrics of metric families.

Sums and histograms are cumulative: a point says all that was counted since the agent began to count, or since the boot
where a device counts, so one that is lost loses no count.  Histograms keep the buckets of the scrape.  They do not
become exponential ones: of most the bounds are no powers of two, so counts would have to be moved
(exporters/series/native.py), and a metric must not change its type where something lies above all bounds.

Source: https://opentelemetry.io/docs/specs/otel/metrics/data-model/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from railscope.agent.facts import catalogue
from railscope.exporters.otlp.names import HW_ID, OtlpName, attribute_name, otlp_name
from railscope.exporters.otlp.wire import Export
from railscope.exporters.series.family import Family, LabelValues

Attributes = dict[str, str | int]

_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE
_MOST_WHOLE: Final = 1 << 63
_SCOPE: Final = "railscope"


def to_metrics_data(export: Export) -> MetricsData:
    """The families as OpenTelemetry's exporters take them; families of one name become one metric."""
    families = export.families()
    gpus = _uuids(families)
    together: dict[str, tuple[OtlpName, str, list[Any]]] = {}
    for family in families:
        name = otlp_name(family.metric)
        points = together.setdefault(name.name, (name, family.metric.help, []))[2]
        attributes = _attributes_of(family, name, gpus)
        start_ns = export.boot_realtime_ns if name.by_device else export.start_realtime_ns
        points += (
            NumberDataPoint(attributes(values), start_ns, export.realtime_ns, _number(value))
            for values, value in family.samples
        )
        points += (
            HistogramDataPoint(
                attributes=attributes(values),
                start_time_unix_nano=start_ns,
                time_unix_nano=export.realtime_ns,
                count=sum(histogram.counts),
                # What is not known stays out of the message: all three are optional there.
                sum=histogram.sum,
                min=None,
                max=None,
                bucket_counts=histogram.counts,
                explicit_bounds=histogram.bounds,
            )
            for values, histogram in family.histograms
        )
    metrics = [Metric(name.name, help, name.unit, _data(name, points)) for name, help, points in together.values()]
    scope = ScopeMetrics(InstrumentationScope(_SCOPE, export.version), metrics, "")
    # Resource.create would add what it finds out about the sending process, which is none of ours.
    return MetricsData([ResourceMetrics(Resource(dict(export.resource)), [scope], "")])


def count_points(data: MetricsData) -> int:
    """How many points there are in it."""
    return sum(
        len(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    )


def _number(value: int | float) -> int | float:
    """OTLP's whole numbers have 63 bits, and counters of devices may have 64."""
    return value if value < _MOST_WHOLE else float(value)


def _text(value: str) -> str:
    """As in the text formats: a label may hold half a character, which protobuf refuses."""
    return value if value.isascii() else value.encode("utf-8", "xmlcharrefreplace").decode()


def _data(name: OtlpName, points: list[Any]) -> Any:
    if name.instrument == "histogram":
        return Histogram(points, _CUMULATIVE)
    if name.instrument == "gauge":
        return Gauge(points)
    return Sum(points, _CUMULATIVE, is_monotonic=name.instrument == "counter")


def _attributes_of(family: Family, name: OtlpName, gpus: Mapping[str, str]) -> Callable[[LabelValues], Attributes]:
    """What makes the attributes of a series of its labels."""
    names = tuple(map(attribute_name, family.labels))

    def attributes(values: LabelValues) -> Attributes:
        made: Attributes = dict(name.attributes)
        for attribute, value in zip(names, values, strict=True):
            if value is not None:
                made[attribute] = int(value) if attribute == "process.pid" and value.isdecimal() else _text(value)
        if name.hardware:
            made |= _component(dict(zip(family.labels, values, strict=True)), gpus)
        return made

    return attributes


def _component(labels: Mapping[str, str | None], gpus: Mapping[str, str]) -> Attributes:
    """What the conventions call the component: an identifier that is unique within the host, and a name."""
    gpu = labels.get("gpu")
    if gpu is not None:
        return {HW_ID: _text(gpus.get(gpu, gpu)), "hw.name": gpu}
    device, port, netns = (_text(labels.get(label) or "") for label in ("device", "port", "netns"))
    return {HW_ID: device + (f"/{port}" if port else "") + (f"@{netns}" if netns else ""), "hw.name": device}


def _uuids(families: Iterable[Family]) -> dict[str, str]:
    """By a GPU's number its UUID."""
    for family in families:
        if family.metric == catalogue.GPU_INFO:
            gpu, uuid = family.labels.index("gpu"), family.labels.index("uuid")
            return {values[gpu] or "": values[uuid] or "" for values, _ in family.samples}
    return {}
