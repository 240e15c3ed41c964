"""Which process a communicator belongs to, and which NCCL that has: after execve, and where a pid is used again.

The processes are folders that look like /proc, the kernel's tables are simulated, and the libraries are real files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from railscope.agent.config.options import Config
from railscope.agent.facts.snapshot import CommunicatorFacts
from railscope.agent.node.completion.cuda import CudaCompletion, CudaLibrary
from railscope.agent.node.daemon.nccl_sources import NcclSources
from railscope.agent.node.daemon.observer import Observer
from railscope.agent.node.inspection.inspection import InProcess, Inspection
from railscope.agent.node.inspection.questions import Found, NotYet, Question
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.targets.processes import Describe
from railscope.agent.node.targets.sightings import Look
from railscope.probes.clock import SystemClock
from railscope.probes.loading.links import Links
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.programs.calls import NcclPrograms, ProgramSettings
from railscope.probes.nccl.records.calls import LifecycleKind
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit.collectives_kernel import SimulatedPrograms
from tests.unit.elf_writer import WantedElf, WantedSymbol, write_elf
from tests.unit.level_programs import SimulatedPrograms as SimulatedInternals
from tests.unit.test_cuda_completion import SimulatedPrograms as SimulatedCuda
from tests.unit.test_processes import SimulatedProcfs

A = TypeVar("A")

PID = 7
FIRST, SECOND = 0x7FFD10000000, 0x7FFD20000000
"""Where the stacks of a process's first and second program begin."""


class AttachablePrograms(SimulatedPrograms):
    def __init__(self, settings: ProgramSettings) -> None:
        super().__init__()
        self.settings = settings
        self.observed: set[int] = set()

    def attach(self, *_: object, **__: object) -> Links:
        return Links()

    def observe(self, pid: int) -> None:
        self.observed.add(pid)

    def forget(self, pid: int) -> None:
        self.observed.remove(pid)


class CountedCuda(CudaCompletion):
    """Counts how often all libraries were gone through."""

    rounds = 0

    def set_libraries(self, libraries: Iterable[CudaLibrary], level: Level) -> list[str]:
        self.rounds += 1
        return super().set_libraries(libraries, level)


class SilentAboutJobs(InProcess):
    """Does not tell what some processes say of themselves until it is allowed to; notes what it was asked."""

    def __init__(self, *silent: int) -> None:
        super().__init__()
        self.asked: list[type] = []
        self.silent = set(silent)

    def ask(self, tenant: Tenant, question: Question[A], descriptors: Collection[int] = ()) -> Found[A]:
        self.asked.append(type(question))
        if question.pid in self.silent and isinstance(question, Describe):
            raise NotYet
        return super().ask(tenant, question, descriptors)


class Host:
    """Processes that appear and change as a test says, and an observer of them."""

    def __init__(
        self, folder: Path, settings: ProgramSettings, inspection: Inspection | None = None, **config: Any
    ) -> None:
        self._folder = folder
        self._procfs = SimulatedProcfs(folder / "proc")
        self._procfs.root.mkdir()
        self._clock = SystemClock()
        self.kernel = AttachablePrograms(settings)
        self.internals = SimulatedInternals()
        self.cuda = CountedCuda(SimulatedCuda(), self._procfs.root, InProcess())
        self.new: list[ProcessIdentity] = []
        everything = Config(collectors=frozenset({"collective"}), procfs=self._procfs.root, **config)
        self.observer = Observer(
            everything,
            NcclSources(
                cast(NcclPrograms, self.kernel),
                new_process=lambda identity, _: self.new.append(identity),
                internals=self.internals,
                cuda=self.cuda,
                inspection=inspection or InProcess(),
            ),
            self._clock,
            "0",
        )

    def library(self, version: str) -> Path:
        path = self._folder / f"libnccl-{version}.so"
        path.write_bytes(nccl(version))
        return path

    def runs(
        self,
        pid: int,
        *mapped: Path,
        start: int = 100,
        stack: int = FIRST,
        job: str = "",
        namespace: int | None = None,
        program: bytes = b"",
    ) -> None:
        """A process is there, or is now this."""
        lines = []
        for number, path in enumerate(mapped, start=1):
            status, place = path.stat(), 0x7F0000000000 + (number << 12)
            device = f"{status.st_dev >> 8 & 0xFFF:x}:{status.st_dev & 0xFF | status.st_dev >> 12 & 0xFFF00:x}"
            lines.append(f"{place:x}-{place + 4096:x} r-xp 00000000 {device} {status.st_ino} {path}\n")
        maps = "".join(lines) or "00400000-00401000 r-xp 00000000 fe:00 11 /opt/python\n"
        # Another size each time: what has grown is read again.
        self._procfs.add(pid, start=start, size=4096 * (1 + len(lines)), stack=stack, maps=maps.encode())
        folder = self._procfs.root / str(pid)
        (folder / "environ").write_bytes(f"SLURM_JOB_ID={job}\0".encode() if job else b"")
        (folder / "cmdline").write_bytes(program)
        if namespace is not None:
            (folder / "ns").mkdir()
            (folder / "ns/net").symlink_to(f"net:[{namespace}]")

    def uses_nccl(self, pid: int, instance: int, calls: int = 1) -> None:
        """The kernel's tables name a process, which has made a communicator and calls."""
        now_ns = self._clock.monotonic_ns()
        self.kernel.communicator(pid, instance, first_ns=now_ns)
        self.kernel.event(pid, instance, LifecycleKind.INIT, time_ns=now_ns)
        self.kernel.call(pid, instance, calls)
        self.observer.read_lifecycle_events()

    def communicators(self, what: Callable[[CommunicatorFacts], Any]) -> dict[int, Any]:
        return {one.instance: what(one) for one in self.observer.snapshot().collectives.communicators}


