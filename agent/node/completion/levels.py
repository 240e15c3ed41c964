"""The level of observation of each library, and the probes that it needs.

Counting calls (agent/node/targets/libraries.py) is on at every level but *watch*.  What lies below NCCL's entry points
is attached level by level, where the library has the functions and its struct layouts are known; lowering a level
detaches what it added and forgets what could no longer be kept up to date.  Detaching waits for the kernel, seconds
where all cores are busy, so it is done aside; a level is not raised again before it is through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Protocol

from railscope.agent.facts.snapshot import ProbeLevel
from railscope.agent.node.completion.files import BelowCalls, PointsBelow
from railscope.agent.node.inspection.inspection import Inspection
from railscope.agent.node.inspection.pages import ProbedFile, load_pages
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.links import Links, ProbePoint, close_together
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.functions.internals import InternalPoints, Level
from railscope.probes.nccl.layouts.layout import Structure
from railscope.probes.nccl.memory.net_devices import DeviceArrays
from railscope.probes.nccl.memory.proxy_work import ProxyWorkLayout, proxy_work_layout
from railscope.probes.nccl.memory.sequence_numbers import SequenceLayout, sequence_layout
from railscope.probes.nccl.records.errors import ErrorLayout, error_layout
from railscope.probes.nccl.records.failover import FailoverLayout, failover_layout
from railscope.probes.nccl.records.internals import layout_record

UNLISTED: Final = "its internal structs are known for listed builds only, and this build is not listed"
_FAILS_OVER_SINCE: Final = (2, 29, 7)
FAILOVER: Final = "failover"
"""What its programs are called together, among those that are attached."""
_log = logging.getLogger("railscope.levels")


class ObservedLibrary(ProbedFile, Protocol):
    """What levels need to know of a library (agent/node/targets/libraries.py)."""

    @property
    def number(self) -> int: ...
    @property
    def build_id(self) -> str | None: ...
    @property
    def nccl_version(self) -> str: ...


class LevelPrograms(Protocol):
    """What levels need of the loaded programs (probes/nccl/programs/internals.py)."""

    def describe(self, library: int, layout: Records | None) -> None: ...
    def attach(self, path: str, points: InternalPoints, level: Level) -> Links: ...
    def watch_errors(
        self, path: str, points: Sequence[ProbePoint], library: int, layout: ErrorLayout | None
    ) -> Links: ...
    def watch_failover(self, path: str, points: Sequence[ProbePoint]) -> Links: ...
    def forget_library(self, library: int) -> None: ...


@dataclass(slots=True)
class _Observed:
    """One library and what is attached to it."""

    library: ObservedLibrary
    points: InternalPoints
    highest: Level
    errors: ErrorLayout | None
    failover: FailoverLayout | None
    rare: tuple[Links, ...]
    """Probes that are seldom hit, and stay at every level: on NCCL's errors and on its failover."""
    devices: DeviceArrays
    proxy_work: ProxyWorkLayout | None
    sequence: SequenceLayout | None
    links: dict[Level, Links] = field(default_factory=dict)

    @property
    def level(self) -> Level:
        return max(self.links, default=Level.COUNTS)


@dataclass(frozen=True, slots=True)
class _Detaching:
    """Probes of one library that are coming off."""

    done: Future[None]
    completion: bool
    """Whether what completes is not seen any more: what was under way must be forgotten."""


