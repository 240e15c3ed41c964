"""Finds the NCCL libraries that processes map, and attaches the probes to them.

A library is known by what it defines, not by its name: every file that a process maps executable is looked at once, by
the inspection process of whoever runs that process (agent/node/targets/sightings.py).  Probes are attached when its
first mapper appears, and stay for a while after its last one has gone or let go of it: the next job maps it before
anybody could tell.  They do not stay for ever, because a link holds the file's mount.  Attaching goes through a
descriptor (`/proc/self/fd/N`), which serves containers and deleted files alike.

A file may be written over in place while it is mapped: a probed library loses its probes then, whose places would now
lie inside other instructions, and is found anew.

The programs have room for so many libraries.  A tenant may have as many as are free, and no more than a quarter of all:
who maps one library after the other comes to his own limit first.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import AttachedProbe
from railscope.agent.node.inspection.inspection import Inspection
from railscope.agent.node.inspection.pages import load_pages
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.inspection.tenants import Tenant, tenant_of
from railscope.agent.node.targets.sightings import LibraryFile, Look, OpenLibrary, Reexamine, Sighting, Stamped
from railscope.probes.clock import Clock
from railscope.probes.libraries.communication import CommunicationLibrary
from railscope.probes.libraries.files import (
    SOME_DROPPED,
    FileChanges,
    FileStamp,
    LibraryKey,
    file_stamp,
    same_library,
)
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.links import Links, close_together
from railscope.probes.nccl.functions.probe_points import ProbePoints
from railscope.probes.nccl.layouts.layout import CommLayout
from railscope.probes.nccl.programs.calls import MOST_LIBRARIES
from railscope.probes.processes.processes import AddressSpaces, FileKey, ProcessIdentity, identity_of
from railscope.probes.processes.processes import Mapping as ExecutableMapping
from railscope.probes.shares import FairMemory

_log = logging.getLogger("railscope.discovery")

LINGER_NS: Final = 60_000_000_000
"""How long probes stay on a library that nobody maps any more."""
TENANTS_SHARE: Final = 64
"""Of the libraries that the programs have room for, so many are one tenant's at most; fewer where fewer are free."""
_REMEMBERED_NS: Final = 10_000_000_000
_MOST_REMEMBERED: Final = 1_024
"""Processes that have ended of which it is known a while longer what they mapped: their connections end with them.  Of
more the oldest are forgotten, of whoever has most of them first."""
_CROWD: Final = 64
"""Processes that map a library; fewer are all looked at, and waited for, before the agent says that it is ready."""
_Remembered = tuple[int, ProcessIdentity, frozenset[CommunicationLibrary]]
_DELETED: Final = " (deleted)"
_UNMAPPED: Final = "no process maps it any longer"


class _NoNumberError(Exception):
    """As many libraries are observed as the programs have room for, or as this tenant may have; says which."""


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
    tenant: Tenant
    """Who mapped it first, and whose inspection process looks at it."""
    descriptor: int
    """Leads to the file, and does not hold it open."""
    file: LibraryFile
    points: ProbePoints
    """Those of `file`, for its number."""
    stamp: FileStamp
    watch: int | None = None
    """The watch that reports writes to the file, if any."""
    links: Links | None = None
    """On what makes and ends communicators; None: it is not probed."""
    calls: Links | None = None
    """On its calls; None: it is not probed, or watched without a probe on any call."""
    detaching: Future[None] | None = None
    """Probes that are coming off its calls."""
    mappers: set[ProcessIdentity] = field(default_factory=set)
    names: set[FileKey] = field(default_factory=set)
    """The file, by every mount that it was mapped through."""
    unmapped_ns: int | None = None
    """Since when nobody maps it."""

    @property
    def build_id(self) -> str | None:
        return self.file.key.build_id

    @property
    def nccl_version(self) -> str:
        return self.file.nccl_version

    @property
    def layout(self) -> CommLayout | None:
        return self.file.layout

    @property
    def local(self) -> bool:
        return self.file.local

    @property
    def key(self) -> LibraryKey:
        """As it is now: a change of name or rights changes the stamp."""
        return replace(self.file.key, stamp=self.stamp)

    def probes(self) -> tuple[AttachedProbe, ...]:
        source = self.layout.source if self.layout else UNKNOWN
        programs = (
            ("calls", self.calls, self.points.calls + self.points.calls_entry_only),
            ("init", self.links, self.points.inits),
            ("end", self.links, self.points.ends),
        )
        return tuple(
            AttachedProbe(self.path, self.nccl_version, name, links is not None and bool(points), source)
            for name, links, points in programs
            # A library that is watched has none on its calls, and lacks nothing.
            if links is not None or self.links is None
        )


