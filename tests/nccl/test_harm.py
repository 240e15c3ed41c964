"""The soak that compares bare jobs with observed ones, in short: `make soak-harm` runs 500 pairs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.soak.harm import Draw, Life, Outcome, Result, table

NOTHING = float("nan")


def result(outcome: Outcome, seconds: float, *, observed: bool) -> Result:
    draw = Draw("allreduce", 1, 1, 1, 1, None, True, Life.KILLED, ())
    return Result(draw, observed, outcome, seconds)


def test_hangs_and_failures_of_both_halves_are_counted_and_times_compared_where_both_were_fine() -> None:
    shown = table(
        [
            result(Outcome.FINE, 2.0, observed=False),
            result(Outcome.FINE, 3.0, observed=True),
            result(Outcome.HUNG, NOTHING, observed=True),
            result(Outcome.FINE, 1.0, observed=False),
        ]
    )
    assert [line.split() for line in shown.splitlines()[1:5]] == [
        ["fine", "2", "1"],
        ["hung", "0", "1"],
        ["failed", "0", "0"],
        ["wrong", "result", "0", "0"],
    ]
    assert "1.500" in shown
    assert "n = 1" in shown
    assert [line.split()[-5:] for line in shown.splitlines() if Life.KILLED in line] == [
        ["2", "jobs,", "1", "not", "fine"]
    ]


@pytest.mark.root
@pytest.mark.fabric
@pytest.mark.nccl
def test_jobs_beside_agents_that_come_and_go_end_as_bare_ones_do() -> None:
    command = [sys.executable, "-m", "tests.soak.harm", "--jobs", "2", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split() for line in done.stdout.splitlines() if line.startswith(Outcome.FINE)] == [["fine", "2", "2"]]
