"""What the daemon asks of this room: the communicators and calls of running processes, from the kernel's tables.

What has ended leaves the kernel's tables at the next tick, all with one reading, and is kept as totals of the node
(agent/node/collectives/node_totals.py, agent/node/collectives/expected_wire.py) and of its communicator
(agent/node/collectives/communicator_facts.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import Final

from railscope.agent.facts.hardware import GpuFacts
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rank_identity import RankKey
from railscope.agent.facts.snapshot import NodeCollectives, NodeCompletion, NodeTimes
from railscope.agent.facts.stall import Disagreement, LastCollectives
from railscope.agent.model.expected import ExpectedBytes
from railscope.agent.node.collectives.agreement import Agreement
from railscope.agent.node.collectives.call_counts import CallCount, CallCounts, CallKind
from railscope.agent.node.collectives.communicator_facts import CommunicatorHistory
from railscope.agent.node.collectives.communicators import Communicator, Communicators, format_label
from railscope.agent.node.collectives.events import CommEvents, StoredErrors
from railscope.agent.node.collectives.expected_wire import ExpectedWire
from railscope.agent.node.collectives.failovers import Failovers
from railscope.agent.node.collectives.kernel_readings import CountingPrograms, KernelReadings
from railscope.agent.node.collectives.name_claims import NameClaims
from railscope.agent.node.collectives.node_totals import NodeTotals
from railscope.agent.node.collectives.peer_bytes import PeerBytes
from railscope.agent.node.collectives.rank_gpus import RankGpus
from railscope.agent.node.collectives.sequences import Sequences
from railscope.agent.node.collectives.watched import Watched
from railscope.agent.node.completion.completion import Completion
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.agent.node.targets.memory import ProcessMemory
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.maps import Records
from railscope.probes.processes.namespaces import name_namespace, named_namespaces

_log = logging.getLogger("railscope.collectives")

_SETTLE_NS: Final = 500_000_000
"""A destroyed communicator's counts stay in the kernel this long, for a call that was just under way."""


