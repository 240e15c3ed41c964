"""What a job of the real NCCL learns from CUDA proves its operations complete; CUDA is the test double's (simulated).

The ranks map a simulated libcudart.so.12 and call it as frameworks do; the probes, NCCL and the network are real.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pytest

from railscope.agent.node.completion.cuda import CudaCompletion
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.functions.internals import Level, internal_points
from railscope.probes.nccl.functions.probe_points import probe_points
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms, ProgramSettings
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.cuda import CudaStat
from railscope.probes.nccl.records.internals import layout_record
from railscope.probes.processes.processes import PROCFS, ProcessIdentity, identity_of
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.nccl.job import Job
from tests.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

NUMBER = 5


@dataclass(slots=True)
class ObservedNccl:
    """As agent/node/targets/libraries.py has it."""

    file: BinaryIO
    path: str
    number: int = NUMBER
    mappers: set[ProcessIdentity] = field(default_factory=set)
    tenant: Tenant = UNKNOWN_TENANT
    build_id: str | None = None
    local: bool = True

    @property
    def descriptor(self) -> int:
        return self.file.fileno()


@dataclass(frozen=True, slots=True)
class Watched:
    internals: Internals
    cuda: CudaCompletion

    def completed(self) -> list[int]:
        """By communicator: calls that CUDA proves complete, 0 where it proves none."""
        self.cuda.read()
        found = [self.cuda.progress_of(instance) for instance in sorted(self.internals.progress())]
        return [progress.completed_sequence if progress else 0 for progress in found]

    def durations(self) -> dict[Op, int]:
        return {op: int(duration["count"]) for op, duration in self.cuda.durations().items()}


@contextmanager
def watched(
    double: Double, pids: tuple[int, ...], enqueue_time: EnqueueTime | None = None, *, write_events: bool = False
) -> Iterator[Watched]:
    """Everything attached as the agent does at the highest level, for these processes only."""
    layouts = Layouts.load()
    with ExitStack() as stack:
        file = stack.enter_context(double.nccl.open("rb"))
        with Elf.open(file.fileno()) as elf:
            points, below, layout = probe_points(elf, NUMBER), internal_points(elf, NUMBER), layouts.layout_of(elf)
            offsets = layout_record(layouts.structures(elf.build_id))
        programs = NcclPrograms.load(ProgramSettings(enqueue_time=enqueue_time, only_observed_processes=True))
        stack.callback(programs.close)
        internals = Internals.load(programs, write_events=write_events)
        stack.callback(internals.close)
        for pid in pids:
            programs.observe(pid)
        internals.describe(NUMBER, offsets)
        stack.callback(programs.attach(str(double.nccl), points, NUMBER, layout).close)
        stack.callback(internals.attach(str(double.nccl), below, Level.COMPLETION).close)
        cuda = CudaCompletion(internals.cuda, PROCFS, inspection=InProcess())
        stack.callback(cuda.close)
        library = ObservedNccl(file, str(double.nccl))
        library.mappers.update(identity for pid in pids if (identity := identity_of(PROCFS, pid)) is not None)
        assert cuda.set_libraries([library], Level.ALL) == []
        yield Watched(internals, cuda)


def stands(seen: Watched) -> bool:
    """What was under way has ended, or waits."""
    before = seen.completed()
    time.sleep(0.5)
    return seen.completed() == before


@pytest.mark.parametrize("enqueue_time", [None, EnqueueTime.OFF], ids=["session", "pair"])
@pytest.mark.parametrize("events", ["query", "synchronize", "stream", "watchdog"])
def test_every_operation_is_proved_complete_however_the_job_asks(
    two_hosts: Fabric,
    double: Double,
    tmp_path: Path,
    events: str,
    enqueue_time: EnqueueTime | None,
) -> None:
    iterations, communicators = 40, 2
    with Job(
        two_hosts,
        tmp_path,
        double,
        iterations=iterations,
        size_bytes=1 << 16,
        communicators=communicators,
        events=events,
        hold=True,
    ) as job:
        with watched(double, job.ready(), enqueue_time) as seen:
            assert [(Path(path).name, refused) for path, refused in seen.cuda.probed_files()] == [
                ("libcudart.so.12", ())
            ]
            job.start()
            reports = job.finished()
            eventually(lambda: seen.completed() == [iterations] * 2 * communicators)
            durations, cuda, proxy = seen.durations(), seen.cuda.durations(), seen.internals.durations()
            stats = seen.internals.cuda.stats()
        job.release()
        job.wait()
    assert [report.verified for report in reports] == [True, True]
    assert durations == {Op.AllReduce: 2 * iterations * communicators}
    # Of the same order; a kernel may end before the network reports its last send.
    assert int(cuda[Op.AllReduce]["sum"]) > int(proxy[Op.AllReduce]["sum"]) // 2 > 0
    assert stats[CudaStat.FORGOTTEN] == stats[CudaStat.FULL] == stats[CudaStat.UNREADABLE] == 0


def test_operations_of_all_kinds_and_groups_are_proved_with_their_own_names(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(
        two_hosts,
        tmp_path,
        double,
        pattern="mixed",
        iterations=10,
        size_bytes=40_000,
        events="watchdog",
        hold=True,
    ) as job:
        with watched(double, job.ready()) as seen:
            job.start()
            operations = job.finished()[0].operations
            calls = {Op[operation.operation]: operation.calls for operation in operations if operation.calls}
            eventually(lambda: seen.completed() == [sum(calls.values())] * 2)
            durations = seen.durations()
        job.release()
        job.wait()
    assert durations == {op: 2 * count for op, count in calls.items()}


def test_a_stopped_rank_leaves_unproved_what_it_holds_up(two_hosts: Fabric, double: Double, tmp_path: Path) -> None:
    with Job(
        two_hosts,
        tmp_path,
        double,
        iterations=2_000,
        size_bytes=1 << 14,
        pace_us=500,
        events="watchdog",
        hold=True,
    ) as job:
        pids = job.ready()
        with watched(double, pids) as seen:
            job.start()
            eventually(lambda: min(seen.completed(), default=0) > 10)
            os.kill(pids[1], signal.SIGSTOP)
            try:
                eventually(lambda: stands(seen))
                first = seen.completed()
                enqueued = seen.internals.progress()
                time.sleep(1)
                later = seen.completed()
            finally:
                os.kill(pids[1], signal.SIGCONT)
            assert first == later
            assert max(later) < 2_000
            assert any(progress.oldest_posted_ns is not None for progress in enqueued.values())
            job.finished()
            eventually(lambda: seen.completed() == [2_000, 2_000])
        job.release()
        job.wait()


def test_a_replayed_graph_proves_nothing_and_has_no_durations(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(
        two_hosts,
        tmp_path,
        double,
        pattern="graph",
        iterations=20,
        size_bytes=1 << 14,
        events="query",
        hold=True,
    ) as job:
        with watched(double, job.ready()) as seen:
            job.start()
            job.finished()
            eventually(lambda: [p.replayed for p in seen.internals.progress().values()] == [40, 40])
            completed, durations = seen.completed(), seen.durations()
        job.release()
        job.wait()
    assert (completed, durations) == ([0, 0], {})


def test_a_job_without_cuda_libraries_costs_nothing_and_stays_unknown(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(two_hosts, tmp_path, double, iterations=20, hold=True) as job:
        with watched(double, job.ready()) as seen:
            assert seen.cuda.probed_files() == ()
            job.start()
            job.finished()
            eventually(lambda: [p.completed for p in seen.internals.progress().values()] == [20, 20])
            completed, stats = seen.completed(), seen.internals.cuda.stats()
        job.release()
        job.wait()
    assert completed == [0, 0]
    assert set(stats.values()) == {0}
