"""Where the agent follows CUDA's driver: files that this process maps; probes and other processes are simulated."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.node.completion.driver_calls import MOST_OF_A_USER, DriverCallWatch
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.inspection.tenants import Tenant
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.links import Links, ProbePoint
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.records.driver_calls import PROCESS, THREAD, DriverKind, DriverStat
from railscope.probes.processes.processes import PROCFS, ProcessIdentity, identity_of
from tests.unit.test_cuda_completion import Mapped
from tests.waiting import eventually

DRIVER = ("cuEventQuery", "cuGraphLaunch", "cuGraphLaunch_ptsz", "cuStreamSynchronize", "cuCtxSynchronize")
RUNTIME = ("cudaEventQuery", "cudaStreamSynchronize")


class SimulatedLinks(Links):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def close(self) -> None:
        self.log.append("detach")


@dataclass(slots=True)
class SimulatedPrograms:
    log: list[str] = field(default_factory=list)
    points: list[ProbePoint] = field(default_factory=list)
    followed: set[int] = field(default_factory=set)
    refuses: bool = False

    def attach(self, path: str, points: Sequence[ProbePoint]) -> Links:
        assert path.startswith("/proc/self/fd/")
        if self.refuses:
            raise KernelRefusal(errno.EPERM, "simulated refusal")
        self.points = list(points)
        self.log.append("attach")
        return SimulatedLinks(self.log)

    def follow(self, tgid: int) -> None:
        self.followed.add(tgid)

    def forget(self, tgids: Collection[int]) -> None:
        self.followed -= set(tgids)

    def drop(self, threads: Iterable[tuple[int, int]]) -> None:
        self.log += [f"drop {tid}" for tid, _ in threads]

    def threads(self) -> tuple[Records, Records]:
        return np.zeros(1, "<u4"), np.zeros(1, THREAD)

    def processes(self) -> tuple[Records, Records]:
        return np.zeros(2, "<u4"), np.zeros(2, PROCESS)

    def stats(self) -> Mapping[DriverStat, int]:
        return {DriverStat.ENTRIES: 5, DriverStat.RETURNS: 4, DriverStat.FULL: 100}

    def close(self) -> None:
        self.log.append("close")

    def told(self) -> list[str]:
        """What happened since the last look."""
        told = list(self.log)
        self.log.clear()
        return told


@dataclass(slots=True)
class Library:
    mappers: set[ProcessIdentity] = field(default_factory=set)


@pytest.fixture(autouse=True)
def closing_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(groups: Iterable[SimulatedLinks]) -> None:
        for links in groups:
            links.close()

    monkeypatch.setattr("railscope.agent.node.completion.driver_calls.close_together", close)


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Mapped]:
    files = Mapped(tmp_path)
    yield files
    files.close()


@pytest.fixture
def library() -> Library:
    identity = identity_of(PROCFS, os.getpid())
    assert identity is not None
    return Library({identity})


@pytest.fixture
def programs() -> SimulatedPrograms:
    return SimulatedPrograms()


@pytest.fixture
def watch(programs: SimulatedPrograms) -> DriverCallWatch:
    return DriverCallWatch(programs, PROCFS, InProcess())


def test_a_process_is_followed_at_its_driver_though_it_has_a_runtime(
    watch: DriverCallWatch, programs: SimulatedPrograms, library: Library, mapped: Mapped
) -> None:
    mapped.map("libcudart.so.12", *RUNTIME)
    assert watch.set_libraries([library]) == []
    assert (programs.told(), watch.follows) == ([], False)
    driver = mapped.map("libcuda.so.1", *DRIVER)
    assert watch.set_libraries([library]) == []
    assert programs.told() == ["attach"], "the driver is mapped when CUDA is first used"
    assert {point.symbol: DriverKind(point.cookie) for point in programs.points} == {
        "cuGraphLaunch": DriverKind.GRAPH_LAUNCH,
        "cuGraphLaunch_ptsz": DriverKind.GRAPH_LAUNCH,
        "cuStreamSynchronize": DriverKind.STREAM_SYNC,
        "cuCtxSynchronize": DriverKind.CONTEXT_SYNC,
    }
    assert (watch.probed_files(), programs.followed) == (((str(driver), ()),), {os.getpid()})
    assert (watch.follows, len(watch.read().threads), len(watch.read().processes), watch.hits()) == (True, 1, 2, 9)


def test_the_probes_go_with_the_last_process_and_with_the_agent(
    watch: DriverCallWatch, programs: SimulatedPrograms, library: Library, mapped: Mapped
) -> None:
    mapped.map("libcuda.so.1", *DRIVER)
    watch.set_libraries([library])
    watch.set_libraries([])
    assert (programs.told(), programs.followed, watch.follows) == (["attach", "detach"], set(), False)
    assert len(watch.read().processes) == 0
    watch.set_libraries([library])
    watch.close()
    assert (programs.told(), programs.followed) == (["attach", "detach", "close"], set())


def test_the_budget_may_have_them_detached_and_attached_again(
    watch: DriverCallWatch, programs: SimulatedPrograms, library: Library, mapped: Mapped
) -> None:
    mapped.map("libcuda.so.1", *DRIVER)
    watch.set_libraries([library])
    watch.set_attached(False)
    eventually(lambda: programs.log == ["attach", "detach"])
    assert programs.followed == set()
    assert watch.set_libraries([library]) == []
    assert programs.told() == ["attach", "detach"]
    # The probes that come off aside are through at one of the next ticks.
    eventually(lambda: watch.set_attached(True) == [] and programs.log == ["attach"])
    assert programs.followed == {os.getpid()}


def test_what_the_kernel_refuses_is_told_and_tried_again(
    watch: DriverCallWatch, programs: SimulatedPrograms, library: Library, mapped: Mapped
) -> None:
    path = mapped.map("libcuda.so.1", *DRIVER)
    programs.refuses = True
    assert watch.set_libraries([library]) == [f"{path}: simulated refusal"]
    programs.refuses = False
    assert watch.set_libraries([library]) == []
    assert programs.told() == ["attach"]


def test_a_user_has_so_many_processes_followed_and_leaves_room_for_another(
    watch: DriverCallWatch, programs: SimulatedPrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = {**dict.fromkeys(range(10_000, 10_000 + MOST_OF_A_USER + 3), 1000), 20_000: 1001}
    monkeypatch.setattr(
        "railscope.agent.node.completion.driver_calls.tenant_of", lambda _procfs, pid: Tenant(users[pid])
    )
    monkeypatch.setattr("railscope.agent.node.completion.cuda_files.CudaFiles.follow", lambda *_: None)
    library = Library({ProcessIdentity(pid, pid) for pid in users})
    for _ in range(2):
        watch.set_libraries([library])
        assert len(programs.followed) == MOST_OF_A_USER + 1
        assert 20_000 in programs.followed
        assert dict(watch.left_out()) == {1000: 3}, "each process counts once"
    library.mappers.discard(ProcessIdentity(10_000, 10_000))
    watch.set_libraries([library])
    assert len(programs.followed) == MOST_OF_A_USER + 1, "the next one has its place"
