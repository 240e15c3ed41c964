"""Computes the traffic demand of a job's groups, independent of where their members run.

A group's collectives are a ring, and what each member sends to the next is that of `traffic`; Sends, AllToAlls and
rooted scatters go straight.  Where other servers are given to the members, the ring visits the servers one after the
other, as NCCL's does: members keep their order within a server, and servers that of their first members.

The model's own prediction from (p, t, d) needs layers and sizes that no recorded call shows (`railscope estimate`).
`predicted_traffic` needs only the payloads by role, that were recorded or assumed, and a mapping.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from railscope.agent.analysis.facts.fact_columns import PairTraffic
from railscope.agent.analysis.parallelism.groups import DP, EMBEDDING, ROLES, TP, Groups
from railscope.agent.analysis.tables.calls import CountedCalls
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.analysis.tables.grouping import Integers, sum_by_group
from railscope.agent.model.mapping import Mapping as RankMapping
from railscope.agent.model.ring import ALL_REDUCE, RING_OPS, all_reduce_bytes, payloads_sent
from railscope.agent.model.traffic import ring_edge_bytes
from railscope.probes.nccl.abi import DATA_TYPE_BYTES

_ELEMENT_BYTES = {kind.name: max(size, 1) for kind, size in DATA_TYPE_BYTES.items()}


@dataclass(frozen=True, slots=True)
class RingDemand:
    """The collectives of one group over a ring."""

    role: str
    gpus: tuple[int, ...]
    """By rank."""
    sent_bytes: tuple[int, ...]
    """By rank: wire bytes to the next."""


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """What goes from one GPU to another, as columns of equal length; a pair may come several times."""

    role: Integers
    """Index in `ROLES`."""
    source: Integers
    destination: Integers
    wire_bytes: Integers

    @classmethod
    def concatenate(cls, parts: Sequence[Flows]) -> Flows:
        """All of them."""
        names = cls.__slots__
        empty = np.empty(0, dtype=np.int64)
        return cls(*(np.concatenate([empty, *(getattr(part, name) for part in parts)]) for name in names))


@dataclass(frozen=True, eq=False)
class Demands:
    """Everything that the recorded groups send, in wire bytes over the whole recording."""

    rings: tuple[RingDemand, ...]
    pairs: Flows
    """What goes straight from one GPU to another."""

    def flows(self, server: Sequence[int]) -> Flows:
        """What is sent where GPU k runs on server[k]."""
        ring, place, role, gpu, sent = self._members
        own = np.array(server, dtype=np.int64)[gpu]
        # Servers come in the order of their first members, and members in that of their ranks.
        together = np.lexsort((place, own, ring))
        begins = np.ones(len(together), dtype=np.bool_)
        begins[1:] = (np.diff(ring[together]) != 0) | (np.diff(own[together]) != 0)
        first = np.empty(len(together), dtype=np.int64)
        first[together] = place[together][np.flatnonzero(begins)][np.cumsum(begins) - 1]
        source = gpu[np.lexsort((place, first, ring))]
        # The last one of a ring sends to its first one.
        starts = np.flatnonzero(place == 0)
        following = np.arange(1, len(place) + 1)
        following[np.append(starts[1:], len(place))[: len(starts)] - 1] = starts
        around = Flows(role, source, source[following] if len(source) else source, sent)
        return Flows.concatenate([self.pairs, around])

    @cached_property
    def _members(self) -> tuple[Integers, Integers, Integers, Integers, Integers]:
        """Of all members of rings: ring, place in it, role, GPU, and what the member at this place sends on."""
        sizes = np.array([len(ring.gpus) for ring in self.rings], dtype=np.int64)
        ring = np.repeat(np.arange(len(sizes)), sizes)
        place = np.arange(len(ring)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        role = np.repeat(np.array([ROLES.index(ring.role) for ring in self.rings], dtype=np.int64), sizes)
        gpu, sent = (
            np.array([one for ring in self.rings for one in getattr(ring, name)], dtype=np.int64)
            for name in ("gpus", "sent_bytes")
        )
        return ring, place, role, gpu, sent


def find_demands(counted: CountedCalls, gpus: Gpus, groups: Groups) -> Demands:
    """What the stages, replicas and tensor groups of a job sent, as far as all members of a group are recorded."""
    # A rank that is none of the communicator's, as damaged data has it, makes it one that is not known whole.
    whole = [
        one
        for one in gpus.communicators
        if one.complete and len(one.members) > 1 and max(one.members) < len(one.members)
    ]
    numbers = {one.comm: number for number, one in enumerate(whole)}
    comm_of_end = np.array([_number(gpus, numbers, end) for end in counted.ends], dtype=np.int64)
    rank_of_end = np.array([gpus.rank_of.get(end, 0) for end in counted.ends], dtype=np.int64)
    comm = comm_of_end[counted.end]
    by_comm = np.argsort(comm, kind="stable")
    bounds = np.searchsorted(comm[by_comm], np.arange(len(whole) + 1))
    rings: list[RingDemand] = []
    pairs: list[Flows] = []
    for number, one in enumerate(whole):
        rows = by_comm[bounds[number] : bounds[number + 1]]
        ranks = rank_of_end[counted.end[rows]]
        members = tuple(one.members[rank] for rank in range(len(one.members)))
        role = groups.roles[one.comm]
        sent = _ring_bytes(counted, rows, ranks, len(members))
        if any(sent):
            rings.append(RingDemand(role, members, tuple(sent)))
        source, destination, count = _direct(counted, rows, ranks, len(members))
        gpu = np.array(members, dtype=np.int64)
        pairs.append(Flows(np.full(len(count), ROLES.index(role)), gpu[source], gpu[destination], count))
    return Demands(tuple(rings), Flows.concatenate(pairs))


def _number(gpus: Gpus, numbers: Mapping[str, int], end: tuple[int, int]) -> int:
    communicator = gpus.communicator_of.get(end)
    return -1 if communicator is None else numbers.get(communicator.comm, -1)


def _ring_bytes(counted: CountedCalls, rows: Integers, ranks: Integers, members: int) -> list[int]:
    sent = np.zeros(members, dtype=np.int64)
    payload = np.maximum(counted.payload_bytes[rows], 0)
    sizes = np.array([_ELEMENT_BYTES.get(name, 1) for name in counted.type_names], dtype=np.int64)
    for number, name in enumerate(counted.op_names):
        own = counted.op[rows] == number
        if not own.any():
            continue
        place, calls, size = ranks[own], counted.calls[rows][own], payload[own]
        if name == ALL_REDUCE:
            elements = sizes[counted.data_type[rows][own]]
            np.add.at(sent, place, calls * all_reduce_bytes(size, elements, members, place))
        elif name in RING_OPS:
            np.add.at(sent, place, calls * size * payloads_sent(name, members, place, counted.peer[rows][own]))
    return [int(count) for count in sent]


def _direct(
    counted: CountedCalls, rows: Integers, ranks: Integers, members: int
) -> tuple[Integers, Integers, Integers]:
    """Source, destination (ranks) and bytes of what does not go around a ring; each pair once."""
    (op, rank, peer), (moved,) = sum_by_group((counted.op[rows], ranks, counted.peer[rows]), counted.moved_bytes[rows])
    names = [counted.op_names[number] for number in op.tolist()]
    everyone = np.array([name == "AllToAll" for name in names], dtype=np.bool_)
    everyone |= np.array([name == "Scatter" for name in names], dtype=np.bool_) & (peer == rank)
    named = np.array([name in ("Send", "PutSignal", "Gather") for name in names], dtype=np.bool_) & (peer >= 0)
    source = np.concatenate([np.repeat(rank[everyone], members), rank[named]])
    destination = np.concatenate([np.tile(np.arange(members), int(everyone.sum())), peer[named]])
    count = np.concatenate([np.repeat(moved[everyone], members), moved[named]])
    sent = (source != destination) & (count > 0)
    (source, destination), (count,) = sum_by_group((source[sent], destination[sent]), count[sent])
    return source, destination, count


@dataclass(frozen=True, slots=True)
class StagePayload:
    """What each rank of one pipeline stage hands to NCCL, whole bytes of half-precision elements."""

    tp_bytes: int
    """In AllReduces among the tensor ranks."""
    pp_bytes: int
    """In Sends to each neighbouring stage."""
    dp_bytes: int
    """In AllReduces among the replicas."""
    embedding_bytes: int
    """In AllReduces between the first and the last stage."""


def predicted_traffic(payloads: Sequence[StagePayload], mapping: RankMapping) -> tuple[PairTraffic, ...]:
    """Wire bytes of every directed pair of GPUs, from the payloads by stage and a mapping of positions to GPUs.

    The same single rings as `railscope estimate`: with `stage_volumes` as payloads the two are equal.
    """
    ranks = mapping.ranks
    flows: defaultdict[tuple[int, int], int] = defaultdict(int)

    def ring(members: Sequence[int], payload_bytes: int) -> None:
        for place, sent in enumerate(ring_edge_bytes(payload_bytes, len(members)).tolist()):
            if sent:
                flows[members[place], members[(place + 1) % len(members)]] += sent

    stages, data, tensor = ranks.shape
    for stage, payload in enumerate(payloads):
        for replica in range(data):
            ring(ranks[stage, replica].tolist(), payload.tp_bytes)
        for place in range(tensor):
            ring(ranks[stage, :, place].tolist(), payload.dp_bytes)
        for neighbour in (stage - 1, stage + 1):
            if 0 <= neighbour < stages and payload.pp_bytes:
                for source, destination in zip(ranks[stage].flat, ranks[neighbour].flat, strict=True):
                    flows[int(source), int(destination)] += payload.pp_bytes
    if stages > 1:
        for first, last in zip(ranks[0].flat, ranks[-1].flat, strict=True):
            ring([int(first), int(last)], payloads[0].embedding_bytes)
    return tuple(PairTraffic(source, destination, count) for (source, destination), count in sorted(flows.items()))


def observed_payloads(groups: Groups, mapping: RankMapping) -> tuple[StagePayload, ...]:
    """The payloads by stage that were recorded, over the whole recording; of a stage's GPUs, the largest.

    An AllGather or ReduceScatter of b bytes among g ranks counts as the AllReduce of g·b/2 that sends as much.
    """
    stages = len(mapping.ranks)
    own: dict[str, dict[int, int]] = {role: defaultdict(int) for role in (TP, DP, EMBEDDING)}
    for role, sums_of in own.items():
        for one in groups.with_role(role):
            reduced = one.ops["AllReduce"].payload_bytes if "AllReduce" in one.ops else 0
            halves = sum(one.ops[op].payload_bytes for op in ("AllGather", "ReduceScatter") if op in one.ops)
            for gpu in one.gpus:
                sums_of[gpu] += (2 * reduced + one.size * halves) // (2 * max(one.callers, 1))
    size = groups.pipelines.message_bytes
    sent = {gpu: calls * size for gpu, calls in groups.pipelines.calls.items()}

    def largest(by_gpu: Mapping[int, int], stage: int) -> int:
        return max(by_gpu.get(gpu, 0) for gpu in mapping.ranks[stage].ravel().tolist())

    return tuple(
        StagePayload(
            largest(own[TP], stage), largest(sent, stage), largest(own[DP], stage), largest(own[EMBEDDING], stage)
        )
        for stage in range(stages)
    )
