"""The kernel tells that real processes were stopped or frozen, and when, of those alone that are watched."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from railscope.agent.node.stalls.holds import Holds
from railscope.probes.clock import SystemClock
from railscope.probes.nccl.programs.stops import Stops
from railscope.probes.processes.processes import PROCFS
from railscope.probes.processes.state import CGROUPS, is_frozen
from tests.unit.stall_world import SimulatedClock
from tests.waiting import eventually

pytestmark = pytest.mark.root


@pytest.fixture
def stops() -> Iterator[Stops]:
    made = Stops.load()
    yield made
    made.close()


@contextmanager
def sleeping() -> Iterator[int]:
    """A process that does nothing, by pid."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def sleeper() -> Iterator[int]:
    with sleeping() as pid:
        yield pid


def is_stopped(pid: int) -> bool:
    """proc_pid_stat(5)"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def wakes(source: Stops | Holds, milliseconds: int = 10_000) -> bool:
    poll = select.poll()
    poll.register(source.fileno(), select.POLLIN)
    return bool(poll.poll(milliseconds))


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP])
def test_a_stop_signal_wakes_the_reader_and_tells_the_moment(stops: Stops, sleeper: int, number: int) -> None:
    stops.watch(sleeper)
    assert not stops.read()
    before_ns = time.monotonic_ns()
    os.kill(sleeper, number)
    assert wakes(stops)
    (told_ns,) = stops.read().values()
    assert before_ns <= told_ns <= time.monotonic_ns()
    assert not wakes(stops, 0)


def test_other_signals_and_processes_that_are_not_watched_wake_nobody(stops: Stops, sleeper: int) -> None:
    with sleeping() as other:
        stops.watch(other)
        os.kill(other, signal.SIGCONT)
        os.kill(sleeper, signal.SIGSTOP)
        # The kernel delivers a signal when the process runs, which may be later than it is sent.
        eventually(lambda: is_stopped(sleeper))
        stops.watch(sleeper)
        stops.forget(sleeper)
        os.kill(sleeper, signal.SIGCONT)
        os.kill(sleeper, signal.SIGSTOP)
        assert not wakes(stops, 200)
        assert not stops.read()


def test_who_stops_and_continues_in_a_loop_wakes_the_reader_ten_times_a_second_at_most(
    stops: Stops, sleeper: int
) -> None:
    stops.watch(sleeper)
    began_ns, woken = time.monotonic_ns(), 0
    while time.monotonic_ns() - began_ns < 1_000_000_000:
        os.kill(sleeper, signal.SIGSTOP)
        os.kill(sleeper, signal.SIGCONT)
        if wakes(stops, 1):
            stops.read()
            woken += 1
    took = (time.monotonic_ns() - began_ns) / 1e9
    assert 1 <= woken <= 10 * took + 1


@contextmanager
def control_group(process: subprocess.Popen[bytes]) -> Iterator[Path]:
    """A process in a group of its own, of version 2."""
    root = next((root for root in (CGROUPS, CGROUPS / "unified") if (root / "cgroup.controllers").exists()), None)
    if root is None:
        pytest.skip("no control groups of version 2")
    group = root / f"railscope-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error.strerror}")
    try:
        if not (group / "cgroup.freeze").exists():
            pytest.skip("control groups of this kernel cannot be frozen")
        (group / "cgroup.procs").write_text(str(process.pid))
        yield group
    finally:
        process.kill()
        if (group / "cgroup.freeze").exists():
            (group / "cgroup.freeze").write_text("0")
        process.wait()
        group.rmdir()


def test_a_frozen_group_wakes_the_reader_and_is_left_alone_until_it_is_rearmed() -> None:
    """The kernel announces with a delay, so a late announcement of one change can come after the next."""
    with subprocess.Popen(["sleep", "600"]) as process, control_group(process) as group:
        clock = SimulatedClock()
        holds = Holds(None, PROCFS, clock)
        freeze, events = group / "cgroup.freeze", group / "cgroup.events"
        try:
            holds.watch(process.pid)
            freeze.write_text("1")
            assert wakes(holds)
            found = holds.read()
            eventually(lambda: is_frozen(events))
            assert not holds.rearm(), "the group rests"
            clock.sleep(1.0)
            assert process.pid in found | holds.rearm()
            freeze.write_text("0")
            assert wakes(holds)
            holds.read()
            eventually(lambda: not is_frozen(events))
            freeze.write_text("1")
            eventually(lambda: is_frozen(events))
            assert not holds.read() | holds.rearm(), "the group rests"
            clock.sleep(1.0)
            assert process.pid in holds.rearm()
        finally:
            holds.close()


def test_a_stopped_process_is_told_of_once(sleeper: int) -> None:
    holds = Holds(Stops.load(), PROCFS, SystemClock())
    try:
        holds.watch(sleeper)
        os.kill(sleeper, signal.SIGSTOP)
        assert wakes(holds)
        eventually(lambda: sleeper in holds.read())
        assert not holds.read()
        holds.forget(sleeper)
        assert not holds.read()
    finally:
        holds.close()