class Collectives:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        programs: CountingPrograms,
        processes: dict[int, ObservedProcess],
        small_payload_bytes: int,
        completion: Completion | None = None,
        *,
        memory: ProcessMemory | None = None,
        on_lifecycle: Callable[[Records], None] | None = None,
        before_forgetting: Callable[[], object] = lambda: None,
        most_peers: int = 0,
        is_running: Callable[[int], bool] = lambda _: True,
        entered_before: Callable[[RankKey, int], int] = lambda _rank, _pid: 0,
    ) -> None:
        """`processes` is shared with the observer, by pid: those that end are marked there, and removed from here.

        `completion` None: calls are counted, and nothing more.  `memory` None: nothing is read of what communicators
        hold in their processes.  `on_lifecycle` is shown every lifecycle event.
        `before_forgetting` is called before the kernel forgets what communicators did that have ended.
        `most_peers`: peers of a rank whose bytes are reported; 0: none.  `is_running` looks at a process now.
        `entered_before` knows, by rank and pid, collectives that earlier agents counted, or counted as missed.
        """
        self._on_lifecycle = on_lifecycle
        self._completion = completion
        self._events = CommEvents()
        self._stored_errors: StoredErrors | None = None
        self._sequences: Sequences | None = None
        self._failovers: Failovers | None = None
        self.watched: Watched | None = None
        """Calls that no probe meets; None: nothing is read of what communicators hold in their processes."""
        if completion is not None and memory is not None:
            self._stored_errors = StoredErrors(memory, completion.levels.error_layout_of)
            layout_of = completion.levels.sequence_layout_of
            self.watched = watched = Watched(
                memory,
                layout_of,
                lambda instance: self._communicators.is_whole(instance),
                lambda instance, calls: self._communicators.add_uncounted(instance, calls),
            )
            self._sequences = Sequences(
                programs.communicators,
                memory,
                lambda library: None if watched.watches(library) else layout_of(library),
                lambda instance: self._communicators.uncounted(instance),
            )
            self._failovers = Failovers(completion, memory, self.communicator, self._tenant_of)
        self._programs = programs
        self._processes = processes
        self._readings = KernelReadings(programs)
        self._claims = NameClaims(processes.get, is_running)
        self._gpus = RankGpus(self._is_confined)
        self._communicators = Communicators(programs.communicators, self._version_of, self._claims, self._gpus)
        self._agreement = Agreement(programs.shapes, self._calls_now, self.position)
        self._totals = NodeTotals(self._communicators)
        self._history = CommunicatorHistory()
        self._expected = ExpectedWire(
            small_payload_bytes,
            self._communicators,
            processes.get,
            (lambda: completion.replaying) if completion is not None else frozenset,
        )
        self._peers = PeerBytes(most_peers, self._communicators.get) if most_peers else None
        self._before_forgetting = before_forgetting
        self._entered_before = entered_before
        self._met: set[int] = set()
        """Pids of living processes that have made a communicator."""
        self._living: tuple[int, tuple[Communicator, ...]] = (-1, ())
        """Communicators that have not ended, and as of which change."""
        self._pids: tuple[int, frozenset[int]] = (-1, frozenset())
        """Of those that have a living one, and as of which change of the communicators."""
        self._callers: tuple[tuple[CallKind, ...], frozenset[int]] = ((), frozenset())
        """Pids of those that have rows in the table of calls, and of which rows."""
        self._swept: tuple[tuple[CallKind, ...], int] | None = None
        """Rows among which none was of what has ended, and as of which change of the communicators."""
        self._unmet: set[int] = set()
        self._vanished: set[int] = set()
        self._missed_before = 0
        """Calls before attachment, of communicators that were forgotten."""
        self._unchecked_before = 0
        """Pids in the kernel's tables that had ended before anyone looked at them."""

    def set_host_gpus(self, gpus: tuple[GpuFacts, ...]) -> None:
        """Take over the GPUs that NVML lists for this host: ranks' GPUs are numbered as they are."""
        if self._gpus.set_host_gpus(gpus):
            self._communicators.find_gpus_again()

    def process_added(self) -> None:
        """A process is known now: whether something confines it, too."""
        self._communicators.find_gpus_again()

    def _tenant_of(self, tgid: int) -> Tenant:
        process = self._processes.get(tgid)
        return process.tenant if process is not None else UNKNOWN_TENANT

    def _is_confined(self, tgid: int) -> bool:
        process = self._processes.get(tgid)
        return process is None or process.confined

    @property
    def complete(self) -> bool:
        """Whether the last reading of each of the kernel's tables worked."""
        return self._readings.complete

    @property
    def processes_with_communicators(self) -> int:
        """Living processes that have a communicator."""
        return len(self.pids_with_communicators())

    def pids_with_communicators(self) -> Set[int]:
        """Processes that have a living communicator."""
        changes = self._communicators.changes
        if self._pids[0] != changes:
            self._pids = changes, frozenset(one.tgid for one in self._living_communicators())
        return self._pids[1]

    def _living_communicators(self) -> tuple[Communicator, ...]:
        """Those that have not ended; the same object until one of them changes."""
        changes = self._communicators.changes
        if self._living[0] != changes:
            self._living = changes, tuple(one for one in self._communicators if one.ended_ns is None)
        return self._living[1]

    @property
    def alive(self) -> bool:
        """Whether any communicator lives, or ended just now."""
        return any(True for _ in self._communicators)

    def read_lifecycle_events(self) -> None:
        """Read pending lifecycle events: communicators that were created or ended."""
        events = self._programs.lifecycle_events.read()
        if self._on_lifecycle is not None and len(events):
            self._on_lifecycle(events)
        self._unmet |= self._communicators.record_events(events)
        self._events.record_lifecycle(events)
        if self._completion is not None:
            self._events.record_errors(self._completion.error_events())
            made = events[events["confirmed"] != 0]
            self._completion.read_device_names(set(zip(made["tgid"].tolist(), made["library"].tolist(), strict=True)))

    def read_stored_errors(self, now_ns: int) -> None:
        """Read errors that communicators store and no caller queried; call it right after `read`."""
        if self._stored_errors is None or not self.processes_with_communicators:
            return
        for instance, result in self._stored_errors.read(self._communicators.rows):
            self._events.record_stored_error(instance, result, now_ns)

    def read_failovers(self) -> None:
        """Read which connections NCCL moved off a port, and which use it again; call it right after `read`."""
        if self._failovers is not None:
            self._failovers.read()

    def read_positions(self, now_ns: int) -> None:
        """Read NCCL's own sequence numbers of communicators that made calls; call it right after `read`."""
        if self._sequences is None or not self.processes_with_communicators:
            return
        try:
            self._sequences.read_changed(self._communicators.rows, now_ns)
        except KernelRefusal as refusal:
            _log.error("the kernel's table of communicators cannot be read: %s", refusal.strerror)

    def watch_libraries(self, watching: Collection[int], uncounted: Collection[int]) -> None:
        """See `Watched.set_libraries`."""
        if self.watched is not None:
            self.watched.set_libraries(watching, uncounted)

    def calls_unprobed(self, library: int) -> bool:
        """See `Watched.watches`."""
        return self.watched is not None and self.watched.watches(library)

    @property
    def awaits_counts(self) -> bool:
        """See `Watched.awaits_counts`."""
        return self.watched is not None and self.watched.awaits_counts

    @property
    def share_numbered(self) -> float:
        """The share of counted calls that NCCL numbers itself."""
        return self.watched.share_numbered(self._readings.accounting.last) if self.watched is not None else 0.0

    def read_watched(self, now_ns: int) -> None:
        """Read how far communicators are whose calls meet no probe; call it right after `read`."""
        if self.watched is not None:
            self.watched.update(self._communicators.rows, self._readings.accounting.last, now_ns)

    def pop_no_longer_whole(self) -> list[int]:
        """See `Communicators.pop_no_longer_whole`."""
        return self._communicators.pop_no_longer_whole()

    def compare_ranks(self, now_ns: int) -> None:
        """Compare what the ranks of each communicator called; call it right after `read`."""
        if not self.processes_with_communicators:
            return
        self._agreement.update(self._living_communicators(), self._readings.unreadable_calls(), now_ns)

    def disagreement(self, comm: str) -> Disagreement | None:
        """Where the ranks of a communicator on this host, which make no call now, did not make the same collectives.

        None: nowhere in the last ones, or that is unknown.
        """
        living = self._communicators.living_ranks(comm)
        began_ns = max((one.first_ns for one in living), default=0)
        left = {}
        for one in self._communicators.ended_ends(comm):
            last = self._history.last_of(one.instance) or self._agreement.last(one)
            # One that had left before was of another job.
            if last is not None and one.rank is not None and (one.ended_ns or 0) > began_ns:
                left[one.rank] = last
        return self._agreement.find(living, left)

    def last_collectives(self, instance: int) -> LastCollectives[str] | None:
        """The last few collectives of a communicator that makes no call now; None: they are unknown."""
        communicator = self._communicators.get(instance)
        return None if communicator is None else self._agreement.last(communicator)

    def _calls_now(self, instance: int) -> int | None:
        key = self._communicators.key_of(instance)
        return None if key is None else self._programs.communicators.calls_of(key, instance)

    def position(self, instance: int, enqueued: int) -> int | None:
        """Collectives that a rank entered since its communicator was made; None: that cannot be known."""
        watched = self.watched.position(instance) if self.watched is not None else None
        if watched is not None or self._sequences is None:
            return watched
        return self._sequences.position(instance, enqueued)

    def pop_unknown_pids(self) -> set[int]:
        """Pids of processes that showed up in the kernel's tables and are not known; told once."""
        seen, self._unmet = self._unmet, set()
        self._announce(seen & self._processes.keys() - self._met)
        return seen - self._processes.keys() - self._vanished

    def _announce(self, tgids: Collection[int]) -> None:
        """Log which processes have begun to use NCCL: many more only map it, such as data loaders."""
        for tgid in tgids:
            first = self._communicators.first_of(tgid)
            if first is not None:
                self._met.add(tgid)
                rank, nranks = format_label(first.rank), format_label(first.nranks)
                _log.info("process %d uses NCCL: communicator %s, rank %s of %s", tgid, first.name, rank, nranks)

    def read(self) -> CallCounts:
        """Every row of the kernel's table, with everything known about its communicators."""
        if self._readings.is_unchanged():
            self.read_lifecycle_events()
            return self._readings.accounting.last
        # Counts first: every communicator in them is then known from its events or from the table.
        counts = self._readings.counts()
        self.read_lifecycle_events()
        self._unmet |= self._readings.refresh(self._communicators)
        if self._callers[0] is not counts.kinds:
            self._callers = counts.kinds, frozenset(kind.tgid for kind in counts.kinds)
        self._unmet |= self._callers[1]
        return counts

    def expected(self, counts: CallCounts) -> list[ExpectedBytes]:
        """Wire bytes so far, by network namespace."""
        return self._expected.sum_with(counts)

    def end_processes(self, tgids: Collection[int], ended_ns: int) -> None:
        """Processes that are marked as ended in `processes`, or were never in it, did their last calls."""
        self.read_lifecycle_events()
        self._vanished |= set(tgids) - self._processes.keys()
        for tgid in tgids:
            self._communicators.end_process(tgid, ended_ns)
        self._readings.processes_gone(tgids)
        if self._failovers is not None:
            self._failovers.end_processes(tgids)
        if self._completion is not None:
            self._completion.end_processes(tgids)

    def archive_ended(self, now_ns: int) -> None:
        """Archive what ended; call it right after `read`, as it works on the tables read then."""
        if self._readings.can_archive:
            self._archive(now_ns - _SETTLE_NS)

    def archive_ended_processes(self) -> None:
        """Archive what ended processes did, now: one of their pids is used again."""
        self.read()
        self._archive(0)

    def communicator(self, instance: int) -> Communicator | None:
        """A communicator by its instance; None: unknown."""
        return self._communicators.get(instance)

    @property
    def changes(self) -> int:
        """Rises whenever anything that is known of a communicator changes."""
        return self._communicators.changes

    def communicators(self) -> Iterator[Communicator]:
        """Those that have not been put away."""
        return iter(self._communicators)

    def unmade(self, tgid: int) -> list[Communicator]:
        """Communicators of a process that NCCL may still be making."""
        return self._communicators.unmade(tgid)

    def ended_ranks(self, comm: str) -> set[str]:
        """Ranks of this host whose end of a communicator has ended, by its name."""
        return self._communicators.ended_ranks(comm)

    def forget(self, before_ns: int, most_ended: int) -> list[int]:
        """Drop communicators that ended before a moment, and the oldest of more than `most_ended`; returns them."""
        forgotten = self._history.forget(before_ns, most_ended)
        if forgotten:
            missed, unchecked = self._missed(set(self._communicators.seen_late()).intersection(forgotten))
            self._missed_before += missed
            self._unchecked_before += unchecked
            if self._sequences is not None:
                self._sequences.forget(forgotten)
        self._communicators.forget(forgotten)
        self._events.forget(forgotten)
        self._agreement.forget(forgotten)
        if self._peers is not None:
            self._peers.forget(forgotten)
        if self._completion is not None:
            self._completion.forget(forgotten)
        return forgotten

    def _archive(self, before_ns: int) -> None:
        """As `settle`, for communicators that ended before a moment."""
        known = self._communicators
        gone = {tgid: process for tgid, process in self._processes.items() if process.ended_ns is not None}
        for tgid, process in gone.items():
            # What only the last reading told of.
            known.end_process(tgid, process.ended_ns or 0)
        settled = known.archive(before_ns, gone.keys() | self._vanished)
        if self._completion is not None and settled:
            self._before_forgetting()
            self._completion.read()
            self._completion.end_communicators({communicator.instance for communicator in settled})
        if self._failovers is not None and settled:
            self._failovers.end_communicators({communicator.instance for communicator in settled})
        names = named_namespaces() if settled or gone else {}
        for communicator in settled:
            owner = self._processes.get(communicator.tgid)
            last = self._agreement.last(communicator)
            self._history.add_communicator(
                communicator, owner, name_namespace(owner.namespace if owner else None, names), last
            )
        nameless = gone.keys() | self._vanished
        rows = self._readings.accounting.last.kinds, known.changes
        if nameless or self._swept is None or self._swept[0] is not rows[0] or self._swept[1] != rows[1]:
            self._take_rows(nameless, names)
            self._swept = rows
        known.delete_archived()
        for tgid in gone:
            del self._processes[tgid]
        self._met -= gone.keys()
        self._vanished.clear()

    def _take_rows(self, nameless: Set[int], names: Mapping[int, str]) -> None:
        """Take the rows of what has ended out of the kernel's table; `nameless`: processes that have ended."""
        known, taken = self._communicators, list[CallCount]()
        try:
            for count in self._readings.accounting.pop_rows(
                lambda kind: (
                    known.is_archived(kind.instance) or (kind.tgid in nameless and known.get(kind.instance) is None)
                )
            ):
                self._fold(count, names)
                taken.append(count)
        finally:
            # Also of rows that were taken before the kernel refused one.
            if taken:
                self._expected.fold(taken)
                if self._peers is not None:
                    self._peers.fold(taken)

    def _fold(self, count: CallCount, names: Mapping[int, str]) -> None:
        """Keep a row that has left the kernel's table."""
        kind = count.kind
        self._totals.fold(count)
        process = self._processes.get(kind.tgid)
        if self._communicators.is_archived(kind.instance):
            self._history.add_count(count)
        elif process is not None:
            self._history.add_unnamed(
                count, process, name_namespace(process.namespace if process else None, names), process.ended_ns or 0
            )

    def _version_of(self, tgid: int) -> str:
        process = self._processes.get(tgid)
        return process.nccl_version if process is not None else UNKNOWN

    def facts(self, counts: CallCounts, times: NodeTimes, *, now_ns: int, realtime_offset_ns: int) -> NodeCollectives:
        """What the programs counted and saw below the calls; `counts` from `read`, `now_ns` monotonic.

        `realtime_offset_ns`: the time of day less the monotonic one.
        """
        completion = self._completion
        if completion is not None:
            # After the counts: nothing can then be complete that was not counted, but for what came in between.
            completion.read()
        totals, sizes = self._totals.sum_with(counts, self._readings.overflow())
        names = named_namespaces()
        communicators = self._history.facts(
            self._communicators,
            counts,
            self._processes.get,
            lambda process: name_namespace(process.namespace if process else None, names),
            completion.progress_of if completion is not None else lambda _: None,
            self.position,
            self._agreement.signature,
            now_ns,
        )
        return NodeCollectives(
            totals=totals,
            sizes=sizes,
            estimated=self.watched.facts() if self.watched is not None else (),
            enqueue_times=self._readings.enqueue_times(),
            communicators=communicators,
            peers=self._peers.totals(counts) if self._peers is not None else (),
            events=self._events.events(),
            errors=self._events.errors(),
            failed_over=self._failovers.totals() if self._failovers is not None else None,
            degraded=self._failovers.facts() if self._failovers is not None else (),
            identity_conflicts=self._claims.conflicts,
            completion=completion.facts(communicators, realtime_offset_ns) if completion else NodeCompletion(),
            times=times,
        )

    def events_lost(self) -> Mapping[str, int]:
        """Events that the programs could not pass on, by reason."""
        below = self._completion.events_lost() if self._completion is not None else {}
        missed, _ = self._missed(self._communicators.seen_late())
        return {**self._readings.events_lost(), **below, "before_attachment": self._missed_before + missed}

    @property
    def seen_late_unchecked(self) -> int:
        """Communicators that were not seen from their first call on, and of whose earlier calls nothing is known."""
        return self._unchecked_before + self._missed(self._communicators.seen_late())[1]

    def _missed(self, instances: Iterable[int]) -> tuple[int, int]:
        """Calls of communicators that no agent saw, and communicators of which that is not known."""
        missed = unchecked = 0
        for instance in instances:
            found = self._sequences.missed(instance) if self._sequences is not None else None
            unchecked += found is None
            known = self._communicators.get(instance)
            if found and known is not None:
                missed += max(0, found - self._entered_before((known.name, format_label(known.rank)), known.tgid))
        return missed, unchecked

    def limits_reached(self) -> Mapping[tuple[str, int | None], int]:
        """Calls that got no entry in a table because their user's share was used up, by table and uid."""
        return self._readings.limits_reached()
