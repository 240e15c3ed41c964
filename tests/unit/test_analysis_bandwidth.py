"""Bandwidth as nccl-tests means it, and the part of the links that it is.  All jobs are simulated."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from railscope.agent.analysis.facts.report import BandwidthRow, Unknown
from railscope.agent.analysis.tables import size_classes
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.timing.bandwidth import find_bandwidth
from tests.unit.datasets import JobDataset
from tests.unit.timed_jobs import MS, ddp

MIB = 1 << 20
RAIL = 50_000_000_000


def bandwidth_of(job: JobDataset) -> tuple[tuple[BandwidthRow, ...], tuple[Unknown, ...]]:
    dataset = job.open()
    return find_bandwidth(dataset, find_gpus(dataset))


def across(folder: Path, *, rails: int = 2) -> JobDataset:
    """Eight GPUs of two servers in one communicator, with their rails."""
    job = JobDataset(folder, (4, 4))
    job.communicator("world", range(8))
    for server in range(2):
        for rail in range(rails):
            job.row(server, "rails", rail_id=rail, rail=str(rail), device=f"mlx5_{rail}", speed_bytes_per_second=RAIL)
    return job


@pytest.mark.parametrize(
    ("op", "size_factor", "bus_factor"),
    [
        ("AllReduce", 1, 2 * 7 / 8),
        ("AllGather", 8, 7),
        ("ReduceScatter", 8, 7),
        ("AllToAll", 8, 7),
        ("Broadcast", 1, 1),
        ("Reduce", 1, 1),
        ("Gather", 8, 7),
        ("Scatter", 8, 7),
        ("Send", 1, 1),
    ],
)
def test_factors_are_those_of_nccl_tests(tmp_path: Path, op: str, size_factor: float, bus_factor: float) -> None:
    job = across(tmp_path)
    for place, took in enumerate((2, 1, 4)):
        job.operation("world", 0, op, 100_000_000, place * 10 * MS, took * MS)
    (row,), _ = bandwidth_of(job)
    assert (row.op, row.payload_bytes, row.count) == (op, 100_000_000, 3)
    assert row.algbw_bytes_per_second == pytest.approx(50e9 * size_factor)
    assert row.busbw_bytes_per_second == pytest.approx(50e9 * bus_factor)


def test_a_ring_between_servers_is_held_against_all_rails_of_a_server(tmp_path: Path) -> None:
    job = across(tmp_path)
    job.operation("world", 0, "AllReduce", 100_000_000, 0, 2 * MS)
    job.operation("world", 0, "AllToAll", 10_000_000, 10 * MS, 2 * MS)
    job.operation("world", 0, "Send", 10_000_000, 20 * MS, 2 * MS)
    rows, unknown = bandwidth_of(job)
    assert not unknown
    by_op = {row.op: row for row in rows}
    assert by_op["AllReduce"].utilisation == pytest.approx(50e9 * 1.75 / (2 * RAIL))
    # Each of the four ranks of a server exchanges for itself.
    assert by_op["AllToAll"].utilisation == pytest.approx(5e9 * 7 / (2 * RAIL / 4))
    assert by_op["Send"].utilisation is None  # the peer may be on the same server


def test_a_rails_two_devices_are_one_link(tmp_path: Path) -> None:
    job = across(tmp_path, rails=1)
    job.row(0, "rails", rail_id=7, rail="0", device="eth0", speed_bytes_per_second=RAIL)
    job.operation("world", 0, "AllReduce", 100_000_000, 0, 2 * MS)
    (row,), _ = bandwidth_of(job)
    assert row.utilisation == pytest.approx(50e9 * 1.75 / RAIL)


def test_what_stays_inside_a_server_has_no_utilisation(tmp_path: Path) -> None:
    rows, unknown = bandwidth_of(ddp(tmp_path, iterations=3, operations=True))
    assert rows
    assert {row.utilisation for row in rows} == {None}
    assert [one.row for one in unknown] == [13]
    assert "between servers" in unknown[0].reason


def test_one_size_on_communicators_of_several_sizes_is_the_median_of_all(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (4,))
    job.communicator("two", (0, 1))
    job.communicator("four", (0, 1, 2, 3))
    for comm, times in (("two", 3), ("four", 2)):
        for place in range(times):
            job.operation(comm, 0, "AllGather", 1_000_000, place * 10 * MS, MS)
    (row,), _ = bandwidth_of(job)
    assert row.count == 5
    assert row.algbw_bytes_per_second == pytest.approx(2e9)
    assert row.busbw_bytes_per_second == pytest.approx(1e9)


def test_times_of_the_gpu_are_taken_before_those_of_network_threads(tmp_path: Path) -> None:
    job = across(tmp_path)
    job.operation("world", 0, "AllReduce", 1_000_000, 0, MS, source="proxy")
    job.operation("world", 0, "AllReduce", 1_000_000, 0, 2 * MS, source="cuda")
    (row,), _ = bandwidth_of(job)
    assert row.count == 1
    assert row.algbw_bytes_per_second == pytest.approx(0.5e9)


def test_calls_alone_have_no_bandwidth(tmp_path: Path) -> None:
    rows, unknown = bandwidth_of(ddp(tmp_path, iterations=3))
    assert rows == ()
    assert [one.row for one in unknown] == [13]


def test_the_order_of_rows_makes_no_difference(tmp_path: Path) -> None:
    operations = [(rank, size * MIB, place) for rank in range(8) for size in (1, 2) for place in range(5)]
    found = []
    for seed in range(2):
        job = across(tmp_path / str(seed))
        for rank, size, place in random.Random(seed).sample(operations, len(operations)):
            job.operation("world", rank, "AllReduce", size, place * 10 * MS, (1 + (rank * 7 + place) % 5) * MS)
        found.append(bandwidth_of(job))
    assert found[0] == found[1]
    assert [row.count for row in found[0][0]] == [40, 40]


def test_like_sizes_go_together_where_hardly_two_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_classes, "MOST_SIZES", 8)
    job = across(tmp_path)
    for place in range(21):
        size = MIB + 1000 * (place + 1)
        # One of them is ten times as fast; each takes its time for its own size.
        job.operation("world", 0, "Broadcast", size, place * 10 * MS, size // (10 if place == 7 else 1))
    (row,), _ = bandwidth_of(job)
    assert (row.over_bytes, row.payload_bytes, row.count) == (MIB, 2 * MIB, 21)
    assert row.algbw_bytes_per_second == pytest.approx(1e9)
