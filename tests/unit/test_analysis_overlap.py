"""Communication time and what of it is not hidden by computing.  All jobs are simulated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.facts.report import Iteration, Unknown
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.timing.iterations import find_iterations
from railscope.agent.analysis.timing.overlap import find_overlap, find_role_times
from railscope.agent.dataset.reader import Dataset
from tests.unit.datasets import BEGAN_NS, JobDataset
from tests.unit.timed_jobs import MS, ddp, pipeline


def told(dataset: Dataset, iterations: Sequence[Iteration]) -> tuple[tuple[Iteration, ...], tuple[Unknown, ...]]:
    """The iterations with what is known of them, and what is not."""
    overlap = find_overlap(dataset, find_gpus(dataset), iterations)
    return overlap.iterations, overlap.unknown


def overlap_of(job: JobDataset) -> tuple[tuple[Iteration, ...], tuple[Unknown, ...]]:
    dataset = job.open()
    return told(dataset, find_iterations(dataset, find_gpus(dataset))[1])


def one_iteration(from_ns: int, to_ns: int) -> Iteration:
    return Iteration(
        start=(BEGAN_NS + from_ns) / 1e9,
        period_seconds=(to_ns - from_ns) / 1e9,
        comm_seconds=None,
        comm_ratio=None,
        non_overlapped_seconds=None,
        non_overlapped_ratio=None,
        all_to_all=None,
        from_ns=BEGAN_NS + from_ns,
        to_ns=BEGAN_NS + to_ns,
    )


def test_communication_and_its_hidden_part_come_out_as_they_were_made(tmp_path: Path) -> None:
    iterations, unknown = overlap_of(ddp(tmp_path, iterations=10, jitter=0, operations=True))
    assert not unknown
    assert len(iterations) == 8
    for one in iterations[:-1]:
        # Six buckets of 15 ms; kernels cover the first 10 ms of each, and of all but the first bucket the last 5 ms, as
        # the next kernel begins 10 ms before its bucket.
        assert one.comm_seconds == pytest.approx(0.090)
        assert one.comm_ratio == pytest.approx(0.18, rel=0.01)
        assert one.non_overlapped_seconds == pytest.approx(0.005)
        assert one.non_overlapped_ratio == pytest.approx(0.01, rel=0.01)


def test_computing_is_the_union_of_kernels_and_idle_time_is_none_of_it(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("aa", (0, 1))
    job.operation("aa", 0, "AllReduce", 1 << 20, 0, 30 * MS, source="cuda")
    # 5–25 and 60–70, what two kernels do at the same time once; the last one lies in both iterations.
    for begin, took in ((5, 20), (10, 10), (60, 10), (95, 15)):
        job.compute(0, begin * MS, took * MS)
    dataset = job.open()
    (one, two), unknown = told(dataset, (one_iteration(0, 100 * MS), one_iteration(100 * MS, 200 * MS)))
    assert not unknown
    assert one.compute_seconds == pytest.approx(0.035)
    assert two.compute_seconds == pytest.approx(0.010)


def test_operations_at_the_same_time_count_once(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("aa", (0, 1))
    for begin, took in ((0, 40), (10, 10), (30, 30), (90, 30)):
        job.operation("aa", 0, "AllReduce", 1 << 20, begin * MS, took * MS, source="cuda")
    dataset = job.open()
    (one, two), _ = told(dataset, (one_iteration(0, 100 * MS), one_iteration(100 * MS, 200 * MS)))
    assert one.comm_seconds == pytest.approx(0.070)  # 0–60 and 90–100: what is longer than the iteration is cut
    assert one.comm_ratio == pytest.approx(0.70)
    assert two.comm_seconds == pytest.approx(0.020)


def test_the_gpu_that_communicates_longest_speaks_for_all_iterations(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("aa", (0, 1))
    for rank, begin, took in ((0, 0, 30), (1, 0, 10), (1, 100, 50)):
        job.operation("aa", rank, "AllReduce", 1 << 20, begin * MS, took * MS, source="cuda")
    dataset = job.open()
    found, _ = told(dataset, (one_iteration(0, 100 * MS), one_iteration(100 * MS, 200 * MS)))
    assert [one.comm_seconds for one in found] == [pytest.approx(0.010), pytest.approx(0.050)]


def test_operations_at_the_same_time_make_no_gpu_the_busiest(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("aa", (0, 1))
    # The first GPU's add up to 90 ms and are under way for 40, the second one's for 50; what lies outside is neither's.
    for rank, begin, took in ((0, 0, 40), (0, 5, 30), (0, 10, 20), (1, 0, 25), (1, 50, 25), (0, 300, 90)):
        job.operation("aa", rank, "AllReduce", 1 << 20, begin * MS, took * MS, source="cuda")
    dataset = job.open()
    (found,), _ = told(dataset, (one_iteration(0, 100 * MS),))
    assert found.comm_seconds == pytest.approx(0.050)


def test_calls_alone_have_no_duration(tmp_path: Path) -> None:
    iterations, unknown = overlap_of(ddp(tmp_path, iterations=6))
    assert iterations
    assert {one.comm_seconds for one in iterations} == {None}
    assert [one.row for one in unknown] == [11, 12]
    assert all("level completion" in one.reason for one in unknown)


def test_without_recorded_kernels_nobody_knows_what_is_hidden(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("aa", (0, 1))
    job.operation("aa", 0, "AllReduce", 1 << 20, 0, MS, source="cuda")
    dataset = job.open()
    (one,), unknown = told(dataset, (one_iteration(0, 100 * MS),))
    assert one.comm_ratio == pytest.approx(0.01)
    assert one.non_overlapped_seconds is None
    assert one.compute_seconds is None
    assert [one.row for one in unknown] == [12]
    assert "Kineto" in unknown[0].reason


def test_times_of_network_threads_are_said_to_lack_what_stays_inside_a_server(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("aa", (0, 1, 2, 3))
    job.operation("aa", 0, "AllReduce", 1 << 20, 0, MS, source="proxy")
    dataset = job.open()
    _, unknown = told(dataset, (one_iteration(0, 100 * MS),))
    assert [one.row for one in unknown] == [11, 12]
    assert "inside a server" in unknown[0].reason


def test_kernels_of_a_process_with_several_gpus_are_nobodys(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("aa", (0, 1), pid=77)
    job.operation("aa", 0, "AllReduce", 1 << 20, 0, MS, source="cuda")
    job.compute(0, 0, MS)
    dataset = job.open()
    (one,), unknown = told(dataset, (one_iteration(0, 100 * MS),))
    assert one.comm_seconds == pytest.approx(0.001)
    assert one.non_overlapped_seconds is None
    assert "one process per GPU" in unknown[0].reason


def test_kernels_where_nobody_names_the_process_are_nobodys_and_the_reason_says_so(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("aa", (0, 1), pid=None)
    job.operation("aa", 0, "AllReduce", 1 << 20, 0, MS, source="cuda")
    job.compute(0, 0, MS)
    dataset = job.open()
    (one,), (unknown,) = told(dataset, (one_iteration(0, 100 * MS),))
    assert one.non_overlapped_seconds is None
    assert unknown.row == 12
    assert "The process that drives the GPU" in unknown.reason
    assert "several GPUs" not in unknown.reason


def test_a_pipeline_hides_nothing_of_its_receives(tmp_path: Path) -> None:
    iterations, _ = overlap_of(pipeline(tmp_path, iterations=5))
    for one in iterations:
        assert one.comm_seconds == pytest.approx(one.non_overlapped_seconds)
        assert one.comm_ratio is not None
        assert 0 < one.comm_ratio < 1


@given(
    operations=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 190), st.integers(0, 60)), min_size=1, max_size=12),
    kernels=st.lists(st.tuples(st.integers(0, 190), st.integers(1, 60)), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_union_is_at_most_its_parts_and_no_order_changes_it(
    tmp_path_factory: pytest.TempPathFactory,
    operations: list[tuple[int, int, int]],
    kernels: list[tuple[int, int]],
    seed: int,
) -> None:
    windows = (one_iteration(0, 80 * MS), one_iteration(80 * MS, 200 * MS))
    found = []
    for shuffled in (False, True):
        job = JobDataset(tmp_path_factory.mktemp("job"))
        job.communicator("aa", (0, 1))
        if shuffled:
            random.Random(seed).shuffle(operations)
        for rank, begin, took in operations:
            job.operation("aa", rank, "AllReduce", 1 << 20, begin * MS, took * MS, source="cuda")
        for begin, took in kernels:
            for gpu in range(2):
                job.compute(gpu, begin * MS, took * MS)
        dataset = job.open()
        found.append(told(dataset, windows))
    assert found[0] == found[1]
    for one in found[0][0]:
        assert one.comm_seconds is not None
        assert one.comm_ratio is not None
        assert one.non_overlapped_seconds is not None
        assert 0 <= one.comm_ratio <= 1
        assert (
            0 <= one.non_overlapped_seconds <= one.comm_seconds <= sum(took for _, _, took in operations) / 1000 + 1e-9
        )


def test_time_is_told_by_parallelism_and_of_each_kind_what_is_not_overlapped(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    for comm in ("tp", "dp", "other"):
        job.communicator(comm, (0, 1))
    job.communicator("idle", (0, 1))
    # The tensor groups' two operations are at the same time for 10 ms; the replicas' is under way beside them.
    for comm, begin, took in (("tp", 0, 20), ("tp", 10, 20), ("dp", 20, 40), ("other", 120, 10)):
        job.operation(comm, 0, "AllReduce", 1 << 20, begin * MS, took * MS, source="cuda")
    job.compute(0, 25 * MS, 25 * MS)
    dataset = job.open()
    gpus = find_gpus(dataset)
    windows = (one_iteration(0, 100 * MS), one_iteration(100 * MS, 200 * MS))
    overlap = find_overlap(dataset, gpus, windows)
    found = find_role_times(dataset, gpus, overlap, {"tp": "tp", "dp": "dp", "idle": "ep"})
    assert [(one.gpu, one.role) for one in found] == [(0, "dp"), (0, "tp"), (0, "unknown")]
    assert [one.seconds for one in found] == [pytest.approx(value) for value in (0.020, 0.015, 0.005)]
    assert [one.ratio for one in found] == [pytest.approx(value) for value in (0.20, 0.15, 0.05)]
    # 20 to 25 and 50 to 60 of the replicas', 0 to 25 of the tensor groups' lie outside the kernel.
    assert [one.non_overlapped_seconds for one in found] == [pytest.approx(value) for value in (0.0075, 0.0125, 0.005)]
    assert find_role_times(dataset, gpus, overlap._replace(busiest=None), {}) == ()
