"""What receives do: transfer, or wait.  All jobs are simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from railscope.agent.analysis.facts.report import ReceiveUse, Unknown
from railscope.agent.analysis.tables import size_classes
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.timing.iterations import find_iterations
from railscope.agent.analysis.timing.receives import find_receives
from railscope.agent.dataset.reader import Dataset
from tests.unit.datasets import JobDataset
from tests.unit.timed_jobs import MS, ddp, pipeline

MIB = 1 << 20


def receives_of(job: JobDataset) -> tuple[tuple[ReceiveUse, ...], tuple[Unknown, ...]]:
    dataset = job.open()
    gpus = find_gpus(dataset)
    return find_receives(dataset, gpus, find_iterations(dataset, gpus)[1])


def test_transfer_is_what_the_fastest_of_this_size_take_and_the_rest_is_waiting(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("pp", (0, 1))
    for place in range(50):
        job.operation("pp", 1, "Recv", MIB, place * 100 * MS, (2 if place % 2 else 12) * MS, peer=0)
        job.operation("pp", 1, "Recv", 4 * MIB, place * 100 * MS + 50 * MS, 8 * MS, peer=0)
    (use,), unknown = receives_of(job)
    assert not unknown
    assert use.gpu == 1
    assert use.active_seconds == pytest.approx(50 * 0.002 + 50 * 0.008)
    assert use.idle_seconds == pytest.approx(25 * 0.010)


def test_timed_receives_without_a_payload_are_not_said_to_be_untimed(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("pp", (0, 1))
    job.operation("pp", 1, "Recv", None, 0, 2 * MS, peer=0)
    uses, (unknown,) = receives_of(job)
    assert uses == ()
    assert unknown.reason.startswith("Recvs have times, but their sizes were not observed")


def test_the_bubble_of_a_pipeline_is_near_what_its_shape_says(tmp_path: Path) -> None:
    stages, micro_batches = 4, 8
    uses, _ = receives_of(pipeline(tmp_path, stages, micro_batches, iterations=6, transfer_ns=MS // 10))
    assert [use.gpu for use in uses] == [0, 1, 2, 3]
    # A stage receives 8 or 16 times in each of 6 iterations.
    assert [round(use.active_seconds, 6) for use in uses] == [0.0048, 0.0096, 0.0096, 0.0048]
    # The first stage waits for gradients as long as fill and drain take, but for the share of the gradient AllReduce
    # and the optimizer in the iteration; the last stage waits at the beginning only.
    ideal = (stages - 1) / (stages - 1 + micro_batches)
    computing = 3 * 10 * (micro_batches + stages - 1)
    assert uses[0].bubble_ratio == pytest.approx(ideal * computing / (computing + 130), abs=0.02)
    ratios = [use.bubble_ratio for use in uses]
    assert ratios == sorted(ratios, reverse=True, key=lambda ratio: ratio or 0)
    assert all(ratio is not None and 0 <= ratio <= 1 for ratio in ratios)


def test_receives_at_the_same_time_count_once(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("pp", (0, 1, 2))
    for place in range(40):
        job.operation("pp", 2, "Recv", MIB, place * 100 * MS, 2 * MS, peer=0)
    for peer in (0, 1):
        job.operation("pp", 2, "Recv", MIB, 5000 * MS, 52 * MS, peer=peer)
    (use,), _ = receives_of(job)
    assert use.active_seconds == pytest.approx(41 * 0.002)
    assert use.idle_seconds == pytest.approx(0.050)


def test_without_iterations_there_is_no_bubble_ratio(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("pp", (0, 1))
    job.operation("pp", 1, "Recv", MIB, 0, MS, peer=0)
    dataset = job.open()
    (use,), _ = find_receives(dataset, find_gpus(dataset))
    assert use.bubble_ratio is None


def test_a_job_without_timed_receives_says_so(tmp_path: Path) -> None:
    uses, unknown = receives_of(ddp(tmp_path, iterations=4, operations=True))
    assert uses == ()
    assert [one.row for one in unknown] == [16]


def test_the_order_of_rows_makes_no_difference(tmp_path: Path) -> None:
    plain = receives_of(pipeline(tmp_path / "plain", iterations=4))
    assert receives_of(pipeline(tmp_path / "shuffled", iterations=4, shuffle=3)) == plain


def test_one_scan_is_enough_for_any_number_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    usual = Dataset.rows

    def rows(dataset: Dataset, expression: Any) -> pa.Table:
        asked.append(expression)
        return usual(dataset, expression)

    monkeypatch.setattr(Dataset, "rows", rows)
    numbers = []
    for ranks in (2, 9):
        job = JobDataset(tmp_path / str(ranks), servers=(ranks,))
        job.communicator("pp", range(ranks))
        for rank in range(1, ranks):
            job.operation("pp", rank, "Recv", MIB, rank * MS, MS, peer=0)
        dataset = job.open()
        gpus = find_gpus(dataset)
        asked.clear()
        uses, _ = find_receives(dataset, gpus)
        assert [use.gpu for use in uses] == list(range(1, ranks))
        numbers.append(len(asked))
    assert numbers[0] == numbers[1]


def test_receives_of_ever_other_sizes_are_held_against_the_fastest_of_like_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_classes, "MOST_SIZES", 10)
    job = JobDataset(tmp_path)
    job.communicator("pp", (0, 1))
    sizes = [MIB + 1000 * (place + 1) for place in range(100)]
    for place, size in enumerate(sizes):
        # One nanosecond a byte, and every other one waits 10 ms.
        job.operation("pp", 1, "Recv", size, place * 100 * MS, size + (10 * MS if place % 2 else 0), peer=0)
    (use,), _ = receives_of(job)
    assert use.active_seconds == pytest.approx(sum(sizes) / 1e9)
    assert use.idle_seconds == pytest.approx(50 * 0.010)


def test_receives_that_were_called_are_not_said_to_be_none(tmp_path: Path) -> None:
    job = JobDataset(tmp_path / "called")
    job.communicator("pp", (0, 1))
    job.call("pp", 1, "Recv", MIB, peer=0, times=4096)
    _, (unknown,) = receives_of(job)
    assert unknown.reason.startswith("4,096 Recvs were called, and none has times: record at level completion")
    job.operation("pp", 1, "SendRecv", None, 0, 2 * MS, source="kernel")
    _, (unknown,) = receives_of(job)
    assert unknown.reason.startswith("1 kernel sent and received at once")
    none = JobDataset(tmp_path / "none")
    none.communicator("dp", (0, 1))
    none.collective("dp", "AllReduce", MIB)
    _, (unknown,) = receives_of(none)
    assert unknown.reason == "No Recv was called: a job without pipeline stages has none."


def test_what_is_received_between_iterations_is_in_no_mean_of_an_iteration(tmp_path: Path) -> None:
    dataset = pipeline(tmp_path, 4, 8, iterations=6, transfer_ns=MS // 10).open()
    gpus = find_gpus(dataset)
    iterations = find_iterations(dataset, gpus)[1]
    uses, _ = find_receives(dataset, gpus, iterations[1:3])
    assert [round(use.iteration_active_seconds or 0.0, 6) for use in uses] == [0.0008, 0.0016, 0.0016, 0.0008]
    length = sum(one.to_ns - one.from_ns for one in iterations[1:3]) / 1e9
    for use in uses:
        assert use.iteration_idle_seconds == pytest.approx((use.bubble_ratio or 0.0) * length / 2)
    assert find_receives(dataset, gpus)[0][0].iteration_active_seconds is None
