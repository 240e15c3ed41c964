"""Observes NCCL programs on a host: processes, communicators, exact counts, stalls.

An observer of a host without NCCL programs (collector off, or another host's recorded sysfs) has none of this, and no
method here asks whether it is there.  What is seen below the calls may be missing on its own: some kernels take the
programs that count, and not those that follow operations.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from railscope.agent.config.options import Config
from railscope.agent.config.unmatched import pids_without_nccl
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rank_identity import RankKey
from railscope.agent.facts.remarks import Remark, Troubles
from railscope.agent.facts.snapshot import AttachedProbe, CollectorResult, NodeCollectives, NodeStalls, ProbeHealth
from railscope.agent.facts.transfers import NodeTransfers
from railscope.agent.node.attribution.evidence import NOT_OBSERVED, HandedBytes
from railscope.agent.node.attribution.parties import Unlooked
from railscope.agent.node.collectives.collectives import Collectives
from railscope.agent.node.collectives.watched import WatchedTable
from railscope.agent.node.completion.completion import Completion
from railscope.agent.node.completion.handed_over import RailBytes
from railscope.agent.node.daemon.hardware import Hardware
from railscope.agent.node.daemon.limits import LimitsReached, user_of_share
from railscope.agent.node.daemon.nccl_sources import NcclSources
from railscope.agent.node.daemon.watching import Watching
from railscope.agent.node.inspection.questions import NotYet, Refused
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant, sum_by_user, tenant_of
from railscope.agent.node.overhead.control import LevelControl
from railscope.agent.node.overhead.governor import level_name
from railscope.agent.node.recorder.flight_recorder import FlightRecorder
from railscope.agent.node.stalls.detector import StallLimits
from railscope.agent.node.stalls.holds import Holds
from railscope.agent.node.stalls.stacks import Stacks
from railscope.agent.node.stalls.watchdog import Watchdog
from railscope.agent.node.steps.steps import Steps
from railscope.agent.node.targets.jobs import JobFacts, is_confined
from railscope.agent.node.targets.libraries import Libraries, Library
from railscope.agent.node.targets.memory import ProcessMemory
from railscope.agent.node.targets.processes import NOT_DESCRIBED, NOT_MAPPED, Describe, Description, ObservedProcess
from railscope.agent.node.targets.rank_processes import RankProcesses, UserNames
from railscope.agent.node.targets.unjoined import unjoined_processes
from railscope.probes.clock import Clock
from railscope.probes.libraries.communication import NO_LIBRARY, CommunicationLibrary
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.memory.net_devices import NetDevice
from railscope.probes.nccl.memory.proxy_work import ProxyWorkLayout
from railscope.probes.nccl.records.calls import SHARED_TABLES
from railscope.probes.netdev.events import LinkEvents
from railscope.probes.processes.namespaces import NamespaceError, name_namespace, named_namespaces, network_namespace
from railscope.probes.processes.owner import ProcessOwner
from railscope.probes.processes.processes import Mapping as Mapped
from railscope.probes.processes.processes import ProcessIdentity, cgroup, identity_of, is_alive, program_mark

_log = logging.getLogger("railscope.observer")

MOST_ENDED: Final = 2000
"""Ended communicators that stay readable; older ones only count in the node's totals."""


@dataclass(frozen=True, slots=True)
class NcclFacts:
    """What NCCL programs add to a snapshot; empty where they are not observed."""

    collectives: NodeCollectives = field(default_factory=NodeCollectives)
    stalls: NodeStalls = field(default_factory=NodeStalls)
    probes: ProbeHealth = field(default_factory=ProbeHealth)
    transfers: NodeTransfers = field(default_factory=NodeTransfers)
    collectors: tuple[CollectorResult, ...] = ()


