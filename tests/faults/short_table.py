"""`python -m tests.faults.short_table fault-matrix.json …`: what runs of the matrix found, as short Markdown tables.

One row for each kind of fault and of control, over all hosts, places and runs; random ones count with those of the
matrix that have the same name.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.faults.scenarios import Library

_Row = Mapping[str, Any]
"""One observation, as tests/faults/observation.py writes it."""
_NUMBER: Final = re.compile(r"^\d+\. ")
_LIBRARIES: Final = tuple(library.value for library in Library)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.short_table", description=__doc__)
    parser.add_argument("json", nargs="+", type=Path, metavar="PATH", help="what `python -m tests.faults` wrote")
    rows = [row for path in parser.parse_args().json for row in read(path)]
    print("\n\n".join((faults_table(rows), controls_table(rows), last_line(rows))))
    return 0


def read(path: Path) -> list[_Row]:
    """Every observation of a run, of the matrix and random ones.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    facts = json.loads(path.read_text())
    return [row for part in ("matrix", "random") for row in facts[part]["scenarios"]]


def faults_table(rows: Sequence[_Row]) -> str:
    """What was named, after how long, and how often that was right."""
    head = ["fault", "named"]
    head += [f"{library}: {what}" for library in _LIBRARIES for what in ("right", "flagged after")]
    lines = [head, ["---"] * len(head)]
    for name, of_name in _by_name(row for row in rows if not row["control"]).items():
        line = [name, ", ".join(sorted({row["cause"] for row in of_name if row["right"]})) or "–"]
        for library in _LIBRARIES:
            own = [row for row in of_name if row["library"] == library]
            line += [_right(own), _range(row["delay_seconds"] for row in own)]
        lines.append(line)
    return _markdown(lines)


def controls_table(rows: Sequence[_Row]) -> str:
    """How often nobody was accused who must not be."""
    head = ["control", *(f"{library}: silent" for library in _LIBRARIES)]
    lines = [head, ["---"] * len(head)]
    for name, of_name in _by_name(row for row in rows if row["control"]).items():
        lines.append([name, *(_right([row for row in of_name if row["library"] == one]) for one in _LIBRARIES)])
    return _markdown(lines)


def last_line(rows: Sequence[_Row]) -> str:
    """All of them, and how long `railscope diagnose` took."""
    faults, controls = ([row for row in rows if bool(row["control"]) is control] for control in (False, True))
    verdicts = [row["verdict"] for row in faults if row["verdict"] is not None]
    right = [verdict["delay_seconds"] for verdict in verdicts if verdict["right"]]
    return (
        f"{_right(faults)} faults named rightly, {_right(controls)} controls silent; `diagnose` right in "
        f"{len(right)}/{len(verdicts)}, {_range(right)} after the flag (median, least to most)"
    )


def _by_name(rows: Iterable[_Row]) -> dict[str, list[_Row]]:
    found: dict[str, list[_Row]] = {}
    for row in rows:
        found.setdefault(_NUMBER.sub("", row["scenario"]), []).append(row)
    return found


def _right(rows: Sequence[_Row]) -> str:
    return f"{sum(row['right'] for row in rows)}/{len(rows)}" if rows else "–"


def _range(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    middle = f"{statistics.median(known):.1f} s"
    return middle if len(known) == 1 else f"{middle} ({min(known):.1f} to {max(known):.1f})"


def _markdown(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