class Levels:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        programs: LevelPrograms,
        structures_of: Callable[[str | None], Mapping[str, Structure]],
        wanted: Level,
        inspection: Inspection,
        before_forgetting: Callable[[], object] = lambda: None,
    ) -> None:
        """`structures_of` knows struct layouts by build-id; `wanted` is the level to begin with.

        `before_forgetting` is called when the probes of a library are off, and what they left is about to be forgotten.
        """
        self._programs = programs
        self._structures_of = structures_of
        self._inspection = inspection
        self._wanted = wanted
        self._observed: dict[int, _Observed] = {}
        self._detaching: dict[int, _Detaching] = {}
        """By number of the library."""
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="detach")
        self._before_forgetting = before_forgetting

    @property
    def target_level(self) -> Level:
        return self._wanted

    @property
    def highest(self) -> Level:
        """What the libraries that are there allow at most; where there are none, the next one may allow all."""
        return max((observed.highest for observed in self._observed.values()), default=Level.ALL)

    def set_libraries(self, libraries: Iterable[ObservedLibrary]) -> list[str]:
        """Attach to new libraries, detach from those that are gone; returns errors, one line each.

        What went wrong is tried again at the next call.
        """
        self.finish_detaching()
        present = {library.number: library for library in libraries}
        for number, observed in list(self._observed.items()):
            if present.get(number) is not observed.library:
                self._lower(observed, Level.COUNTS, *observed.rare)
                self._programs.describe(number, None)
                del self._observed[number]
        errors = []
        for number, library in present.items():
            try:
                if number not in self._observed:
                    self._observed[number] = self._decide_level(library)
                self._raise(self._observed[number])
            except NotYet:
                continue
            except (Refused, OSError) as error:
                errors.append(f"{library.path}: {error}")
        return errors

    def set_level(self, level: Level) -> list[str]:
        """Go to a level everywhere; returns what went wrong, one line each."""
        self._wanted = level
        for observed in self._observed.values():
            self._lower(observed, level)
        return self.finish_detaching()

    @property
    def numbered(self) -> frozenset[int]:
        """Libraries, by number, that number the collectives of their communicators: no probe need be on their calls."""
        return frozenset(number for number, observed in self._observed.items() if observed.sequence is not None)

    @property
    def unnumbered(self) -> tuple[tuple[str, str], ...]:
        """Path and version of the others."""
        return tuple(
            (observed.library.path, observed.library.nccl_version)
            for observed in self._observed.values()
            if observed.sequence is None
        )

    def finish_detaching(self, *, wait: bool = False) -> list[str]:
        """Finish detachments that have completed, and attach what waited for them; returns errors.

        `wait`: until nothing is being detached any more.
        """
        errors = []
        for number, detaching in list(self._detaching.items()):
            if wait or detaching.done.done():
                del self._detaching[number]
                detaching.done.result()
                try:
                    if detaching.completion:
                        self._before_forgetting()
                        self._programs.forget_library(number)
                except KernelRefusal as refusal:
                    errors.append(f"records of an ended level cannot be removed: {refusal.strerror}")
        for observed in self._observed.values():
            try:
                self._raise(observed)
            except NotYet:
                continue
            except (Refused, KernelRefusal) as refusal:
                why = refusal.strerror if isinstance(refusal, OSError) else refusal
                errors.append(f"{observed.library.path}: {why}")
        return errors

    def probe_levels(self) -> tuple[ProbeLevel, ...]:
        """The level of each library."""
        return tuple(
            ProbeLevel(
                observed.library.path, observed.library.nccl_version, self._level_of(observed), int(observed.highest)
            )
            for observed in self._observed.values()
        )

    def _level_of(self, observed: _Observed) -> int:
        watched = self._wanted is Level.WATCH and observed.sequence is not None
        return int(Level.WATCH if watched else observed.level)

    def programs_of(self, library: int) -> tuple[str, ...]:
        """Names of the programs that are attached to a library by its number."""
        observed = self._observed.get(library)
        if observed is None:
            return ()
        below = tuple(program for level in observed.links for program in observed.points.at(level))
        return (*below, FAILOVER) if observed.failover is not None else below

    def close(self) -> None:
        """Detach everywhere; returns when no probe is left."""
        close_together(
            links for observed in self._observed.values() for links in (*observed.rare, *observed.links.values())
        )
        self._observed.clear()
        self._aside.shutdown()

    def error_layout_of(self, library: int) -> ErrorLayout | None:
        """Where communicators of a library, by its number, keep their error; None: unknown."""
        observed = self._observed.get(library)
        return observed.errors if observed is not None else None

    def failover_layout_of(self, library: int) -> FailoverLayout | None:
        """Where a library, by its number, keeps the state of a connection's ports; None: it cannot fail over."""
        observed = self._observed.get(library)
        return observed.failover if observed is not None else None

    @property
    def watches_failover(self) -> bool:
        """Whether NCCL's failover is seen in any library that is there."""
        return any(observed.failover is not None for observed in self._observed.values())

    def device_arrays_of(self, library: int) -> DeviceArrays | None:
        """Where a library, by its number, keeps the names of its network devices; None: it is not observed."""
        observed = self._observed.get(library)
        return observed.devices if observed is not None else None

    def proxy_work_layout_of(self, library: int) -> ProxyWorkLayout | None:
        """Where communicators of a library, by its number, keep their proxy's work; None: unknown."""
        observed = self._observed.get(library)
        return observed.proxy_work if observed is not None else None

    def sequence_layout_of(self, library: int) -> SequenceLayout | None:
        """Where communicators of a library, by its number, keep NCCL's numbers of their collectives; None: unknown."""
        observed = self._observed.get(library)
        return observed.sequence if observed is not None else None

    def _decide_level(self, library: ObservedLibrary) -> _Observed:
        structures = self._structures_of(library.build_id)
        layout, errors = layout_record(structures), error_layout(structures)
        question = BelowCalls(library.number, library.path, library.build_id)
        below: PointsBelow = self._inspection.ask(library.tenant, question, (library.descriptor,)).answer
        points = below.internals
        failover = failover_layout(structures) if below.failover and layout is not None else None
        seldom = (*below.errors, *(below.failover if failover is not None else ()))
        load_pages(self._inspection, library, seldom)
        self._programs.describe(library.number, layout)
        rare = [self._programs.watch_errors(_path(library), below.errors, library.number, errors)]
        if failover is not None:
            try:
                rare.append(self._programs.watch_failover(_path(library), below.failover))
            except KernelRefusal:
                close_together(rare)
                raise
        highest = highest_level(points, layout)
        if why := completion_unseen(points, layout):
            _log.info("%s: calls are counted, completions are not observed: %s", library.path, why)
        return _Observed(
            library,
            points,
            highest,
            errors,
            failover,
            tuple(rare),
            below.devices,
            proxy_work_layout(structures),
            sequence_layout(structures, library.nccl_version),
        )

    def _raise(self, observed: _Observed) -> None:
        if observed.library.number in self._detaching:
            return
        for level in Level:
            if level <= min(self._wanted, observed.highest) and level not in observed.links:
                if not observed.points.at(level):
                    continue
                load_pages(self._inspection, observed.library, observed.points.at(level).values())
                observed.links[level] = self._programs.attach(_path(observed.library), observed.points, level)

    def _lower(self, observed: _Observed, level: Level, *more: Links) -> None:
        above = [attached for attached in observed.links if attached > level]
        if not (above or more):
            return
        number = observed.library.number
        completion = Level.COMPLETION in above
        before = self._detaching.get(number)
        if before is not None:
            completion = completion or before.completion
        links = [*(observed.links.pop(attached) for attached in above), *more]
        self._detaching[number] = _Detaching(self._aside.submit(_detach, links, before), completion)