@dataclass(frozen=True, slots=True)
class _Mapper:
    """A process that maps NCCL, as it was looked at last."""

    tenant: Tenant
    files: Mapping[FileKey, ExecutableMapping]


@dataclass(slots=True)
class _Round:
    """One look at some processes."""

    errors: list[str] = field(default_factory=list)
    """What went wrong, one line each."""
    failed: set[FileKey] = field(default_factory=set)
    """Files that another mapper need not be tried for in this round."""
    checked: set[int] = field(default_factory=set)
    """Numbers of libraries that need no further check."""


class Libraries:
    """Keeps the probes where NCCL is.  Not thread-safe: the daemon's loop owns it."""

    def __init__(
        self,
        programs: Attacher,
        procfs: Path,
        inspection: Inspection,
        clock: Clock,
        *,
        wanted: Callable[[ProcessIdentity], bool],
        found: Callable[[ProcessIdentity, Library], None],
        sighted: Callable[[ProcessIdentity, Tenant, Sequence[ExecutableMapping]], object] = lambda *_: None,
        linger_ns: int = LINGER_NS,
    ) -> None:
        """`wanted` says which processes may be observed; `found` hears of each new mapper, before its first attach.

        `sighted` hears of each look at a process, with the files of other libraries that it maps.  `linger_ns`: how
        long probes stay after the last mapper.
        """
        self._programs = programs
        self._procfs = procfs
        self._inspection = inspection
        self._clock = clock
        self._wanted = wanted
        self._found = found
        self._sighted = sighted
        self._linger_ns = linger_ns
        self._address_spaces = AddressSpaces(procfs)
        self._changes: FileChanges | None = None
        try:
            self._changes = FileChanges()
        except KernelRefusal as refusal:
            _log.warning("overwritten libraries will be noticed by scans only: %s", refusal.strerror)
        self._libraries: dict[int, Library] = {}
        self._by_file: dict[FileKey, int] = {}
        """Numbers of the libraries, by file."""
        self._looked: dict[ProcessIdentity, _Mapper] = {}
        self._communication: dict[int, tuple[ProcessIdentity, frozenset[CommunicationLibrary], Tenant]] = {}
        """By pid, with whose process it is, of every process that was looked at; read by other threads too."""
        self._remembered = FairMemory[Tenant, int, _Remembered](_MOST_REMEMBERED)
        """By pid, of those that have ended: until when it counts, which one it was, and what it mapped."""
        self.errors: tuple[str, ...] = ()
        """What went wrong in the last scan, one line each."""
        self.unfinished = False
        """Whether the last scan left processes to the next one."""
        self.changes = 0
        """How often a library, a mapper of one, or whether it is probed has changed."""
        self.left_out: Counter[Tenant] = Counter()
        """Libraries that were not observed for want of room, by whose they are; never falls."""
        self._left_out: set[tuple[Tenant, FileKey]] = set()
        """Those of them that were counted."""
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="detach calls")

    @property
    def libraries(self) -> tuple[Library, ...]:
        return tuple(self._libraries.values())

    @property
    def probed_in_a_crowd(self) -> bool:
        """Whether a library is probed, and so many processes map one that nobody waits for all of them."""
        mappers = sum(len(library.mappers) for library in self.libraries)
        return mappers >= _CROWD and any(library.links is not None for library in self.libraries)

    def scan(self, budget_ns: int | None = None) -> None:
        """Look at every process that may have mapped something since the last scan.

        `budget_ns`: once a library is probed in a crowd, so long at most; the processes that are left are due at the
        next scan (`unfinished`).  None: all are looked at.
        """
        began_ns, self.unfinished = self._clock.monotonic_ns(), False
        this = _Round()
        survey = self._address_spaces.survey()
        for gone in self._looked.keys() - survey.living:
            del self._looked[gone]
        for pid in [pid for pid, (identity, *_) in self._communication.items() if identity not in survey.living]:
            self._remember(pid)
        self._drop_overwritten(self.libraries, this)
        for number, identity in enumerate(survey.due):
            spent = number > 0 and budget_ns is not None and self._clock.monotonic_ns() - began_ns >= budget_ns
            if spent and (self.unfinished or self.probed_in_a_crowd):
                self.unfinished = True
                self._address_spaces.again(identity)
            elif not self._look(identity, this):
                self._address_spaces.again(identity)
        # What could not be opened, or attached to, is tried again although its processes are as they were.
        for identity in self._looked.keys() - set(survey.due):
            self._take(identity, this)
        self._forget_unmapped(survey.living)
        if self._left_out:
            mapped = {file for mapper in self._looked.values() for file in mapper.files}
            self._left_out = {one for one in self._left_out if one[1] in mapped}
        self.errors = tuple(this.errors)

    def scan_process(self, pid: int) -> list[str]:
        """Scan one process that has just mapped a file; returns errors, one line each."""
        identity = identity_of(self._procfs, pid)
        this = _Round()
        # Whoever maps NCCL is looked at by the next scan too: its address space may have its old size again by then.
        if identity is not None and (not self._look(identity, this) or identity in self._looked):
            self._address_spaces.again(identity)
        return this.errors

    def file_of(self, library: int, mapper: ProcessIdentity) -> FileKey | None:
        """The file by which a process maps a library, the library by its number; None: it does not map it."""
        looked = self._looked.get(mapper)
        return next((file for file in looked.files if self._by_file.get(file) == library), None) if looked else None

    def communication_of(self, pid: int) -> frozenset[CommunicationLibrary] | None:
        """The communication libraries that a process maps, or mapped until it ended; safe from any thread.

        None: it was not looked at (yet), or has mapped something since.
        """
        if (known := self._communication.get(pid)) is not None:
            return known[1]
        remembered = self._remembered.get(pid)
        if remembered is None or self._clock.monotonic_ns() >= remembered[0]:
            return None
        _, ended, mapped = remembered
        # Nobody may have waited for it yet; or its pid is another's by now.
        return mapped if identity_of(self._procfs, pid) in (None, ended) else None

    @property
    def change_fd(self) -> int | None:
        """Becomes readable when a probed library is written to: `detach_changed` must come before its next mapper."""
        return self._changes.fileno() if self._changes is not None else None

    def detach_changed(self) -> None:
        """Take the probes off libraries that are being written to."""
        if self._changes is not None:
            written = self._changes.drain()
            due = self.libraries if SOME_DROPPED in written else [one for one in self.libraries if one.watch in written]
            self._drop_overwritten(due, _Round(), written)

    def process_gone(self, identity: ProcessIdentity) -> None:
        """Forget a mapper; the probes linger."""
        self._looked.pop(identity, None)
        if self._communication.get(identity.pid, (None,))[0] == identity:
            self._remember(identity.pid)
        for library in list(self._libraries.values()):
            self._forget(library, identity)

    def _remember(self, pid: int) -> None:
        identity, mapped, tenant = self._communication[pid]
        # Before it is forgotten there: other threads ask meanwhile.
        self._remembered.put(tenant, pid, (self._clock.monotonic_ns() + _REMEMBERED_NS, identity, mapped))
        del self._communication[pid]

    def rescan_process(self, identity: ProcessIdentity) -> None:
        """A mapper executes another program: what that maps is found anew, and until the next scan no probe is lost."""
        self._looked.pop(identity, None)
        self._communication.pop(identity.pid, None)
        for library in self._libraries.values():
            self._forget(library, identity)

    def expire(self) -> None:
        """Take the probes off libraries that nobody has mapped for long enough."""
        now_ns = self._clock.monotonic_ns()
        for library in self.libraries:
            if library.unmapped_ns is not None and now_ns - library.unmapped_ns >= self._linger_ns:
                self._drop(library, _UNMAPPED)

    @property
    def uncounted(self) -> frozenset[int]:
        """Numbers of probed libraries whose calls meet no probe any more."""
        return frozenset(
            library.number
            for library in self.libraries
            if library.links is not None and library.calls is None and _is_detached(library)
        )

    def set_watched(self, numbers: Collection[int]) -> list[str]:
        """Take the probes off the calls of these libraries, and put them back on those of all others; returns errors.

        They come off aside, as the kernel takes its time: `uncounted` says when they have.
        """
        errors = []
        for library in self.libraries:
            if library.number in numbers and library.calls is not None:
                library.detaching, library.calls = self._aside.submit(library.calls.close), None
                self.changes += 1
            elif library.number not in numbers and library.links is not None and library.calls is None:
                try:
                    if _is_detached(library):
                        self._attach_calls(library)
                except NotYet:
                    continue
                except (Refused, KernelRefusal) as refusal:
                    why = refusal.strerror if isinstance(refusal, OSError) else refusal
                    errors.append(f"{library.path}: its calls cannot be counted again: {why}")
        return errors

    def close(self) -> None:
        """Detach everywhere."""
        self._aside.shutdown()
        close_together(
            links
            for library in self._libraries.values()
            for links in (library.links, library.calls)
            if links is not None
        )
        for library in list(self._libraries.values()):
            self._drop(library, "railscope ends")
        if self._changes is not None:
            self._changes.close()
            self._changes = None

    def _look(self, identity: ProcessIdentity, this: _Round) -> bool:
        """See what a process maps; False: that is not known yet."""
        if not self._wanted(identity):
            return True
        tenant = tenant_of(self._procfs, identity.pid)
        try:
            sighting: Sighting = self._inspection.ask(tenant, Look(str(self._procfs), identity.pid)).answer
        except NotYet:
            # What it mapped before tells nothing of a socket that it may have opened since.
            self._communication.pop(identity.pid, None)
            return False
        except Refused:  # it has gone
            return True
        if sighting.identity != identity:
            return False
        this.errors += sighting.errors
        if sighting.errors:  # what could not be read is no verdict
            self._address_spaces.again(identity)
        if sighting.more:
            this.errors.append(
                f"process {identity.pid} maps {sighting.more + len(sighting.nccl)} files with NCCL: "
                f"{len(sighting.nccl)} of them are looked at"
            )
        self._communication[identity.pid] = identity, sighting.libraries, tenant
        self._sighted(identity, tenant, sighting.others)
        before = self._numbers(self._looked.pop(identity, None))
        mapper = _Mapper(tenant, {mapping.file: mapping for mapping in sighting.nccl})
        if mapper.files:
            self._looked[identity] = mapper
        for number in before - self._numbers(mapper):
            self._forget(self._libraries[number], identity)
        self._take(identity, this)
        return True

    def _numbers(self, mapper: _Mapper | None) -> set[int]:
        """The libraries that a process maps, by their numbers."""
        found = (self._by_file.get(file) for file in mapper.files) if mapper is not None else ()
        return {number for number in found if number is not None}

    def _take(self, identity: ProcessIdentity, this: _Round) -> None:
        """Open and attach to what a process maps, as far as that was not done."""
        mapper = self._looked.get(identity)
        if mapper is None:
            return
        for file, mapping in mapper.files.items():
            number = self._by_file.get(file)
            if number is not None:
                self._drop_overwritten((self._libraries[number],), this)
                number = self._by_file.get(file)
            if number is None and file in this.failed:
                continue
            try:
                if number is not None:
                    library = self._libraries[number]
                else:
                    library = self._open(identity, mapper.tenant, mapping, this)
            except NotYet:
                continue
            except Refused as refused:
                if not refused.gone:
                    this.failed.add(file)
                    this.errors.append(str(refused))
                continue
            except _NoNumberError as error:
                this.failed.add(file)
                this.errors.append(f"{mapping.path}: {error}")
                continue
            if mapping.deleted and mapping.path == library.path:
                library.path += _DELETED
            if identity not in library.mappers:
                library.mappers.add(identity)
                library.unmapped_ns = None
                self.changes += 1
                self._found(identity, library)
            if library.links is None and file not in this.failed:
                self._attach(library, file, this)

    def _open(self, identity: ProcessIdentity, tenant: Tenant, mapping: ExecutableMapping, this: _Round) -> Library:
        """The library that a file is: known through another mount, or new.

        Raises:
            NotYet, Refused: it is not known what is in it.
            _NoNumberError: there is no room for it.
        """
        # A tenant's own limit is known before his file is opened: he may map as many as he likes.
        self._make_room(tenant, mapping.file)
        opened = self._inspection.ask(tenant, OpenLibrary(str(self._procfs), identity.pid, mapping))
        file, (descriptor,) = opened.answer, opened.descriptors
        library = None
        try:
            # A library that was written over may be this very file: its probes come off first.
            self._drop_overwritten(self.libraries, this)
            library = next((one for one in self.libraries if same_library(one.key, file.key)), None)
            if library is None:
                number = self._free_number(tenant, mapping.file)
                points = file.points.numbered(number)
                library = Library(number, mapping.path, tenant, descriptor, file, points, file.stamp)
                self._begin(library)
        finally:
            if library is None or library.descriptor != descriptor:
                os.close(descriptor)
        library.names.add(mapping.file)
        self._by_file[mapping.file] = library.number
        return library

    def _make_room(self, tenant: Tenant, file: FileKey) -> None:
        """Make sure that a tenant has fewer libraries than his share: what lingers of his makes room.

        Raises:
            _NoNumberError: he has all of it mapped.
        """
        own = [library for library in self.libraries if library.tenant == tenant]
        if len(own) >= TENANTS_SHARE and not self._drop_lingering(own):
            self._count_left_out(tenant, file)
            raise _NoNumberError(
                f"not observed, for uid {tenant.label} has {TENANTS_SHARE} NCCL libraries mapped already, the most "
                "that one user or container may have observed"
            )

    def _free_number(self, tenant: Tenant, file: FileKey) -> int:
        """A number for one more library; what lingers makes room.

        Raises:
            _NoNumberError: the tenant has as many mapped as there are left, the rule of probes/bpf/shares.h.
        """
        mapped = [library.tenant for library in self.libraries if library.unmapped_ns is None]
        if mapped.count(tenant) >= MOST_LIBRARIES - len(mapped):
            self._count_left_out(tenant, file)
            raise _NoNumberError(
                f"not observed: {len(mapped)} NCCL libraries are already mapped, {mapped.count(tenant)} of them by uid "
                f"{tenant.label}, and {MOST_LIBRARIES} can be observed; end jobs that still map replaced ones"
            )
        if len(self._libraries) >= MOST_LIBRARIES:
            self._drop_lingering(self.libraries)
        return next(number for number in range(MOST_LIBRARIES) if number not in self._libraries)

    def _drop_lingering(self, libraries: Sequence[Library]) -> bool:
        """Take the probes off the library that no process has mapped for longest; False: each is mapped."""
        lingering = [one for one in libraries if one.unmapped_ns is not None]
        if lingering:
            self._drop(min(lingering, key=lambda one: one.unmapped_ns or 0), "its place is needed")
        return bool(lingering)

    def _count_left_out(self, tenant: Tenant, file: FileKey) -> None:
        if (tenant, file) not in self._left_out:
            self._left_out.add((tenant, file))
            self.left_out[tenant] += 1

    def _begin(self, library: Library) -> None:
        for symbol in library.points.refused:
            _log.warning("%s: %s is not probed: its first instructions would be single-stepped", library.path, symbol)
        library.watch = self._watch(library)
        self._libraries[library.number] = library

    def _watch(self, library: Library) -> int | None:
        try:
            return self._changes.watch(library.descriptor) if self._changes is not None else None
        except KernelRefusal as refusal:
            _log.warning("%s: an overwrite will be noticed by scans only: %s", library.path, refusal.strerror)
            return None

    def _attach(self, library: Library, file: FileKey, this: _Round) -> None:
        try:
            load_pages(self._inspection, library, library.points.every, _any_pid(library))
            links = self._programs.attach(_path(library), library.points.seldom, library.number, library.layout)
            try:
                # Also where its calls are to meet none: whether they can do without is known a moment later.
                self._attach_calls(library)
            except (NotYet, Refused, KernelRefusal):
                links.close()
                raise
            library.links = links
        except NotYet:
            this.failed.add(file)
            return
        except (Refused, KernelRefusal) as refusal:
            this.failed.add(file)
            this.errors.append(f"{library.path}: {refusal.strerror if isinstance(refusal, OSError) else refusal}")
            return
        self.changes += 1
        _log.info(
            "attached to %s: NCCL %s, through %s, layout %s",
            library.path,
            library.nccl_version,
            "ncclEnqueueCheck" if library.points.through_enqueue_check else "the exported functions",
            library.layout.source if library.layout else f"{UNKNOWN}: communicators have no identity",
        )

    def _attach_calls(self, library: Library) -> None:
        """Raises NotYet, Refused or KernelRefusal where that cannot be done (yet)."""
        points = library.points.often
        load_pages(self._inspection, library, points.every, _any_pid(library))
        library.calls = self._programs.attach(_path(library), points, library.number, library.layout)
        library.detaching = None
        self.changes += 1

    def _drop_overwritten(
        self, libraries: Iterable[Library], this: _Round, written: Collection[int] = frozenset()
    ) -> None:
        """Take the probes off libraries that were written over in place; the new content is found like any other.

        `written`: watches of files that were written to.
        """
        for library in libraries:
            if library.number in this.checked:
                continue
            this.checked.add(library.number)
            if not self._still_the_same(library, written=library.watch in written):
                self._drop(library, "it was written over while processes had it mapped")

    def _still_the_same(self, library: Library, *, written: bool) -> bool:
        """Whether its probes may stay; not where it was written to, and what it holds now is not known."""
        stamp = library.stamp
        try:
            stamp = self._stamp(library)
            if stamp == library.stamp and not written:
                return True
            question = Reexamine(_any_pid(library), library.number, stamp.changed_ns)
            content = self._inspection.ask(library.tenant, question, (library.descriptor,)).answer
        except (NotYet, Refused, OSError) as error:
            # Its tenant may be resting, and the file another's too.
            _log.debug("%s: %s", library.path, error)
            return stamp.same_content(library.stamp) and not written
        if content.points is None:
            return False
        # Without a build-id only its size and time tell of content that has its functions in the same places.
        told = content.build_id is not None or content.stamp.same_content(library.stamp)
        same = told and content.build_id == library.build_id and content.points == library.file.points
        # A change of name or rights, deletion too, changes the stamp and nothing else.
        library.stamp = content.stamp
        if not content.linked and not library.path.endswith(_DELETED):
            library.path += _DELETED
        return same

    def _stamp(self, library: Library) -> FileStamp:
        """Raises NotYet, Refused or OSError where it cannot be told."""
        if library.file.local:
            return file_stamp(library.descriptor)
        # A server of files may be the tenant's own: it is asked by who may wait for it.
        second = self._clock.monotonic_ns() // 1_000_000_000
        question = Stamped(_any_pid(library), library.number, second)
        return self._inspection.ask(library.tenant, question, (library.descriptor,)).answer

    def _forget_unmapped(self, living: frozenset[ProcessIdentity]) -> None:
        """Forget mappers that have gone, or that live on without the library."""
        mapped = {identity: self._numbers(mapper) for identity, mapper in self._looked.items() if identity in living}
        for library in self.libraries:
            for identity in [one for one in library.mappers if library.number not in mapped.get(one, ())]:
                self._forget(library, identity)
        self.expire()

    def _forget(self, library: Library, identity: ProcessIdentity) -> None:
        if identity in library.mappers:
            library.mappers.remove(identity)
            self.changes += 1
        if not library.mappers and library.unmapped_ns is None:
            library.unmapped_ns = self._clock.monotonic_ns()
            if not self._linger_ns:
                self._drop(library, _UNMAPPED)

    def _drop(self, library: Library, why: str) -> None:
        if library.links is not None:
            close_together(links for links in (library.links, library.calls) if links is not None)
            if library.detaching is not None:
                # Its file may be written over, and its number used again: no probe may be left on either.
                library.detaching.result()
            _log.info("detached from %s: %s", library.path, why)
        if self._changes is not None and library.watch is not None:
            self._changes.unwatch(library.watch)
        os.close(library.descriptor)
        self.changes += 1
        del self._libraries[library.number]
        for file in library.names:
            del self._by_file[file]


def _path(library: Library) -> str:
    return f"/proc/self/fd/{library.descriptor}"


def _is_detached(library: Library) -> bool:
    return library.detaching is None or library.detaching.done()


def _any_pid(library: Library) -> int:
    return next((identity.pid for identity in library.mappers), 0)
