"""What comes and goes in turns: a process that is stopped and goes on, programs that are attached and detached."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.bench.quick_turns import kept_beside_process, kept_beside_programs
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


def await_state(process: subprocess.Popen[bytes], *, stopped_wanted: bool = False) -> None:
    deadline = time.monotonic() + 10
    while stopped(process) != stopped_wanted:
        assert time.monotonic() < deadline, "neither stops nor goes on within 10 s"
        time.sleep(0.001)


def test_the_rate_beside_a_process_is_over_those_around_it_with_the_process_stopped(
    process: subprocess.Popen[bytes],
) -> None:
    drift = iter((100.0, 105.0, 110.0, 115.0, 120.0))

    def rate(_seconds: float) -> float:
        return next(drift) * (1.0 if stopped(process) else 0.9)

    kept = kept_beside_process(process.pid, rate, turns=2, sleep=lambda _: await_change(process))
    assert kept == pytest.approx([0.9, 0.9])


def test_a_process_goes_on_also_where_the_job_ends(process: subprocess.Popen[bytes]) -> None:
    def rate(_seconds: float) -> float:
        raise BenchError("the NCCL job ended before its time")

    with pytest.raises(BenchError, match="ended before its time"):
        kept_beside_process(process.pid, rate, sleep=lambda _: await_change(process))
    await_change(process)
    assert not stopped(process)


def test_the_rate_beside_programs_is_over_the_bare_ones_around_it(process: subprocess.Popen[bytes]) -> None:
    drift = iter((100.0, 105.0, 110.0, 115.0, 120.0, 125.0, 130.0, 135.0, 140.0))
    attached: list[str] = []
    order: list[str] = []

    def rate(_seconds: float) -> float:
        await_state(process)
        return next(drift) * {"dear": 0.9, "cheap": 0.99}.get("".join(attached), 1.0)

    @contextmanager
    def programs(name: str) -> Iterator[None]:
        await_state(process, stopped_wanted=True)  # nothing is attached while the job runs
        attached.append(name)
        order.append(name)
        yield
        await_state(process, stopped_wanted=True)  # nor detached
        attached.clear()

    named = {name: partial(programs, name) for name in ("dear", "cheap")}
    kept = kept_beside_programs(named, (process.pid,), rate, turns=2, sleep=lambda _: None)
    assert order == ["dear", "cheap", "cheap", "dear"]
    assert kept["dear"] == pytest.approx([0.9, 0.9])
    assert kept["cheap"] == pytest.approx([0.99, 0.99])


def test_a_job_is_stopped_for_as_long_whatever_comes_and_goes(process: subprocess.Popen[bytes]) -> None:
    now = 0.0
    starts: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    @contextmanager
    def slow() -> Iterator[None]:
        sleep(0.01)
        yield
        sleep(0.2)

    def rate(seconds: float) -> float:
        starts.append(now)
        sleep(seconds)
        return 1.0

    kept_beside_programs(
        {"slow": slow, "nobody": nullcontext}, (process.pid,), rate, turns=2, sleep=sleep, clock=lambda: now
    )
    assert len(starts) == 9
    assert {round(later - earlier, 6) for earlier, later in pairwise(starts)} == {2.5}


@pytest.mark.parametrize("when", ["as it comes", "beside it"])
def test_a_job_goes_on_also_where_programs_fail(process: subprocess.Popen[bytes], when: str) -> None:
    attached = False

    @contextmanager
    def failing() -> Iterator[None]:
        nonlocal attached
        await_state(process, stopped_wanted=True)
        if when == "as it comes":
            raise BenchError("the kernel refuses")
        attached = True
        try:
            yield
        finally:
            attached = False

    def rate(_seconds: float) -> float:
        if attached:
            raise BenchError("the NCCL job ended before its time")
        return 1.0

    with pytest.raises(BenchError, match="refuses" if when == "as it comes" else "ended before its time"):
        kept_beside_programs({"failing": failing}, (process.pid,), rate, turns=1, sleep=lambda _: None)
    await_state(process)
    assert not attached