def highest_level(points: InternalPoints, layout: Records | None) -> Level:
    """The highest probe level of a library with these functions; `layout` None: its struct offsets are not known."""
    if layout is None:
        return Level.COUNTS
    return max((level for level in Level if points.at(level)), default=Level.COUNTS)


def completion_unseen(points: InternalPoints, layout: Records | None) -> str:
    """Why nothing tells when operations of such a library are complete; empty where something does."""
    if not points.points:
        return "it has no symbols of the functions to probe: it is stripped, or not NVIDIA's NCCL"
    if not points.at(Level.COMPLETION):
        return "it lacks the functions to probe, which NCCL has from 2.23 on"
    return UNLISTED if layout is None else ""


def failover_seen(points: Collection[ProbePoint], structures: Mapping[str, Structure], nccl_version: str) -> str:
    """Whether NCCL's own failover is seen in such a library, or why not, as words; `points`: `failover_points`."""
    if points:
        known = layout_record(structures) is not None and failover_layout(structures) is not None
        return "seen" if known else f"not seen: {UNLISTED}"
    numbers = nccl_version.split(".")
    if all(number.isdecimal() for number in numbers) and tuple(map(int, numbers)) < _FAILS_OVER_SINCE:
        return f"not in this version, but from {'.'.join(map(str, _FAILS_OVER_SINCE))} on"
    return "not seen: the library has no symbol of the function to probe"


def _detach(links: Iterable[Links], before: _Detaching | None) -> None:
    """Take probes off, after those that were to come off before: the one thread aside is through with them by now."""
    close_together(links)
    if before is not None:
        before.done.result()


def _path(library: ObservedLibrary) -> str:
    """Leads to the file also where it was deleted, or lies in a container."""
    return f"/proc/self/fd/{library.descriptor}"
