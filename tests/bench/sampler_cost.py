"""What sampling counters takes: the share of one core, beats without a reading, and one sweep against pyroute2's.

The network devices are eight rails of a namespace host (testbed/hosts.py), read as the agent reads them; each has more
than the four counters that the bound speaks of.  The RDMA counters are files in a folder, so what a network card's
firmware takes to answer is not in their rows: they are labelled as simulated.

A share is CPU time of the sampler's threads, the one that asks and the one that understands.  Beats are without a
reading that the thread came too late for, and those that it left out because reading took long.  What a thread takes
that only wakes up stands beside it: on virtual machines that alone may be most of what is allowed.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyroute2 import IPRoute

from railscope.agent.node.sampling.sampler import Sampler
from railscope.probes.clock import SystemClock
from railscope.probes.netdev.counters import CounterSource
from railscope.probes.netdev.sources import open_namespace
from railscope.probes.processes.namespaces import NetworkNamespace, run_inside
from railscope.probes.rdma.counters import RdmaCounters
from railscope.testbed.hosts import Fabric
from railscope.testbed.namespaces import NAMESPACES_DIRECTORY
from tests.bench.cpu_time import DISTURBED, Others, ThreadTime, thread_time
from tests.bench.results import Bound, Line, figure, ratios
from tests.bench.results import Target as Limit
from tests.bench.target import BenchError, Built
from tests.trees.rdma import mlx5_roce_8rails

PART: Final = "samplers"
RAILS: Final = 8
_KEY: Final = "bench"
_SYSFS, _PROCFS = Path("/sys"), Path("/proc")
_FAST_SECONDS, _USUAL_SECONDS = 0.001, 0.1
_WINDOW_SECONDS: Final = 2.0
_SETTLE_SECONDS: Final = 0.2
_SWEEPS: Final = 100
_PEERS_SWEEPS: Final = 10
_CLOCK: Final = SystemClock()

RDMA_COUNTERS: Final = frozenset({"port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets"})
_STORAGE: Final = ("mlx5_1",)
"""Of the simulated machine: no rail."""

_OPEN = Callable[[], CounterSource]


@dataclass(frozen=True, slots=True)
class Beats:
    """Where a sampler's threads stand with one source."""

    time: ThreadTime
    reads: int
    without: int
    """Beats without a reading."""

    def without_percent(self, since: Beats) -> float:
        """Of all beats since then."""
        without = self.without - since.without
        return without / (self.reads - since.reads + without) * 100


@dataclass(frozen=True, slots=True)
class _Case:
    """A source at a period, and what is bound."""

    name: str
    source: str
    period_seconds: float
    core_percent: float
    """At most."""
    without: Limit | None


_ETHERNET, _RDMA = "8 rails", "8 RDMA ports × 4 counters"
_CASES: Final = tuple(
    _Case(f"{source}{beat}{simulated}", source, period_seconds, most, without)
    for source, simulated in ((_ETHERNET, ""), (_RDMA, " (simulated)"))
    for beat, period_seconds, most, without in (
        (" at 1 kHz", _FAST_SECONDS, 6.0, Limit(Bound.BELOW, 1)),
        (" at 10 Hz", _USUAL_SECONDS, 0.3, None),
    )
)


def measure(_built: Built, rounds: int) -> list[Line]:
    """Give every source and period its window, `rounds` times; every second round backwards.

    Raises:
        BenchError: a source cannot be read.
    """
    shares: dict[str, list[float]] = {case.name: [] for case in _CASES}
    without: dict[str, list[float]] = {case.name: [] for case in _CASES}
    waking: list[float] = []
    others: list[float] = []
    sweep_us: list[float] = []
    peers_sweep_us: list[float] = []
    with tempfile.TemporaryDirectory(prefix="railscope-bench-") as directory, Fabric(hosts=1, rails=RAILS) as fabric:
        namespace = namespace_of(fabric.hosts[0].namespace)
        tree = mlx5_roce_8rails(Path(directory)).sysfs
        sources: dict[str, _OPEN] = {
            _ETHERNET: lambda: _ethernet(namespace),
            _RDMA: lambda: RdmaCounters(tree, _CLOCK, wanted=lambda _, name: name in RDMA_COUNTERS, excluded=_STORAGE),
        }
        gc.collect()  # as the agent does after its start
        gc.freeze()
        for turn in range(rounds):
            ours, peers = run_inside(namespace, lambda: _sweeps(_ethernet(namespace)))
            sweep_us.append(ours)
            peers_sweep_us.append(peers)
            taken = Others([os.getpid()])
            for case in _CASES[:: 1 if turn % 2 == 0 else -1]:
                before, after = _sampled(sources[case.source](), case.period_seconds)
                shares[case.name].append(after.time.core_percent(before.time))
                without[case.name].append(after.without_percent(before))
            waking.append(_only_waking())
            others.append(taken.percent())
    lines: list[Line] = [
        figure(PART, "CPU taken by others", "%", others, note=DISTURBED),
        figure(PART, "a thread that only wakes at 1 kHz", "% of a core", waking),
    ]
    for case in _CASES:
        most = Limit(Bound.AT_MOST, case.core_percent)
        lines.append(figure(PART, case.name, "% of a core", shares[case.name], target=most))
        if case.without is not None:
            name = f"{case.name}, beats without a reading"
            lines.append(figure(PART, name, "%", without[case.name], target=case.without))
    cheaper = ratios(peers_sweep_us, sweep_us)
    return [
        *lines,
        figure(PART, "one sweep of 8 rails", "µs", sweep_us),
        figure(PART, "one sweep by pyroute2's get_links", "µs", peers_sweep_us),
        figure(PART, "pyroute2's get_links / one sweep", "×", cheaper, target=Limit(Bound.AT_LEAST, 20)),
    ]


