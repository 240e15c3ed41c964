"""Errors of the real NCCL as the probes see them: asynchronous ones, those of calls, and of an init without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.node.collectives.events import CommEvents
from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.links import AttachKind, ProbePoint
from railscope.probes.nccl.abi import DataType
from railscope.probes.nccl.functions.entry_points import END_FUNCTIONS
from railscope.probes.nccl.functions.probe_points import ProbePoints, probe_points
from railscope.probes.nccl.layouts.layout import CommLayout, Layouts, Structure
from railscope.probes.nccl.programs.calls import NcclPrograms, ProgramSettings
from railscope.probes.nccl.programs.errors import Errors, error_points
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.errors import (
    ErrorLayout,
    ErrorSource,
    ErrorStat,
    Result,
    error_layout,
    stored_result,
)
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from railscope.testbed.nccl.library import nccl_library
from tests.nccl.job import Job
from tests.root.caller import Caller, forge_communicator
from tests.root.probe_targets import assemble, on_x86_64

pytestmark = [pytest.mark.root, pytest.mark.nccl]

LIBRARY = 3
REMOTE, SYSTEM, TIMEOUT = int(Result.REMOTE_ERROR), int(Result.SYSTEM_ERROR), int(Result.TIMEOUT)
PROXY_RESULT = 220
"""`ncclProxyState.asyncResult`, by the debug information of 2.32.3."""
IDENTITY = {"comm_hash": 0xABCD, "rank": 1, "nranks": 2, "n_nodes": 2}
ENDLESS = 1_000_000


@dataclass(frozen=True, slots=True)
class Facts:
    """What the table and the symbols tell of the library under test."""

    path: Path
    points: ProbePoints
    error_points: tuple[ProbePoint, ...]
    layout: CommLayout
    comm: Structure
    error_layout: ErrorLayout


@pytest.fixture(scope="module")
def facts() -> Facts:
    layouts, path = Layouts.load(), nccl_library()
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        layout, structures = layouts.layout_of(elf), dict(layouts.structures(elf.build_id))
        points, errors = probe_points(elf, LIBRARY), error_points(elf, LIBRARY)
    state = structures["ncclProxyState"]
    structures["ncclProxyState"] = Structure(state.size_bytes, {"asyncResult": PROXY_RESULT, **state.offsets})
    where = error_layout(structures)
    assert layout is not None
    assert where is not None
    return Facts(path, points, errors, layout, structures["ncclComm"], where)


@dataclass(frozen=True, slots=True)
class Probes:
    programs: NcclPrograms
    errors: Errors

    def met(self) -> list[tuple[ErrorSource, Result]]:
        """Source and result of each event since the last look."""
        events = self.errors.events.read()
        return [(ErrorSource(int(event["source"])), Result(int(event["result"]))) for event in events]


@contextmanager
def probed(
    facts: Facts, *, pids: tuple[int, ...], attach: AttachKind | None = None, layout: bool = True
) -> Iterator[Probes]:
    """Probes on some calls, for some processes only."""
    with ExitStack() as stack:
        programs = NcclPrograms.load(ProgramSettings(attach=attach, only_observed_processes=True))
        stack.callback(programs.close)
        internals = Internals.load(programs)
        stack.callback(internals.close)
        for pid in pids:
            programs.observe(pid)
        internals.errors.describe(LIBRARY, facts.error_layout if layout else None)
        stack.callback(programs.attach(str(facts.path), facts.points, LIBRARY, facts.layout).close)
        stack.callback(internals.errors.attach(str(facts.path), facts.error_points).close)
        yield Probes(programs, internals.errors)


@pytest.fixture(scope="module")
def caller(facts: Facts) -> Iterator[Caller]:
    with Caller(facts.path) as started:
        yield started


@dataclass(frozen=True, slots=True)
class Forged:
    """A communicator that NCCL takes for one, in the caller's memory."""

    caller: Caller
    facts: Facts
    address: int

    @classmethod
    def make(cls, caller: Caller, facts: Facts) -> Forged:
        return cls(caller, facts, forge_communicator(caller, facts.layout, facts.comm.size_bytes, IDENTITY))

    def fail(self, result: int) -> None:
        assert self.facts.layout.async_result is not None
        self.caller.store(self.address + self.facts.layout.async_result, result, 4)

    def fail_in_proxy(self, result: int) -> None:
        state = self.caller.memory(4096)
        self.caller.store(state + PROXY_RESULT, result, 4)
        self.caller.store(self.address + self.facts.comm.offsets["proxyState"], state, 8)

    def refuse(self) -> None:
        """Let NCCL refuse the communicator instead of taking the forgery apart."""
        assert self.facts.layout.end_magic is not None
        self.caller.store(self.address + self.facts.layout.end_magic, 0, 8)

    def poll(self, times: int = 1) -> int:
        """What ncclCommGetAsyncError answers."""
        answer = self.caller.memory(8)
        assert self.caller.call("ncclCommGetAsyncError", times, self.address, answer) == 0
        return int.from_bytes(self.caller.text(answer, 4), "little")


