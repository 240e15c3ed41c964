"""What writing a dataset costs: CPU for what is recorded, and bytes on disk.

The records are made up (simulated); what is measured is the recorder's own work, on the agent's loop and in the thread
that writes: taking batches in, handing them over every five seconds, writing and putting parts together.  Reading the
kernel's ring is another part's row.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np

from railscope.agent.dataset.files import table_files
from railscope.agent.dataset.merge import Merger
from railscope.agent.dataset.recording_writer import Losses, RecordingRow, RecordingWriter
from railscope.agent.dataset.size import SizeBound
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.node.recorder.flight_recorder import FlightRecorder
from railscope.agent.record.dataset_recorder import FLUSH_NS
from railscope.agent.recording.recording import KINDS
from railscope.probes.clock import SystemClock
from railscope.probes.loading.maps import Records
from tests.bench.results import Bound, Line, figure
from tests.bench.results import Target as Limit
from tests.bench.target import Built

PART: Final = "dataset"
_BATCHES_PER_SECOND: Final = 20
_PIECES: Final = 17
"""A minute and a half: sixteen of them are put together."""
_SECONDS: Final = _PIECES * FLUSH_NS / 1e9
_COMMUNICATORS: Final = 64
_PROCESSES: Final = 8
_RAILS: Final = 8
_SAMPLES_PER_SECOND: Final = 10
_MOST_BYTES: Final = 1 << 30


def measure(_built: Built, rounds: int) -> list[Line]:
    """Record a minute and a half of made-up calls at two rates, `rounds` times."""
    lines: list[Line] = []
    for calls_per_second in (10_000, 100):
        core_percent, call_bytes, all_bytes = [], [], []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(prefix="railscope-bench-") as folder:
                seconds = _record(Path(folder), calls_per_second)
                core_percent.append(seconds / _SECONDS * 100)
                calls = round(calls_per_second * _SECONDS)
                call_bytes.append(_bytes(Path(folder), "calls") / calls)
                events = sum(_bytes(Path(folder), table) for table in ("calls", "operations"))
                all_bytes.append(events / (2 * calls))
        name = f"{calls_per_second:,} calls/s and their completions"
        note = f"{_COMMUNICATORS} communicators of {_PROCESSES} processes, {_RAILS} rails; simulated records"
        lines += [
            figure(PART, name, "% of a core", core_percent, target=Limit(Bound.AT_MOST, 2), note=note),
            figure(PART, f"a call on disk at {calls_per_second:,}/s", "bytes", call_bytes,
                   target=Limit(Bound.AT_MOST, 24), note=note),
            figure(PART, f"a call or completion on disk at {calls_per_second:,}/s", "bytes", all_bytes, note=note),
        ]  # fmt: skip
    return lines


def _record(folder: Path, calls_per_second: int) -> float:
    """CPU time of this thread, seconds."""
    clock = SystemClock()
    generator = np.random.default_rng(1)
    recorder = FlightRecorder(clock, host="bench")
    snapshot = Snapshot(realtime_ns=0, version="", kernel="")
    now_ns = clock.realtime_ns()
    writer = RecordingWriter(
        DatasetWriter(folder, "bench", durable=True), RecordingRow("", "", True, now_ns, now_ns, None)
    )
    merger, bound = Merger(writer.writer), SizeBound(_MOST_BYTES)
    spent = 0.0
    at_ns, number = clock.monotonic_ns(), 0
    for _ in range(_PIECES):
        batches = []
        for _ in range(int(FLUSH_NS / 1e9 * _BATCHES_PER_SECOND)):
            count = calls_per_second // _BATCHES_PER_SECOND
            batches.append(
                [_events(kind, count, at_ns, number, calls_per_second, generator) for kind in ("calls", "completions")]
            )
            at_ns += 10**9 // _BATCHES_PER_SECOND
            number += count
        samples = _samples(at_ns, generator)
        began_s = time.thread_time()
        for calls, completions in batches:
            recorder.add_calls(calls)
            recorder.add_completions(completions)
        recorder._samples.add(samples)
        piece = recorder.read_new("bench", snapshot)
        files = writer.add(piece.recording, Losses(0, 0), {})
        written_bytes = sum(file.stat().st_size for _, file in files)
        merger.add(files)
        bound.remove_excess(writer, written_bytes)
        spent += time.thread_time() - began_s
    return spent


def _bytes(folder: Path, table: str) -> int:
    return sum(file.stat().st_size for file in table_files(folder, table))


def _events(kind: str, count: int, at_ns: int, number: int, per_second: int, generator: np.random.Generator) -> Records:
    """A batch as a job's ranks would make it, beginning with the `number`th."""
    events = np.zeros(count, KINDS[kind])
    apart_ns = generator.exponential(1e9 / per_second, count)
    events["time_ns"] = at_ns + np.cumsum(apart_ns).astype(np.uint64)
    instance = generator.integers(1, _COMMUNICATORS + 1, count)
    events["instance"] = instance
    events["tgid"] = 4_000 + instance % _PROCESSES
    events["sequence"] = (number + np.arange(count)) // _COMMUNICATORS
    events["payload_bytes"] = generator.choice([4 << 10, 1 << 20, 25 << 20, 123_456], count)
    events["op"] = generator.choice([2, 3, 4], count)
    events["data_type"] = 6
    if kind == "calls":
        events["tid"] = events["tgid"]
        events["stream"] = 0x7F00_0000_0000 + instance * 4096
        events["peer"] = -1
    else:
        events["duration_ns"] = generator.exponential(1e6, count).astype(np.uint64)
        events["posted_ns"] = events["time_ns"] - events["duration_ns"]
        events["algorithm"], events["protocol"], events["channels"] = 1, 2, 8
    return events


def _samples(at_ns: int, generator: np.random.Generator) -> Records:
    """What rails have counted in the seconds before `at_ns`."""
    count = int(FLUSH_NS / 1e9 * _SAMPLES_PER_SECOND)
    samples = np.zeros((count, _RAILS), KINDS["rail_samples"])
    samples["time_ns"] = (at_ns - np.arange(count, 0, -1) * (10**9 // _SAMPLES_PER_SECOND))[:, np.newaxis]
    samples["device"] = np.arange(_RAILS)
    carried = generator.integers(0, 1 << 30, (count, _RAILS)).cumsum(axis=0)
    samples["transmit_bytes"] = samples["receive_bytes"] = carried + at_ns
    return samples.reshape(-1)
