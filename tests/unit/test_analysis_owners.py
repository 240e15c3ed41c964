"""Whose the rails' port bytes were: what a report and a comparison say of it, and who has none.  Rows are simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from railscope.agent.analysis.compare.compare import compare_sides
from railscope.agent.analysis.compare.figures import side_of
from railscope.agent.analysis.facts.report import Report
from railscope.agent.analysis.report.html import html_text
from railscope.agent.analysis.report.report import report_of
from railscope.agent.analysis.report.report_json import as_json
from railscope.agent.analysis.report.text import as_text
from railscope.agent.analysis.report.words import summarise
from tests.unit.datasets import BEGAN_NS, SECOND_NS, JobDataset

MB = 1_000_000


def rail(
    job: JobDataset, server: int, number: int, cells: dict[tuple[str, str, str], int], error_ratio: float | None = 0.01
) -> None:
    """A rail that was read, with what its ledger held by direction, owner and origin."""
    job.row(server, "rails", rail_id=number, rail=str(number), device=f"mlx5_{number}/1")
    for place in range(3):
        totals = {"transmit_bytes": place * MB, "receive_bytes": place * MB}
        job.row(server, "rail_samples", time_ns=BEGAN_NS + place * SECOND_NS, rail_id=number, **totals)
    for (direction, owner, origin), port_bytes in cells.items():
        names = {"direction": direction, "owner": owner, "origin": origin}
        job.row(server, "rail_owners", rail_id=number, **names, port_bytes=port_bytes, error_ratio=error_ratio)


MIXED = {
    ("transmit", "nccl", "collective"): 600 * MB,
    ("transmit", "nccl", "overhead"): 20 * MB,
    ("transmit", "nixl", "transfer"): 300 * MB,
    ("transmit", "unknown", "foreign"): 80 * MB,
    ("receive", "nccl", "collective"): 50 * MB,
}


def job_of(folder: Path, cells: dict[tuple[str, str, str], int] = MIXED) -> JobDataset:
    job = JobDataset(folder, servers=(1, 1))
    job.communicator("all", (0, 1))
    job.collective("all", "AllReduce", 1 << 20)
    rail(job, 0, 0, cells)
    rail(job, 1, 0, {("transmit", "storage", "foreign"): 7 * MB}, error_ratio=None)
    return job


def reported(job: JobDataset) -> Report:
    with job.open() as dataset:
        return report_of(dataset)


def test_a_report_tells_who_moved_the_bytes_of_each_rail_and_how_sure_that_is(tmp_path: Path) -> None:
    report = reported(job_of(tmp_path))
    sent = [use for use in report.owners if (use.server, use.direction) == ("node-0", "transmit")]
    assert [(use.owner, use.port_bytes, use.share) for use in sent] == [
        ("nccl", 620 * MB, 0.62),
        ("nixl", 300 * MB, 0.3),
        ("unknown", 80 * MB, 0.08),
    ]
    assert [use.error_ratio for use in sent] == [pytest.approx(0.01)] * 3
    assert sent[0].origins == {"collective": 600 * MB, "overhead": 20 * MB}
    (storage,) = (use for use in report.owners if use.server == "node-1")
    assert (storage.owner, storage.share, storage.error_ratio) == ("storage", 1, None)
    assert not any("was not recorded" in one.reason for one in report.unknown)


def test_text_json_page_and_words_say_the_same(tmp_path: Path) -> None:
    report = reported(job_of(tmp_path))
    row = "nccl 62 %, nixl 30 %, unknown 8 %"
    assert row in as_text(report)
    assert row in html_text(report)
    told = json.loads(json.dumps(as_json(report)))["owners"]
    assert (told[1]["owner"], told[1]["port_bytes"], told[1]["error_ratio"]) == ("nccl", 620 * MB, 0.01)
    sentence = "The rails' port bytes were moved by nccl 63.4 %, nixl 28.4 %, unknown 7.6 %, storage 0.7 %."
    assert sentence in summarise(report)


def test_ledgers_of_a_rail_are_summed_up_with_their_errors(tmp_path: Path) -> None:
    """As where a rail was watched twice, or is in two recordings."""
    job = job_of(tmp_path)
    rail(job, 0, 0, {("transmit", "ucx", "transfer"): 1000 * MB}, error_ratio=0.03)
    sent = [use for use in reported(job).owners if (use.server, use.direction) == ("node-0", "transmit")]
    assert [(use.owner, use.share) for use in sent] == [
        ("ucx", 0.5), ("nccl", 0.31), ("nixl", 0.15), ("unknown", 0.04),
    ]  # fmt: skip
    assert sent[0].error_ratio == pytest.approx(0.02)


def test_a_recording_from_before_owners_were_recorded_says_so(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    for rows in job._rows.values():
        rows[:] = [row for row in rows if "owner" not in row]
    report = reported(job)
    assert report.owners == ()
    (reason,) = (one.reason for one in report.unknown if "port bytes were was not recorded" in one.reason)
    assert reason in " ".join(as_text(report).split())
    assert as_json(report)["owners"] == []


def test_a_recording_without_rails_has_no_owners_and_says_nothing_of_them(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1))
    job.communicator("all", (0, 1))
    job.collective("all", "AllReduce", 1 << 20)
    assert not any("port bytes were" in one.reason for one in reported(job).unknown)


def test_a_comparison_tells_whose_bytes_are_more_of_all(tmp_path: Path) -> None:
    jobs = (job_of(tmp_path / "a"), job_of(tmp_path / "b", {("transmit", "nccl", "collective"): 993 * MB}))
    with jobs[0].open() as first, jobs[1].open() as second:
        compared = compare_sides(side_of(first, "a"), side_of(second, "b"))
    found = {figure.name: figure for figure in compared.figures if figure.name.startswith("port bytes")}
    nccl, nixl = found["port bytes of nccl, of all"], found["port bytes of nixl, of all"]
    assert (nccl.a, nccl.b) == (670 / 1057, 0.993)
    assert (nixl.a, nixl.b) == (300 / 1057, None)


def test_rows_that_no_ledger_has_are_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of a forged dataset."""
    job = job_of(tmp_path)
    forged = {"direction": "transmit", "owner": "nccl", "origin": "collective", "port_bytes": 5, "error_ratio": 0.01}
    for wrong in ({"direction": None}, {"owner": None}, {"origin": None}, {"port_bytes": None}, {"port_bytes": -5}):
        job.row(0, "rail_owners", rail_id=0, **forged | wrong)
    report = reported(job)
    assert report.owners == reported(job_of(tmp_path / "honest")).owners
    assert "5 of the rail_owners" in caplog.text


@pytest.mark.parametrize("ratio", [float("nan"), float("inf"), -1.0, 2.0])
def test_an_error_that_is_no_part_of_all_is_not_known(tmp_path: Path, ratio: float) -> None:
    job = job_of(tmp_path)
    rail(job, 0, 1, {("transmit", "nccl", "collective"): MB}, error_ratio=ratio)
    (use,) = (use for use in reported(job).owners if use.rail == "1")
    assert (use.port_bytes, use.error_ratio) == (MB, None)


def test_a_rail_that_is_described_many_times_counts_its_bytes_once(tmp_path: Path) -> None:
    """Nor does the time grow with descriptions times owners."""
    job = job_of(tmp_path)
    for number in range(1000):
        job.row(0, "rails", rail_id=0, rail=f"{number + 1}", device="mlx5_0/1")
        names = {"direction": "transmit", "owner": f"one {number}", "origin": "transfer"}
        job.row(0, "rail_owners", rail_id=0, **names, port_bytes=MB, error_ratio=0.01)
    sent = [use for use in reported(job).owners if (use.server, use.direction) == ("node-0", "transmit")]
    assert sum(use.port_bytes for use in sent) == 2000 * MB
