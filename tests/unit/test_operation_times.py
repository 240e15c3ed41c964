"""Sums of how long operations took: by rank while anybody asks, by kind and size for ever.  Readings are simulated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.snapshot import CompletedTotal, RankTimes
from railscope.agent.model.bus_factor import bus_factor
from railscope.agent.node.collectives.communicators import Communicator
from railscope.agent.node.collectives.operation_times import OperationTimes
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.records.internals import HISTORY, HISTORY_KEY, UNKNOWN_SIZE

Row = tuple[int, int, int, int, int, int]
"""Instance, op, size bucket, operations, ns, bytes."""


def reading(*rows: Row) -> tuple[Records, Records]:
    keys, values = np.zeros(len(rows), HISTORY_KEY), np.zeros(len(rows), HISTORY)
    for at, (instance, op, size, *sums) in enumerate(rows):
        keys[at] = instance, op, size, (0, 0)
        values[at] = tuple(sums)
    return keys, values


def who(instance: int) -> Communicator | None:
    """Four ranks of communicator 0xa; 99 is unknown, of 50 nobody knows how many ranks there are."""
    if instance == 99:
        return None
    return Communicator(instance, 1, 0, 0xA, instance % 10, nranks=None if instance == 50 else 4)


def test_busbw_and_algbw_follow_from_the_sums_as_nccl_tests_define_them() -> None:
    times = OperationTimes()
    times.record(*reading((10, Op.AllReduce, 20, 100, 2 * 10**9, 100 << 20)), who)
    assert times.by_size() == (CompletedTotal("AllReduce", 1 << 20, 100, 100 << 20, 150 << 20, 2.0),)
    assert times.by_rank() == (RankTimes("000000000000000a", "0", 100, 2.0),)


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        (Op.AllReduce, 1.75),
        (Op.AllGather, 7),
        (Op.ReduceScatter, 7),
        (Op.AllToAll, 7),
        (Op.Broadcast, 1),
        (Op.Send, None),
    ],
)
def test_factors_are_those_of_nccl_tests_for_payload_of_one_rank(op: Op, factor: float | None) -> None:
    assert bus_factor(op, 8) == factor


def test_ranks_and_sizes_are_told_apart_and_ranks_of_one_node_are_one_sum() -> None:
    times = OperationTimes()
    rows = (10, Op.AllReduce, 20, 1, 10, 5), (11, Op.AllReduce, 20, 2, 20, 6), (11, Op.AllReduce, 3, 4, 40, 7)
    times.record(*reading(*rows), who)
    assert {(one.rank, one.operations) for one in times.by_rank()} == {("0", 1), ("1", 6)}
    assert {(one.size_bytes, one.operations, one.payload_bytes) for one in times.by_size()} == {
        (1 << 20, 3, 11),
        (8, 4, 7),
    }


def test_the_node_s_sums_stay_when_a_communicator_ends_and_is_forgotten() -> None:
    times = OperationTimes()
    times.record(*reading((10, Op.AllReduce, 20, 10, 100, 1000)), who)
    times.record(*reading(), who)
    assert len(times.by_rank()) == 1, "it stays until it is forgotten"
    times.forget([10, 12345])
    assert times.by_rank() == ()
    times.record(*reading((11, Op.AllReduce, 20, 1, 10, 100)), who)
    assert [one.operations for one in times.by_size()] == [11]


def test_a_row_that_the_kernel_forgot_and_made_again_goes_on() -> None:
    times = OperationTimes()
    times.record(*reading((10, Op.AllReduce, 20, 10, 100, 1000)), who)
    times.record(*reading((10, Op.AllReduce, 20, 3, 30, 300)), who)
    assert [one.operations for one in times.by_size()] == [13]


def test_what_a_communicator_did_before_it_was_known_counts_when_it_is() -> None:
    times = OperationTimes()
    row = reading((99, Op.AllReduce, 20, 10, 100, 1000))
    times.record(*row, who)
    assert times.by_rank() == ()
    times.record(*row, lambda _instance: who(10))
    assert [one.operations for one in times.by_rank()] == [10]


def test_sizes_and_factors_that_are_not_known_are_left_out_of_bandwidth_but_not_of_a_rank_s_time() -> None:
    times = OperationTimes()
    rows = (10, Op.SendRecv, UNKNOWN_SIZE, 1, 10, 0), (10, Op.Gather, 5, 1, 10, 20), (50, Op.AllReduce, 20, 1, 10, 20)
    times.record(*reading(*rows), who)
    assert times.by_size() == ()
    assert sum(one.operations for one in times.by_rank()) == 3


@given(st.lists(st.tuples(st.sampled_from([10, 11, 12]), st.integers(0, 9), st.booleans()), max_size=60))
def test_the_node_s_sum_is_that_of_all_that_ever_ran_and_never_falls(steps: list[tuple[int, int, bool]]) -> None:
    times = OperationTimes()
    done = {10: 0, 11: 0, 12: 0}
    total = before = 0
    for instance, more, forget in steps:
        done[instance] += more
        total += more
        times.record(
            *reading(*((one, Op.AllReduce, 4, count, count, count * 16) for one, count in done.items() if count)), who
        )
        if forget:
            times.forget([instance])
            done[instance] = 0
        shown = sum(one.operations for one in times.by_size())
        assert shown == total >= before
        before = shown
