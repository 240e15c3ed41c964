"""What following a job's calls takes: counts, stalls, stragglers and ledgers at 50,000 calls a second and as many ends.

Two figures that complete each other.  The first is the agent's own classes, called as its loop calls them, on records
and tables that are made up (simulated): a drain of the rings twenty times a second, a look for stalls four times, and
once a second the tick with its reading of all counts and the ledgers of eight rails.  Time is simulated, too; what is
measured is CPU time, without reading the kernel's rings and tables (other parts' rows).  The second is the whole agent
beside a real job of the testbed's library, whose calls are all that is seen of it.
"""

from __future__ import annotations

import gc
import gzip
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from railscope.agent.config.options import Config
from railscope.agent.facts.histogram import Histogram
from railscope.agent.model.expected import ExpectedBytes, WireTotals
from railscope.agent.node.attribution.evidence import Connections, PortAndConnections, RailLedgers, evidence_of
from railscope.agent.node.attribution.explained import Correlator, PortTotals
from railscope.agent.node.attribution.ledger import Sockets
from railscope.agent.node.daemon.nccl_sources import NcclSources
from railscope.agent.node.daemon.observer import Observer
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.sampling.state import DeviceTotals
from railscope.agent.node.stalls.watchdog import EVALUATION_NS
from railscope.exporters.series.budget import SeriesBudget
from railscope.exporters.series.selection import Selection
from railscope.exporters.series.text import Format
from railscope.exporters.web.pages import Page, Pages
from railscope.probes.clock import Clock
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.programs.calls import NcclPrograms, ProgramSettings
from railscope.probes.nccl.programs.internals import EmptyRun, Launch, Progress, Sent
from railscope.probes.nccl.records import calls as records
from railscope.probes.nccl.records.calls import LifecycleKind, Stat
from railscope.probes.nccl.records.failover import FAILOVER_EVENT
from railscope.probes.nccl.records.internals import (
    COMPLETION_EVENT,
    CONNECTION,
    CONNECTION_KEY,
    HISTORY,
    HISTORY_KEY,
    OPERATION,
    OPERATION_KEY,
    InternalStat,
    NetworkKind,
)
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job, JobOptions
from tests.bench.cpu_time import cpu_seconds
from tests.bench.results import Bound, Line, figure
from tests.bench.results import Target as Limit
from tests.bench.target import BenchError, Built
from tests.fabric.agent_process import AgentProcess
from tests.unit.collectives_kernel import SimulatedHostCalls

PART: Final = "tracker"
_CALLS_PER_SECOND: Final = 50_000
_DRAIN_NS: Final = 50_000_000
_TICK_NS: Final = 1_000_000_000
_WARM_SECONDS: Final = 5
"""Simulated: until operations have a history, and slots of dictionaries are there."""
_SECONDS: Final = 20
"""Simulated."""
_PROCESSES: Final = 8
_SIZES_BYTES: Final = (4 << 10, 1 << 20, 25 << 20, 123_456)
_OPS: Final = (Op.AllReduce, Op.AllGather, Op.ReduceScatter, Op.AllReduce)
"""By size."""
_RAILS: Final = 8
_RANKS: Final = 16
_DURATION_NS: Final = 1_000_000
_LIVE_OPTIONS: Final = JobOptions(pattern="inference", seconds=6.0, bytes=1024, hold=True)
_TARGET: Final = Limit(Bound.BELOW, 10)
_METRICS: Final = "/metrics"
_UNLIMITED: Final = 10**9


def measure(_built: Built, rounds: int) -> list[Line]:
    """Follow 64 communicators, each with one and with all eight ranks of the host, and a real job, `rounds` times."""
    few, many, live, rates = [], [], [], []
    with processes() as pids:
        for _ in range(rounds):
            few.append(followed_percent(Load(pids, communicators=8)))
            many.append(followed_percent(Load(pids, communicators=64)))
    with Fabric(hosts=2, rails=2) as fabric:
        for _ in range(rounds):
            percent, rate = _live_percent(fabric)
            live.append(percent)
            rates.append(rate)
    simulated = "simulated records"
    at = "at 50,000 calls/s and their completions"
    return [
        figure(
            PART, f"64 ranks' ends of 8 communicators {at}", "% of a core", few, target=_TARGET, note=simulated
        ),
        figure(
            PART, f"512 ranks' ends of 64 communicators {at}", "% of a core", many, target=_TARGET, note=simulated
        ),
        figure(PART, "a live job of two ranks", "calls/s", rates),
        figure(
            PART, "the whole agent beside it", "% of a core", live,
            note="with the rings, rails, and what it does without a job; it sees calls only",
        ),
    ]  # fmt: skip


