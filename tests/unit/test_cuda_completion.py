"""Where the agent watches CUDA: files that this process maps, probes that are simulated."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from railscope.agent.node.completion.cuda import CudaCompletion
from railscope.agent.node.completion.cuda_files import LOOK_AGAIN_AFTER
from railscope.agent.node.inspection.inspection import InProcess, InspectionProcesses
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.links import Links, ProbePoint
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.functions.cuda import LIBRARY_PROGRAMS, CudaInterface, CudaPoints
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.programs.cuda import CudaProgress
from railscope.probes.nccl.records.cuda import CudaStat
from railscope.probes.processes.processes import PROCFS, ProcessIdentity, identity_of
from tests.unit.elf_writer import WantedElf, WantedSymbol, write_elf
from tests.unit.level_programs import LoadingPages
from tests.waiting import eventually

PUSH = b"\x55" + b"\xc3" * 15
RUNTIME, DRIVER = "cudaEventQuery", "cuEventQuery"


class SimulatedLinks(Links):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def close(self) -> None:
        self.log.append(f"-{self.name}")


@pytest.fixture(autouse=True)
def closing_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that are closed side by side are told as one entry of the log."""

    def close(groups: Iterable[SimulatedLinks]) -> None:
        closed = list(groups)
        for log in {id(links.log): links.log for links in closed}.values():
            log.append("-" + " and ".join(links.name for links in closed))

    monkeypatch.setattr("railscope.agent.node.completion.cuda.close_together", close)


@dataclass(slots=True)
class SimulatedPrograms:
    log: list[str] = field(default_factory=list)
    refuses: bool = False
    states: dict[int, CudaProgress] = field(default_factory=dict)

    def attach_library(self, path: str, points: Mapping[str, ProbePoint]) -> Links:
        assert set(points) == set(LIBRARY_PROGRAMS)
        return self._attach(path, "nccl")

    def attach_cuda(self, path: str, points: CudaPoints) -> Links:
        return self._attach(path, "runtime" if points.interface is CudaInterface.RUNTIME else "driver")

    def _attach(self, path: str, name: str) -> Links:
        assert path.startswith("/proc/self/fd/")
        if self.refuses:
            raise KernelRefusal(errno.EPERM, "simulated refusal")
        self.log.append(f"+{name}")
        return SimulatedLinks(name, self.log)

    def progress(self) -> dict[int, CudaProgress]:
        return self.states

    def durations(self) -> dict[Op, Records]:
        return {}

    def stats(self) -> Mapping[CudaStat, int]:
        return dict.fromkeys(CudaStat, 1)

    def forget_processes(self, tgids: Collection[int]) -> None:
        self.log.append(f"forget {sorted(tgids)}")

    def forget_communicators(self, instances: set[int]) -> None:
        self.log.append(f"forget {sorted(instances)}")

    def forget_handles(self) -> None:
        self.log.append("forget handles")

    def told(self) -> list[str]:
        """What happened since the last look."""
        told = list(self.log)
        self.log.clear()
        return told


@dataclass(slots=True)
class SimulatedLibrary:
    descriptor: int
    number: int = 3
    path: str = "/opt/libnccl.so.2"
    mappers: set[ProcessIdentity] = field(default_factory=set)
    tenant: Tenant = UNKNOWN_TENANT
    build_id: str | None = None
    local: bool = True


