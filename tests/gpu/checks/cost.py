"""What an agent takes from a job on a GPU: its rate beside a level over its rate without, in turns (tests/bench).

Two jobs alike take turns; the agent observes one of them.  A turn is a fraction of a second here, and all of it has a
minute, so a figure is good to some percents: the row "nobody" tells to how many.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median
from typing import Final

import psutil

from tests.bench.counted_job import share_cores
from tests.bench.quick_turns import RatedJob, kept_beside_agent
from tests.gpu.checks.times import size_text
from tests.gpu.lane import Lane
from tests.gpu.rails import two_hosts
from tests.gpu.ranks import Ranks, RanksError
from tests.gpu.table import Verdict

LEVELS: Final = ("nobody", "counts", "auto", "completion", "rails", "all")
"""The agent's levels, its own choice, and no agent at all, for comparison."""
SIZES: Final[Mapping[int, tuple[str, ...]]] = {8: LEVELS, 64 << 10: LEVELS, 16 << 20: LEVELS[:3]}
"""Payload in bytes, and what is measured at it."""
TURNS: Final = 3
_TURN_SECONDS: Final = 0.25
_RESUMED_SECONDS: Final = 0.1
_LEAST_SECONDS: Final = 8.0
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
        _training(lane, observed)
        for size, levels in {8: LEVELS[:2]}.items() if lane.short else SIZES.items():
            with observed.looping(size) as one, other.looping(size) as twin:
                for level in levels:
                    _level(lane, observed, one, twin, size, level)


def _level(lane: Lane, ranks: Ranks, observed: RatedJob, other: RatedJob, size: int, level: str) -> None:
    what = f"rate kept, AllReduce of {size_text(size)}, {level}"
    if lane.seconds_left < _LEAST_SECONDS:
        lane.rows.add(what, "the time was up", verdict=Verdict.FAILED)
        return

    def kept(agent: int | None) -> None:
        ratios = kept_beside_agent(
            agent, observed, other, turns=TURNS, turn_seconds=_TURN_SECONDS, resumed_seconds=_RESUMED_SECONDS
        )
        text = f"{median(ratios):.3f} ({min(ratios):.3f} … {max(ratios):.3f})"
        lane.rows.figure(what, median(ratios), text)

    if level == "nobody":
        kept(None)
        return
    with lane.agent(f"{level}-{size}", "--level", level, "--stall.floor", "60s", *ranks.pid_options) as agent:
        agent.until(lambda: bool(agent.samples("railscope_probe_attached")), _ATTACH_SECONDS)
        process = psutil.Process(agent.process.pid)
        before, began = process.cpu_times(), lane.seconds_left
        kept(agent.process.pid)
        after = process.cpu_times()
        seconds = began - lane.seconds_left
        spent = (after.user + after.system - before.user - before.system) / seconds
        memory = process.memory_info().rss / 1e6
        lane.rows.figure(f"agent beside it, {size_text(size)}, {level}: CPU, % of a core", spent * 100)
        lane.rows.figure(f"agent beside it, {size_text(size)}, {level}: memory, MB", memory)
        if level == "auto":
            rests = sorted({value for _, value in agent.samples("railscope_probe_level")})
            lane.rows.add(f"level that it chose, {size_text(size)}", ", ".join(f"{value:.0f}" for value in rests))
        # Beside calls back to back on few cores, taking probes off may wait for tens of seconds.
        observed.stop()


def _training(lane: Lane, ranks: Ranks) -> None:
    """The step of a DDP training with and without an agent."""
    try:
        ranks.ask("build", kind="ddp")
        ranks.ask("train", steps=5)
        without = median(ranks.ask("train", steps=_STEPS)[0])
        with lane.agent("training", *ranks.pid_options) as agent:
            agent.until(lambda: bool(agent.samples("railscope_probe_attached")), _ATTACH_SECONDS)
            ranks.ask("train", steps=5)
            beside = median(ranks.ask("train", steps=_STEPS)[0])
    except RanksError as error:
        verdict = Verdict.ABSENT if "NotImplementedError" in str(error) else Verdict.FAILED
        lane.rows.add("DDP training: step beside an agent over without", str(error), verdict=verdict)
        return
    text = f"{beside / without:.3f} ({beside * 1e3:.2f} of {without * 1e3:.2f} ms)"
    lane.rows.figure("DDP training: step beside an agent over without", beside / without, text)
