"""Negotiates the format and encoding of a response.

Follows RFC 9110 (12.5.1 Accept, 12.5.3 Accept-Encoding) with the habits of Prometheus' own libraries: OpenMetrics goes
only to those who name it, protobuf to those who name it with all its parameters, which Prometheus does where it is to
take native histograms; everyone else, browsers and curl too, gets the plain text format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from railscope.exporters.series.protobuf import Protobuf
from railscope.exporters.series.text import Format

_MOST_ELEMENTS: Final = 32
"""Of a header, and parameters of each: a head has room for thousands, and all are compared with each format."""


@dataclass(frozen=True, slots=True)
class _Range:
    """One element of an Accept header."""

    name: str
    parameters: Mapping[str, str]
    quality: float


def metrics_format(accept: str) -> Format | Protobuf:
    """The exposition format for an Accept header ("": there is none). Never refuses: the default is plain text."""
    ranges = list(_ranges(accept))
    best: Format | Protobuf = Format.PROMETHEUS
    most = _quality(ranges, best)
    for format in (Format.OPENMETRICS, Protobuf.DELIMITED):
        quality = _quality(ranges, format, named=True)
        if quality > 0 and quality >= most:
            best, most = format, quality
    return best


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header ("" where there is none) allows gzip."""
    qualities = {one.name: one.quality for one in _ranges(accept_encoding)}
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0


def _quality(ranges: list[_Range], format: Format | Protobuf, *, named: bool = False) -> float:
    """How much the format is wanted, 0 to 1: the most specific range that fits decides."""
    name, _, text = format.content_type.partition(";")
    parameters = dict(_parameters(text))
    own = {key: parameters[key] for key in ("version", "proto", "encoding") if key in parameters}
    best = (-1, 0.0)
    for one in ranges:
        given = {key: one.parameters[key] for key in own if key in one.parameters}
        # A text format may be asked for without its version; without its parameters protobuf could be any message.
        if one.name == name and given.items() <= own.items() and ("version" in own or given == own):
            best = max(best, (3 if given else 2, one.quality))
        elif not named and one.name == f"{name.partition('/')[0]}/*":
            best = max(best, (1, one.quality))
        elif not named and one.name == "*/*":
            best = max(best, (0, one.quality))
    return best[1]


def _ranges(header: str) -> Iterator[_Range]:
    """The header's first elements; one whose quality is not a number from 0 to 1 is left out."""
    for element in header.split(",", _MOST_ELEMENTS)[:_MOST_ELEMENTS]:
        name, _, rest = element.partition(";")
        parameters = dict(_parameters(rest))
        try:
            quality = float(parameters.get("q", "1"))
        except ValueError:
            continue
        if name.strip() and 0 <= quality <= 1:
            yield _Range(name.strip().lower(), parameters, quality)


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    for parameter in text.split(";", _MOST_ELEMENTS)[:_MOST_ELEMENTS]:
        name, equals, value = parameter.partition("=")
        if equals:
            yield name.strip().lower(), value.strip().strip('"')
