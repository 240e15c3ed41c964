"""The real NCCL's log of a job (on the CUDA test double), imported: the calls that were made, and by whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.dataset.reader import Dataset, open_dataset
from railscope.agent.imports.runner import Imported, import_paths
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.nccl.job import Job, RankReport

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]
LOGGED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL"}


def ran(fabric: Fabric, double: Double, folder: Path, environment: Mapping[str, str], **job: Any) -> list[RankReport]:
    """The reports of a job that has run with its log switched on."""
    with Job(fabric, folder, double, environment={**LOGGED, **environment}, **job) as one:
        one.ready()
        return one.run()


def imported(folder: Path, reports: list[RankReport]) -> tuple[Imported, Dataset]:
    """What the logs of all ranks hold."""
    logs = [folder / f"output.{report.rank}" for report in reports]
    result = import_paths(logs, folder / "dataset", None, None)
    return result, open_dataset([folder / "dataset"])


def calls_of_processes(dataset: Dataset) -> dict[int, Counter[tuple[str, int]]]:
    """By process: how many calls of each operation and payload."""
    pids = {row["instance"]: row["pid"] for row in dataset.rows(dataset["communicators"]).to_pylist()}
    found: dict[int, Counter[tuple[str, int]]] = {}
    for row in dataset.rows(dataset["calls"]).to_pylist():
        found.setdefault(pids[row["instance"]], Counter())[row["op"], row["payload_bytes"]] += 1
    return found


def test_the_log_of_all_operations_gives_the_calls_that_each_rank_made(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    reports = ran(two_hosts, double, tmp_path, {}, pattern="mixed", iterations=3, size_bytes=1 << 16)
    result, dataset = imported(tmp_path, reports)
    assert result.problems.count == 0
    assert not result.times_known
    found = calls_of_processes(dataset)
    assert found.keys() == {report.pid for report in reports}
    for report in reports:
        made = {one.operation: (one.calls, one.payload_bytes) for one in report.operations if one.calls}
        told = {
            op: (
                sum(count for (name, _), count in found[report.pid].items() if name == op),
                sum(size * count for (name, size), count in found[report.pid].items() if name == op),
            )
            for op in {name for name, _ in found[report.pid]}
        }
        assert told == made
    ends = dataset.rows(dataset["communicators"]).to_pylist()
    assert {(row["comm"], row["nranks"]) for row in ends} == {(ends[0]["comm"], 2)}
    assert {row["pid"]: row["rank"] for row in ends} == {report.pid: report.rank for report in reports}
    links = dataset.rows(dataset["connections"]).to_pylist()
    assert {(row["peer"], row["network"], row["net_device"]) for row in links} == {
        (peer, "SOCKET", rail) for peer in (0, 1) for rail in (0, 1)
    }
    peers = {row["peer"] for row in dataset.rows(dataset["calls"]).to_pylist() if row["op"] in ("Send", "Recv")}
    assert peers == {0, 1}


def test_children_of_a_split_are_told_apart_and_named_alike_on_their_ranks(
    four_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    reports = ran(four_hosts, double, tmp_path, {}, pattern="split", iterations=2)
    _, dataset = imported(tmp_path, reports)
    members: dict[str, set[int]] = {}
    ranks = {report.pid: report.rank for report in reports}
    for row in dataset.rows(dataset["communicators"]).to_pylist():
        members.setdefault(row["comm"], set()).add(ranks[row["pid"]])
    assert sorted(map(sorted, members.values())) == [[0, 1, 2, 3], [0, 2], [1, 3]]


def test_timestamps_that_nccl_writes_are_the_times_of_calls(two_hosts: Fabric, double: Double, tmp_path: Path) -> None:
    stamped = {"NCCL_DEBUG_TIMESTAMP_LEVELS": "INFO", "NCCL_DEBUG_TIMESTAMP_FORMAT": "[%F %T.%6f] ", "TZ": "UTC"}
    reports = ran(two_hosts, double, tmp_path, stamped, iterations=20, pace_us=1000)
    result, dataset = imported(tmp_path, reports)
    assert result.times_known
    times = sorted(row["time_ns"] for row in dataset.rows(dataset["calls"]).to_pylist())
    written_ns = max((tmp_path / f"output.{report.rank}").stat().st_mtime_ns for report in reports)
    assert 0 < written_ns - times[-1] < 60_000_000_000
    # Nineteen pauses of a millisecond are between the first call and the last.
    assert times[-1] - times[0] >= 19_000_000
