"""Finds processes whose CUDA event and stream queries prove that operations completed.

A process that maps NCCL has CUDA's runtime as a shared library, or linked into something else; it is watched at the
runtime where it has one of its own, else at the driver, which every runtime calls.  One file serves many processes:
probes stay on it for as long as one observed process is watched there, and pass by processes that launch nothing
through NCCL.  All of this belongs to the highest level; the job's own calls are what it costs.

What is proved is late: the job asks when it likes.  It is certain, though, also where no network takes part.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from railscope.agent.node.completion.cuda_files import CudaFiles, MappedCudaFile
from railscope.agent.node.completion.files import BelowCalls
from railscope.agent.node.inspection.inspection import Inspection
from railscope.agent.node.inspection.pages import ProbedFile, load_pages
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.probes.loading.links import Links, ProbePoint, close_together
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.functions.cuda import CudaInterface, CudaPoints
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.programs.cuda import CudaProgress
from railscope.probes.nccl.records.cuda import CudaStat
from railscope.probes.processes.processes import ProcessIdentity

_log = logging.getLogger("railscope.cuda")

_HITS: Final = frozenset({CudaStat.NOTES, CudaStat.PLANS, CudaStat.FINISHES, CudaStat.CALLS, CudaStat.RETURNS})
"""What costs the job time: runs of the programs."""


class CudaLibrary(ProbedFile, Protocol):
    """What is needed of an NCCL library (agent/node/targets/libraries.py)."""

    @property
    def number(self) -> int: ...
    @property
    def mappers(self) -> Set[ProcessIdentity]: ...
    @property
    def build_id(self) -> str | None: ...


class CudaPrograms(Protocol):
    """What is needed of the loaded programs (probes/nccl/programs/cuda.py)."""

    def attach_library(self, path: str, points: Mapping[str, ProbePoint]) -> Links: ...
    def attach_cuda(self, path: str, points: CudaPoints) -> Links: ...
    def progress(self) -> dict[int, CudaProgress]: ...
    def durations(self) -> dict[Op, Records]: ...
    def stats(self) -> Mapping[CudaStat, int]: ...
    def forget_processes(self, tgids: Collection[int]) -> None: ...
    def forget_communicators(self, instances: set[int]) -> None: ...
    def forget_handles(self) -> None: ...


@dataclass(slots=True)
class _Nccl:
    """An NCCL library; no points: it has not what is needed."""

    library: CudaLibrary
    points: Mapping[str, ProbePoint]
    links: Links | None = None


class CudaCompletion:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, programs: CudaPrograms, procfs: Path, inspection: Inspection) -> None:
        self._programs = programs
        self._inspection = inspection
        self._files = CudaFiles(
            procfs,
            inspection,
            choose=_runtimes_first,
            points=lambda points: (*points.drops, *points.calls),
            attach=programs.attach_cuda,
            detached=programs.forget_handles,
        )
        self._libraries: dict[int, _Nccl] = {}
        self._completed: dict[int, CudaProgress] = {}

    def set_libraries(self, libraries: Iterable[CudaLibrary], level: Level) -> list[str]:
        """Watch the processes that map these libraries, at the highest level only.

        Returns what went wrong, one line each; it is tried again at the next call.
        """
        if level < Level.ALL:
            self.close()
            return []
        present = {library.number: library for library in libraries}
        errors: list[str] = []
        self._files.follow({identity for library in present.values() for identity in library.mappers}, errors)
        self._watch_nccl(present, errors)
        return errors

    def read(self) -> None:
        """Read which operations are proved complete.

        Raises:
            KernelRefusal: it cannot be read; what was known stays.
        """
        if self._libraries:
            self._completed.update(self._programs.progress())

    def progress_of(self, instance: int) -> CudaProgress | None:
        """The last that is known of a communicator; None: nothing was proved."""
        return self._completed.get(instance)

    def durations(self) -> dict[Op, Records]:
        """By op: from each call to the proof that it is complete, an upper bound; dtype DISTRIBUTION, ns.

        Raises:
            KernelRefusal: it cannot be read.
        """
        return self._programs.durations()

    def hits(self) -> int:
        """How often the programs ran, since load.

        Raises:
            KernelRefusal: it cannot be read.
        """
        return sum(count for stat, count in self._programs.stats().items() if stat in _HITS)

    def probed_files(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Files that are probed, with the functions that could not be, for those who ask why nothing is seen."""
        return tuple((file.path, file.points.refused) for file in self._files.probed)

    def end_processes(self, tgids: Collection[int]) -> None:
        """Read the proofs of processes that have ended once more, and forget them.

        Raises:
            KernelRefusal: a table cannot be read.
        """
        self.read()
        self._programs.forget_processes(tgids)

    def end_communicators(self, instances: set[int]) -> None:
        """Communicators have ended; what they were last known to have completed stays readable."""
        self._programs.forget_communicators(instances)

    def forget(self, instances: Iterable[int]) -> None:
        """Nobody can ask about these communicators any more."""
        for instance in instances:
            self._completed.pop(instance, None)

    def close(self) -> None:
        """Detach everywhere."""
        watching = bool(self._files.open or self._libraries)
        links = [*(known.links for known in self._libraries.values()), *(file.links for file in self._files.probed)]
        close_together(one for one in links if one is not None)
        self._libraries.clear()
        self._files.clear()
        if watching:
            self._programs.forget_handles()

    def _watch_nccl(self, present: Mapping[int, CudaLibrary], errors: list[str]) -> None:
        """Watch NCCL where one of its processes is watched at CUDA: other launches cannot be proved complete."""
        for number, known in list(self._libraries.items()):
            if present.get(number) is not known.library or not self._worth_it(known.library):
                if known.links is not None:
                    known.links.close()
                del self._libraries[number]
        for number, library in present.items():
            if not self._worth_it(library):
                continue
            try:
                known = self._libraries.get(number) or self._examine(library)
                self._libraries[number] = known
                if known.links is None and known.points:
                    load_pages(self._inspection, library, known.points.values())
                    known.links = self._programs.attach_library(f"/proc/self/fd/{library.descriptor}", known.points)
            except NotYet:
                continue
            except (Refused, OSError) as error:
                errors.append(f"{library.path}: {error.strerror if isinstance(error, OSError) else error}")

    def _worth_it(self, library: CudaLibrary) -> bool:
        return any(self._files.probed_in(identity) for identity in library.mappers)

    def _examine(self, library: CudaLibrary) -> _Nccl:
        question = BelowCalls(library.number, library.path, library.build_id)
        points = self._inspection.ask(library.tenant, question, (library.descriptor,)).answer.launches
        if not points:
            _log.info("%s: CUDA launches are not observed: it exports none of the launch functions", library.path)
        return _Nccl(library, points)


def _runtimes_first(files: Sequence[MappedCudaFile]) -> Sequence[MappedCudaFile]:
    """Where a process is watched: never at both, for the runtime calls the driver."""
    return [file for file in files if file.points.interface is CudaInterface.RUNTIME] or files
