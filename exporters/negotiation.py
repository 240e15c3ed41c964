"""Which format and encoding a client asks for.

Follows RFC 9110 (12.5.1 Accept, 12.5.3 Accept-Encoding) with the habits of Prometheus' own libraries: OpenMetrics goes
only to those who name it, everyone else, browsers and curl too, gets the plain text format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from exporters.text import Format


@dataclass(frozen=True, slots=True)
class _Range:
    """One element of an Accept header."""

    name: str
    parameters: Mapping[str, str]
    quality: float


def metrics_format(accept: str) -> Format:
    """The format for an Accept header ("" where there is none).  Never refuses: what fits nothing gets plain text."""
    ranges = list(_ranges(accept))
    openmetrics = _quality(ranges, Format.OPENMETRICS, named=True)
    return (
        Format.OPENMETRICS
        if openmetrics > 0 and openmetrics >= _quality(ranges, Format.PROMETHEUS)
        else (Format.PROMETHEUS)
    )


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header ("" where there is none) allows gzip."""
    qualities = {one.name: one.quality for one in _ranges(accept_encoding)}
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0


def _quality(ranges: list[_Range], format: Format, *, named: bool = False) -> float:
    """How much the format is wanted, 0 to 1: the most specific range that fits decides."""
    name, _, parameters = format.content_type.partition(";")
    version = dict(_parameters(parameters))["version"]
    best = (-1, 0.0)
    for one in ranges:
        if one.name == name and one.parameters.get("version", version) == version:
            best = max(best, (3 if "version" in one.parameters else 2, one.quality))
        elif not named and one.name == f"{name.partition('/')[0]}/*":
            best = max(best, (1, one.quality))
        elif not named and one.name == "*/*":
            best = max(best, (0, one.quality))
    return best[1]


def _ranges(header: str) -> Iterator[_Range]:
    """The header's elements; one whose quality is not a number from 0 to 1 is left out."""
    for element in header.split(","):
        name, _, rest = element.partition(";")
        parameters = dict(_parameters(rest))
        try:
            quality = float(parameters.get("q", "1"))
        except ValueError:
            continue
        if name.strip() and 0 <= quality <= 1:
            yield _Range(name.strip().lower(), parameters, quality)


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    for parameter in text.split(";"):
        name, equals, value = parameter.partition("=")
        if equals:
            yield name.strip().lower(), value.strip().strip('"')
