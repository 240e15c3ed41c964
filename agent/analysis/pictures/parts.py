"""The elements of charts: boxes, lines and text at positions, in named colours.

A picture is only a list of parts, so that one description becomes SVG, in which text stays text and colours follow
the reader's light or dark theme, and PNG, which needs no browser.  Places are in pixels from the upper left corner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

HEAT_LEVELS: Final = 24
SERIES: Final = 7
"""Colours that a reader can tell apart, also without seeing red from green."""

_LIGHT: Final = {
    "surface": "#ffffff",
    "ink": "#1b2430",
    "muted": "#5b6675",
    "grid": "#dfe4ea",
    "empty": "#f4f6f8",
    "alarm": "#b3261e",
    # Okabe and Ito's palette without its yellow, which is not seen on white.
    "series0": "#0072b2",
    "series1": "#e08e00",
    "series2": "#009e73",
    "series3": "#cc79a7",
    "series4": "#56b4e9",
    "series5": "#d55e00",
    "series6": "#7a7f87",
}
_DARK: Final = {
    "surface": "#12171e",
    "ink": "#e6eaf0",
    "muted": "#a0abb9",
    "grid": "#2b3440",
    "empty": "#1a212a",
    "alarm": "#ff8a80",
    "series0": "#4da3dc",
    "series1": "#f0a830",
    "series2": "#2fc79c",
    "series3": "#dd94bd",
    "series4": "#8fd0f5",
    "series5": "#f07f3c",
    "series6": "#a3a9b2",
}
_LIGHT_RAMP: Final = ("#c6dcf0", "#93c4e0", "#4292c6", "#08519c", "#08244f")
_DARK_RAMP: Final = ("#17344f", "#1f5f92", "#3f9bd8", "#9fd3f5", "#f1f9ff")


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    paint: str
    title: str = ""
    """What a pointer that rests on it is told."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    paint: str
    width: float = 1.0
    dashed: bool = False
    title: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """One line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    """`start`, `middle` or `end`: where in the text `x` is."""
    paint: str = "ink"
    points: int = 12
    """Height in pixels."""
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Cells:
    """Many equal squares of one paint on a grid, as (row, first column, number of squares)."""

    x: float
    y: float
    side: float
    runs: tuple[tuple[int, int, int], ...]
    paint: str


Part = Box | Line | Words | Cells


@dataclass(frozen=True, slots=True)
class Picture:
    """Parts in the order in which they are drawn."""

    width: float
    height: float
    title: str
    """What it shows, for those who cannot see it."""
    parts: tuple[Part, ...]


def paint_colours() -> tuple[dict[str, str], dict[str, str]]:
    """Every paint's colour as `#rrggbb`, on light and on dark ground."""
    levels = range(HEAT_LEVELS)
    return (
        _LIGHT | {f"heat{level}": _on_ramp(_LIGHT_RAMP, level) for level in levels},
        _DARK | {f"heat{level}": _on_ramp(_DARK_RAMP, level) for level in levels},
    )


def translate(part: Part, right: float, down: float) -> Part:
    """Move a part of a picture, in pixels."""
    if isinstance(part, Line):
        return replace(part, points=tuple((x + right, y + down) for x, y in part.points))
    return replace(part, x=part.x + right, y=part.y + down)


def join_horizontally(pictures: Sequence[Picture], gap: float = 16.0) -> Picture:
    """Pictures from left to right in one."""
    parts: list[Part] = []
    right = 0.0
    for picture in pictures:
        parts += [translate(part, right, 0.0) for part in picture.parts]
        right += picture.width + gap
    return Picture(
        width=max(right - gap, 0.0),
        height=max((picture.height for picture in pictures), default=0.0),
        title="; ".join(picture.title for picture in pictures),
        parts=tuple(parts),
    )


def text_width(text: str, points: float = 12.0, *, bold: bool = False) -> float:
    """About how wide a text is, in pixels; for common sans-serif fonts rather too wide than too narrow."""
    return len(text) * points * (0.62 if bold else 0.58)


def _on_ramp(ramp: Sequence[str], level: int) -> str:
    place = level / (HEAT_LEVELS - 1) * (len(ramp) - 1)
    below = min(int(place), len(ramp) - 2)
    weight = place - below
    pairs = zip(_rgb(ramp[below]), _rgb(ramp[below + 1]), strict=True)
    return "#" + "".join(f"{round(low + (high - low) * weight):02x}" for low, high in pairs)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