@contextmanager
def processes() -> Iterator[tuple[int, ...]]:
    """Processes that do nothing: the agent asks /proc who the owners of communicators are."""
    sleeping = [subprocess.Popen(["sleep", "infinity"]) for _ in range(_PROCESSES)]
    try:
        yield tuple(process.pid for process in sleeping)
    finally:
        for process in sleeping:
            process.kill()
            process.wait()


class _Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def realtime_ns(self) -> int:
        return self.now_ns + 10**18

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


class _Table:
    """A map of the kernel; what it holds is replaced, never deleted."""

    def __init__(self, keys: Records, values: Records) -> None:
        self.keys, self.values = keys, values

    def read(self) -> tuple[Records, Records]:
        return self.keys, self.values.copy()

    def lookup(self, _key: bytes) -> Records | None:
        raise BenchError("nothing of this load ends")

    def delete(self, _key: bytes) -> None:
        raise BenchError("nothing of this load ends")


class _Births:
    """Lifecycle events that wait: one for each communicator, once."""

    def __init__(self, events: Records) -> None:
        self._events = events

    def read(self) -> Records:
        events, self._events = self._events, self._events[:0]
        return events


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one drain brings."""

    calls: Records
    completions: Records


class _NoShares:
    """Nobody comes to a limit here."""

    def refused(self) -> Mapping[tuple[str, int | None], int]:
        return {}


class _EqualShapes:
    """Ranks that made the same collectives, of which no block is full."""

    def blocks(self, instances: Sequence[int]) -> npt.NDArray[np.uint64]:
        return np.zeros((len(instances), records.BLOCK_LEVELS), np.uint64)

    def recent(self, instance: int, calls: int) -> tuple[int, tuple[int, ...]] | None:
        del instance, calls
        return None


class Load:
    """The kernel's side of eight processes that call their communicators in turn, and the programs' interface to it.

    Every rank of the host is in every communicator, so that each operation is called by all eight, one after another.
    """

    def __init__(self, pids: tuple[int, ...], communicators: int) -> None:
        ends = communicators * len(pids)
        self.settings = ProgramSettings()
        self._ends = ends
        self._instances = np.arange(1, ends + 1, dtype=np.uint32)
        self._tgids = np.array(pids, np.uint32)[np.arange(ends) % len(pids)]
        self._sequence = np.zeros(ends, np.uint64)
        self._random = np.random.default_rng(1)
        self._handed_bytes = 0
        self._runs = 0
        identity = np.zeros(ends, records.IDENTITY)
        identity["comm_hash"] = np.arange(ends) // len(pids) + 0xC0FFEE
        identity["rank"] = identity["local_rank"] = identity["cuda_dev"] = identity["nvml_dev"] = np.arange(ends) % len(
            pids
        )
        identity["nranks"], identity["n_nodes"], identity["local_ranks"] = _RANKS, _RANKS // len(pids), len(pids)
        keys, values = np.zeros(ends, records.COMMUNICATOR_KEY), np.zeros(ends, records.COMMUNICATOR)
        keys["comm"], keys["tgid"] = 0x7F00_0000_0000 + self._instances.astype(np.uint64) * 99_840, self._tgids
        values["instance"], values["first_ns"], values["confirmed"] = self._instances, 1, 1
        values["identity"] = identity
        self.communicators = _Table(keys, values)
        self.shares = _NoShares()
        self.shapes = _EqualShapes()
        self.host_calls = SimulatedHostCalls()
        self.aggregates = _Table(*self._counts())
        self.lifecycle_events = _Births(self._births(identity))
        self._histories = self._history_rows()
        self._operations = np.zeros(ends, OPERATION_KEY), np.zeros(ends, OPERATION)

    def _births(self, identity: Records) -> Records:
        events = np.zeros(self._ends, records.LIFECYCLE_EVENT)
        events["instance"], events["tgid"], events["kind"] = self._instances, self._tgids, LifecycleKind.INIT
        events["confirmed"], events["identity"], events["time_ns"] = 1, identity, 1
        return events

    def _counts(self) -> tuple[Records, Records]:
        rows = self._ends * len(_SIZES_BYTES)
        keys, values = np.zeros(rows, records.AGGREGATE_KEY), np.zeros((rows, 2), records.AGGREGATE)
        size = np.arange(rows) % len(_SIZES_BYTES)
        keys["instance"] = np.repeat(self._instances, len(_SIZES_BYTES))
        keys["tgid"] = np.repeat(self._tgids, len(_SIZES_BYTES))
        keys["peer"], keys["data_type"] = -1, 7
        keys["op"] = np.array(_OPS)[size]
        keys["size_bucket"] = np.array([(each - 1).bit_length() for each in _SIZES_BYTES])[size]
        return keys, values

    def _history_rows(self) -> tuple[Records, Records]:
        counted = self.aggregates.keys
        keys = np.zeros(len(counted), HISTORY_KEY)
        for name in ("instance", "op", "size_bucket"):
            keys[name] = counted[name]
        return keys, np.zeros(len(keys), HISTORY)

    def second(self, now_ns: int) -> list[_Batch]:
        """The records of the second that begins now, by drain, and the tables as they are at its end."""
        members = _PROCESSES
        operations = _CALLS_PER_SECOND // members
        groups = self._ends // members
        whose = np.arange(operations) % groups
        size = self._random.integers(0, len(_SIZES_BYTES), operations)
        begin_ns = now_ns + np.sort(self._random.integers(0, _TICK_NS - 4 * _DURATION_NS, operations))
        at = np.repeat(np.arange(operations), members)
        calls = np.zeros(len(at), records.CALL_EVENT)
        rank = np.tile(np.arange(members), operations)
        end = whose[at] * members + rank
        number = np.repeat(np.arange(operations) // groups, members) + 1
        calls["time_ns"] = begin_ns[at] + self._random.integers(0, _DURATION_NS, len(at))
        calls["instance"], calls["tgid"] = self._instances[end], self._tgids[end]
        calls["comm"] = self.communicators.keys["comm"][end]
        calls["sequence"] = self._sequence[end] + number
        calls["op"], calls["payload_bytes"] = np.array(_OPS)[size[at]], np.array(_SIZES_BYTES)[size[at]]
        calls["data_type"], calls["peer"] = 7, -1
        completions = np.zeros(len(at), COMPLETION_EVENT)
        for name in ("instance", "tgid", "comm", "sequence", "op", "payload_bytes"):
            completions[name] = calls[name]
        completions["posted_ns"], completions["duration_ns"] = calls["time_ns"], _DURATION_NS
        completions["time_ns"] = calls["time_ns"] + _DURATION_NS
        self._advance(end, size[at], calls)
        edges = now_ns + _DRAIN_NS * np.arange(1, _TICK_NS // _DRAIN_NS)
        return [
            _Batch(*batch)
            for batch in zip(
                *(
                    np.split(events, np.searchsorted(events["time_ns"], edges))
                    for events in (calls[np.argsort(calls["time_ns"])], completions[np.argsort(completions["time_ns"])])
                ),
                strict=True,
            )
        ]

    def _advance(self, end: Records, size: Records, calls: Records) -> None:
        """Tables after these calls."""
        row = end * len(_SIZES_BYTES) + size
        rows = len(self.aggregates.keys)
        made = np.bincount(row, minlength=rows).astype(np.uint64)
        payload_bytes = made * np.tile(np.array(_SIZES_BYTES, np.uint64), self._ends)
        self.aggregates.values["calls"][:, 0] += made
        self.aggregates.values["payload_bytes"][:, 0] += payload_bytes
        sums = self._histories[1]
        sums["operations"] += made
        sums["duration_ns"] += made * np.uint64(_DURATION_NS)
        sums["payload_bytes"] += payload_bytes
        self._sequence += np.bincount(end, minlength=self._ends).astype(np.uint64)
        self.communicators.values["sequence"] = self._sequence
        self._handed_bytes += int(payload_bytes.sum())
        self._runs += len(calls)

    def look_at(self, now_ns: int) -> None:
        """One operation of every end is in flight, and it has just been called."""
        self.communicators.values["last_ns"] = now_ns
        keys, values = self._operations
        keys["tgid"], keys["operation"] = self._tgids, self._sequence
        values["instance"], values["comm"] = self._instances, self.communicators.keys["comm"]
        values["posted_ns"], values["launch"], values["sequence"] = now_ns - _DURATION_NS, 1, self._sequence
        values["op"], values["payload_bytes"] = Op.AllReduce, _SIZES_BYTES[1]
        values["net_devices"], values["algorithm"], values["protocol"] = 0xFF, 1, 2

    # What the agent asks the programs above and below the entry points.

    def stats(self) -> Mapping[Any, int]:
        return {**dict.fromkeys(Stat, self._runs), **dict.fromkeys(InternalStat, self._runs)}

    def processes_gone(self, pids: Collection[int]) -> None:
        pass

    def unreadable_calls(self) -> Mapping[int, int]:
        return {}

    def overflow_totals(self) -> Records:
        return np.zeros((16, 16), records.AGGREGATE)

    def enqueue_times(self) -> Records:
        return np.zeros(16, records.ENQUEUE_TIME)

    def operations(self) -> tuple[Records, Records]:
        return self._operations

    def connections(self) -> tuple[Records, Records]:
        return np.zeros(0, CONNECTION_KEY), np.zeros(0, CONNECTION)

    def histories(self) -> tuple[Records, Records]:
        return self._histories

    def sent(self) -> list[Sent]:
        each = self._handed_bytes // (_PROCESSES * _RAILS)
        last_ns = int(self.communicators.values["last_ns"][0])
        return [
            Sent(tgid, 0, NetworkKind.IB, device, each >> 19, each, last_ns)
            for tgid in self._tgids[:_PROCESSES].tolist()
            for device in range(_RAILS)
        ]

    def progress(self) -> dict[int, Progress]:
        return {
            instance: Progress(instance, sequence - 1, sequence, None, None, sequence, sequence - 1, 0, 0, False)
            for instance, sequence in zip(self._instances.tolist(), self._sequence.tolist(), strict=True)
        }

    def empty_runs(self) -> dict[int, EmptyRun]:
        return {}

    def durations(self) -> dict[Op, Records]:
        return {}

    def bandwidths(self) -> dict[Op, Records]:
        return {}

    def launches(self) -> list[Launch]:
        return []

    def failover_events(self) -> Records:
        return np.zeros(0, FAILOVER_EVENT)

    def error_events(self) -> Records:
        return np.zeros(0, records.LIFECYCLE_EVENT)

    def close(self) -> None:
        """Nothing is open."""


@dataclass(slots=True)
class _Rails:
    """Eight rails of one namespace: what is expected of them beside what their ports and connections carried."""

    correlator: Correlator = field(default_factory=Correlator)
    ledgers: RailLedgers = field(default_factory=RailLedgers)
    seconds: int = 0

    def tick(self, now_ns: int) -> None:
        """One more second of a gigabyte on each rail and direction."""
        self.seconds += 1
        carried = self.seconds * 1_000_000_000
        port_bytes = carried + carried // 50
        names = [f"rail{number}" for number in range(_RAILS)]
        ports = [PortTotals("7", name, "", port_bytes, port_bytes) for name in names]
        totals = WireTotals(_RAILS * carried, 0)
        wires = self.correlator.update(now_ns, ports, [ExpectedBytes("7", totals, totals)])
        sockets = Sockets(carried, 0, carried // 1448, carried // 50, 0)
        connections = Connections(sockets)
        together = PortAndConnections(
            port_bytes, port_bytes, carried // 1448, carried // 1448, connections, connections, 0.001, True
        )
        self.ledgers.update(
            [
                evidence_of((7, name), _totals(name, port_bytes), wire, carried, together, complete=True)
                for name, wire in zip(names, wires, strict=True)
            ]
        )


def _totals(name: str, port_bytes: int) -> DeviceTotals:
    rates = Histogram((1.0,), (0, 0), 0.0)
    return DeviceTotals(7, name, port_bytes, port_bytes, (), rates, rates, present=True)


@contextmanager
def following(load: Load, clock: Clock) -> Iterator[Observer]:
    """The agent's observer on a load."""
    observer = Observer(
        Config(collectors=frozenset({"collective"})),
        NcclSources(
            cast(NcclPrograms, load), cast(Any, load), level=Level.RAILS, inspection=InProcess(), in_flight=load
        ),
        clock,
        "bench",
    )
    try:
        observer.read_lifecycle_events()
        # As the daemon does when it has started.
        gc.collect()
        gc.freeze()
        yield observer
    finally:
        gc.unfreeze()
        observer.close()


