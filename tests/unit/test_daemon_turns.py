"""How often the agent's loop wakes beside a job, and for what.  Clock, waiting and work are simulated."""

from __future__ import annotations

import errno
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from railscope.agent.config.options import Config
from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.node.daemon.daemon import Daemon
from railscope.agent.node.daemon.observer import Observer
from railscope.agent.node.stalls.watchdog import EVALUATION_NS
from railscope.agent.recording.recording import RecordedStall, Recording
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.netdev.events import LinkEvents
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit.recordings import recording
from tests.unit.stall_world import SimulatedClock

MS = 1_000_000
SECONDS = 20
LATE_NS = 150_000
"""How much later than asked for the kernel wakes the loop."""


class SkippingSelector(selectors.EpollSelector):
    """Waits by moving the clock on."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self._clock = clock
        self.wakings = 0
        self.happens: list[tuple[int, Callable[[], None]]] = []
        """What becomes readable, and when, ns, in order."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None
        self.wakings += 1
        until_ns = self._clock.now_ns + round(timeout * 1e9)
        if self.happens and self.happens[0][0] <= until_ns:
            at_ns, handler = self.happens.pop(0)
            self._clock.now_ns = max(self._clock.now_ns, at_ns) + LATE_NS
            return [(selectors.SelectorKey(0, 0, selectors.EVENT_READ, handler), selectors.EVENT_READ)]
        self._clock.now_ns = until_ns + LATE_NS
        return []


@dataclass(slots=True)
class Done:
    """When each thing was done, ns."""

    drains: list[int] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)
    calm: list[bool] = field(default_factory=list)
    """Of each tick: whether it was told that nobody waits."""
    wakings: int = 0


class Wakeups:
    """A ring has always just woken its reader."""

    def clear(self) -> bool:
        return True

    def close(self) -> None:
        pass


@contextmanager
def run_beside_a_job(
    monkeypatch: pytest.MonkeyPatch,
    drain_pause_ns: int,
    look_pause_ns: int = EVALUATION_NS,
    happens: Callable[[Daemon], dict[float, Callable[[], None]]] = lambda _: {},
    settled: Callable[[float, Done], bool] = lambda *_: False,
    fails: Callable[[float], bool] = lambda _: False,
) -> Iterator[Done]:
    """Let the loop run for `SECONDS`.

    Args:
        drain_pause_ns: how long the rings may be left alone.
        look_pause_ns: how long a look says that it will do.
        happens: by time, in seconds from the start and in order: what the loop is to be told of.
        settled: whether all is as it was, so many seconds after the start, and with what was done so far.
        fails: whether a tick fails, so many seconds after the start.
    """
    clock, done = SimulatedClock(), Done()
    started_ns = clock.now_ns
    selector = SkippingSelector(clock)
    monkeypatch.setattr(selectors, "DefaultSelector", lambda: selector)
    daemon = Daemon(Config(collectors=frozenset(), recordings_memory_bytes=0), clock, "0", serve=False)
    end_ns = clock.now_ns + SECONDS * 1000 * MS
    selector.happens = [(clock.now_ns + round(at * 1000) * MS, handler) for at, handler in happens(daemon).items()]

    def drain() -> int:
        done.drains.append(clock.now_ns)
        daemon._rings.drained_ns = clock.now_ns
        return drain_pause_ns

    def look(_observer: Observer) -> int:
        done.looks.append(clock.now_ns)
        return look_pause_ns

    def tick(_observer: Observer, *, relate: bool, calm: bool) -> list[object]:
        assert relate
        done.ticks.append(clock.now_ns)
        done.calm.append(calm)
        if fails((clock.now_ns - started_ns) / 1e9):
            raise KernelRefusal(errno.ENOMEM, "a table cannot be read")
        clock.now_ns += 3 * MS
        if clock.now_ns >= end_ns:
            daemon.stop()
        return []

    monkeypatch.setattr(daemon, "_drain", drain)
    monkeypatch.setattr(Observer, "in_use", True)
    monkeypatch.setattr(
        Observer, "unsettled", property(lambda _: None if settled((clock.now_ns - started_ns) / 1e9, done) else "news")
    )
    monkeypatch.setattr(Observer, "evaluate_stalls", look)
    monkeypatch.setattr(Observer, "update", tick)
    try:
        daemon.run()
        done.wakings = selector.wakings
        yield done
    finally:
        daemon.close()