def nccl(version: str) -> bytes:
    symbols = [WantedSymbol(name) for name in ("ncclAllReduce", "ncclCommInitRank")]
    constants = f"NCCL version {version}\0".encode()
    return write_elf(WantedElf(symbols, constants=constants, build_id=version.encode())).data


@contextmanager
def host_with(
    folder: Path, settings: ProgramSettings | None = None, inspection: Inspection | None = None, **config: Any
) -> Iterator[Host]:
    host = Host(folder, settings or ProgramSettings(), inspection, **config)
    try:
        yield host
    finally:
        host.observer.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with host_with(tmp_path) as made:
        yield made


@pytest.mark.parametrize(("mappers", "complete"), [(60, [True]), (66, [False, False, True, True])])
def test_a_scan_with_a_budget_leaves_the_rest_of_a_crowd_to_the_next_ones(
    host: Host, mappers: int, complete: list[bool]
) -> None:
    library = host.library("2.90.1")
    for pid in range(PID, PID + 3):
        host.runs(pid)
    for pid in range(PID + 3, PID + 3 + mappers):
        host.runs(pid, library)
    assert [host.observer.scan(0) for _ in complete] == complete
    assert [identity.pid for identity in host.new] == list(range(PID + 3, PID + 3 + mappers))


@pytest.mark.parametrize("then", ["2.90.1", "2.91.2"])
def test_another_program_has_the_nccl_that_it_maps_itself_and_until_then_none_that_is_known(
    host: Host, then: str
) -> None:
    def version(one: CommunicatorFacts) -> str:
        return one.identity.nccl_version

    host.runs(PID, host.library("2.90.1"))
    host.observer.scan_processes({PID})
    host.uses_nccl(PID, 1)
    assert host.communicators(version) == {1: "2.90.1"}

    host.runs(PID, stack=SECOND)
    host.observer.scan_processes({PID})
    host.uses_nccl(PID, 2)
    assert host.communicators(version) == {1: "2.90.1", 2: "unknown"}

    host.runs(PID, host.library(then), stack=SECOND)
    host.observer.scan_processes({PID})
    assert host.communicators(version) == {1: "2.90.1", 2: then}


def test_another_program_is_looked_at_for_nccl_also_in_files_that_the_first_one_had_mapped(host: Host) -> None:
    path = host.library("2.90.1")
    library = path.read_bytes()
    path.write_bytes(write_elf(WantedElf()).data)
    host.runs(PID, path)
    host.observer.scan_processes({PID})
    host.uses_nccl(PID, 1)
    path.write_bytes(library)
    host.runs(PID, path, stack=SECOND)
    host.observer.scan_processes({PID})
    assert host.observer.observes([PID])


@pytest.mark.parametrize("start", [100, 200], ids=["execve", "pid used again"])
def test_what_had_the_pid_before_has_ended_and_keeps_its_job(host: Host, start: int) -> None:
    def told(one: CommunicatorFacts) -> tuple[str | None, int, bool]:
        return dict(one.identity.job).get("job"), one.enqueued, one.alive

    library = host.library("2.90.1")
    host.runs(PID, library, job="111")
    host.observer.scan_processes({PID})
    host.uses_nccl(PID, 1, calls=5)
    host.runs(PID, library, start=start, stack=SECOND, job="222")
    host.observer.scan_processes({PID})
    host.uses_nccl(PID, 2, calls=8)
    assert host.communicators(told) == {1: ("111", 5, False), 2: ("222", 8, True)}
    assert host.observer.snapshot().health.probes.processes_observed == 1
    assert host.new == [ProcessIdentity(PID, 100), ProcessIdentity(PID, start)]


