"""Follows calls of CUDA's driver that launch graphs or wait for the GPU, in processes that map NCCL.

For who asks for it (`--collector.cuda`): work that makes no NCCL call shows in nothing else.  Probes stay on the driver
for as long as such a process maps it; who maps no NCCL is not followed, and passes by.  What it costs is held against
the budget of all probes (agent/node/overhead/control.py), which may have it detached for a while.

A user has so many processes followed at most, so that nobody fills the kernel's table.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from railscope.agent.node.completion.cuda_files import CudaFiles, MappedCudaFile
from railscope.agent.node.inspection.inspection import Inspection
from railscope.agent.node.inspection.tenants import tenant_of
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.links import Links, ProbePoint, close_together
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.functions.cuda import CudaPoints
from railscope.probes.nccl.records.driver_calls import PROCESS, THREAD, DriverStat
from railscope.probes.processes.processes import ProcessIdentity

_log = logging.getLogger("railscope.cuda")

MOST_OF_A_USER: Final = 512
"""Processes that are followed; the kernel's table has room for eight such users."""


class DriverPrograms(Protocol):
    """What is needed of the loaded programs (probes/nccl/programs/driver_calls.py)."""

    def attach(self, path: str, points: Sequence[ProbePoint]) -> Links: ...
    def follow(self, tgid: int) -> None: ...
    def forget(self, tgids: Collection[int]) -> None: ...
    def drop(self, threads: Iterable[tuple[int, int]]) -> None: ...
    def threads(self) -> tuple[Records, Records]: ...
    def processes(self) -> tuple[Records, Records]: ...
    def stats(self) -> Mapping[DriverStat, int]: ...
    def close(self) -> None: ...


class MappedLibrary(Protocol):
    """What is needed of an NCCL library (agent/node/targets/libraries.py)."""

    @property
    def mappers(self) -> Set[ProcessIdentity]: ...


@dataclass(frozen=True, slots=True)
class DriverReading:
    """What the kernel's tables hold."""

    tids: Records
    threads: Records
    """dtype THREAD, in the order of `tids`."""
    pids: Records
    processes: Records
    """dtype PROCESS, in the order of `pids`."""


_EMPTY: Final = DriverReading(np.zeros(0, "<u4"), np.zeros(0, THREAD), np.zeros(0, "<u4"), np.zeros(0, PROCESS))


class DriverCallWatch:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, programs: DriverPrograms, procfs: Path, inspection: Inspection) -> None:
        self._programs = programs
        self._procfs = procfs
        self._files = CudaFiles(
            procfs,
            inspection,
            choose=_drivers,
            points=lambda points: points.followed,
            attach=self._attach,
        )
        self._present: frozenset[ProcessIdentity] = frozenset()
        self._followed: dict[ProcessIdentity, int | None] = {}
        """With their users, by uid."""
        self._left_out: dict[ProcessIdentity, int | None] = {}
        self._lost: Counter[int | None] = Counter()
        self._attached = True
        """Whether the budget allows it."""
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="detach")
        self._detaching: Future[None] | None = None
        """Probes that are coming off, which takes seconds where all cores are busy; None: none are."""

    @property
    def follows(self) -> bool:
        """Whether a process is followed now."""
        return bool(self._followed) and bool(self._files.probed)

    def set_libraries(self, libraries: Iterable[MappedLibrary]) -> list[str]:
        """Follow the processes that map these libraries; returns what went wrong, one line each."""
        self._present = frozenset(identity for library in libraries for identity in library.mappers)
        return self._follow()

    def set_attached(self, attached: bool) -> list[str]:
        """Attach or detach everywhere, as the budget allows; returns what went wrong, one line each."""
        if attached is self._attached and self._detaching is None:
            return []
        self._attached = attached
        return self._follow()

    def hits(self) -> int:
        """How often the programs ran in processes that are followed, since load.

        Raises:
            KernelRefusal: it cannot be read.
        """
        stats = self._programs.stats()
        return stats[DriverStat.ENTRIES] + stats[DriverStat.RETURNS]

    def read(self) -> DriverReading:
        """Who is inside a call, and how many calls processes made.

        Raises:
            KernelRefusal: a table cannot be read.
        """
        if not self.follows:
            return _EMPTY
        return DriverReading(*self._programs.threads(), *self._programs.processes())

    def drop(self, threads: Iterable[tuple[int, int]]) -> None:
        """Take out threads that are not needed: their numbers, and `last_ns` as it was read.

        Raises:
            KernelRefusal: the table cannot be changed.
        """
        self._programs.drop(threads)

    def left_out(self) -> Mapping[int | None, int]:
        """Processes that were not followed because their user has too many, by uid; None: not known."""
        return self._lost

    def probed_files(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Files that are probed, with the functions that could not be."""
        return tuple((file.path, file.points.refused) for file in self._files.probed)

    def close(self) -> None:
        """Detach everywhere and free the programs."""
        self._detach()
        self._aside.shutdown()
        self._programs.close()

    def _follow(self) -> list[str]:
        if self._detaching is not None and self._detaching.done():
            self._detaching.result()
            self._detaching = None
        if not self._attached:
            self._detach()
            return []
        if self._detaching is not None:
            return []
        errors: list[str] = []
        try:
            self._choose_processes()
        except KernelRefusal as refusal:
            errors.append(f"CUDA's driver: processes cannot be followed: {refusal.strerror}")
        self._files.follow(set(self._followed), errors)
        return errors

    def _choose_processes(self) -> None:
        """Raises KernelRefusal."""
        gone = self._followed.keys() - self._present
        if gone:
            for identity in gone:
                del self._followed[identity]
            self._programs.forget({identity.pid for identity in gone})
        self._left_out = {identity: uid for identity, uid in self._left_out.items() if identity in self._present}
        held = Counter(self._followed.values())
        for identity in sorted(self._present - self._followed.keys(), key=lambda one: (one.start_time_ticks, one.pid)):
            uid = self._left_out[identity] if identity in self._left_out else self._uid(identity)
            if held[uid] >= MOST_OF_A_USER:
                self._lost[uid] += identity not in self._left_out
                self._left_out[identity] = uid
                continue
            self._programs.follow(identity.pid)
            self._followed[identity] = uid
            self._left_out.pop(identity, None)
            held[uid] += 1

    def _uid(self, identity: ProcessIdentity) -> int | None:
        return tenant_of(self._procfs, identity.pid).uid

    def _attach(self, path: str, points: CudaPoints) -> Links:
        return self._programs.attach(path, points.followed)

    def _detach(self) -> None:
        links = [file.links for file in self._files.probed if file.links is not None]
        if links:
            self._detaching = self._aside.submit(close_together, links)
        self._files.clear()
        followed, self._followed = self._followed, {}
        if not followed:
            return
        try:
            self._programs.forget({identity.pid for identity in followed})
        except KernelRefusal as refusal:
            _log.error("calls of CUDA's driver cannot be forgotten: %s", refusal.strerror)


def _drivers(files: Sequence[MappedCudaFile]) -> Sequence[MappedCudaFile]:
    return [file for file in files if file.points.followed]