@pytest.mark.parametrize(("pause_ms", "most_a_second"), [(250, 4), (234, 4), (50, 20), (37, 30)])
def test_what_is_due_at_about_the_same_time_takes_one_waking(
    monkeypatch: pytest.MonkeyPatch, pause_ms: int, most_a_second: int
) -> None:
    with run_beside_a_job(monkeypatch, pause_ms * MS) as done:
        assert done.wakings <= 1.05 * SECONDS * most_a_second


@pytest.mark.parametrize("pause_ms", [250, 50, 37])
def test_nothing_that_is_done_once_in_a_period_comes_early_or_much_too_late(
    monkeypatch: pytest.MonkeyPatch, pause_ms: int
) -> None:
    with run_beside_a_job(monkeypatch, pause_ms * MS) as done:
        for times, period_ms in ((done.looks, 250), (done.ticks, 1000)):
            assert len(times) >= 0.95 * SECONDS * 1000 / period_ms
            # The first turn finds the job, and all begins anew.
            periods_ns = [later - earlier for earlier, later in pairwise(times[1:])]
            assert period_ms * MS <= min(periods_ns) <= max(periods_ns) <= (period_ms + 25 + 5) * MS


@pytest.mark.parametrize("look_ms", [1000, 999, 980])
def test_where_nothing_is_suspected_one_waking_a_second_does_it_all(
    monkeypatch: pytest.MonkeyPatch, look_ms: int
) -> None:
    with run_beside_a_job(monkeypatch, 1000 * MS, look_ms * MS) as done:
        assert done.wakings <= 1.25 * SECONDS  # the first ones, and scans
        for times in (done.looks, done.ticks):
            assert len(times) >= 0.95 * SECONDS


def test_a_look_is_never_later_than_it_was_said_to_be_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with run_beside_a_job(monkeypatch, 1000 * MS, 700 * MS) as done:
        periods_ns = [later - earlier for earlier, later in pairwise(done.looks[1:])]
        assert EVALUATION_NS <= min(periods_ns) <= max(periods_ns) <= 705 * MS


@pytest.mark.parametrize("look_ms", [250, 700, 1000])
def test_before_each_look_the_rings_are_read(monkeypatch: pytest.MonkeyPatch, look_ms: int) -> None:
    with run_beside_a_job(monkeypatch, 1000 * MS, look_ms * MS) as done:
        assert set(done.looks) <= set(done.drains)


def test_a_communicator_that_comes_and_a_process_that_ends_want_a_look_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = (ProcessIdentity(4711, 1), None)
    monkeypatch.setattr(Observer, "processes_gone", lambda *_: None)

    def happens(daemon: Daemon) -> dict[float, Callable[[], None]]:
        return {5.4: daemon._read_lifecycle_events, 9.4: lambda: daemon._ended.update([ended])}

    with run_beside_a_job(monkeypatch, 1000 * MS, 1000 * MS, happens) as done:
        for seconds in (5.4, 9.4):
            happened_ns = SimulatedClock().now_ns + round(seconds * 1000) * MS
            assert min(at for at in done.looks if at > happened_ns) <= happened_ns + EVALUATION_NS + 5 * MS


@pytest.mark.parametrize("suspicious", [True, False])
def test_an_early_look_comes_in_its_time_after_the_rings_were_read_and_another_one_soon_if_it_found_anything(
    monkeypatch: pytest.MonkeyPatch, suspicious: bool
) -> None:
    early: list[int] = []
    clock_ns: list[Callable[[], int]] = []
    due_ns: list[int] = []
    monkeypatch.setattr(Observer, "early_look_ns", property(lambda _: due_ns[0] if due_ns else None))

    def look_early(_observer: Observer) -> None:
        due_ns.clear()
        early.append(clock_ns[0]())

    monkeypatch.setattr(Observer, "look_early", look_early)

    def happens(daemon: Daemon) -> dict[float, Callable[[], None]]:
        clock_ns.append(daemon._clock.monotonic_ns)
        return {9.4: lambda: due_ns.append(daemon._clock.monotonic_ns() + 200 * MS)}

    with run_beside_a_job(
        monkeypatch, 1000 * MS, 1000 * MS, happens, settled=lambda at, _: not suspicious or at < 9.5
    ) as done:
        (looked_ns,) = early
        happened_ns = SimulatedClock().now_ns + 9_400 * MS
        assert 200 * MS <= looked_ns - happened_ns <= 205 * MS
        assert looked_ns in done.drains
        next_ns = min(at for at in done.looks if at > looked_ns)
        assert (next_ns - looked_ns <= EVALUATION_NS + 30 * MS) == suspicious


