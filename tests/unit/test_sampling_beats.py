"""A sampler whose sources are asked by a thread without an interpreter: nothing is lost, and nothing goes unnoticed.

The clock and the threads are real; the counters are files of a simulated machine, and those of this one's loopback.
"""

from __future__ import annotations

import socket
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from railscope.agent.node.sampling.sampler import Sampler
from railscope.agent.node.sampling.state import DeviceTotals, SourceResult
from railscope.probes.clock import SystemClock
from railscope.probes.native import beats
from railscope.probes.native.beats import FilesQuestion, Question, TableQuestion
from railscope.probes.netdev.counters import CounterBlock, CounterReading
from railscope.probes.netdev.rtnetlink_counters import NetlinkCounters
from railscope.probes.rdma.counters import RdmaCounters
from tests.trees import rdma
from tests.trees.rdma import RdmaTree

PERIOD_SECONDS = 0.001
PORT = "ibp24s0/1"


class Watched:
    """A running sampler of one source, and all that it read."""

    def __init__(self, source: RdmaCounters | NetlinkCounters, period_seconds: float = PERIOD_SECONDS) -> None:
        self.sampler = Sampler(SystemClock(), self._shown)
        self.times: list[tuple[int, int]] = []
        self.blocks = 0
        self.sampler.start()
        self.sampler.add("source", 7, source, period_seconds)

    def _shown(self, _netns: int, read: CounterReading | CounterBlock) -> None:
        if isinstance(read, CounterBlock):
            self.blocks += 1
            self.times += read.times_ns
        else:
            self.times.append((read.before_ns, read.after_ns))

    def result(self) -> SourceResult:
        result = self.sampler.state().result("source")
        assert result is not None
        return result

    def device(self, name: str) -> DeviceTotals | None:
        return self.sampler.state().device(7, name)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < end, f"waited 30 s for {what}: {self.result()}"
            time.sleep(0.005)


@pytest.fixture
def tree(tmp_path: Path) -> RdmaTree:
    return rdma.mlx5_ib_ndr(tmp_path)


@pytest.fixture
def watched(tree: RdmaTree) -> Iterator[Watched]:
    watched = Watched(RdmaCounters(tree.sysfs, SystemClock()))
    try:
        watched.until(lambda: watched.blocks > 2, "answers of the other thread")
        yield watched
    finally:
        watched.sampler.stop()


def transmitted(watched: Watched, port: str = PORT) -> int:
    device = watched.device(port)
    assert device is not None
    return device.transmit_bytes


def test_every_answer_counts_once_and_in_order(watched: Watched, tree: RdmaTree) -> None:
    base = transmitted_after(watched, tree, 100_000_000)
    for turn in range(1, 6):
        put(tree, "counters/port_xmit_data", 100_000_000 + turn)
    assert transmitted_after(watched, tree, 100_001_000) == base + 4 * 1_000
    assert watched.times == sorted(watched.times)
    assert len(set(watched.times)) == len(watched.times)
    result = watched.result()
    assert result.success
    assert result.reads == len(watched.times)
    assert result.failures == 0


def transmitted_after(watched: Watched, tree: RdmaTree, value: int) -> int:
    """The total once an answer has shown this value."""
    put(tree, "counters/port_xmit_data", value)
    put_ns = time.monotonic_ns()
    watched.until(lambda: watched.result().reads > 0 and watched.times[-1][0] > put_ns, "the next answer")
    return transmitted(watched)


def put(tree: RdmaTree, counter: str, value: int) -> None:
    """In one step, as a kernel shows it: nine digits, as what is there."""
    with open(tree.counter(PORT, counter), "r+b") as file:
        file.write(b"%d\n" % value)
        file.truncate()


def test_counters_are_read_while_the_interpreter_is_busy(watched: Watched) -> None:
    """One call keeps the interpreter for all its processor time: who needs one cannot read twice with less between."""

    def read_meanwhile() -> bool:
        begun_ns, begun_thread_ns = time.monotonic_ns(), time.thread_time_ns()
        pow(7, 600_000)
        kept_ns, done_ns = time.thread_time_ns() - begun_thread_ns, time.monotonic_ns()
        watched.until(lambda: watched.times[-1][0] > done_ns, "answers after it")
        times = [one for one, _ in watched.times]
        first, last = bisect_right(times, begun_ns) - 1, bisect_left(times, done_ns)
        return max(later - one for one, later in pairwise(times[first : last + 1])) < kept_ns / 2

    assert any(read_meanwhile() for _ in range(40)), "a busy machine may keep every processor, but not each time"


def test_a_counter_that_cannot_be_read_any_more_is_named_and_comes_back(watched: Watched, tree: RdmaTree) -> None:
    counter = tree.counter(PORT, "counters/symbol_error")
    counter.write_text("N/A (no PMA)\n")
    watched.until(lambda: [one.device for one in watched.result().failed_devices] == [PORT], "the failure")
    counter.write_text("0\n")
    watched.until(lambda: watched.result().failed_devices == (), "its end")
    blocks = watched.blocks
    watched.until(lambda: watched.blocks > blocks + 1, "answers of the other thread")


def test_a_device_that_comes_is_found(watched: Watched, tree: RdmaTree) -> None:
    device = tree.device("mlx5_77", pci="0000:77:00.0")
    tree.port(device, counters={"port_xmit_data": 5, "port_rcv_data": 2}, hw_counters={})
    watched.until(lambda: watched.device("mlx5_77/1") is not None, "the new device")
    blocks = watched.blocks
    watched.until(lambda: watched.blocks > blocks + 1, "answers of the other thread")
    assert transmitted(watched, "mlx5_77/1") == 20


