"""Which ranks send how much to which others in an iteration: wire bytes of every directed pair, and what leaves nodes.

A collective is a single directed ring in the order of its members, as the papers draw it: an AllReduce of b bytes
among g ranks puts 2b(g−1)/g on each edge, pipeline neighbours send straight to each other, and the two ends of the
pipeline make a ring of two.  NCCL's own rings may run in another order and several at once, and its trees use other
pairs: what a rank sends in all is the same, to whom is not.

What a ring's members send is that of `railscope.agent.model.ring`, which recordings are counted by as well: bytes are
exact also where g does not divide the payload, and add up to 2b(g−1).

Pairs are kept as a list, not as a matrix: ten thousand ranks have forty thousand pairs that talk, of a hundred
million.

Ranks fill nodes in order: rank r is GPU r mod g of node r div g.  On a rail-optimised fabric every GPU has a NIC of
its own, and the NICs of the same local GPU meet at the same leaf switch; so a GPU's rail is its local index, and bytes
between different rails of different nodes cross the spine.  (NCCL may carry such bytes over NVLink to the GPU of the
right rail first, which spares the spine but not the NIC.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from railscope.agent.model.mapping import Mapping
from railscope.agent.model.ring import all_reduce_bytes
from railscope.agent.model.shape import ELEMENT_BYTES, Mode, Shape, ShapeError
from railscope.agent.model.volumes import StageVolumes, stage_volumes

FLOW: Final = np.dtype([("kind", "u1"), ("source", "i4"), ("destination", "i4"), ("bytes", "i8")])
"""Wire bytes of one kind from one rank to another; `kind` is a `Kind`."""
Flows = NDArray[np.void]
"""An array of FLOW."""
_MOST_BYTES: Final = (1 << 63) - 1


class Kind(IntEnum):
    """What the bytes are for."""

    TP = 0
    PP = 1
    DP = 2
    EMBEDDING_SYNC = 3


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Wire bytes between ranks."""

    ranks: int
    """Of the job; they are numbered from 0."""
    flows: Flows
    """Each kind and directed pair once, none empty, in order of kind, source and destination."""

    def select_kind(self, kind: Kind) -> Traffic:
        """What one parallelism sends."""
        return Traffic(self.ranks, self.flows[self.flows["kind"] == kind])

    @property
    def total_bytes(self) -> int:
        return int(self.flows["bytes"].sum())

    def pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Source, destination and bytes of each directed pair over all kinds, in order of source and destination."""
        keys = self.flows["source"].astype(np.int64) * self.ranks + self.flows["destination"]
        distinct, places = np.unique(keys, return_inverse=True)
        return distinct // self.ranks, distinct % self.ranks, _sums(places, self.flows["bytes"], len(distinct))

    @property
    def pair_count(self) -> int:
        """Directed pairs that talk, each once also where several kinds use it."""
        return len(self.pairs()[0])

    @property
    def possible_pairs(self) -> int:
        """All directed pairs, n(n−1): the denominator of sparsity."""
        return self.ranks * (self.ranks - 1)

    def sent_bytes(self) -> NDArray[np.int64]:
        """What each rank sends."""
        return _sums(self.flows["source"], self.flows["bytes"], self.ranks)

    def received_bytes(self) -> NDArray[np.int64]:
        """What each rank receives."""
        return _sums(self.flows["destination"], self.flows["bytes"], self.ranks)

    def peers(self, rank: int) -> dict[int, int]:
        """Bytes that one rank sends, by the rank that receives them."""
        sources, destinations, counts = self.pairs()
        own = sources == rank
        return dict(zip(destinations[own].tolist(), counts[own].tolist(), strict=True))

    def matrix(self) -> NDArray[np.int64]:
        """Bytes by source (row) and destination (column); eight bytes for each of n² pairs, so for small jobs only."""
        dense = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        sources, destinations, counts = self.pairs()
        dense[sources, destinations] = counts
        return dense


def estimate_traffic(shape: Shape, mapping: Mapping, mode: Mode = Mode.EXACT) -> Traffic:
    """What a job puts on the wire in an iteration by the analytical model, between ranks as the mapping numbers them.

    By the paper's equations a pipeline link carries equation 3 in each direction, so that a stage in the middle, with
    two links, sends twice its row in `stage_volumes`.

    Raises:
        ShapeError: the mapping is not of this shape, or there are more bytes than 64 bits can count.
    """
    mapping.check_fits(shape)
    ranks = mapping.ranks
    stages = [stage_volumes(shape, mode, stage) for stage in range(shape.pipeline)]
    _check_countable(shape, stages)
    parts = []
    for stage, volumes in enumerate(stages):
        parts.append(_rings(Kind.TP, ranks[stage], volumes.tp.bytes + volumes.loss.bytes))
        parts.append(_rings(Kind.DP, ranks[stage].T, volumes.dp.bytes))
    if shape.pipeline > 1:
        one_way = shape.micro_batches * shape.activation_bytes
        parts.append(_flows(Kind.PP, ranks[:-1], ranks[1:], one_way))
        parts.append(_flows(Kind.PP, ranks[1:], ranks[:-1], one_way))
        ends = np.stack([ranks[0].ravel(), ranks[-1].ravel()], axis=1)
        parts.append(_rings(Kind.EMBEDDING_SYNC, ends, stages[0].embedding_sync.bytes))
    flows = np.concatenate(parts)
    return Traffic(mapping.count, flows[np.lexsort((flows["destination"], flows["source"], flows["kind"]))])


def ring_edge_bytes(payload_bytes: int, members: int) -> NDArray[np.int64]:
    """What each member of a ring sends to the next in an AllReduce of `payload_bytes`, by its place in the ring.

    The payload must be of whole elements of two bytes.  A ring of one sends nothing.
    """
    payload, element = np.array(payload_bytes), np.array(ELEMENT_BYTES)
    return all_reduce_bytes(payload, element, members, np.arange(members))


def _rings(kind: Kind, groups: NDArray[np.int64], payload_bytes: int) -> Flows:
    """An AllReduce in each row of `groups`, whose columns are the places in the ring."""
    members = groups.shape[1]
    if members == 1 or not payload_bytes:
        return np.empty(0, dtype=FLOW)
    return _flows(kind, groups, np.roll(groups, -1, axis=1), ring_edge_bytes(payload_bytes, members))


def _flows(kind: Kind, sources: NDArray[Any], destinations: NDArray[Any], count: NDArray[np.int64] | int) -> Flows:
    """One flow for each element; `count` is spread over them.  Flows without bytes are left out."""
    flows = np.empty(sources.shape, dtype=FLOW)
    flows["kind"] = kind
    flows["source"] = sources
    flows["destination"] = destinations
    flows["bytes"] = count
    flat = flows.ravel()
    return flat[flat["bytes"] > 0]


def _check_countable(shape: Shape, stages: list[StageVolumes]) -> None:
    """No sum over flows may pass 64 bits."""
    replicas = shape.tensor * shape.data
    total = sum(sum(2 * count for count in _payloads(volumes)) * replicas for volumes in stages)
    if total > _MOST_BYTES:
        raise ShapeError("the job sends more bytes in an iteration than 64 bits can count: check its sizes")


def _payloads(volumes: StageVolumes) -> Iterator[int]:
    yield volumes.tp.bytes + volumes.loss.bytes
    yield from (volumes.pp_send.bytes, volumes.dp.bytes, volumes.embedding_sync.bytes)


def _sums(places: NDArray[Any], counts: NDArray[Any], size: int) -> NDArray[np.int64]:
    """Sums of `counts` by place; whole numbers, where bincount would make floats."""
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, places, counts)
    return sums


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes that ranks fill in order.

    Raises:
        ShapeError: the ranks do not fill whole nodes.
    """

    ranks: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        if self.gpus_per_node < 1:
            raise ShapeError(f"{self.gpus_per_node} GPUs a node: there must be at least one")
        if self.ranks % self.gpus_per_node:
            raise ShapeError(
                f"{self.ranks} ranks do not fill nodes of {self.gpus_per_node} GPUs: choose GPUs a node that divide "
                f"{self.ranks}"
            )

    @property
    def count(self) -> int:
        return self.ranks // self.gpus_per_node

    def inter_node_bytes(self, traffic: Traffic) -> int:
        """Wire bytes between ranks of different nodes."""
        return int(traffic.flows["bytes"][self._leaving(traffic)].sum())

    def nic_transmit_bytes(self, traffic: Traffic) -> NDArray[np.int64]:
        """What each rank sends to other nodes, over the NIC beside its GPU."""
        leaving = traffic.flows[self._leaving(traffic)]
        return Traffic(traffic.ranks, leaving).sent_bytes()

    def node_transmit_bytes(self, traffic: Traffic) -> NDArray[np.int64]:
        """What each node sends to others."""
        by_node: NDArray[np.int64] = (
            self.nic_transmit_bytes(traffic).reshape(self.count, self.gpus_per_node).sum(axis=1)
        )
        return by_node

    def cross_rail_bytes(self, traffic: Traffic) -> int:
        """Wire bytes between different rails of different nodes."""
        flows = traffic.flows
        other_rail = flows["source"] % self.gpus_per_node != flows["destination"] % self.gpus_per_node
        return int(flows["bytes"][self._leaving(traffic) & other_rail].sum())

    def _leaving(self, traffic: Traffic) -> NDArray[np.bool_]:
        flows = traffic.flows
        leaving: NDArray[np.bool_] = flows["source"] // self.gpus_per_node != flows["destination"] // self.gpus_per_node
        return leaving
