"""How long operations take, by CUDA's events around them (the truth) and by the agent, for each of its sources.

The job runs one AllReduce at a time.  The agent's histograms have buckets of powers of two, so its medians and 99th
percentiles are good to a bucket and its means exact; of the network's completions a recording holds every single one,
which are compared with the events one by one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Final

from railscope.agent.recording.file import read_recording
from tests.fabric.agent_process import AgentProcess
from tests.gpu.lane import Lane
from tests.gpu.rails import two_hosts
from tests.gpu.ranks import Ranks
from tests.gpu.table import Verdict

SIZES: Final[Mapping[int, int]] = {
    1 << 10: 40,
    16 << 10: 40,
    256 << 10: 40,
    4 << 20: 20,
    64 << 20: 8,
    256 << 20: 4,
}
"""Payload of an AllReduce in bytes, and how often it is timed."""
SHORT_SIZES: Final[Mapping[int, int]] = {1 << 10: 20, 64 << 10: 20}
SOURCES: Final = ("proxy", "cuda")
_WARM_UPS: Final = 3
_DURATIONS: Final = "railscope_collective_duration_seconds"
_LEAST_SECONDS: Final = 8.0
_UNITS: Final = ("B", "KiB", "MiB")


@dataclass(frozen=True, slots=True)
class Durations:
    """One histogram of the agent."""

    count: float
    sum_seconds: float
    below: Mapping[float, float]
    """By upper bound in seconds: how many were no longer."""

    def since(self, then: Durations) -> Durations:
        """What has come since."""
        below = {bound: count - then.below.get(bound, 0.0) for bound, count in self.below.items()}
        return Durations(self.count - then.count, self.sum_seconds - then.sum_seconds, below)

    def quantile_seconds(self, share: float) -> float:
        """The upper bound of the bucket in which so many of all have been reached."""
        reached = (bound for bound in sorted(self.below) if self.below[bound] >= share * self.count)
        return next(reached, float("inf"))


def run(lane: Lane) -> None:
    recordings = lane.folder / "recordings"
    sizes = SHORT_SIZES if lane.short else SIZES
    truth: dict[int, list[list[float]]] = {}
    options = ["--level", "all", "--series.detail", "buckets", "--recordings.directory", str(recordings)]
    with two_hosts() as two, lane.ranks(two) as ranks:
        with lane.agent("all", *options, *ranks.pid_options) as agent:
            ranks.join()
            made = 0
            for payload, times in sizes.items():
                if lane.seconds_left < _LEAST_SECONDS:
                    lane.rows.add(f"AllReduce of {size_text(payload)}", "the time was up", verdict=Verdict.FAILED)
                    continue
                ranks.ask("timed", operation="AllReduce", payload_bytes=payload, times=_WARM_UPS)
                made += _WARM_UPS
                before = _when_counted(agent, made)
                truth[payload] = ranks.ask("timed", operation="AllReduce", payload_bytes=payload, times=times)
                made += times
                after = _when_counted(agent, made)
                for source in SOURCES:
                    _size_row(lane, payload, source, truth[payload], after[source].since(before[source]))
            os.kill(agent.process.pid, signal.SIGUSR2)
            agent.until(lambda: any(recordings.glob("*.npz")), 10)
            lane.keep_metrics(agent)
    _one_by_one(lane, ranks, truth)


def size_text(size_bytes: int) -> str:
    """As in "64 KiB"."""
    power = min(len(_UNITS) - 1, (size_bytes.bit_length() - 1) // 10)
    return f"{size_bytes >> 10 * power} {_UNITS[power]}"


def _when_counted(agent: AgentProcess, operations: int) -> dict[str, Durations]:
    """The histograms of each source once they have so many operations of both ranks; or whatever they come to."""

    def durations(source: str) -> Durations:
        labels = {"op": "AllReduce", "source": source}
        count = sum(value for _, value in agent.samples(f"{_DURATIONS}_count", **labels))
        total = sum(value for _, value in agent.samples(f"{_DURATIONS}_sum", **labels))
        below = {float(found["le"]): value for found, value in agent.samples(f"{_DURATIONS}_bucket", **labels)}
        return Durations(count, total, below)

    # A source that sees none, or not all, has a row that says how many.
    agent.comes_true(lambda: all(durations(source).count >= 2 * operations for source in SOURCES), 3)
    return {source: durations(source) for source in SOURCES}


def _size_row(lane: Lane, payload: int, source: str, truth_ms: Sequence[Sequence[float]], seen: Durations) -> None:
    what = f"AllReduce of {size_text(payload)}, {source}"
    truth = sorted(value for rank in truth_ms for value in rank)
    if seen.count == 0:
        lane.rows.add(f"{what}: mean over CUDA's", "no duration was seen", verdict=Verdict.ABSENT)
        return
    seen_ms = seen.sum_seconds / seen.count * 1e3
    text = (
        f"{seen_ms / mean(truth):.3f} ({seen_ms:.3g} of {mean(truth):.3g} ms; "
        f"p50 ≤ {seen.quantile_seconds(0.5) * 1e3:.3g} of {median(truth):.3g}, "
        f"p99 ≤ {seen.quantile_seconds(0.99) * 1e3:.3g} of {truth[int(len(truth) * 0.99)]:.3g}; "
        f"{seen.count:.0f} of {len(truth)})"
    )
    lane.rows.figure(f"{what}: mean over CUDA's", seen_ms / mean(truth), text)


def _one_by_one(lane: Lane, ranks: Ranks, truth_ms: Mapping[int, Sequence[Sequence[float]]]) -> None:
    """Every completion in the recording beside the events around the same call."""
    file = next((lane.folder / "recordings").glob("*.npz"))
    recording = read_recording(file)
    ranks_of = {
        one.instance: int(one.identity.rank) for one in recording.communicators if one.identity.pid in ranks.pids
    }
    for payload, by_rank in truth_ms.items():
        differences = []
        for instance, rank in ranks_of.items():
            done = recording.completions
            chosen = done[(done["instance"] == instance) & (done["payload_bytes"] == payload)]
            chosen = chosen[chosen["sequence"].argsort()][_WARM_UPS:]
            if len(chosen) == len(by_rank[rank]):
                seen_ms = chosen["duration_ns"] / 1e6
                differences += [float(seen - truth) for seen, truth in zip(seen_ms, by_rank[rank], strict=True)]
        what = f"AllReduce of {size_text(payload)}, proxy: call by call, µs longer than CUDA's, median"
        if not differences:
            lane.rows.add(what, "the recording has not all of them", verdict=Verdict.ABSENT)
            continue
        differences.sort()
        middle = median(differences) * 1e3
        last = differences[int(len(differences) * 0.99)] * 1e3
        longer = sum(difference >= 0 for difference in differences)
        text = f"{middle:.0f}, p99 {last:.0f}; longer in {longer} of {len(differences)}"
        lane.rows.figure(what, middle, text)
