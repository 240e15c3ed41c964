"""Which NCCL libraries running processes have mapped, and whether the agent could observe them.

The agent's own discovery looks; only attaching is done on a leash: each link is restricted to this process, which has
none of these libraries mapped, so that no job meets a breakpoint and yet the kernel has judged file and offsets.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from railscope.agent.config.options import Config
from railscope.agent.config.unmatched import pids_without_nccl
from railscope.agent.doctor.findings import Finding, LibraryReport, capability_remedy, one_line, privilege_remedy
from railscope.agent.doctor.host import CAP_SYS_PTRACE, effective_capabilities
from railscope.agent.doctor.probes import configured_settings
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.node.completion.files import BelowCalls
from railscope.agent.node.completion.levels import UNLISTED, completion_unseen, failover_seen, highest_level
from railscope.agent.node.inspection.inspection import Inspection
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.overhead.governor import level_name
from railscope.agent.node.targets.libraries import Libraries, Library
from railscope.probes.clock import SystemClock
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.libbpf import LoadError
from railscope.probes.loading.links import AttachKind, Links
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.functions.probe_points import ProbePoints
from railscope.probes.nccl.layouts.layout import CommLayout, Layouts
from railscope.probes.nccl.memory.sequence_numbers import sequence_layout
from railscope.probes.nccl.programs.calls import NcclPrograms
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.internals import layout_record
from railscope.probes.processes.processes import ProcessIdentity, unreadable_processes

_LIST_IT: Final = (
    "if the library has debug information, `python -m railscope.probes.nccl.layouts.dwarf LIBRARY` with railscope's "
    "Python lists this build, and the agent knows it from its next start; else report this build of NCCL"
)
_NEWER_KERNEL: Final = "boot Linux 5.17 or newer to see completions"
_NO_PERMISSION: Final = "no permission"
"""In the errors of files that may not be opened (probes/processes/processes.py)."""
_LOOK_AGAIN: Final = (
    "run railscope doctor again; a file that still cannot be read is damaged, or on a file system that does not answer"
)
_log = logging.getLogger("railscope.doctor")


class LeashedAttacher:
    """Attaches for this process only, and keeps the kernel's answer for each library."""

    def __init__(self, programs: NcclPrograms | None) -> None:
        """`programs` None: nothing could be loaded, so nothing is attached."""
        self._programs = programs
        self.refusals: dict[int, str] = {}
        """What the kernel said, by library number."""

    @property
    def tries(self) -> bool:
        """Whether attaching is tried: perf events have no way to leave the jobs alone."""
        return self._programs is not None and self._programs.attach_kind is AttachKind.MULTI

    def attach(self, path: str, points: ProbePoints, library: int, layout: CommLayout | None, *, pid: int = 0) -> Links:
        """See `Attacher` (agent/node/targets/libraries.py); `pid` is ignored.  A refusal is kept, not raised."""
        del pid
        if self._programs is not None and self.tries:
            try:
                return self._programs.attach(path, points, library, layout, pid=os.getpid())
            except KernelRefusal as refusal:
                self.refusals[library] = one_line(refusal)
        return Links()


QUESTIONS: Final = (
    "railscope.agent.node.completion.files",
    "railscope.agent.node.inspection.pages",
    "railscope.agent.node.targets.sightings",
)
PATIENCE_SECONDS: Final = 20.0
TENANTS_PATIENCE_SECONDS: Final = 5.0
"""How long what processes map is waited for: of all users together, and of one user."""
_WAIT_SECONDS: Final = 0.1


