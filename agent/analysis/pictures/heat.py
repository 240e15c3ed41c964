"""The heat map of GPU pairs: who sent how much to whom, one square a pair (bytes by GPU pair).

Rows send and columns receive.  Colours go by the logarithm of bytes: what a tensor-parallel pair exchanges is a
thousand times what an embedding's pair does, and both are to be seen.  A pair that did not talk has no colour.

More than 256 GPUs make squares of several GPUs each, whose bytes are added up; the picture then says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from railscope.agent.analysis.facts import quantities
from railscope.agent.analysis.facts.fact_columns import chunk_slices
from railscope.agent.analysis.facts.report import Traffic
from railscope.agent.analysis.pictures.parts import HEAT_LEVELS, Box, Cells, Line, Part, Picture, Words, text_width
from railscope.agent.facts.counted import format_count

MOST_CELLS: Final = 256
"""Squares on a side."""
_MOST_TITLES: Final = 2048
"""Squares that tell a pointer their pair and bytes; more would make pages of many megabytes."""
_SIDE: Final = 448.0
_NAME_LETTERS: Final = 16


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Bytes by directed pair of GPUs, or of equal ranges of GPUs."""

    gpus: int
    gpus_a_cell: int
    bytes: NDArray[np.int64]
    """By row (sender) and column (receiver)."""
    servers: tuple[str, ...]
    """Of each GPU; empty: not known."""
    numbers: tuple[int, ...] = ()
    """Of each GPU, rising; empty: from 0 on without gaps."""

    def gpu_number(self, place: int) -> int:
        """Of the GPU at a place."""
        return self.numbers[place] if self.numbers else place

    @property
    def side(self) -> int:
        return len(self.bytes)

    @property
    def note(self) -> str:
        """What a reader must know who takes a square for a pair; empty: nothing."""
        if self.gpus_a_cell == 1:
            return ""
        each = self.gpus_a_cell
        return f"each square is {each} × {each} of {self.gpus:,} GPUs, their bytes added up"


