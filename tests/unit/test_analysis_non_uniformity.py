"""How unequal the pairs of an all-to-all are.  All jobs are simulated."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from railscope.agent.analysis.facts.report import Iteration, NonUniformity, Unknown
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.timing import iterations as iterations_module
from railscope.agent.analysis.timing import non_uniformity
from railscope.agent.analysis.timing.iterations import find_iterations, rows_in_iterations
from railscope.agent.analysis.timing.non_uniformity import find_non_uniformity
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
    # Everyone takes part in an AllToAll: where only one rank has called, the others' calls are not known.
    assert two.all_to_all is None
    assert three.all_to_all is None


@pytest.mark.parametrize("calls_of_late", [0, 1])
def test_a_server_that_recorded_later_or_by_another_clock_makes_no_pair_uneven(
    tmp_path: Path, calls_of_late: int
) -> None:
    job = JobDataset(tmp_path)
    job.communicator("ep", (0, 1, 2, 3))
    for place in range(3):
        for rank in range(4):
            for call in range(2):
                if not place and rank > 1 and call >= calls_of_late:
                    continue  # the second server's calls of the first iteration were not recorded, or only one
                job.call("ep", rank, "AllToAll", MIB, time_ns=BEGAN_NS + (place * 100 + 10 + call) * MS)
    dataset = job.open()
    found, _ = find_non_uniformity(dataset, find_gpus(dataset), iterations_of(3))
    even = NonUniformity(0, 1.0, 0.0, 12 * 2 * MIB)
    assert [one.all_to_all for one in found] == [None, even, even]


def test_sends_that_were_received_in_another_iteration_make_no_pair_uneven(tmp_path: Path) -> None:
    job = JobDataset(tmp_path)
    job.communicator("ep", (0, 1, 2, 3))
    for place in range(3):
        for source in range(4):
            for destination in range(4):
                if source == destination:
                    continue
                for call in range(2):
                    # The second server's clock is early: one of its two calls lies in the iteration before.
                    sent, received = (
                        BEGAN_NS + (place * 100 + 10 - (100 if rank > 1 and call else 0)) * MS
                        for rank in (source, destination)
                    )
                    job.call("ep", source, "Send", MIB, peer=destination, time_ns=sent)
                    job.call("ep", destination, "Recv", MIB, peer=source, time_ns=received)
    dataset = job.open()
    found, _ = find_non_uniformity(dataset, find_gpus(dataset), iterations_of(3))
    even = NonUniformity(0, 1.0, 0.0, 12 * 2 * MIB)
    assert [one.all_to_all for one in found] == [even, even, None]  # the last one lacks the calls that came too early


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
    assert "see regularity" in unknown[0].reason


def iterations_between(lengths: list[int]) -> list[Iteration]:
    edges = [BEGAN_NS + sum(lengths[:place]) for place in range(len(lengths) + 1)]
    return [
        Iteration(low / 1e9, (high - low) / 1e9, None, None, None, None, None, low, high)
        for low, high in pairwise(edges)
    ]


@pytest.mark.parametrize(
    "lengths",
    [
        [10 * MS] * 20,
        [10 * MS, 11 * MS, 3_600_000 * MS, 10 * MS, 90_000 * MS, 10 * MS, 640 * MS, 9 * MS, 10 * MS],
    ],
)
def test_calls_are_in_their_iterations_and_pauses_make_no_long_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    listed: list[int] = []
    usual = iterations_module._slots

    def slots(*told: Any) -> pa.Table:
        table = usual(*told)
        listed.append(len(table))
        return table

    monkeypatch.setattr(iterations_module, "_slots", slots)
    iterations = iterations_between(lengths)
    job = JobDataset(tmp_path)
    job.communicator("all", (0, 1))
    moments = [(one.from_ns, one.from_ns + 1, (one.from_ns + one.to_ns) // 2, one.to_ns - 1) for one in iterations]
    for moment in (BEGAN_NS - 1, iterations[-1].to_ns, *(moment for own in moments for moment in own)):
        job.call("all", 0, "AllToAll", 8, time_ns=moment)
    dataset = job.open()
    calls = dataset["calls"]
    found = dataset.rows(rows_in_iterations(calls, calls.time_ns, iterations).select("iteration", "time_ns"))
    rows = sorted(zip(found["iteration"].to_pylist(), found["time_ns"].to_pylist(), strict=True))
    assert rows == [(place, moment) for place, own in enumerate(moments) for moment in own]
    assert sum(listed) <= 65 * len(lengths)


def test_an_all_to_all_is_not_written_out_pair_by_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(non_uniformity, "_all_ranks", None)
    job = JobDataset(tmp_path, servers=(3,))
    job.communicator("all", (0, 1, 2))
    iterations = iterations_between([10 * MS, 10 * MS])
    for rank, size in ((0, 10), (1, 20), (2, 40)):
        for one in iterations:
            job.call("all", rank, "AllToAll", size, time_ns=one.from_ns + MS, times=2)
    dataset = job.open()
    found, unknown = find_non_uniformity(dataset, find_gpus(dataset), iterations)
    assert not unknown
    assert [one.all_to_all for one in found] == [NonUniformity(60, 4.0, 60 / (280 / 6), 280)] * 2


def test_what_is_sent_both_ways_adds_up_pair_by_pair(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2,))
    job.communicator("all", (0, 1))
    (one,) = iterations = iterations_between([10 * MS])
    for rank, size in ((0, 10), (1, 20)):
        job.call("all", rank, "AllToAll", size, time_ns=one.from_ns)
        job.call("all", rank, "Send", 5 * size, peer=1 - rank, time_ns=one.from_ns)
    dataset = job.open()
    (found,), _ = find_non_uniformity(dataset, find_gpus(dataset), iterations)
    assert found.all_to_all == NonUniformity(60, 2.0, 60 / 90, 180)
