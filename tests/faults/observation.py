"""What came of one scenario, and the table of all of them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.scenarios import Expected, Scenario


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `railscope diagnose` said."""

    headline: str
    right: bool
    delay_seconds: float
    """From the first flag on any host to the first right verdict, or to the last one."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One scenario, run once."""

    scenario: str
    library: str
    hosts: int
    control: bool
    expected: str
    cause: str
    """Of the right accusation, else of the first one; empty: nobody was accused."""
    blamed: str
    delay_seconds: float | None
    """From the fault to the first right accusation on its host."""
    first_seconds: float | None
    """From the fault to the first accusation on any host."""
    cleared_seconds: float | None
    """From the undoing to the first moment without any accusation; None: did not clear, or is not to."""
    verdict: Verdict | None
    said: tuple[str, ...]
    """Every accusation that was made."""
    problems: tuple[str, ...]
    """Why it fails; empty: it does not."""

    @property
    def right(self) -> bool:
        return not self.problems


def expectation(scenario: Scenario) -> str:
    """What must be said, in few words."""
    expected: Expected = scenario.expected
    if expected.writer is not None:
        return f"no stall, rank {expected.writer} writes"
    if expected.silent:
        return "silence, or a flag that clears" if expected.flag_allowed else "silence"
    words = [" or ".join(sorted(expected.causes))]
    words += [f"rank {expected.rank}"] if expected.rank is not None else []
    words += [f"rail {expected.rail}"] if expected.rail is not None else []
    return " ".join(words)


def table(observations: Iterable[Observation]) -> str:
    """One line a scenario, for a terminal 140 columns wide and for docs/faults.md."""
    head = ("scenario", "library", "hosts", "expected", "cause seen", "blamed", "delay", "cleared", "diagnose", "")
    rows = [head]
    for one in observations:
        verdict = "" if one.verdict is None else ("right" if one.verdict.right else "WRONG")
        verdict += f" +{one.verdict.delay_seconds:.1f} s" if one.verdict is not None and one.verdict.right else ""
        rows.append(
            (
                one.scenario,
                one.library,
                str(one.hosts),
                one.expected,
                one.cause or "–",
                one.blamed or "–",
                _seconds(one.delay_seconds),
                _seconds(one.cleared_seconds),
                verdict or "–",
                "ok" if one.right else "FAILED: " + "; ".join(one.problems),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )


def summary(observations: Sequence[Observation]) -> str:
    """How many were right, and how many controls were silent."""
    faults = [one for one in observations if not one.control]
    controls = [one for one in observations if one.control]
    right = sum(one.right for one in faults)
    alarms = sum(not one.right for one in controls)
    parts = [f"{right} of {len(faults)} faults named rightly"] if faults else []
    parts += [f"{alarms} false alarms in {len(controls)} controls"] if controls else []
    return ", ".join(parts)


def write_json(path: Path, matrix: Sequence[Observation], drawn: Sequence[Observation], *, seed: int) -> None:
    """Everything, for docs/faults.md and for comparison with other runs."""
    facts = {
        "machine": {"kernel": platform.release(), "processors": _processors(), "system": platform.machine()},
        "matrix": {"summary": summary(matrix), "scenarios": [_facts(one) for one in matrix]},
        "random": {"seed": seed, "summary": summary(drawn), "scenarios": [_facts(one) for one in drawn]},
    }
    path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def _facts(observation: Observation) -> dict[str, object]:
    return {**asdict(observation), "right": observation.right}


def _processors() -> int:

    return os.cpu_count() or 1


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
