"""What the checks saw: rows, the table that people read, and the results that are kept.

A row says what was seen and, where that is known, what was wanted.  Its verdict is `ok` or `differs` where a wanted
value was compared, `seen` where there is nothing to compare with, `absent` where the machine has not what the check
needs, and `failed` where the check could not be made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).with_name("results")
NOTABLE_CHANGE: Final = 0.1
"""A figure that differs by less than this share from the last run's is not called changed."""
_WIDEST: Final = 68


class Verdict(StrEnum):
    """How a row came out."""

    OK = "ok"
    DIFFERS = "differs"
    SEEN = "seen"
    ABSENT = "absent"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    check: str
    what: str
    seen: str
    wanted: str = ""
    verdict: Verdict = Verdict.SEEN
    value: float | None = None
    """The figure in `seen`, to compare with other runs; its unit is in `what`."""


@dataclass(frozen=True, slots=True)
class Results:
    """One run on one machine."""

    device: str
    """As nvidia-smi names it, such as "NVIDIA H200"."""
    simulated: bool
    """There was no GPU: the CUDA test double played it."""
    date: str
    """ISO 8601, UTC."""
    revision: str
    seconds: float
    machine: dict[str, str]
    """Kernel, driver, Python, PyTorch, NCCL."""
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """Every check came to its end, and nothing differs from what was wanted."""
        return not any(row.verdict in (Verdict.FAILED, Verdict.DIFFERS) for row in self.rows)

    @property
    def file_name(self) -> str:
        """`DEVICE-DATE.json`, to the minute."""
        device = "-".join(self.device.lower().split())
        return f"{device}-{self.date[:16].replace(':', '')}.json"

    def to_json(self) -> str:
        """As kept in tests/gpu/results."""
        return json.dumps(asdict(self), indent=1) + "\n"


class Rows:
    """Rows of one check, written to a file as they come: what was seen before a check hung is not lost."""

    def __init__(self, check: str, file: Path) -> None:
        self._check = check
        self._file = file
        file.touch()

    def compared(self, what: str, seen: object, wanted: object) -> bool:
        """A row whose two sides must be equal; whether they are."""
        equal = seen == wanted
        self.add(what, _text(seen), wanted=_text(wanted), verdict=Verdict.OK if equal else Verdict.DIFFERS)
        return equal

    def figure(self, what: str, value: float, text: str = "") -> None:
        """A row with a number; `text` says more than the number."""
        self.add(what, text or f"{value:.4g}", value=value)

    def add(
        self, what: str, seen: str, *, wanted: str = "", verdict: Verdict = Verdict.SEEN, value: float | None = None
    ) -> None:
        row = Row(self._check, what, seen, wanted, verdict, value)
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_rows(file: Path) -> list[Row]:
    """What a check has written, also one that was killed while it wrote."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            rows.append(_row(json.loads(line)))
        except ValueError:
            continue  # the line that it was writing
    return rows


def read_results(file: Path) -> Results:
    """Read what was kept.

    Raises:
        ValueError, KeyError, TypeError: it is no such file.
    """
    facts = json.loads(file.read_text())
    rows = tuple(_row(row) for row in facts.pop("rows"))
    return Results(rows=rows, **facts)


def last_results(device: str, folder: Path = RESULTS) -> Results | None:
    """The newest kept results of the same device; None: there are none."""
    kept = [read_results(file) for file in folder.glob("*.json")]
    return max((one for one in kept if one.device == device), key=lambda one: one.date, default=None)


def changes(now: Iterable[Row], before: Results | None) -> list[str]:
    """What differs from an earlier run, a line each; verdicts, and figures by more than a tenth."""
    if before is None:
        return []
    known = {(row.check, row.what): row for row in before.rows}
    lines = []
    for row in now:
        then = known.pop((row.check, row.what), None)
        if then is None:
            lines.append(f"new: {row.check}: {row.what}: {row.seen} ({row.verdict})")
        elif then.verdict is not row.verdict or _moved(then.value, row.value):
            lines.append(f"changed: {row.check}: {row.what}: {then.seen} ({then.verdict}) → {row.seen} ({row.verdict})")
    return [*lines, *(f"gone: {check}: {what}: was {row.seen}" for (check, what), row in known.items())]


def as_text(rows: Sequence[Row]) -> str:
    """Aligned columns."""
    header = ("check", "what", "seen", "not as wanted", "verdict")
    cells = [
        (
            row.check,
            row.what,
            _short(row.seen),
            _short(row.wanted) if row.verdict is Verdict.DIFFERS else "",
            row.verdict,
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [header, *cells]) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *cells]
    ]
    counted = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counted.items() if count)
    return "\n".join([*(line.rstrip() for line in lines), "", summary or "nothing was seen"]) + "\n"


def _moved(then: float | None, now: float | None) -> bool:
    if then is None or now is None:
        return then is not now
    return abs(now - then) > NOTABLE_CHANGE * abs(then)


def _row(facts: dict[str, Any]) -> Row:
    return Row(**{**facts, "verdict": Verdict(facts["verdict"])})


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"
