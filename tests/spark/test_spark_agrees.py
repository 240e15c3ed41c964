"""Spark and DuckDB give the same report of the same recording (simulated).

Starting Spark takes some seconds, and every query more than DuckDB's: one recording, with a row of everything, is
asked once.  What runs is Spark on this machine, without a cluster.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="Spark is 400 MB: run 'make test-spark'")
if shutil.which("java") is None:
    pytest.skip("Spark needs Java: run 'make test-spark'", allow_module_level=True)

from railscope.agent.analysis.report.report import ReportOptions, make_report
from railscope.agent.analysis.report.report_json import KEYS, as_json
from railscope.agent.model.mapping import default_mapping
from railscope.agent.model.shape import Shape
from tests.unit.datasets import BEGAN_NS, SECOND_NS, JobDataset, gpt_job

# Sockets and files of Spark's Python side are closed when its process ends.
pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

MS = 1_000_000
SHAPE = Shape(
    layers=4,
    hidden=64,
    sequence=64,
    vocabulary=300,
    global_batch=8,
    micro_batch=2,
    pipeline=4,
    tensor=2,
    data=2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training job with everything that a recording can hold, and a mixture of experts beside it."""
    job = gpt_job(tmp_path_factory.mktemp("job"), SHAPE, default_mapping(SHAPE), gpus_per_server=8, iterations=6)
    _time(job)
    _add_experts(job)
    leaves = job.folder / "leaves.csv"
    leaves.write_text("server,leaf\nnode-0,a\nnode-1,b\n")
    return job.write()


def _time(job: JobDataset) -> None:
    for number in range(40):
        begin_ns = number % 6 * SECOND_NS + number * MS
        took_ns = 90 * MS if number == 17 else 2 * MS + number * 1001
        job.operation("dp0", number % 2, "AllReduce", 92_832, begin_ns, took_ns)
        job.operation("pp0", 1, "Recv", 16_384, begin_ns, took_ns // 3, peer=0)
        job.operation("pp0", 1, "Recv", None, begin_ns, took_ns // 3, peer=0, source="cuda")
        job.compute(0, begin_ns + MS, 5 * MS)
    job.connection("dp0", 0, 1)
    job.row(0, "rails", rail_id=0, rail="0", device="mlx5_0", speed_bytes_per_second=50_000_000_000)
    for number in range(10):
        sample = {"transmit_bytes": number * 1_000_000, "receive_bytes": number * 900_000}
        job.row(0, "rail_samples", time_ns=BEGAN_NS + number * SECOND_NS // 2, rail_id=0, **sample)
    for direction, owner, origin, port_bytes in (
        ("transmit", "nccl", "collective", 3_000_000),
        ("transmit", "nccl", "overhead", 50_000),
        ("transmit", "nixl", "transfer", 1_450_000),
        ("receive", "unknown", "foreign", 4_050_000),
    ):
        names = {"direction": direction, "owner": owner, "origin": origin}
        job.row(0, "rail_owners", rail_id=0, **names, port_bytes=port_bytes, error_ratio=0.0125)
    stall = {"comm": "dp0", "rank": 1, "op": "AllReduce", "cause": "link_down", "since_ns": BEGAN_NS + SECOND_NS}
    job.row(0, "stalls", seconds=12.5, **stall)


def _add_experts(job: JobDataset) -> None:
    job.communicator("experts", (0, 1, 8, 9), group_name="EXPERT_MODEL_PARALLEL_GROUP")
    for iteration in range(6):
        for rank in range(4):
            for peer in range(4):
                if peer != rank:
                    size = 1000 * (rank + 1) + 10 * peer + iteration
                    time_ns = BEGAN_NS + iteration * SECOND_NS + 10 * MS
                    job.call("experts", rank, "Send", size, peer=peer, time_ns=time_ns)


@pytest.fixture(scope="module")
def reports(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """By DuckDB and by Spark, as JSON's content."""
    leaf_map = folder / "leaves.csv"
    return (
        as_json(make_report([folder], ReportOptions(leaf_map=leaf_map))),
        as_json(make_report([folder], ReportOptions(leaf_map=leaf_map, engine="spark", memory_bytes=1_000_000_000))),
    )


def test_there_is_something_of_owners_to_agree_on(reports: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert [one["owner"] for one in reports[1]["owners"]] == ["unknown", "nccl", "nixl"]


@pytest.mark.parametrize("part", KEYS)
def test_both_engines_find_the_same(reports: tuple[dict[str, Any], dict[str, Any]], part: str) -> None:
    duckdb, spark = reports
    assert _rounded(spark[part]) == _rounded(duckdb[part])


def _rounded(content: Any) -> Any:
    """Whole numbers as they are; others without their last digits, in which engines add in their own order."""
    match content:
        case float():
            return float(f"{content:.12g}")
        case dict():
            return {key: _rounded(value) for key, value in content.items()}
        case list() | tuple():
            return [_rounded(value) for value in content]
        case _:
            return content


def test_the_recording_has_something_of_everything(reports: tuple[dict[str, Any], dict[str, Any]]) -> None:
    report = reports[0]
    assert all(report[part] for part in ("ops", "matrix", "bandwidth", "receives", "iterations"))
    assert report["latency"]["anomaly_count"] > 1
    assert report["composition"]["roles"]
    assert any(iteration["all_to_all"] for iteration in report["iterations"])
    assert any(iteration["non_overlapped_ratio"] for iteration in report["iterations"])
    assert report["traffic"]["spine_wire_bytes"] > 0
