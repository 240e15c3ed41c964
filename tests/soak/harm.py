"""Whether an agent harms the jobs that it observes: `python -m tests.soak.harm [--jobs N] [--seed N] …`, see --help.

Short jobs of the real NCCL run in pairs of the same draw: one bare, one while agents come, go, are stopped and are
killed at random moments.  Whatever can happen to a job happens to bare ones too, on a stand-in for CUDA and on a busy
machine; so hangs, failures and wrong results of both halves are counted, and their times compared.  Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double, build
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job, JobError
from tests.soak.__main__ import APART

_HANG_SECONDS: Final = 60.0
_PATTERNS: Final = (
    ("allreduce", 2000),
    ("mixed", 120),
    ("grouped", 300),
    ("sendrecv", 1000),
    ("everything", 4),
    ("graph", 200),
)
"""Patterns of the driver, and iterations that take some seconds."""
_RESTS: Final = (0.0, 1.5)
"""Between two things that happen to an agent, seconds."""


class Outcome(StrEnum):
    """How a job ended."""

    FINE = "fine"
    HUNG = "hung"
    FAILED = "failed"
    WRONG = "wrong result"
    UNOBSERVED = "no agent in time"
    """An agent was not ready within a minute, on a machine that gave it no time: nothing is said of the job."""


_NO_FAULT: Final = frozenset({Outcome.FINE, Outcome.UNOBSERVED})


class Life(StrEnum):
    """What happens to agents beside a job."""

    STAYS = "there before, stays"
    COMES = "comes while it runs"
    GOES = "ends while it runs"
    KILLED = "killed while it runs"
    STOPPED = "stopped and continued"
    STOPPED_AND_KILLED = "killed while stopped"
    TURNS = "one after another"


@dataclass(frozen=True, slots=True)
class Draw:
    """One job, and what happens beside its observed half."""

    pattern: str
    iterations: int
    size_bytes: int
    communicators: int
    ranks_per_host: int
    events: str | None
    blocking: bool
    life: Life
    rests_seconds: tuple[float, ...]

    @classmethod
    def make(cls, chance: random.Random, work: float = 1.0) -> Draw:
        """`work`: so much of the usual iterations."""
        pattern, iterations = chance.choice(_PATTERNS)
        return cls(
            pattern=pattern,
            iterations=max(1, round(iterations * work)),
            size_bytes=1 << chance.randint(8, 18),
            communicators=chance.randint(1, 3),
            ranks_per_host=chance.randint(1, 2),
            events=chance.choice((None, "query", "stream")) if pattern in ("allreduce", "graph", "mixed") else None,
            blocking=chance.random() < 0.8,
            life=chance.choice(list(Life)),
            rests_seconds=tuple(chance.uniform(*_RESTS) for _ in range(8)),
        )


@dataclass(frozen=True, slots=True)
class Result:
    """One job."""

    draw: Draw
    observed: bool
    outcome: Outcome
    seconds: float
    """From start to the last result of the slowest rank, as the ranks measured it; NaN: it did not end well."""
    said: str = ""


def run_pairs(
    fabric: Fabric, double: Double, jobs: int, seed: int, seconds: float = math.inf, work: float = 1.0
) -> Iterator[Result]:
    """Run so many jobs bare and as many observed, in turn; no new pair once `seconds` are over."""
    chance, end = random.Random(seed), time.monotonic() + seconds
    for number in range(jobs):
        if time.monotonic() >= end:
            return
        draw = Draw.make(chance, work)
        for observed in (False, True) if number % 2 else (True, False):
            with tempfile.TemporaryDirectory(prefix="railscope-harm-") as folder:
                yield _run(fabric, double, draw, observed, Path(folder))


def _run(fabric: Fabric, double: Double, draw: Draw, observed: bool, folder: Path) -> Result:
    job = Job(
        fabric,
        folder,
        double,
        pattern=draw.pattern,
        iterations=draw.iterations,
        size_bytes=draw.size_bytes,
        communicators=draw.communicators,
        ranks_per_host=draw.ranks_per_host,
        events=draw.events,
        blocking=draw.blocking,
    )
    with contextlib.ExitStack() as stack:
        agents = stack.enter_context(_Agents()) if observed else None
        try:
            if agents is not None and draw.life is not Life.COMES:
                agents.begin()
            with job:
                job.ready(_HANG_SECONDS)
                job.start()
                if agents is not None:
                    agents.live(draw, job)
                reports = job.wait(_HANG_SECONDS)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return Result(draw, observed, Outcome.UNOBSERVED, float("nan"), str(error))
        except JobError as error:
            hung = "did not" in str(error).splitlines()[0]
            return Result(draw, observed, Outcome.HUNG if hung else Outcome.FAILED, float("nan"), str(error))
    outcome = Outcome.FINE if all(report.verified for report in reports) else Outcome.WRONG
    return Result(draw, observed, outcome, max(report.seconds for report in reports))


class _Agents:
    """At most one agent at a time, as processes that are begun and not waited for."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._agent: AgentProcess | None = None

    def __enter__(self) -> _Agents:
        return self

    def __exit__(self, *about: object) -> None:
        if self._agent is not None:
            self._agent.process.send_signal(signal.SIGCONT)
        # One that does not end in time has been killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._stack.close()

    def begin(self) -> None:
        """Start one, and wait until it is ready."""
        self._agent = self._stack.enter_context(AgentProcess())

    def end(self, how: signal.Signals) -> None:
        """Send it a signal that ends it, and wait for its end."""
        assert self._agent is not None
        self._agent.process.send_signal(how)
        self._agent.process.wait(30)
        self._stack.close()
        self._agent = None

    def live(self, draw: Draw, job: Job) -> None:
        """Let happen what was drawn, until the job's ranks have ended."""
        rests = iter(draw.rests_seconds)
        self._rest(next(rests), job)
        match draw.life:
            case Life.COMES:
                self.begin()
            case Life.GOES:
                self.end(signal.SIGTERM)
            case Life.KILLED:
                self.end(signal.SIGKILL)
            case Life.STOPPED | Life.STOPPED_AND_KILLED:
                assert self._agent is not None
                self._agent.process.send_signal(signal.SIGSTOP)
                self._rest(next(rests), job)
                if draw.life is Life.STOPPED:
                    self._agent.process.send_signal(signal.SIGCONT)
                else:
                    self.end(signal.SIGKILL)
            case Life.TURNS:
                for at, rest in enumerate(rests):
                    if not _runs(job):
                        return
                    self.end(signal.SIGKILL if at % 2 else signal.SIGTERM)
                    self.begin()
                    self._rest(rest, job)
            case Life.STAYS:
                pass

    @staticmethod
    def _rest(seconds: float, job: Job) -> None:
        end = time.monotonic() + seconds
        while _runs(job) and time.monotonic() < end:
            time.sleep(0.02)


