"""What `railscope record -o DIR` takes beside a running job: all of it, and the thread that writes.

A job of two ranks makes some 10,000 calls a second of the workload library.  The recorder runs in this process, as
`railscope demo --record` has it, so that its threads can be told apart: what is counted is everything but the thread
that waits here.  An agent without a server beside the same job shows what there would be without writing.  The
workload library has no network threads as NCCL has: there are no completed operations, which `dataset` measures.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.agent.config.options import Config
from railscope.agent.dataset.files import table_files
from railscope.agent.node.daemon.daemon import Daemon
from railscope.agent.record.dataset_recorder import FLUSH_NS, DatasetRecorder
from railscope.agent.record.stream import THREAD_NAME
from railscope.probes.clock import SystemClock
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job, JobOptions
from tests.bench.cpu_time import DISTURBED, Others, thread_time
from tests.bench.results import Bound, Line, figure
from tests.bench.results import Target as Limit
from tests.bench.target import BenchError, Built

PART: Final = "live recording"
_CALLS_PER_SECOND: Final = 10_000
_RANKS: Final = 2
_CALLS: Final = 64
"""Of an iteration: the pause behind it is what makes the rate."""
_UNPAUSED_CALLS_PER_SECOND: Final = 30_000
_PACE_US: Final = round(1e6 * _CALLS * _RANKS * (1 / _CALLS_PER_SECOND - 1 / _UNPAUSED_CALLS_PER_SECOND))
_OPTIONS: Final = JobOptions(
    pattern="inference", seconds=3600, bytes=1024, calls=_CALLS, pace_us=_PACE_US, verify=False, hold=True
)
_SETTLE_SECONDS: Final = 3.0
_SECONDS: Final = 17 * FLUSH_NS / 1e9
"""A minute and a half: sixteen pieces are put together."""
_SECONDS_WITHOUT: Final = 20.0


@dataclass(slots=True)
class _Taken:
    """Of a processor, in percent, by what took it; one value a round."""

    whole: list[float]
    writing: list[float]
    without: list[float]
    """An agent that does not write."""
    others: list[float]
    """Of the machine: who else ran meanwhile."""
    rates: list[float]
    """Calls per second."""
    call_bytes: list[float]


def measure(_built: Built, rounds: int) -> list[Line]:
    """Record the job and watch it, in turn, `rounds` times.

    Raises:
        BenchError: the recorder lost or wrote nothing.
    """
    taken = _Taken([], [], [], [], [], [])
    with Fabric(hosts=_RANKS, rails=2) as fabric, Job(fabric.hosts, _OPTIONS) as job:
        config = Config(pids=job.pids, recordings_directory=None)
        job.release()
        for turn in range(rounds):
            for part in (_record, _watch) if turn % 2 == 0 else (_watch, _record):
                part(config, job.pids, taken)
        job.stop()
    rate = sum(taken.rates) / len(taken.rates)
    name = f"at {rate:,.0f} calls/s"
    return [
        figure(PART, f"railscope record {name}", "% of a core", taken.whole, target=Limit(Bound.AT_MOST, 2)),
        figure(PART, f"its thread that writes, {name}", "% of a core", taken.writing),
        figure(PART, f"an agent that does not write, {name}", "% of a core", taken.without),
        figure(PART, "CPU taken by others", "%", taken.others, note=DISTURBED),
        figure(PART, "a call on disk", "bytes", taken.call_bytes, target=Limit(Bound.AT_MOST, 24)),
    ]


def _record(config: Config, pids: tuple[int, ...], taken: _Taken) -> None:
    with tempfile.TemporaryDirectory(prefix="railscope-bench-") as folder:
        recorder = DatasetRecorder(Path(folder), config, "", SystemClock())
        try:
            with _running(recorder.daemon):
                recorder.begin()
                time.sleep(_SETTLE_SECONDS)
                (writer,) = (one for one in threading.enumerate() if one.name == THREAD_NAME)
                others, before, own = Others((*pids, os.getpid())), thread_time(writer), _process_seconds()
                began_s = time.monotonic()
                time.sleep(_SECONDS)
                took_s = time.monotonic() - began_s
                taken.whole.append((_process_seconds() - own) / took_s * 100)
                taken.writing.append(thread_time(writer).core_percent(before))
                taken.others.append(others.percent())
            recorder.finish()
        finally:
            recorder.close()
        calls = recorder.rows.get("calls", 0)
        seconds = (recorder.row.ended_ns - recorder.row.began_ns) / 1e9
        if not calls or recorder.row.calls_lost:
            raise BenchError(f"the recorder wrote {calls} calls and lost {recorder.row.calls_lost}")
        taken.rates.append(calls / seconds)
        taken.call_bytes.append(sum(file.stat().st_size for file in table_files(Path(folder), "calls")) / calls)


def _watch(config: Config, _pids: tuple[int, ...], taken: _Taken) -> None:
    daemon = Daemon(config, SystemClock(), "", serve=False)
    try:
        with _running(daemon):
            time.sleep(_SETTLE_SECONDS)
            own, began_s = _process_seconds(), time.monotonic()
            time.sleep(_SECONDS_WITHOUT)
            taken.without.append((_process_seconds() - own) / (time.monotonic() - began_s) * 100)
    finally:
        daemon.close()


@contextmanager
def _running(daemon: Daemon) -> Iterator[None]:
    daemon.start()
    loop = threading.Thread(target=daemon.run, name="agent")
    loop.start()
    try:
        yield
    finally:
        daemon.stop()
        loop.join()


def _process_seconds() -> float:
    """CPU time of this process but for the thread that asks."""
    return time.process_time() - time.thread_time()
