"""How often the agent's loop wakes beside a job, and for what.  Clock, waiting and work are simulated."""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from agent.config import Config
from agent.daemon import Daemon
from agent.observer import Observer
from agent.recording import RecordedStall, Recording
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

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None
        self._clock.now_ns += round(timeout * 1e9) + LATE_NS
        self.wakings += 1
        return []


@dataclass(slots=True)
class Done:
    """When each thing was done, ns."""

    drains: list[int] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)
    wakings: int = 0


@contextmanager
def run_beside_a_job(monkeypatch: pytest.MonkeyPatch, drain_pause_ns: int) -> Iterator[Done]:
    """Let the loop run for `SECONDS`; `drain_pause_ns`: how long the rings may be left alone."""
    clock, done = SimulatedClock(), Done()
    selector = SkippingSelector(clock)
    monkeypatch.setattr(selectors, "DefaultSelector", lambda: selector)
    daemon = Daemon(Config(collectors=frozenset(), recordings_memory_bytes=0), clock, "0", serve=False)
    end_ns = clock.now_ns + SECONDS * 1000 * MS

    def drain() -> int:
        done.drains.append(clock.now_ns)
        daemon._drained_ns = clock.now_ns
        return drain_pause_ns

    def tick(_observer: Observer, **_options: bool) -> list[object]:
        done.ticks.append(clock.now_ns)
        clock.now_ns += 3 * MS
        if clock.now_ns >= end_ns:
            daemon.stop()
        return []

    monkeypatch.setattr(daemon, "_drain", drain)
    monkeypatch.setattr(Observer, "in_use", True)
    monkeypatch.setattr(Observer, "look_for_stalls", lambda _: done.looks.append(clock.now_ns))
    monkeypatch.setattr(Observer, "tick", tick)
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


@pytest.mark.parametrize("pause_ms", [250, 234, 50, 37])
def test_rings_are_read_at_about_their_time(monkeypatch: pytest.MonkeyPatch, pause_ms: int) -> None:
    with run_beside_a_job(monkeypatch, pause_ms * MS) as done:
        waits_ns = [later - earlier for earlier, later in pairwise(done.drains[2:])]
        assert 0.75 * pause_ms * MS <= min(waits_ns) <= max(waits_ns) <= (1.25 * pause_ms + 5) * MS


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
    daemon.recordings.signal()
    try:
        daemon.run()
    finally:
        daemon.close()
    (made_ns,) = made
    assert 100 * MS < made_ns - asked_ns < 130 * MS
