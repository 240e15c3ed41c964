"""Finds the NCCL libraries that processes map, and attaches the probes to them.

A library is known by what it defines, not by its name: every file that a process maps executable is looked at once.
Probes are attached when its first mapper appears and dropped when its last one has exited or unmapped it, because a
link holds the file's mount.  Attaching goes through a descriptor (`/proc/self/fd/N`), which serves containers and
deleted files alike.

A verdict holds as long as its file stays as it was.  A file may be written over in place while it is mapped: one that
had no NCCL is looked at again when another process maps it, and a probed library loses its probes, whose places would
now lie inside other instructions.  What could not be read is no verdict: the next scan tries again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from railscope.agent.facts.snapshot import UNKNOWN, AttachedProbe
from railscope.probes.libraries.elf import Elf, ElfError, ElfUnreadable
from railscope.probes.libraries.files import FileChanges, FileStamp, file_stamp, library_key, same_library
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.links import Links, close_together
from railscope.probes.nccl.functions.probe_points import ProbePoints, contains_nccl, probe_points
from railscope.probes.nccl.layouts.layout import CommLayout, Layouts
from railscope.probes.nccl.programs.calls import MOST_LIBRARIES
from railscope.probes.processes.processes import (
    FileKey,
    MappedFileError,
    MappedFiles,
    ProcessIdentity,
    executable_mappings,
    identity_of,
    mapping_paths,
    open_mapped_file,
)
from railscope.probes.processes.processes import Mapping as MappedFile

_log = logging.getLogger("railscope.discovery")

_DELETED: Final = " (deleted)"
_UNMAPPED: Final = "no process maps it any longer"


class _NoNumberError(Exception):
    """As many libraries are observed as the programs have room for."""


class Attacher(Protocol):
    """What discovery needs of the loaded programs (probes/nccl/programs/calls.py)."""

    def attach(
        self, path: str, points: ProbePoints, library: int, layout: CommLayout | None, *, pid: int = 0
    ) -> Links: ...


@dataclass(slots=True)
class Library:
    """One file with NCCL in it."""

    number: int
    path: str
    """As its first mapper's mount namespace names it; ends in ` (deleted)` once it was removed or replaced."""
    stamp: FileStamp
    build_id: str | None
    descriptor: int
    nccl_version: str
    layout: CommLayout | None
    points: ProbePoints
    watch: int | None = None
    """The watch that reports writes to the file, if any."""
    links: Links | None = None
    mappers: set[ProcessIdentity] = field(default_factory=set)

    def probes(self) -> tuple[AttachedProbe, ...]:
        source = self.layout.source if self.layout else UNKNOWN
        programs = (
            ("calls", self.points.calls + self.points.calls_entry_only),
            ("init", self.points.inits),
            ("end", self.points.ends),
        )
        return tuple(
            AttachedProbe(self.path, self.nccl_version, name, self.links is not None and bool(points), source)
            for name, points in programs
        )


@dataclass(frozen=True, slots=True)
class _Passed:
    """A file without NCCL, and what must stay as it is for that to hold."""

    mapper: ProcessIdentity
    """A process that maps it: as long as it does, no other file gets this device and inode number."""
    path: str
    """Leads to the file; empty where only a right that we lack would lead there."""
    stamp: FileStamp
    damaged: bool
    """It could not be understood; it may be a file that is being written."""

    def is_unchanged(self) -> bool:
        """Whether the file is unchanged."""
        try:
            return not self.path or file_stamp(self.path) == self.stamp
        except OSError:
            return False


@dataclass(slots=True)
class _Round:
    """One look at some processes."""

    errors: list[str] = field(default_factory=list)
    """What went wrong, one line each."""
    failed: set[FileKey] = field(default_factory=set)
    """Files that another mapper need not be tried for in this round."""


