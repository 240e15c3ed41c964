"""Readings with a shape taken in at once, against the same taken in one by one.  Simulated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.node.sampling.shaped_totals import ShapedTotals
from railscope.probes.netdev.counters import CounterBlock, CounterShape
from tests.unit.test_rdma_totals import FIELDS, MAXIMA, SATURATING

MILLISECOND = 1_000_000
ROWS = 2
counter = st.one_of(st.integers(0, 300), st.integers(0, 2**40), st.sampled_from([255, 2**32 - 1, 2**64 - 1]))


def block_of(values: list[list[int]], known: list[bool], *, rising: bool, first_ns: int) -> CounterBlock:
    shown = np.array(values, dtype=np.uint64).reshape(len(values), ROWS, len(FIELDS))
    if rising:
        shown = np.cumsum(shown % np.uint64(100), axis=0, dtype=np.uint64)
    maxima = np.tile(np.array(MAXIMA, dtype=np.uint64), (ROWS, 1))
    shape = CounterShape(np.array(known).reshape(ROWS, -1), maxima, np.tile(np.array(SATURATING), (ROWS, 1)))
    shown = np.where(shape.known, np.minimum(shown, maxima), np.uint64(0))
    times = tuple((first_ns + at * MILLISECOND, first_ns + at * MILLISECOND + 10) for at in range(len(values)))
    return CounterBlock(times, ("a/1", "b/1"), (1, 2), FIELDS, shown, shape)


@settings(deadline=None)
@given(
    st.lists(st.lists(counter, min_size=ROWS * len(FIELDS), max_size=ROWS * len(FIELDS)), min_size=2, max_size=8),
    st.lists(st.booleans(), min_size=ROWS * len(FIELDS), max_size=ROWS * len(FIELDS)),
    st.lists(st.booleans(), min_size=ROWS * len(FIELDS), max_size=ROWS * len(FIELDS)),
    st.booleans(),
    st.booleans(),
)
def test_a_block_is_its_readings_one_after_the_other(
    values: list[list[int]], known: list[bool], known_before: list[bool], rising: bool, rates: bool
) -> None:
    before = block_of(values[:1], known_before, rising=rising, first_ns=0)
    block = block_of(values, known, rising=rising, first_ns=MILLISECOND)
    one, other = ShapedTotals(FIELDS), ShapedTotals(FIELDS)
    for totals in (one, other):
        totals.add(before.reading(0), rates=False)
    for number in range(len(values)):
        one.add(block.reading(number), rates=rates or number > 0)
    other.add_block(block, rates=rates)
    assert (other.totals == one.totals).all()
    assert (other.counts == one.counts).all()
    assert other.sums == pytest.approx(one.sums)
    assert (other.pinned == one.pinned).all()
    assert (other.counted == one.counted).all()
    assert other.resets == one.resets


def test_counters_that_rise_are_taken_in_together() -> None:
    """Not one by one: that is what a block is for."""
    known = [True] * (ROWS * len(FIELDS))
    totals = ShapedTotals(FIELDS)
    values = [[at] * (ROWS * len(FIELDS)) for at in range(10)]
    totals.add(block_of(values[:1], known, rising=False, first_ns=0).reading(0), rates=False)
    totals.add = None  # type: ignore[assignment, method-assign]
    totals.add_block(block_of(values, known, rising=False, first_ns=MILLISECOND), rates=True)
    assert int(totals.totals[0, 0]) == 9
