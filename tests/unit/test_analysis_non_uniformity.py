"""How unequal the pairs of an all-to-all are.  All jobs are simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.analysis.gpus import find_gpus
from agent.analysis.iterations import find_iterations
from agent.analysis.non_uniformity import find_non_uniformity
from agent.analysis.report_facts import Iteration, NonUniformity, Unknown
from tests.unit.datasets import BEGAN_NS, JobDataset
from tests.unit.timed_jobs import MS, moe, pipeline

MIB = 1 << 20


def found_in(job: JobDataset) -> tuple[tuple[Iteration, ...], tuple[Unknown, ...]]:
    dataset = job.open()
    gpus = find_gpus(dataset)
    return find_non_uniformity(dataset, gpus, find_iterations(dataset, gpus)[1])


def expected(volumes: dict[tuple[int, int], int]) -> NonUniformity:
    most, least, total = max(volumes.values()), min(volumes.values()), sum(volumes.values())
    return NonUniformity(most - least, most / least, (most - least) / (total / len(volumes)), total)


def check(found: tuple[Iteration, ...], truth: list[dict[tuple[int, int], int]]) -> None:
    assert len(found) == len(truth) - 1  # the last one's end is not known
    for one, volumes in zip(found, truth, strict=False):
        figures = expected(volumes)
        assert one.all_to_all is not None
        assert one.all_to_all.total_bytes == figures.total_bytes
        assert one.all_to_all.max_minus_min_bytes == figures.max_minus_min_bytes
        assert one.all_to_all.max_over_min == pytest.approx(figures.max_over_min)
        assert one.all_to_all.relative == pytest.approx(figures.relative)


def test_uneven_exchanges_by_send_and_recv_come_out_as_they_were_made(tmp_path: Path) -> None:
    job, truth = moe(tmp_path, iterations=6)
    found, unknown = found_in(job)
    assert not unknown
    check(found, truth)


def test_a_server_that_was_not_recorded_is_heard_of_from_the_receivers(tmp_path: Path) -> None:
    job, truth = moe(tmp_path, iterations=6, silent_servers=frozenset({1}))
    found, _ = found_in(job)
    check(found, [{pair: sent for pair, sent in one.items() if min(pair) < 2} for one in truth])


def test_the_order_of_rows_makes_no_difference(tmp_path: Path) -> None:
    plain = found_in(moe(tmp_path / "plain", iterations=5)[0])
    assert found_in(moe(tmp_path / "shuffled", iterations=5, shuffle=4)[0]) == plain


def iterations_of(count: int) -> tuple[Iteration, ...]:
    return tuple(
        Iteration(
            start=(BEGAN_NS + place * 100 * MS) / 1e9,
            period_seconds=0.1,
            comm_seconds=None,
            comm_ratio=None,
            non_overlapped_seconds=None,
            non_overlapped_ratio=None,
            all_to_all=None,
            from_ns=BEGAN_NS + place * 100 * MS,
            to_ns=BEGAN_NS + (place + 1) * 100 * MS,
        )
        for place in range(count)
    )


def test_an_all_to_all_call_sends_its_payload_to_every_other_rank(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("ep", (0, 1, 2, 3))
    for rank in range(4):
        job.call("ep", rank, "AllToAll", 3 * MIB, time_ns=BEGAN_NS + 10 * MS)
        job.call("ep", rank, "AllToAll", MIB, time_ns=BEGAN_NS + 20 * MS)
    job.call("ep", 0, "AllToAll", MIB, time_ns=BEGAN_NS + 110 * MS)
    dataset = job.open()
    (one, two, three), unknown = find_non_uniformity(dataset, find_gpus(dataset), iterations_of(3))
    assert not unknown
    assert one.all_to_all == NonUniformity(0, 1.0, 0.0, 12 * 4 * MIB)
    # Only one rank has called: nine of the twelve pairs have sent nothing yet.
    assert two.all_to_all == NonUniformity(MIB, None, 4.0, 3 * MIB)
    assert three.all_to_all is None


def test_pairs_of_several_groups_are_looked_at_together(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    for comm, gpus, size in (("ep0", (0, 1), 2 * MIB), ("ep1", (2, 3), 6 * MIB)):
        job.communicator(comm, gpus)
        for rank in range(2):
            job.call(comm, rank, "AllToAll", size, time_ns=BEGAN_NS + 10 * MS)
    dataset = job.open()
    (one,), _ = find_non_uniformity(dataset, find_gpus(dataset), iterations_of(1))
    assert one.all_to_all == NonUniformity(4 * MIB, 3.0, 1.0, 16 * MIB)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_is_no_all_to_all(tmp_path: Path, stages: int) -> None:
    found, unknown = found_in(pipeline(tmp_path, stages=stages, iterations=4))
    assert found
    assert {one.all_to_all for one in found} == {None}
    assert [one.row for one in unknown] == [10]


def test_without_iterations_it_says_so(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("ep", (0, 1, 2, 3))
    job.collective("ep", "AllToAll", MIB)
    found, unknown = found_in(job)
    assert found == ()
    assert "row 9" in unknown[0].reason
