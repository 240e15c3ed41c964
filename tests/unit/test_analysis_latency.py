"""How long operations take, and which are far slower than their like, in small recordings (simulated)."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.facts.report import Latency, LatencyRow
from railscope.agent.analysis.tables import size_classes
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.timing.latency import find_latency
from tests.unit.datasets import BEGAN_NS, SECOND_NS, JobDataset

MS = 1_000_000


@pytest.fixture
def job(tmp_path: Path) -> JobDataset:
    job = JobDataset(tmp_path, servers=(1, 1))
    job.communicator("pair", (0, 1))
    job.communicator("other", (0, 1))
    return job


def found(job: JobDataset, most: int = 20) -> Latency:
    dataset = job.open()
    return find_latency(dataset, find_gpus(dataset), most)[0]


def test_operations_are_told_apart_by_size_and_by_what_their_times_are(job: JobDataset) -> None:
    job.operation("pair", 0, "AllReduce", 8, 0, 1000)
    job.operation("other", 1, "AllReduce", 8, 0, 3000)
    job.operation("pair", 0, "AllReduce", 8, 0, 500, source="cuda")
    job.operation("pair", 0, "AllReduce", None, 0, 700)
    job.operation("pair", 0, "AllGather", 4, 0, 0)
    assert found(job).rows == (
        LatencyRow("AllGather", 4, "proxy", 1, 0.0, 0.0, 0.0, 0.0),
        LatencyRow("AllReduce", 8, "cuda", 1, 5e-7, 5e-7, 5e-7, 5e-7),
        LatencyRow("AllReduce", 8, "proxy", 2, 2e-6, 2.8e-6, 2.98e-6, 3e-6),
        LatencyRow("AllReduce", None, "proxy", 1, 7e-7, 7e-7, 7e-7, 7e-7),
    )


def test_operations_without_a_sound_end_are_left_out(job: JobDataset) -> None:
    job.operation("pair", 0, "AllReduce", 8, 0, -5)
    job.operation("pair", 0, "AllReduce", 8, 0, 10, end_ns=None)
    assert found(job).rows == ()


def test_without_times_there_is_nothing_and_the_reason(job: JobDataset) -> None:
    dataset = job.open()
    latency, (unknown,) = find_latency(dataset, find_gpus(dataset))
    assert latency == Latency((), (), 0)
    assert unknown.row == 6
    assert unknown.reason.startswith("No operation has times")


def test_an_operation_that_takes_tens_of_its_median_is_an_anomaly(job: JobDataset) -> None:
    for number in range(9):
        job.operation("pair", number % 2, "AllReduce", 8, number * SECOND_NS, 2 * MS)
    job.operation("pair", 1, "AllReduce", 8, 10 * SECOND_NS, 21 * MS)
    (anomaly,) = found(job).anomalies
    assert (anomaly.comm, anomaly.rank, anomaly.op, anomaly.payload_bytes) == ("pair", 1, "AllReduce", 8)
    assert (anomaly.seconds, anomaly.typical_seconds, anomaly.cause) == (0.021, 0.002, "")
    assert anomaly.time_seconds == pytest.approx((BEGAN_NS + 10 * SECOND_NS) / 1e9)


def test_ten_times_the_median_is_not_yet_one_and_nor_is_what_takes_a_millisecond(job: JobDataset) -> None:
    for number in range(9):
        job.operation("pair", 0, "AllReduce", 8, number, 2 * MS)
        job.operation("pair", 0, "AllReduce", 4, number, 1000)
    job.operation("pair", 0, "AllReduce", 8, 0, 20 * MS)
    job.operation("pair", 0, "AllReduce", 4, 0, MS)
    assert found(job).anomaly_count == 0


def test_an_operation_is_held_against_its_own_communicator_size_and_source(job: JobDataset) -> None:
    for number in range(5):
        job.operation("pair", 0, "AllReduce", 8, number, MS // 10)
        job.operation("other", 0, "AllReduce", 8, number, 50 * MS)
        job.operation("pair", 0, "AllReduce", 1 << 30, number, 50 * MS)
        job.operation("pair", 0, "AllReduce", 8, number, 50 * MS, source="kernel")
    assert found(job).anomaly_count == 0


def test_the_worst_are_listed_and_all_are_counted(job: JobDataset) -> None:
    for number in range(50):
        job.operation("pair", 0, "AllReduce", 8, number, 1000)
    for number in range(6):
        job.operation("pair", number % 2, "AllReduce", 8, 100 + number, (10 + number) * MS)
    latency = found(job, most=3)
    assert [round(one.seconds * 1000) for one in latency.anomalies] == [15, 14, 13]
    assert latency.anomaly_count == 6


def test_a_stall_is_an_anomaly_with_its_cause_once_however_often_it_was_reported(job: JobDataset) -> None:
    for seconds in (11.0, 31.5, 21.0):
        job.row(
            0,
            "stalls",
            comm="pair",
            rank=1,
            op="AllReduce",
            cause="link_down",
            since_ns=BEGAN_NS,
            seconds=seconds,
        )
    latency = found(job)
    (anomaly,) = latency.anomalies
    assert (anomaly.comm, anomaly.rank, anomaly.seconds, anomaly.cause) == ("pair", 1, 31.5, "link_down")
    assert (anomaly.payload_bytes, anomaly.typical_seconds, latency.anomaly_count) == (None, None, 1)


def test_a_slow_operation_has_the_cause_of_the_stall_it_falls_into(job: JobDataset) -> None:
    for number in range(9):
        job.operation("pair", 0, "AllReduce", 8, number, 1000)
    job.operation("pair", 0, "AllReduce", 8, 10 * SECOND_NS, 5 * SECOND_NS)
    job.operation("pair", 0, "AllReduce", 8, 30 * SECOND_NS, 4 * SECOND_NS)
    since_ns = BEGAN_NS + 12 * SECOND_NS
    for comm, rank, cause in (("pair", 1, "peer_late"), ("pair", 0, "rail_slow"), ("other", 0, "link_down")):
        job.row(0, "stalls", comm=comm, rank=rank, op="AllReduce", cause=cause, since_ns=since_ns, seconds=3.0)
    causes = {(one.seconds, one.rank): one.cause for one in found(job).anomalies if one.typical_seconds is not None}
    assert causes == {(5.0, 0): "rail_slow", (4.0, 0): ""}


DURATIONS = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=30)


@given(DURATIONS, st.integers(0, 1 << 30))
@settings(max_examples=5)
def test_quantiles_are_interpolated_and_the_order_of_rows_changes_nothing(durations: list[int], seed: int) -> None:
    results = []
    for shuffle in (None, seed):
        with tempfile.TemporaryDirectory() as folder:
            job = JobDataset(Path(folder), servers=(1,), shuffle=shuffle)
            job.communicator("alone", (0,))
            for number, took_ns in enumerate(durations):
                job.operation("alone", 0, "AllReduce", 8, number, took_ns)
            results.append(found(job))
    assert results[0] == results[1]
    (row,) = results[0].rows
    assert row.count == len(durations)
    assert row.max_seconds == max(durations) / 1e9
    assert row.p50_seconds == pytest.approx(statistics.median(durations) / 1e9)
    assert row.p50_seconds <= row.p90_seconds <= row.p99_seconds <= row.max_seconds


def test_where_hardly_two_sizes_are_equal_like_sizes_go_together(
    job: JobDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_classes, "MOST_SIZES", 8)
    for place in range(40):
        job.operation("pair", 0, "Send", 1025 + place, place * SECOND_NS, 1_000_000)
        job.operation("pair", 0, "AllReduce", 1025 + place % 2, place * SECOND_NS, 1_000_000)
    job.operation("pair", 0, "Send", 2048, 50 * SECOND_NS, 60_000_000)
    job.operation("pair", 0, "Send", 2049, 51 * SECOND_NS, 1_000_000)
    job.operation("pair", 0, "Send", None, 52 * SECOND_NS, 1_000_000)
    latency = found(job)
    assert [(row.op, row.over_bytes, row.payload_bytes, row.count) for row in latency.rows] == [
        ("AllReduce", None, 1025, 20),
        ("AllReduce", None, 1026, 20),
        ("Send", 1024, 2048, 41),
        ("Send", 2048, 4096, 1),
        ("Send", None, None, 1),
    ]
    # Held against its like, and listed with its own size.
    assert [(one.payload_bytes, one.typical_seconds) for one in latency.anomalies] == [(2048, 1e-3)]


def test_powers_of_two_are_the_largest_of_their_class(job: JobDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_classes, "MOST_SIZES", 1)
    sizes = [1, 2, 3, 4, 5, 1 << 29, (1 << 29) + 1, 1 << 30, (1 << 40) - 1, 1 << 40, 0]
    for place, size in enumerate(sizes):
        job.operation("pair", 0, "Send", size, place * SECOND_NS, 1000)
    rows = {(row.over_bytes, row.payload_bytes): row.count for row in found(job).rows}
    assert rows == {
        (None, 0): 1,
        (0, 1): 1,
        (1, 2): 1,
        (2, 4): 2,
        (4, 8): 1,
        (1 << 28, 1 << 29): 1,
        (1 << 29, 1 << 30): 2,
        (1 << 39, 1 << 40): 2,
    }