def test_looks_come_at_their_pace_however_much_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    def happens(daemon: Daemon) -> dict[float, Callable[[], None]]:
        return {2 + at / 20: daemon._read_lifecycle_events for at in range(300)}

    with run_beside_a_job(monkeypatch, 1000 * MS, 1000 * MS, happens) as done:
        began_ns, ended_ns = (SimulatedClock().now_ns + seconds * 1000 * MS for seconds in (3, 16))
        looks = [at for at in done.looks if began_ns <= at <= ended_ns]
        periods_ns = [later - earlier for earlier, later in pairwise(looks)]
        assert EVALUATION_NS <= min(periods_ns) <= max(periods_ns) <= EVALUATION_NS + 60 * MS


def test_looks_and_ticks_find_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def happens(daemon: Daemon) -> dict[float, Callable[[], None]]:
        return {5.4: daemon._read_lifecycle_events}

    with run_beside_a_job(monkeypatch, 1000 * MS, 1000 * MS, happens) as done:
        assert done.wakings <= 1.35 * SECONDS


@pytest.mark.parametrize("drain_ms", [250, 1000])
def test_a_ring_that_fills_suddenly_is_read_at_the_next_turn(monkeypatch: pytest.MonkeyPatch, drain_ms: int) -> None:
    def happens(daemon: Daemon) -> dict[float, Callable[[], None]]:
        monkeypatch.setattr(daemon, "_ring_wakeups", Wakeups())
        return {5 + at / 7: daemon._on_ring_wakeup for at in range(50)}

    with run_beside_a_job(monkeypatch, drain_ms * MS, 1000 * MS, happens) as done:
        for at in range(50):
            heard_ns = SimulatedClock().now_ns + round((5 + at / 7) * 1000) * MS
            assert min(drained for drained in done.drains if drained >= heard_ns) <= heard_ns + 5 * MS


def test_before_a_process_is_said_to_have_ended_the_rings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    clock_ns: list[Callable[[], int]] = []
    monkeypatch.setattr(Observer, "processes_gone", lambda *_: told.append(clock_ns[0]()))

    def happens(daemon: Daemon) -> dict[float, Callable[[], None]]:
        clock_ns.append(daemon._clock.monotonic_ns)
        return {9.4: lambda: daemon._ended.update({ProcessIdentity(4711, 1): None})}

    with run_beside_a_job(monkeypatch, 1000 * MS, 1000 * MS, happens) as done:
        assert len(told) == 1
        assert told[0] in done.drains


@pytest.mark.parametrize("pause_ms", [250, 234, 50, 37])
def test_rings_are_read_at_about_their_time(monkeypatch: pytest.MonkeyPatch, pause_ms: int) -> None:
    with run_beside_a_job(monkeypatch, pause_ms * MS) as done:
        looks = set(done.looks)
        waits_ns = [(later - earlier, later in looks) for earlier, later in pairwise(done.drains[2:])]
        assert max(waited_ns for waited_ns, _ in waits_ns) <= (1.25 * pause_ms + 5) * MS
        assert all(for_a_look or waited_ns >= 0.75 * pause_ms * MS for waited_ns, for_a_look in waits_ns)


def test_a_recording_is_made_when_ports_were_read_once_more_and_no_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = SimulatedClock()
    monkeypatch.setattr(selectors, "DefaultSelector", lambda: SkippingSelector(clock))
    daemon = Daemon(Config(collectors=frozenset(), recordings_directory=tmp_path), clock, "0", serve=False)
    made = []

    def freeze(reason: str, _stalls: tuple[RecordedStall, ...]) -> Recording:
        made.append(clock.now_ns)
        daemon.stop()
        return recording(reason)

    monkeypatch.setattr(daemon, "_drain", lambda: 250 * MS)
    monkeypatch.setattr(daemon.recordings, "_freeze", freeze)
    asked_ns = clock.now_ns
    daemon.recordings.request_from_signal()
    try:
        daemon.run()
    finally:
        daemon.close()
    (made_ns,) = made
    assert 100 * MS < made_ns - asked_ns < 130 * MS


def seconds(times: list[int]) -> list[float]:
    return [(at - SimulatedClock().now_ns) / 1e9 for at in times]


