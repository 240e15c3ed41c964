"""Which GPU sent how much to which (both papers' heat maps, sparsity and traffic between servers).

Wire bytes follow from the calls and from who is in the communicator; nothing was measured on links.  A collective is
one operation of the whole communicator, of which every rank's own call says what that rank sends, so that nothing is
counted twice:

| Operation                | A rank sends                                                                       |
|--------------------------|------------------------------------------------------------------------------------|
| AllReduce of b bytes     | to the next rank 2b less two of the g chunks of whole elements; 2b(g−1) in all     |
| AllGather, ReduceScatter | to the next rank (g−1)b                                                            |
| Broadcast                | to the next rank b, but nothing to the root                                        |
| Reduce                   | to the next rank b, but nothing from the root                                      |
| AllToAll                 | to every other rank b                                                              |
| Scatter                  | the root to every other rank b                                                     |
| Gather                   | every other rank to the root b                                                     |
| Send, PutSignal          | to the peer b                                                                      |
| Recv                     | nothing: counted at the sender, or here from a sender that recorded no call        |
| Signal, WaitSignal       | nothing                                                                            |

Rings are single and directed, in the order of ranks, as paper B draws them and `railscope estimate` counts them: the
two are equal to the byte.  NCCL's own rings may run otherwise: where the connections that it made to other servers are
recorded and the next rank is not among them, what a rank sends to other servers is split over those that are, equally
by channel.  What a rank sends in all stays the same.

Of ranks that recorded no call nothing is known but what the calls of the others imply: what they exchange with them.
If it is not known which GPU such a rank is, those bytes are in no pair, and are said apart.

Rails are those of `gpu_rails`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from railscope.agent.analysis.facts.fact_columns import Pairs
from railscope.agent.analysis.facts.report import Traffic, Unknown
from railscope.agent.analysis.tables.calls import CountedCalls
from railscope.agent.analysis.tables.gpus import Communicator, Gpus
from railscope.agent.analysis.tables.grouping import Integers, sum_by_index
from railscope.agent.analysis.tables.leaf_map import LeafMap, recorded_leaf_map
from railscope.agent.analysis.traffic.gpu_rails import find_rails
from railscope.agent.dataset.files import UNNAMED_NODE
from railscope.agent.dataset.reader import Dataset
from railscope.agent.facts.counted import format_count
from railscope.agent.model.ring import ALL_REDUCE, RING_OPS, all_reduce_bytes, payloads_sent
from railscope.probes.nccl.abi import DATA_TYPE_BYTES

_ROOTED: Final = frozenset({"Broadcast", "Reduce", "Scatter", "Gather"})
_DIRECT: Final = frozenset({"Send", "Recv", "PutSignal"})
_SILENT: Final = frozenset({"Signal", "WaitSignal"})
_MODELLED: Final = RING_OPS | _ROOTED | _DIRECT | _SILENT | {"AllToAll"}
_MOST_RANKS: Final = 1_000_000
"""A communicator that is said to have more is one of which the recording tells nonsense."""
_ONE_LEAF_A_RAIL: Final = (
    "All ports of a rail are taken to be at one leaf switch, each rail at its own, so that what crosses rails reaches "
    "the spine; where they are otherwise, give --leaf-map FILE."
)
_HEARD: Final = "Leaf switches are those that rails heard from the switches themselves (LLDP)."
_ROWS_AT_A_TIME: Final = 1 << 20
_ELEMENT_BYTES: Final = {kind.name: max(size, 1) for kind, size in DATA_TYPE_BYTES.items()}
"""By name of the data type; what is not known is taken for bytes."""


class _PairSums:
    """Bytes by pair of GPUs, of which −1 is one that is not known.

    What is added is kept as it comes while that takes less memory than a matrix of all pairs, and in such a matrix
    from then on: few pairs of many GPUs talk, unless all send to all.
    """

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus
        self._keys: list[Integers] = []
        self._counts: list[Integers] = []
        self._added = 0
        self._matrix: Integers | None = None
        self.unobserved_bytes = 0
        """Of pairs with a GPU that is not known."""

    def add(self, sources: Integers, destinations: Integers, counts: Integers) -> None:
        talks = (counts > 0) & ((sources != destinations) | (sources < 0))
        known = talks & (sources >= 0) & (destinations >= 0)
        self.unobserved_bytes += int(counts[talks & ~known].sum())
        keys, counts = sources[known] * self._gpus + destinations[known], counts[known]
        if self._matrix is not None:
            np.add.at(self._matrix, keys, counts)
            return
        self._keys.append(keys)
        self._counts.append(counts)
        self._added += len(keys)
        if 2 * self._added > self._gpus**2:
            self._matrix = np.zeros(self._gpus**2, dtype=np.int64)
            while self._keys:
                np.add.at(self._matrix, self._keys.pop(), self._counts.pop())

    def pairs(self) -> Pairs:
        """The pairs that talked; there is nothing to add afterwards."""
        if self._matrix is None:
            empty = np.empty(0, dtype=np.int64)
            keys, places = np.unique(np.concatenate([empty, *self._keys]), return_inverse=True)
            counts = sum_by_index(places, np.concatenate([empty, *self._counts]), len(keys))
            return Pairs(keys // max(self._gpus, 1), keys % max(self._gpus, 1), counts)
        moved, self._matrix = self._matrix, None
        matrix = moved.reshape(self._gpus, self._gpus)
        of_row = np.count_nonzero(matrix, axis=1)
        ends = np.cumsum(of_row)
        destination = np.empty(ends[-1], dtype=np.int32)
        for row, end, many in zip(matrix, ends.tolist(), of_row.tolist(), strict=True):
            talks = np.flatnonzero(row)
            destination[end - many : end] = talks
            # Put in front, where rows are that were read already: a second matrix would be as large.
            moved[end - many : end] = row[talks]
        return Pairs(np.repeat(np.arange(self._gpus, dtype=np.int32), of_row), destination, moved[: ends[-1]])


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Kinds of calls, as columns of equal length."""

    rank: Integers
    """−1: not known."""
    peer: Integers
    moved: Integers
    """Payload of all calls."""
    calls: Integers
    unsized: Integers
    """Calls of unknown payload."""
    element: Integers
    """Bytes of one."""
    first: Integers
    rows: Integers

    def select(self, chosen: NDArray[np.bool_] | Integers) -> _Kinds:
        return _Kinds(*(getattr(self, name)[chosen] for name in self.__slots__))


