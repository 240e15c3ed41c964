"""What the flight recorder adds to the agent: calls and completions kept, rails sampled, a recording made and written.

The records are made up (simulated); what is measured is the recorder's own work on the agent's threads.  Reading the
kernel's ring is another part's row.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.node.recorder.flight_recorder import FlightRecorder
from railscope.agent.node.recorder.store import save
from railscope.agent.recording.recording import KINDS
from railscope.probes.clock import SystemClock
from railscope.probes.loading.maps import Records
from railscope.probes.netdev.counters import CounterReading
from tests.bench.results import Bound, Line, figure
from tests.bench.results import Target as Limit
from tests.bench.target import Built

PART: Final = "recorder"
_CALLS_PER_SECOND: Final = 50_000
_BATCH: Final = _CALLS_PER_SECOND // 20
"""The agent comes by every 50 ms."""
_BATCHES: Final = 400
_RAILS: Final = 8
_READINGS: Final = 5_000
_COMMUNICATORS: Final = 64
_PROCESSES: Final = 8


def measure(_built: Built, rounds: int) -> list[Line]:
    """Fill the recorder, sample rails, and write what it holds, `rounds` times."""
    clock = SystemClock()
    core_percent, sample_us, freeze_ms, write_ms, call_bytes = [], [], [], [], []
    for _ in range(rounds):
        recorder = FlightRecorder(clock, host="bench")
        seconds = _seconds_for(partial(_feed, recorder, clock))
        core_percent.append(seconds / (_BATCH * _BATCHES) * _CALLS_PER_SECOND * 100)
        seconds = _seconds_for(partial(_sample, recorder, _reading(clock)))
        sample_us.append(seconds / _READINGS / _RAILS * 1e6)
        began_s = time.perf_counter()
        recording = recorder.freeze("bench", Snapshot(realtime_ns=0, version="", kernel=""))
        freeze_ms.append((time.perf_counter() - began_s) * 1e3)
        with tempfile.TemporaryDirectory(prefix="railscope-bench-") as folder:
            path = Path(folder) / "bench.npz"
            began_s = time.perf_counter()
            save(recording, path)
            write_ms.append((time.perf_counter() - began_s) * 1e3)
            events = len(recording.calls) + len(recording.completions)
            call_bytes.append(path.stat().st_size / events)
    simulated = "simulated records"
    return [
        figure(
            PART, "50,000 calls/s and their completions", "% of a core", core_percent,
            target=Limit(Bound.BELOW, 3), note=simulated,
        ),
        figure(PART, "a sample of one of 8 rails", "µs", sample_us, target=Limit(Bound.BELOW, 2), note=simulated),
        figure(PART, "freezing 16 MiB", "ms", freeze_ms, note=simulated),
        figure(PART, "writing them, in a thread of its own", "ms", write_ms, note=simulated),
        figure(
            PART, "an event on disk", "bytes", call_bytes,
            target=Limit(Bound.AT_MOST, 24), note="64 communicators of 8 processes, four sizes; simulated",
        ),
    ]  # fmt: skip


def _seconds_for(work: Callable[[], None]) -> float:
    """CPU time of this thread."""
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def _feed(recorder: FlightRecorder, clock: SystemClock) -> None:
    calls, completions = _events("calls", clock), _events("completions", clock)
    for _ in range(_BATCHES):
        recorder.add_calls(calls)
        recorder.add_completions(completions)


def _sample(recorder: FlightRecorder, reading: CounterReading) -> None:
    for _ in range(_READINGS):
        recorder.add_samples(0, reading)


def _events(kind: str, clock: SystemClock) -> Records:
    """A batch as a job's ranks would make it."""
    generator = np.random.default_rng(1)
    events = np.zeros(_BATCH, KINDS[kind])
    apart_ns = generator.exponential(1e9 / _CALLS_PER_SECOND, _BATCH)
    events["time_ns"] = clock.monotonic_ns() + np.cumsum(apart_ns).astype(np.uint64)
    instance = generator.integers(1, _COMMUNICATORS + 1, _BATCH)
    events["instance"] = instance
    events["comm"] = 0x7F00_0000_0000 + instance * 99_840
    events["tgid"] = 4_000 + instance % _PROCESSES
    events["sequence"] = np.arange(_BATCH) // _COMMUNICATORS
    events["payload_bytes"] = generator.choice([4 << 10, 1 << 20, 25 << 20, 123_456], _BATCH)
    events["op"] = generator.choice([2, 3, 4], _BATCH)
    if kind == "completions":
        events["duration_ns"] = generator.exponential(1e6, _BATCH).astype(np.uint64)
        events["posted_ns"] = events["time_ns"] - events["duration_ns"]
    return events


def _reading(clock: SystemClock) -> CounterReading:
    """Of RDMA ports: their names make them rails."""
    names = tuple(f"mlx5_{number}/1" for number in range(_RAILS))
    fields = ("rx_bytes", "tx_bytes", *(f"counter_{number}" for number in range(20)))
    now_ns = clock.monotonic_ns()
    values = np.random.default_rng(1).integers(0, 1 << 40, (_RAILS, len(fields))).astype(np.uint64)
    return CounterReading(now_ns, now_ns + 50_000, names, (0,) * _RAILS, fields, values)