def namespace_of(name: str) -> NetworkNamespace:
    """A namespace host, by its namespace's name, as the agent's readers enter it."""
    path = NAMESPACES_DIRECTORY / name
    return NetworkNamespace(path.stat().st_ino, path, own=False)


def _ethernet(namespace: NetworkNamespace) -> CounterSource:
    sources = open_namespace(namespace, procfs=_PROCFS, sysfs=_SYSFS, clock=_CLOCK)
    sources.close()
    if sources.level != "netlink":
        raise BenchError(f"the rails cannot be read as the agent does: {sources.reason}")
    return sources.counters


def _sampled(source: CounterSource, period_seconds: float) -> tuple[Beats, Beats]:
    """The sampler's thread at the beginning and at the end of a window."""
    known = set(threading.enumerate())
    with _sampling(source, period_seconds) as sampler:
        time.sleep(max(_SETTLE_SECONDS, 3 * period_seconds))
        threads = set(threading.enumerate()) - known
        before = _beats(sampler, threads)
        time.sleep(_WINDOW_SECONDS)
        return before, _beats(sampler, threads)


@contextmanager
def _sampling(source: CounterSource, period_seconds: float) -> Iterator[Sampler]:
    sampler = Sampler(_CLOCK)
    sampler.add(_KEY, 0, source, period_seconds)
    try:
        sampler.start()
        yield sampler
    finally:
        sampler.stop()


def _beats(sampler: Sampler, threads: set[threading.Thread]) -> Beats:
    """Raises BenchError when the source's last read failed."""
    result = sampler.state().result(_KEY)
    if result is None or not result.success:
        raise BenchError(f"the sampler cannot read: {result.error if result else 'no source'}")
    times = [thread_time(thread) for thread in threads]
    taken = ThreadTime(sum(one.cpu_ns for one in times), times[0].monotonic_ns)
    return Beats(taken, result.reads, result.ticks_missed + result.ticks_spared)


def _only_waking() -> float:
    """The share of a core that a thread takes to wake at 1 kHz and do nothing."""
    ending = threading.Event()
    thread = threading.Thread(target=_wake, args=(ending,))
    thread.start()
    try:
        before = thread_time(thread)
        time.sleep(_WINDOW_SECONDS)
        return thread_time(thread).core_percent(before)
    finally:
        ending.set()
        thread.join()


def _wake(ending: threading.Event) -> None:
    next_seconds = time.monotonic()
    while not ending.is_set():
        next_seconds = max(next_seconds + _FAST_SECONDS, time.monotonic())
        time.sleep(max(0.0, next_seconds - time.monotonic()))


def _sweeps(counters: CounterSource) -> tuple[float, float]:
    """CPU time of one sweep of ours and of one of pyroute2's, µs; runs inside the rails' namespace.

    Raises:
        BenchError: the two do not see the same devices.
    """
    with closing(counters), IPRoute() as route:

        def theirs() -> set[str]:
            return {link.get("ifname") for link in route.get_links()}

        seen = set(counters.read().names)
        if theirs() != seen:
            raise BenchError(f"pyroute2 sees {sorted(theirs())}, railscope {sorted(seen)}")
        return _cpu_us(counters.read, _SWEEPS), _cpu_us(theirs, _PEERS_SWEEPS)


def _cpu_us(work: Callable[[], object], times: int) -> float:
    """CPU time of this process for one turn: pyroute2 works in threads of its own."""
    before_ns = time.process_time_ns()
    for _ in range(times):
        work()
    return (time.process_time_ns() - before_ns) / times / 1000
