"""Expected wire bytes against a simulator that moves blocks from rank to rank and counts what crosses nodes."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.model.edge_share import Placement, WireShare, placement_of, wire_share
from railscope.agent.model.expected import whole_bytes
from railscope.probes.nccl.abi import Op

Message = tuple[int, int, int]
"""From rank, to rank, bytes."""

COLLECTIVES = (
    Op.AllReduce,
    Op.AllGather,
    Op.ReduceScatter,
    Op.Broadcast,
    Op.Reduce,
    Op.Scatter,
    Op.Gather,
    Op.AllToAll,
)


def bytes_of(share: Fraction | None, payload: int) -> int | None:
    return None if share is None else whole_bytes(share, np.array([payload], "u8"))


def gather_ring(n: int, block: int) -> Iterator[Message]:
    """Each rank passes on what it got last, until every rank holds every rank's block."""
    held = [{rank} for rank in range(n)]
    newest = list(range(n))
    while any(len(blocks) < n for blocks in held):
        newest = [newest[(rank - 1) % n] for rank in range(n)]
        for rank in range(n):
            held[rank].add(newest[rank])
            yield (rank - 1) % n, rank, block


def reduce_ring(n: int, block: int) -> Iterator[Message]:
    """Partial sums go round, each rank adding its own part, until every rank holds one complete sum."""
    partial = [{rank} for rank in range(n)]
    while any(len(contributions) < n for contributions in partial):
        partial = [partial[(rank - 1) % n] | {rank} for rank in range(n)]
        for rank in range(n):
            yield (rank - 1) % n, rank, block


def pipeline(ranks: list[int], block: int) -> Iterator[Message]:
    """A chain: each rank passes the whole buffer on, and the last one keeps it."""
    for sender, receiver in pairwise(ranks):
        yield sender, receiver, block


