"""Iterations, found in recorded datasets without hints.  All jobs are simulated."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.compare.compare import values_of
from railscope.agent.analysis.compare.figures import side_of
from railscope.agent.analysis.facts.report import Iteration, Regularity, Unknown
from railscope.agent.analysis.report.html import html_text
from railscope.agent.analysis.report.report import report_of
from railscope.agent.analysis.report.report_json import as_json
from railscope.agent.analysis.report.text import as_text
from railscope.agent.analysis.report.words import summarise
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.timing.iterations import find_iterations
from railscope.agent.model.mapping import default_mapping
from railscope.agent.model.shape import Shape
from tests.unit.datasets import BEGAN_NS, JobDataset, gpt_job
from tests.unit.timed_jobs import BUCKETS, MS, ddp, evaluated, inference, moe, pipeline

Found = tuple[Regularity | None, tuple[Iteration, ...], tuple[Unknown, ...]]


def found_in(job: JobDataset) -> Found:
    dataset = job.open()
    return find_iterations(dataset, find_gpus(dataset))


def regularity_of(job: JobDataset) -> Regularity:
    regularity, iterations, unknown = found_in(job)
    assert regularity is not None
    assert regularity.iterations == len(iterations)
    assert not unknown
    return regularity


def test_calls_without_a_time_are_in_no_iteration_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = found_in(ddp(tmp_path / "whole", iterations=10))
    job = ddp(tmp_path / "some", iterations=10)
    job.communicator("untimed", (1,))
    for _ in range(500):
        job.row(0, "calls", instance=3, op="Broadcast", payload_bytes=8, time_ns=None)
    assert found_in(job) == whole
    assert "500 of the calls have no time: they belong to no iteration" in caplog.text


def test_a_job_none_of_whose_calls_has_a_time_has_no_iterations(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (1,))
    job.communicator("aa", (0,))
    for _ in range(50):
        job.row(0, "calls", instance=1, op="Broadcast", payload_bytes=8, time_ns=None)
    regularity, iterations, (unknown,) = found_in(job)
    assert (regularity, iterations) == (None, ())
    assert unknown.row == 9


def test_a_period_of_half_a_second_is_found_through_warm_up_and_jitter(tmp_path: Path) -> None:
    regularity, iterations, _ = found_in(ddp(tmp_path, iterations=40))
    assert regularity is not None
    assert regularity.period_seconds == pytest.approx(0.5, rel=0.03)
    assert regularity.iterations == 38  # of 40: the first sends its gradients at once, the last one's end is not known
    assert regularity.recurrence == 1.0
    assert regularity.calls_per_iteration == 6
    assert regularity.spread is not None
    assert 0 < regularity.spread < 0.1
    assert [one.to_ns for one in iterations[:-1]] == [one.from_ns for one in iterations[1:]]
    # Seconds since 1970 as a float are good to a quarter of a microsecond.
    for one, following in pairwise(iterations):
        assert one.start + one.period_seconds == pytest.approx(following.start, abs=1e-6)


def test_calls_that_come_now_and_then_are_no_part_of_the_pattern(tmp_path: Path) -> None:
    regularity = regularity_of(ddp(tmp_path, iterations=41, log_every=10, checkpoint_every=20))
    assert regularity.period_seconds == pytest.approx(0.5, rel=0.03)
    assert regularity.calls_per_iteration == 6
    assert regularity.recurrence == pytest.approx(35 / 39)


def test_evaluations_between_are_told_apart_and_are_in_no_figure_of_iterations(tmp_path: Path) -> None:
    job = evaluated(tmp_path)
    report = report_of(job.open())
    regularity = report.regularity
    assert regularity is not None
    assert regularity.iterations == 199
    assert len(report.iterations) == 195
    assert regularity.period_seconds == pytest.approx(0.5)
    assert {round(one.period_seconds, 6) for one in report.iterations} == {0.5}
    assert (regularity.recurrence, regularity.calls_per_iteration) == (1.0, 6)
    # Six of 15 ms, and the gaps of 5 ms between them; the evaluation is busy nearly all the time.
    assert regularity.duty_cycle == pytest.approx(115 / 500)
    assert {round(one.comm_ratio or 0.0, 6) for one in report.iterations} == {90 / 500}
    between = regularity.between
    assert between is not None
    assert (between.stretches, between.calls) == (4, 80)
    assert between.seconds == pytest.approx(20.0)
    assert between.mean_seconds == pytest.approx(5.0)
    assert between.share == pytest.approx(20 / (195 * 0.5 + 4 * 5.5))
    assert regularity.before_seconds == 0.0
    assert regularity.behind_seconds == pytest.approx(5.0, abs=0.5)


def test_what_is_said_of_evaluations_between(tmp_path: Path) -> None:
    report = report_of(evaluated(tmp_path).open())
    told = (
        "Between iterations lie 4 stretches of other calls (evaluation, checkpoint): 20 s, 16.7 % of the time, 5 s "
        "each on average; they are in no figure of iterations."
    )
    assert told in summarise(report)
    text = " ".join(as_text(report).split())
    assert "Iterations (199, of 6 calls each)" in text
    assert told in text
    page = html_text(report)
    assert told in page
    assert "4 stretches, mean 5 s, 80 calls of GPU 0" in page
    between = as_json(report)["regularity"]["between"]
    assert between["stretches"] == 4
    assert between["share"] == pytest.approx(20 / 119.5)


@pytest.mark.parametrize("batches", [20, 2000])
def test_an_evaluation_before_the_first_step_is_said_to_be_there(tmp_path: Path, batches: int) -> None:
    report = report_of(evaluated(tmp_path, phases=1, steps=30, batches=batches, before=True).open())
    regularity = report.regularity
    assert regularity is not None
    assert regularity.iterations == len(report.iterations) == 29
    assert regularity.between is None
    assert regularity.before_seconds == pytest.approx(5.2, abs=0.1)
    assert any("before the first iteration" in sentence for sentence in summarise(report))


def test_what_lies_between_counts_in_no_figure_of_an_iteration(tmp_path: Path) -> None:
    side = side_of(evaluated(tmp_path).open(), "A")
    assert side.iterations == 195
    assert [(use.op, use.calls, use.payload_bytes) for use in side.ops] == [
        ("AllReduce", 2 * 195 * 6, 2 * 195 * sum(BUCKETS))
    ]
    values = {value.name: value.value for value in values_of(side, set(), by_iteration=True)}
    assert values["AllReduce calls an iteration"] == 12
    assert values["other calls between iterations"] == pytest.approx(20 / 119.5)
    assert values["mean stretch of other calls"] == pytest.approx(5.0)


def test_micro_batches_that_may_be_steps_are_said_to_be_there(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (1,))
    job.communicator("tp", (0,))
    job.communicator("dp", (0,))
    at = BEGAN_NS
    for _ in range(6):
        for _ in range(16):
            at += 50 * MS
            job.call("tp", 0, "Broadcast", 5 << 20, time_ns=at)
            for _ in range(8):
                for op, size in (("AllReduce", 20 << 20), ("AllGather", 10 << 20)):
                    job.call("tp", 0, op, size, time_ns=at)
                    at += 2 * MS
        job.call("dp", 0, "AllReduce", 700 << 20, time_ns=at)
        at += 100 * MS
    regularity = regularity_of(job)
    assert regularity.iterations == 5
    assert regularity.calls_per_iteration == 16 * 17 + 1
    assert "Each iteration holds 16 equal stretches of them" in regularity.basis


def test_an_iteration_of_a_pipeline_is_found(tmp_path: Path) -> None:
    regularity = regularity_of(pipeline(tmp_path, iterations=5))
    assert regularity.iterations == 4
    assert regularity.recurrence == 1.0
    assert regularity.spread == 0.0
    assert regularity.gpu == 1  # makes as many calls as GPU 2, and more than the first and the last stage
    assert regularity.calls_per_iteration == 4 * 8 + 1


def test_an_iteration_of_a_job_of_three_kinds_of_parallelism_is_found(tmp_path: Path) -> None:
    shape = Shape(
        layers=8,
        hidden=256,
        sequence=128,
        vocabulary=1000,
        global_batch=16,
        micro_batch=2,
        pipeline=2,
        tensor=2,
        data=2,
    )
    job = gpt_job(tmp_path, shape, default_mapping(shape), 4, iterations=5)
    regularity = regularity_of(job)
    assert regularity.iterations == 4
    assert regularity.recurrence == 1.0


def test_uneven_all_to_alls_recur_without_their_sizes(tmp_path: Path) -> None:
    job, _ = moe(tmp_path, iterations=8)
    regularity = regularity_of(job)
    assert regularity.period_seconds == 0.4
    assert regularity.iterations == 7
    assert regularity.recurrence == pytest.approx(1 / 7)
    assert regularity.recurrence_without_sizes == 1.0
    assert "sizes" in regularity.basis


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_inference_with_random_requests_is_declined_with_a_reason(tmp_path: Path, seed: int) -> None:
    regularity, iterations, unknown = found_in(inference(tmp_path, seed=seed))
    assert regularity is None
    assert iterations == ()
    assert [one.row for one in unknown] == [9]
    assert "there is no period" in unknown[0].reason


def test_calls_of_one_kind_are_counted_as_one(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("aa", (0, 1))
    at, random = 0, Random(1)
    for _ in range(200):
        at += random.randrange(1, 1000) * MS
        job.call("aa", 0, "AllReduce", 1 << 20, time_ns=BEGAN_NS + at)
    (unknown,) = found_in(job)[2]
    assert unknown.reason.startswith("The 200 calls of GPU 0 (1 kind of call) repeat neither in order")


def test_without_calls_the_reason_is_said(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("aa", (0, 1))
    assert found_in(job)[0] is None
    assert found_in(job)[2][0].reason.startswith("No call was recorded")


def test_operations_stand_in_for_calls_that_were_not_recorded(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("aa", (0, 1))
    for iteration in range(6):
        for place in range(3):
            job.operation("aa", 0, "AllReduce", (place + 1) << 20, iteration * 100 * MS + place * 20 * MS, 10 * MS)
    regularity = regularity_of(job)
    assert regularity.period_seconds == pytest.approx(0.1)
    assert regularity.iterations == 5
    assert regularity.duty_cycle == pytest.approx(0.3)


def test_duty_cycle_is_of_operations_and_calls_alone_have_none(tmp_path: Path) -> None:
    by_calls = regularity_of(ddp(tmp_path / "calls", iterations=20, jitter=0))
    by_operations = regularity_of(ddp(tmp_path / "operations", iterations=20, jitter=0, operations=True))
    # Six buckets 20 ms apart: 100 ms from the first call to the last, and 15 ms of the last bucket.
    assert by_calls.duty_cycle is None
    assert by_operations.duty_cycle == pytest.approx(0.230, abs=0.005)


def test_the_window_of_an_iteration_begins_in_the_silence_before_it(tmp_path: Path) -> None:
    _, iterations, _ = found_in(pipeline(tmp_path, iterations=4))
    begins = [round(one.start * 1e9) for one in iterations]
    assert all(one.from_ns < begin for one, begin in zip(iterations, begins, strict=True))
    assert all(one.to_ns > one.from_ns for one in iterations)


@given(seed=st.integers(0, 1000))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_order_of_rows_makes_no_difference(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    plain = found_in(ddp(tmp_path_factory.mktemp("plain"), iterations=8, log_every=3))
    assert found_in(ddp(tmp_path_factory.mktemp("shuffled"), iterations=8, log_every=3, shuffle=seed)) == plain
    assert plain[1][0].from_ns > BEGAN_NS
