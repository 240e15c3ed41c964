"""Observes NCCL below its entry points: progress of communicators, durations, launches.

All of it is optional.  Where the programs do not load (a kernel before 5.17), or a library lacks the functions, the
node's counts stay as exact as ever and this module has nothing to add.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Final, NamedTuple, Protocol

from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import CommunicatorFacts, LaunchTotal, NodeCompletion, OpHistogram
from railscope.agent.node.completion.cuda import CudaCompletion, CudaLibrary
from railscope.agent.node.completion.exemplars import Exemplars
from railscope.agent.node.completion.handed_over import RailBytes
from railscope.agent.node.completion.levels import LevelPrograms, Levels, ObservedLibrary
from railscope.agent.node.inspection.inspection import Inspection
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op, op_name
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.memory.net_devices import NetDevice
from railscope.probes.nccl.programs.internals import EmptyRun, Launch, Progress, Sent
from railscope.probes.nccl.records.internals import ALGORITHMS, PROTOCOLS, InternalStat, NetworkKind

_log = logging.getLogger("railscope.completion")

DURATION_BOUNDS: Final = tuple((1 << (10 + i)) / 1e9 for i in range(31))
"""Seconds; the last bucket of the kernel's 32 has no bound."""
BANDWIDTH_BOUNDS: Final = tuple(float(1 << (16 + i)) for i in range(31))
"""Bytes per second."""


class MappedLibrary(ObservedLibrary, CudaLibrary, Protocol):
    """A library, and who maps it."""


class InternalPrograms(LevelPrograms, Protocol):
    """What is needed of the loaded programs (probes/nccl/programs/internals.py)."""

    def progress(self) -> dict[int, Progress]: ...
    def empty_runs(self) -> dict[int, EmptyRun]: ...
    def durations(self) -> dict[Op, Records]: ...
    def bandwidths(self) -> dict[Op, Records]: ...
    def launches(self) -> list[Launch]: ...
    def sent(self) -> list[Sent]: ...
    def stats(self) -> Mapping[InternalStat, int]: ...
    def error_events(self) -> Records: ...
    def failover_events(self) -> Records: ...
    def connections(self) -> tuple[Records, Records]: ...
    def forget_failed_over(self, connections: Iterable[tuple[int, int]]) -> None: ...
    def forget_processes(self, tgids: Collection[int]) -> None: ...
    def forget_sent(self, tgids: Collection[int]) -> None: ...
    def forget_communicators(self, instances: set[int]) -> None: ...
    def close(self) -> None: ...


class CommunicatorProgress(NamedTuple):
    """How far one rank's end of a communicator has come."""

    completed: int
    """Calls known to be complete."""
    oldest_posted_ns: int | None
    captured: int
    replayed: int
    age_known: bool = True
    """False: `oldest_posted_ns` cannot be known."""
    followed: int = 0
    """Calls up to the last that had a network part, with those behind it that NCCL discarded.

    What is enqueued beyond has no network part, or was refused, or waits for its group or for connections to be handed
    over; when `completed` has reached this number, nothing that is followed is in flight.
    """