def check_libraries(
    config: Config, inspection: Inspection
) -> tuple[list[Finding], tuple[LibraryReport, ...], frozenset[ProcessIdentity]]:
    """Findings about the NCCL libraries that processes map, one report for each, and those processes.

    Raises:
        LayoutTableError, OSError: processes cannot be looked at at all.
    """
    with _programs(config) as programs:
        attacher = LeashedAttacher(programs)
        discovery = Libraries(
            attacher, config.procfs, inspection, SystemClock(), wanted=lambda _: True, found=lambda *_: None
        )
        try:
            discovery.scan()
            errors = {*discovery.errors, *_late_answers(discovery, inspection)}
            found = sorted(discovery.libraries, key=lambda library: library.path)
            reports = tuple(_report(library, attacher, inspection) for library in found)
            processes = frozenset(identity for library in found for identity in library.mappers)
        finally:
            discovery.close()
        findings = _internals(programs)
    findings += [_finding(report) for report in reports]
    unreadable = unreadable_processes(config.procfs)
    if unreadable:
        findings.append(
            _unreadable(unreadable, allowed=bool(effective_capabilities(config.procfs) >> CAP_SYS_PTRACE & 1))
        )
    findings += _unread_files(errors)
    if not reports:
        what = "no visible process maps NCCL now: there is nothing to attach to"
        findings.append(Finding("NCCL library", "note", what, "start a job and run railscope doctor again"))
    if missed := pids_without_nccl(config.procfs, config.pids, {process.pid for process in processes}):
        findings.append(Finding("processes", "problem", f"--pid: {missed}", "name running processes that use NCCL"))
    return findings, reports, processes


def find_processes(config: Config, inspection: Inspection) -> frozenset[ProcessIdentity]:
    """The processes that map NCCL, as `check_libraries` finds them; nothing is loaded or attached.

    Raises:
        LayoutTableError, OSError: processes cannot be looked at at all.
    """
    discovery = Libraries(
        LeashedAttacher(None), config.procfs, inspection, SystemClock(), wanted=lambda _: True, found=lambda *_: None
    )
    try:
        discovery.scan()
        _late_answers(discovery, inspection)
        return frozenset(identity for library in discovery.libraries for identity in library.mappers)
    finally:
        discovery.close()


def _late_answers(discovery: Libraries, inspection: Inspection) -> set[str]:
    """Wait for what processes map that are slow to read; returns errors, one line each."""
    errors: set[str] = set()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while inspection.busy:
        if time.monotonic() > deadline:
            errors.add("what some processes map is still being read")
            break
        select.select([inspection], [], [], _WAIT_SECONDS)
        for pid in inspection.collect():
            errors.update(discovery.scan_process(pid))
    return errors


def _unread_files(errors: Collection[str]) -> list[Finding]:
    """What could not be looked at, for want of rights and otherwise, which rights do not mend."""
    refused = {error for error in errors if _NO_PERMISSION in error}
    found = []
    for among, why, remedy in (
        (refused, f"cannot be opened ({_NO_PERMISSION})", privilege_remedy()),
        (set(errors) - refused, "could not be looked at", _LOOK_AGAIN),
    ):
        if among:
            what = f"{len(among)} {why}: whether they contain NCCL is unknown; the first: {min(among)}"
            found.append(Finding("mapped files", "problem", what, remedy))
    return found


def _unreadable(processes: int, *, allowed: bool) -> Finding:
    what = f"mappings of {processes} of them cannot be read (no permission): whether they use NCCL is unknown"
    if allowed:
        guard = "another user namespace or a security module guards them"
        return Finding("processes", "note", f"{what}; CAP_SYS_PTRACE is there, so {guard}")
    return Finding("processes", "problem", what, capability_remedy("CAP_SYS_PTRACE"))


@contextmanager
def _programs(config: Config) -> Iterator[NcclPrograms | None]:
    try:
        programs = NcclPrograms.load(configured_settings(config))
    except (LoadError, OSError, ValueError) as error:
        # Told by the trial of the probes; here it only means that attaching is not tried.
        _log.debug("no programs to attach: %s", error)
        yield None
        return
    try:
        yield programs
    finally:
        programs.close()


