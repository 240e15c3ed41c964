"""Errors of the real NCCL as the probes see them: asynchronous ones, those of calls, and of an init without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from agent.comm_events import CommEvents
from probes.elf import Elf
from probes.links import AttachKind
from probes.nccl.error_records import (
    ErrorLayout,
    ErrorSource,
    ErrorStat,
    Result,
    error_layout,
    stored_result,
)
from probes.nccl.errors import ErrorPoints, Errors, Reach, error_points
from probes.nccl.functions import END_FUNCTIONS
from probes.nccl.internals import Internals
from probes.nccl.layout import CommLayout, Layouts, Structure
from probes.nccl.library import ProbePoints, probe_points
from probes.nccl.programs import NcclPrograms, ProgramSettings
from probes.nccl.records import LifecycleKind
from testbed.hosts import Fabric
from tests.nccl.build import Double
from tests.nccl.job import Job
from tests.nccl.library import nccl_library
from tests.root.caller import Caller, forge_communicator

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
    error_points: ErrorPoints
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
    facts: Facts, *reaches: Reach, pids: tuple[int, ...], attach: AttachKind | None = None, layout: bool = True
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
        for reach in reaches:
            stack.callback(internals.errors.attach(str(facts.path), facts.error_points, reach).close)
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

    def poll(self, times: int = 1) -> int:
        """What ncclCommGetAsyncError answers."""
        answer = self.caller.memory(8)
        assert self.caller.call("ncclCommGetAsyncError", times, self.address, answer) == 0
        return int.from_bytes(self.caller.text(answer, 4), "little")


def test_every_call_about_errors_of_the_library_is_found_where_a_return_probe_can_be(facts: Facts) -> None:
    assert {point.symbol for point in facts.error_points.ends} == {function.symbol for function in END_FUNCTIONS}
    assert [point.symbol for point in facts.error_points.polls] == ["ncclCommGetAsyncError"]


@pytest.mark.parametrize("attach", AttachKind)
@pytest.mark.parametrize("layout", [True, False])
def test_an_error_is_told_once_however_often_the_job_asks(
    caller: Caller, facts: Facts, attach: AttachKind, layout: bool
) -> None:
    comm = Forged.make(caller, facts)
    with probed(facts, Reach.POLLS, pids=(caller.pid,), attach=attach, layout=layout) as probes:
        assert comm.poll(100) == 0
        comm.fail(Result.IN_PROGRESS)
        assert comm.poll(100) == Result.IN_PROGRESS
        assert probes.met() == []
        comm.fail(REMOTE)
        assert comm.poll(100) == REMOTE
        assert probes.met() == [(ErrorSource.ASYNC, REMOTE)]
        assert comm.poll(100) == REMOTE
        assert probes.met() == []
        comm.fail(TIMEOUT)
        assert comm.poll(100) == TIMEOUT
        assert probes.met() == [(ErrorSource.ASYNC, TIMEOUT)]
        comm.fail(0)
        assert comm.poll(100) == 0
        comm.fail(TIMEOUT)
        assert comm.poll() == TIMEOUT
        assert probes.met() == [(ErrorSource.ASYNC, Result.SUCCESS), (ErrorSource.ASYNC, TIMEOUT)]
        assert probes.errors.stats()[ErrorStat.POLLS] >= 2 * 601


def test_a_communicator_that_was_never_seen_is_known_from_its_error_on(caller: Caller, facts: Facts) -> None:
    comm = Forged.make(caller, facts)
    comm.fail_in_proxy(SYSTEM)
    with probed(facts, Reach.POLLS, pids=(caller.pid,)) as probes:
        assert comm.poll(10) == SYSTEM
        (event,) = probes.errors.events.read()
        (seen,) = probes.programs.lifecycle_events.read()
    assert (int(event["comm"]), int(event["tgid"]), int(event["tid"])) == (comm.address, caller.pid, caller.pid)
    assert int(seen["instance"]) == int(event["instance"]) > 0
    assert (int(seen["kind"]), int(seen["identity"]["comm_hash"])) == (LifecycleKind.SEEN, IDENTITY["comm_hash"])


def test_two_communicators_errors_are_told_apart(caller: Caller, facts: Facts) -> None:
    comms = [Forged.make(caller, facts) for _ in range(2)]
    with probed(facts, Reach.POLLS, pids=(caller.pid,)) as probes:
        for _ in range(3):
            for comm in comms:
                comm.fail(REMOTE)
                comm.poll()
        events = probes.errors.events.read()
    assert events["comm"].tolist() == [comm.address for comm in comms]
    assert len(set(events["instance"].tolist())) == 2


def test_a_question_that_fails_is_told_as_such_once(caller: Caller, facts: Facts) -> None:
    with probed(facts, Reach.POLLS, pids=(caller.pid,)) as probes:
        assert caller.call("ncclCommGetAsyncError", 5, 0, caller.memory(8)) == Result.INVALID_ARGUMENT
        assert probes.met() == [(ErrorSource.POLL, Result.INVALID_ARGUMENT)]


def test_processes_that_are_not_observed_are_left_alone(caller: Caller, facts: Facts) -> None:
    comm = Forged.make(caller, facts)
    comm.fail(REMOTE)
    with probed(facts, *Reach, pids=()) as probes:
        comm.poll(5)
        assert probes.met() == []


@pytest.mark.parametrize("attach", AttachKind)
@pytest.mark.parametrize("place", ["communicator", "proxy"])
def test_the_call_that_ends_a_communicator_tells_its_error_and_its_own(
    caller: Caller, facts: Facts, attach: AttachKind, place: str
) -> None:
    comm = Forged.make(caller, facts)
    (comm.fail if place == "communicator" else comm.fail_in_proxy)(REMOTE)
    # NCCL then refuses the communicator instead of taking the forgery apart.
    assert facts.layout.end_magic is not None
    caller.store(comm.address + facts.layout.end_magic, 0, 8)
    with probed(facts, Reach.ENDS, pids=(caller.pid,), attach=attach) as probes:
        result = caller.call("ncclCommFinalize", 2, comm.address)
        assert result == Result.INVALID_ARGUMENT
        refused = (ErrorSource.FINALIZE, Result.INVALID_ARGUMENT)
        assert probes.met() == [(ErrorSource.ASYNC, REMOTE), refused, refused]


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
    with probed(facts, Reach.ENDS, pids=(caller.pid,)) as probes:
        result = caller.call("ncclCommInitRank", 1, caller.memory(8), 1, rank, *filler, *unique_id)
        assert result not in (Result.SUCCESS, Result.IN_PROGRESS)
        events.take_lifecycle(probes.programs.lifecycle_events.read())
    assert {name: count for name, count in events.errors().items() if count} == {Result(result).name.lower(): 1}
    assert not any(events.events().values())


@pytest.mark.fabric
@pytest.mark.parametrize("reaches", [(Reach.ENDS,), (Reach.POLLS,), tuple(Reach)])
def test_when_a_peer_dies_the_survivors_error_is_counted_once(
    two_hosts: Fabric, double: Double, facts: Facts, tmp_path: Path, reaches: tuple[Reach, ...]
) -> None:
    events = CommEvents()
    with Job(two_hosts, tmp_path, double, pattern="bereaved", iterations=ENDLESS, size_bytes=4096) as job:
        pids = job.ready()
        with probed(facts, *reaches, pids=pids) as probes:
            job.start()
            job.under_way()
            job.kill(1)
            job.wait()
            lifecycle = probes.programs.lifecycle_events.read()
            met = probes.errors.events.read()
    events.take_lifecycle(lifecycle)
    events.take_errors(met)
    assert events.events()["abort"] == 1
    assert {name: count for name, count in events.errors().items() if count} == {"remote_error": 1}
    (instance,) = np.unique(lifecycle["instance"][lifecycle["tgid"] == pids[0]]).tolist()
    error = events.last_error(instance)
    assert error is not None
    assert (error.error, error.source) == ("remote_error", "async")


@pytest.mark.fabric
def test_a_healthy_job_has_events_and_no_errors_and_asks_for_errors_at_every_call(
    two_hosts: Fabric, double: Double, facts: Facts, tmp_path: Path
) -> None:
    """Why `Reach.POLLS` is not for always: NCCL itself calls ncclCommGetAsyncError at each collective."""
    iterations = 50
    events = CommEvents()
    with Job(two_hosts, tmp_path, double, iterations=iterations, size_bytes=4096, hold=True) as job:
        with probed(facts, *Reach, pids=job.ready()) as probes:
            job.start()
            job.finished()
            polls = probes.errors.stats()[ErrorStat.POLLS]
            job.release()
            job.wait()
            events.take_lifecycle(probes.programs.lifecycle_events.read())
            assert probes.met() == []
    assert polls >= 2 * 2 * iterations
    assert events.events()["destroy"] == 2
    assert not any(events.errors().values())
