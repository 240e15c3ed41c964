"""Scales of charts: the pixel of a value, and the tick values of an axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from railscope.agent.analysis.pictures.parts import Box, Line, Part, Words, text_width


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `low` to `high` on pixels from `first` to `last`."""

    low: float
    high: float
    first: float
    last: float
    logarithmic: bool = False
    """Then `low` is above 0, and what is below it lies where `low` does."""

    def pixel_of(self, value: float) -> float:
        """The pixel of a value; values outside lie on the nearest end."""
        value = min(max(value, self.low), self.high)
        if self.high <= self.low:
            return (self.first + self.last) / 2
        if self.logarithmic:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.first + part * (self.last - self.first)


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale with the words at its ticks."""

    scale: Scale
    ticks: tuple[float, ...]
    text: Callable[[float], str]
    title: str


def linear_ticks(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten within the range, at most so many."""
    if not high > low:
        return (low,)
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(number * step for number in range(first, last + 1))


def time_ticks(high: float, most: int = 7) -> tuple[float, ...]:
    """Round seconds, minutes, hours or days from 0 to `high` seconds, at most so many."""
    if high < 60:
        return linear_ticks(0.0, high, most)
    steps = [factor * unit for unit in (1.0, 60.0) for factor in (1, 2, 5, 10, 15, 20, 30)]
    steps += [factor * 3600.0 for factor in (1, 2, 3, 6, 12)]
    # Whole days beyond, doubled until they fit.
    step = next((step for step in steps if high / step < most), 86_400.0)
    while high / step >= most:
        step *= 2
    return tuple(number * step for number in range(int(high / step) + 1))


def log_ticks(low: float, high: float, base: float, most: int = 8) -> tuple[float, ...]:
    """Powers of `base` within the range, every second or third … where there are many."""
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    every = max(1, -(-(last - first + 1) // most))
    # Counted from zero, so that ticks stay at the same values whatever the range.
    return tuple(base**power for power in range(first, last + 1) if power % every == 0)


def enclosing_powers(values: list[float], base: float) -> tuple[float, float]:
    """The powers of `base` that enclose positive values, with at least one step between."""
    low = base ** math.floor(math.log(min(values), base) + 1e-9)
    high = base ** math.ceil(math.log(max(values), base) - 1e-9)
    return low, high if high > low * 1.0001 else low * base


def draw_horizontal_axis(axis: Axis, top: float, bottom: float) -> list[Part]:
    """Grid lines, numbers below and the title below those; a number that would touch the one before is left out."""
    parts: list[Part] = []
    end_of_last = -math.inf
    for tick in axis.ticks:
        x, text = axis.scale.pixel_of(tick), axis.text(tick)
        parts.append(Line(((x, top), (x, bottom)), "grid"))
        half = text_width(text, 11) / 2
        if x - half > end_of_last + 6:
            parts.append(Words(x, bottom + 15, text, "middle", "muted", 11))
            end_of_last = x + half
    middle = (axis.scale.first + axis.scale.last) / 2
    parts.append(Words(middle, bottom + 33, axis.title, "middle", "muted"))
    return parts


def draw_vertical_axis(axis: Axis, left: float, right: float) -> list[Part]:
    """Grid lines, numbers at the left and the title above them."""
    parts: list[Part] = []
    last = math.inf
    for tick in axis.ticks:
        y = axis.scale.pixel_of(tick)
        parts.append(Line(((left, y), (right, y)), "grid"))
        if abs(last - y) >= 13:
            parts.append(Words(left - 6, y + 4, axis.text(tick), "end", "muted", 11))
            last = y
    top = min(axis.scale.first, axis.scale.last)
    parts.append(Words(left, top - 9, axis.title, "start", "muted"))
    return parts


def draw_legend(entries: list[tuple[str, str]], left: float, top: float, width: float) -> tuple[list[Part], float]:
    """Swatches with words, in as many rows as they need; the parts, and how high they are."""
    parts: list[Part] = []
    x, y = left, top
    for paint, text in entries:
        wide = 16 + text_width(text) + 18
        if x > left and x + wide > left + width:
            x, y = left, y + 18
        parts += [Box(x, y + 2, 11, 11, paint), Words(x + 16, y + 12, text)]
        x += wide
    return parts, (y - top + 22 if entries else 0.0)
