"""Weak and strong scaling: both factors, and which of them applies.  All jobs are simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from railscope.agent.analysis.facts.report import Regularity
from railscope.agent.analysis.report.html import html_text
from railscope.agent.analysis.report.report import ReportOptions, make_report, make_runs
from railscope.agent.analysis.report.scaling import Run, find_scaling, run_of, why_not_comparable, why_unlike
from railscope.agent.analysis.report.text import as_text
from railscope.agent.model.mapping import default_mapping
from railscope.agent.model.shape import Shape
from tests.unit.datasets import SECOND_NS, JobDataset, gpt_job
from tests.unit.timed_jobs import BUCKETS, evaluated

SMALL = ReportOptions(memory_bytes=500_000_000)
SHAPE = Shape(
    layers=4,
    hidden=64,
    sequence=64,
    vocabulary=300,
    global_batch=16,
    micro_batch=2,
    pipeline=2,
    tensor=2,
    data=2,
)


def run(name: str, gpus: int, period: float | None, work: Mapping[str, float] | None = None) -> Run:
    regularity = None if period is None else Regularity(period, None, 1.0, 5, 10)
    return Run(name, gpus, regularity, (2, 2), work or {})


def job(folder: Path, shape: Shape) -> Path:
    return gpt_job(folder, shape, default_mapping(shape), gpus_per_server=4, iterations=6).write()


def test_both_factors_are_the_papers() -> None:
    scaling = find_scaling([run("base", 8, 2.0), run("large", 32, 2.5), run("odd", 64, None)])
    assert [(one.name, one.iterations_per_second) for one in scaling] == [("base", 0.5), ("large", 0.4)]
    # Weak: (0.4 × 32 / 32) / (0.5 × 8 / 8); strong: (0.4 / 32) / (0.5 / 8).
    assert [one.weak_factor for one in scaling] == pytest.approx([1.0, 0.8])
    assert [one.strong_factor for one in scaling] == pytest.approx([1.0, 0.2])
    assert find_scaling([run("base", 8, None), run("large", 32, 2.5)]) == ()


def test_calls_of_evaluations_are_not_taken_for_iterations(tmp_path: Path) -> None:
    report = make_report([evaluated(tmp_path).write()], SMALL)
    assert run_of("evaluated", report).work_bytes == {"tp": sum(BUCKETS)}


def test_a_run_whose_iterations_were_not_found_is_not_said_to_be_another_job() -> None:
    known, unknown = run("long", 8, 2.0, {"tp": 100.0}), replace(run("short", 8, None), ops=frozenset({"AllReduce"}))
    assert why_unlike(known, unknown) == why_unlike(unknown, known) == ""
    other = replace(unknown, name="other", ops=frozenset({"Send"}))
    assert why_unlike(unknown, other) == "short calls AllReduce and other calls Send"


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        ({"tp": 100.0, "pp": 40.0}, "weak"),
        ({"tp": 103.0, "pp": 40.0}, "weak"),
        ({"tp": 25.0, "pp": 10.0}, "strong"),
        ({"tp": 25.0, "pp": 40.0}, None),
        ({"tp": 50.0, "pp": 20.0}, None),
        ({"tp": 100.0}, None),
        ({}, None),
    ],
)
def test_what_a_rank_hands_over_for_its_batch_tells_which_it_is(work: dict[str, float], kind: str | None) -> None:
    runs = [run("base", 8, 2.0, {"tp": 100.0, "pp": 40.0}), run("large", 32, 2.5, work)]
    first, second = find_scaling(runs)
    assert first.factor == 1.0
    assert second.kind == kind
    assert second.factor == {"weak": second.weak_factor, "strong": second.strong_factor, None: None}[kind]
    assert find_scaling([runs[0], replace(runs[1], grid=(4, 2))])[1].kind is None
    assert find_scaling(runs, "strong")[1].factor == second.strong_factor


@pytest.mark.parametrize(("batch", "kind"), [(32, "weak"), (16, "strong")])
def test_recordings_tell_whether_the_batch_grew(tmp_path: Path, batch: int, kind: str) -> None:
    folders = [
        job(tmp_path / "small", SHAPE),
        job(tmp_path / "large", replace(SHAPE, data=4, global_batch=batch)),
    ]
    report = make_runs(folders, SMALL)
    assert [one.kind for one in report.scaling] == [None, kind]
    assert not [one for one in report.unknown if one.row == 14]


def test_where_it_cannot_be_told_both_are_shown_with_their_names(tmp_path: Path) -> None:
    plain = replace(SHAPE, pipeline=1, tensor=1)
    folders = [
        job(tmp_path / "small", replace(plain, data=4)),
        job(tmp_path / "large", replace(plain, data=8)),
    ]
    report = make_runs(folders, SMALL)
    assert [one.factor for one in report.scaling] == [1.0, None]
    assert any("--scaling weak or --scaling strong" in one.reason for one in report.unknown if one.row == 14)
    (row,) = [line.split() for line in as_text(report).splitlines() if line.startswith("  large ")]
    assert row[-2:] == [f"{report.scaling[1].weak_factor:.3f}", f"{report.scaling[1].strong_factor:.3f}"]
    assert "weak factor" in html_text(report)
    said = make_runs(folders, replace(SMALL, scaling="strong"))
    assert said.scaling[1].factor == said.scaling[1].strong_factor
    assert not [one for one in said.unknown if one.row == 14]
    (row,) = [line.split() for line in as_text(said).splitlines() if line.startswith("  large ")]
    assert row[-2:] == ["–", f"{said.scaling[1].strong_factor:.3f}"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"work_bytes": {"tp": 100.0, "pp": 40.0}}, ""),
        ({"work_bytes": {"tp": 25.0, "pp": 10.0}}, ""),
        # The batch grew, but not as much as the GPUs.
        ({"work_bytes": {"tp": 50.0, "pp": 20.0}}, ""),
        ({"work_bytes": {"tp": 100.0}}, "has tensor parallel and pipeline parallel communication and large has tensor"),
        ({"work_bytes": {}}, "large has no tensor, pipeline or expert parallel communication"),
        ({"grid": (4, 1)}, "small has 2 × 2 pipeline and tensor ranks and large has 4 × 1"),
        (
            {"work_bytes": {"tp": 300.0, "pp": 40.0}},
            "hands over 100 B an iteration for tensor parallel, one of large 300 B",
        ),
        (
            {"work_bytes": {"tp": 10.0, "pp": 40.0}},
            "hands over 100 B an iteration for tensor parallel, one of large 10 B",
        ),
        ({"gradient_bytes": 1010.0}, ""),
        ({"gradient_bytes": 0.0}, ""),
        (
            {"gradient_bytes": 5000.0},
            "a rank of small reduces 1,000 B of gradients an iteration, one of large 4.88 KiB",
        ),
        ({"gpus": 8, "work_bytes": {}}, ""),
    ],
)
def test_runs_of_different_jobs_are_no_scaling(changed: dict[str, object], said: str) -> None:
    small = replace(run("small", 8, 2.0, {"tp": 100.0, "pp": 40.0}), gradient_bytes=1000.0)
    large = replace(small, **{"name": "large", "gpus": 32, **changed})  # type: ignore[arg-type]
    reason = why_not_comparable(small, large)
    assert said in reason
    assert bool(said) == bool(reason)
    assert bool(why_not_comparable(large, small)) == bool(reason)


def test_without_any_parallelism_only_operations_tell() -> None:
    small = replace(run("small", 8, 2.0), ops=frozenset({"Broadcast"}))
    assert why_not_comparable(small, replace(small, gpus=16)) == ""
    assert why_not_comparable(small, replace(small, name="large", gpus=16, ops=frozenset({"Reduce"}))) == (
        "small calls Broadcast and large calls Reduce"
    )


@pytest.mark.parametrize("op", ["AllReduce", "ReduceScatter"])
def test_gradients_of_a_model_are_as_large_among_more_replicas(tmp_path: Path, op: str) -> None:
    def of(name: str, replicas: int, parameters_bytes: int) -> Run:
        recorded = JobDataset(tmp_path / name, servers=(replicas,))
        recorded.communicator("dp", range(replicas))
        for _ in range(5):
            for layer in (1, 3):
                size = layer * parameters_bytes // 4
                recorded.collective("dp", op, size if op == "AllReduce" else size // replicas)
            recorded._now_ns += SECOND_NS
        return run_of(name, make_report([recorded.write()], SMALL))

    two, four, larger = of("two", 2, 1 << 24), of("four", 4, 1 << 24), of("larger", 4, 1 << 26)
    assert two.gradient_bytes == four.gradient_bytes == 1 << 24
    assert why_not_comparable(two, four) == ""
    assert "a rank of two reduces 16 MiB of gradients an iteration, one of larger 64 MiB" in why_not_comparable(
        two, larger
    )


def test_runs_of_different_jobs_are_said(tmp_path: Path) -> None:
    other = replace(SHAPE, data=4, tensor=1, global_batch=32, pipeline=4)
    folders = [job(tmp_path / "small", SHAPE), job(tmp_path / "other", other)]
    report = make_runs(folders, SMALL)
    (said,) = [one.reason for one in report.unknown if one.row == 14]
    assert said.startswith(
        "other is not small on another number of GPUs, so its scaling factors are meaningless: small has"
    )