def find_traffic(
    dataset: Dataset, gpus: Gpus, counted: CountedCalls, leaf_map: LeafMap | None = None
) -> tuple[Traffic, tuple[Unknown, ...]]:
    """Compute the bytes between each pair of GPUs.

    Raises:
        ConfigError: the leaf map lacks a server or a rail.
    """
    servers = _servers(gpus)
    observed = _network_peers(dataset, gpus, servers)
    pairs = _PairSums(len(gpus.gpus))
    unmodelled = 0
    confirmed = redirected = 0
    everything = _kinds(gpus, counted)
    for communicator, places in _by_communicator(gpus, counted):
        kinds = everything.select(places)
        if communicator is None or communicator.nranks is None or communicator.nranks > _MOST_RANKS:
            unmodelled += int(kinds.calls.sum())
            continue
        members = _Members(communicator, communicator.nranks, kinds.rank)
        edges = np.zeros(communicator.nranks, dtype=np.int64)
        ops = counted.kinds.op[places]
        for op in np.unique(ops).tolist():
            name = counted.op_names[op]
            chosen = kinds.select(ops == op)
            own = chosen.select(_usable(name, chosen, communicator.nranks))
            unmodelled += int(chosen.calls.sum() - own.calls.sum())
            unmodelled += 0 if name in _SILENT else int(own.unsized.sum())
            if name in RING_OPS:
                edges += _ring(name, own, members, counted)
            else:
                _direct(name, own, members, pairs)
        kept, moved = _close_ring(edges, members, observed.get(communicator.comm, {}), servers, pairs)
        confirmed += kept
        redirected += moved
    return _result(dataset, gpus, servers, pairs, unmodelled, _basis(confirmed, redirected), leaf_map)


