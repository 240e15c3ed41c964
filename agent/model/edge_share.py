"""How many bytes a collective should move across its node's edge.

Payload is what the caller hands to NCCL (count × size of the data type); wire is what of it has to leave and to enter
the node.  The factor between them follows from NCCL's algorithms.  This module knows the rings and the direct
exchanges, for N nodes of L ranks each and n = N·L ranks, numbered node by node, and a payload of b bytes:

| Operation                 | leaves a node                               | enters a node                            |
|---------------------------|---------------------------------------------|------------------------------------------|
| AllReduce                 | 2b(n−1)/n                                   | the same                                 |
| AllGather, ReduceScatter  | (n−1)b                                      | the same                                 |
| Broadcast                 | b, but 0 where the chain ends               | b, but 0 where the chain begins (root)   |
| Reduce                    | b, but 0 where the chain ends (root)        | b, but 0 where the chain begins          |
| AlltoAll                  | L(n−L)b                                     | the same                                 |
| Scatter                   | root's node (n−L)b, others 0                | root's node 0, others Lb                 |
| Gather                    | root's node 0, others Lb                    | root's node (n−L)b, others 0             |
| Send                      | b if the peer is on another node            | 0                                        |
| Recv                      | 0                                           | b if the peer is on another node         |
| PutSignal                 | b if the peer is on another node            | 0 (the target makes no call with a size) |
| Signal                    | 0 (a flag of a few bytes)                   | 0                                        |
| WaitSignal                | 0                                           | cannot be known: others' puts arrived    |

A ring visits the ranks in order and closes: every node has one edge in and one edge out, and a ring operation loads
each of them once however many ranks the node has.  Broadcast uses all edges but the one that leads back to the root
(root−1 → root); Reduce all but the one that leaves the root (root → root+1).  Only where that unused edge joins two
nodes does a node see less than b.  So Broadcast has an idle edge between nodes if the root is the first rank of its
node, and Reduce if the root is the last; otherwise the chain leaves the root's node and ends in it.

A rank's call counts for 1/L of its node's total, so that the sum over the node's ranks is the total; Send, Recv and
PutSignal are calls of one rank and count in full.

What this is not: protocol overhead (headers; LL doubles the data), tree, CollNet and NVLS algorithms, and rings that
NCCL rotates within the node (for rooted operations, part of the channels then have their idle edge elsewhere).
Operations inside one node put nothing on the wire.  What cannot be known is None, never 0.

Source: NCCL's ring kernels (src/device/all_reduce.h, all_gather.h, reduce_scatter.h, broadcast.h, reduce.h,
sendrecv.h) and src/enqueue.cc of 2.30.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

from railscope.probes.nccl.abi import Op


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a rank of a communicator runs."""

    rank: int
    nranks: int
    node: int
    """Index of the rank's node among the communicator's nodes."""
    n_nodes: int
    local_ranks: int
    """Ranks of the communicator on this node."""

    @property
    def contiguous(self) -> bool:
        """Whether rank // local_ranks names every rank's node, as far as one rank can tell."""
        return self.nranks == self.n_nodes * self.local_ranks and self.rank // self.local_ranks == self.node


@dataclass(frozen=True, slots=True)
class WireShare:
    """Wire bytes for each payload byte of one rank's calls; None where it cannot be known."""

    egress: Fraction | None
    ingress: Fraction | None


_ZERO: Final = Fraction(0)
_NOTHING: Final = WireShare(_ZERO, _ZERO)


def placement_of(rank: int, nranks: int, node: int, n_nodes: int, local_ranks: int) -> Placement | None:
    """The placement of a communicator's ranks on nodes; None if these numbers describe none (not read yet, misread)."""
    possible = (
        0 <= rank < nranks
        and 0 <= node < n_nodes <= nranks
        and 1 <= local_ranks <= nranks - (n_nodes - 1)  # every other node has at least one rank
        and (n_nodes > 1 or local_ranks == nranks)
    )
    return Placement(rank, nranks, node, n_nodes, local_ranks) if possible else None


@lru_cache(maxsize=1 << 14)
def wire_share(placement: Placement | None, op: Op, peer: int) -> WireShare | None:
    """What one rank's call adds to its node's egress and ingress, for each byte of payload.

    The payload is the sum over calls of count × size of the data type, with NCCL's meaning of count: per rank for
    AllGather, ReduceScatter, AlltoAll, Scatter and Gather.  `peer` is the root of Broadcast, Reduce, Scatter and
    Gather, the other rank of Send, Recv and PutSignal, and is not looked at otherwise.

    Returns None if it cannot be known: unknown placement, an operation without a model, or one that depends on where
    the peer runs while ranks are not numbered node by node.
    """
    if placement is None:
        return None
    if placement.n_nodes == 1:
        return _NOTHING
    n, local = placement.nranks, placement.local_ranks
    match op:
        case Op.AllReduce:
            return _both(Fraction(2 * (n - 1), n * local))
        case Op.AllGather | Op.ReduceScatter:
            return _both(Fraction(n - 1, local))
        case Op.AllToAll:
            return _both(Fraction(n - local))
        case Op.Signal:
            return _NOTHING
        case Op.WaitSignal:
            return WireShare(_ZERO, None)
        case Op.Broadcast | Op.Reduce | Op.Scatter | Op.Gather | Op.Send | Op.Recv | Op.PutSignal:
            if not placement.contiguous or not 0 <= peer < n:
                return None
            return _addressed_share(placement, op, peer)
        case _:
            return None


def _addressed_share(placement: Placement, op: Op, peer: int) -> WireShare:
    """The operations whose bytes depend on a root or peer; ranks are numbered node by node."""
    n, local, node = placement.nranks, placement.local_ranks, placement.node
    here = peer // local == node
    remote = Fraction(0 if here else 1)
    match op:
        case Op.Send | Op.PutSignal:
            return WireShare(remote, _ZERO)
        case Op.Recv:
            return WireShare(_ZERO, remote)
        case Op.Scatter:
            return WireShare(Fraction(n - local, local), _ZERO) if here else WireShare(_ZERO, Fraction(1))
        case Op.Gather:
            return WireShare(_ZERO, Fraction(n - local, local)) if here else WireShare(Fraction(1), _ZERO)
        case Op.Broadcast:
            return _chain_share(placement, (peer - 1) % n, peer)
        case _:
            return _chain_share(placement, peer, (peer + 1) % n)


def _chain_share(placement: Placement, idle_from: int, idle_to: int) -> WireShare:
    """A ring's pass over all edges but the one between two neighbouring ranks."""
    local, node = placement.local_ranks, placement.node
    from_node, to_node = idle_from // local, idle_to // local
    between_nodes = from_node != to_node
    full = Fraction(1, local)
    return WireShare(
        _ZERO if between_nodes and node == from_node else full,
        _ZERO if between_nodes and node == to_node else full,
    )


def _both(share: Fraction) -> WireShare:
    return WireShare(share, share)
