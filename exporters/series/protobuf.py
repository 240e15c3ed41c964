"""Metric families as protobuf: `io.prometheus.client.MetricFamily`, one after the other, each behind its length.

This is the only format in which Prometheus takes native histograms; they stand beside the classic buckets.  As in the
text formats, everything before a value is made once for each series and kept.  Values have a fixed length here, so
the lengths around them never change either, and a scrape is one lookup and one packed number a series.

Why not the protobuf package: it takes ten times as long as the 6 ms for 20,000 series, and the agent would need it for
nothing else.  The tests read all of it back with that package.

Source: prompb/io/prometheus/client/metrics.proto of Prometheus, and https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from typing import Final

from railscope.agent.facts.catalogue import Metric
from railscope.agent.facts.histogram import Exemplar, Histogram
from railscope.exporters.series.buckets import full_histogram
from railscope.exporters.series.family import Family, LabelValues
from railscope.exporters.series.native import NativeHistogram, to_native
from railscope.exporters.series.prefix_cache import PrefixCache

SERIES_PER_CHUNK: Final = 500
_TYPES: Final = {"counter": 0, "gauge": 1, "histogram": 4}

_double = struct.Struct("<d").pack

# A field begins with its number times 8, plus 0 for a varint, 1 for eight bytes, 2 for a length and that many bytes.
_FAMILY_NAME, _FAMILY_HELP, _FAMILY_TYPE, _FAMILY_METRIC = b"\x0a", b"\x12", b"\x18", b"\x22"
_METRIC_LABEL, _METRIC_HISTOGRAM = b"\x0a", b"\x3a"
_LABEL_NAME, _LABEL_VALUE = b"\x0a", b"\x12"
_SCALARS: Final = {"gauge": b"\x12\x09\x09", "counter": b"\x1a\x09\x09"}
"""Field, its length, and the double in it, whose eight bytes follow."""
_HISTOGRAM_COUNT, _HISTOGRAM_SUM, _HISTOGRAM_BUCKET = b"\x08", b"\x11", b"\x1a"
_BUCKET_COUNT, _BUCKET_BOUND, _BUCKET_EXEMPLAR = b"\x08", b"\x11", b"\x1a"
_EXEMPLAR_VALUE, _EXEMPLAR_TIME = b"\x11", b"\x1a"  # its labels are numbered as a metric's
_TIMESTAMP_SECONDS, _TIMESTAMP_NS = b"\x08", b"\x10"
_ZERO_THRESHOLD, _ZERO_COUNT, _POSITIVE_SPAN, _POSITIVE_DELTA = b"\x31", b"\x38", b"\x62", b"\x6a"
_SPAN_OFFSET, _SPAN_LENGTH = b"\x08", b"\x10"


class Protobuf(Enum):
    """What this writes, and the content type that announces it."""

    DELIMITED = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"

    @property
    def content_type(self) -> str:
        return self.value


class ProtobufRenderer:
    """Writes families down, remembering what does not change between two scrapes.

    What it remembers is dropped when its series no longer come.  Not safe for two threads at once.
    """

    def __init__(self) -> None:
        self._scalars: dict[str, PrefixCache[bytes]] = {}
        self._histograms: dict[str, PrefixCache[bytes]] = {}
        self._bounds: dict[tuple[float, ...], tuple[bytes, ...]] = {}

    def render(self, families: Iterable[Family]) -> bytes:
        """The whole exposition."""
        return b"".join(self.chunks(families))

    def chunks(self, families: Iterable[Family]) -> Iterator[bytes]:
        """The exposition in pieces, after about `SERIES_PER_CHUNK` series each, a fraction of a millisecond of work.

        A family's length stands before it, so pieces are empty while it is made.
        """
        shown = set()
        for family in families:
            shown.add(family.metric.name)
            pieces = [_header(family.metric)]
            for piece in self._histogram_metrics(family) if family.histograms else self._scalar_metrics(family):
                pieces.append(piece)
                yield b""
            yield _varint(sum(map(len, pieces)))
            yield from pieces
        for known in (self._scalars, self._histograms):
            for name in known.keys() - shown:
                del known[name]

    def cached_label_sets(self) -> int:
        """How many label sets are remembered."""
        return sum(map(len, self._scalars.values())) + sum(map(len, self._histograms.values()))

    def _scalar_metrics(self, family: Family) -> Iterator[bytes]:
        value_field = _SCALARS[family.metric.kind]

        def beginning(_: str, labels: tuple[str, ...], values: LabelValues) -> bytes:
            content = _labels(labels, values) + value_field
            return _FAMILY_METRIC + _varint(len(content) + 8) + content

        beginnings = self._scalars.get(family.metric.name)
        if beginnings is None or beginnings.labels != family.labels:
            beginnings = self._scalars[family.metric.name] = PrefixCache(family, beginning)
        in_order = beginnings.in_order(family.samples)
        for start in range(0, len(in_order), SERIES_PER_CHUNK):
            end = start + SERIES_PER_CHUNK
            yield b"".join(
                [
                    begun + _double(value)
                    for begun, (_, value) in zip(in_order[start:end], family.samples[start:end], strict=True)
                ]
            )

    def _histogram_metrics(self, family: Family) -> Iterator[bytes]:
        labels = self._histograms.get(family.metric.name)
        if labels is None or labels.labels != family.labels:
            labels = self._histograms[family.metric.name] = PrefixCache(
                family, lambda _, names, values: _labels(names, values)
            )
        for values, histogram in family.histograms:
            field = _field(_METRIC_HISTOGRAM, self._histogram(histogram))
            yield _field(_FAMILY_METRIC, labels[values] + field)
        labels.forget_all_but(family.histograms)

    def _histogram(self, histogram: Histogram) -> bytes:
        cumulative = list(accumulate(histogram.counts))
        # Without the field the sum would be 0; an unknown sum is NaN.
        total = math.nan if histogram.sum is None else histogram.sum
        parts = [_HISTOGRAM_COUNT, _varint(cumulative[-1]), _HISTOGRAM_SUM, _double(total)]
        exemplars = histogram.exemplars or (None,) * len(cumulative)
        for bound, count, last in zip(self._bucket_ends(histogram.bounds), cumulative, exemplars, strict=True):
            exemplar = b"" if last is None else _field(_BUCKET_EXEMPLAR, _exemplar(last))
            parts.append(_field(_HISTOGRAM_BUCKET, _BUCKET_COUNT + _varint(count) + bound + exemplar))
        exact = to_native(full_histogram(histogram))
        if exact is not None:
            parts.append(_native(exact))
        return b"".join(parts)

    def _bucket_ends(self, bounds: tuple[float, ...]) -> tuple[bytes, ...]:
        """What each bucket ends with: its bound."""
        ends = self._bounds.get(bounds)
        if ends is None:
            if len(self._bounds) > SERIES_PER_CHUNK:
                self._bounds.clear()
            ends = self._bounds[bounds] = tuple(_BUCKET_BOUND + _double(bound) for bound in (*bounds, math.inf))
        return ends


def _native(histogram: NativeHistogram) -> bytes:
    # Schema 0 is what a reader takes where the field is missing.
    parts = [_ZERO_THRESHOLD, _double(histogram.zero_threshold), _ZERO_COUNT, _varint(histogram.zero_count)]
    if histogram.counts:
        offset = _SPAN_OFFSET + _varint(_zigzag(histogram.offset))
        parts.append(_field(_POSITIVE_SPAN, offset + _SPAN_LENGTH + _varint(len(histogram.counts))))
        before = (0, *histogram.counts[:-1])
        deltas = (count - last for count, last in zip(histogram.counts, before, strict=True))
        parts.append(_field(_POSITIVE_DELTA, b"".join(_varint(_zigzag(delta)) for delta in deltas)))
    return b"".join(parts)


def _exemplar(exemplar: Exemplar) -> bytes:
    seconds, rest_ns = divmod(exemplar.realtime_ns, 1_000_000_000)
    moment = _TIMESTAMP_SECONDS + _varint(seconds) + (_TIMESTAMP_NS + _varint(rest_ns) if rest_ns else b"")
    labels = _labels(*zip(*exemplar.labels, strict=True)) if exemplar.labels else b""
    return labels + _EXEMPLAR_VALUE + _double(exemplar.value) + _field(_EXEMPLAR_TIME, moment)


def _header(metric: Metric) -> bytes:
    name, help = _field(_FAMILY_NAME, _text(metric.name)), _field(_FAMILY_HELP, _text(metric.help))
    return name + help + _FAMILY_TYPE + _varint(_TYPES[metric.kind])


def _labels(labels: Iterable[str], values: Iterable[str | None]) -> bytes:
    return b"".join(
        _field(_METRIC_LABEL, _field(_LABEL_NAME, _text(label)) + _field(_LABEL_VALUE, _text(value)))
        for label, value in zip(labels, values, strict=True)
        if value is not None
    )


def _text(text: str) -> bytes:
    # As in the text formats: a label may hold half a character.
    return text.encode("utf-8", "xmlcharrefreplace")


def _field(begin: bytes, content: bytes) -> bytes:
    return begin + _varint(len(content)) + content


def _zigzag(number: int) -> int:
    """A signed number as protobuf's sint32 and sint64 have it."""
    return -2 * number - 1 if number < 0 else 2 * number


@lru_cache(maxsize=1 << 12)
def _varint(number: int) -> bytes:
    """Lengths and most counts are small, and the same at every scrape."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
