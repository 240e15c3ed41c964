"""Transfers of other libraries in a report: who moved how much to whom, and which pair is slow.  Rows are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.analysis.facts.report import TransferUse
from railscope.agent.analysis.report.html import html_text
from railscope.agent.analysis.report.report import report_of
from railscope.agent.analysis.report.report_json import as_json
from railscope.agent.analysis.report.text import as_text
from railscope.agent.analysis.report.words import describe_slow_pairs
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.traffic.transfers import _compared, find_transfers
from railscope.agent.facts.histogram import Histogram
from tests.unit.datasets import JobDataset

MIB = 1 << 20


def pair(job: JobDataset, server: int, pid: int, peer: str | None, writes: int, mean: float, **others: Any) -> None:
    row = {
        "library": "nixl", "op": "Write", "direction": "transmit", "operations": writes, "completed": writes,
        "payload_bytes": writes * MIB, "failed": 0, "seconds": writes * mean, "p50_seconds": mean,
        "p99_seconds": 3 * mean,
    }  # fmt: skip
    job.row(server, "transfers", pid=pid, peer=peer, **(row | others))


def transfers_of(job: JobDataset) -> tuple[TransferUse, ...]:
    dataset = job.open()
    return find_transfers(dataset, find_gpus(dataset))


def test_where_network_namespaces_are_servers_transfers_have_the_same_names_for_them(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1,))
    for number in range(2):
        job.row(
            0, "communicators", instance=number + 1, comm="aa", rank=number, nranks=2, node_rank=number,
            pid=60 + number, netns=f"host{number}",
        )  # fmt: skip
    pair(job, 0, 70, "decode-0", 40, 0.004, netns="host1")
    pair(job, 0, 71, "decode-0", 30, 0.004)
    report = report_of(job.open())
    assert [gpu.server for gpu in report.gpus] == ["node-0/host0", "node-0/host1"]
    assert [use.server for use in report.transfers] == ["node-0/host1", "node-0"]


def test_pairs_stand_by_bytes_with_their_durations_and_bandwidth(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1,))
    pair(job, 0, 70, "decode-0", 40, 0.004, completed=39, seconds=39 * 0.004)
    pair(job, 0, 71, "decode-1", 80, 0.005)
    pair(job, 0, 71, None, 9, 0.0, library="ucx", op="TagRecv", payload_bytes=None, completed=0, seconds=0.0)
    most, less, receives = transfers_of(job)
    assert (most.server, most.pid, most.peer, most.operations) == ("node-0", 71, "decode-1", 80)
    assert most.bytes_per_second == pytest.approx(MIB / 0.005)
    assert less.mean_seconds == pytest.approx(0.004)
    assert less.p99_seconds == pytest.approx(0.012)
    assert less.bytes_per_second == pytest.approx(MIB / 0.004)
    assert less.times_as_long is None
    assert (receives.peer, receives.payload_bytes, receives.mean_seconds, receives.bytes_per_second) == (
        "",
        *[None] * 3,
    )


def test_a_pair_that_takes_much_longer_than_others_of_its_size_is_named(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1))
    for number in range(3):
        pair(job, 0, 70 + number, "decode-0", 50, 0.004)
    pair(job, 1, 80, "decode-1", 50, 0.02)
    pair(job, 1, 81, "decode-1", 50, 0.4, payload_bytes=50 * 64 * MIB)
    pair(job, 1, 82, "decode-1", 3, 0.5)
    report = report_of(job.open())
    (slow,) = [use for use in report.transfers if use.times_as_long is not None]
    assert slow.pid == 80
    assert slow.times_as_long == pytest.approx(5.0)
    sentence = "nixl Write of process 80 on node-1 to decode-1 takes 5 times as long as those of the other pairs"
    text = " ".join(as_text(report).split())
    assert sentence in text
    page = html_text(report)
    assert sentence in page
    assert "Other libraries moved: nixl " in page
    (of_reads,) = describe_slow_pairs(replace(report, transfers=(replace(slow, direction="receive"),)))
    assert " on node-1 from decode-1 takes " in of_reads
    assert [one["peer"] for one in as_json(report)["transfers"]][:1] == ["decode-1"]


def test_transfers_that_failed_are_told_where_any_did(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1,))
    for number in range(5):
        pair(job, 0, 70 + number, f"decode-{number}", 1200, 0.004, failed=number, completed=1200 - number)
    report = report_of(job.open())
    sentences = [
        f"Of 1,200 nixl Write of process {pid} on node-0 to decode-{pid - 70}, {pid - 70} failed."
        for pid in (74, 73, 72)
    ]
    text, page = " ".join(as_text(report).split()), html_text(report)
    for told in (text, page):
        assert [sentence in told for sentence in (*sentences, "Transfers of 1 more pair failed, too.")] == [True] * 4
    assert " times failed payload " in text
    assert ">failed<" in page
    (row,) = [line.split() for line in as_text(report).splitlines() if "  decode-3  " in line]
    assert row[row.index("decode-3") + 1 :][:2] == ["1,200", "3"]
    fine = replace(report, transfers=tuple(replace(use, failed=0) for use in report.transfers))
    assert "failed" not in as_text(fine)
    assert ">failed<" not in html_text(fine)


@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.0, 0.001, 0.002, 0.003, 0.05]), st.integers(7, 9))))
def test_each_pair_is_compared_with_the_others_of_half_to_twice_its_size(
    pairs: list[tuple[int, float, int]],
) -> None:
    uses = [made_up(number, *one) for number, one in enumerate(pairs)]
    found = {use.pid: use.times_as_long for use in _compared(uses)}
    assert found.keys() == {use.pid for use in uses}
    compared = {number: one for number, one in enumerate(pairs) if one[2] >= 8}
    for number in range(len(pairs)):
        size, seconds, _ = pairs[number]
        others = [one[1] for other, one in compared.items() if other != number and size / 2 <= one[0] <= size * 2]
        usual = median(others) if others and number in compared else 0.0
        expected = seconds / usual if usual and seconds >= 2 * usual else None
        assert found[number] == (expected if expected is None else pytest.approx(expected))


def made_up(number: int, size: int, seconds: float, writes: int) -> TransferUse:
    return TransferUse(
        "node-0", number, "nixl", "Write", "transmit", "decode-0", writes, writes * size, 0, seconds, None, None, None,
        None,
    )  # fmt: skip


def test_a_quantile_lies_within_its_bucket() -> None:
    durations = Histogram((1.0, 2.0, 4.0), (0, 8, 2, 0), 20.0)
    assert durations.quantile(0.5) == pytest.approx(1.625)
    assert durations.quantile(0.99) == pytest.approx(3.9)
    assert Histogram((1.0, 2.0), (0, 0, 5), None).quantile(0.5) == 2.0
    assert Histogram((1.0,), (0, 0), None).quantile(0.5) is None
