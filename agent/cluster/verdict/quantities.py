"""Numbers as the verdict writes them: short, with their unit."""

from __future__ import annotations

from collections.abc import Iterable

from railscope.agent.facts.label_numbers import parse_number


def format_rank_numbers(ranks: Iterable[str]) -> str:
    """Rank numbers of a verdict: `rank 3`, `ranks 0-2, 5`."""
    numbers = sorted({number for rank in ranks if (number := parse_number(rank)) is not None})
    if not numbers:
        return "an unknown rank"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"


def format_duration(seconds: float) -> str:
    """A duration in a verdict: `4.2 s`, `42 s`, `3 min 5 s`, `2 h 10 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_calls(rates: Iterable[float]) -> str:
    """Calls per second of several ranks in a verdict: `3.2 calls/s`, `3.2 to 4.0 calls/s`."""
    known = list(rates)
    ends = dict.fromkeys(f"{end:,.1f}" for end in (min(known), max(known)))
    return f"{' to '.join(ends)} calls/s"


def format_short_duration(seconds: float) -> str:
    """The time of an operation in a verdict: `0.41 s`, `12 ms`, `0.8 ms`."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.2g} ms"


def format_decimal_bytes(value: float) -> str:
    """Bytes in a verdict: `1.25 GB`, as link speeds are written."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def format_rate(value: float | None) -> str:
    """A rate in a verdict: `12.5 MB/s`, as link speeds are written."""
    return "an unknown rate" if value is None else f"{format_decimal_bytes(value)}/s"
