"""Jobs of either library with one interface, so that a scenario need not know which it runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from railscope.testbed.job import Job as WorkloadJob
from railscope.testbed.nccl.build import build
from tests.faults.cluster import Cluster, until
from tests.faults.scenarios import Library, Load
from tests.nccl.job import Job as NcclJob

_ENDLESS: Final = 1_000_000_000
_END_SECONDS: Final = 60.0


class RunningJob(Protocol):
    """A job from its first call to the end of the `with` block."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def pids(self) -> tuple[int, ...]:
        """In rank order."""

    def wait(self) -> None:
        """Until all ranks have ended by themselves, rightly.

        Raises:
            TestbedError, JobError: a rank failed, or took too long.
        """


def _await_probes(cluster: Cluster, library: str) -> None:
    """A call that is entered before they come is not seen.  On a library of an earlier job they linger.

    Args:
        cluster: whose agents attach them.
        library: how the name of the job's library begins.
    """

    def attached() -> bool:
        return all(
            any(
                one.value and one.labels["program"] == "init" and Path(one.labels["library"]).name.startswith(library)
                for one in agent.samples("probe_attached")
            )
            for agent in cluster.agents
        )

    until(attached, "every host's agent has its probes on the library")


class _Workload:
    def __init__(self, cluster: Cluster, load: Load) -> None:
        self._cluster, self._late = cluster, load.late_ms > 0
        self._job = WorkloadJob(cluster.fabric.hosts, load.options())

    def __enter__(self) -> Self:
        self._job.__enter__()
        if self._late:
            try:
                _await_probes(self._cluster, "librailscope-workload")
            except BaseException:
                self._job.close()
                raise
            self._job.release()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._job.close()

    @property
    def pids(self) -> tuple[int, ...]:
        return self._job.pids

    def wait(self) -> None:
        self._job.wait(_END_SECONDS)


class _Nccl:
    def __init__(self, cluster: Cluster, load: Load, folder: Path) -> None:
        folder.mkdir()
        self._cluster, self._late = cluster, load.late_ms > 0
        self._job = NcclJob(
            cluster.fabric,
            folder,
            build(),
            pattern=load.pattern,
            iterations=load.iterations or _ENDLESS,
            size_bytes=load.size_bytes,
            pace_us=load.pace_us,
            ranks_per_host=load.ranks_per_host,
            warm_up_ms=load.warm_up_ms,
            late_ms=load.late_ms,
            hold_init=self._late,
            pause=load.pause,
            checkpoint=load.checkpoint,
            checkpoint_by=load.checkpoint_by,
            slow=load.slow,
            skip=load.skip,
            destroy=load.destroy,
            hold=load.hold,
        )

    def __enter__(self) -> Self:
        self._job.__enter__()
        try:
            if self._late:
                _await_probes(self._cluster, "libnccl")
                self._job.initialise()
            else:
                self._job.ready()
        except BaseException:
            self._job.close()
            raise
        self._job.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._job.close()

    @property
    def pids(self) -> tuple[int, ...]:
        return self._job.pids

    def wait(self) -> None:
        self._job.wait(_END_SECONDS)


def job(cluster: Cluster, library: Library, load: Load) -> RunningJob:
    """A job on all hosts of a cluster, not yet started."""
    if library is Library.WORKLOAD:
        return _Workload(cluster, load)
    return _Nccl(cluster, load, cluster.folder / f"job-{time.monotonic_ns()}-{os.getpid()}")
