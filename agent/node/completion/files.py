"""What lies below NCCL's entry points, and which files of a process are CUDA's: asked of inspection processes."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from railscope.agent.node.inspection.questions import Found, Memory, Refused
from railscope.probes.libraries.elf import Elf, ElfError, ElfUnreadable, Segment
from railscope.probes.libraries.files import FileStamp, LibraryKey, library_key, on_local_storage, place_of
from railscope.probes.loading.links import ProbePoint
from railscope.probes.nccl.functions.cuda import CudaInterface, CudaPoints, cuda_points, library_points
from railscope.probes.nccl.functions.internals import InternalPoints, internal_points
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.memory.net_devices import DeviceArray, DeviceArrays, device_arrays
from railscope.probes.nccl.programs.errors import error_points
from railscope.probes.nccl.programs.failover import failover_points
from railscope.probes.nccl.records.internals import NetworkKind
from railscope.probes.processes.processes import (
    FileKey,
    MappedFileError,
    ProcessIdentity,
    executable_mappings,
    identity_of,
    open_mapped_file,
)
from railscope.probes.processes.processes import Mapping as MappedFile

_log = logging.getLogger("railscope.cuda")

MOST_VERDICTS: Final = 1 << 13
MOST_FILES: Final = 8
"""Of CUDA's, in one process: a runtime, a driver, and copies that came with libraries."""


@dataclass(frozen=True, slots=True)
class PointsBelow:
    """Where the programs below the entry points attach in one library, and where it keeps its devices' names."""

    internals: InternalPoints
    errors: tuple[ProbePoint, ...]
    failover: tuple[ProbePoint, ...]
    devices: DeviceArrays
    launches: Mapping[str, ProbePoint]
    """By program: where its launches are watched for CUDA; empty where that tells nothing."""


@dataclass(frozen=True, slots=True)
class BelowCalls:
    """Where are the functions below the entry points of this library, whose descriptor goes along?"""

    number: int
    path: str
    build_id: str | None
    pid: ClassVar[int] = 0
    builds: ClassVar[Collection[type]] = (
        PointsBelow, InternalPoints, ProbePoint, DeviceArrays, DeviceArray, Segment, NetworkKind,
    )  # fmt: skip
    seconds: ClassVar[float] = 15.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[PointsBelow]:
        """See `Question.find`."""
        structures = memory.get(_Builds).layouts.structures(self.build_id)
        (descriptor,) = descriptors
        try:
            with Elf.open(descriptor) as elf:
                return Found(
                    PointsBelow(
                        internal_points(elf, self.number),
                        error_points(elf, self.number),
                        failover_points(elf, self.number),
                        device_arrays(elf, structures),
                        library_points(elf, self.number),
                    )
                )
        except (ElfError, OSError) as error:
            raise Refused(str(error)) from None


@dataclass(frozen=True, slots=True)
class CudaFile:
    """A file of CUDA's; its place goes with it."""

    path: str
    key: LibraryKey
    local: bool
    """The kernel itself keeps it: asking about it waits for nobody."""
    points: CudaPoints


@dataclass(frozen=True, slots=True)
class CudaFiles:
    """What a process has mapped of CUDA."""

    files: tuple[CudaFile, ...]
    """In the order of their descriptors."""
    errors: tuple[str, ...]
    """What could not be read, one line each."""


@dataclass(frozen=True, slots=True)
class FindCuda:
    """Which files of CUDA's does this process map?  `look` counts how often it was asked."""

    procfs: str
    pid: int
    look: int
    builds: ClassVar[Collection[type]] = (
        CudaFiles, CudaFile, LibraryKey, FileStamp, CudaPoints, CudaInterface, ProbePoint,
    )  # fmt: skip
    seconds: ClassVar[float] = 5.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[CudaFiles]:
        """See `Question.find`."""
        del descriptors
        return memory.get(_CudaVerdicts).find(Path(self.procfs), self.pid)


class _Builds:
    """NCCL's known builds, read when the first library is opened."""

    def __init__(self) -> None:
        self.layouts: Final = Layouts.load()


class _CudaVerdicts:
    """Which files are not CUDA's, of those that one tenant's processes map."""

    def __init__(self) -> None:
        self._passed: OrderedDict[tuple[ProcessIdentity, FileKey], str] = OrderedDict()
        """By mapper and file, with its path."""

    def find(self, procfs: Path, pid: int) -> Found[CudaFiles]:
        identity = identity_of(procfs, pid)
        if identity is None:
            raise Refused(f"process {pid} has gone", gone=True)
        found: Found[CudaFiles] = Found(CudaFiles((), ()))
        files: list[CudaFile] = []
        errors: list[str] = []
        for mapping in executable_mappings(procfs, pid):
            if self._passed.get((identity, mapping.file)) == mapping.path or len(files) >= MOST_FILES:
                continue
            try:
                cuda_file = _cuda_file(procfs, pid, mapping)
            except MappedFileError as error:
                if not error.gone:
                    errors.append(str(error))
            except (ElfUnreadable, OSError) as error:
                errors.append(f"{mapping.path}: {error.strerror if isinstance(error, OSError) else error}")
            except ElfError as error:
                _log.debug("%s: %s", mapping.path, error)
            else:
                if cuda_file is None:
                    self._passed[identity, mapping.file] = mapping.path
                    if len(self._passed) > MOST_VERDICTS:
                        self._passed.popitem(last=False)
                else:
                    files.append(cuda_file[0])
                    found.descriptors.append(cuda_file[1])
        found.answer = CudaFiles(tuple(files), tuple(errors[:MOST_FILES]))
        return found


def _cuda_file(procfs: Path, pid: int, mapping: MappedFile) -> tuple[CudaFile, int] | None:
    """What a mapped file is, and its place (`place_of`); None: it is not CUDA's.

    Raises:
        MappedFileError, ElfError, OSError: that cannot be told.
    """
    descriptor = open_mapped_file(procfs, pid, mapping)
    try:
        with Elf.open(descriptor) as elf:
            points = cuda_points(elf)
            if points is None:
                return None
            key = library_key(descriptor, elf.build_id)
            return CudaFile(mapping.path, key, on_local_storage(descriptor), points), place_of(descriptor)
    finally:
        os.close(descriptor)
