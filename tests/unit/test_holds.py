"""What is heard of processes that are stopped or frozen.  Simulated: the program's map, and the kernel's folders."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from railscope.agent.node.stalls.holds import Holds
from railscope.probes.loading.bpf_syscall import KernelRefusal
from tests.unit.stall_world import SimulatedClock

SECOND = 1_000_000_000


class SimulatedStops:
    """The program that sees stop signals."""

    def __init__(self) -> None:
        self.watched: set[int] = set()
        self.times: dict[int, int] = {}
        self.refuses = False
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def watch(self, pid: int) -> None:
        if self.refuses:
            raise KernelRefusal(7, "write map stopped_processes: Argument list too long")
        self.watched.add(pid)

    def forget(self, pid: int) -> None:
        self.watched.discard(pid)

    def read(self) -> dict[int, int]:
        if self.refuses:
            raise KernelRefusal(1, "read map stopped_processes: Operation not permitted")
        return dict(self.times)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


class Host:
    """Processes in control groups of version 2."""

    def __init__(self, folder: Path) -> None:
        self.procfs, self.cgroups = folder / "proc", folder / "cgroup"
        self.clock = SimulatedClock()

    def process(self, pid: int, group: str, *, announces: bool = True) -> int:
        (self.procfs / str(pid)).mkdir(parents=True)
        (self.procfs / str(pid) / "cgroup").write_text(f"1:cpu:/other\n0::/{group}\n")
        (self.cgroups / group).mkdir(parents=True, exist_ok=True)
        if announces:
            self.freeze(group, frozen=False)
        return pid

    def freeze(self, group: str, *, frozen: bool = True) -> None:
        (self.cgroups / group / "cgroup.events").write_text(f"populated 1\nfrozen {int(frozen)}\n")

    @contextmanager
    def holds(self, stops: SimulatedStops | None = None) -> Iterator[Holds]:
        made = Holds(stops, self.procfs, self.clock, self.cgroups)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def wakes(holds: Holds) -> bool:
    return bool(select.select([holds.fileno()], [], [], 0)[0])


def test_a_stop_is_told_once_and_the_next_one_again(host: Host) -> None:
    stops = SimulatedStops()
    with host.holds(stops) as holds:
        holds.watch(host.process(1, "a"))
        assert stops.watched == {1}
        stops.times = {1: 70}
        assert holds.read() == {1: 70}
        assert holds.read() == {}
        stops.times = {1: 90}
        assert holds.read() == {1: 90}
        holds.forget(1)
        assert not stops.watched


def test_all_watched_processes_of_a_frozen_group_are_told_and_no_others(host: Host) -> None:
    with host.holds() as holds:
        for pid, group in ((1, "a"), (2, "a"), (3, "b"), (4, "a")):
            host.process(pid, group)
        for pid in (1, 2, 3):
            holds.watch(pid)
        host.freeze("a")
        assert wakes(holds)
        assert holds.read() == dict.fromkeys((1, 2), host.clock.now_ns)
        assert not wakes(holds)


def test_a_group_that_thaws_tells_nothing(host: Host) -> None:
    host.process(1, "a")
    host.freeze("a")
    with host.holds() as holds:
        holds.watch(1)
        host.freeze("a", frozen=False)
        assert holds.read() == {}


def test_who_freezes_and_thaws_in_a_loop_is_heard_once_until_it_is_rearmed(host: Host) -> None:
    with host.holds() as holds:
        holds.watch(host.process(1, "a"))
        host.freeze("a")
        assert holds.read() == {1: host.clock.now_ns}
        for _ in range(100):
            host.freeze("a", frozen=False)
            host.freeze("a")
        assert not wakes(holds)
        assert holds.rearm() == {}
        host.clock.now_ns += SECOND
        assert holds.rearm() == {1: host.clock.now_ns}
        assert holds.rearm() == {}
        host.freeze("a", frozen=False)
        assert wakes(holds)


def test_of_a_process_that_ended_nothing_is_told(host: Host) -> None:
    with host.holds() as holds:
        for pid in (1, 2):
            holds.watch(host.process(pid, "a"))
        holds.forget(1)
        host.freeze("a")
        assert holds.read() == {2: host.clock.now_ns}
        holds.forget(2)
        host.clock.now_ns += SECOND
        assert holds.rearm() == {}
        holds.forget(2)


def test_a_process_in_no_group_that_announces_is_found_by_looking(host: Host) -> None:
    with host.holds() as holds:
        holds.watch(host.process(1, "a", announces=False))
        holds.watch(2)  # it has ended
        assert holds.read() == {}


def test_a_group_that_is_gone_is_not_listened_to_again(host: Host) -> None:
    with host.holds() as holds:
        holds.watch(host.process(1, "a"))
        host.freeze("a")
        assert holds.read() == {1: host.clock.now_ns}
        (host.cgroups / "a" / "cgroup.events").unlink()
        host.clock.now_ns += SECOND
        assert holds.rearm() == {}


def test_what_the_kernel_refuses_is_logged_and_no_end(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    stops = SimulatedStops()
    stops.refuses = True
    with host.holds(stops) as holds:
        holds.watch(host.process(1, "a"))
        assert holds.read() == {}
    assert "cannot be read" in caplog.text
