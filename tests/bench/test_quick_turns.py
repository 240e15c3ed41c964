"""What comes and goes in turns: an agent with the job that it observes, programs that are attached and detached."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.bench.quick_turns import RatedJob, kept_beside_agent, kept_beside_programs, whichever_is_observed
from tests.bench.target import BenchError


@contextmanager
def running() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with running() as process:
        yield process


@dataclass(frozen=True, slots=True)
class Cast:
    """Processes that stand for an agent and two jobs."""

    agent: subprocess.Popen[bytes]
    observed: subprocess.Popen[bytes]
    other: subprocess.Popen[bytes]

    def await_turn(self, *, of_the_observed: bool) -> None:
        await_state(self.agent, stopped_wanted=not of_the_observed)
        await_state(self.observed, stopped_wanted=not of_the_observed)
        await_state(self.other, stopped_wanted=of_the_observed)


@pytest.fixture
def cast() -> Iterator[Cast]:
    with running() as agent, running() as observed, running() as other:
        yield Cast(agent, observed, other)


def stopped(process: subprocess.Popen[bytes]) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def await_state(process: subprocess.Popen[bytes], *, stopped_wanted: bool = False) -> None:
    deadline = time.monotonic() + 10
    while stopped(process) != stopped_wanted:
        assert time.monotonic() < deadline, "neither stops nor goes on within 10 s"
        time.sleep(0.001)


def test_an_agent_goes_on_with_the_job_that_it_observes_and_stops_with_the_other(cast: Cast) -> None:
    drift = iter((100.0, 105.0, 110.0, 115.0, 120.0))

    def beside(_seconds: float) -> float:
        cast.await_turn(of_the_observed=True)
        return next(drift) * 0.9

    def without(_seconds: float) -> float:
        cast.await_turn(of_the_observed=False)
        return next(drift)

    observed, other = RatedJob((cast.observed.pid,), beside), RatedJob((cast.other.pid,), without)
    kept = kept_beside_agent(cast.agent.pid, observed, other, turns=2, sleep=lambda _: None)
    assert kept == pytest.approx([0.9, 0.9])
    cast.await_turn(of_the_observed=True)


def test_for_comparison_the_jobs_take_turns_as_long_without_an_agent(cast: Cast) -> None:
    lengths: set[float] = set()

    def rate(seconds: float) -> float:
        assert not stopped(cast.agent)
        lengths.add(seconds)
        return 100.0

    observed, other = RatedJob((cast.observed.pid,), rate), RatedJob((cast.other.pid,), rate)
    assert kept_beside_agent(None, observed, other, turns=3, sleep=lambda _: None) == [1.0, 1.0, 1.0]
    assert len(lengths) == 1


def test_an_agent_goes_on_also_where_a_job_ends(cast: Cast) -> None:
    def rate(_seconds: float) -> float:
        cast.await_turn(of_the_observed=False)
        raise BenchError("the NCCL job ended before its time")

    observed, other = RatedJob((cast.observed.pid,), rate), RatedJob((cast.other.pid,), rate)
    with pytest.raises(BenchError, match="ended before its time"):
        kept_beside_agent(cast.agent.pid, observed, other, turns=1, sleep=lambda _: None)
    cast.await_turn(of_the_observed=True)


def test_which_of_two_jobs_is_faster_does_not_matter() -> None:
    faster = 1.03
    assert whichever_is_observed([0.97 * faster, 0.99 * faster], [0.97 / faster, 0.99 / faster]) == pytest.approx(
        [0.97, 0.99]
    )


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