def scrape_microseconds(load: Load, *, scrapes: int = 6) -> list[float]:
    """CPU time of each scrape, by series, gzip included: what a load's second has changed is read, shown and written.

    Unlike a scrape of what was rendered before, all of it is: the tables are read, and most values have moved.
    """
    clock = _Clock()
    found = []
    with following(load, clock) as observer:
        pages = Pages(
            telemetry_path=_METRICS,
            snapshot=observer.snapshot,
            processes=lambda _: (),
            healthy=lambda: (True, ""),
            ready=lambda: (True, ""),
            budget=SeriesBudget(_UNLIMITED),
            selection=Selection(),
        )
        for _ in range(scrapes + 1):
            _follow_second(observer, load, clock)
            observer.update()
            began_s = time.thread_time()
            answer = pages.render(Page(_METRICS, Format.OPENMETRICS, gzip=True))
            took_s = time.thread_time() - began_s
            lines = gzip.decompress(answer.body).splitlines()
            found.append(took_s * 1e6 / sum(not line.startswith(b"#") for line in lines))
    return found[1:]


def _follow_second(observer: Observer, load: Load, clock: _Clock) -> float:
    """Follow a second of a load up to its tick; returns the CPU seconds that it took."""
    load.look_at(clock.now_ns)
    took_s = 0.0
    for batch in load.second(clock.now_ns):
        clock.now_ns += _DRAIN_NS
        looks = clock.now_ns % EVALUATION_NS == 0
        if looks:
            load.look_at(clock.now_ns)
        began_s = time.thread_time()
        observer.record_completions(batch.completions)
        observer.record_calls(batch.calls)
        if looks:
            observer.evaluate_stalls()
        took_s += time.thread_time() - began_s
    return took_s


