"""Gives a Prometheus samples by remote write: what a rule records, at a moment of the past.

Messages are written by hand: two of protobuf's types and the part of snappy's block format that copies nothing are
thirty lines, and nothing else here needs either library.

Source: https://prometheus.io/docs/specs/prw/remote_write_spec/, https://protobuf.dev/programming-guides/encoding/,
https://github.com/google/snappy/blob/main/format_description.txt.
"""

from __future__ import annotations

import struct
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_SERIES: Final = 5_000
"""Of one request."""
_LITERAL_BYTES: Final = 1 << 16
_LITERAL_OF_TWO_BYTES: Final = 61 << 2
_LENGTH_DELIMITED, _DOUBLE, _VARINT = 2, 1, 0


def write_samples(url: str, samples: Sequence[tuple[Mapping[str, str], float]], at: float) -> None:
    """Give a Prometheus at this URL these series' values at a moment, seconds since the Unix epoch.

    Raises:
        urllib.error.HTTPError: it refuses them.
    """
    for first in range(0, len(samples), _SERIES):
        body = b"".join(_field(1, _series(labels, value, at)) for labels, value in samples[first : first + _SERIES])
        headers = {
            "Content-Encoding": "snappy",
            "Content-Type": "application/x-protobuf",
            "X-Prometheus-Remote-Write-Version": "0.1.0",
        }
        asked = urllib.request.Request(f"{url}/api/v1/write", b"".join(_snappy(body)), headers)
        urllib.request.urlopen(asked, timeout=600).close()


def _series(labels: Mapping[str, str], value: float, at: float) -> bytes:
    named = b"".join(
        _field(1, _field(1, name.encode()) + _field(2, text.encode())) for name, text in sorted(labels.items())
    )
    sample = (
        bytes([1 << 3 | _DOUBLE]) + struct.pack("<d", value) + bytes([2 << 3 | _VARINT]) + _varint(round(at * 1000))
    )
    return named + _field(2, sample)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _LENGTH_DELIMITED]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _snappy(content: bytes) -> Iterator[bytes]:
    yield _varint(len(content))
    for first in range(0, len(content), _LITERAL_BYTES):
        literal = content[first : first + _LITERAL_BYTES]
        yield bytes([_LITERAL_OF_TWO_BYTES]) + struct.pack("<H", len(literal) - 1) + literal
