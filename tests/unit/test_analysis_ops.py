"""Operations, sizes and communicators of small recordings (simulated)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.facts.fact_columns import Sizes, SizeUse
from railscope.agent.analysis.facts.report import CommunicatorUse, OpUse
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.traffic.ops import find_communicators, find_ops, unknown_of_calls
from railscope.agent.analysis.traffic.sizes import cdf, find_sizes
from tests.unit.datasets import JobDataset

MIB = 1 << 20


@pytest.fixture
def job(tmp_path: Path) -> JobDataset:
    job = JobDataset(tmp_path, servers=(2, 2))
    job.communicator("all", (0, 1, 2, 3))
    job.communicator("left", (0, 1))
    return job


def test_calls_are_counted_by_operation_and_data_type_the_most_frequent_first(job: JobDataset) -> None:
    job.collective("all", "AllReduce", MIB, times=3)
    job.collective("all", "AllReduce", 4, data_type="Float32")
    job.call("left", 0, "Send", 100, peer=1)
    assert find_ops(count_calls(job.open())) == (
        OpUse("AllReduce", "Float16", 12, 12 * MIB),
        OpUse("AllReduce", "Float32", 4, 16),
        OpUse("Send", "Float16", 1, 100),
    )


def test_the_size_table_is_exact_and_in_order(job: JobDataset) -> None:
    job.collective("all", "AllReduce", MIB)
    job.collective("left", "AllReduce", MIB)
    job.collective("all", "AllReduce", MIB + 2)
    job.collective("left", "AllGather", 6)
    assert find_sizes(count_calls(job.open())) == (
        SizeUse("AllGather", 6, 2),
        SizeUse("AllReduce", MIB, 6),
        SizeUse("AllReduce", MIB + 2, 4),
    )


def test_calls_of_unknown_size_are_counted_and_said_but_have_no_size(job: JobDataset) -> None:
    job.call("all", 0, "AllReduce", None)
    job.call("all", 1, "AllReduce", 8)
    counted = count_calls(job.open())
    (use,) = find_ops(counted)
    assert use == OpUse("AllReduce", "Float16", 2, 8, unsized_calls=1)
    assert use.known_payload_bytes == 8
    assert find_sizes(counted) == (SizeUse("AllReduce", 8, 1),)
    (unknown,) = unknown_of_calls(counted)
    assert unknown.row == 2
    assert unknown.reason.startswith("Of 1 call the size is not known")


def test_payload_of_calls_without_any_size_is_unknown_and_not_nothing(job: JobDataset) -> None:
    job.call("all", 0, "AllReduce", None)
    job.call("left", 0, "Broadcast", 0)
    unknown, nothing = find_ops(count_calls(job.open()))
    assert (unknown.known_payload_bytes, nothing.known_payload_bytes) == (None, 0)


def test_calls_without_an_operation_or_data_type_are_called_unknown(job: JobDataset) -> None:
    job.call("all", 0, None, 8, data_type=None)  # type: ignore[arg-type]
    assert find_ops(count_calls(job.open())) == (OpUse("unknown", "unknown", 1, 8),)


def test_a_recording_without_calls_counts_its_operations_and_says_so(job: JobDataset) -> None:
    job.operation("left", 1, "AllReduce", 64, 0, 10)
    counted = count_calls(job.open())
    assert find_ops(counted) == (OpUse("AllReduce", "Float16", 1, 64),)
    assert [one.row for one in unknown_of_calls(counted)] == [1]


def test_a_recording_of_nothing_has_no_operations_and_says_why(job: JobDataset) -> None:
    counted = count_calls(job.open())
    assert find_ops(counted) == ()
    assert find_sizes(counted) == ()
    assert cdf(find_sizes(counted)).quantile_bytes(0.5) is None
    assert [one.row for one in unknown_of_calls(counted)] == [1, 2, 3]


def test_each_communicator_has_its_members_calls_and_role(job: JobDataset) -> None:
    job.collective("all", "AllReduce", MIB)
    job.collective("left", "Broadcast", 10, peer=0)
    job.collective("left", "AllGather", 30)
    dataset = job.open()
    first, second = find_communicators(count_calls(dataset), find_gpus(dataset), {"all": "dp"})
    assert (first.comm, first.role, first.nranks, first.gpus, first.calls, first.payload_bytes) == (
        "all",
        "dp",
        4,
        (0, 1, 2, 3),
        4,
        4 * MIB,
    )
    assert (second.comm, second.role, second.gpus) == ("left", "unknown", (0, 1))
    assert second.ops == (OpUse("AllGather", "Float16", 2, 60), OpUse("Broadcast", "Float16", 2, 20))


def test_a_communicator_that_called_nothing_is_there_without_calls(job: JobDataset) -> None:
    dataset = job.open()
    uses = find_communicators(count_calls(dataset), find_gpus(dataset), {})
    assert [(use.comm, use.calls, use.ops) for use in uses] == [("left", 0, ()), ("all", 0, ())]


def test_the_distribution_counts_calls_of_all_operations() -> None:
    points = cdf(Sizes.from_uses([SizeUse("AllReduce", 100, 1), SizeUse("Send", 10, 2), SizeUse("Recv", 10, 1)]))
    assert (points.bytes.tolist(), points.calls_share.tolist()) == ([10, 100], [0.75, 1.0])
    assert points.quantile_bytes(0.75) == 10
    assert points.quantile_bytes(0.76) == 100
    assert cdf(Sizes.from_uses([])).quantile_bytes(0.5) is None


SIZES = st.lists(
    st.builds(SizeUse, st.sampled_from(["AllReduce", "Send"]), st.integers(0, 1 << 40), st.integers(1, 1 << 40)),
    min_size=1,
    max_size=30,
    unique_by=lambda use: (use.op, use.bytes),
)


@given(SIZES)
def test_a_distribution_rises_and_ends_at_exactly_one(sizes: list[SizeUse]) -> None:
    points = cdf(Sizes.from_uses(sizes))
    shares = points.calls_share.tolist()
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert points.bytes.tolist() == sorted({use.bytes for use in sizes})


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["AllReduce", "AllGather", "Broadcast"]),
        st.sampled_from(["Float16", "Float32"]),
        st.integers(0, 3),
        st.integers(0, 1 << 33),
    ),
    max_size=12,
)


@given(CALLS)
@settings(max_examples=8)
def test_the_order_of_calls_changes_nothing(calls: list[tuple[str, str, int, int]]) -> None:
    def found(
        order: list[tuple[str, str, int, int]],
    ) -> tuple[tuple[OpUse, ...], Sizes, tuple[CommunicatorUse, ...]]:
        with tempfile.TemporaryDirectory() as folder:
            job = JobDataset(Path(folder), servers=(2, 2))
            job.communicator("all", (0, 1, 2, 3))
            for op, data_type, rank, size in order:
                job.call("all", rank, op, size, data_type=data_type, peer=0)
            dataset = job.open()
            counted = count_calls(dataset)
            return find_ops(counted), find_sizes(counted), find_communicators(counted, find_gpus(dataset), {})

    ops, sizes, communicators = found(calls)
    assert found(calls[::-1]) == (ops, sizes, communicators)
    assert sum(use.calls for use in ops) == sum(use.calls for use in sizes) == len(calls)
    assert sum(use.bytes * use.calls for use in sizes) == sum(size for *_, size in calls)