def followed_percent(load: Load, *, warm_seconds: int = _WARM_SECONDS, seconds: int = _SECONDS) -> float:
    """CPU time of following a load, in hundredths of the (simulated) time that it lasts.

    Raises:
        BenchError: the load was not followed as it should be.
    """
    clock = _Clock()
    rails = _Rails()
    taken_s = 0.0
    with following(load, clock) as observer:
        for second in range(warm_seconds + seconds):
            took_s = _follow_second(observer, load, clock)
            began_s = time.thread_time()
            observer.update()
            rails.tick(clock.now_ns)
            took_s += time.thread_time() - began_s
            if second < warm_seconds:
                observer.snapshot()  # as a scrape does, which is another part's row
            else:
                taken_s += took_s
        if observer.stalls is None or observer.stalls.current:
            raise BenchError("the load of the bench is taken for a stall")
        arrivals = observer.snapshot().collectives.times.arrivals
        if sum(one.last for one in arrivals) < _CALLS_PER_SECOND // _PROCESSES * seconds:
            raise BenchError("the load of the bench was not followed: nobody came last")
    return taken_s / seconds * 100


def _live_percent(fabric: Fabric) -> tuple[float, float]:
    """What the agent takes of a core, in percent, and how many calls a second the job makes."""
    with AgentProcess() as agent, Job(fabric.hosts, _LIVE_OPTIONS) as job:
        agent.until(lambda: agent.samples("railscope_processes_observed")[0][1] >= len(job.pids))
        before_s, began_s = cpu_seconds(agent.process.pid), time.monotonic()
        job.release()
        reports = job.wait(60)
        took_s = cpu_seconds(agent.process.pid) - before_s
        percent = took_s / (time.monotonic() - began_s) * 100
    return percent, sum(report.calls_per_second for report in reports)