def test_every_call_about_errors_of_the_library_is_found_where_a_return_probe_can_be(facts: Facts) -> None:
    assert {point.symbol for point in facts.error_points} == {function.symbol for function in END_FUNCTIONS}


def test_processes_that_are_not_observed_are_left_alone(caller: Caller, facts: Facts) -> None:
    comm = Forged.make(caller, facts)
    comm.fail(REMOTE)
    comm.refuse()
    with probed(facts, pids=()) as probes:
        assert caller.call("ncclCommFinalize", 1, comm.address) == Result.INVALID_ARGUMENT
        assert probes.met() == []


@pytest.mark.parametrize("layout", [True, False])
def test_each_of_two_communicators_errors_is_told_once_and_another_one_again(
    caller: Caller, facts: Facts, layout: bool
) -> None:
    comms = [Forged.make(caller, facts) for _ in range(2)]
    for comm in comms:
        comm.refuse()
    told: list[tuple[int, int]] = []
    with probed(facts, pids=(caller.pid,), layout=layout) as probes:
        for result in (0, Result.IN_PROGRESS, REMOTE, REMOTE, TIMEOUT):
            for comm in comms:
                comm.fail(result)
                caller.call("ncclCommFinalize", 1, comm.address)
        for event in probes.errors.events.read():
            if event["source"] == ErrorSource.ASYNC:
                told.append((comms.index(Forged(caller, facts, int(event["comm"]))), int(event["result"])))
        assert probes.errors.stats()[ErrorStat.CALLS] == 2 * 5 * len(comms)
    # Without a layout nobody knows where a communicator keeps its error.
    assert told == ([(at, result) for result in (REMOTE, TIMEOUT) for at in range(2)] if layout else [])


@pytest.mark.parametrize("attach", AttachKind)
@pytest.mark.parametrize("place", ["communicator", "proxy"])
def test_the_call_that_ends_a_communicator_tells_its_error_and_its_own(
    caller: Caller, facts: Facts, attach: AttachKind, place: str
) -> None:
    comm = Forged.make(caller, facts)
    (comm.fail if place == "communicator" else comm.fail_in_proxy)(REMOTE)
    comm.refuse()
    with probed(facts, pids=(caller.pid,), attach=attach) as probes:
        result = caller.call("ncclCommFinalize", 2, comm.address)
        assert result == Result.INVALID_ARGUMENT
        refused = (ErrorSource.FINALIZE, Result.INVALID_ARGUMENT)
        assert probes.met() == [(ErrorSource.ASYNC, REMOTE), refused, refused]


def test_what_is_no_communicator_has_no_error_of_its_own(caller: Caller, facts: Facts) -> None:
    comm = Forged.make(caller, facts)
    comm.fail(REMOTE)
    caller.store(comm.address, 0, 8)
    with probed(facts, pids=(caller.pid,)) as probes:
        assert caller.call("ncclCommFinalize", 1, comm.address) == Result.INVALID_ARGUMENT
        assert probes.met() == [(ErrorSource.FINALIZE, Result.INVALID_ARGUMENT)]
        assert probes.errors.stats()[ErrorStat.UNREADABLE] == 1


def test_a_communicator_in_progress_has_no_error_yet_as_nccl_itself_answers(caller: Caller, facts: Facts) -> None:
    comm = Forged.make(caller, facts)
    comm.fail(Result.IN_PROGRESS)
    comm.fail_in_proxy(REMOTE)
    assert comm.poll() == Result.IN_PROGRESS
    comm.refuse()
    with probed(facts, pids=(caller.pid,)) as probes:
        caller.call("ncclCommFinalize", 1, comm.address)
        assert probes.met() == [(ErrorSource.FINALIZE, Result.INVALID_ARGUMENT)]


def test_each_communicator_at_an_address_has_its_errors_told(caller: Caller, facts: Facts) -> None:
    comm = Forged.make(caller, facts)
    comm.fail(REMOTE)
    comm.refuse()
    with probed(facts, pids=(caller.pid,)) as probes:
        instances = set()
        for _ in range(2):
            caller.call("ncclAllReduce", 1, 0, 0, 100, int(DataType.Float32), 0, comm.address, 7)
            (instance,) = probes.programs.communicators.read()[1]["instance"].tolist()
            instances.add(instance)
            for _ in range(2):
                caller.call("ncclCommFinalize", 1, comm.address)
            events = probes.errors.events.read()
            assert events["source"].tolist() == [ErrorSource.ASYNC, ErrorSource.FINALIZE, ErrorSource.FINALIZE]
            assert events["instance"].tolist() == [instance] * 3
            caller.call("ncclCommDestroy", 1, comm.address)
            probes.errors.events.read()
        assert len(instances) == 2


