"""How often drivers, queues and connections are read: the machine's own, on a clock that moves when told to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.node.rails import ethernet
from railscope.agent.node.rails.ethernet import EthernetWatch
from railscope.agent.node.rails.selection import decide_rails
from railscope.agent.node.sampling.sampler import Sampler
from railscope.probes.netdev.counters import CounterReading
from railscope.probes.netdev.inventory import SysfsInventory
from railscope.probes.processes.namespaces import NetworkNamespace, network_namespace
from tests.unit.netdev_messages import SteppedClock

SECOND_NS = 1_000_000_000
SOURCES = ("ethtool", "qdisc", "tcp")


@dataclass
class Bench:
    """The machine's own namespace, with its loopback as a rail."""

    clock: SteppedClock
    sampler: Sampler
    watch: EthernetWatch
    own: NetworkNamespace
    decisions: tuple[RailDecision, ...]

    def reads(self) -> tuple[int, ...]:
        """Of each source so far, those that failed included: a driver may have no statistics."""
        state = self.sampler.state()
        results = [state.result(name) for name in SOURCES]
        return tuple(result.reads for result in results if result is not None)

    def reads_over(self, seconds: int, *, calm: bool = False) -> set[int]:
        """While a tick comes every second: how often each source was read."""
        before = self.reads()
        for _ in range(seconds):
            self.watch.update(self.decisions, calm=calm)
            end_ns = self.clock.now_ns + SECOND_NS
            while (due_ns := self.sampler.read_due(self.clock.now_ns)) is not None and due_ns < end_ns:
                self.clock.now_ns = due_ns
            self.clock.now_ns = end_ns
        return {after - earlier for after, earlier in zip(self.reads(), before, strict=True)}


def opened(clock: SteppedClock, *, ethtool: bool = False) -> Iterator[Bench]:
    sampler = Sampler(clock)
    watch = EthernetWatch(clock, sampler, procfs=Path("/proc"), lifetime_ns=0, ethtool=ethtool)
    own = network_namespace(Path("/proc"), "self")
    watch.watch_own(own)
    decisions = decide_rails(SysfsInventory(Path("/sys"), own.inode).read(), socket_interfaces={own.inode: ["=lo"]})
    yield Bench(clock, sampler, watch, own, decisions)
    watch.close()
    sampler.stop()


@pytest.fixture
def bench() -> Iterator[Bench]:
    yield from opened(SteppedClock())


def test_sources_are_read_every_second_and_every_other_one_where_nobody_waits(bench: Bench) -> None:
    bench.watch.add_process(os.getpid(), bench.own)
    bench.reads_over(3)
    assert bench.reads_over(20) == {20}
    bench.reads_over(3, calm=True)
    assert bench.reads_over(20, calm=True) == {10}
    bench.reads_over(1)
    assert bench.reads_over(20) == {20}


def test_where_no_observed_process_lives_sources_are_read_every_five_seconds(bench: Bench) -> None:
    bench.reads_over(6)
    assert bench.reads_over(20) == {4}
    assert bench.reads_over(20, calm=True) == {4}
    bench.watch.add_process(os.getpid(), bench.own)
    bench.reads_over(1)
    assert bench.reads_over(20) == {20}
    bench.watch.remove_process(os.getpid())
    bench.reads_over(6)
    assert bench.reads_over(20) == {4}


def test_a_process_that_comes_and_a_calm_that_ends_are_read_for_at_once(bench: Bench) -> None:
    bench.reads_over(7)
    bench.clock.now_ns += SECOND_NS // 3
    for calm_ends in (False, True):
        before = bench.reads()
        if calm_ends:
            bench.reads_over(4, calm=True)
            bench.clock.now_ns += SECOND_NS // 3
            before = bench.reads()
            bench.watch.update(bench.decisions)
        else:
            bench.watch.add_process(os.getpid(), bench.own)
        bench.sampler.read_due(bench.clock.now_ns)
        assert {after - earlier for after, earlier in zip(bench.reads(), before, strict=True)} == {1}


def test_rails_that_become_known_are_read_at_once_also_where_nobody_lives(bench: Bench) -> None:
    bench.watch.update(())
    bench.sampler.read_due(bench.clock.now_ns)
    bench.clock.now_ns += SECOND_NS // 10
    bench.watch.update(bench.decisions)
    assert bench.watch.unread_sources()
    bench.sampler.read_due(bench.clock.now_ns)
    assert not bench.watch.unread_sources()


class WaitedClock(SteppedClock):
    """Whoever sleeps lets the sampler's thread work, which here is the caller's own."""

    sampler: Sampler | None = None

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.sampler is not None:
            self.sampler.read_due(self.now_ns)


def test_whoever_looks_closely_has_readings_of_that_moment_and_waits_for_them_once() -> None:
    clock = WaitedClock()
    for bench in opened(clock):
        clock.sampler = bench.sampler
        bench.watch.add_process(os.getpid(), bench.own)
        bench.reads_over(4, calm=True)
        clock.now_ns += SECOND_NS // 3
        assert not bench.watch.unread_sources()
        before, asked_ns = bench.reads(), clock.now_ns
        bench.watch.read_again(bench.own.inode)
        again = bench.reads()
        assert [after - earlier for after, earlier in zip(again, before, strict=True)] == [1, 1]
        assert clock.now_ns - asked_ns <= ethernet._READ_PATIENCE_SECONDS * SECOND_NS
        waited_until_ns = clock.now_ns
        bench.watch.read_again(bench.own.inode)
        assert (bench.reads(), clock.now_ns) == (again, waited_until_ns)
        bench.watch.read_again(0)
        assert clock.now_ns == waited_until_ns


class SlowStatistics:
    """A driver that asks its firmware for longer than anybody waits."""

    def __init__(self, clock: SteppedClock, _use_of: object) -> None:
        self._clock = clock
        self.last = ()

    def watch(self, _devices: tuple[str, ...]) -> None:
        pass

    def read(self) -> CounterReading:
        before_ns = self._clock.now_ns
        self._clock.now_ns += SECOND_NS // 12
        return CounterReading(before_ns, self._clock.now_ns, (), (), (), np.zeros((0, 0), np.uint64), ())

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_what_takes_long_to_read_is_not_put_off_and_comes_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ethernet, "EthtoolStatistics", SlowStatistics)
    for bench in opened(SteppedClock(), ethtool=True):
        assert bench.sampler.state().results[-1].key == "ethtool"
        bench.watch.add_process(os.getpid(), bench.own)
        bench.reads_over(3, calm=True)
        before = bench.reads()
        bench.reads_over(20, calm=True)
        assert [after - earlier for after, earlier in zip(bench.reads(), before, strict=True)] == [20, 10, 10]


def test_that_the_last_process_of_a_namespace_has_ended_is_no_trouble_to_warn_of(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read between the end of its process and the moment when that is noticed."""
    left = NetworkNamespace(0xF1234567, Path("/proc/0/ns/net"), own=False)
    bench.watch.add_process(7, left)
    bench.sampler.read_due(bench.clock.monotonic_ns())
    bench.watch.update(bench.decisions)
    (result,) = [one for one in bench.watch.collectors() if one.collector == f"qdisc net:[{left.inode}]"]
    assert not result.success
    assert not caplog.records
