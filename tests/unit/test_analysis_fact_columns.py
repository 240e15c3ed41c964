"""Facts as columns: they are what the same facts as objects would be, and take little memory."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.facts.fact_columns import Pairs, PairTraffic, Sizes, SizeUse, largest_indices
from railscope.agent.analysis.report.report_json import json_parts
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.traffic.traffic import _PairSums, find_traffic
from tests.unit.datasets import JobDataset
from tests.unit.model_shapes import GPT_3B
from tests.unit.reports import report_of_shape

THREE = (PairTraffic(0, 1, 10), PairTraffic(0, 2, 30), PairTraffic(2, 0, 30))


def test_columns_are_equal_to_the_same_facts_in_a_row() -> None:
    pairs = Pairs.from_pairs(THREE)
    assert pairs == THREE
    assert pairs == THREE
    assert pairs == Pairs.from_pairs(THREE)
    assert pairs != THREE[:2]
    assert pairs != Pairs.from_pairs(THREE[:2])
    assert Pairs.from_pairs(()) == ()
    assert pairs[-1] == THREE[-1]
    assert pairs[1:] == list(THREE[1:])
    assert tuple(pairs) == THREE
    assert THREE[1] in pairs
    with pytest.raises(IndexError):
        pairs[3]


def test_the_busiest_come_first_and_of_equal_ones_the_first() -> None:
    assert Pairs.from_pairs(THREE).busiest(2) == [THREE[1], THREE[2]]
    assert Pairs.from_pairs(THREE).total_bytes == 70


def test_sizes_of_several_operations_are_put_together_by_size() -> None:
    sizes = Sizes.from_uses([SizeUse("Send", 8, 2), SizeUse("Send", 4, 1), SizeUse("AllReduce", 8, 3)])
    assert [use.op for use in sizes] == ["AllReduce", "Send", "Send"]
    found, calls = sizes.sum_over_ops()
    assert (found.tolist(), calls.tolist()) == ([4, 8], [1, 5])
    assert [column.tolist() for column in sizes.sizes_of_op(1)] == [[4, 8], [1, 2]]
    assert sizes.most_frequent(1) == [SizeUse("AllReduce", 8, 3)]


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 12))
def test_the_largest_are_those_that_sorting_finds(values: list[int], most: int) -> None:
    expected = sorted(range(len(values)), key=lambda place: (-values[place], place))[:most]
    assert largest_indices(np.array(values, dtype=np.int64), most) == expected


@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 4), st.integers(0, 1 << 50)), max_size=60))
@settings(max_examples=50)
def test_pairs_add_up_whether_few_or_all_of_them_talk(moved: list[tuple[int, int, int]]) -> None:
    sums = _PairSums(5)
    expected: defaultdict[tuple[int, int], int] = defaultdict(int)
    unobserved = 0
    for source, destination, count in moved:
        sums.add(*(np.array([value], dtype=np.int64) for value in (source, destination, count)))
        if source != destination or source < 0:
            if min(source, destination) < 0:
                unobserved += count
            else:
                expected[source, destination] += count
    assert sums.unobserved_bytes == unobserved
    assert sums.pairs() == [PairTraffic(*pair, count) for pair, count in sorted(expected.items()) if count]


def test_an_all_to_all_of_many_ranks_takes_a_few_bytes_a_pair(tmp_path: Path) -> None:
    ranks = 400
    job = JobDataset(tmp_path, servers=(8,) * (ranks // 8))
    job.communicator("all", range(ranks))
    job.collective("all", "AllToAll", 6)
    dataset = job.open()
    gpus, counted = find_gpus(dataset), count_calls(dataset)
    tracemalloc.start()
    try:
        traffic, _ = find_traffic(dataset, gpus, counted)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    pairs = ranks * (ranks - 1)
    assert len(traffic.pairs) == pairs
    assert traffic.pairs.total_bytes == 6 * pairs
    assert traffic.cross_rail_wire_bytes == 6 * ranks * (ranks - 8) * 7 // 8
    assert held < 24 * pairs
    assert most < 80 * pairs


def test_json_is_made_in_parts_that_are_small() -> None:
    many = 60_000
    sizes = Sizes(["AllReduce"], np.zeros(many), np.arange(many), np.ones(many))
    parts = list(json_parts(replace(report_of_shape(GPT_3B), sizes=sizes)))
    assert sum(map(len, parts)) > 3_000_000
    assert max(map(len, parts)) < 1_000_000
