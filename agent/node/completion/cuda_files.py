"""Finds the files of CUDA's that processes map, and keeps probes on some of them.

One file serves many processes: it is kept open, and probed, for as long as a process that is followed maps it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from railscope.agent.node.completion.files import CudaFile, FindCuda
from railscope.agent.node.inspection.inspection import Inspection
from railscope.agent.node.inspection.pages import load_pages
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.inspection.tenants import Tenant, tenant_of
from railscope.probes.libraries.files import file_stamp, same_library
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.links import Links, ProbePoint
from railscope.probes.nccl.functions.cuda import CudaPoints
from railscope.probes.processes.processes import ProcessIdentity

LOOK_AGAIN_AFTER: Final = 8
"""A process without a file to probe may load it late: it is looked at again at the second, fourth and every eighth call
of `follow`."""
_log = logging.getLogger("railscope.cuda")


@dataclass(slots=True, eq=False)
class MappedCudaFile:
    """A file of CUDA's that some followed process maps."""

    path: str
    descriptor: int
    tenant: Tenant
    """Who mapped it first."""
    found: CudaFile
    links: Links | None = None

    @property
    def points(self) -> CudaPoints:
        return self.found.points

    @property
    def local(self) -> bool:
        return self.found.local


@dataclass(slots=True)
class _Process:
    files: list[MappedCudaFile] = field(default_factory=list)
    looks: int = 0
    awaited: int = 0
    """The look that was asked for and is not answered yet; 0: none.  It is asked for again by its number: by another,
    no answer that comes late would ever be taken, and each of them would have one more question asked."""


class CudaFiles:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        procfs: Path,
        inspection: Inspection,
        *,
        choose: Callable[[Sequence[MappedCudaFile]], Sequence[MappedCudaFile]],
        points: Callable[[CudaPoints], Sequence[ProbePoint]],
        attach: Callable[[str, CudaPoints], Links],
        detached: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            procfs: where processes and what they map are looked for.
            inspection: looks into what they map.
            choose: of the files of one process, those that are probed.
            points: the points of a file that probes go on.
            attach: attaches to the file at a path; raises KernelRefusal.
            detached: is called when probes came off one.
        """
        self._procfs = procfs
        self._inspection = inspection
        self._choose = choose
        self._points = points
        self._attach = attach
        self._detached = detached
        self._processes: dict[ProcessIdentity, _Process] = {}
        self._files: list[MappedCudaFile] = []

    @property
    def open(self) -> bool:
        """Whether a file is kept open."""
        return bool(self._files)

    @property
    def probed(self) -> tuple[MappedCudaFile, ...]:
        return tuple(file for file in self._files if file.links is not None)

    def probed_in(self, identity: ProcessIdentity) -> bool:
        """Whether probes are on a file that was chosen in a process."""
        process = self._processes.get(identity)
        return process is not None and any(file.links is not None for file in self._choose(process.files))

    def follow(self, present: Set[ProcessIdentity], errors: list[str]) -> None:
        """Probe the files of these processes and of no others; adds to `errors` what went wrong, one line each.

        What went wrong is tried again at the next call.
        """
        self._drop_overwritten()
        for gone in self._processes.keys() - present:
            del self._processes[gone]
        for identity in present:
            process = self._processes.setdefault(identity, _Process())
            process.looks += 1
            due = process.looks in (2, 4) or process.looks % LOOK_AGAIN_AFTER == 1
            if process.awaited or (due and not self._choose(process.files)):
                self._look(identity, process, errors)
        self._probe(errors)

    def clear(self) -> None:
        """Forget everything; whoever calls has closed the links of `probed`."""
        for file in self._files:
            os.close(file.descriptor)
        self._files.clear()
        self._processes.clear()

    def _look(self, identity: ProcessIdentity, process: _Process, errors: list[str]) -> None:
        look, process.awaited = process.awaited or process.looks, 0
        try:
            process.files = self._files_of(identity, look, errors)
        except NotYet:
            process.awaited = look
        except Refused as refused:
            if not refused.gone:
                errors.append(str(refused))

    def _files_of(self, identity: ProcessIdentity, look: int, errors: list[str]) -> list[MappedCudaFile]:
        """Raises NotYet, Refused where that is not known."""
        tenant = tenant_of(self._procfs, identity.pid)
        opened = self._inspection.ask(tenant, FindCuda(str(self._procfs), identity.pid, look))
        errors += opened.answer.errors
        found: list[MappedCudaFile] = []
        for file, descriptor in zip(opened.answer.files, opened.descriptors, strict=True):
            # Through another mount it is another device, and probes on both would see every call twice.
            known = next((one for one in self._files if same_library(one.found.key, file.key)), None)
            if known is not None:
                os.close(descriptor)
            else:
                known = MappedCudaFile(file.path, descriptor, tenant, file)
                self._files.append(known)
                for symbol in file.points.refused:
                    _log.warning(
                        "%s: %s is not probed: its first instructions would be single-stepped", file.path, symbol
                    )
            if known not in found:
                found.append(known)
        return found

    def _drop_overwritten(self) -> None:
        """Take the probes off files that were written over in place, and look for CUDA anew."""
        for file in list(self._files):
            if file.found.local and file_stamp(file.descriptor) != file.found.key.stamp:
                self._drop(file, "it was changed while processes had it mapped")
                for process in self._processes.values():
                    if file in process.files:
                        process.files.clear()
                        process.looks = process.awaited = 0

    def _probe(self, errors: list[str]) -> None:
        mapped = [file for process in self._processes.values() for file in process.files]
        wanted = [file for process in self._processes.values() for file in self._choose(process.files)]
        for file in list(self._files):
            if file not in mapped:
                self._drop(file, "no observed process maps it any longer")
            elif file not in wanted:
                self._detach(file, "its processes are watched elsewhere")
            elif file.links is None:
                points = self._points(file.points)
                try:
                    load_pages(self._inspection, file, points)
                    file.links = self._attach(f"/proc/self/fd/{file.descriptor}", file.points)
                except NotYet:
                    continue
                except (Refused, KernelRefusal) as refusal:
                    errors.append(f"{file.path}: {refusal.strerror if isinstance(refusal, OSError) else refusal}")
                    continue
                _log.info("attached to %s: %d functions of CUDA", file.path, len(points))

    def _detach(self, file: MappedCudaFile, why: str) -> None:
        if file.links is not None:
            file.links.close()
            file.links = None
            _log.info("detached from %s: %s", file.path, why)
            self._detached()

    def _drop(self, file: MappedCudaFile, why: str) -> None:
        self._detach(file, why)
        os.close(file.descriptor)
        self._files.remove(file)
