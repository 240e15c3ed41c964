"""Numbers as people read them."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.analysis.facts import quantities
from railscope.agent.facts.counted import format_count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1,023 B"),
        (131_072_000, "125 MiB"),
        (777_492_000, "741 MiB"),
        (100_864_000, "96.2 MiB"),
        (89_128_960_000, "83 GiB"),
        ((1 << 30) - 1, "1 GiB"),
        (None, "–"),
    ],
)
def test_sizes(count: int | None, text: str) -> None:
    assert quantities.format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.1e-6, "3.1 µs"),
        (0.0125, "12.5 ms"),
        (0.99999, "1 s"),
        (42, "42 s"),
        (185, "3 min 5 s"),
        (180, "3 min"),
        (7800, "2 h 10 min"),
        (3 * 86_400 + 4 * 3600, "3 days 4 h"),
        (None, "–"),
    ],
)
def test_times(seconds: float | None, text: str) -> None:
    assert quantities.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("part", "text"),
    [(0, "0 %"), (0.125, "12.5 %"), (1, "100 %"), (0.000_123, "0.012 %"), (-0.5, "-50 %"), (None, "–")],
)
def test_shares(part: float | None, text: str) -> None:
    assert quantities.format_share(part) == text


def test_rates_counts_and_moments() -> None:
    assert quantities.format_rate(45e9) == "45 GB/s"
    assert quantities.format_rate(None) == quantities.format_integer(None) == "–"
    assert quantities.format_integer(600_000) == "600,000"
    assert quantities.format_integer(2.5) == "2.5"
    assert format_count(1, "GPU") == "1 GPU"
    assert format_count(1024, "GPU") == "1,024 GPUs"
    assert [format_count(number, "process", "es") for number in (0, 1, 2)] == [
        "0 processes",
        "1 process",
        "2 processes",
    ]
    assert quantities.format_time(0) == "1970-01-01 00:00:00 UTC"
    assert quantities.format_time(1e30) == "–"


@given(st.floats(1e-9, 1e17))
def test_three_digits_are_within_half_a_per_cent(value: float) -> None:
    text = quantities.format_digits(value)
    assert re.fullmatch(r"[0-9,]+(\.[0-9]*[1-9])?", text)
    assert math.isclose(float(text.replace(",", "")), value, rel_tol=0.006)


@given(st.text(max_size=80), st.integers(1, 40))
def test_what_is_shortened_is_short_and_can_be_printed(text: str, most: int) -> None:
    short = quantities.shorten(text, most)
    assert len(short) <= most
    assert short.isprintable()
    if len(text) <= most and text.isprintable():
        assert short == text


def test_sizes_that_are_put_together_show_both_ends() -> None:
    assert quantities.format_size_class(1 << 27, 1 << 26) == "64 MiB–128 MiB"
    assert quantities.format_size_class(1 << 27, None) == "128 MiB"
    assert quantities.format_size_class(None, None) == quantities.UNKNOWN
