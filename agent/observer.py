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
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from agent.collectives import Collectives
from agent.communicators import ObservedProcess
from agent.completion import Completion
from agent.config import Config
from agent.configured import Remark, pids_without_nccl
from agent.correlation import ExpectedBytes
from agent.discovery import Discovery, Library
from agent.ethernet import EthernetWatch
from agent.jobs import job_facts
from agent.level_control import LevelControl
from agent.nvlink import NO_NVLINK, NvlinkWatch
from agent.rail_bytes import RailBytes
from agent.rail_watch import RailWatch
from agent.rails import parse_rail_patterns
from agent.rdma_rails import RdmaRails
from agent.sampling import Sampler
from agent.snapshot import UNKNOWN, AttachedProbe, CollectorResult, Snapshot
from probes.clock import Clock
from probes.namespaces import NamespaceError, network_namespace
from probes.nccl.internal_functions import Level
from probes.nccl.net_devices import NetDevice, net_devices
from probes.nccl.programs import NcclPrograms
from probes.netdev.events import LinkEvents
from probes.processes import ProcessIdentity, cgroup, environ, identity_of, is_alive

_log = logging.getLogger("railscope.observer")

_MOST_REPORTED: Final = 3
_NVLINK_PERIOD_SECONDS: Final = 5.0
"""Counters of bytes need no haste: nothing but whether a link is up gets older by it."""
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
        most_ended: int = MOST_ENDED,
    ) -> None:
        """`programs` None: collectives are not observed (collector off, or another host's recorded sysfs).

        `completion` None: calls are counted, and nothing below them is seen.  `control` None: its level stays.
        """
        self._completion = completion
        self._control = control
        self._most_ended = most_ended
        self._config = config
        self._programs = programs
        self._clock = clock
        self._version = version
        self._lock = threading.Lock()
        self._node_name = socket.gethostname()
        self._processes: dict[int, ObservedProcess] = {}
        """Those that run, and those that ended since the last tick."""
        self._collective = CollectorResult("collective", True, 0.0)
        self._reported: frozenset[str] = frozenset()
        self._pids_remark = Remark(_log, "--pid", "every process named is observed")
        self.new_process: Callable[[ProcessIdentity, LinkEvents | None], None] = _ignore
        """Hears of each new process, and of link events to poll if its namespace is new."""
        self.rails = RailWatch(
            clock,
            procfs=config.procfs,
            sysfs=config.sysfs,
            sample_interval_ns=config.sample_interval_ns,
            window_ns=config.correlation_window_ns,
            lifetime_ns=config.comm_lifetime_ns,
            patterns=parse_rail_patterns(config.rails),
        )
        self._rdma: RdmaRails | None = None
        if "rdma" in config.collectors:
            self._rdma = RdmaRails(
                clock,
                sysfs=config.sysfs,
                procfs=config.procfs,
                sample_interval_ns=config.sample_interval_ns,
                window_ns=config.correlation_window_ns,
                patterns=parse_rail_patterns(config.rails),
            )
        self._ethernet: EthernetWatch | None = None
        wanted = {name: name in config.collectors for name in ("ethtool", "qdisc", "tcp")}
        if any(wanted.values()) and not self.simulated:
            # Apart from the byte counters: a driver may ask its firmware for long.
            self._ethernet_sampler = Sampler(clock)
            self._ethernet = EthernetWatch(
                clock,
                self._ethernet_sampler,
                procfs=config.procfs,
                lifetime_ns=config.comm_lifetime_ns,
                ethtool=wanted["ethtool"],
                queues=wanted["qdisc"],
                tcp=wanted["tcp"],
            )
        self._nvlink: NvlinkWatch | None = None
        if "nvlink" in config.collectors and str(config.sysfs) == "/sys":
            self._nvlink = NvlinkWatch(clock, sysfs=config.sysfs, period_seconds=_NVLINK_PERIOD_SECONDS)
        self._own_namespace = None
        try:
            self._own_namespace = network_namespace(config.procfs, "self").inode
        except NamespaceError as error:
            _log.debug("own network namespace: %s", error)
        if programs is not None:
            self._collectives = Collectives(
                programs, self._processes, config.small_payload_bytes, completion, procfs=config.procfs
            )
            self._discovery = Discovery(programs, config.procfs, wanted=self._wanted, found=self._found)
        if completion is not None:
            completion.rail_bytes = RailBytes(self._processes.get, self._devices_of)

    @property
    def simulated(self) -> bool:
        return str(self._config.sysfs) != "/sys" or str(self._config.procfs) != "/proc"

    def start(self) -> list[LinkEvents]:
        """Begin to watch the host's own rails and GPUs; returns link events to poll."""
        if self._ethernet is not None:
            self._ethernet_sampler.start()
        if self._rdma is not None:
            self._rdma.start()
            self.rails.other_devices = self._rdma.names
        if self._nvlink is not None:
            self._nvlink.start()
        if "netdev" not in self._config.collectors:
            return []
        events = None
        if str(self._config.sysfs) != "/sys":
            self.rails.watch_recorded()
        elif self._own_namespace is not None:
            own = network_namespace(self._config.procfs, "self")
            events = self.rails.watch_own(own)
            if self._ethernet is not None:
                self._ethernet.watch_own(own)
        self.rails.start()
        return [events] if events is not None else []

    # What happened

    def scan(self) -> None:
        """Look at every process of the host."""
        if self._programs is None:
            return
        with self._lock:
            started_ns = self._clock.monotonic_ns()
            self._discovery.scan()
            # Ends that no descriptor told of: there may have been too many processes to hold one for each.
            for tgid, process in list(self._processes.items()):
                if process.ended_ns is None and not is_alive(self._config.procfs, process.identity):
                    self._end(tgid, started_ns)
            self._collective = CollectorResult(
                "collective", not self._discovery.errors, (self._clock.monotonic_ns() - started_ns) / 1e9
            )
            self._report([*self._discovery.errors, *self._follow()])
            mappers = {mapper.pid for library in self._discovery.libraries for mapper in library.mappers}
            self._pids_remark.say(pids_without_nccl(self._config.procfs, self._config.pids, mappers))

    def _report(self, errors: Sequence[str]) -> None:
        """Say once what a scan could not do; the same trouble at every scan is no news."""
        news = [error for error in errors if error not in self._reported]
        self._reported = frozenset(errors)
        for error in news[:_MOST_REPORTED]:
            _log.warning("%s", error)
        if len(news) > _MOST_REPORTED:
            _log.warning("and %d more of the kind; 'railscope doctor' says what is missing", len(news) - _MOST_REPORTED)

    def look_at(self, pids: Iterable[int]) -> None:
        """Look at processes that have just mapped something executable."""
        with self._lock:
            errors = [error for pid in pids for error in self._discovery.look_at(pid)]
            self._report([*self._reported, *errors, *self._follow()])

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
        if self._completion is None or self._completion.rail_bytes is None:
            return None
        handed_over = self._completion.rail_bytes
        handed_over.forget_namespaces(handed_over.namespaces - self.rails.namespaces)
        # What was handed over stays counted when the level falls.
        if self._completion.levels.wanted < Level.RAILS and not handed_over.namespaces:
            return None
        return {device: handed.bytes for device, handed in handed_over.by_device().items()}

    def _follow(self) -> list[str]:
        """Look below the calls of the libraries that are probed; returns what went wrong."""
        if self._completion is None:
            return []
        return self._completion.follow(library for library in self._discovery.libraries if library.links is not None)

    def process_gone(self, identity: ProcessIdentity) -> None:
        """Keep what a process that has ended did, and let go of the rest."""
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            self._discovery.process_gone(identity)
            self._follow()
            process = self._processes.get(identity.pid)
            if process is not None and process.identity == identity:
                self._end(identity.pid, now_ns)

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
            self.rails.take_events(events)

    def tick(self) -> list[LinkEvents]:
        """Once a second: relate, fold, forget.  Returns link events that must not be polled any more."""
        with self._lock:
            if self._ethernet is not None:
                self._ethernet.tick(self.rails.decisions())
            if self._rdma is not None:
                self._rdma.tick()
                self.rails.other_devices = self._rdma.names
            if self._programs is None:
                return self.rails.tick(())
            now_ns = self._clock.monotonic_ns()
            closed = self.rails.tick(
                self._relate_rdma(self._collectives.expected(self._collectives.read())), self._handed_over()
            )
            self._meet_all()
            self._collectives.look_for_errors(now_ns)
            self._collectives.settle(now_ns)
            self._collectives.forget(now_ns - self._config.comm_lifetime_ns, self._most_ended)
            # After what ended was put away: with the last process goes the level at which it was observed.
            if self._control is not None:
                self._report([*self._reported, *self._control.tick(self._collectives.processes_with_communicators)])
            return closed

    def _relate_rdma(self, expected: list[ExpectedBytes]) -> list[ExpectedBytes]:
        """Relate what goes through RDMA; returns what is left for the network devices."""
        if self._rdma is None:
            return expected
        self._rdma.relate(expected, self._handed_over())
        return [] if self._rdma.carries else expected

    def _wanted(self, identity: ProcessIdentity) -> bool:
        if identity.pid == os.getpid():
            return False
        if self._config.pids and identity.pid not in self._config.pids:
            return False
        if self._config.scope == "netns":
            try:
                return network_namespace(self._config.procfs, identity.pid).inode == self._own_namespace
            except NamespaceError:
                return False
        return True

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
        if self._rdma is not None:
            self._rdma.add_process(identity.pid, environment)
        try:
            namespace = network_namespace(self._config.procfs, identity.pid)
        except NamespaceError as error:
            _log.info("process %d: %s", identity.pid, error)
            namespace = None
        self._processes[identity.pid] = ObservedProcess(identity, namespace, job, interfaces, nccl_version)
        if self._programs is not None and self._programs.settings.only_observed_processes:
            self._programs.observe(identity.pid)
        events = None
        if namespace is not None and "netdev" in self._config.collectors and not self.simulated:
            events = self.rails.add_process(identity.pid, namespace, interfaces)
            if self._ethernet is not None:
                self._ethernet.add_process(identity.pid, namespace)
        self.new_process(identity, events)

    def _end(self, tgid: int, now_ns: int) -> None:
        process = self._processes.get(tgid)
        if process is None or process.ended_ns is not None:
            return
        self._processes[tgid] = replace(process, ended_ns=now_ns)
        if self._programs is not None:
            self._collectives.end_process(tgid, now_ns)
            if self._programs.settings.only_observed_processes:
                self._programs.forget(tgid)
        self.rails.remove_process(tgid)
        if self._ethernet is not None:
            self._ethernet.remove_process(tgid)
        if self._rdma is not None:
            self._rdma.remove_process(tgid)

    # What is known

    def snapshot(self) -> Snapshot:
        """Everything known now.  Safe from any thread."""
        with self._lock:
            snapshot = Snapshot(
                realtime_ns=self._clock.realtime_ns(),
                version=self._version,
                kernel=platform.release(),
                processes_observed=sum(process.ended_ns is None for process in self._processes.values()),
                simulated=self.simulated,
            )
            results: tuple[CollectorResult, ...] = ()
            if self._programs is None:
                self.rails.relate(self._relate_rdma([]))
            else:
                started_ns = self._clock.monotonic_ns()
                counts = self._collectives.read()
                snapshot = self._collectives.shown(snapshot, counts, self._clock.monotonic_ns())
                self.rails.relate(self._relate_rdma(self._collectives.expected(counts)), self._handed_over())
                if self._completion is not None:
                    snapshot = self._completion.shown(snapshot)
                results = (self._collective_result(started_ns),)
            slow: tuple[CollectorResult, ...] = ()
            if self._ethernet is not None:
                self.rails.ethernet = {(one.netns, one.device): one for one in self._ethernet.facts()}
                slow = self._ethernet.collectors()
            rdma = self._rdma.rails() if self._rdma is not None else ()
            reading = self._rdma.collectors() if self._rdma is not None else ()
            nvlink = self._nvlink.state() if self._nvlink is not None else NO_NVLINK
            return replace(
                snapshot,
                gpus=nvlink.gpus,
                nvlinks=nvlink.links,
                rails=(*rdma, *self.rails.rails()),
                collectors=(*self.rails.collectors(), *slow, *reading, *nvlink.collectors, *results),
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
            with ThreadPoolExecutor(2) as side_by_side:
                closing = []
                if self._completion is not None:
                    closing.append(side_by_side.submit(self._completion.close))
                if self._programs is not None:
                    closing.append(side_by_side.submit(self._discovery.close))
                for one in closing:
                    one.result()
            self.rails.close()
            if self._ethernet is not None:
                self._ethernet.close()
                self._ethernet_sampler.stop()
            if self._rdma is not None:
                self._rdma.close()
            if self._nvlink is not None:
                self._nvlink.close()
