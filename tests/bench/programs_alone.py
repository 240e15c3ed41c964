"""The programs of a level beside a job, and of the agent nothing but a thread that reads their rings."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from railscope.agent.config.options import Config
from railscope.agent.config.probe_settings import program_settings
from railscope.agent.node.completion.levels import Levels
from railscope.agent.node.daemon.ring_pace import pause_ns
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.libbpf import LoadError
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.functions.probe_points import ProbePoints, probe_points
from railscope.probes.nccl.layouts.layout import CommLayout, Layouts
from railscope.probes.nccl.programs.calls import NcclPrograms
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.calls import Stat
from railscope.probes.nccl.records.internals import InternalStat
from railscope.probes.rings.ring_buffer import Ring
from railscope.probes.rings.slots import SlotRings
from tests.bench.target import BenchError


@dataclass(frozen=True, slots=True)
class _Library:
    """What levels need to know of a library (agent/node/completion/levels.py)."""

    number: int
    path: str
    descriptor: int
    build_id: str | None
    nccl_version: str
    tenant: Tenant = UNKNOWN_TENANT
    local: bool = True


_COUNTED: Final = {
    Level.COMPLETION: InternalStat.STOPS,
    Level.RAILS: InternalStat.SENDS,
    Level.ALL: InternalStat.PLANS,
}
"""What programs of each level count."""


@dataclass(frozen=True, slots=True)
class ProgramsAlone:
    """Programs that are loaded, and come within milliseconds and go within 200 of them; use `loaded`."""

    programs: NcclPrograms
    internals: Internals | None
    """Above level counts."""
    _library: _Library
    _points: ProbePoints
    _layout: CommLayout | None
    _levels: Levels | None
    _level: Level
    _rings: tuple[Ring | SlotRings, ...]

    @classmethod
    @contextmanager
    def loaded(
        cls, library: Path, pids: tuple[int, ...], level: Level = Level.COUNTS, *, write_events: bool = True
    ) -> Iterator[Self]:
        """Load what an agent loads that was told to observe these processes and no others at this level.

        `write_events` False: nothing is written for time lines and stalls, and so there is nothing to read.

        Raises:
            BenchError: the programs do not load.
        """
        with ExitStack() as stack:
            settings = replace(program_settings(Config(pids=pids)), write_events=write_events)
            descriptor = os.open(library, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            internals = levels = None
            try:
                programs = NcclPrograms.load(settings)
                stack.callback(programs.close)
                rings: list[Ring | SlotRings] = [programs.call_events]
                if level > Level.COUNTS:
                    internals = Internals.load(programs, write_events=write_events)
                    stack.callback(internals.close)
                    rings.append(internals.completion_events)
                    levels = Levels(internals, Layouts.load().structures, Level.COUNTS, inspection=InProcess())
                    stack.callback(levels.close)
            except LoadError as error:
                raise BenchError(str(error)) from None
            for pid in pids:
                programs.observe(pid)
            with Elf.open(descriptor) as elf:
                points, layout = probe_points(elf, 0), Layouts.load().layout_of(elf)
                found = _Library(0, str(library), descriptor, elf.build_id, "")
            if levels is not None:
                _refuse(levels.set_libraries([found]))
                if levels.highest < level:
                    raise BenchError(f"{library} cannot be observed at level {level.name.lower()}")
            yield cls(programs, internals, found, points, layout, levels, level, tuple(rings) if write_events else ())

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Count the calls of the processes, and what lies below them at the level, until the end of the block.

        Raises:
            BenchError: the kernel refuses a probe, or the programs of a level counted nothing.
        """
        before = self._counted()
        try:
            with ExitStack() as stack:
                stack.callback(self.programs.attach(self._library.path, self._points, 0, self._layout).close)
                if self._levels is not None:
                    stack.callback(self._lower, self._levels)
                    _refuse(self._levels.set_level(self._level))
                if self._rings:
                    stop = threading.Event()
                    readers = stack.enter_context(ThreadPoolExecutor(len(self._rings), thread_name_prefix="ring"))
                    reading = [readers.submit(_read, ring, stop) for ring in self._rings]
                    stack.callback(_end_reading, stop, reading)
                yield
        except KernelRefusal as refusal:
            raise BenchError(f"{self._library.path}: {refusal.strerror}") from None
        if any(now == then for now, then in zip(self._counted(), before, strict=True)):
            raise BenchError(f"the programs of level {self._level.name.lower()} alone counted nothing")

    def _counted(self) -> tuple[int, ...]:
        """What grows where the programs of each level up to this one run."""
        calls = self.programs.stats()[Stat.CALLS]
        if self.internals is None:
            return (calls,)
        below = self.internals.stats()
        return (calls, *(below[stat] for level, stat in _COUNTED.items() if level <= self._level))

    @staticmethod
    def _lower(levels: Levels) -> None:
        _refuse([*levels.set_level(Level.COUNTS), *levels.finish_detaching(wait=True)])


def _refuse(wrong: Sequence[str]) -> None:
    """Raise BenchError where something went wrong: what is not attached costs nothing."""
    if wrong:
        raise BenchError(wrong[0])


def _end_reading(stop: threading.Event, reading: Iterable[Future[None]]) -> None:
    """Raises what a reader raised: a ring that nobody reads is full, and then costs less."""
    stop.set()
    for one in reading:
        one.result()


def _read(ring: Ring | SlotRings, stop: threading.Event) -> None:
    """Read a ring as often as the agent does."""
    read_ns = time.monotonic_ns()
    waiting_ns = 0
    while not stop.wait(waiting_ns / 1e9):
        now_ns = time.monotonic_ns()
        waiting_ns = pause_ns(ring.fullness(), now_ns - read_ns)
        read_ns = now_ns
        ring.read()
