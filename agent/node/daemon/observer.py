"""Combines everything known about this host: its ports and GPUs, and its NCCL programs.

The observer owns no loop and no thread: the daemon (or `--once`) calls it when something happened and asks it for a
`Snapshot`.  One lock makes those two safe beside each other.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Collection, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor

from railscope.agent.config.options import Config
from railscope.agent.facts.hardware_evidence import NodeHardware
from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.facts.rail_ledger import RailKey, RailLedger
from railscope.agent.facts.rank_process import RankProcess
from railscope.agent.facts.snapshot import AgentHealth, NodeIdentity, Snapshot
from railscope.agent.node.attribution.evidence import NOT_OBSERVED
from railscope.agent.node.attribution.parties import Unlooked
from railscope.agent.node.daemon.hardware import Hardware
from railscope.agent.node.daemon.kept_totals import KeptTotals
from railscope.agent.node.daemon.loop_lateness import LoopLateness
from railscope.agent.node.daemon.nccl_observer import MOST_ENDED, NcclFacts, NcclObserver
from railscope.agent.node.daemon.nccl_sources import NcclSources
from railscope.agent.node.daemon.own_process import OwnProcess
from railscope.agent.node.recorder.flight_recorder import FlightRecorder
from railscope.agent.node.recorder.triggers import Recordings
from railscope.agent.node.stalls.watchdog import REST_NS, Watchdog
from railscope.exporters.series.earlier import EarlierTotals
from railscope.probes.clock import Clock
from railscope.probes.libraries.communication import CommunicationLibrary
from railscope.probes.loading.maps import Records
from railscope.probes.netdev.events import LinkEvents
from railscope.probes.processes.processes import ProcessIdentity


class Observer:
    """Facts in, snapshots out."""

    def __init__(
        self,
        config: Config,
        nccl: NcclSources | None,
        clock: Clock,
        version: str,
        *,
        revision: str = "unknown",
        recorder: FlightRecorder | None = None,
        own_process: OwnProcess | None = None,
        lateness: LoopLateness | None = None,
        recordings: Recordings | None = None,
        kept: KeptTotals | None = None,
        most_ended: int = MOST_ENDED,
    ) -> None:
        """`nccl` None: collectives are not observed (collector off, or another host's recorded sysfs).

        `recorder` None: nothing is kept for recordings.  `own_process` None: what the agent itself takes is not told.
        `recordings` None: how many were made is not told.  `kept` None: nor how long no agent counted.
        """
        self._own_process = own_process
        self._lateness = lateness
        self._recordings = recordings
        self._kept = kept
        self._clock = clock
        self._version = version
        hostname = platform.node()
        self._node = NodeIdentity(config.node_name or hostname, hostname, config.node_cluster or "")
        self._revision = revision
        self._started_realtime_ns = clock.realtime_ns()
        self._lock = threading.Lock()
        self._nccl: NcclObserver | None = None
        self._hardware = Hardware(
            config, clock, recorder.add_samples if recorder is not None else None, mapped_by=self._mapped_by
        )
        if nccl is not None:
            earlier = kept.earlier if kept is not None else EarlierTotals()
            self._nccl = NcclObserver(
                config,
                nccl,
                self._hardware,
                clock,
                recorder=recorder,
                most_ended=most_ended,
                entered_before=earlier.entered,
            )

    def _mapped_by(self, pid: int) -> frozenset[CommunicationLibrary] | Unlooked:
        """The communication libraries that a process maps.  Safe from any thread."""
        return self._nccl.communication_of(pid) if self._nccl is not None else Unlooked.NEVER

    @property
    def in_use(self) -> bool:
        """Whether there is a communicator, or a stall to look at; if not, a lifecycle event comes before there is."""
        with self._lock:
            return self._nccl is not None and self._nccl.in_use

    def evaluate_stalls(self) -> int:
        """Evaluate whether operations stall; returns when to evaluate again, in ns from now."""
        with self._lock:
            return self._nccl.evaluate_stalls() if self._nccl is not None and self._nccl.in_use else REST_NS

    @property
    def crowds_ns(self) -> int:
        """See `Watchdog.crowds_ns`."""
        return self._nccl.stalls.crowds_ns if self._nccl is not None else 0

    @property
    def early_look_ns(self) -> int | None:
        """When `look_early` is due, CLOCK_MONOTONIC; None: nothing happened that needs it."""
        return self._nccl.stalls.early.due_ns if self._nccl is not None else None

    def look_early(self) -> None:
        """Evaluate the communicators to whose processes or rails something happened a moment ago."""
        if self._nccl is not None:
            with self._lock:
                self._nccl.look_early()

    def record_calls(self, events: Records) -> None:
        """Record calls (dtype CALL_EVENT) that were read from the ring."""
        with self._lock:
            if self._nccl is not None:
                self._nccl.record_calls(events)

    def record_completions(self, events: Records) -> None:
        """Record completed operations (dtype COMPLETION_EVENT) that were read from the ring."""
        with self._lock:
            if self._nccl is not None:
                self._nccl.record_completions(events)

    def at_limits(self) -> str:
        """Who lost something at a limit of their own lately, in words; empty: nobody.  Safe from any thread."""
        return self._nccl.limits.recent() if self._nccl is not None else ""

    @property
    def stalls(self) -> Watchdog | None:
        """What watches for stalls; None: collectives are not observed."""
        return self._nccl.stalls if self._nccl is not None else None

    @property
    def simulated(self) -> bool:
        return self._hardware.simulated

    @property
    def unsettled(self) -> str | None:
        """What changed, by the last update and the last evaluation of stalls; None: nothing."""
        with self._lock:
            why = self._nccl.unsettled if self._nccl is not None else None
            return why or (None if self._hardware.all_sent else "bytes are under way from one tick to the next")

    @property
    def rails_alive(self) -> bool:
        """Whether the sampler of network devices runs."""
        return self._hardware.rails.alive

    def rail_decisions(self) -> tuple[RailDecision, ...]:
        """What each network device is."""
        return self._hardware.rails.decisions()

    def rail_ledgers(self) -> Mapping[RailKey, RailLedger]:
        """Whose the bytes of rails were, by network namespace and device."""
        with self._lock:
            return self._hardware.ledgers()

    def start(self) -> list[LinkEvents]:
        """Begin to watch the host's own rails and GPUs; returns link events to poll."""
        return self._hardware.start()

    # What happened

    def scan(self, budget_ns: int | None = None) -> bool:
        """Scan every process of the host, with a crowd for `budget_ns` at most; whether all were looked at.

        None: however long it takes.
        """
        if self._nccl is None:
            return True
        with self._lock:
            return self._nccl.scan(budget_ns)

    def judge_arrival(self) -> None:
        """Choose the level to begin with, once the processes that were found had time to call."""
        if self._nccl is not None:
            with self._lock:
                self._nccl.judge_arrival()

    def scan_processes(self, pids: Set[int]) -> None:
        """Scan processes that have just mapped an executable file."""
        if self._nccl is not None:
            with self._lock:
                self._nccl.scan_processes(pids)

    def processes_gone(self, ended: Mapping[ProcessIdentity, int | None]) -> None:
        """Archive what ended processes did, and free the rest; with their status as wait(2) returns it, if known."""
        if self._nccl is not None:
            with self._lock:
                self._nccl.processes_gone(ended)

    def read_lifecycle_events(self) -> None:
        """Read lifecycle events: communicators that were created or ended."""
        if self._nccl is not None:
            with self._lock:
                self._nccl.read_lifecycle_events()

    @property
    def change_fd(self) -> int | None:
        """Becomes readable when a probed library is written to; `detach_changed_libraries` then."""
        return self._nccl.change_fd if self._nccl is not None else None

    @property
    def holds_fd(self) -> int | None:
        """Becomes readable when processes were stopped or frozen; `take_holds` then."""
        return self._nccl.holds_fd if self._nccl is not None else None

    def take_holds(self) -> None:
        """Learn which processes were stopped or frozen."""
        if self._nccl is not None:
            with self._lock:
                self._nccl.take_holds()

    @property
    def inspection_fd(self) -> int:
        """Becomes readable when `take_inspections` has something to learn; -1: never."""
        return self._nccl.inspection_fd if self._nccl is not None else -1

    @property
    def awaits_inspections(self) -> bool:
        """Whether something that was asked about processes is not known yet."""
        return self._nccl is not None and self._nccl.awaits_inspections

    def take_inspections(self) -> None:
        """Learn what was asked about processes and was not known at once."""
        if self._nccl is not None:
            with self._lock:
                self._nccl.take_inspections()

    def detach_changed_libraries(self) -> None:
        """Take the probes off libraries that are being written to, before a process maps what they become."""
        if self._nccl is not None:
            with self._lock:
                self._nccl.detach_changed_libraries()

    def handle_link_events(self, events: LinkEvents) -> None:
        """Act on what a network namespace's link events say."""
        with self._lock:
            pids = self._hardware.rails.handle_link_events(events)
            if self._nccl is not None and pids:
                self._nccl.stalls.early.record_events(dict.fromkeys(pids, self._clock.monotonic_ns()))

    def refresh_devices(self) -> None:
        """Read ports and links before the first `update`, so that all of their sources can be read."""
        with self._lock:
            self._hardware.refresh_devices()

    def unread_sources(self) -> tuple[str, ...]:
        """Sources that were not read yet, well or badly."""
        with self._lock:
            return self._hardware.unread_sources()

    def update(self, *, relate: bool = True, calm: bool = False) -> list[LinkEvents]:
        """Correlate, fold, forget; call it periodically.  Returns link events that must not be polled any more.

        `relate` False: what collectives sent and what ports counted is brought together by `snapshot` alone.  `calm`:
        nobody waits for what drivers, queues and connections tell.
        """
        with self._lock:
            self._hardware.refresh_devices(calm=calm)
            if self._nccl is None:
                return self._hardware.update([] if relate else None, lambda: NOT_OBSERVED)
            return self._nccl.update(relate=relate)

    # What is known

    def snapshot(self) -> Snapshot:
        """Everything known now.  Safe from any thread."""
        # Not under the lock: its time grows with the descriptors that are open, one for each observed process.
        own_process = self._own_process.read() if self._own_process is not None else None
        with self._lock:
            realtime_ns, monotonic_ns = self._clock.realtime_ns(), self._clock.monotonic_ns()
            if self._nccl is not None:
                nccl = self._nccl.facts(realtime_ns - monotonic_ns)
            else:
                nccl = NcclFacts()
                self._hardware.correlate([], lambda: NOT_OBSERVED)
            return Snapshot(
                realtime_ns=realtime_ns,
                version=self._version,
                revision=self._revision,
                kernel=platform.release(),
                node=self._node,
                monotonic_ns=monotonic_ns,
                simulated=self.simulated,
                collectives=nccl.collectives,
                rails=self._hardware.rail_facts(),
                gpus=self._hardware.gpu_facts(),
                condition=self._hardware.condition(),
                fabric=self._hardware.fabric(),
                stalls=nccl.stalls,
                transfers=nccl.transfers,
                health=AgentHealth(
                    started_realtime_ns=self._started_realtime_ns,
                    own_process=own_process,
                    loop=self._lateness.facts() if self._lateness is not None else None,
                    collectors=(*self._hardware.collectors(), *nccl.collectors),
                    probes=nccl.probes,
                    recordings=self._recordings.counts() if self._recordings is not None else {},
                    dark_seconds=self._kept.dark_seconds if self._kept is not None else None,
                ),
            )

    def hardware(self) -> NodeHardware:
        """What is known of the host's hardware now."""
        with self._lock:
            found = self._hardware
            return NodeHardware(found.condition(), found.rail_facts(), found.gpu_facts().devices)

    def reconfigure(self, config: Config) -> None:
        """Take over the settings of a configuration that can change while the agent runs."""
        with self._lock:
            if self._nccl is not None:
                self._nccl.reconfigure(config)

    def rank_processes(self, wanted: Collection[ProcessIdentity] | None = None) -> tuple[RankProcess, ...]:
        """The owners and resource use of the processes that map NCCL; read now, on the calling thread."""
        return self._nccl.rank_processes.read(wanted) if self._nccl is not None else ()

    def attached(self) -> tuple[int, int]:
        """How many libraries are probed, of how many that were found."""
        with self._lock:
            libraries = self._nccl.libraries if self._nccl is not None else ()
            return sum(library.links is not None for library in libraries), len(libraries)

    def probed_in_a_crowd(self) -> bool:
        """See `Libraries.probed_in_a_crowd`."""
        with self._lock:
            return self._nccl is not None and self._nccl.probed_in_a_crowd

    def observes(self, pids: Iterable[int]) -> bool:
        """Whether each of these processes maps a library that is probed."""
        with self._lock:
            return self._nccl is not None and set(pids) <= self._nccl.probed_pids

    def close(self) -> None:
        """Detach everywhere and stop sampling."""
        with self._lock:
            with ThreadPoolExecutor(3) as side_by_side:
                closing = [side_by_side.submit(self._hardware.close)]
                if self._nccl is not None:
                    closing += self._nccl.begin_to_close(side_by_side)
                for one in closing:
                    one.result()
            if self._nccl is not None:
                self._nccl.close()
