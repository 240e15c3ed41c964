"""Formats the numbers of a report: three significant digits with a unit.

Bytes are shown in KiB, MiB, … (1024), as the papers mean them, and rates in kB/s, MB/s, … (1000), as links are sold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from railscope.probes.printable import printable

_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL: Final = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s")
_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
UNKNOWN: Final = "–"
"""Where a figure is not known."""


def format_bytes(count: float | None) -> str:
    """Bytes as reports write them: `125 MiB`, `83 GiB`, `96.2 MiB`, `512 B`."""
    if count is None:
        return UNKNOWN
    return _scaled(count, 1024.0, _BINARY)


def format_size_class(count: float | None, over: float | None) -> str:
    """As `format_bytes`; of sizes that are put together `64 MiB–128 MiB`."""
    return format_bytes(count) if over is None else f"{format_bytes(over)}–{format_bytes(count)}"


def format_rate(bytes_per_second: float | None) -> str:
    """A rate as reports write it: `45 GB/s`."""
    if bytes_per_second is None:
        return UNKNOWN
    return _scaled(bytes_per_second, 1000.0, _DECIMAL)


def format_seconds(seconds: float | None) -> str:
    """Seconds as reports write them: `12.5 ms`, `3.1 µs`, `42 s`, `3 min 5 s`, `2 h 10 min`, `3 days 4 h`."""
    if seconds is None:
        return UNKNOWN
    if not seconds:
        return "0 s"
    if abs(seconds) < 119.5:
        factor, unit = next((step for step in _SECONDS if abs(seconds) >= 0.9995 * step[0]), _SECONDS[-1])
        return f"{format_digits(seconds / factor)} {unit}"
    whole = round(seconds)
    if abs(whole) < 7200:
        return f"{whole // 60} min {whole % 60} s".removesuffix(" 0 s")
    if abs(whole) < 2 * 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min".removesuffix(" 0 min")
    return f"{whole // 86_400:,} days {whole % 86_400 // 3600} h".removesuffix(" 0 h")


def format_share(part: float | None) -> str:
    """A share as reports write it: `12.5 %`; less than a thousandth keeps two digits."""
    if part is None:
        return UNKNOWN
    percent = 100 * part
    text = f"{percent:.1f}" if abs(percent) >= 0.1 or not percent else f"{percent:.2g}"
    return f"{text.removesuffix('.0')} %"


def format_integer(count: float | None) -> str:
    """A whole number as reports write it: `600,000`."""
    if count is None:
        return UNKNOWN
    return f"{count:,.0f}" if float(count).is_integer() or abs(count) >= 1000 else format_digits(count)


def format_time(seconds: float) -> str:
    """A time as reports write it, `2026-11-21 14:15:36 UTC`, of seconds since 1970."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return UNKNOWN


def format_digits(value: float) -> str:
    """A figure of a report: three digits that count, without an exponent and trailing zeros after the point."""
    if not math.isfinite(value) or not value:
        return "0" if not value else str(value)
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(places, 20)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_numbers(ascending: Sequence[int]) -> str:
    """Numbers of GPUs as reports write them: `0–7`, `0, 8, 16, 24`, `0, 2, 4, … 30`."""
    if len(ascending) > 2 and ascending[-1] - ascending[0] + 1 == len(ascending):
        return f"{ascending[0]}–{ascending[-1]}"
    if len(ascending) > 6:
        return f"{', '.join(map(str, ascending[:4]))}, … {ascending[-1]}"
    return ", ".join(map(str, ascending))


def shorten(text: str, most: int) -> str:
    """At most this many characters, all of them printable; of a long text both ends, as names of hosts differ there."""
    clean = printable(text)
    if len(clean) <= most:
        return clean
    behind = max(most - 1, 0) // 2
    return f"{clean[: most - 1 - behind]}…{clean[len(clean) - behind :]}"


def _scaled(value: float, step: float, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= 0.9995 * step and power < len(units) - 1:
        value /= step
        power += 1
    return f"{format_digits(value)} {units[power]}"
