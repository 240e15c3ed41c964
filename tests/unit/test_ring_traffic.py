"""What a member of a ring sends to the next, against walking through the ring step by step."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.model.ring import RING_OPS, all_reduce_bytes, payloads_sent, ring_share

MEMBERS = st.integers(1, 9)


def walked(op: str, members: int, root: int) -> list[int]:
    """Payloads that each member hands on, as the data go around."""
    sent = [0] * members
    if op in ("AllGather", "ReduceScatter"):
        # Each part starts somewhere and passes every edge but the one that would bring it back.
        for start in range(members):
            for step in range(members - 1):
                sent[(start + step) % members] += 1
    else:
        # A chain that begins at the root, or ends in it.
        first = root if op == "Broadcast" else (root + 1) % members
        for step in range(members - 1):
            sent[(first + step) % members] += 1
    return sent


@given(st.sampled_from(sorted(RING_OPS - {"AllReduce"})), MEMBERS, st.data())
def test_whole_payloads_go_as_far_as_the_data_do(op: str, members: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, members - 1))
    place = np.arange(members)
    told = walked(op, members, root)
    assert payloads_sent(op, members, place, np.full(members, root)).tolist() == told
    assert [ring_share(op, members, each, root) for each in range(members)] == told


@given(st.integers(0, 1 << 40), st.integers(2, 40), st.sampled_from([1, 2, 4, 8]))
def test_a_ring_sends_whole_elements_and_twice_the_payload_for_all_but_one(
    payload: int, members: int, element: int
) -> None:
    sent = all_reduce_bytes(np.full(members, payload), np.full(members, element), members, np.arange(members))
    assert sent.sum() == 2 * payload * (members - 1)
    if payload % element == 0:
        assert not (sent % element).any()
    if payload % (element * members) == 0:
        assert {Fraction(each, payload) for each in sent.tolist() if payload} <= {
            ring_share("AllReduce", members, 0, -1)
        }


def test_a_ring_of_one_sends_nothing() -> None:
    alone = np.array([0])
    assert all_reduce_bytes(np.array([10]), np.array([2]), 1, alone).tolist() == [0]
    assert {ring_share(op, 1, 0, 0) for op in RING_OPS} == {0}


@pytest.mark.parametrize("root", [-1, 4])
def test_of_a_root_that_is_no_rank_nothing_is_told(root: int) -> None:
    assert [ring_share(op, 4, 1, root) for op in ("Broadcast", "Reduce")] == [0, 0]


def test_other_operations_have_no_ring() -> None:
    with pytest.raises(KeyError, match="AllToAll"):
        ring_share("AllToAll", 4, 0, 0)
