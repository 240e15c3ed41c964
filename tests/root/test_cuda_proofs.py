"""What CUDA's events and streams prove, and what they must not: calls of a simulated NCCL and a simulated CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.maps import Map, Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.functions.cuda import LIBRARY_PROGRAMS, CudaInterface, cuda_points, library_points
from railscope.probes.nccl.programs.readings import delete_where
from railscope.probes.nccl.records.calls import SHARED_TABLES
from railscope.probes.nccl.records.cuda import CudaStat
from tests.root.caller import MAGIC, Caller, forge_communicator
from tests.root.cuda_job import (
    CAPTURED_EVENT,
    LAYOUT_OF_COMMUNICATORS,
    LIBRARY,
    MODES,
    NOT_READY,
    SESSION,
    Job,
    probed_job,
    simulated_library,
)
from tests.root.probe_targets import on_x86_64
from tests.root.test_shares_below_calls import taken_and_freed

pytestmark = [pytest.mark.root, on_x86_64]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_library(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def caller(library: Path) -> Iterator[Caller]:
    with Caller(library) as started:
        yield started


@pytest.fixture
def job(request: pytest.FixtureRequest, library: Path, caller: Caller) -> Iterator[Job]:
    attach, enqueue_time = getattr(request, "param", SESSION)
    with probed_job(library, caller, attach, enqueue_time) as made:
        yield made


A, B, STREAM, OTHER_STREAM, EVENT, OTHER_EVENT = 0xA000, 0xB000, 0x51000, 0x52000, 0xE000, 0xE100


def test_the_simulated_library_is_taken_for_a_runtime_with_all_functions(library: Path) -> None:
    with library.open("rb") as file, Elf.open(file.fileno()) as elf:
        points, launches = cuda_points(elf), library_points(elf, LIBRARY)
    assert points is not None
    assert (points.interface, points.refused) == (CudaInterface.RUNTIME, ())
    assert len(points.calls) == 8
    assert {point.symbol for point in points.drops} == {"cudaEventDestroy", "cudaStreamDestroy"}
    assert set(launches) == set(LIBRARY_PROGRAMS)


@pytest.mark.parametrize("job", MODES, indirect=True)
def test_an_event_proves_what_was_launched_before_it_and_nothing_behind_it(job: Job) -> None:
    job.run(A, STREAM, calls=3)
    job.record(EVENT, STREAM)
    job.run(A, STREAM, calls=2)
    job.ask(EVENT, NOT_READY)
    job.ask(EVENT, CAPTURED_EVENT)
    assert job.proved() == ([], 0)
    job.ask(EVENT)
    job.ask(EVENT)
    assert job.proved() == ([3], 3)
    job.record(EVENT, STREAM)
    job.ask(EVENT, function="cudaEventSynchronize")
    assert job.proved() == ([5], 5)


@pytest.mark.parametrize("job", MODES, indirect=True)
@pytest.mark.parametrize("function", ["cudaStreamQuery", "cudaStreamSynchronize"])
def test_a_stream_that_has_run_dry_proves_all_that_was_launched_on_it(job: Job, function: str) -> None:
    job.run(A, STREAM, calls=3)
    job.run(B, STREAM)
    job.run(B, OTHER_STREAM)
    job.ask(STREAM, NOT_READY, function)
    assert job.proved() == ([], 0)
    job.ask(STREAM, function=function)
    assert job.proved() == ([3, 1], 4)
    job.ask(OTHER_STREAM, function=function)
    assert job.proved() == ([3, 2], 5)


def test_calls_that_are_not_launched_yet_are_not_proved(job: Job) -> None:
    job.run(A, STREAM)
    job.enqueue(A, STREAM)
    job.record(EVENT, STREAM)
    job.enqueue(A, STREAM)
    job.launch(A)
    job.ask(EVENT)
    assert job.proved() == ([1], 1)
    job.wait_for(STREAM)
    assert job.proved() == ([3], 3)


@pytest.mark.parametrize("result", [1, 400])
def test_an_event_that_could_not_be_recorded_proves_nothing(job: Job, result: int) -> None:
    job.run(A, STREAM)
    job.record(EVENT, STREAM, result)
    job.ask(EVENT)
    assert job.proved() == ([], 0)


def test_an_event_that_was_recorded_elsewhere_since_proves_nothing_of_where_it_was(job: Job) -> None:
    job.run(A, STREAM)
    job.record(EVENT, STREAM)
    job.record(EVENT, OTHER_STREAM)
    job.ask(EVENT)
    assert job.proved() == ([], 0)


def test_an_event_with_flags_may_be_a_graphs_and_proves_nothing(job: Job) -> None:
    job.run(A, STREAM)
    job.record(EVENT, STREAM)
    job.caller.call("cudaEventRecordWithFlags", 1, EVENT, STREAM, 1, 0)
    job.ask(EVENT)
    assert job.proved() == ([], 0)
    job.caller.call("cudaEventRecordWithFlags", 1, EVENT, STREAM, 0, 0)
    job.ask(EVENT)
    assert job.proved() == ([1], 1)


@pytest.mark.parametrize("job", MODES, indirect=True)
def test_handles_of_destroyed_events_and_streams_mean_nothing(job: Job) -> None:
    job.run(A, STREAM)
    job.record(EVENT, STREAM)
    job.caller.call("cudaEventDestroy", 1, EVENT, 0)
    job.ask(EVENT)
    job.caller.call("cudaStreamDestroy", 1, STREAM, 0)
    job.wait_for(STREAM)
    assert job.proved() == ([], 0)
    job.run(A, OTHER_STREAM)
    job.wait_for(OTHER_STREAM)
    assert job.proved() == ([2], 2)


@pytest.mark.parametrize("program", ["cuda_plan", "cuda_copy_plan", "cuda_remote_plan"])
def test_captured_calls_have_no_duration_and_are_passed_over(job: Job, program: str) -> None:
    job.run(A, STREAM)
    job.enqueue(A, STREAM)
    job.launch(A, captured=True, program=program)
    job.wait_for(STREAM)
    assert job.proved() == ([1], 1)
    job.run(A, STREAM)
    job.wait_for(STREAM)
    assert job.proved() == ([3], 2)


def test_a_group_over_several_streams_is_proved_with_the_next_launch(job: Job) -> None:
    job.enqueue(A, STREAM)
    job.enqueue(A, OTHER_STREAM)
    job.launch(A)
    job.wait_for(STREAM)
    job.wait_for(OTHER_STREAM)
    assert job.proved() == ([], 0)
    job.run(A, STREAM)
    job.wait_for(STREAM)
    assert job.proved() == ([3], 3)


def test_a_communicator_that_changes_its_stream_is_proved_in_its_order(job: Job) -> None:
    for stream in (STREAM, OTHER_STREAM) * 2:
        job.run(A, stream)
    job.record(EVENT, STREAM)
    job.record(OTHER_EVENT, OTHER_STREAM)
    job.ask(EVENT)
    assert job.proved() == ([3], 3)
    job.ask(OTHER_EVENT)
    assert job.proved() == ([4], 4)


def test_the_threads_own_default_stream_is_not_the_legacy_one(job: Job) -> None:
    identity = {"comm_hash": 5, "rank": 0, "nranks": 2, "cuda_dev": 0}
    comm, other = (forge_communicator(job.caller, LAYOUT_OF_COMMUNICATORS, 4096, identity) for _ in range(2))
    job.run(comm, 0)
    job.caller.call("cudaEventRecord_ptsz", 1, EVENT, 0, 0, 0)
    job.ask(EVENT)
    job.ask(0, function="cudaStreamSynchronize_ptsz")
    assert job.proved() == ([], 0)
    job.record(EVENT, 1)
    job.ask(EVENT)
    assert job.proved() == ([1], 1)
    job.run(comm, 0)
    job.wait_for(0)
    assert job.proved() == ([2], 2)
    job.run(other, 2)
    job.wait_for(2)
    assert job.proved() == ([2], 2)


def test_the_next_communicator_at_an_address_is_not_proved_by_the_last_ones_events(job: Job) -> None:
    job.run(A, STREAM, calls=2)
    job.record(EVENT, STREAM)
    job.enqueue(A, STREAM)  # and it is never launched
    job.caller.call("ncclCommDestroy", 1, A, 0)
    job.enqueue(A, STREAM)
    job.ask(EVENT)
    assert job.proved() == ([], 0)
    job.launch(A)
    job.wait_for(STREAM)
    assert job.proved() == ([1], 1)


def test_a_communicator_that_nobody_asks_about_stays_unknown(job: Job) -> None:
    job.run(A, STREAM, calls=5)
    job.run(B, OTHER_STREAM, calls=5)
    job.record(EVENT, STREAM)
    job.ask(OTHER_EVENT)
    assert job.proved() == ([], 0)
    job.ask(EVENT)
    assert job.proved() == ([5], 5)


def test_of_too_many_calls_at_once_all_are_proved_and_the_last_ones_have_durations(job: Job) -> None:
    job.enqueue(A, STREAM, calls=1100)
    job.launch(A)
    job.wait_for(STREAM)
    assert job.proved() == ([1100], 512)
    assert job.cuda.stats()[CudaStat.FORGOTTEN] == 1100 - 512


def test_who_fills_the_tables_takes_neither_proofs_nor_durations_from_another_user(library: Path) -> None:
    """Streams, marks of events and ranges of calls, each more than there are."""
    with Caller(library, user=5000) as greedy, Caller(library, user=5001) as modest:
        with probed_job(library, greedy, *SESSION) as job:
            job.programs.observe(modest.pid)
            victim = Job(modest, job.cuda, job.programs)
            for comm in range(1, 101):
                job.run(comm << 12, STREAM)
            job.enqueue(A, STREAM)
            job.launch(A)
            greedy.sweep("cudaEventRecord", 0, 20_000, 0, STREAM, 0)
            refused = job.programs.shares.refused()
            assert {table for table, _ in refused} == {"cuda_ranges", "cuda_marks"}
            assert {user for _, user in refused} == {5000}
            victim.run(A, STREAM, calls=3)
            victim.record(EVENT, STREAM)
            victim.run(A, STREAM, calls=2)
            victim.ask(EVENT)
            assert job.proved() == ([3], 3)
            victim.wait_for(STREAM)
            assert job.proved() == ([5], 5)
            assert job.programs.shares.refused() == refused
            # What is left of a process that has ended is given back with it.
            job.cuda.forget_processes({greedy.pid, modest.pid})
            job.programs.shares.flush()
            for left in taken_and_freed(job.programs.shares).values():
                held = dict(zip(SHARED_TABLES, left, strict=False))
                assert not any(count for table, count in held.items() if table.startswith("cuda"))


def test_the_next_stream_with_a_handle_is_not_taken_to_be_proved_by_the_last_ones_events(job: Job) -> None:
    job.run(A, STREAM)
    job.record(EVENT, STREAM)
    job.caller.call("cudaStreamDestroy", 1, STREAM, 0)
    job.run(A, STREAM)
    job.ask(EVENT)
    assert job.proved() == ([1], 1)
    job.wait_for(STREAM)
    assert job.proved() == ([2], 2)


def test_forgetting_a_communicator_leaves_the_others_of_its_stream_provable(job: Job) -> None:
    job.run(A, STREAM)
    job.run(B, STREAM)
    job.wait_for(STREAM)
    first, _ = job.instances()
    job.cuda.forget_communicators({first})
    job.run(B, STREAM)
    job.wait_for(STREAM)
    assert job.proved() == ([2], 3)


def test_handles_that_were_forgotten_prove_nothing(job: Job) -> None:
    job.run(A, STREAM)
    job.record(EVENT, STREAM)
    job.cuda.forget_handles()
    job.ask(EVENT)
    job.wait_for(STREAM)
    assert job.proved() == ([], 0)


def test_a_process_that_was_forgotten_begins_anew(job: Job) -> None:
    job.run(A, STREAM)
    job.record(EVENT, STREAM)
    job.cuda.forget_processes({job.caller.pid})
    job.ask(EVENT)
    assert job.proved() == ([], 0)
    job.run(A, STREAM)
    job.wait_for(STREAM)
    assert job.proved() == ([2], 1)


def test_the_legacy_stream_proves_nothing_once_two_devices_have_one(job: Job) -> None:
    comms = [
        forge_communicator(
            job.caller, LAYOUT_OF_COMMUNICATORS, 4096, {"comm_hash": 5, "rank": 0, "nranks": 2, "cuda_dev": device}
        )
        for device in (0, 0, 1)
    ]
    for comm in comms[:2]:
        job.run(comm, 0)
    job.wait_for(0)
    assert job.proved() == ([1, 1], 2)
    job.run(comms[2], 0)
    job.wait_for(0)
    job.run(comms[0], 0)
    job.wait_for(0)
    assert job.proved() == ([1, 1], 2)


def test_the_legacy_stream_proves_nothing_of_communicators_whose_device_is_not_known(job: Job) -> None:
    identity = {"comm_hash": 5, "rank": 0, "nranks": 2, "cuda_dev": 1}
    end_magic = LAYOUT_OF_COMMUNICATORS.end_magic
    assert end_magic is not None
    unreadable, other = (forge_communicator(job.caller, LAYOUT_OF_COMMUNICATORS, 4096, identity) for _ in range(2))
    for comm in (unreadable, other):
        job.caller.store(comm + end_magic, 0, 8)
        job.run(comm, 0)
    job.wait_for(0)
    assert job.proved() == ([], 0)
    job.caller.store(other + end_magic, MAGIC, 8)
    job.run(other, 0)
    job.wait_for(0)
    assert job.proved() == ([2], 2)


def test_while_an_event_is_being_recorded_questions_are_answered_for_its_record_before(job: Job) -> None:
    job.run(A, STREAM)
    let_return = job.record_slowly(EVENT, STREAM)
    job.ask(EVENT)
    assert job.proved() == ([], 0)
    let_return()
    job.caller.finish()
    job.ask(EVENT)
    assert job.proved() == ([1], 1)


def test_an_event_that_two_threads_record_at_once_proves_nothing(job: Job) -> None:
    """What the first one's return says is not said of the second one's record, which is not done."""
    job.run(A, STREAM)
    first_returns = job.record_slowly(EVENT, STREAM)
    second_returns = job.record_slowly(EVENT, STREAM)
    returns = job.cuda.stats()[CudaStat.RETURNS]
    first_returns()
    while job.cuda.stats()[CudaStat.RETURNS] == returns:
        time.sleep(0.001)
    job.ask(EVENT)
    assert job.proved() == ([], 0)
    second_returns()
    job.caller.finish()
    job.ask(EVENT)
    assert job.proved() == ([], 0)


def test_a_plan_that_cannot_be_read_is_taken_for_captured(job: Job) -> None:
    job.enqueue(A, STREAM)
    job.caller.call(LIBRARY_PROGRAMS["cuda_plan"], 1, A, 16)
    job.finish(A)
    job.wait_for(STREAM)
    assert job.proved() == ([], 0)
    job.run(A, STREAM)
    job.wait_for(STREAM)
    assert job.proved() == ([2], 1)


def test_of_many_communicators_on_one_stream_eight_are_followed_and_the_others_counted(job: Job) -> None:
    comms = [A + 0x100 * n for n in range(9)]
    for comm in comms:
        job.run(comm, STREAM)
    job.wait_for(STREAM)
    assert job.proved() == ([1] * 8, 8)
    assert job.cuda.stats()[CudaStat.FULL] == 1
    job.run(comms[0], STREAM)
    job.run(comms[8], OTHER_STREAM)
    job.wait_for(STREAM)
    job.wait_for(OTHER_STREAM)
    assert job.proved() == ([2, *[1] * 7, 2], 11)


def test_a_duration_is_from_the_call_to_the_proof(job: Job) -> None:
    begin_ns = time.monotonic_ns()
    job.run(A, STREAM, calls=3)
    launched_ns = time.monotonic_ns()
    asked_ns = time.monotonic_ns()
    job.wait_for(STREAM)
    end_ns = time.monotonic_ns()
    total_ns = int(job.cuda.durations()[Op.AllReduce]["sum"])
    assert 3 * (asked_ns - launched_ns) <= total_ns <= 3 * (end_ns - begin_ns)


@pytest.mark.parametrize("job", MODES, indirect=True)
def test_a_question_that_never_returned_is_not_answered_by_the_next_one(job: Job) -> None:
    job.run(A, STREAM)
    job.record(EVENT, STREAM)
    job.caller.call("never_returned_to", 1, EVENT)
    job.ask(OTHER_EVENT, function="cudaEventSynchronize")
    assert job.proved() == ([], 0)
    job.ask(EVENT)
    assert job.proved() == ([1], 1)


def test_questions_about_a_stream_of_which_all_is_proved_do_not_trap_their_return(job: Job) -> None:
    job.run(A, STREAM)
    for _ in range(5):
        job.wait_for(STREAM)
    assert job.proved() == ([1], 1)
    assert job.cuda.stats()[CudaStat.RETURNS] == 1
    job.run(A, STREAM)
    job.wait_for(STREAM)
    assert job.cuda.stats()[CudaStat.RETURNS] == 2


def test_the_next_communicator_at_an_address_begins_with_nothing_proved_and_an_empty_group(job: Job) -> None:
    job.run(A, STREAM, calls=2)
    job.wait_for(STREAM)
    for stream in (STREAM, OTHER_STREAM):
        job.enqueue(A, stream)
    job.plan(A, captured=True)
    job.caller.call("ncclCommDestroy", 1, A, 0)
    job.run(A, STREAM)
    assert job.proved() == ([], 2)
    job.wait_for(STREAM)
    assert job.proved() == ([1], 3)


def test_what_was_proved_of_nobody_known_is_nobodys(job: Job) -> None:
    job.run(A, STREAM)
    job.wait_for(STREAM)
    keys, values = (rows.copy() for rows in Map.read(job.cuda._communicators))
    values["value"]["instance"] = 0
    job.cuda._communicators.update(keys.tobytes(), values.tobytes())
    assert job.proved() == ([], 1)


def test_the_next_communicator_at_an_address_may_come_while_the_last_one_is_forgotten(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.run(A, STREAM)
    job.wait_for(STREAM)
    (last,) = job.cuda.progress()

    def delete_later(table: Map, chosen: Callable[[Records, Records], Any]) -> None:
        if job.cuda.progress():  # what is to go was chosen, and nothing is deleted yet
            job.caller.call("ncclCommDestroy", 1, A, 0)
            job.run(A, STREAM)
        delete_where(table, chosen)

    monkeypatch.setattr("railscope.probes.nccl.programs.cuda.delete_where", delete_later)
    job.cuda.forget_communicators({last})
    job.wait_for(STREAM)
    assert job.proved() == ([1], 2)