def test_the_late_news_of_a_process_s_end_does_not_end_the_one_that_has_its_pid_now(host: Host) -> None:
    library = host.library("2.90.1")
    for instance, start in ((1, 100), (2, 200)):
        host.runs(PID, library, start=start)
        host.observer.scan_processes({PID})
        host.uses_nccl(PID, instance)
    host.observer.processes_gone({host.new[0]: None})
    assert host.communicators(lambda one: one.alive) == {1: False, 2: True}
    assert host.observer.observes([PID])


def test_a_process_that_the_kernels_tables_name_and_nobody_wants_stays_unknown(tmp_path: Path) -> None:
    with host_with(tmp_path, pids=(PID,)) as host:
        for pid in (PID, PID + 1):
            host.runs(pid)
            host.uses_nccl(pid, pid)
        assert host.new == [ProcessIdentity(PID, 100)]
        assert host.observer.snapshot().health.probes.processes_observed == 1


def test_a_process_whose_network_namespace_cannot_be_read_is_in_none_that_is_asked_for(tmp_path: Path) -> None:
    inside, outside, hidden = 7, 8, 9
    with host_with(tmp_path, namespaces=frozenset({4})) as host:
        library = host.library("2.90.1")
        host.runs(inside, library, namespace=4)
        host.runs(outside, library, namespace=5)
        host.runs(hidden, library)
        host.observer.scan()
        assert host.new == [ProcessIdentity(inside, 100)]
        assert not host.observer.observes([hidden])


def test_only_living_processes_are_let_through_to_be_counted(tmp_path: Path) -> None:
    with host_with(tmp_path, ProgramSettings(only_observed_processes=True)) as host:
        library = host.library("2.90.1")
        host.runs(PID, library)
        host.observer.scan_processes({PID})
        assert host.kernel.observed == {PID}
        host.runs(PID, library, stack=SECOND)
        host.observer.scan_processes({PID})
        assert host.kernel.observed == {PID}, "it executes another program"
        host.observer.processes_gone({ProcessIdentity(PID, 100): None})
        assert host.kernel.observed == set()


def test_between_scans_nothing_is_looked_at_but_what_there_is_news_of(tmp_path: Path) -> None:
    inspection = SilentAboutJobs(PID)
    with host_with(tmp_path, inspection=inspection) as host:
        host.runs(PID, host.library("2.90.1"), job="111")
        host.observer.scan()
        host.uses_nccl(PID, 1)
        inspection.asked.clear()
        rounds = host.cuda.rounds
        for _ in range(20):
            host.observer.update()
        assert Look not in inspection.asked
        assert host.cuda.rounds == rounds
        inspection.silent.clear()
        host.observer.update()
        assert host.communicators(lambda one: dict(one.identity.job).get("job")) == {1: "111"}


def test_what_lies_below_a_library_goes_with_it_when_it_expires(tmp_path: Path) -> None:
    with host_with(tmp_path, probes_linger_ns=1) as host:
        host.runs(PID, host.library("2.90.1"))
        host.observer.scan()
        rounds = host.cuda.rounds
        host.observer.processes_gone({host.new[0]: None})
        host.observer.update()
        assert host.cuda.rounds == rounds + 2, "with the process, and with the library"


def test_who_does_not_tell_what_he_runs_keeps_nobody_else_s_program_from_being_known(tmp_path: Path) -> None:
    silent = range(100, 120)
    inspection = SilentAboutJobs(*silent)
    with host_with(tmp_path, inspection=inspection) as host:
        library = host.library("2.90.1")
        for pid in (*silent, PID):
            host.runs(pid, library, program=b"/usr/bin/python3\0train.py\0--secret\0")

        def programs() -> dict[int, str | None]:
            told = host.observer.rank_processes()
            return {one.identity.pid: one.owner.program if one.owner is not None else None for one in told}

        host.observer.scan()
        assert programs() == {PID: "python3 train.py", **dict.fromkeys(silent)}
        inspection.silent.clear()
        host.observer.update()
        assert set(programs().values()) == {"python3 train.py"}


def test_processes_that_end_together_are_put_away_together(tmp_path: Path) -> None:
    with host_with(tmp_path) as host:
        library = host.library("2.90.1")
        for pid in (7, 8, 9):
            host.runs(pid, library)
        host.observer.scan()
        rounds = host.cuda.rounds
        host.observer.processes_gone(dict.fromkeys(host.new))
        assert host.cuda.rounds == rounds + 1
        assert [line for line in host.internals.log if line.startswith("forget")] == [
            "forget processes [7, 8, 9]", "forget sent [7, 8, 9]",
        ]  # fmt: skip
        assert not host.observer.observes([7])