def test_names_are_learnt_anew_when_somebody_says_so(tree: RdmaTree) -> None:
    class Forgetting(RdmaCounters):
        refreshed = 0

        def refresh(self) -> None:
            self.refreshed += 1
            super().refresh()

    source = Forgetting(tree.sysfs, SystemClock())
    watched = Watched(source)
    try:
        watched.until(lambda: watched.blocks > 2, "answers of the other thread")
        watched.sampler.refresh("source")
        watched.until(lambda: source.refreshed == 1, "it to be said to the source")
        blocks = watched.blocks
        watched.until(lambda: watched.blocks > blocks + 1, "answers of the other thread")
        assert watched.result().failures == 0
    finally:
        watched.sampler.stop()


def test_a_removed_source_is_closed_and_asked_no_more(watched: Watched) -> None:
    watched.sampler.remove("source")
    seen = len(watched.times)
    time.sleep(0.02)
    assert len(watched.times) == seen
    assert watched.sampler.state().results == ()


def test_answers_wait_no_longer_than_somebody_asks(tree: RdmaTree) -> None:
    """At a tenth of a second they are heard once a second, or as soon as the state is asked for."""
    watched = Watched(RdmaCounters(tree.sysfs, SystemClock()), 0.1)
    try:
        watched.until(lambda: watched.blocks > 1, "answers of the other thread")
        put(tree, "counters/port_xmit_data", 123_456_789)
        changed_ns = time.monotonic_ns()
        watched.until(lambda: watched.times[-1][0] > changed_ns, "the next answer")
        assert watched.result().ticks_missed + watched.result().reads >= 2
    finally:
        watched.sampler.stop()


def test_network_devices_are_asked_for_in_the_same_way() -> None:
    watched = Watched(NetlinkCounters(SystemClock()))
    try:
        watched.until(lambda: watched.blocks > 2, "answers of the other thread")
        assert watched.device("lo") is not None
        assert watched.result().failures == 0
    finally:
        watched.sampler.stop()


class Odd(RdmaCounters):
    """A source whose question goes to somebody else, or to nobody."""

    def __init__(self, tree: RdmaTree, asked: Question | None) -> None:
        super().__init__(tree.sysfs, SystemClock())
        self.asked = asked
        self.questions = 0

    def question(self) -> Question | None:  # type: ignore[override]
        self.questions += 1
        super().question()
        return self.asked


def test_nobody_comes_for_answers_that_were_just_heard(tree: RdmaTree) -> None:
    """Who asks for the state hears them; whether to go on asking is then seen once in three times as long."""

    class Counting(RdmaCounters):
        questions = 0

        def question(self) -> FilesQuestion | None:
            self.questions += 1
            return super().question()

    source = Counting(tree.sysfs, SystemClock())
    watched = Watched(source)
    hearing_seconds = 256 * PERIOD_SECONDS  # as many answers as are taken at once
    try:
        watched.until(lambda: watched.blocks > 2, "answers of the other thread")
        begun, before = time.monotonic(), source.questions
        while time.monotonic() - begun < 8 * hearing_seconds:
            watched.result()
            time.sleep(hearing_seconds / 8)
        looks = (time.monotonic() - begun) / (3 * hearing_seconds)
        assert 0 < source.questions - before <= looks + 1
        blocks, end = watched.blocks, time.monotonic() + 30
        while watched.blocks == blocks and time.monotonic() < end:
            time.sleep(0.01)
        assert watched.blocks > blocks, "heard by the sampler's own thread again, as nobody asks"
    finally:
        watched.sampler.stop()


def test_a_source_without_a_question_is_seldom_asked_for_one(tree: RdmaTree) -> None:
    source = Odd(tree, None)
    watched = Watched(source)
    try:
        watched.until(lambda: watched.result().reads > 100, "readings")
        assert 0 < source.questions <= watched.result().reads // 64 + 1
    finally:
        watched.sampler.stop()


def test_a_source_that_hangs_is_said_to_and_keeps_no_other_waiting(tree: RdmaTree) -> None:
    side, asker = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with side, asker:
        side.settimeout(30)
        hanging = Odd(tree, TableQuestion(asker.fileno(), bytes(28), 100))
        watched = Watched(hanging)
        try:
            side.recv(100)
            good = RdmaCounters(tree.sysfs, SystemClock())
            watched.sampler.add("good", 8, good, 0.01)

            def result(key: str) -> SourceResult:
                found = watched.sampler.state().result(key)
                assert found is not None
                return found

            watched.until(lambda: not result("source").success, "the source to be called what it is")
            assert result("source").error == "no answer for 1 s"
            reads = result("good").reads
            watched.until(lambda: result("good").reads > reads + 20, "readings of the other source")
            assert result("good").success
            asked_for, reads = hanging.questions, result("good").reads
            watched.until(lambda: result("good").reads > reads + 20, "more of them")
            assert hanging.questions - asked_for <= 20, "the thread does not spin"
            hanging.asked = None
            side.send(b"")
            watched.until(lambda: result("source").success, "the source to be read again")
        finally:
            asker.close()
            watched.sampler.stop()


def test_without_the_compiled_library_python_reads(tree: RdmaTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "start_thread", lambda: None)
    watched = Watched(RdmaCounters(tree.sysfs, SystemClock()))
    try:
        watched.until(lambda: watched.result().reads > 20, "readings")
        assert watched.result().success
    finally:
        watched.sampler.stop()