class _KnownToStalls:
    """What the watch for stalls asks of the rest."""

    def __init__(
        self,
        processes: Mapping[int, ObservedProcess],
        collectives: Collectives,
        completion: Completion | None,
        rail_bytes: RailBytes | None,
        rank_processes: RankProcesses,
    ) -> None:
        self._processes = processes
        self._rank_processes = rank_processes
        self._completion = completion
        self._rail_bytes = rail_bytes
        self._collectives = collectives
        self.communicator = collectives.communicator
        self.unmade = collectives.unmade
        self.ended = collectives.ended_ranks
        self.position = collectives.position
        self.disagreement = collectives.disagreement
        self.last_collectives = collectives.last_collectives
        self.calls_unprobed = collectives.calls_unprobed

    def communicator_changes(self) -> int:
        return self._collectives.changes

    def process(self, pid: int) -> ObservedProcess | None:
        return self._processes.get(pid)

    def owner(self, pid: int) -> ProcessOwner | None:
        process = self._processes.get(pid)
        return self._rank_processes.owner(process.identity) if process is not None else None

    def completed(self, instance: int) -> int | None:
        progress = self._completion.progress_of(instance) if self._completion is not None else None
        return progress.completed if progress is not None else None

    def proxy_layout(self, library: int) -> ProxyWorkLayout | None:
        return self._completion.levels.proxy_work_layout_of(library) if self._completion is not None else None

    def devices(self, pid: int, numbers: Collection[int]) -> frozenset[str]:
        return self._rail_bytes.names_of(pid, numbers) if self._rail_bytes is not None else frozenset()

    def level(self) -> Level:
        return self._completion.levels.target_level if self._completion is not None else Level.COUNTS


