"""The picture of docs/architecture.md: where facts come from, and the ways that they take.

    .venv/bin/python -m tests.docs.architecture      # draws docs/architecture.svg anew

Boxes stand in rows; an arrow leads from one to another, straight down or up, and says what passes.  Colours hold on
light and dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

FILE: Final = Path(__file__).resolve().parents[2] / "docs/architecture.svg"
WIDTH: Final = 960
_ROW, _HEIGHT, _TOP, _GAP = 118, 66, 34, 14
_INK, _FRAME = "#1f2933", "#52606d"
_COLOURS: Final = {"job": "#fde2c8", "kernel": "#d6e4f0", "agent": "#d9ead3", "faces": "#eadcf4", "cluster": "#f7e6a6"}


@dataclass(frozen=True, slots=True)
class Box:
    """What takes part; `column` and `span` are in twelfths of the width."""

    name: str
    says: str
    kind: str
    row: int
    column: int
    span: int

    @property
    def left(self) -> float:
        return self.column * WIDTH / 12 + _GAP

    @property
    def width(self) -> float:
        return self.span * WIDTH / 12 - 2 * _GAP

    @property
    def top(self) -> float:
        return _TOP + self.row * _ROW


@dataclass(frozen=True, slots=True)
class Way:
    """Something passes from a box to one in the next row, at this twelfth of the width."""

    at: float
    row: int
    says: str


BOXES: Final = (
    Box("Job", "processes that map NCCL; not touched", "job", 0, 0, 6),
    Box("Devices", "NICs, RDMA ports, NVLinks, the kernel's log", "job", 0, 6, 6),
    Box("BPF programs", "uprobes in NCCL, tracepoints: exact totals, rings", "kernel", 1, 0, 4),
    Box("Inspection processes", "one a tenant, few rights, bounded", "kernel", 1, 4, 4),
    Box("Readers of counters", "native threads, 1 ms to 60 s", "kernel", 1, 8, 4),
    Box("Agent", "communicators, rails, wire bytes, stalls, the governor: one snapshot a second", "agent", 2, 0, 12),
    Box("/metrics", "Prometheus' text, OpenMetrics", "faces", 3, 0, 4),
    Box("/stalls, top, verdicts", "this host, now", "faces", 3, 4, 4),
    Box("Recordings", "the minute before a stall; datasets", "faces", 3, 8, 4),
    Box("Prometheus", "rules compare the ranks of all hosts", "cluster", 4, 0, 4),
    Box("Programs of yours", "drain a node, set a condition", "cluster", 4, 4, 4),
    Box("report, matrix, compare", "what the job did", "cluster", 4, 8, 4),
    Box("Alerts, dashboards, diagnose", "who is stuck or slow, and who is to blame", "cluster", 5, 0, 4),
)
WAYS: Final = (
    Way(2, 0, "calls, completions"),
    Way(5, 0, "libraries, identity"),
    Way(10, 0, "bytes, errors, state"),
    Way(2, 1, "tables, rings"),
    Way(6, 1, "checked answers"),
    Way(10, 1, "readings"),
    Way(2, 2, "series"),
    Way(6, 2, "verdicts"),
    Way(10, 2, "events"),
    Way(2, 3, "scrapes"),
    Way(6, 3, "lines of JSON"),
    Way(10, 3, "tables"),
    Way(2, 4, "queries"),
)


def draw() -> str:
    """The picture as SVG."""
    height = _TOP + max(box.row for box in BOXES) * _ROW + _HEIGHT + 16
    parts = [
        *_frames(),
        *(part for way in WAYS for part in _arrow(way)),
        *(part for box in BOXES for part in _box(box)),
    ]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
            "<title>The way of a fact, from NCCL to a verdict</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        )
    )


def _frames() -> Iterator[str]:
    for first, last, says in ((0, 3, "each host"), (4, 5, "your servers and programs")):
        top, bottom = _TOP + first * _ROW - 24, _TOP + last * _ROW + _HEIGHT + 10
        yield (
            f'<rect x="4" y="{top}" width="{WIDTH - 8}" height="{bottom - top}" rx="8" fill="none" '
            f'stroke="{_FRAME}" stroke-dasharray="6 5"/>'
        )
        yield _text(WIDTH - 16, top + 16, says, 12, "end")


def _box(box: Box) -> Iterator[str]:
    yield (
        f'<rect x="{box.left:g}" y="{box.top:g}" width="{box.width:g}" height="{_HEIGHT}" rx="6" '
        f'fill="{_COLOURS[box.kind]}" stroke="{_FRAME}"/>'
    )
    middle = box.left + box.width / 2
    yield _text(middle, box.top + 27, box.name, 16, "middle", "bold")
    yield _text(middle, box.top + 48, box.says, 12, "middle")


def _arrow(way: Way) -> Iterator[str]:
    x, y = way.at * WIDTH / 12, _TOP + way.row * _ROW + _HEIGHT
    end = y + _ROW - _HEIGHT
    yield f'<path d="M{x:g} {y:g}V{end - 8:g}" stroke="{_INK}" stroke-width="1.5"/>'
    yield f'<path d="M{x - 5:g} {end - 9:g}h10l-5 9z" fill="{_INK}"/>'
    yield _text(x + 10, y + 29, way.says, 12, "start")


def _text(x: float, y: float, says: str, size: int, anchor: str, weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{_INK}">{escape(says)}</text>'
    )


def main() -> int:
    """Draw the picture; returns the exit status."""
    FILE.write_text(draw())
    return 0


if __name__ == "__main__":
    sys.exit(main())