class Libraries:
    """Keeps the probes where NCCL is.  Not thread-safe: the daemon's loop owns it."""

    def __init__(
        self,
        programs: Attacher,
        procfs: Path,
        *,
        wanted: Callable[[ProcessIdentity], bool],
        found: Callable[[ProcessIdentity, Library], None],
    ) -> None:
        """`wanted` selects processes to observe; `found` is called with each new mapper, before its first attach."""
        self._programs = programs
        self._procfs = procfs
        self._wanted = wanted
        self._found = found
        self._layouts = Layouts.load()
        self._mapped_files = MappedFiles(procfs)
        self._changes: FileChanges | None = None
        try:
            self._changes = FileChanges()
        except KernelRefusal as refusal:
            _log.warning("overwritten libraries will be noticed by scans only: %s", refusal.strerror)
        self._libraries: dict[int, Library] = {}
        self._by_file: dict[FileKey, int] = {}
        """Numbers of the libraries, by file."""
        self._without: dict[FileKey, _Passed] = {}
        self._looked: dict[ProcessIdentity, Mapping[FileKey, MappedFile]] = {}
        """What each process had mapped when it was looked at last."""
        self.errors: tuple[str, ...] = ()
        """What went wrong in the last scan, one line each."""
        self.changes = 0
        """How often a library, a mapper of one, or whether it is probed has changed."""

    @property
    def libraries(self) -> tuple[Library, ...]:
        return tuple(self._libraries.values())

    def scan(self) -> None:
        """Scan every process."""
        this = _Round()
        scan = self._mapped_files.scan()
        self._without = {
            file: passed for file, passed in self._without.items() if file in scan.processes.get(passed.mapper, ())
        }
        self._drop_overwritten()
        for identity, mappings in scan.processes.items():
            self._examine_mappings(identity, mappings, this)
        self._looked = dict(scan.processes)
        self._forget_unmapped(scan.processes)
        self.errors = tuple(this.errors)

    def scan_process(self, pid: int) -> list[str]:
        """Scan one process that has just mapped a file; returns errors, one line each."""
        identity = identity_of(self._procfs, pid)
        this = _Round()
        if identity is not None:
            mappings = {mapping.file: mapping for mapping in executable_mappings(self._procfs, pid)}
            self._drop_overwritten()
            self._examine_mappings(identity, mappings, this)
            self._looked[identity] = mappings
        return this.errors

    def file_of(self, library: int, mapper: ProcessIdentity) -> FileKey | None:
        """The file by which a process maps a library, the library by its number; None: it does not map it."""
        return next((file for file in self._looked.get(mapper, {}) if self._by_file.get(file) == library), None)

    @property
    def change_fd(self) -> int | None:
        """Becomes readable when a probed library is written to: `detach_changed` must come before its next mapper."""
        return self._changes.fileno() if self._changes is not None else None

    def detach_changed(self) -> None:
        """Take the probes off libraries that are being written to."""
        if self._changes is not None and self._changes.drain():
            self._drop_overwritten()

    def process_gone(self, identity: ProcessIdentity) -> None:
        """Forget a mapper; the last one takes the probes with it."""
        for library in list(self._libraries.values()):
            self._forget(library, identity)

    def rescan_process(self, identity: ProcessIdentity) -> None:
        """A mapper executes another program: what that maps is found anew, and until the next scan no probe is lost."""
        self._looked.pop(identity, None)
        for library in self._libraries.values():
            library.mappers.discard(identity)

    def close(self) -> None:
        """Detach everywhere."""
        close_together(library.links for library in self._libraries.values() if library.links is not None)
        for library in list(self._libraries.values()):
            self._drop(library, "railscope ends")
        if self._changes is not None:
            self._changes.close()
            self._changes = None

    def _examine_mappings(
        self, identity: ProcessIdentity, mappings: Mapping[FileKey, MappedFile], this: _Round
    ) -> None:
        before = self._looked.get(identity, {})
        for file, mapping in mappings.items():
            passed = self._without.get(file)
            if passed is not None:
                # Only a new mapper makes a path worth following: it may lead to a file server that has gone away.
                if (file in before and not passed.damaged) or passed.is_unchanged():
                    continue
                del self._without[file]
            number = self._by_file.get(file)
            if number is None and file in this.failed:
                continue
            if not self._wanted(identity):
                return
            try:
                library = self._libraries[number] if number is not None else self._open(identity, mapping, this)
            except MappedFileError as error:
                if not error.gone:
                    this.errors.append(str(error))
                continue
            if library is None:
                continue
            if mapping.deleted and mapping.path == library.path:
                library.path += _DELETED
            if identity not in library.mappers:
                library.mappers.add(identity)
                self.changes += 1
                self._found(identity, library)
            if library.links is None and file not in this.failed:
                self._attach(library, file, this)

    def _open(self, identity: ProcessIdentity, mapping: MappedFile, this: _Round) -> Library | None:
        """Examine a file; None if it has no NCCL, or if that cannot be determined now.

        Raises:
            MappedFileError: it cannot be opened.
        """
        descriptor = open_mapped_file(self._procfs, identity.pid, mapping)
        library, damaged = None, False
        try:
            stamp = file_stamp(descriptor)
            library = self._inspect(descriptor, mapping, stamp)
        except (ElfUnreadable, OSError, _NoNumberError) as error:
            this.failed.add(mapping.file)
            this.errors.append(f"{mapping.path}: {error.strerror if isinstance(error, OSError) else error}")
            return None
        except ElfError as error:
            _log.debug("%s: %s", mapping.path, error)
            damaged = True
        finally:
            if library is None or library.descriptor != descriptor:
                os.close(descriptor)
        if library is None:
            paths = mapping_paths(self._procfs, identity.pid, mapping)
            path = next((path for path in paths if _leads_to(path, stamp)), "")
            self._without[mapping.file] = _Passed(identity, path, stamp, damaged)
        else:
            self._by_file[mapping.file] = library.number
        return library

    def _inspect(self, descriptor: int, mapping: MappedFile, stamp: FileStamp) -> Library | None:
        with Elf.open(descriptor) as elf:
            if not contains_nccl(elf):
                return None
            key = library_key(descriptor, elf.build_id)
            for known in self._libraries.values():
                if same_library(library_key(known.descriptor, known.build_id), key):
                    return known
            number = next((n for n in range(MOST_LIBRARIES) if n not in self._libraries), None)
            if number is None:
                raise _NoNumberError(
                    f"not observed: {MOST_LIBRARIES} NCCL libraries are already mapped; end jobs that still map "
                    "replaced ones"
                )
            points = probe_points(elf, number)
            layout = self._layouts.layout_of(elf)
            version = self._layouts.nccl_version_of(elf)
        library = Library(number, mapping.path, stamp, key.build_id, descriptor, version, layout, points)
        for symbol in points.refused:
            _log.warning(
                "%s: %s is not probed: the kernel would single-step its first instructions", mapping.path, symbol
            )
        library.watch = self._watch(library)
        self._libraries[number] = library
        return library

    def _watch(self, library: Library) -> int | None:
        try:
            return self._changes.watch(library.descriptor) if self._changes is not None else None
        except KernelRefusal as refusal:
            _log.warning("%s: an overwrite will be noticed by scans only: %s", library.path, refusal.strerror)
            return None

    def _attach(self, library: Library, file: FileKey, this: _Round) -> None:
        try:
            library.links = self._programs.attach(
                f"/proc/self/fd/{library.descriptor}", library.points, library.number, library.layout
            )
        except KernelRefusal as refusal:
            this.failed.add(file)
            this.errors.append(f"{library.path}: {refusal.strerror}")
            return
        self.changes += 1
        _log.info(
            "attached to %s: NCCL %s, through %s, layout %s",
            library.path,
            library.nccl_version,
            "ncclEnqueueCheck" if library.points.through_enqueue_check else "the exported functions",
            library.layout.source if library.layout else f"{UNKNOWN}: communicators have no identity",
        )

    def _drop_overwritten(self) -> None:
        """Take the probes off libraries that were written over in place; the new content is found like any other."""
        for library in list(self._libraries.values()):
            try:
                if self._still_the_same(library):
                    continue
            except (ElfUnreadable, OSError) as error:
                _log.debug("%s: %s", library.path, error)
                continue
            self._drop(library, "it was overwritten while processes had it mapped")

    def _still_the_same(self, library: Library) -> bool:
        stamp = file_stamp(library.descriptor)
        if stamp == library.stamp:
            return True
        try:
            with Elf.open(library.descriptor) as elf:
                # Without a build-id only its size and time tell of content that has its functions in the same places.
                told = elf.build_id is not None or stamp.same_content(library.stamp)
                same = told and elf.build_id == library.build_id
                same = same and probe_points(elf, library.number) == library.points
        except ElfUnreadable:
            raise
        except ElfError:
            return False
        # A change of name or rights, deletion too, changes the stamp and nothing else.
        library.stamp = stamp
        if os.fstat(library.descriptor).st_nlink == 0 and not library.path.endswith(_DELETED):
            library.path += _DELETED
        return same

    def _forget_unmapped(self, processes: Mapping[ProcessIdentity, Mapping[FileKey, MappedFile]]) -> None:
        """Forget mappers that have gone, or that live on without the library."""
        for library in list(self._libraries.values()):
            files = {file for file, number in self._by_file.items() if number == library.number}
            for identity in list(library.mappers):
                seen = processes.get(identity, {})
                if any(file in seen for file in files):
                    continue
                # A scan may rest on what it read some scans ago, before the library was mapped.
                now = executable_mappings(self._procfs, identity.pid) if seen else []
                if not any(mapping.file in files for mapping in now):
                    self._forget(library, identity)
            if not library.mappers and library.number in self._libraries:
                self._drop(library, _UNMAPPED)

    def _forget(self, library: Library, identity: ProcessIdentity) -> None:
        if identity in library.mappers:
            library.mappers.remove(identity)
            self.changes += 1
        if not library.mappers:
            self._drop(library, _UNMAPPED)

    def _drop(self, library: Library, why: str) -> None:
        if library.links is not None:
            library.links.close()
            _log.info("detached from %s: %s", library.path, why)
        if self._changes is not None and library.watch is not None:
            self._changes.unwatch(library.watch)
        os.close(library.descriptor)
        self.changes += 1
        del self._libraries[library.number]
        self._by_file = {key: number for key, number in self._by_file.items() if number != library.number}


def _leads_to(path: str, stamp: FileStamp) -> bool:
    try:
        return file_stamp(path) == stamp
    except (OSError, ValueError):  # A NUL in the path: not from a kernel.
        return False
