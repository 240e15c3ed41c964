"""What a process has mapped, and what is in those files: questions that inspection processes answer.

Any process may map any file, from a file system that he serves himself, and change it meanwhile.  So nothing here runs
in the daemon: it asks which NCCL libraries a process maps, and to have one of them opened.  Whoever looks at a file for
NCCL knows of its other communication libraries too (probes/libraries/communication.py): they tell whose bytes those of
a process are, and are looked for once a file.

A verdict holds as long as its file stays as it was.  A file that had no NCCL is looked at again when another process
maps it and its stamp has changed.  What could not be read is no verdict: whoever asks again has it tried again.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from railscope.agent.node.inspection.questions import Found, Memory, Refused
from railscope.probes.libraries.communication import NO_LIBRARY, CommunicationLibrary, libraries_in
from railscope.probes.libraries.elf import Elf, ElfError, ElfUnreadable
from railscope.probes.libraries.files import FileStamp, LibraryKey, file_stamp, library_key, on_local_storage, place_of
from railscope.probes.loading.links import ProbePoint
from railscope.probes.nccl.functions.probe_points import ProbePoints, probe_points
from railscope.probes.nccl.layouts.layout import CommLayout, Layouts
from railscope.probes.processes.processes import (
    FileKey,
    MappedFileError,
    Mapping,
    ProcessIdentity,
    executable_mappings,
    identity_of,
    mapping_paths,
    open_mapped_file,
    program_mark,
)

_log = logging.getLogger("railscope.discovery")

MOST_VERDICTS: Final = 1 << 16
MOST_PROCESSES: Final = 1 << 14
MOST_FILES: Final = 256
"""Of one process, that are NCCL or could not be read: more are a file of many copies."""
MOST_ERRORS: Final = 16
_NCCL_ALONE: Final = frozenset({CommunicationLibrary.NCCL})


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a process maps."""

    identity: ProcessIdentity
    nccl: tuple[Mapping, ...]
    """Files with NCCL in them."""
    errors: tuple[str, ...] = ()
    """What could not be read, one line each."""
    more: int = 0
    """Files with NCCL beyond `MOST_FILES`."""
    libraries: frozenset[CommunicationLibrary] = NO_LIBRARY
    """All communication libraries that it maps, NCCL among them."""
    others: tuple[Mapping, ...] = ()
    """Files with other ones in them, `MOST_FILES` at most."""


@dataclass(frozen=True, slots=True)
class LibraryFile:
    """What a file with NCCL in it holds; its place goes with it."""

    key: LibraryKey
    local: bool
    """The kernel itself keeps it: asking about it waits for nobody."""
    nccl_version: str
    layout: CommLayout | None
    points: ProbePoints

    @property
    def stamp(self) -> FileStamp:
        return self.key.stamp


@dataclass(frozen=True, slots=True)
class Content:
    """What a file holds now that it has changed."""

    stamp: FileStamp
    linked: bool
    """It has a name."""
    build_id: str | None
    points: ProbePoints | None
    """None: it is no library any more."""


@dataclass(frozen=True, slots=True)
class Look:
    """Which files with NCCL does this process map, and which other communication libraries?"""

    procfs: str
    pid: int
    builds: ClassVar[Collection[type]] = (Sighting, ProcessIdentity, Mapping, CommunicationLibrary)
    seconds: ClassVar[float] = 5.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[Sighting]:
        """See `Question.find`."""
        del descriptors
        return Found(memory.get(_Verdicts).look(Path(self.procfs), self.pid))


@dataclass(frozen=True, slots=True)
class OpenLibrary:
    """Where are the functions of a file that this process maps, for a library numbered 0?  See `place_of`."""

    procfs: str
    pid: int
    mapping: Mapping
    builds: ClassVar[Collection[type]] = (LibraryFile, LibraryKey, FileStamp, CommLayout, ProbePoints, ProbePoint)
    seconds: ClassVar[float] = 15.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[LibraryFile]:
        """See `Question.find`."""
        del descriptors
        try:
            descriptor = open_mapped_file(Path(self.procfs), self.pid, self.mapping)
        except MappedFileError as error:
            raise Refused(str(error), gone=error.gone) from None
        try:
            with Elf.open(descriptor) as elf:
                layouts = memory.get(_Builds).layouts
                points = probe_points(elf, 0)
                key, local = library_key(descriptor, elf.build_id), on_local_storage(descriptor)
                file = LibraryFile(key, local, layouts.nccl_version_of(elf), layouts.layout_of(elf), points)
            return Found(file, [place_of(descriptor)])
        except (ElfError, OSError) as error:
            raise Refused(f"{self.mapping.path}: {_words(error)}") from None
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Reexamine:
    """What does this library, whose descriptor goes along, hold now?  `pid` is one of its mappers."""

    pid: int
    number: int
    changed_ns: int
    """Of its stamp as it is known: another change is another question."""
    builds: ClassVar[Collection[type]] = (Content, FileStamp, ProbePoints, ProbePoint)
    seconds: ClassVar[float] = 15.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[Content]:
        """See `Question.find`."""
        del memory
        (descriptor,) = descriptors
        try:
            stamp, linked = file_stamp(descriptor), os.fstat(descriptor).st_nlink > 0
            with Elf.open(descriptor) as elf:
                return Found(Content(stamp, linked, elf.build_id, probe_points(elf, 0)))
        except (ElfUnreadable, OSError) as error:
            raise Refused(_words(error)) from None
        except ElfError:
            return Found(Content(stamp, linked, None, None))