def heat_map(
    gpus: int,
    sources: NDArray[Any],
    destinations: NDArray[Any],
    moved: NDArray[np.int64],
    servers: Sequence[str] = (),
    most_cells: int = MOST_CELLS,
) -> HeatMap:
    """Bytes of pairs as the squares of a heat map, at most so many on a side."""
    each = max(1, -(-gpus // most_cells))
    side = -(-gpus // each)
    cells = np.zeros((side, side), dtype=np.int64)
    for part in chunk_slices(len(moved)):
        np.add.at(cells, (sources[part] // each, destinations[part] // each), moved[part])
    return HeatMap(gpus, each, cells, tuple(servers) if len(servers) == gpus else ())


def heat_map_of(
    traffic: Traffic, servers: Sequence[str] = (), most_cells: int = MOST_CELLS, numbers: Sequence[int] = ()
) -> HeatMap:
    """The heat map of what was observed; `numbers` of GPUs, rising, are needed where they do not go from 0 to n−1."""
    pairs = traffic.pairs
    if len(numbers) == 0 or numbers[-1] == len(numbers) - 1:
        return heat_map(traffic.gpus, pairs.source, pairs.destination, pairs.wire_bytes, servers, most_cells)
    rows, columns = np.searchsorted(numbers, pairs.source), np.searchsorted(numbers, pairs.destination)
    return replace(heat_map(traffic.gpus, rows, columns, pairs.wire_bytes, servers, most_cells), numbers=tuple(numbers))


def draw_heat_map(heat: HeatMap, title: str, limits: tuple[int, int] | None = None) -> Picture:
    """The heat map with its axes and its scale; `limits` are the fewest and most bytes of the colours."""
    low, high = limits or byte_limits([heat])
    side = min(max(_SIDE / max(heat.side, 1), 1.0), 28.0)
    runs = _server_runs(heat, side)
    longest = max((len(quantities.shorten(name, _NAME_LETTERS)) for name, _, _ in runs), default=0)
    left = 40.0 + (text_width("m" * longest) + 4 if runs else 0.0)
    top = 62.0
    size = side * heat.side
    width = left + max(size + 16, 250.0, text_width(title, 13, bold=True))
    height = top + size + 62
    parts: list[Part] = [
        Words(left, 16, title, bold=True, points=13),
        Words(left, 34, "columns: receiving GPU, rows: sending GPU", paint="muted", points=11),
        Box(left, top, size, size, "empty"),
        *_squares(heat, left, top, side, low, high),
        *_frame(heat, runs, left, top, side),
        *_scale(left, top + size + 16, max(size, 200.0), low, high),
    ]
    if heat.note:
        parts.append(Words(left, height - 2, heat.note, paint="muted", points=11))
        height += 8
    return Picture(width, height, f"{title}: heat map of {format_count(heat.gpus, 'GPU')}", tuple(parts))


def byte_limits(heats: Sequence[HeatMap]) -> tuple[int, int]:
    """The fewest and the most bytes of a heat map's squares that are not empty; 1 and 1 where all are."""
    talking = np.concatenate([heat.bytes[heat.bytes > 0] for heat in heats])
    return (int(talking.min()), int(talking.max())) if len(talking) else (1, 1)


def heat_levels(moved: NDArray[Any], low: int, high: int, levels: int) -> NDArray[np.int64]:
    """The colour level of each number of bytes in a heat map, 0 to levels − 1, by its logarithm; of 0 bytes −1."""
    logs = np.log(np.clip(moved, low, high).astype(float) / low)
    reach = math.log(high / low)
    part = logs / reach if reach > 0 else np.ones(moved.shape)
    found: NDArray[np.int64] = np.where(moved > 0, np.minimum((part * levels).astype(np.int64), levels - 1), -1)
    return found


def _squares(heat: HeatMap, left: float, top: float, side: float, low: int, high: int) -> list[Part]:
    levels = heat_levels(heat.bytes, low, high, HEAT_LEVELS)
    rows, columns = np.nonzero(levels >= 0)
    if len(rows) <= _MOST_TITLES:
        gap = 1.0 if side >= 6 else 0.0
        return [
            Box(
                left + column * side,
                top + row * side,
                side - gap,
                side - gap,
                f"heat{levels[row, column]}",
                f"{_gpus(heat, row)} → {_gpus(heat, column)}: {quantities.format_bytes(int(heat.bytes[row, column]))}",
            )
            for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
        ]
    runs: dict[int, list[tuple[int, int, int]]] = {}
    for row in range(heat.side):
        column = 0
        for level, run in groupby(levels[row].tolist()):
            count = len(list(run))
            if level >= 0:
                runs.setdefault(level, []).append((row, column, count))
            column += count
    return [Cells(left, top, side, tuple(runs[level]), f"heat{level}") for level in sorted(runs)]


def _gpus(heat: HeatMap, cell: int) -> str:
    first = cell * heat.gpus_a_cell
    last = min(first + heat.gpus_a_cell, heat.gpus) - 1
    server = f" ({quantities.shorten(heat.servers[first], 40)})" if heat.servers else ""
    if first == last:
        return f"GPU {heat.gpu_number(first)}{server}"
    return f"GPUs {heat.gpu_number(first)}–{heat.gpu_number(last)}"


def _frame(heat: HeatMap, runs: list[tuple[str, int, int]], left: float, top: float, side: float) -> list[Part]:
    """Numbers of GPUs on both axes, servers at the left, and lines between servers."""
    size = side * heat.side
    parts: list[Part] = []
    step = _number_step(heat, side)
    for gpu in range(0, heat.gpus, step):
        place = (gpu // heat.gpus_a_cell + 0.5) * side
        name = str(heat.gpu_number(gpu))
        parts.append(Words(left + place, top - 5, name, "middle", "muted", 10))
        parts.append(Words(left - 5, top + place + 3.5, name, "end", "muted", 10))
    for name, first, count in runs:
        begin, end = first / heat.gpus_a_cell * side, (first + count) / heat.gpus_a_cell * side
        if first:
            parts.append(Line(((left, top + begin), (left + size, top + begin)), "grid"))
            parts.append(Line(((left + begin, top), (left + begin, top + size)), "grid"))
        parts.append(Words(left - 32, top + (begin + end) / 2 + 4, quantities.shorten(name, _NAME_LETTERS), "end"))
    corners = ((left, top), (left + size, top), (left + size, top + size), (left, top + size), (left, top))
    parts.append(Line(corners, "muted", 0.75))
    return parts


def _number_step(heat: HeatMap, side: float) -> int:
    """How many GPUs apart numbers are, so that none touches the next."""
    wide = text_width(str(heat.gpu_number(heat.gpus - 1)), 10) + 5
    fewest = max(1, math.ceil(wide / side * heat.gpus_a_cell))
    step = 1
    while step < fewest:
        step *= 2
    return step


def _server_runs(heat: HeatMap, side: float) -> list[tuple[str, int, int]]:
    """Servers as (name, first GPU, number of GPUs), where each one's GPUs follow each other and names have room."""
    runs = []
    first = 0
    for name, run in groupby(heat.servers):
        count = len(list(run))
        runs.append((name, first, count))
        first += count
    fit = all(count / heat.gpus_a_cell * side >= 13 for _, _, count in runs)
    return runs if fit and len({name for name, _, _ in runs}) == len(runs) else []


def _scale(left: float, top: float, width: float, low: int, high: int) -> list[Part]:
    """What the colours mean."""
    if high <= low:
        return [
            Box(left, top, 24, 10, f"heat{HEAT_LEVELS - 1}"),
            Words(left + 30, top + 9, quantities.format_bytes(high)),
        ]
    step = width / HEAT_LEVELS
    parts: list[Part] = [Box(left + level * step, top, step + 0.5, 10, f"heat{level}") for level in range(HEAT_LEVELS)]
    middle = round(math.sqrt(low * high))
    for place, anchor, count in ((0.0, "start", low), (0.5, "middle", middle), (1.0, "end", high)):
        parts.append(Words(left + place * width, top + 24, quantities.format_bytes(count), anchor, "muted", 11))
    return parts
