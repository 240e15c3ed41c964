"""What the bench measured: figures with their spread, held against their targets.

Every figure is a median with its quartiles.  A ratio is taken round by round between neighbours in time and only then
summarised, so that a slow minute of the machine falls on both sides of it.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path


class Bound(Enum):
    """On which side of its limit a figure should lie."""

    AT_MOST = "≤"
    BELOW = "<"
    AT_LEAST = "≥"
    EXACTLY = "="


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure is held against."""

    bound: Bound
    limit: float

    def met_by(self, value: float) -> bool:
        match self.bound:
            case Bound.AT_MOST:
                return value <= self.limit
            case Bound.BELOW:
                return value < self.limit
            case Bound.AT_LEAST:
                return value >= self.limit
            case Bound.EXACTLY:
                return value == self.limit

    def __str__(self) -> str:
        return f"{self.bound.value} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    part: str
    name: str
    unit: str
    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    samples: int
    target: Target | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "met" if self.target.met_by(self.median) else "MISSED"


@dataclass(frozen=True, slots=True)
class Omission:
    """Something that could not be measured here, and why."""

    part: str
    name: str
    reason: str


Line = Figure | Omission


def figure(
    part: str, name: str, unit: str, values: Iterable[float], *, target: Target | None = None, note: str = ""
) -> Figure:
    """Summarise samples in the order they were taken; at least one."""
    samples = sorted(values)
    if len(samples) < 2:
        low = high = samples[0]
    else:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Figure(part, name, unit, statistics.median(samples), low, high, len(samples), target, note)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Round by round; both sequences have one value a round."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def table(lines: Sequence[Line]) -> str:
    """The lines as text."""
    head = ("part", "figure", "median", "quartiles", "unit", "n", "target", "", "note")
    rows: list[tuple[str, ...]] = [head]
    for line in lines:
        if isinstance(line, Omission):
            rows.append((line.part, line.name, "–", "", "", "", "", "", f"not measured: {line.reason}"))
            continue
        quartiles = f"{_number(line.low)} … {_number(line.high)}" if line.samples > 1 else ""
        target = "" if line.target is None else str(line.target)
        rows.append(
            (
                line.part,
                line.name,
                _number(line.median),
                quartiles,
                line.unit,
                str(line.samples),
                target,
                line.verdict,
                line.note,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def write_json(path: Path, lines: Sequence[Line]) -> None:
    """Write the lines and the machine they were measured on.

    Raises:
        OSError: the file cannot be written.
    """
    machine = {"kernel": platform.release(), "machine": platform.machine(), "python": platform.python_version()}
    figures = []
    for line in lines:
        if isinstance(line, Figure):
            facts = asdict(line)
            facts["target"] = None if line.target is None else str(line.target)
            figures.append(facts | {"verdict": line.verdict})
    omissions = [asdict(line) for line in lines if isinstance(line, Omission)]
    text = json.dumps({"machine": machine, "figures": figures, "omissions": omissions}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _number(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.2f}" if magnitude >= 1 else f"{value:.3f}"