def _runs(job: Job) -> bool:
    return any(Path(f"/proc/{pid}/exe").exists() for pid in job.pids)


def table(results: Sequence[Result]) -> str:
    """Both halves, by outcome, and how long jobs took where both of a pair were fine."""
    lines = [f"{'':24}{'bare':>8}{'observed':>10}"]
    by_half = {half: Counter(one.outcome for one in results if one.observed is half) for half in (False, True)}
    lines += [f"{outcome:24}{by_half[False][outcome]:>8}{by_half[True][outcome]:>10}" for outcome in Outcome]
    ratios = _ratios(results)
    if ratios:
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        lines.append(
            f"time observed / bare, medians of pairs: {middle:.3f} ({low:.3f} … {high:.3f}), n = {len(ratios)}"
        )
    for life in Life:
        of_life = [one for one in results if one.observed and one.draw.life is life]
        bad = [one for one in of_life if one.outcome not in _NO_FAULT]
        lines.append(f"  agents: {life:24}{len(of_life):>6} jobs, {len(bad)} not fine")
    return "\n".join(lines)


def _ratios(results: Sequence[Result]) -> list[float]:
    pairs: dict[int, dict[bool, Result]] = {}
    for number, one in enumerate(results):
        pairs.setdefault(number // 2, {})[one.observed] = one
    return [
        pair[True].seconds / pair[False].seconds
        for pair in pairs.values()
        if len(pair) == 2 and all(one.outcome is Outcome.FINE for one in pair.values()) and pair[False].seconds
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.harm", description=__doc__)
    parser.add_argument("--jobs", metavar="N", type=int, default=500, help="jobs bare, and as many observed")
    parser.add_argument("--seed", metavar="N", type=int, default=1)
    parser.add_argument("--seconds", metavar="N", type=float, default=math.inf, help="begin no pair after so long")
    parser.add_argument(
        "--work", metavar="RATIO", type=float, default=1.0, help="of the usual iterations, for a machine that is busy"
    )
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.apart:
        words = [*APART, sys.executable, "-m", "tests.soak.harm", *sys.argv[1:], "--apart"]
        os.execvp(words[0], words)
    results: list[Result] = []
    with Fabric(hosts=2, rails=2) as fabric:
        for result in run_pairs(fabric, build(), options.jobs, options.seed, options.seconds, options.work):
            results.append(result)
            if result.outcome is not Outcome.FINE:
                half = "observed" if result.observed else "bare"
                print(f"{half}, {result.outcome}: {result.draw}\n{result.said}", flush=True)
            if len(results) % 50 == 0:
                print(f"{len(results)} of {2 * options.jobs} jobs\n{table(results)}", file=sys.stderr, flush=True)
    print(table(results))
    bad = Counter(one.observed for one in results if one.outcome not in _NO_FAULT)
    return int(bad[True] > bad[False])


if __name__ == "__main__":
    sys.exit(main())
