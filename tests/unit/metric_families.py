"""Reads protobuf expositions with the protobuf package: the reference for what we encode ourselves.

The messages are those of Prometheus' prompb/io/prometheus/client/metrics.proto (and of client_model's, whose numbers
are the same), as far as anybody here uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from google.protobuf.internal.decoder import _DecodeVarint32

_TIMESTAMP: Final = timestamp_pb2.DESCRIPTOR
_PACKAGE: Final = "io.prometheus.client"
_MESSAGES: Final = {
    "LabelPair": "string name 1, string value 2",
    "Gauge": "double value 1",
    "Counter": "double value 1, Exemplar exemplar 2",
    "Histogram": "uint64 sample_count 1, double sample_sum 2, *Bucket bucket 3, double sample_count_float 4, "
    "sint32 schema 5, double zero_threshold 6, uint64 zero_count 7, double zero_count_float 8, "
    "*BucketSpan negative_span 9, *sint64 negative_delta 10, *double negative_count 11, "
    "*BucketSpan positive_span 12, *sint64 positive_delta 13, *double positive_count 14, *Exemplar exemplars 16",
    "Bucket": "uint64 cumulative_count 1, double upper_bound 2, Exemplar exemplar 3, double cumulative_count_float 4",
    "BucketSpan": "sint32 offset 1, uint32 length 2",
    "Exemplar": "*LabelPair label 1, double value 2, Timestamp timestamp 3",
    "Metric": "*LabelPair label 1, Gauge gauge 2, Counter counter 3, Histogram histogram 7, int64 timestamp_ms 6",
    "MetricFamily": "string name 1, string help 2, MetricType type 3, *Metric metric 4, string unit 5",
}
"""Fields and their numbers; `*`: repeated."""
_METRIC_TYPES: Final = ("COUNTER", "GAUGE", "SUMMARY", "UNTYPED", "HISTOGRAM", "GAUGE_HISTOGRAM")
COUNTER, GAUGE, HISTOGRAM = 0, 1, 4


def _metric_family() -> Any:
    """As proto2, where a field that is 0 is told from one that is not there."""
    file = descriptor_pb2.FileDescriptorProto(name="metrics.proto", package=_PACKAGE, syntax="proto2")
    file.dependency.append(_TIMESTAMP.name)
    types = file.enum_type.add(name="MetricType")
    for number, name in enumerate(_METRIC_TYPES):
        types.value.add(name=name, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            kind, field_name, number_text = text.split()
            repeated = kind.startswith("*")
            kind = kind.removeprefix("*")
            field = message.field.add(name=field_name, number=int(number_text))
            field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if kind == "Timestamp":
                field.type, field.type_name = field.TYPE_MESSAGE, ".google.protobuf.Timestamp"
            elif kind == "MetricType":
                field.type, field.type_name = field.TYPE_ENUM, f".{_PACKAGE}.{kind}"
            elif kind in _MESSAGES:
                field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind.upper()}")
                field.options.packed = repeated
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(_TIMESTAMP.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.MetricFamily"))


MetricFamily: Final[Any] = _metric_family()


def read_families(exposition: bytes) -> Iterator[Any]:
    """The messages of an exposition; fields that the reference does not know are an error."""
    at = 0
    while at < len(exposition):
        length, at = _DecodeVarint32(exposition, at)
        family = MetricFamily()
        family.ParseFromString(exposition[at : at + length])
        assert family.ByteSize() == length, "there are fields without meaning, or numbers longer than they need be"
        at += length
        yield family
    assert at == len(exposition)


def labels_of(metric: Any) -> dict[str, str]:
    return {pair.name: pair.value for pair in metric.label}
