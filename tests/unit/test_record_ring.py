"""The ring of the last records against a list that keeps everything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.node.recorder.ring import RecordRing

RECORD = np.dtype([("time_ns", "<u8"), ("value", "<u4"), ("reserved", "<u4")])


@given(
    capacity=st.integers(1, 12),
    sizes=st.lists(st.integers(0, 30), max_size=12),
    since=st.integers(0, 120),
    gaps=st.booleans(),
)
def test_it_holds_the_last_records_in_their_order(capacity: int, sizes: list[int], since: int, gaps: bool) -> None:
    ring = RecordRing(RECORD, capacity)
    everything: list[int] = []
    for size in sizes:
        # As they lie in the kernel's ring: each behind a header.
        batch = np.zeros(2 * size, RECORD)[::2] if gaps else np.zeros(size, RECORD)
        batch["time_ns"] = batch["value"] = len(everything) + np.arange(size)
        everything += batch["value"].tolist()
        ring.add(batch)
    held = everything[-capacity:]
    found, oldest_ns = ring.read_since(since)
    assert found["value"].tolist() == [value for value in held if value >= since]
    assert oldest_ns == (held[0] if len(everything) > capacity else None)
    assert ring.added == len(everything)


def test_what_was_taken_out_does_not_change_with_the_ring() -> None:
    ring = RecordRing(RECORD, 2)
    ring.add(np.array([(1, 1, 0), (2, 2, 0)], RECORD))
    found, _ = ring.read_since(0)
    ring.add(np.array([(3, 3, 0), (4, 4, 0)], RECORD))
    assert found["value"].tolist() == [1, 2]


def test_a_ring_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one record, not 0"):
        RecordRing(RECORD, 0)
