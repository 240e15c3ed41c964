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
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from agent.accounting import Accounting, CallCount, CallKind
from agent.communicators import Communicator, Communicators, ObservedProcess, text
from agent.config import Config
from agent.correlation import ExpectedBytes, ObservedCalls, WireTotals, expected_bytes
from agent.discovery import Discovery, Library
from agent.jobs import job_facts
from agent.rail_watch import RailWatch
from agent.rails import parse_rail_patterns
from agent.snapshot import (
    UNKNOWN,
    CollectiveTotal,
    CollectorResult,
    CommunicatorFacts,
    Histogram,
    OpHistogram,
    OpTotal,
    Snapshot,
)
from probes.bpf_syscall import KernelRefusal
from probes.clock import Clock
from probes.namespaces import NamespaceError, named_namespaces, network_namespace
from probes.nccl.abi import Op, data_type_name, op_name
from probes.nccl.programs import NcclPrograms
from probes.nccl.records import Stat
from probes.netdev.events import LinkEvents
from probes.processes import ProcessIdentity, cgroup, environ, identity_of, is_alive

_log = logging.getLogger("railscope.observer")

_MOST_REPORTED: Final = 3
_SETTLE_NS: Final = 500_000_000
"""A destroyed communicator's counts stay in the kernel this long, for a call that was just under way."""
MOST_ENDED: Final = 2000
"""Ended communicators that stay readable; older ones only count in the node's totals."""
_SIZE_BOUNDS: Final = tuple(float(1 << bucket) for bucket in range(40))
_ENQUEUE_BOUNDS: Final = tuple((1 << (7 + i)) / 1e9 for i in range(31))
"""Seconds; the last bucket of the kernel's 32 has no bound."""


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
        most_ended: int = MOST_ENDED,
    ) -> None:
        """`programs` None: collectives are not observed (collector off, or another host's recorded sysfs)."""
        self._most_ended = most_ended
        self._config = config
        self._programs = programs
        self._clock = clock
        self._version = version
        self._lock = threading.Lock()
        self._node_name = socket.gethostname()
        self._processes: dict[int, ObservedProcess] = {}
        self._base: dict[tuple[int, int, str], list[int]] = defaultdict(lambda: [0, 0])
        """Folded totals by (op, data type, gpu): calls, payload bytes."""
        self._base_sizes: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        self._base_expected: dict[int, ExpectedBytes] = {}
        self._collective = CollectorResult("collective", True, 0.0)
        self._reported: frozenset[str] = frozenset()
        self._unmet: set[int] = set()
        """Processes that showed up in the kernel's tables and were not looked at yet."""
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
        self._own_namespace = None
        try:
            self._own_namespace = network_namespace(config.procfs, "self").inode
        except NamespaceError as error:
            _log.debug("own network namespace: %s", error)
        if programs is not None:
            self._accounting = Accounting(programs.aggregates)
            self._communicators = Communicators(programs.communicators)
            self._discovery = Discovery(programs, config.procfs, wanted=self._wanted, found=self._found)

    @property
    def simulated(self) -> bool:
        return str(self._config.sysfs) != "/sys" or str(self._config.procfs) != "/proc"

    def start(self) -> list[LinkEvents]:
        """Begin to watch the host's own rails; returns link events to poll."""
        if "netdev" not in self._config.collectors:
            return []
        events = None
        if str(self._config.sysfs) != "/sys":
            self.rails.watch_recorded()
        elif self._own_namespace is not None:
            events = self.rails.watch_own(network_namespace(self._config.procfs, "self"))
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
            self._report(self._discovery.errors)

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
            self._report([*self._reported, *errors])

    def process_gone(self, identity: ProcessIdentity) -> None:
        """Keep what a process that has ended did, and let go of the rest."""
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            self._discovery.process_gone(identity)
            process = self._processes.get(identity.pid)
            if process is not None and process.identity == identity:
                self._end(identity.pid, now_ns)

    def take_lifecycle(self) -> None:
        """Learn of communicators that came or went."""
        with self._lock:
            self._drain_lifecycle()
            self._meet_all()

    def _drain_lifecycle(self) -> None:
        if self._programs is not None:
            self._unmet |= self._communicators.take(self._programs.lifecycle_events.read())

    def _meet_all(self) -> None:
        """Look at the processes behind new communicators; only ever on the loop's thread, which watches them."""
        unmet, self._unmet = self._unmet, set()
        for tgid in unmet:
            self._meet(tgid)

    def take_link_events(self, events: LinkEvents) -> None:
        with self._lock:
            self.rails.take_events(events)

    def tick(self) -> list[LinkEvents]:
        """Once a second: relate, forget, fold.  Returns link events that must not be polled any more."""
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            counts = self._read_counts()
            closed = self.rails.tick(self._expected(counts))
            if self._programs is not None:
                self._meet_all()
                self._forget(now_ns)
            return closed

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
        if tgid in self._processes:
            return
        identity = identity_of(self._config.procfs, tgid)
        if identity is None:
            self._clear(tgid, self._clock.monotonic_ns())
        elif self._wanted(identity):
            self._add(identity, UNKNOWN)

    def _add(self, identity: ProcessIdentity, nccl_version: str) -> None:
        known = self._processes.get(identity.pid)
        if known is not None and known.identity == identity:
            if known.nccl_version == UNKNOWN:
                self._processes[identity.pid] = replace(known, nccl_version=nccl_version)
            return
        if known is not None:
            self._end(identity.pid, self._clock.monotonic_ns())
        environment = environ(self._config.procfs, identity.pid)
        job = job_facts(environment, cgroup(self._config.procfs, identity.pid) or "", self._node_name)
        interfaces = environment.get("NCCL_SOCKET_IFNAME", "")
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
        self.new_process(identity, events)

    def _end(self, tgid: int, now_ns: int) -> None:
        process = self._processes.get(tgid)
        if process is None or process.ended_ns is not None:
            return
        self._processes[tgid] = replace(process, ended_ns=now_ns)
        self._clear(tgid, now_ns)
        if self._programs is not None and self._programs.settings.only_observed_processes:
            self._programs.forget(tgid)
        self.rails.remove_process(tgid)

    def _clear(self, tgid: int, now_ns: int) -> None:
        """Take what an ended process did out of the kernel's tables."""
        self._drain_lifecycle()
        self._communicators.refresh()
        self._communicators.end_process(tgid, now_ns)
        self._accounting.end_processes({tgid})

    def _forget(self, now_ns: int) -> None:
        """Fold what nobody can ask about any more into the node's totals."""
        before_ns = now_ns - self._config.comm_lifetime_ns
        self._accounting.end_communicators(self._communicators.settle(now_ns - _SETTLE_NS))
        old = self._communicators.forget(before_ns, self._most_ended)
        forgotten = {known.instance: known for known in old}
        if forgotten:
            self._fold(self._accounting.fold(forgotten.keys()), forgotten)
        for tgid, process in list(self._processes.items()):
            if process.ended_ns is not None and process.ended_ns < before_ns:
                self._fold(self._accounting.fold_process(tgid), {})
                del self._processes[tgid]

    def _fold(self, counts: list[CallCount], forgotten: dict[int, Communicator]) -> None:
        for count in counts:
            kind = count.kind
            gpu = forgotten[kind.instance].gpu if kind.instance in forgotten else UNKNOWN
            _add_to(self._base[kind.op, kind.data_type, gpu], count)
            _add_to(self._base_sizes[kind.op, kind.size_bucket], count)
        for expected in self._expected_of(counts, forgotten.get):
            netns = int(expected.rail_set)
            self._base_expected[netns] = _sum(self._base_expected.get(netns), expected)

    # What is known

    def _read_counts(self) -> list[CallCount]:
        if self._programs is None:
            return []
        try:
            # Counts first: every communicator in them is then known from its events or from the table.
            counts = self._accounting.read()
            self._drain_lifecycle()
            self._unmet |= self._communicators.refresh()
            return counts
        except KernelRefusal as refusal:
            _log.error("the kernel's counts cannot be read: %s", refusal.strerror)
            self._collective = replace(self._collective, success=False)
            return []

    def _expected(self, counts: Iterable[CallCount]) -> list[ExpectedBytes]:
        if self._programs is None:
            return []
        living = self._expected_of(counts, self._communicators.get)
        netnses = {int(expected.rail_set) for expected in living}
        summed = [_sum(self._base_expected.get(int(expected.rail_set)), expected) for expected in living]
        return summed + [expected for netns, expected in self._base_expected.items() if netns not in netnses]

    def _expected_of(
        self, counts: Iterable[CallCount], communicator_of: Callable[[int], Communicator | None]
    ) -> list[ExpectedBytes]:
        by_netns: dict[int, list[ObservedCalls]] = defaultdict(list)
        for count in counts:
            kind = count.kind
            process = self._processes.get(kind.tgid)
            communicator = communicator_of(kind.instance)
            # Calls without a communicator are NCCL's invalidArgument: nothing was sent for them.
            if process is None or process.namespace is None or communicator is None:
                continue
            by_netns[process.namespace.inode].append(
                ObservedCalls(
                    communicator.name,
                    communicator.placement,
                    Op(kind.op),
                    kind.peer,
                    count.payload_bytes,
                    1 << kind.size_bucket,
                    communicator.ended_ns is None,
                )
            )
        return [
            expected_bytes(str(netns), calls, self._config.small_payload_bytes) for netns, calls in by_netns.items()
        ]

    def snapshot(self) -> Snapshot:
        """Everything known now.  Safe from any thread."""
        with self._lock:
            started_ns = self._clock.monotonic_ns()
            counts = self._read_counts()
            self.rails.relate(self._expected(counts))
            collectives, sizes = self._totals(counts)
            collectors = self.rails.collectors()
            if self._programs is not None:
                seconds = self._collective.duration_seconds or (self._clock.monotonic_ns() - started_ns) / 1e9
                collectors += (replace(self._collective, duration_seconds=seconds),)
            return Snapshot(
                realtime_ns=self._clock.realtime_ns(),
                version=self._version,
                kernel=platform.release(),
                collectives=collectives,
                sizes=sizes,
                enqueue_times=self._enqueue_times(),
                communicators=self._communicator_facts(counts),
                rails=self.rails.rails(),
                collectors=collectors,
                probes=tuple(p for library in self._libraries() for p in library.probes()),
                events_lost=self._events_lost(),
                processes_observed=sum(process.ended_ns is None for process in self._processes.values()),
                simulated=self.simulated,
            )

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

    def _totals(self, counts: list[CallCount]) -> tuple[tuple[CollectiveTotal, ...], tuple[OpHistogram, ...]]:
        totals: dict[tuple[int, int, str], list[int]] = defaultdict(lambda: [0, 0])
        sizes: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        totals.update({key: list(value) for key, value in self._base.items()})
        sizes.update({key: list(value) for key, value in self._base_sizes.items()})
        for count in counts:
            communicator = self._communicators.get(count.kind.instance)
            gpu = communicator.gpu if communicator is not None else UNKNOWN
            _add_to(totals[count.kind.op, count.kind.data_type, gpu], count)
            _add_to(sizes[count.kind.op, count.kind.size_bucket], count)
        if self._programs is not None:
            for index, row in enumerate(self._programs.overflow_totals()):
                for data_type in row["calls"].nonzero()[0].tolist():
                    overflow = CallCount(
                        CallKind(0, 0, -1, index, data_type, 0),
                        int(row["calls"][data_type]),
                        int(row["payload_bytes"][data_type]),
                    )
                    _add_to(totals[index, data_type, UNKNOWN], overflow)
        collectives = tuple(
            CollectiveTotal(op_name(op), data_type_name(data_type), gpu, calls, payload_bytes)
            for (op, data_type, gpu), (calls, payload_bytes) in sorted(totals.items())
        )
        return collectives, _size_histograms(sizes)

    def _enqueue_times(self) -> tuple[OpHistogram, ...]:
        if self._programs is None:
            return ()
        return tuple(
            OpHistogram(
                op_name(op), Histogram(_ENQUEUE_BOUNDS, tuple(row["buckets"].tolist()), int(row["sum_ns"]) / 1e9)
            )
            for op, row in enumerate(self._programs.enqueue_times())
            if row["calls"]
        )

    def _events_lost(self) -> dict[str, int]:
        if self._programs is None:
            return {}
        stats = self._programs.stats()
        return {
            "ring_full": stats[Stat.RING_FULL],
            "lifecycle_ring_full": stats[Stat.LIFECYCLE_RING_FULL],
            "communicators_full": stats[Stat.COMMUNICATORS_FULL],
            "aggregates_full": stats[Stat.AGGREGATES_FULL],
            "arguments_unreadable": stats[Stat.ARGUMENTS_UNREADABLE],
            "foreign_pid_namespace": stats[Stat.FOREIGN_PID_NAMESPACE],
        }

    def _communicator_facts(self, counts: list[CallCount]) -> tuple[CommunicatorFacts, ...]:
        if self._programs is None:
            return ()
        by_instance: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        nameless: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
        for count in counts:
            if self._communicators.get(count.kind.instance) is not None:
                _add_to(by_instance[count.kind.instance][count.kind.op], count)
            else:
                _add_to(nameless[count.kind.tgid][count.kind.op], count)
        # What no communicator can be told for (its events were lost, or NCCL was given none) is one entry a process.
        strangers = [Communicator(-tgid, tgid, 0) for tgid in nameless]
        by_instance.update({-tgid: ops for tgid, ops in nameless.items()})
        names = named_namespaces()
        facts = []
        for communicator in sorted([*strangers, *self._communicators], key=lambda known: known.first_ns):
            process = self._processes.get(communicator.tgid)
            ops = by_instance.get(communicator.instance, {})
            namespace = process.namespace if process else None
            where = "" if namespace is None or namespace.own else names.get(namespace.inode, f"net:[{namespace.inode}]")
            facts.append(
                CommunicatorFacts(
                    comm=communicator.name,
                    rank=text(communicator.rank),
                    nranks=text(communicator.nranks),
                    gpu=communicator.gpu,
                    node_rank=text(communicator.node),
                    local_ranks=text(communicator.local_ranks),
                    nccl_version=process.nccl_version if process else UNKNOWN,
                    pid=communicator.tgid,
                    netns=where,
                    job=process.job.labels() if process else (),
                    identity_source=communicator.source,
                    enqueued=sum(calls for calls, _ in ops.values()),
                    ops=tuple(OpTotal(op_name(op), calls, size) for op, (calls, size) in sorted(ops.items())),
                    alive=communicator.ended_ns is None,
                )
            )
        return tuple(facts)

    def close(self) -> None:
        """Detach everywhere and stop sampling."""
        with self._lock:
            if self._programs is not None:
                self._discovery.close()
            self.rails.close()


def _add_to(total: list[int], count: CallCount) -> None:
    total[0] += count.calls
    total[1] += count.payload_bytes


def _size_histograms(sizes: dict[tuple[int, int], list[int]]) -> tuple[OpHistogram, ...]:
    histograms = []
    for op in sorted({op for op, _ in sizes}):
        counts = [0] * (len(_SIZE_BOUNDS) + 1)
        total_bytes = 0
        for (of, bucket), (calls, payload_bytes) in sizes.items():
            if of == op:
                counts[min(bucket, len(_SIZE_BOUNDS))] += calls
                total_bytes += payload_bytes
        histograms.append(OpHistogram(op_name(op), Histogram(_SIZE_BOUNDS, tuple(counts), float(total_bytes))))
    return tuple(histograms)


def _sum(one: ExpectedBytes | None, other: ExpectedBytes) -> ExpectedBytes:
    if one is None:
        return other

    def add(a: WireTotals, b: WireTotals) -> WireTotals:
        return WireTotals(a.spread_bytes + b.spread_bytes, a.small_bytes + b.small_bytes, a.unknown or b.unknown)

    return ExpectedBytes(other.rail_set, add(one.transmit, other.transmit), add(one.receive, other.receive))