@on_x86_64
def test_a_call_that_ends_a_communicator_within_another_hides_neither_ones_result(facts: Facts, tmp_path: Path) -> None:
    """ncclCommAbort is made within other calls; the functions here return and do nothing else (simulated)."""
    path = assemble(
        tmp_path,
        ncclAllReduce="push %rbp; pop %rbp; xor %eax, %eax; ret",
        ncclCommAbort=f"push %rbp; mov ${REMOTE}, %eax; pop %rbp; ret",
        ncclCommDestroy=f"push %rbp; call ncclCommAbort@PLT; mov ${SYSTEM}, %eax; pop %rbp; ret",
    )
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        there = replace(facts, path=path, points=probe_points(elf, LIBRARY), error_points=error_points(elf, LIBRARY))
    with Caller(path) as caller, probed(there, pids=(caller.pid,), layout=False) as probes:
        assert caller.call("ncclCommDestroy", 1, caller.memory(64)) == SYSTEM
        assert probes.met() == [(ErrorSource.ABORT, REMOTE), (ErrorSource.DESTROY, SYSTEM)]


def test_a_stored_error_can_be_read_from_outside(caller: Caller, facts: Facts) -> None:
    comm, other = Forged.make(caller, facts), Forged.make(caller, facts)
    other.fail_in_proxy(SYSTEM)
    memory = os.open(f"/proc/{caller.pid}/mem", os.O_RDONLY)
    try:
        assert stored_result(memory, comm.address, facts.error_layout) == comm.poll() == 0
        comm.fail(REMOTE)
        assert stored_result(memory, comm.address, facts.error_layout) == comm.poll() == REMOTE
        assert stored_result(memory, other.address, facts.error_layout) == other.poll() == SYSTEM
        assert stored_result(memory, caller.memory(64), facts.error_layout) is None
    finally:
        os.close(memory)


def test_an_init_that_fails_without_a_gpu_counts_as_an_error(caller: Caller, facts: Facts) -> None:
    rank, filler, unique_id = 0, (0, 0, 0), (7,) * 16
    events = CommEvents()
    with probed(facts, pids=(caller.pid,)) as probes:
        result = caller.call("ncclCommInitRank", 1, caller.memory(8), 1, rank, *filler, *unique_id)
        assert result not in (Result.SUCCESS, Result.IN_PROGRESS)
        events.record_lifecycle(probes.programs.lifecycle_events.read())
    assert {name: count for name, count in events.errors().items() if count} == {Result(result).name.lower(): 1}
    assert not any(events.events().values())


@pytest.mark.fabric
def test_when_a_peer_dies_the_survivors_error_is_counted_once(
    two_hosts: Fabric, double: Double, facts: Facts, tmp_path: Path
) -> None:
    events = CommEvents()
    with Job(two_hosts, tmp_path, double, pattern="bereaved", iterations=ENDLESS, size_bytes=4096) as job:
        pids = job.ready()
        with probed(facts, pids=pids) as probes:
            job.start()
            job.under_way()
            job.kill(1)
            job.wait()
            lifecycle = probes.programs.lifecycle_events.read()
            met = probes.errors.events.read()
    events.record_lifecycle(lifecycle)
    events.record_errors(met)
    assert events.events()["abort"] == 1
    assert {name: count for name, count in events.errors().items() if count} == {"remote_error": 1}
    (instance,) = np.unique(lifecycle["instance"][lifecycle["tgid"] == pids[0]]).tolist()
    error = events.last_error(instance)
    assert error is not None
    assert (error.error, error.source) == ("remote_error", "async")


@pytest.mark.fabric
def test_a_healthy_job_has_events_and_no_errors(
    two_hosts: Fabric, double: Double, facts: Facts, tmp_path: Path
) -> None:
    iterations = 50
    events = CommEvents()
    with Job(two_hosts, tmp_path, double, iterations=iterations, size_bytes=4096, hold=True) as job:
        with probed(facts, pids=job.ready()) as probes:
            job.start()
            job.finished()
            job.release()
            job.wait()
            events.record_lifecycle(probes.programs.lifecycle_events.read())
            assert probes.met() == []
    assert events.events()["destroy"] == 2
    assert not any(events.errors().values())