class Mapped:
    """Files that this process maps as code until they are closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()

    def map(self, name: str, *functions: str) -> Path:
        wanted = [WantedSymbol(function, 16 * at) for at, function in enumerate(functions)]
        path = self._folder / name
        path.write_bytes(write_elf(WantedElf(exported=wanted, code=PUSH * len(functions))).data)
        with path.open("rb") as file:
            self._stack.enter_context(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_EXEC))
        return path

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Mapped]:
    files = Mapped(tmp_path)
    yield files
    files.close()


@pytest.fixture
def library(tmp_path: Path) -> Iterator[SimulatedLibrary]:
    names = [WantedSymbol(name, 16 * at) for at, name in enumerate(LIBRARY_PROGRAMS.values())]
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(write_elf(WantedElf(internal=names, code=PUSH * len(names))).data)
    identity = identity_of(PROCFS, os.getpid())
    assert identity is not None
    with path.open("rb") as file:
        yield SimulatedLibrary(file.fileno(), mappers={identity})


@pytest.fixture
def programs() -> SimulatedPrograms:
    return SimulatedPrograms()


@pytest.fixture
def cuda(programs: SimulatedPrograms) -> Iterator[CudaCompletion]:
    completion = CudaCompletion(programs, PROCFS, inspection=InProcess())
    yield completion
    completion.close()


def test_a_process_is_watched_at_its_runtime_and_never_at_the_driver_too(
    cuda: CudaCompletion, programs: SimulatedPrograms, library: SimulatedLibrary, mapped: Mapped
) -> None:
    mapped.map("libcuda.so.1", DRIVER)
    runtime = mapped.map("libcudart.so.12", RUNTIME)
    assert cuda.set_libraries([library], Level.ALL) == []
    assert programs.told() == ["+runtime", "+nccl"]
    assert cuda.probed_files() == ((str(runtime), ()),)
    assert cuda.set_libraries([library], Level.ALL) == []
    assert programs.told() == []


def test_a_process_without_a_runtime_of_its_own_is_watched_at_the_driver(
    cuda: CudaCompletion, programs: SimulatedPrograms, library: SimulatedLibrary, mapped: Mapped
) -> None:
    mapped.map("any name.so", DRIVER)
    cuda.set_libraries([library], Level.ALL)
    assert programs.told() == ["+driver", "+nccl"]


def test_where_every_answer_comes_late_each_is_taken_and_asked_for_once(
    programs: SimulatedPrograms, library: SimulatedLibrary, mapped: Mapped
) -> None:
    mapped.map("libcudart.so.12", RUNTIME)
    with closing(InspectionProcesses(["railscope.agent.node.completion.files"], tenants_patience_seconds=0)) as late:
        completion = CudaCompletion(programs, PROCFS, inspection=late)

        def attached() -> bool:
            # As the daemon does: whenever an answer has come, and at other times.
            late.collect()
            completion.set_libraries([library], Level.ALL)
            return {"+runtime", "+nccl"} <= set(programs.log) and not late.busy

        with closing(completion):
            eventually(attached)


def test_of_files_that_others_serve_the_pages_are_read_before_probes_go_on_them(
    programs: SimulatedPrograms, mapped: Mapped, library: SimulatedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("railscope.agent.node.completion.files.on_local_storage", lambda _descriptor: False)
    library.local = False
    inspection = LoadingPages()
    cuda = CudaCompletion(programs, PROCFS, inspection)
    mapped.map("libcudart.so.12", RUNTIME)
    assert cuda.set_libraries([library], Level.ALL) == []
    assert programs.told() == []
    inspection.loaded = True
    assert cuda.set_libraries([library], Level.ALL) == []
    assert programs.told() == ["+runtime", "+nccl"]
    cuda.close()


@pytest.mark.parametrize("level", [Level.COUNTS, Level.COMPLETION, Level.RAILS])
def test_below_the_highest_level_nothing_is_attached(
    cuda: CudaCompletion, programs: SimulatedPrograms, library: SimulatedLibrary, mapped: Mapped, level: Level
) -> None:
    mapped.map("libcudart.so.12", RUNTIME)
    cuda.set_libraries([library], level)
    assert programs.told() == []
    cuda.set_libraries([library], Level.ALL)
    cuda.set_libraries([library], level)
    assert programs.told() == ["+runtime", "+nccl", "-nccl and runtime", "forget handles"]


def test_nccl_is_not_watched_where_no_process_can_be_asked(
    cuda: CudaCompletion, programs: SimulatedPrograms, library: SimulatedLibrary, mapped: Mapped
) -> None:
    for _ in range(LOOK_AGAIN_AFTER):
        assert cuda.set_libraries([library], Level.ALL) == []
    assert programs.told() == []
    mapped.map("libcudart.so.12", RUNTIME)
    cuda.set_libraries([library], Level.ALL)
    assert programs.told() == ["+runtime", "+nccl"], "a process that loads CUDA late"


def test_the_probes_go_with_the_last_process(
    cuda: CudaCompletion, programs: SimulatedPrograms, library: SimulatedLibrary, mapped: Mapped
) -> None:
    mapped.map("libcudart.so.12", RUNTIME)
    cuda.set_libraries([library], Level.ALL)
    programs.told()
    library.mappers.clear()
    cuda.set_libraries([library], Level.ALL)
    assert programs.told() == ["-runtime", "forget handles", "-nccl"]
    cuda.set_libraries([], Level.ALL)
    assert programs.told() == []


def test_a_file_that_was_written_over_is_looked_at_anew(
    cuda: CudaCompletion, programs: SimulatedPrograms, library: SimulatedLibrary, mapped: Mapped
) -> None:
    path = mapped.map("libcudart.so.12", RUNTIME)
    cuda.set_libraries([library], Level.ALL)
    programs.told()
    path.write_bytes(write_elf(WantedElf(exported=[WantedSymbol("something else")])).data)
    cuda.set_libraries([library], Level.ALL)
    assert programs.told() == ["-runtime", "forget handles", "-nccl"]
    assert cuda.probed_files() == ()


def test_what_the_kernel_refuses_is_told_and_tried_again(
    cuda: CudaCompletion, programs: SimulatedPrograms, library: SimulatedLibrary, mapped: Mapped
) -> None:
    path = mapped.map("libcudart.so.12", RUNTIME)
    programs.refuses = True
    assert cuda.set_libraries([library], Level.ALL) == [f"{path}: simulated refusal"]
    programs.refuses = False
    assert cuda.set_libraries([library], Level.ALL) == []
    assert programs.told() == ["+runtime", "+nccl"]


def test_what_was_proved_stays_known_until_nobody_can_ask(
    cuda: CudaCompletion, programs: SimulatedPrograms, library: SimulatedLibrary, mapped: Mapped
) -> None:
    mapped.map("libcudart.so.12", RUNTIME)
    cuda.set_libraries([library], Level.ALL)
    programs.told()
    programs.states = {7: CudaProgress(7, 12, 99)}
    cuda.end_processes({55})
    programs.states = {}
    cuda.end_communicators({7})
    cuda.read()
    assert cuda.progress_of(7) == CudaProgress(7, 12, 99)
    assert cuda.progress_of(8) is None
    assert programs.told() == ["forget [55]", "forget [7]"]
    cuda.forget([7, 8])
    assert cuda.progress_of(7) is None


def test_a_process_that_has_gone_is_no_error(
    cuda: CudaCompletion, programs: SimulatedPrograms, library: SimulatedLibrary
) -> None:
    library.mappers = {ProcessIdentity((1 << 22) + 1, 5)}
    assert cuda.set_libraries([library], Level.ALL) == []
    assert programs.told() == []


def test_every_run_of_the_programs_is_a_hit_and_what_they_proved_is_none() -> None:
    assert CudaCompletion(SimulatedPrograms(), PROCFS, inspection=InProcess()).hits() == 5