def messages(op: Op, n: int, root: int, payload: int) -> Iterator[Message]:
    """What NCCL's ring (or direct exchange) sends; `payload` is divisible by n."""
    match op:
        case Op.AllReduce:
            yield from reduce_ring(n, payload // n)
            yield from gather_ring(n, payload // n)
        case Op.AllGather:
            yield from gather_ring(n, payload)
        case Op.ReduceScatter:
            yield from reduce_ring(n, payload)
        case Op.Broadcast:
            yield from pipeline([(root + step) % n for step in range(n)], payload)
        case Op.Reduce:
            yield from pipeline([(root + 1 + step) % n for step in range(n)], payload)
        case Op.AllToAll:
            yield from ((sender, receiver, payload) for sender in range(n) for receiver in range(n))
        case Op.Scatter:
            yield from ((root, receiver, payload) for receiver in range(n))
        case Op.Gather:
            yield from ((sender, root, payload) for sender in range(n))
        case _:
            raise AssertionError(op)


def simulated(op: Op, nodes: int, local: int, root: int, payload: int) -> tuple[list[Fraction], list[Fraction]]:
    """Bytes that left and that entered each node."""
    egress, ingress = [Fraction(0)] * nodes, [Fraction(0)] * nodes
    for sender, receiver, block in messages(op, nodes * local, root, payload):
        if sender // local != receiver // local:
            egress[sender // local] += block
            ingress[receiver // local] += block
    return egress, ingress


def placements(nodes: int, local: int) -> list[Placement]:
    return [Placement(rank, nodes * local, rank // local, nodes, local) for rank in range(nodes * local)]


def known(placement: Placement, op: Op, peer: int) -> WireShare:
    share = wire_share(placement, op, peer)
    assert share is not None
    return share


def modelled(op: Op, nodes: int, local: int, root: int, payload: int) -> tuple[list[Fraction], list[Fraction]]:
    """Node totals as the sum over each node's ranks."""
    egress, ingress = [Fraction(0)] * nodes, [Fraction(0)] * nodes
    for placement in placements(nodes, local):
        share = known(placement, op, root)
        assert share.egress is not None
        assert share.ingress is not None
        egress[placement.node] += share.egress * payload
        ingress[placement.node] += share.ingress * payload
    return egress, ingress


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, int, int]:
    nodes = draw(st.integers(1, 6))
    local = draw(st.integers(1, 6))
    root = draw(st.integers(0, nodes * local - 1))
    return nodes, local, root, nodes * local * draw(st.integers(1, 1000))


@given(op=st.sampled_from(COLLECTIVES), job=jobs())
def test_every_node_sends_and_receives_what_the_simulated_ring_moved(op: Op, job: tuple[int, int, int, int]) -> None:
    assert modelled(op, *job) == simulated(op, *job)


@given(op=st.sampled_from(COLLECTIVES), job=jobs())
def test_what_leaves_all_nodes_enters_all_nodes(op: Op, job: tuple[int, int, int, int]) -> None:
    egress, ingress = modelled(op, *job)
    assert sum(egress) == sum(ingress)


@given(job=jobs(), sender=st.integers(0, 35), receiver=st.integers(0, 35))
def test_a_sent_message_leaves_one_node_and_enters_the_other(
    job: tuple[int, int, int, int], sender: int, receiver: int
) -> None:
    nodes, local, _, payload = job
    sender, receiver = sender % (nodes * local), receiver % (nodes * local)
    ranks = placements(nodes, local)
    sent = known(ranks[sender], Op.Send, receiver)
    received = known(ranks[receiver], Op.Recv, sender)
    crossing = payload if sender // local != receiver // local else 0
    assert (bytes_of(sent.egress, payload), bytes_of(sent.ingress, payload)) == (crossing, 0)
    assert (bytes_of(received.egress, payload), bytes_of(received.ingress, payload)) == (0, crossing)


@pytest.mark.parametrize("op", COLLECTIVES)
def test_inside_one_node_nothing_is_on_the_wire(op: Op) -> None:
    assert modelled(op, 1, 8, 3, 4096) == ([Fraction(0)], [Fraction(0)])


def test_the_figures_of_two_hosts_with_one_rank_each() -> None:
    ranks = placements(2, 1)
    assert bytes_of(known(ranks[0], Op.AllReduce, -1).egress, 1 << 20) == 1 << 20
    assert known(ranks[0], Op.Broadcast, 0) == WireShare(Fraction(1), Fraction(0))
    assert known(ranks[1], Op.Broadcast, 0) == WireShare(Fraction(0), Fraction(1))
    assert known(ranks[0], Op.Reduce, 0) == WireShare(Fraction(0), Fraction(1))
    assert known(ranks[1], Op.Reduce, 0) == WireShare(Fraction(1), Fraction(0))


def test_a_broadcast_from_the_middle_of_a_node_comes_back_into_that_node() -> None:
    egress, ingress = modelled(Op.Broadcast, 3, 4, 5, 12)
    assert egress == [12, 12, 12]
    assert ingress == [12, 12, 12]


def test_a_put_leaves_its_node_and_what_a_waiting_rank_got_is_not_known() -> None:
    here = placements(2, 2)[0]
    assert wire_share(here, Op.PutSignal, 3) == WireShare(Fraction(1), Fraction(0))
    assert wire_share(here, Op.PutSignal, 1) == WireShare(Fraction(0), Fraction(0))
    waiting = known(here, Op.WaitSignal, -1)
    assert waiting.egress == 0
    assert waiting.ingress is None


@pytest.mark.parametrize("op", list(Op))
def test_an_unknown_placement_gives_no_number(op: Op) -> None:
    assert wire_share(None, op, 0) is None


@pytest.mark.parametrize("op", [Op.SendRecv, Op.AllGatherV, Op.Unknown])
def test_an_operation_without_a_model_gives_no_number(op: Op) -> None:
    assert wire_share(placements(2, 2)[0], op, 0) is None


@pytest.mark.parametrize("peer", [-1, 4])
def test_a_peer_that_is_no_rank_gives_no_number(peer: int) -> None:
    assert wire_share(placements(2, 2)[0], Op.Send, peer) is None
    assert wire_share(placements(2, 2)[0], Op.AllReduce, peer) is not None


def test_ranks_dealt_round_robin_keep_the_ring_but_not_the_peers_node() -> None:
    dealt = Placement(rank=1, nranks=4, node=1, n_nodes=2, local_ranks=2)
    assert wire_share(dealt, Op.AllReduce, -1) == wire_share(placements(2, 2)[3], Op.AllReduce, -1)
    assert wire_share(dealt, Op.Send, 0) is None
    assert wire_share(dealt, Op.Broadcast, 0) is None


def test_nodes_of_different_sizes_keep_the_ring_but_not_the_peers_node() -> None:
    short = Placement(rank=2, nranks=3, node=1, n_nodes=2, local_ranks=1)
    assert wire_share(short, Op.AllGather, -1) == WireShare(Fraction(2), Fraction(2))
    assert wire_share(short, Op.Send, 0) is None


@given(
    op=st.sampled_from(COLLECTIVES),
    job=jobs(),
    payloads=st.lists(st.integers(0, 1 << 40), min_size=2, max_size=6),
)
def test_cumulative_bytes_never_fall_and_lose_less_than_one_byte(
    op: Op, job: tuple[int, int, int, int], payloads: list[int]
) -> None:
    nodes, local, root, _ = job
    share = known(placements(nodes, local)[0], op, root)
    assert share.egress is not None
    previous = 0
    for payload in sorted(payloads):
        whole = bytes_of(share.egress, payload)
        assert whole is not None
        assert whole >= previous
        assert 0 <= share.egress * payload - whole < 1
        previous = whole


@pytest.mark.parametrize(
    "numbers",
    [
        (-1, 4, 0, 2, 2),
        (4, 4, 0, 2, 2),
        (0, 4, 2, 2, 2),
        (0, 4, -1, 2, 2),
        (0, 4, 0, 0, 2),
        (0, 4, 0, 2, 0),
        (0, 4, 0, 2, 4),
        (0, 4, 0, 1, 2),
        (0, 2, 0, 3, 1),
    ],
)
def test_numbers_that_describe_no_placement_are_refused(numbers: tuple[int, int, int, int, int]) -> None:
    assert placement_of(*numbers) is None


@given(job=jobs())
def test_numbers_of_a_real_job_are_accepted(job: tuple[int, int, int, int]) -> None:
    nodes, local, *_ = job
    for expected in placements(nodes, local):
        assert placement_of(expected.rank, expected.nranks, expected.node, nodes, local) == expected
        assert expected.contiguous
