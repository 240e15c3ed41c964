"""docs/measurements.md lists every measurement of a report, with its definition and the paper it is from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from railscope.agent.analysis.report.measurements import MEASUREMENTS

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "measurements.md"
_HEAD: Final = """# Measurements

`railscope report` answers these, or says why it cannot. They are those of two papers: *Collective Communication
Profiling of Modern-day Machine Learning Workloads* (arXiv 2507.07117) and *Understanding Communication Characteristics
of Distributed Training* (APNet 2024).

| | Measurement | Definition | Paper |
|---|---|---|---|
"""


def page() -> str:
    """The page as it should be."""
    rows = [f"| {one.number} | {one.name} | {one.definition} | {', '.join(one.papers)} |\n" for one in MEASUREMENTS]
    return _HEAD + "".join(rows)


def test_the_page_lists_what_a_report_measures() -> None:
    assert PAGE.read_text() == page(), "run 'python -m tests.unit.test_measurements_page'"
    assert [one.number for one in MEASUREMENTS] == list(range(1, len(MEASUREMENTS) + 1))
    assert len({one.name for one in MEASUREMENTS}) == len(MEASUREMENTS)


if __name__ == "__main__":
    sys.exit(PAGE.write_text(page()) == 0)