def _report(library: Library, attacher: LeashedAttacher, inspection: Inspection) -> LibraryReport:
    points = library.points
    refusal = attacher.refusals.get(library.number, "")
    below = _below_calls(library, inspection)
    return LibraryReport(
        path=library.path,
        nccl_version=library.nccl_version,
        layout_source=library.layout.source if library.layout else UNKNOWN,
        through="ncclEnqueueCheck" if points.through_enqueue_check else "exported functions",
        probe_points=sum(map(len, (points.calls, points.calls_entry_only, points.inits, points.ends))),
        refused_functions=points.refused,
        processes=len(library.mappers),
        attach="refused" if refusal else "accepted" if attacher.tries else "not tried",
        attach_refusal=refusal,
        highest_level=level_name(below.level),
        watchable=below.watchable,
        completion_unseen=below.completion_unseen,
        failover=below.failover,
    )


@dataclass(frozen=True, slots=True)
class _BelowCalls:
    """What a library lets us see below its calls."""

    level: Level
    watchable: bool
    completion_unseen: str
    """Why completion is not seen; empty where it is."""
    failover: str
    """Whether NCCL's failover is seen, as words."""


def _below_calls(library: Library, inspection: Inspection) -> _BelowCalls:
    question = BelowCalls(library.number, library.path, library.build_id)
    try:
        found = inspection.ask(library.tenant, question, (library.descriptor,)).answer
    except NotYet:
        return _BelowCalls(Level.COUNTS, False, why := "it could not be read in time", f"not seen: {why}")
    except Refused as refused:
        return _BelowCalls(Level.COUNTS, False, why := f"it cannot be read: {refused}", f"not seen: {why}")
    structures = Layouts.load().structures(library.build_id)
    layout = layout_record(structures)
    return _BelowCalls(
        highest_level(found.internals, layout),
        sequence_layout(structures, library.nccl_version) is not None,
        completion_unseen(found.internals, layout),
        failover_seen(found.failover, structures, library.nccl_version),
    )


def _internals(programs: NcclPrograms | None) -> list[Finding]:
    """Whether the kernel takes the programs below the entry points."""
    if programs is None:
        return []
    try:
        Internals.load(programs).close()
    except LoadError as error:
        return [Finding("completion", "note", f"only calls can be observed on this kernel: {error}", _NEWER_KERNEL)]
    return [Finding("completion", "ok", "the kernel accepts the completion probes")]


def _layout_words(source: str) -> str:
    """Of the communicators alone: higher levels need more, which is known of listed builds (by build-id) only."""
    return "communicators' layout unknown" if source == UNKNOWN else f"communicators' layout from {source}"


def _finding(report: LibraryReport) -> Finding:
    count = format_count(report.processes, "process", "es")
    lowest = level_name(Level.WATCH if report.watchable else Level.COUNTS)
    levels = lowest if lowest == report.highest_level else f"{lowest} to {report.highest_level}"
    what = (
        f"{report.path}: NCCL {report.nccl_version}, in {count}, through {report.through}, "
        f"{_layout_words(report.layout_source)}, attach {report.attach}, level {levels}, "
        f"failover {report.failover}"
    )
    if report.attach == "refused":
        return Finding("NCCL library", "problem", f"{what}: {report.attach_refusal}", privilege_remedy())
    lost = []
    if report.attach == "not tried":
        lost.append("whether probes can be attached to it is unknown: it could not be tried without touching the job")
    if report.layout_source == UNKNOWN:
        lost.append("calls are counted, but communicators have no identity")
    if report.refused_functions:
        lost.append(f"not counted, because the kernel would single-step them: {', '.join(report.refused_functions)}")
    if report.completion_unseen:
        lost.append(f"completion is not observed: {report.completion_unseen}")
    if lost:
        remedy = _LIST_IT if report.layout_source == UNKNOWN or report.completion_unseen == UNLISTED else ""
        return Finding("NCCL library", "note", f"{what}; {'; '.join(lost)}", remedy)
    return Finding("NCCL library", "ok", what)
