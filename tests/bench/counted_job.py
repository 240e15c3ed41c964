"""A job of the real NCCL that calls AllReduce back to back, and how far it is, read from outside.

Its own counter is read through /proc/PID/mem, which costs the job nothing.  Each rank keeps to its share of the cores,
as launchers bind them: left to wander, a bare job's rate varies twice as much.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.bench.quick_turns import RatedJob
from tests.bench.target import BenchError
from tests.nccl.job import Job, JobError

_ENDLESS: Final = 2_000_000_000
"""Iterations: the job is killed when the bench is through."""
_WARM_UP_SECONDS: Final = 4.0
_POLL_SECONDS: Final = 0.0003
_STALLED_SECONDS: Final = 20.0


class CallCounter:
    """How many calls one rank of a running job has made."""

    def __init__(self, pid: int, driver: Path) -> None:
        """The driver program counts calls by operation in `tallies`; AllReduce is its first (driver.c).

        Raises:
            BenchError: the process has gone, or the program is stripped.
        """
        with driver.open("rb") as file:
            table = ELFFile(file).get_section_by_name(".symtab")
            symbols = table.get_symbol_by_name("tallies") if isinstance(table, SymbolTableSection) else None
        if not symbols:
            raise BenchError(f"{driver} has no symbol 'tallies': build it again (python -m tests.nccl.build)")
        self._at = _load_address(pid, driver) + int(symbols[0]["st_value"])
        self._memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._memory)

    def rate(self, seconds: float) -> float:
        """Calls per second over about this time, from the end of one call to the end of another.

        Raises:
            BenchError: the job ended, or makes no call in 20 s.
        """
        first, began_ns = self._next()
        time.sleep(seconds)
        last, ended_ns = self._next()
        return (last - first) / (ended_ns - began_ns) * 1e9

    def _next(self) -> tuple[int, int]:
        """Wait for the next call to be counted; how many there were then, and when, ns."""
        before, deadline = self._read(), time.monotonic() + _STALLED_SECONDS
        while (now := self._read()) == before:
            if time.monotonic() > deadline:
                raise BenchError(f"the NCCL job makes no call within {_STALLED_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        return now, time.monotonic_ns()

    def _read(self) -> int:
        number = os.pread(self._memory, 8, self._at)
        if len(number) < 8:
            raise BenchError("the NCCL job ended before its time")
        return int.from_bytes(number, "little")


@contextmanager
def counted_job(fabric: Fabric, double: Double, size_bytes: int) -> Iterator[RatedJob]:
    """One rank on each host of the fabric, warmed up, until the end of the block.

    Raises:
        BenchError: the job does not run.
    """
    with (
        tempfile.TemporaryDirectory(prefix="railscope-bench-") as directory,
        Job(fabric, Path(directory), double, iterations=_ENDLESS, size_bytes=size_bytes) as job,
    ):
        try:
            pids = job.ready()
        except JobError as error:
            raise BenchError(str(error)) from None
        share_cores(pids)
        job.start()
        with CallCounter(pids[0], double.driver) as counter:
            counter.rate(_WARM_UP_SECONDS)
            yield RatedJob(pids, counter.rate)


def share_cores(pids: tuple[int, ...]) -> None:
    """Give each process, with the threads that it has and will have, cores of its own, where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    for number, pid in enumerate(pids):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores[number :: len(pids)] or cores)


def _load_address(pid: int, program: Path) -> int:
    """Where the program's first byte is mapped.

    Raises:
        BenchError: the process does not map it.
    """
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] == str(program) and int(fields[2], 16) == 0:
                return int(fields[0].partition("-")[0], 16)
    except OSError as error:
        raise BenchError(f"the NCCL job's process {pid} has gone: {error.strerror}") from None
    raise BenchError(f"the NCCL job's process {pid} does not run {program}")
