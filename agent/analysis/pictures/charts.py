"""The two chart types that all others use: line charts and stacked bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from railscope.agent.analysis.facts import quantities
from railscope.agent.analysis.pictures.axes import Axis, draw_horizontal_axis, draw_legend, draw_vertical_axis
from railscope.agent.analysis.pictures.parts import Box, Line, Part, Picture, Words, text_width

WIDTH: Final = 720.0
_LEFT: Final = 64.0
_RIGHT: Final = 24.0
_LABEL_LETTERS: Final = 34


@dataclass(frozen=True, slots=True)
class Series:
    """One line."""

    name: str
    paint: str
    points: tuple[tuple[float, float], ...]
    marked: bool = False
    """A square at every point."""
    titles: tuple[str, ...] = ()
    """Of the squares."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of a bar."""

    paint: str
    value: float
    text: str
    """Written into the part if it fits."""
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    pieces: tuple[Piece, ...]
    total: str = ""
    """Written behind the bar."""


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis, height: float = 240.0) -> Picture:
    """A line chart with a legend; the axes' scales are given without pixels, which are set here."""
    parts: list[Part] = [Words(0, 14, title, bold=True, points=13)]
    entries = [(one.paint, one.name) for one in series]
    more, legend_height = draw_legend(entries, 0.0, 26.0, WIDTH) if len(entries) > 1 else ([], 0.0)
    parts += more
    top = 26.0 + legend_height + 24.0
    bottom = top + height
    x = replace(x, scale=replace(x.scale, first=_LEFT, last=WIDTH - _RIGHT))
    y = replace(y, scale=replace(y.scale, first=bottom, last=top))
    parts += draw_vertical_axis(y, _LEFT, WIDTH - _RIGHT)
    parts += draw_horizontal_axis(x, top, bottom)
    for one in series:
        places = tuple((x.scale.pixel_of(right), y.scale.pixel_of(up)) for right, up in one.points)
        if len(places) > 1:
            parts.append(Line(places, one.paint, 1.8, title=one.name))
        if one.marked or len(places) == 1:
            titles = one.titles or (one.name,) * len(places)
            parts += [
                Box(right - 3, up - 3, 6, 6, one.paint, words)
                for (right, up), words in zip(places, titles, strict=True)
            ]
    return Picture(WIDTH, bottom + 40, title, tuple(parts))


def stacked_bars(
    title: str, bars: Sequence[Bar], entries: Sequence[tuple[str, str]], *, whole: float | None = None
) -> Picture:
    """A chart of bars below each other; `whole` is the value of the full width, by default the longest bar's."""
    parts: list[Part] = [Words(0, 14, title, bold=True, points=13)]
    more, legend_height = draw_legend(list(entries), 0.0, 26.0, WIDTH)
    parts += more
    labels = [quantities.shorten(bar.label, _LABEL_LETTERS) for bar in bars]
    left = max((text_width(label) for label in labels), default=0.0) + 12
    behind = max((text_width(bar.total, 11) for bar in bars), default=0.0) + 10
    most = whole or max((sum(piece.value for piece in bar.pieces) for bar in bars), default=0.0) or 1.0
    room = WIDTH - left - behind
    y = 30.0 + legend_height
    for label, bar in zip(labels, bars, strict=True):
        parts.append(Words(left - 8, y + 14, label, "end"))
        x = left
        for piece in bar.pieces:
            wide = piece.value / most * room
            if wide <= 0:
                continue
            parts.append(Box(x, y, max(wide - 1, min(wide, 0.75)), 19, piece.paint, piece.title))
            if piece.text and text_width(piece.text, 11) + 8 <= wide:
                parts.append(Words(x + wide / 2, y + 13.5, piece.text, "middle", "surface", 11, bold=True))
            x += wide
        parts.append(Words(x + 6, y + 14, bar.total, paint="muted", points=11))
        y += 26
    return Picture(WIDTH, y + 2, title, tuple(parts))
