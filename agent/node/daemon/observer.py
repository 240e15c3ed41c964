"""What is known about this host, put together: processes, communicators, exact counts, rails.

The observer owns no loop and no thread: the daemon (or `--once`) calls it when something happened and asks it for a
`Snapshot`.  One lock makes those two safe beside each other.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from railscope.agent.config.options import Config
from railscope.agent.config.unmatched import pids_without_nccl
from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.facts.remarks import Remark, Troubles
from railscope.agent.facts.snapshot import UNKNOWN, AttachedProbe, CollectorResult, Snapshot
from railscope.agent.facts.stall import Stall
from railscope.agent.node.collectives.collectives import Collectives
from railscope.agent.node.completion.completion import Completion
from railscope.agent.node.completion.handed_over import RailBytes
from railscope.agent.node.daemon.hardware import Hardware
from railscope.agent.node.daemon.own_process import OwnProcess
from railscope.agent.node.overhead.control import LevelControl
from railscope.agent.node.recorder.flight_recorder import FlightRecorder
from railscope.agent.node.stalls.detector import StallLimits
from railscope.agent.node.stalls.watchdog import REST_NS, InFlightTables, Known, StallWatch
from railscope.agent.node.targets.jobs import job_facts
from railscope.agent.node.targets.libraries import Discovery, Library
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.clock import Clock
from railscope.probes.maps import Records
from railscope.probes.namespaces import NamespaceError, network_namespace
from railscope.probes.nccl.internal_functions import Level
from railscope.probes.nccl.net_devices import NetDevice, net_devices
from railscope.probes.nccl.programs import NcclPrograms
from railscope.probes.netdev.events import LinkEvents
from railscope.probes.processes import ProcessIdentity, cgroup, environ, identity_of, is_alive, program_mark

_log = logging.getLogger("railscope.observer")

MOST_ENDED: Final = 2000
"""Ended communicators that stay readable; older ones only count in the node's totals."""


def _ignore(_identity: ProcessIdentity, _events: LinkEvents | None) -> None:
    """What new processes are told to while nobody listens."""


