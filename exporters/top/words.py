"""Formats amounts in few characters for the live view."""

from __future__ import annotations

from typing import Final

NOT_KNOWN: Final = "–"

_PREFIXES: Final = (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15), ("E", 1e18))
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"


def format_amount(value: float | None, unit: str = "") -> str:
    """`1.26 GB` of 1260000000.0 and `B`: three digits, decimal prefixes; seven characters at most with a short unit."""
    if value is None:
        return NOT_KNOWN
    # What three digits would round up to 1000 belongs to the next prefix.
    prefix, factor = next((one for one in reversed(_PREFIXES) if value >= one[1] * 0.9995), _PREFIXES[0])
    scaled = value / factor
    whole = factor == 1 and isinstance(value, int)
    decimals = 0 if whole or scaled >= 99.95 or not scaled else 1 if scaled >= 9.995 else 2
    return f"{scaled:.{decimals}f} {prefix}{unit}" if unit else f"{scaled:.{decimals}f}{prefix}"


def format_length(seconds: float | None) -> str:
    """`250ms`, `12.3s`, `4m05s`, `3h10m`: at most six characters below a hundred hours."""
    if seconds is None:
        return NOT_KNOWN
    if seconds == 0:
        return "0"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 99.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def format_percent(ratio: float | None) -> str:
    """`91%`; more than 999 % is `>999%`."""
    if ratio is None:
        return NOT_KNOWN
    return f"{100 * ratio:.0f}%" if ratio < 9.995 else ">999%"


def render_bar(ratio: float | None, width: int, *, ascii_only: bool = False) -> str:
    """A bar in words of `railscope top`, exactly `width` characters, full at 1; blank where nothing is known."""
    if ratio is None:
        return " " * width
    eighths = round(min(max(ratio, 0.0), 1.0) * width * 8)
    if ascii_only:
        return ("#" * ((eighths + 4) // 8)).ljust(width, ".")
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(width)