class _Members:
    """The ranks of a communicator: which GPU each is, and which of them recorded calls."""

    def __init__(self, communicator: Communicator, count: int, speaking: Integers) -> None:
        self.count = count
        self.gpu = np.full(count, -1, dtype=np.int64)
        for rank, gpu in communicator.members.items():
            if 0 <= rank < count:
                self.gpu[rank] = gpu
        self.speaking = np.zeros(count, dtype=np.bool_)
        self.speaking[speaking[(speaking >= 0) & (speaking < count)]] = True
        self.silent: Integers = np.flatnonzero(~self.speaking)


def _by_communicator(gpus: Gpus, counted: CountedCalls) -> Iterable[tuple[Communicator | None, Integers]]:
    """The kinds of each communicator, and under None those of ends that the recording does not describe."""
    places = {communicator.comm: place for place, communicator in enumerate(gpus.communicators)}
    own = [gpus.communicator_of.get(end) for end in counted.ends]
    of_end = np.array([-1 if one is None else places[one.comm] for one in own], dtype=np.int64)
    of_kind = of_end[counted.kinds.end] if len(counted) else np.empty(0, dtype=np.int64)
    order = np.argsort(of_kind, kind="stable")
    for kinds in np.split(order, np.flatnonzero(np.diff(of_kind[order])) + 1):
        if len(kinds):
            place = int(of_kind[kinds[0]])
            yield (None if place < 0 else gpus.communicators[place]), kinds


def _kinds(gpus: Gpus, counted: CountedCalls) -> _Kinds:
    rank_of_end = np.array([gpus.rank_of.get(end, -1) for end in counted.ends], dtype=np.int64)
    element_of_type = np.array([_ELEMENT_BYTES.get(kind, 1) for kind in counted.type_names], dtype=np.int64)
    kinds = counted.kinds
    return _Kinds(
        rank=rank_of_end[kinds.end],
        peer=kinds.peer,
        moved=kinds.moved_bytes,
        calls=kinds.calls,
        unsized=kinds.unsized_calls,
        element=element_of_type[kinds.data_type],
        first=kinds.first,
        rows=kinds.rows,
    )


def _usable(name: str, kinds: _Kinds, count: int) -> NDArray[np.bool_]:
    """Calls whose traffic is known if their size is."""
    fine = (kinds.rank >= 0) & (kinds.rank < count)
    if name not in _MODELLED:
        fine[:] = False
    if name in _ROOTED or name in _DIRECT:
        fine &= (kinds.peer >= 0) & (kinds.peer < count)
    return fine


def _ring(name: str, kinds: _Kinds, members: _Members, counted: CountedCalls) -> Integers:
    """What each rank sends to the next; of a silent one, by what the next rank called."""
    own = sum_by_index(kinds.rank, _edge(name, kinds, members.count, kinds.rank, counted), members.count)
    if not len(members.silent):
        return own
    before = (kinds.rank - 1) % members.count
    implied = sum_by_index(before, _edge(name, kinds, members.count, before, counted), members.count)
    return np.where(members.speaking, own, implied)


def _edge(name: str, kinds: _Kinds, count: int, place: Integers, counted: CountedCalls) -> Integers:
    """What the member at `place` sends to the next in all calls of each kind."""
    if name == ALL_REDUCE:
        return _all_reduce_edge(kinds, count, place, counted)
    return kinds.moved * payloads_sent(name, count, place, kinds.peer)


def _all_reduce_edge(kinds: _Kinds, count: int, place: Integers, counted: CountedCalls) -> Integers:
    """As `_edge`; AllReduce is the only operation whose sizes do not simply add up, so that each is computed."""
    sent = np.zeros(len(kinds.rows), dtype=np.int64)
    ends = np.cumsum(kinds.rows)
    low = 0
    while low < len(ends):
        done = int(ends[low - 1]) if low else 0
        high = max(int(np.searchsorted(ends, done + _ROWS_AT_A_TIME, side="right")), low + 1)
        many = kinds.rows[low:high]
        kind = np.repeat(np.arange(low, high), many)
        row = np.arange(len(kind)) + np.repeat(kinds.first[low:high] - (ends[low:high] - many - done), many)
        payload = counted.payload_bytes[row]
        moved = counted.calls[row] * all_reduce_bytes(np.maximum(payload, 0), kinds.element[kind], count, place[kind])
        sent[low:high] = np.add.reduceat(moved, ends[low:high] - many - done)
        low = high
    return sent


