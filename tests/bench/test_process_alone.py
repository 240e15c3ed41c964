"""A process that is stopped and goes on in turns."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.process_alone import kept_beside
from tests.bench.target import BenchError


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as running:
        try:
            yield running
        finally:
            running.kill()


def stopped(process: subprocess.Popen[bytes]) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def await_change(process: subprocess.Popen[bytes]) -> None:
    """Until it has stopped, or gone on: a signal takes its time on a busy host."""
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WCONTINUED)


def test_the_rate_beside_a_process_is_over_those_around_it_with_the_process_stopped(
    process: subprocess.Popen[bytes],
) -> None:
    drift = iter((100.0, 105.0, 110.0, 115.0, 120.0))

    def rate(_seconds: float) -> float:
        return next(drift) * (1.0 if stopped(process) else 0.9)

    kept = kept_beside(process.pid, rate, turns=2, sleep=lambda _: await_change(process))
    assert kept == pytest.approx([0.9, 0.9])


def test_a_process_goes_on_also_where_the_job_ends(process: subprocess.Popen[bytes]) -> None:
    def rate(_seconds: float) -> float:
        raise BenchError("the NCCL job ended before its time")

    with pytest.raises(BenchError, match="ended before its time"):
        kept_beside(process.pid, rate, sleep=lambda _: await_change(process))
    await_change(process)
    assert not stopped(process)
