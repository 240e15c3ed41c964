"""Which NCCL libraries are mapped on this host, by whom, and whether the probes are attached to them.

A library is known by what it defines, not by its name: every file that a process maps executable is looked at once.
Probes are attached when its first mapper appears and dropped when its last one has gone, because a link holds the
file's mount.  Attaching goes through a descriptor (`/proc/self/fd/N`), which serves containers and deleted files alike.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agent.snapshot import UNKNOWN, AttachedProbe
from probes.bpf_syscall import KernelRefusal
from probes.elf import Elf, ElfError
from probes.links import Links
from probes.nccl.layout import CommLayout, Layouts
from probes.nccl.library import ProbePoints, contains_nccl, probe_points
from probes.nccl.programs import MOST_LIBRARIES
from probes.processes import (
    FileKey,
    LibraryKey,
    MappedFileError,
    MappedFiles,
    Mapping,
    ProcessIdentity,
    executable_mappings,
    identity_of,
    library_key,
    open_mapped_file,
    same_library,
)

_log = logging.getLogger("railscope.discovery")


class Attacher(Protocol):
    """What discovery needs of the loaded programs (probes/nccl/programs.py)."""

    def attach(
        self, path: str, points: ProbePoints, library: int, layout: CommLayout | None, *, pid: int = 0
    ) -> Links: ...


@dataclass(slots=True)
class Library:
    """One file with NCCL in it."""

    number: int
    path: str
    key: LibraryKey
    descriptor: int
    nccl_version: str
    layout: CommLayout | None
    points: ProbePoints
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


class Discovery:
    """Keeps the probes where NCCL is.  Not thread-safe: the daemon's loop owns it."""

    def __init__(
        self,
        programs: Attacher,
        procfs: Path,
        *,
        wanted: Callable[[ProcessIdentity], bool],
        found: Callable[[ProcessIdentity, Library], None],
    ) -> None:
        """`wanted` says which processes may be observed; `found` hears of each new mapper, before its first attach."""
        self._programs = programs
        self._procfs = procfs
        self._wanted = wanted
        self._found = found
        self._layouts = Layouts.load()
        self._mapped_files = MappedFiles(procfs)
        self._libraries: dict[int, Library] = {}
        self._by_file: dict[FileKey, int] = {}
        """Numbers of the libraries, by file."""
        self._without: dict[FileKey, ProcessIdentity] = {}
        """Files without NCCL, each with a process that mapped it: while that lives, the file is no other one."""
        self.errors: tuple[str, ...] = ()
        """What went wrong in the last scan, one line each."""

    @property
    def libraries(self) -> tuple[Library, ...]:
        return tuple(self._libraries.values())

    def scan(self) -> None:
        """Look at every process."""
        errors: list[str] = []
        scan = self._mapped_files.scan()
        self._without = {
            key: identity for key, identity in self._without.items() if key in scan.processes.get(identity, ())
        }
        for identity, mappings in scan.processes.items():
            self._look(identity, mappings.values(), errors)
        gone = {mapper for library in self._libraries.values() for mapper in library.mappers} - set(scan.processes)
        for identity in gone:
            self.process_gone(identity)
        self.errors = tuple(errors)

    def look_at(self, pid: int) -> list[str]:
        """Look at one process that has just mapped something; returns what went wrong, one line each."""
        identity = identity_of(self._procfs, pid)
        errors: list[str] = []
        if identity is not None:
            self._look(identity, executable_mappings(self._procfs, pid), errors)
        return errors

    def process_gone(self, identity: ProcessIdentity) -> None:
        """Forget a mapper; the last one takes the probes with it."""
        for library in list(self._libraries.values()):
            library.mappers.discard(identity)
            if not library.mappers:
                self._drop(library)

    def close(self) -> None:
        """Detach everywhere."""
        for library in list(self._libraries.values()):
            self._drop(library)

    def _look(self, identity: ProcessIdentity, mappings: Iterable[Mapping], errors: list[str]) -> None:
        for mapping in mappings:
            if mapping.file in self._without:
                continue
            if not self._wanted(identity):
                return
            try:
                number = self._by_file.get(mapping.file)
                library = self._libraries[number] if number is not None else self._open(identity, mapping)
            except MappedFileError as error:
                if not error.gone:
                    errors.append(str(error))
                continue
            if library is None:
                continue
            if identity not in library.mappers:
                library.mappers.add(identity)
                self._found(identity, library)
            if library.links is None:
                self._attach(library, errors)

    def _open(self, identity: ProcessIdentity, mapping: Mapping) -> Library | None:
        """Look into a file; None when there is no NCCL in it.

        Raises:
            MappedFileError: it cannot be opened.
        """
        descriptor = open_mapped_file(self._procfs, identity.pid, mapping)
        try:
            library = self._inspect(descriptor, mapping)
        except (ElfError, OSError) as error:
            _log.debug("%s: %s", mapping.path, error)
            library = None
        if library is None or library.descriptor != descriptor:
            os.close(descriptor)
        if library is None:
            self._without[mapping.file] = identity
        else:
            self._by_file[mapping.file] = library.number
        return library

    def _inspect(self, descriptor: int, mapping: Mapping) -> Library | None:
        with Elf.open(descriptor) as elf:
            if not contains_nccl(elf):
                return None
            key = library_key(descriptor, elf.build_id)
            for known in self._libraries.values():
                if same_library(known.key, key):
                    return known
            number = next((n for n in range(MOST_LIBRARIES) if n not in self._libraries), None)
            if number is None:
                _log.warning("%s is not observed: %d NCCL libraries are mapped already", mapping.path, MOST_LIBRARIES)
                return None
            points = probe_points(elf, number)
            layout = self._layouts.layout_of(elf)
            version = self._layouts.nccl_version_of(elf)
        library = Library(number, mapping.path, key, descriptor, version, layout, points)
        for symbol in points.refused:
            _log.warning("%s: %s is not probed: its first instructions would be single-stepped", mapping.path, symbol)
        self._libraries[number] = library
        return library

    def _attach(self, library: Library, errors: list[str]) -> None:
        try:
            library.links = self._programs.attach(
                f"/proc/self/fd/{library.descriptor}", library.points, library.number, library.layout
            )
        except KernelRefusal as refusal:
            errors.append(f"{library.path}: {refusal.strerror}")
            return
        _log.info(
            "attached to %s: NCCL %s, layout %s",
            library.path,
            library.nccl_version,
            library.layout.source if library.layout else UNKNOWN,
        )

    def _drop(self, library: Library) -> None:
        if library.links is not None:
            library.links.close()
            _log.info("detached from %s: no process maps it any more", library.path)
        os.close(library.descriptor)
        del self._libraries[library.number]
        self._by_file = {key: number for key, number in self._by_file.items() if number != library.number}