def _direct(name: str, kinds: _Kinds, members: _Members, pairs: _PairSums) -> None:
    """The operations whose bytes go straight to where they belong."""
    moved, rank, peer, gpu = kinds.moved, kinds.rank, kinds.peer, members.gpu
    match name:
        case "Send" | "PutSignal":
            pairs.add(gpu[rank], gpu[peer], moved * (rank != peer))
        case "Recv":
            pairs.add(gpu[peer], gpu[rank], moved * ~members.speaking[peer])
        case "AllToAll":
            by_rank = sum_by_index(rank, moved, members.count)
            everyone = np.arange(members.count)
            for one in np.flatnonzero(by_rank).tolist():
                share = np.full(members.count, by_rank[one])
                share[one] = 0
                pairs.add(np.full(members.count, gpu[one]), gpu[everyone], share)
                pairs.add(gpu[members.silent], np.full(len(members.silent), gpu[one]), share[members.silent])
        case "Scatter" | "Gather":
            at_root = rank == peer
            away = ~at_root if name == "Gather" else ~at_root & ~members.speaking[peer]
            roots, others, counts = [gpu[peer[away]]], [gpu[rank[away]]], [moved[away]]
            # What the root says of the others: all of a Scatter, and of a Gather what silent ranks gave.
            for root in np.unique(peer[at_root]).tolist():
                told = np.arange(members.count) if name == "Scatter" else members.silent
                told = told[told != root]
                roots.append(np.full(len(told), gpu[root]))
                others.append(gpu[told])
                counts.append(np.full(len(told), moved[at_root & (peer == root)].sum()))
            root_gpu, other_gpu = np.concatenate(roots), np.concatenate(others)
            if name == "Scatter":
                pairs.add(root_gpu, other_gpu, np.concatenate(counts))
            else:
                pairs.add(other_gpu, root_gpu, np.concatenate(counts))
        case _:
            pass  # signals: a flag of a few bytes


def _close_ring(
    edges: Integers, members: _Members, observed: Mapping[int, Sequence[int]], servers: Sequence[str], pairs: _PairSums
) -> tuple[int, int]:
    """Put the ring's edges into pairs; how many edges between servers were seen as connections, how many otherwise."""
    following = (np.arange(members.count) + 1) % members.count
    gpu = members.gpu
    confirmed = redirected = 0
    for rank in sorted(observed):
        after = int(following[rank])
        if not edges[rank] or gpu[rank] < 0 or gpu[after] < 0 or servers[gpu[rank]] == servers[gpu[after]]:
            continue
        if after in observed[rank]:
            confirmed += 1
            continue
        peers = np.array(observed[rank], dtype=np.int64)
        share, over = divmod(int(edges[rank]), len(peers))
        split = np.full(len(peers), share, dtype=np.int64)
        split[:over] += 1
        pairs.add(np.full(len(peers), gpu[rank]), gpu[peers], split)
        edges[rank] = 0
        redirected += 1
    pairs.add(gpu, gpu[following], edges)
    return confirmed, redirected


def _network_peers(dataset: Dataset, gpus: Gpus, servers: Sequence[str]) -> dict[str, dict[int, tuple[int, ...]]]:
    """By communicator and rank: the ranks of other servers that it has connections to, one for each channel."""
    table = dataset["connections"]
    found = dataset.rows(
        table.filter(table["send"]).select("recording", "instance", "peer", "channel").distinct()
    ).to_pylist()
    seen: defaultdict[str, defaultdict[int, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))
    for row in found:
        end = (row["recording"], row["instance"])
        communicator, rank = gpus.communicator_of.get(end), gpus.rank_of.get(end)
        if communicator is None or rank is None or row["peer"] is None:
            continue
        own, other = gpus.gpu_of[end], communicator.members.get(row["peer"])
        if other is not None and servers[own] != servers[other]:
            seen[communicator.comm][rank].add((-1 if row["channel"] is None else row["channel"], row["peer"]))
    return {
        comm: {rank: tuple(peer for _, peer in sorted(peers)) for rank, peers in ranks.items()}
        for comm, ranks in seen.items()
    }


