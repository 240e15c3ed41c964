"""What an agent takes from a job on a GPU: its rate beside a level over its rate without, in turns (tests/bench).

Two jobs alike take turns; the agent observes one of them.  A turn is a second here, and all of it has a minute, so a
figure is good to some percents: the row "nobody" tells to how many.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median
from typing import Final

import psutil

from tests.bench.counted_job import share_cores
from tests.bench.quick_turns import kept_beside_agent
from tests.gpu.checks.times import size_text
from tests.gpu.lane import Lane
from tests.gpu.rails import two_hosts
from tests.gpu.ranks import Loop, Ranks, RanksError
from tests.gpu.table import Verdict

LEVELS: Final = ("nobody", "counts", "auto", "all", "completion", "rails")
"""The agent's levels, its own choice, and no agent at all, for comparison."""
SIZES: Final[Mapping[int, tuple[str, ...]]] = {8: LEVELS, 64 << 10: LEVELS[:4], 16 << 20: LEVELS[:3]}
"""Payload in bytes, and what is measured at it."""
TURNS: Final = 2
_TURN_SECONDS: Final = 1.0
_SHORT_TURN_SECONDS: Final = 0.25
_RESUMED_SECONDS: Final = 0.1
_LEAST_SECONDS: Final = 10.0
_STEPS: Final = 30
_ATTACH_SECONDS: Final = 8.0


def run(lane: Lane) -> None:
    with ExitStack() as stack:
        two = stack.enter_context(two_hosts())
        observed = stack.enter_context(lane.ranks(two, "observed"))
        other = stack.enter_context(lane.ranks(two, "other", port_offset=1))
        observed.join()
        other.join()
        for job in (observed, other):
            share_cores(job.pids)
        with lane.attempt("training"):
            _training(lane, observed)
        for size, levels in {8: LEVELS[:2]}.items() if lane.short else SIZES.items():
            with lane.attempt(f"AllReduce of {size_text(size)}"):
                with observed.looping(size) as one, other.looping(size) as twin:
                    for level in levels:
                        with lane.attempt(f"{size_text(size)}, {level}"):
                            _level(lane, observed, one, twin, size, level)


def _level(lane: Lane, ranks: Ranks, observed: Loop, other: Loop, size: int, level: str) -> None:
    what = f"AllReduce of {size_text(size)}, {level}"
    if lane.seconds_left < _LEAST_SECONDS:
        lane.rows.add(f"{what}: rate kept", "the time was up", verdict=Verdict.FAILED)
        return
    # Beside calls back to back on few cores, attaching and detaching may wait for tens of seconds.
    observed.job.stop()
    other.job.stop()
    if level == "nobody":
        _turns(lane, what, None, observed, other)
        return
    options = ("--level", level, "--stall.floor", "60s", *ranks.pid_options)
    with lane.agent(f"{level}-{size}", *options) as agent:
        agent.until(lambda: bool(agent.samples("railscope_probe_attached")), _ATTACH_SECONDS)
        process = psutil.Process(agent.process.pid)
        before, began = process.cpu_times(), time.monotonic()
        _turns(lane, what, agent.process.pid, observed, other)
        after = process.cpu_times()
        spent = (after.user + after.system - before.user - before.system) / (time.monotonic() - began)
        lane.rows.figure(f"{what}: the agent's CPU, % of a core", spent * 100)
        lane.rows.figure(f"{what}: the agent's memory, MB", process.memory_info().rss / 1e6)
        if level == "auto":
            rests = sorted({value for _, value in agent.samples("railscope_probe_level")})
            lane.rows.add(f"{what}: level that it chose", ", ".join(f"{value:.0f}" for value in rests))
        observed.job.stop()


def _turns(lane: Lane, what: str, agent: int | None, observed: Loop, other: Loop) -> None:
    """The rate that is kept, and what each call takes of its thread: a GPU that two share hides the second in the
    first."""
    first, first_other = observed.spent(), other.spent()
    ratios = kept_beside_agent(
        agent,
        observed.job,
        other.job,
        turns=TURNS,
        turn_seconds=_SHORT_TURN_SECONDS if lane.simulated else _TURN_SECONDS,
        resumed_seconds=_RESUMED_SECONDS,
    )
    observed.job.stop()
    shared = "" if lane.simulated else "; ranks share the GPU in time slices"
    text = f"{median(ratios):.3f} ({min(ratios):.3f} … {max(ratios):.3f}{shared})"
    lane.rows.figure(f"{what}: rate kept", median(ratios), text)
    beside, without = _ns_per_call(first, observed.spent()), _ns_per_call(first_other, other.spent())
    text = f"{beside - without:.0f} ({beside:.0f} beside it, {without:.0f} without)"
    lane.rows.figure(f"{what}: thread's CPU a call, ns more", beside - without, text)


def _ns_per_call(before: tuple[int, int], after: tuple[int, int]) -> float:
    return (after[1] - before[1]) / max(1, after[0] - before[0])


def _training(lane: Lane, ranks: Ranks) -> None:
    """The step of a DDP training with and without an agent."""
    what = "DDP training: step beside an agent over without"
    if not ranks.trains:
        lane.rows.add(what, "the double trains no model", verdict=Verdict.ABSENT)
        return
    try:
        ranks.ask("build", kind="ddp")
        ranks.ask("train", steps=5)
        without = median(ranks.ask("train", steps=_STEPS)[0])
        with lane.agent("training", *ranks.pid_options) as agent:
            agent.until(lambda: bool(agent.samples("railscope_probe_attached")), _ATTACH_SECONDS)
            ranks.ask("train", steps=5)
            beside = median(ranks.ask("train", steps=_STEPS)[0])
    except RanksError as error:
        lane.rows.add(what, str(error), verdict=Verdict.FAILED)
        return
    text = f"{beside / without:.3f} ({beside * 1e3:.2f} of {without * 1e3:.2f} ms)"
    lane.rows.figure(what, beside / without, text)