@dataclass(frozen=True, slots=True)
class Stamped:
    """What is the stamp of this library, whose descriptor goes along, in this second?"""

    pid: int
    number: int
    second: int
    builds: ClassVar[Collection[type]] = (FileStamp,)
    seconds: ClassVar[float] = 5.0

    def find(self, memory: Memory, descriptors: Collection[int]) -> Found[FileStamp]:
        """See `Question.find`."""
        del memory
        (descriptor,) = descriptors
        try:
            return Found(file_stamp(descriptor))
        except OSError as error:
            raise Refused(_words(error)) from None


class _Builds:
    """NCCL's known builds, read when the first library is opened."""

    def __init__(self) -> None:
        self.layouts: Final = Layouts.load()


@dataclass(frozen=True, slots=True)
class _Verdict:
    libraries: frozenset[CommunicationLibrary]
    path: str
    """Leads to the file; empty where only a right that we lack would lead there."""
    stamp: FileStamp
    damaged: bool
    """It could not be understood; it may be a file that is being written."""

    def holds(self) -> bool:
        """Whether the file is still as it was."""
        try:
            return self.path != "" and file_stamp(self.path) == self.stamp
        except OSError:
            return False


class _Verdicts:
    """Which files have communication libraries in them, of those that one tenant's processes map."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[FileKey, _Verdict] = OrderedDict()
        self._looked: OrderedDict[tuple[ProcessIdentity, int | None], frozenset[FileKey]] = OrderedDict()
        """What each process, while it ran one program, had mapped when it was looked at last."""

    def look(self, procfs: Path, pid: int) -> Sighting:
        """Look at all that a process maps.

        Raises:
            Refused: it has gone.
        """
        identity = identity_of(procfs, pid)
        if identity is None:
            raise Refused(f"process {pid} has gone", gone=True)
        running = identity, program_mark(procfs, identity)
        before = self._looked.pop(running, frozenset())
        mappings = executable_mappings(procfs, pid)
        nccl: list[Mapping] = []
        others: list[Mapping] = []
        libraries = NO_LIBRARY
        errors: list[str] = []
        for mapping in mappings:
            try:
                verdict = self._verdict(procfs, pid, mapping, seen=mapping.file in before)
            except Refused as refused:
                if not refused.gone:
                    errors.append(str(refused))
                continue
            libraries |= verdict.libraries
            if CommunicationLibrary.NCCL in verdict.libraries:
                nccl.append(mapping)
            if verdict.libraries - _NCCL_ALONE:
                others.append(mapping)
        self._looked[running] = frozenset(mapping.file for mapping in mappings)
        if len(self._looked) > MOST_PROCESSES:
            self._looked.popitem(last=False)
        return Sighting(
            identity,
            tuple(nccl[:MOST_FILES]),
            tuple(errors[:MOST_ERRORS]),
            max(0, len(nccl) - MOST_FILES),
            libraries,
            tuple(others[:MOST_FILES]),
        )

    def _verdict(self, procfs: Path, pid: int, mapping: Mapping, *, seen: bool) -> _Verdict:
        known = self._verdicts.get(mapping.file)
        # Only a new mapper makes a path worth following: it may lead to a file server that has gone away.
        if known is not None and ((seen and not known.damaged) or known.holds()):
            self._verdicts.move_to_end(mapping.file)
            return known
        verdict = self._verdicts[mapping.file] = _read(procfs, pid, mapping)
        if len(self._verdicts) > MOST_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict


def _read(procfs: Path, pid: int, mapping: Mapping) -> _Verdict:
    try:
        descriptor = open_mapped_file(procfs, pid, mapping)
    except MappedFileError as error:
        raise Refused(str(error), gone=error.gone) from None
    libraries, damaged = NO_LIBRARY, False
    try:
        stamp = file_stamp(descriptor)
        with Elf.open(descriptor) as elf:
            libraries = libraries_in(elf)
    except (ElfUnreadable, OSError) as error:
        raise Refused(f"{mapping.path}: {_words(error)}") from None
    except ElfError as error:
        _log.debug("%s: %s", mapping.path, error)
        damaged = True
    finally:
        os.close(descriptor)
    paths = mapping_paths(procfs, pid, mapping)
    return _Verdict(libraries, next((path for path in paths if _leads_to(path, stamp)), ""), stamp, damaged)


def _leads_to(path: str, stamp: FileStamp) -> bool:
    try:
        return file_stamp(path) == stamp
    except (OSError, ValueError):  # A NUL in the path: not from a kernel.
        return False


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