class NcclObserver:
    """Not thread-safe: the lock of the `Observer` that owns it guards it."""

    def __init__(
        self,
        config: Config,
        sources: NcclSources,
        hardware: Hardware,
        clock: Clock,
        *,
        recorder: FlightRecorder | None = None,
        most_ended: int = MOST_ENDED,
        entered_before: Callable[[RankKey, int], int] = lambda _rank, _pid: 0,
    ) -> None:
        """`recorder` None: nothing is kept for recordings.  `entered_before`: see `Collectives`."""
        self._config = config
        self._programs = sources.programs
        self._inspection = sources.inspection
        self._new_process = sources.new_process
        self._lost_elsewhere = sources.lost_elsewhere
        self._driver_calls = sources.driver_calls
        self._transfers = sources.transfers
        self._hardware = hardware
        self._clock = clock
        self._holds = Holds(sources.stops, config.procfs, clock)
        self._most_ended = most_ended
        self._node_name = socket.gethostname()
        self._processes: dict[int, ObservedProcess] = {}
        """Those that run, and those that ended since the last tick."""
        self.rank_processes = RankProcesses(config.procfs, clock, UserNames())
        """Who runs them, and what they take; safe from any thread."""
        self._undescribed: set[int] = set()
        """Pids of those whose environment could not be read yet."""
        self._silent: set[ProcessIdentity] = set()
        """Processes that had ended at the last scan, though no descriptor said so."""
        self._scanned = CollectorResult("collective", True, 0.0)
        self._in_network = False
        """Whether a collective was seen that runs in the switches."""
        self.limits = LimitsReached(clock)
        """What users lost at limits of their own, as of the last update."""
        self._troubles = Troubles(_log)
        self._pids_remark = Remark(_log, "--pid", "every process named is observed")
        self._memory = ProcessMemory(config.procfs, sources.inspection, self._tenant_of)
        self._libraries = Libraries(
            self._programs,
            config.procfs,
            sources.inspection,
            clock,
            wanted=self._wanted,
            found=self._found,
            sighted=self._sighted,
            linger_ns=config.probes_linger_ns,
        )
        rail_bytes = None
        self._completion: Completion | None = None
        if sources.internals is not None:
            rail_bytes = RailBytes(self._processes.get, self._devices_of)
            self._completion = Completion(
                sources.internals,
                sources.level,
                sources.cuda,
                inspection=sources.inspection,
                rail_bytes=rail_bytes,
                before_forgetting=self._before_forgetting,
            )
        self._collectives = Collectives(
            self._programs,
            self._processes,
            config.small_payload_bytes,
            self._completion,
            memory=self._memory,
            on_lifecycle=recorder.add_lifecycle if recorder is not None else None,
            before_forgetting=self._before_forgetting,
            most_peers=config.series_peers,
            is_running=self._is_running,
            entered_before=entered_before,
        )
        self.stalls = Watchdog(
            (
                self._programs.communicators
                if (watched := self._collectives.watched) is None
                else WatchedTable(self._programs.communicators, watched, clock)
            ),
            sources.in_flight,
            _KnownToStalls(self._processes, self._collectives, self._completion, rail_bytes, self.rank_processes),
            clock,
            _stall_limits(config),
            procfs=config.procfs,
            memory=self._memory,
            rails_of=hardware.rails_of_namespace,
            began=sources.stall_began,
            host_calls=self._programs.host_calls,
            driver_calls=sources.driver_calls,
            transfers=sources.transfers,
            nvlinks=lambda: hardware.gpu_facts().nvlinks,
            stacks=Stacks(config.stall_stacks, clock) if config.stall_stacks is not None else None,
        )
        """What watches for stalls."""
        completion = self._completion
        self._watching = (
            Watching(self._libraries, self._collectives, self._completion.levels, clock)
            if self._completion is not None
            else None
        )
        self._computations = ThreadPoolExecutor(1, "steps")
        self._steps = Steps(
            self._processes,
            (lambda: completion.replaying) if completion is not None else frozenset,
            self._computations,
            self.stalls,
        )
        self._control = sources.control(self._completion) if sources.control is not None else None

    def _before_forgetting(self) -> None:
        """The kernel is about to forget how long some operations took."""
        self.stalls.record_times()

    def _tenant_of(self, pid: int) -> Tenant:
        process = self._processes.get(pid)
        return process.tenant if process is not None else UNKNOWN_TENANT

    def _devices_of(self, tgid: int, library: int) -> Collection[NetDevice]:
        """Names of the network devices of a process."""
        process = self._processes.get(tgid)
        arrays = self._completion.levels.device_arrays_of(library) if self._completion is not None else None
        file = self._libraries.file_of(library, process.identity) if process is not None else None
        if process is None or arrays is None or file is None:
            return ()
        return self._memory.devices(process.identity, file, arrays)

    @property
    def in_use(self) -> bool:
        """Whether there is a communicator, or a stall to look at; if not, a lifecycle event comes before there is."""
        followed = self._transfers is not None and self._transfers.follows
        return self._collectives.alive or self.stalls.busy or followed

    @property
    def unsettled(self) -> str | None:
        """What changed, by the last update and the last evaluation of stalls; None: nothing."""
        if self.stalls.suspicious:
            return "a rank became suspect, or stopped calling"
        if self._control is not None and not self._control.is_stable:
            return "the probes may exceed their budget"
        if self._watching is not None and self._watching.counts_for_a_moment:
            return "calls are counted for a moment"
        return None

    @property
    def change_fd(self) -> int | None:
        """Becomes readable when a probed library is written to; `detach_changed_libraries` then."""
        return self._libraries.change_fd

    @property
    def probed_pids(self) -> Set[int]:
        """Processes that map a library with probes on it: NCCL, or another one that transfers."""
        others = self._transfers.probed if self._transfers is not None else ()
        of_nccl = [library.mappers for library in self.libraries if library.links is not None]
        return {one.pid for mappers in (*of_nccl, *(file.mappers for file in others)) for one in mappers}

    @property
    def libraries(self) -> tuple[Library, ...]:
        """Those that were found, probed or not."""
        return self._libraries.libraries

    def communication_of(self, pid: int) -> frozenset[CommunicationLibrary] | Unlooked:
        """See `Libraries.communication_of`.  Safe from any thread."""
        if pid == os.getpid():
            return NO_LIBRARY
        known = self._libraries.communication_of(pid)
        if known is not None:
            return known
        identity = identity_of(self._config.procfs, pid)
        return Unlooked.YET if identity is not None and self._wanted(identity) else Unlooked.NEVER

    @property
    def living(self) -> int:
        """Processes that run and map NCCL."""
        running = (process for process in self._processes.values() if process.ended_ns is None)
        return sum(process.nccl_version != NOT_MAPPED for process in running)

    # What happened

    def scan(self, budget_ns: int | None = None) -> bool:
        """Scan every process of the host; see `Libraries.scan`.  Returns whether all were looked at."""
        started_ns = self._clock.monotonic_ns()
        self._end_programs(list(self._processes))
        self._libraries.scan(budget_ns)
        self._end_the_silent(started_ns)
        self._scanned = CollectorResult(
            "collective", not self._libraries.errors, (self._clock.monotonic_ns() - started_ns) / 1e9
        )
        self._troubles.say([*self._libraries.errors, *self._follow()])
        mappers = {mapper.pid for library in self._libraries.libraries for mapper in library.mappers}
        if not self._libraries.unfinished:
            self._pids_remark.say(pids_without_nccl(self._config.procfs, self._config.pids, mappers))
        return not self._libraries.unfinished

    @property
    def probed_in_a_crowd(self) -> bool:
        """See `Libraries.probed_in_a_crowd`."""
        return self._libraries.probed_in_a_crowd

    def judge_arrival(self) -> None:
        """Choose the level to begin with, once the processes that were found had time to call."""
        if self._control is not None:
            self._troubles.say(self._control.judge_arrival(), more=True)

    def _end_the_silent(self, now_ns: int) -> None:
        """End processes whose exit no descriptor reported: there may be too many processes for a descriptor each.

        One that has only just ended is left until the next scan: its descriptor knows how it ended.
        """
        silent = {
            process.identity
            for process in self._processes.values()
            if process.ended_ns is None and not is_alive(self._config.procfs, process.identity)
        }
        self._end({identity.pid: None for identity in silent & self._silent}, now_ns)
        self._silent = silent

    def _end_programs(self, pids: Iterable[int]) -> None:
        """Archive what processes did before they executed another program: its communicators went with its memory."""
        changed = []
        for pid in pids:
            process = self._processes.get(pid)
            if process is None or process.ended_ns is not None or process.program is None:
                continue
            if program_mark(self._config.procfs, process.identity) in (None, process.program):
                continue
            _log.info("process %d executes another program", pid)
            changed.append(process.identity)
        if not changed:
            return
        self._end({identity.pid: None for identity in changed}, self._clock.monotonic_ns(), replaced=True)
        self._collectives.archive_ended_processes()
        for identity in changed:
            if self._transfers is not None:
                self._transfers.process_gone(identity)
            # At once: no call of the new program may go uncounted.
            self._add(identity, UNKNOWN)
            self._libraries.rescan_process(identity)

    def scan_processes(self, pids: Set[int]) -> None:
        """Scan processes that have just mapped an executable file."""
        changes = self._libraries.changes
        self._end_programs(pids)
        errors = [error for pid in pids for error in self._libraries.scan_process(pid)]
        # A host that starts processes all the time has few that map NCCL: only those may have more to be probed.
        mappers = (mapper.pid for library in self._libraries.libraries for mapper in library.mappers)
        if changes != self._libraries.changes or not pids.isdisjoint(mappers):
            errors += self._follow()
        self._troubles.say(errors, more=True)

    def evaluate_stalls(self) -> int:
        """See `Watchdog.evaluate`."""
        self.take_holds()
        return self.stalls.evaluate()

    def look_early(self) -> None:
        """See `Watchdog.look_early`."""
        self.take_holds()
        self.stalls.look_early()

    @property
    def holds_fd(self) -> int:
        """Becomes readable when `take_holds` has something to learn."""
        return self._holds.fileno()

    def take_holds(self) -> None:
        """Learn which processes were stopped or frozen."""
        self.stalls.early.record_events(self._holds.read())

    @property
    def inspection_fd(self) -> int:
        """Becomes readable when `take_inspections` has something to learn; -1: never."""
        return self._inspection.fileno()

    def _follow(self) -> list[str]:
        """Observe the probed libraries below their calls; returns errors."""
        probed = [library for library in self._libraries.libraries if library.links is not None]
        errors = self._completion.set_libraries(probed) if self._completion is not None else []
        if self._driver_calls is not None:
            errors += self._driver_calls.set_libraries(probed)
        if self._transfers is not None:
            errors += self._transfers.follow()
        return errors

    def processes_gone(self, ended: Mapping[ProcessIdentity, int | None]) -> None:
        """Archive what ended processes did, and free the rest; with their status as wait(2) returns it, if known."""
        now_ns = self._clock.monotonic_ns()
        for identity in ended:
            self._libraries.process_gone(identity)
            if self._transfers is not None:
                self._transfers.process_gone(identity)
        self._follow()
        known = {process.identity for pid in ended if (process := self._processes.get(pid.pid)) is not None}
        self._end({identity.pid: status for identity, status in ended.items() if identity in known}, now_ns)

    def read_lifecycle_events(self) -> None:
        """Read lifecycle events: communicators that were created or ended."""
        self._collectives.read_lifecycle_events()
        self._add_processes()

    def _add_processes(self) -> None:
        """Scan the processes of new communicators; only on the loop's thread, which watches them."""
        for tgid in self._collectives.pop_unknown_pids():
            self._add_process(tgid)

    def detach_changed_libraries(self) -> None:
        """Take the probes off libraries that are being written to, before a process maps what they become."""
        self._libraries.detach_changed()
        self._follow()

    def update(self, *, relate: bool) -> list[LinkEvents]:
        """Correlate, fold, forget: see `Observer.update`."""
        now_ns = self._clock.monotonic_ns()
        self._collectives.set_host_gpus(self._hardware.gpu_facts().devices)
        # Without a communicator nothing is handed over, and to read that takes as long as all else here.
        if relate and self._completion is not None and self.in_use:
            self._completion.read_handed_over()
        if self._watching is not None:
            self._watching.begin_update()
        counts = self._collectives.read()
        expected = self._collectives.expected(counts) if relate else None
        closed = self._hardware.update(expected, self._handed_over)
        for pid, events in self._hardware.take_opened():
            if (process := self._processes.get(pid)) is not None:
                self._new_process(process.identity, events)
        self._add_processes()
        self._collectives.read_stored_errors(now_ns)
        self._collectives.read_failovers()
        self._collectives.read_watched(now_ns)
        if missed := self._collectives.pop_no_longer_whole():
            self.stalls.calls_missed(missed)
            self._steps.miss_calls()
        self._collectives.read_positions(now_ns)
        self._collectives.compare_ranks(now_ns)
        self._collectives.archive_ended(now_ns)
        self.stalls.forget(self._collectives.forget(now_ns - self._config.comm_lifetime_ns, self._most_ended))
        self._steps.update(now_ns, self._collectives.communicators(), self._collectives.changes)
        self._steps.forget(now_ns - self._config.comm_lifetime_ns)
        if self._transfers is not None:
            self._troubles.say(self._transfers.update(), more=True)
        self.stalls.find_calls()
        self.stalls.early.record_events(self._holds.rearm())
        changes = self._libraries.changes
        self._libraries.expire()
        if changes != self._libraries.changes:
            self._follow()
        self._record_limits()
        self._look_again(self._inspection.sweep())
        # One whose tenant rests is in no queue: nothing tells when to ask again.
        for pid in tuple(self._undescribed):
            self._describe(pid)
        # After what ended was put away: with the last process goes the level at which it was observed.
        if self._control is not None:
            self._troubles.say(self._update_level(self._control), more=True)
        return closed

    def _update_level(self, control: LevelControl) -> list[str]:
        processes = self._collectives.processes_with_communicators
        watched, watching = self._collectives.watched, self._watching
        if watched is None or watching is None:
            return control.update(processes)
        lowest = watching.lowest(asked=self._config.level == level_name(Level.WATCH))
        return [
            *control.update(processes, lowest=lowest, unprobed_calls=watched.take_unprobed),
            *watching.follow(),
        ]

    def reconfigure(self, config: Config) -> None:
        """Take over the level, the budget and the limits of stalls."""
        self._config = config
        self.stalls.set_limits(_stall_limits(config))
        if self._control is not None:
            self._control.reconfigure(budget_ratio=config.budget_ratio, level=config.level)

    def _record_limits(self) -> None:
        refused: defaultdict[str, Counter[int | None]] = defaultdict(Counter)
        for (table, number), calls in self._collectives.limits_reached().items():
            refused[table][user_of_share(number)] += calls
        for table in SHARED_TABLES:
            self.limits.record(table, refused[table])
        for limit, lost in (("libraries", self._libraries.left_out), ("inspection", self._inspection.late())):
            self.limits.record(limit, sum_by_user(lost))
        self.limits.record("arrivals", self.stalls.uncompared())
        for limit, lost_there in {**self._lost_elsewhere, **self._hardware.lost_by_user()}.items():
            self.limits.record(limit, lost_there())

    def _handed_over(self) -> HandedBytes:
        if self._completion is None:
            return NOT_OBSERVED
        whole = self._completion.sees_all_handed_over()
        handed = self._completion.handed_over(self._hardware.rails.namespaces)
        return HandedBytes(handed, whole, self._in_network)

    def _wanted(self, identity: ProcessIdentity) -> bool:
        if identity.pid == os.getpid():
            return False
        if self._config.pids and identity.pid not in self._config.pids:
            return False
        namespaces: Collection[int | None] = self._config.namespaces
        if self._config.scope == "netns":
            namespaces = (self._hardware.own_namespace,)
        if not namespaces:
            return True
        try:
            return network_namespace(self._config.procfs, identity.pid).inode in namespaces
        except NamespaceError:
            return False

    def _found(self, identity: ProcessIdentity, library: Library) -> None:
        self._add(identity, library.nccl_version)

    def _sighted(self, identity: ProcessIdentity, tenant: Tenant, transfers: Sequence[Mapped]) -> None:
        """A process was looked at, which maps these files of other libraries that transfer."""
        if self._transfers is None:
            return
        if transfers:
            self._add(identity, NOT_MAPPED)
        process = self._processes.get(identity.pid)
        netns = name_namespace(process.namespace, named_namespaces()) if transfers and process is not None else ""
        self._transfers.sighted(identity, tenant, transfers, netns)

    def _add_process(self, tgid: int) -> None:
        """A process showed up in the kernel's tables before discovery came to it."""
        identity = identity_of(self._config.procfs, tgid)
        if identity is None or not is_alive(self._config.procfs, identity):
            self._collectives.end_processes({tgid}, self._clock.monotonic_ns())
        elif self._wanted(identity):
            self._add(identity, UNKNOWN)

    def _add(self, identity: ProcessIdentity, nccl_version: str) -> None:
        known = self._processes.get(identity.pid)
        if known is not None and known.identity == identity:
            if known.nccl_version in (UNKNOWN, NOT_MAPPED) and nccl_version != NOT_MAPPED:
                self._processes[identity.pid] = replace(known, nccl_version=nccl_version)
            return
        if known is not None:
            # The pid is used again: what the process before did is put away first.
            self._end({identity.pid: None}, self._clock.monotonic_ns())
            self._collectives.archive_ended_processes()
        try:
            namespace = network_namespace(self._config.procfs, identity.pid)
        except NamespaceError as error:
            _log.info("process %d: %s", identity.pid, error)
            namespace = None
        program, tenant = program_mark(self._config.procfs, identity), tenant_of(self._config.procfs, identity.pid)
        confined = is_confined(cgroup(self._config.procfs, identity.pid))
        self._processes[identity.pid] = ObservedProcess(
            identity, namespace, JobFacts(), "", nccl_version, program, tenant=tenant, confined=confined
        )
        self._collectives.process_added()
        if self._programs.settings.only_observed_processes:
            self._programs.observe(identity.pid)
        self._holds.watch(identity.pid)
        self._new_process(identity, self._hardware.add_process(identity.pid, namespace, NOT_DESCRIBED, tenant))
        self.rank_processes.add(identity, tenant.uid)
        self._describe(identity.pid)

    def _is_running(self, pid: int) -> bool:
        """True as well of a process that is not known: what it did in the kernel's tables tells that it was there."""
        process = self._processes.get(pid)
        return process is None or (process.ended_ns is None and is_alive(self._config.procfs, process.identity))

    def _describe(self, pid: int) -> None:
        """Learn whose job a process is, now or when that is known."""
        process = self._processes.get(pid)
        self._undescribed.discard(pid)
        if process is None or process.ended_ns is not None:
            return
        question = Describe(
            str(self._config.procfs),
            process.identity,
            self._node_name,
            self._hardware.wants_topology,
            str(self._config.pod_logs),
        )
        try:
            description: Description = self._inspection.ask(process.tenant, question).answer
        except NotYet:
            self._undescribed.add(pid)
            return
        except Refused as refused:
            _log.info("process %d: %s", pid, refused)
            return
        self.rank_processes.set_program(process.identity, description.program)
        interfaces = description.setting("NCCL_SOCKET_IFNAME")
        self._processes[pid] = replace(process, job=description.job, socket_interfaces=interfaces)
        events = self._hardware.add_process(pid, process.namespace, description, process.tenant)
        if events is not None:
            self._new_process(process.identity, events)

    @property
    def awaits_inspections(self) -> bool:
        """Whether something that was asked about processes is not known yet."""
        return self._inspection.busy

    def take_inspections(self) -> None:
        """Learn what was asked about processes and was not known at once."""
        self._look_again(self._inspection.collect())

    def _look_again(self, pids: Set[int]) -> None:
        """Look at processes of which there is more to know now."""
        if not pids:
            return
        errors = [error for pid in pids for error in self._libraries.scan_process(pid)]
        for pid in self._undescribed & pids:
            self._describe(pid)
        self._troubles.say([*errors, *self._follow()], more=True)

    def _end(self, ended: Mapping[int, int | None], now_ns: int, *, replaced: bool = False) -> None:
        """End processes; by pid, their status as wait(2) returns it, if known.

        `replaced`: they execute other programs.
        """
        known = ((tgid, self._processes.get(tgid)) for tgid in ended)
        running = {tgid: process for tgid, process in known if process is not None and process.ended_ns is None}
        if not running:
            return
        # While their communicators still count as living.
        self._collectives.read_lifecycle_events()
        self.stalls.processes_gone({tgid: ended[tgid] for tgid in running}, replaced=replaced)
        for tgid, process in running.items():
            self.rank_processes.remove(process.identity)
            self._processes[tgid] = replace(process, ended_ns=now_ns)
        self._collectives.end_processes(running.keys(), now_ns)
        for tgid in running:
            if self._programs.settings.only_observed_processes:
                self._programs.forget(tgid)
            self._holds.forget(tgid)
            self._hardware.remove_process(tgid)

    def record_calls(self, events: Records) -> None:
        """Record calls (dtype CALL_EVENT) that were read from the ring."""
        called = self.stalls.record_calls(events)
        if (watched := self._collectives.watched) is not None and watched.is_watching:
            # These are some of a second, and the next ones may be minutes away.
            self._steps.miss_calls()
            return
        self._steps.record(events, called)

    def record_completions(self, events: Records) -> None:
        """Record completed operations (dtype COMPLETION_EVENT) that were read from the ring."""
        if self._completion is not None:
            self._completion.record_completions(events)
        self._steps.record_completions(events)

    # What is known

    def facts(self, realtime_offset_ns: int) -> NcclFacts:
        """What NCCL programs do; brings it together with what ports counted.

        `realtime_offset_ns`: the time of day less the monotonic one.
        """
        started_ns = self._clock.monotonic_ns()
        self._collectives.set_host_gpus(self._hardware.gpu_facts().devices)
        counts = self._collectives.read()
        collectives = self._collectives.facts(
            counts, self.stalls.times(), now_ns=started_ns, realtime_offset_ns=realtime_offset_ns
        )
        self._hardware.correlate(self._collectives.expected(counts), self._handed_over)
        self._in_network = any(one.algorithm.startswith("CollNet") for one in collectives.completion.launches)
        probes = self._probe_health()
        mapping = (one for one in self._processes.values() if one.nccl_version != NOT_MAPPED)
        unjoined = unjoined_processes(mapping, self._collectives.pids_with_communicators())
        collectives = replace(collectives, unjoined=unjoined, jobs=self._steps.facts())
        # Last: it says whether all of the above could be read.
        transfers = self._transfer_facts()
        collectors = self._result(started_ns), *self.stalls.collectors()
        return NcclFacts(collectives, self.stalls.facts(), probes, transfers, collectors)

    def _transfer_facts(self) -> NodeTransfers:
        if self._transfers is None:
            return NodeTransfers()
        try:
            return self._transfers.facts(most_peers=self._config.series_peers)
        except KernelRefusal as refusal:
            _log.error("transfers cannot be read: %s", refusal.strerror)
            return NodeTransfers()

    def _probe_health(self) -> ProbeHealth:
        return ProbeHealth(
            processes_observed=self.living,
            attached=tuple(probe for library in self.libraries for probe in self._probes(library)),
            levels=self._completion.levels.probe_levels() if self._completion is not None else (),
            events_lost=self._collectives.events_lost(),
            seen_late_unchecked=self._collectives.seen_late_unchecked,
            limits_reached=self.limits.totals,
            overhead_seconds=self._control.seconds if self._control is not None else {},
        )

    def _result(self, started_ns: int) -> CollectorResult:
        scanned = self._scanned
        read = self._collectives.complete and (self._completion is None or self._completion.complete)
        return replace(
            scanned,
            success=scanned.success and read,
            duration_seconds=scanned.duration_seconds or (self._clock.monotonic_ns() - started_ns) / 1e9,
        )

    def _probes(self, library: Library) -> tuple[AttachedProbe, ...]:
        probes = library.probes()
        below = self._completion.levels.programs_of(library.number) if self._completion is not None else ()
        return (*probes, *(replace(probes[0], program=program, attached=True) for program in below))

    def begin_to_close(self, executor: Executor) -> list[Future[None]]:
        """Detach everywhere, each kind of probe on a thread of its own: the kernel waits for every one."""
        closing = [executor.submit(self._libraries.close)]
        if self._completion is not None:
            closing.append(executor.submit(self._completion.close))
        if self._driver_calls is not None:
            closing.append(executor.submit(self._driver_calls.close))
        if self._transfers is not None:
            closing.append(executor.submit(self._transfers.close))
        return closing

    def close(self) -> None:
        """Close what was opened to inspect stalls, once everything is detached."""
        self._computations.shutdown(cancel_futures=True)
        self.stalls.close()
        self._holds.close()
        self._inspection.close()


def _stall_limits(config: Config) -> StallLimits:
    return StallLimits(config.stall_after_ns, config.stall_factor, config.stall_floor_ns)