def _basis(confirmed: int, redirected: int) -> str:
    if redirected:
        return (
            f"Rings in the order of ranks, but {redirected:,} of {confirmed + redirected:,} between servers as their "
            "recorded connections go, equally by channel."
        )
    if confirmed:
        return f"Rings in the order of ranks; {confirmed:,} of their edges between servers are recorded connections."
    return "Rings in the order of ranks; no recorded connection confirms that NCCL's own rings run so."


def _servers(gpus: Gpus) -> list[str]:
    return [gpu.server for gpu in gpus.gpus]


def _result(
    dataset: Dataset,
    gpus: Gpus,
    servers: Sequence[str],
    pairs: _PairSums,
    unmodelled: int,
    basis: str,
    leaf_map: LeafMap | None,
) -> tuple[Traffic, tuple[Unknown, ...]]:
    count = len(gpus.gpus)
    talked, unobserved = pairs.pairs(), pairs.unobserved_bytes
    names, server = _numbered(servers)
    leaving = talked.sent_apart(count, server)
    told = find_rails(dataset, gpus.gpus, talked, gpus.others)
    rails = told.of_gpu
    crossing = None if rails is None else int(talked.sent_apart(count, server, _numbered(rails)[1]).sum())
    heard = None
    if leaf_map is None and rails is not None:
        leaf_map = heard = recorded_leaf_map(dataset, list(zip(servers, rails, strict=True)))
    spine_assumed = leaf_map is None and rails is not None
    spine = crossing if spine_assumed else None
    if leaf_map is not None and (rails is not None or not leaf_map.by_rail):
        places = [(name, rails[number] if rails else "") for number, name in enumerate(servers)]
        spine = int(talked.sent_apart(count, server, _numbered(leaf_map.leaves_of(places))[1]).sum())
    of_leaves = _HEARD if heard is not None else _ONE_LEAF_A_RAIL if spine_assumed else ""
    traffic = Traffic(
        gpus=count,
        pairs=talked,
        sparsity=len(talked) / (count * (count - 1)) if count > 1 else None,
        unobserved_wire_bytes=unobserved,
        unmodelled_calls=unmodelled,
        between_servers_wire_bytes=int(leaving.sum()),
        cross_rail_wire_bytes=crossing,
        spine_wire_bytes=spine,
        server_transmit_wire_bytes=tuple(zip(names, sum_by_index(server, leaving, len(names)).tolist(), strict=True)),
        basis="  ".join(filter(None, (basis, told.basis, of_leaves))),
        spine_assumed=spine_assumed,
    )
    return traffic, tuple(_unknown(traffic, leaf_map, told.doubt, names))


def _numbered(names: Sequence[str]) -> tuple[list[str], NDArray[np.int32]]:
    """The distinct names as they first come, and of each name its index among them."""
    distinct = list(dict.fromkeys(names))
    index = {name: place for place, name in enumerate(distinct)}
    return distinct, np.array([index[name] for name in names], dtype=np.int32)


def _unknown(traffic: Traffic, leaf_map: LeafMap | None, rail_doubt: str, servers: Sequence[str]) -> Iterable[Unknown]:
    if traffic.unobserved_wire_bytes:
        yield Unknown(
            3,
            f"{traffic.unobserved_wire_bytes:,} bytes went to or came from ranks that were not recorded, and the "
            "traffic among those is unknown: record on all servers of the job.",
        )
    if traffic.unmodelled_calls:
        yield Unknown(
            3,
            f"Of {format_count(traffic.unmodelled_calls, 'call')} the sender, receiver or bytes are unknown, because "
            "size, rank or communicator is unknown, or no model covers the operation.",
        )
    if traffic.gpus < 2:
        yield Unknown(4, "There are fewer than two GPUs: record on all servers of the job.")
    if UNNAMED_NODE in servers:
        yield Unknown(
            5,
            "The imported data does not name its hosts and counts as one server: import each host's files with "
            "--node NAME.",
        )
    if rail_doubt:
        yield Unknown(5, f"The rail of a GPU is unknown: {rail_doubt}.")
    if leaf_map is None and not traffic.spine_assumed:
        yield Unknown(5, "Spine traffic needs the leaf switch of each server: give --leaf-map FILE.")
    elif leaf_map is not None and traffic.spine_wire_bytes is None:
        yield Unknown(
            5, f"{leaf_map.file} maps rails to leaves, but the GPUs' rails are unknown: give a map server,leaf."
        )