def test_where_all_is_as_it_was_ticks_have_time_and_looks_have_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with run_beside_a_job(monkeypatch, 1000 * MS, 1000 * MS, settled=lambda *_: True) as done:
        calm_ns = [at for at, calm in zip(done.ticks, done.calm, strict=True) if calm]
        assert 10 <= seconds(calm_ns)[0] <= 11.1
        assert [round(later - earlier) for earlier, later in pairwise(seconds(calm_ns))] == [4] * (len(calm_ns) - 1)
        assert len(calm_ns) >= 3
        assert len(done.looks) >= 0.95 * SECONDS
        assert done.wakings <= 1.3 * SECONDS


@pytest.mark.parametrize("what", ["suspicion", "communicator", "process", "ring", "link"])
def test_whatever_ends_the_calm_wants_a_tick_at_once_and_one_a_second_from_then_on(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(Observer, "processes_gone", lambda *_: None)
    monkeypatch.setattr(Observer, "handle_link_events", lambda *_: None)

    def happens(daemon: Daemon) -> dict[float, Callable[[], None]]:
        monkeypatch.setattr(daemon, "_ring_wakeups", Wakeups())
        handlers: dict[str, Callable[[], None]] = {
            "communicator": daemon._read_lifecycle_events,
            "process": lambda: daemon._ended.update({ProcessIdentity(4711, 1): None}),
            "ring": daemon._on_ring_wakeup,
            "link": lambda: daemon._handle_link_events(cast(LinkEvents, None)),
        }
        return {12.4: handlers[what]} if what in handlers else {}

    def settled(at_seconds: float, _done: Done) -> bool:
        return what != "suspicion" or not 12.4 <= at_seconds < 13.4

    with run_beside_a_job(monkeypatch, 1000 * MS, 1000 * MS, happens, settled) as done:
        after = [at for at in seconds(done.ticks) if at > 12.4]
        noticed = 13.4 if what == "suspicion" else 12.4  # at the next look
        assert after[0] <= noticed + 0.01
        assert max(later - earlier for earlier, later in pairwise(after)) <= 1.05
        assert done.calm[-len(after) :] == [False] * len(after)


@pytest.mark.parametrize(("every_seconds", "follows"), [(2.0, True), (5.0, False)])
def test_whoever_asks_every_other_second_is_told_what_is_new(
    monkeypatch: pytest.MonkeyPatch, every_seconds: float, follows: bool
) -> None:
    monkeypatch.setattr(Observer, "snapshot", lambda _: Snapshot(0, "", ""))

    def happens(daemon: Daemon) -> dict[float, Callable[[], None]]:
        def ask() -> None:
            daemon._snapshot()

        return {every_seconds * at + 1.5: ask for at in range(int(SECONDS / every_seconds))}

    with run_beside_a_job(monkeypatch, 1000 * MS, 1000 * MS, happens, settled=lambda *_: True) as done:
        assert any(done.calm) is done.calm[-1] is not follows


def test_where_a_tick_finds_something_out_the_next_one_comes_as_soon_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def settled(at_seconds: float, done: Done) -> bool:
        return done.calm.count(True) != 1 or at_seconds > 13

    with run_beside_a_job(monkeypatch, 1000 * MS, 1000 * MS, settled=settled) as done:
        first = done.calm.index(True)
        assert done.ticks[first + 1] - done.ticks[first] <= 1050 * MS
        assert not done.calm[first + 1]


def test_a_tick_that_fails_keeps_nothing_else_from_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    with run_beside_a_job(monkeypatch, 1000 * MS, 1000 * MS, fails=lambda at_seconds: 3 <= at_seconds < 8) as done:
        for times in (done.ticks, done.looks):
            assert 4 <= len([at for at in seconds(times) if 3 <= at < 8]) <= 6


def test_ticks_are_never_closer_than_a_second_however_often_the_calm_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def settled(at_seconds: float, done: Done) -> bool:
        return not (done.calm and done.calm[-1] and at_seconds % 1 < 0.9)

    def happens(daemon: Daemon) -> dict[float, Callable[[], None]]:
        return {10 + at / 9: daemon._read_lifecycle_events for at in range(3)}

    with run_beside_a_job(monkeypatch, 100 * MS, 1000 * MS, happens, settled) as done:
        assert min(later - earlier for earlier, later in pairwise(seconds(done.ticks)[1:])) >= 1