class Completion:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        programs: InternalPrograms,
        level: Level,
        cuda: CudaCompletion | None = None,
        *,
        inspection: Inspection,
        rail_bytes: RailBytes | None = None,
        before_forgetting: Callable[[], object] = lambda: None,
    ) -> None:
        """`cuda` None: CUDA events are not observed.

        `rail_bytes` keeps what is handed to each rail; None: not wanted.  `before_forgetting`: see `Levels`.
        """
        self.levels = Levels(programs, Layouts.load().structures, level, inspection, before_forgetting)
        self._rail_bytes = rail_bytes
        self._unnamed_bytes = 0
        """Handed to rails without a name until `sees_all_handed_over` was asked last."""
        self._programs = programs
        self._cuda = cuda
        self._progress: dict[int, CommunicatorProgress] = {}
        self._completed: dict[int, int] = {}
        """Calls known to be complete, by instance: they stay so while not observed."""
        self.replaying: set[int] = set()
        """Instances of which replays of CUDA graphs were seen, also while they are not observed."""
        self._empty: dict[int, EmptyRun] = {}
        """Calls of each communicator that NCCL discarded last."""
        self._ended: set[int] = set()
        """Instances of communicators that ended: nothing about them changes any more."""
        self._libraries: tuple[MappedLibrary, ...] = ()
        self._complete = True
        self._exemplars = Exemplars()

    @property
    def complete(self) -> bool:
        """Whether the last reading worked."""
        return self._complete

    def set_libraries(self, libraries: Iterable[MappedLibrary]) -> list[str]:
        """Observe these libraries and no others; returns what went wrong, one line each."""
        self._libraries = tuple(libraries)
        return [*self.levels.set_libraries(self._libraries), *self._follow_cuda()]

    def _follow_cuda(self) -> list[str]:
        if self._cuda is None:
            return []
        try:
            return self._cuda.set_libraries(self._libraries, self.levels.target_level)
        except KernelRefusal as refusal:
            return [f"CUDA events: {refusal.strerror}"]

    def read(self) -> None:
        """Read the progress of communicators."""
        if self.levels.target_level < Level.COMPLETION:
            return
        try:
            readings = self._programs.progress()
            self._empty.update(self._programs.empty_runs())  # after it: of what was complete, nothing is missed
            for instance, progress in readings.items():
                if progress.elsewhere:
                    self._progress.pop(instance, None)
                    continue
                if not progress.posted and not progress.captured and not progress.replayed:
                    continue
                if progress.replayed:
                    self.replaying.add(instance)
                found = (
                    self._advance(instance, progress.completed_sequence),
                    progress.oldest_posted_ns,
                    progress.captured,
                    progress.replayed,
                    True,
                    progress.posted_sequence,
                )
                if self._progress.get(instance) != found:
                    self._progress[instance] = CommunicatorProgress(*found)
            if self._rail_bytes is not None:
                self._rail_bytes.add_readings(self._programs.sent())
            if self._cuda is not None:
                self._cuda.read()
            self._complete = True
        except KernelRefusal as refusal:
            self._trouble(refusal)

    def read_handed_over(self) -> None:
        """Read what was handed to each rail."""
        if self._rail_bytes is None or self.levels.target_level < Level.RAILS:
            return
        try:
            self._rail_bytes.add_readings(self._programs.sent())
        except KernelRefusal as refusal:
            self._trouble(refusal)

    def handed_over(self, namespaces: Set[int]) -> dict[tuple[int, str], int] | None:
        """Bytes that collectives handed to each device of these network namespaces, by inode and name.

        What was handed to rails of others is forgotten: they have gone.  None: not observed.
        """
        if self._rail_bytes is None:
            return None
        self._rail_bytes.forget_namespaces(self._rail_bytes.namespaces - namespaces)
        # What was handed over stays counted when the level falls.
        if self.levels.target_level < Level.RAILS and not self._rail_bytes.namespaces:
            return None
        return {device: handed.bytes for device, handed in self._rail_bytes.by_device().items()}

    def sees_all_handed_over(self) -> bool:
        """Whether all that was handed over since this was asked last is seen: of every library, and with its device."""
        if self._rail_bytes is None:
            return False
        before, self._unnamed_bytes = self._unnamed_bytes, self._rail_bytes.unattributed().bytes
        return self._unnamed_bytes == before and all(level.level >= Level.RAILS for level in self.levels.probe_levels())

    def record_completions(self, completions: Records) -> None:
        """Record completed operations (dtype COMPLETION_EVENT) that were read from the ring."""
        self._exemplars.record(completions)

    def progress_of(self, instance: int) -> CommunicatorProgress | None:
        """The last that is known of a communicator; None where its completion cannot be seen."""
        progress = self._progress.get(instance)
        proved = self._cuda.progress_of(instance) if self._cuda is not None else None
        if proved is not None and progress is None and self._proves(instance):
            # Nothing tells since when its operations run.
            progress = CommunicatorProgress(0, None, 0, 0, age_known=False)
        if progress is None:
            return None
        completed = self._advance(instance, max(progress.completed, proved.completed_sequence if proved else 0))
        empty = self._empty.get(instance)
        followed = max(completed, empty.after(progress.followed) if empty is not None else progress.followed)
        if (completed, followed) == (progress.completed, progress.followed):
            return progress
        return progress._replace(completed=completed, followed=followed)

    def _advance(self, instance: int, completed: int) -> int:
        """Calls known to be complete, with those behind them that NCCL discarded.

        It never falls: of a group of plans the first may be complete before the second is handed over, programs that
        were attached again know nothing of what was complete before, and of discarded calls the latest are known only.
        """
        completed = max(completed, self._completed.get(instance, 0))
        empty = self._empty.get(instance)
        if empty is not None:
            completed = empty.after(completed)
        self._completed[instance] = completed
        return completed

    def _proves(self, instance: int) -> bool:
        """Whether what CUDA proved of a communicator is kept up to date, or is its last word."""
        return self.levels.target_level >= Level.ALL or instance in self._ended

    def hits(self) -> tuple[Mapping[InternalStat, int], list[Sent], int]:
        """What the programs counted about themselves, what was sent, and hits of those that watch CUDA, since load.

        Raises:
            KernelRefusal: the tables cannot be read.
        """
        return self._programs.stats(), self._programs.sent(), self._cuda.hits() if self._cuda is not None else 0

    def error_events(self) -> Records:
        """Errors that NCCL's calls returned or had stored, since the last call: dtype ERROR_EVENT."""
        return self._programs.error_events()

    def failover_events(self) -> Records:
        """Ports that failed, of connections that NCCL moved or gave up, since the last call: dtype FAILOVER_EVENT."""
        return self._programs.failover_events()

    def connections(self) -> tuple[Records, Records]:
        """Connections of proxies: keys of dtype CONNECTION_KEY, values of dtype CONNECTION.

        Raises:
            KernelRefusal: the table cannot be read.
        """
        return self._programs.connections()

    def forget_failed_over(self, connections: Iterable[tuple[int, int]]) -> None:
        """Connections, by pid and address, use all their ports again, or are closed.

        Raises:
            KernelRefusal: the tables cannot be written.
        """
        self._programs.forget_failed_over(connections)

    def device_of(self, tgid: int, library: int, number: int) -> NetDevice | None:
        """An InfiniBand device of a process, as NCCL numbers them; None: its name is not known."""
        return None if self._rail_bytes is None else self._rail_bytes.device_of(tgid, library, NetworkKind.IB, number)

    def read_device_names(self, mappers: Iterable[tuple[int, int]]) -> None:
        """Read the names of network devices in processes (by pid) that use a library (by number), if that pays."""
        if self._rail_bytes is not None and self.levels.target_level >= Level.RAILS:
            for tgid, library in mappers:
                self._rail_bytes.read_device_names(tgid, library)

    def end_processes(self, tgids: Collection[int]) -> None:
        """Processes have ended: they complete nothing more."""
        self.read()
        try:
            self._programs.forget_processes(tgids)
            if self._cuda is not None:
                self._cuda.end_processes(tgids)
            if self._rail_bytes is not None:
                self._rail_bytes.end_processes(tgids, self._programs.sent())
                self._programs.forget_sent(tgids)
        except KernelRefusal as refusal:
            self._trouble(refusal)

    def end_communicators(self, instances: set[int]) -> None:
        """Communicators have ended; what they were last known to have completed stays readable."""
        self._ended |= instances
        try:
            self._programs.forget_communicators(instances)
            if self._cuda is not None:
                self._cuda.end_communicators(instances)
        except KernelRefusal as refusal:
            self._trouble(refusal)

    def forget(self, instances: Iterable[int]) -> None:
        """Nobody can ask about these communicators any more."""
        gone = tuple(instances)
        for instance in gone:
            self._progress.pop(instance, None)
            self._completed.pop(instance, None)
            self._empty.pop(instance, None)
            self._ended.discard(instance)
            self.replaying.discard(instance)
        if self._cuda is not None:
            self._cuda.forget(gone)

    def set_level(self, level: Level) -> list[str]:
        """Go to a level; below *completion* nothing is known of the progress of those that live."""
        errors = [*self.levels.set_level(level), *self._follow_cuda()]
        if level < Level.COMPLETION:
            self._progress = {key: value for key, value in self._progress.items() if key in self._ended}
        return errors

    def facts(self, communicators: Iterable[CommunicatorFacts], realtime_offset_ns: int) -> NodeCompletion:
        """Durations, bandwidths and launches of the whole node; nothing where the kernel refuses them.

        Exemplars are named by `communicators`; `realtime_offset_ns`: the time of day less the monotonic one.
        """
        try:
            durations = _histograms(self._programs.durations(), DURATION_BOUNDS, 1e9)
            return NodeCompletion(
                durations=self._exemplars.attach(durations, communicators, realtime_offset_ns),
                cuda_durations=() if self._cuda is None else _histograms(self._cuda.durations(), DURATION_BOUNDS, 1e9),
                bandwidths=_histograms(self._programs.bandwidths(), BANDWIDTH_BOUNDS, 1.0),
                launches=_launches(self._programs.launches()),
            )
        except KernelRefusal as refusal:
            self._trouble(refusal)
            return NodeCompletion()

    def events_lost(self) -> Mapping[str, int]:
        """Completions that the programs could not pass on, by reason; empty where the kernel does not tell."""
        try:
            stats = self._programs.stats()
        except KernelRefusal as refusal:
            self._trouble(refusal)
            return {}
        return {
            "completion_ring_full": stats[InternalStat.RING_FULL],
            "completion_tables_full": stats[InternalStat.FULL],
            "internals_unreadable": stats[InternalStat.UNREADABLE],
        }

    def close(self) -> None:
        """Detach everywhere and free the programs."""
        if self._cuda is not None:
            self._cuda.close()
        self.levels.close()
        self._programs.close()

    def _trouble(self, refusal: KernelRefusal) -> None:
        self._complete = False
        _log.error("completed operations cannot be read: %s", refusal.strerror)


def _histograms(records: dict[Op, Records], bounds: tuple[float, ...], per_unit: float) -> tuple[OpHistogram, ...]:
    return tuple(
        OpHistogram(
            op_name(op), Histogram(bounds, tuple(int(n) for n in record["buckets"]), int(record["sum"]) / per_unit)
        )
        for op, record in sorted(records.items())
    )


def _launches(launches: Iterable[Launch]) -> tuple[LaunchTotal, ...]:
    totals: defaultdict[tuple[str, str, str, int], int] = defaultdict(int)
    for launch in sorted(launches, key=lambda one: (one.op, one.algorithm, one.protocol, one.channels)):
        # Numbers without a name are one: a series must not come twice.
        algorithm = ALGORITHMS[launch.algorithm] if launch.algorithm < len(ALGORITHMS) else UNKNOWN
        protocol = PROTOCOLS[launch.protocol] if launch.protocol < len(PROTOCOLS) else UNKNOWN
        totals[op_name(launch.op), algorithm, protocol, launch.channels] += launch.count
    return tuple(LaunchTotal(*labels, count) for labels, count in totals.items())