class Observer:
    """Facts in, snapshots out."""

    def __init__(
        self,
        config: Config,
        programs: NcclPrograms | None,
        clock: Clock,
        version: str,
        *,
        completion: Completion | None = None,
        control: LevelControl | None = None,
        recorder: FlightRecorder | None = None,
        stall_tables: InFlightTables | None = None,
        own_process: OwnProcess | None = None,
        new_process: Callable[[ProcessIdentity, LinkEvents | None], None] = _ignore,
        stall_began: Callable[[Stall], object] = lambda _stall: None,
        most_ended: int = MOST_ENDED,
    ) -> None:
        """`programs` None: collectives are not observed (collector off, or another host's recorded sysfs).

        `completion` None: calls are counted, and nothing below them is seen.  `control` None: its level stays.
        `recorder` None: nothing is kept for recordings.  `stall_tables` None: operations in flight are not seen.
        `own_process` None: what the agent itself takes is not told.  `new_process` hears of each new process, and of
        link events to poll if its namespace is new.  `stall_began` is told of each stall that begins.
        """
        self._completion = completion
        self._control = control
        self._most_ended = most_ended
        self._own_process = own_process
        self._config = config
        self._programs = programs
        self._clock = clock
        self._version = version
        self._started_realtime_ns = clock.realtime_ns()
        self._lock = threading.Lock()
        self._node_name = socket.gethostname()
        self._processes: dict[int, ObservedProcess] = {}
        """Those that run, and those that ended since the last tick."""
        self._collective = CollectorResult("collective", True, 0.0)
        self._troubles = Troubles(_log)
        self._silent: set[ProcessIdentity] = set()
        """Processes that had ended at the last scan, though no descriptor said so."""
        self._pids_remark = Remark(_log, "--pid", "every process named is observed")
        self._new_process = new_process
        self._stall_began = stall_began
        self._hardware = Hardware(
            config, clock, self._handed_over, recorder.add_samples if recorder is not None else None
        )
        if programs is not None:
            self._collectives = Collectives(
                programs,
                self._processes,
                config.small_payload_bytes,
                completion,
                procfs=config.procfs,
                on_lifecycle=recorder.add_lifecycle if recorder is not None else None,
                before_forgetting=lambda: self._stalls.take_times(),
                most_peers=config.series_peers,
            )
            self._discovery = Discovery(programs, config.procfs, wanted=self._wanted, found=self._found)
        if completion is not None:
            completion.rail_bytes = RailBytes(self._processes.get, self._devices_of)
        if programs is not None:
            self._stalls = self._watch_stalls(programs, stall_tables)
            if completion is not None:
                completion.levels.before_forgetting = self._stalls.take_times

    def _watch_stalls(self, programs: NcclPrograms, tables: InFlightTables | None) -> StallWatch:
        completion = self._completion
        rail_bytes = completion.rail_bytes if completion is not None else None
        return StallWatch(
            programs.communicators,
            tables,
            Known(
                communicator=self._collectives.communicator,
                ended=self._collectives.ended_ranks,
                process=self._processes.get,
                completed=self._completed,
                position=self._collectives.position,
                proxy_layout=completion.levels.proxy_work_layout_of if completion is not None else lambda _: None,
                devices=rail_bytes.names_of if rail_bytes is not None else lambda _pid, _numbers: frozenset(),
                level=lambda: completion.levels.wanted if completion is not None else Level.COUNTS,
            ),
            self._clock,
            StallLimits(self._config.stall_after_ns, self._config.stall_factor, self._config.stall_floor_ns),
            procfs=self._config.procfs,
            rails_of=self._hardware.of_namespace,
            began=self._stall_began,
        )

    def _completed(self, instance: int) -> int | None:
        progress = self._completion.of(instance) if self._completion is not None else None
        return progress.completed if progress is not None else None

    @property
    def in_use(self) -> bool:
        """Whether there is a communicator, or a stall to look at; if not, a lifecycle event comes before there is."""
        with self._lock:
            return self._in_use

    @property
    def _in_use(self) -> bool:
        return self._programs is not None and (self._collectives.alive or self._stalls.busy)

    def look_for_stalls(self) -> int:
        """Judge whether operations come to their end; returns when to look again, in ns from now."""
        with self._lock:
            return self._stalls.look() if self._in_use else REST_NS

    def take_calls(self, events: Records) -> None:
        """Learn from events of calls (dtype CALL_EVENT) that were read from the ring."""
        with self._lock:
            if self._programs is not None:
                self._stalls.take_calls(events)

    def take_completions(self, events: Records) -> None:
        """Learn from completed operations (dtype COMPLETION_EVENT) that were read from the ring."""
        with self._lock:
            if self._completion is not None:
                self._completion.take_completions(events)

    @property
    def stalls(self) -> StallWatch | None:
        """What watches for stalls; None: collectives are not observed."""
        return self._stalls if self._programs is not None else None

    @property
    def simulated(self) -> bool:
        return self._hardware.simulated

    @property
    def unsettled(self) -> str | None:
        """What is not as it was, as far as the last tick and the last look for stalls tell; None: all is."""
        with self._lock:
            if self._programs is not None and self._stalls.suspicious:
                return "a rank is suspected, or has come to rest"
            if self._control is not None and not self._control.settled:
                return "the probes' budget may not be kept"
            return None if self._hardware.settled else "bytes are under way from one tick to the next"

    @property
    def rails_alive(self) -> bool:
        """Whether the sampler of network devices runs."""
        return self._hardware.rails.alive

    def rail_decisions(self) -> tuple[RailDecision, ...]:
        """What each network device is."""
        return self._hardware.rails.decisions()

    def start(self) -> list[LinkEvents]:
        """Begin to watch the host's own rails and GPUs; returns link events to poll."""
        return self._hardware.start()

    # What happened

    def scan(self) -> None:
        """Look at every process of the host."""
        if self._programs is None:
            return
        with self._lock:
            started_ns = self._clock.monotonic_ns()
            self._end_programs(list(self._processes))
            self._discovery.scan()
            self._end_the_silent(started_ns)
            self._collective = CollectorResult(
                "collective", not self._discovery.errors, (self._clock.monotonic_ns() - started_ns) / 1e9
            )
            self._troubles.say([*self._discovery.errors, *self._follow()])
            mappers = {mapper.pid for library in self._discovery.libraries for mapper in library.mappers}
            self._pids_remark.say(pids_without_nccl(self._config.procfs, self._config.pids, mappers))

    def _end_the_silent(self, now_ns: int) -> None:
        """Processes whose end no descriptor told of: there may have been too many to hold one for each.

        One that has only just ended is left until the next scan: its descriptor knows how it ended.
        """
        silent = {
            process.identity
            for process in self._processes.values()
            if process.ended_ns is None and not is_alive(self._config.procfs, process.identity)
        }
        for identity in silent & self._silent:
            self._end(identity.pid, now_ns)
        self._silent = silent

    def _end_programs(self, pids: Iterable[int]) -> None:
        """Put away what processes did before they executed another program: its communicators went with its memory."""
        for pid in pids:
            process = self._processes.get(pid)
            if process is None or process.ended_ns is not None or process.program is None:
                continue
            if program_mark(self._config.procfs, process.identity) in (None, process.program):
                continue
            _log.info("process %d executes another program", pid)
            self._end(pid, self._clock.monotonic_ns())
            self._collectives.settle_processes()
            # At once: no call of the new program may go uncounted.
            self._add(process.identity, UNKNOWN)
            self._discovery.meet_again(process.identity)

    def look_at(self, pids: Set[int]) -> None:
        """Look at processes that have just mapped something executable."""
        with self._lock:
            changes = self._discovery.changes
            self._end_programs(pids)
            errors = [error for pid in pids for error in self._discovery.look_at(pid)]
            # A host that starts processes all the time has few that map NCCL: only those may have more to be probed.
            mappers = (mapper.pid for library in self._discovery.libraries for mapper in library.mappers)
            if changes != self._discovery.changes or not pids.isdisjoint(mappers):
                errors += self._follow()
            self._troubles.say(errors, more=True)

    def _devices_of(self, tgid: int, library: int) -> Collection[NetDevice]:
        """Names of the network devices of a process."""
        process = self._processes.get(tgid)
        arrays = self._completion.levels.device_arrays_of(library) if self._completion is not None else None
        file = self._discovery.file_of(library, process.identity) if process is not None else None
        if process is None or arrays is None or file is None:
            return ()
        return net_devices(self._config.procfs, process.identity, file, arrays)

    def _handed_over(self) -> dict[tuple[int, str], int] | None:
        """Bytes that collectives handed to each device, by network namespace and name; None: not observed."""
        if self._completion is None:
            return None
        self._hardware.set_whole(self._completion.sees_all_handed_over())
        return self._completion.handed_over(self._hardware.rails.namespaces)

    def _follow(self) -> list[str]:
        """Look below the calls of the libraries that are probed; returns what went wrong."""
        if self._completion is None:
            return []
        return self._completion.follow(library for library in self._discovery.libraries if library.links is not None)

    def process_gone(self, identity: ProcessIdentity, status: int | None = None) -> None:
        """Keep what a process that has ended did, and let go of the rest; `status` as wait(2) tells it."""
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            self._discovery.process_gone(identity)
            self._follow()
            process = self._processes.get(identity.pid)
            if process is not None and process.identity == identity:
                self._end(identity.pid, now_ns, status)

    def take_lifecycle(self) -> None:
        """Learn of communicators that came or went."""
        with self._lock:
            if self._programs is not None:
                self._collectives.drain()
                self._meet_all()

    def _meet_all(self) -> None:
        """Look at the processes behind new communicators; only ever on the loop's thread, which watches them."""
        for tgid in self._collectives.unmet():
            self._meet(tgid)

    @property
    def change_fd(self) -> int | None:
        """Becomes readable when a probed library is written to; `take_changes` then."""
        return self._discovery.change_fd if self._programs is not None else None

    def take_changes(self) -> None:
        """Take the probes off libraries that are being written to, before a process maps what they become."""
        with self._lock:
            self._discovery.take_changes()
            self._follow()

    def take_link_events(self, events: LinkEvents) -> None:
        with self._lock:
            self._hardware.rails.take_events(events)

    def look(self) -> None:
        """Learn of ports and links before the first `tick`, so that all of their sources can be read."""
        with self._lock:
            self._hardware.look()

    def awaited(self) -> tuple[str, ...]:
        """Sources that were not read yet, well or badly."""
        with self._lock:
            return self._hardware.awaited()

    def tick(self, *, relate: bool = True, calm: bool = False) -> list[LinkEvents]:
        """Now and then: relate, fold, forget.  Returns link events that must not be polled any more.

        `relate` False: what collectives sent and what ports counted is brought together by `snapshot` alone.  `calm`:
        nobody waits for what drivers, queues and connections tell.
        """
        with self._lock:
            self._hardware.look(calm=calm)
            if self._programs is None:
                return self._hardware.tick([] if relate else None)
            now_ns = self._clock.monotonic_ns()
            # Without a communicator nothing is handed over, and to read that takes as long as all else here.
            if relate and self._completion is not None and self._in_use:
                self._completion.read_handed_over()
            counts = self._collectives.read()
            closed = self._hardware.tick(self._collectives.expected(counts) if relate else None)
            self._meet_all()
            self._collectives.look_for_errors(now_ns)
            self._collectives.look_for_positions(now_ns)
            self._collectives.settle(now_ns)
            self._stalls.forget(self._collectives.forget(now_ns - self._config.comm_lifetime_ns, self._most_ended))
            # After what ended was put away: with the last process goes the level at which it was observed.
            if self._control is not None:
                errors = self._control.tick(self._collectives.processes_with_communicators)
                self._troubles.say(errors, more=True)
            return closed

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

    def _meet(self, tgid: int) -> None:
        """A process showed up in the kernel's tables before discovery came to it."""
        identity = identity_of(self._config.procfs, tgid)
        if identity is None or not is_alive(self._config.procfs, identity):
            self._collectives.end_process(tgid, self._clock.monotonic_ns())
        elif self._wanted(identity):
            self._add(identity, UNKNOWN)

    def _add(self, identity: ProcessIdentity, nccl_version: str) -> None:
        known = self._processes.get(identity.pid)
        if known is not None and known.identity == identity:
            if known.nccl_version == UNKNOWN:
                self._processes[identity.pid] = replace(known, nccl_version=nccl_version)
            return
        if known is not None:
            # The pid is used again: what the process before did is put away first.
            self._end(identity.pid, self._clock.monotonic_ns())
            self._collectives.settle_processes()
        environment = environ(self._config.procfs, identity.pid)
        job = job_facts(environment, cgroup(self._config.procfs, identity.pid) or "", self._node_name)
        interfaces = environment.get("NCCL_SOCKET_IFNAME", "")
        try:
            namespace = network_namespace(self._config.procfs, identity.pid)
        except NamespaceError as error:
            _log.info("process %d: %s", identity.pid, error)
            namespace = None
        program = program_mark(self._config.procfs, identity)
        self._processes[identity.pid] = ObservedProcess(identity, namespace, job, interfaces, nccl_version, program)
        if self._programs is not None and self._programs.settings.only_observed_processes:
            self._programs.observe(identity.pid)
        events = self._hardware.add_process(identity.pid, namespace, environment)
        self._new_process(identity, events)

    def _end(self, tgid: int, now_ns: int, status: int | None = None) -> None:
        process = self._processes.get(tgid)
        if process is None or process.ended_ns is not None:
            return
        if self._programs is not None:
            # While its communicators still count as living.
            self._collectives.drain()
            self._stalls.process_gone(tgid, status)
        self._processes[tgid] = replace(process, ended_ns=now_ns)
        if self._programs is not None:
            self._collectives.end_process(tgid, now_ns)
            if self._programs.settings.only_observed_processes:
                self._programs.forget(tgid)
        self._hardware.remove_process(tgid)

    # What is known

    def snapshot(self) -> Snapshot:
        """Everything known now.  Safe from any thread."""
        with self._lock:
            snapshot = Snapshot(
                realtime_ns=self._clock.realtime_ns(),
                monotonic_ns=self._clock.monotonic_ns(),
                started_realtime_ns=self._started_realtime_ns,
                version=self._version,
                kernel=platform.release(),
                processes_observed=sum(process.ended_ns is None for process in self._processes.values()),
                simulated=self.simulated,
                own_process=self._own_process.read() if self._own_process is not None else None,
            )
            results: tuple[CollectorResult, ...] = ()
            if self._programs is None:
                self._hardware.relate([])
            else:
                started_ns = self._clock.monotonic_ns()
                counts = self._collectives.read()
                snapshot = self._collectives.shown(snapshot, counts, self._clock.monotonic_ns())
                self._hardware.relate(self._collectives.expected(counts))
                if self._completion is not None:
                    snapshot = self._completion.shown(snapshot)
                self._hardware.set_in_network(any(one.algorithm.startswith("CollNet") for one in snapshot.launches))
                stalls, stall_totals = self._stalls.shown()
                snapshot = self._stalls.with_times(
                    replace(snapshot, stalls=stalls, stall_totals=stall_totals, ended_stalls=self._stalls.ended)
                )
                results = (self._collective_result(started_ns),)
            shown = self._hardware.shown(snapshot)
            return replace(
                shown,
                collectors=(*shown.collectors, *results),
                overhead_seconds=self._control.seconds if self._control is not None else {},
                probes=tuple(probe for library in self._libraries() for probe in self._probes(library)),
            )

    def _collective_result(self, started_ns: int) -> CollectorResult:
        result = self._collective
        return replace(
            result,
            success=result.success
            and self._collectives.complete
            and (self._completion is None or self._completion.complete),
            duration_seconds=result.duration_seconds or (self._clock.monotonic_ns() - started_ns) / 1e9,
        )

    def _probes(self, library: Library) -> tuple[AttachedProbe, ...]:
        probes = library.probes()
        below = self._completion.levels.programs_of(library.number) if self._completion is not None else ()
        return (*probes, *(replace(probes[0], program=program, attached=True) for program in below))

    def _libraries(self) -> tuple[Library, ...]:
        return self._discovery.libraries if self._programs is not None else ()

    def attached(self) -> bool:
        """Whether every library found so far is probed."""
        with self._lock:
            return all(library.links is not None for library in self._libraries())

    def observes(self, pids: Iterable[int]) -> bool:
        """Whether each of these processes maps a library that is probed."""
        with self._lock:
            probed = {m.pid for library in self._libraries() if library.links is not None for m in library.mappers}
            return probed.issuperset(pids)

    def close(self) -> None:
        """Detach everywhere and stop sampling."""
        with self._lock:
            with ThreadPoolExecutor(3) as side_by_side:
                closing = [side_by_side.submit(self._hardware.close)]
                if self._completion is not None:
                    closing.append(side_by_side.submit(self._completion.close))
                if self._programs is not None:
                    closing.append(side_by_side.submit(self._discovery.close))
                for one in closing:
                    one.result()
            if self._programs is not None:
                self._stalls.close()
