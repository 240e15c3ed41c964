"""Ranks mappings of (p, t, d) to servers by the load that they put on the network.

Candidates are

- all orders in which launchers count stages, replicas and tensor ranks (`tensor, data, pipeline` is Megatron-LM's, the
  fastest first);
- all boxes of stages, replicas and tensor ranks that just fill a server: which GPUs share a server is all that decides
  what leaves it, so that these are all mappings in which every server has the same share of each dimension;
- the mapping that was recorded.

Those that put the same GPUs together are one candidate, under the first name.  Within a server, what a GPU's NIC sends
does not depend on which of the server's GPUs it is, but whether bytes stay below one leaf switch does: the GPUs of a
server are put in the order that keeps most bytes from the spine, server by server, until no server can do better alone
(not those of the mapping that runs, and of the ten best only).

Each is ranked by the bytes over the busiest NIC (every GPU has its own, each direction for itself), then by the bytes
between leaf switches, then by those that change rails, then by those that leave a server at all.  Where the rate of
NICs and of NVLink is known, it has a time as well, as the model has it (equations 2 to 4): every kind of parallelism
takes what its busiest GPU's bytes take, over the NIC or within the server, and kinds do not overlap.

The demand is that of `demands`: what was recorded, over the whole recording.

scipy assigns GPUs to places (`linear_sum_assignment`).  Loading it takes 0.2 s, which only mappings other than the
recorded one cost; a server of 72 GPUs takes it 0.15 ms, and took 7 ms in Python.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from railscope.agent.analysis.parallelism.groups import ROLES
from railscope.agent.analysis.place.demands import Demands, Flows
from railscope.agent.analysis.tables.grouping import sum_by_index
from railscope.agent.model.mapping import DIMENSIONS
from railscope.agent.model.mapping import Mapping as RankMapping


def best_assignment(gains: NDArray[Any]) -> list[int]:
    """Solve the assignment problem: by row of a square matrix its column, so that the gains add up to the most.

    A row that gains as much where it is (row i in column i) as anywhere stays there, if that costs the others nothing.
    Gains are whole numbers from 0 on.
    """
    from scipy.optimize import linear_sum_assignment

    count = len(gains)
    # Doubled, so that staying can be worth half of the smallest difference in all.
    worth = 2 * (count + 1)
    # It computes with doubles: what they cannot hold of sums along a path is left out of every gain alike.
    surplus_bits = int(gains.max(initial=0)).bit_length() + (worth * count).bit_length() - _EXACT_BITS
    scaled = (gains >> max(surplus_bits, 0)) * worth + np.eye(count, dtype=np.int64)
    _, columns = linear_sum_assignment(scaled, maximize=True)
    return [int(column) for column in columns]


AS_RECORDED: Final = "as recorded"
_EXACT_BITS: Final = 53
"""Whole numbers of so many bits are doubles."""
_MOST_ORDERED: Final = 10
"""Candidates, the best ones, whose servers' GPUs are put in order."""
_MOST_ROUNDS: Final = 4
"""Times that every server's GPUs are put in a better order."""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What links carry; None: not known."""

    nic_bytes_per_second: float | None
    nvlink_bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class RankedMapping:
    """One mapping and what it asks of the network, over the whole recording."""

    name: str
    current: bool
    """The one that was recorded."""
    busiest_nic_bytes: int
    """Of all NICs and both directions."""
    busiest_server_bytes: int
    """Of all servers and both directions."""
    between_servers_bytes: int
    spine_bytes: int
    """Between leaf switches."""
    cross_rail_bytes: int
    seconds: float | None
    """Time of the recording's communication; None: the rates of links are not known."""
    places: tuple[int, ...]
    """By GPU as it was recorded: server × GPUs of a server + place in the server."""


def rank_mappings(
    mapping: RankMapping | None,
    demands: Demands,
    places: Sequence[int],
    gpus_per_server: int,
    rates: LinkRates,
    leaves: Sequence[int] | None = None,
) -> tuple[RankedMapping, ...]:
    """All candidate placements, the best first; without a mapping only what was recorded.

    `places` are those of the recorded GPUs: server × `gpus_per_server` + place in the server; a number of GPUs that
    fills whole servers.  `leaves` are by place a number that stands for its leaf switch; None: every rail has its own.
    """
    fabric = _Fabric(
        gpus_per_server,
        np.arange(len(places)) % gpus_per_server if leaves is None else np.array(leaves, dtype=np.int64),
        rates,
    )
    current = _grouping(places, gpus_per_server)
    ranked: dict[frozenset[frozenset[int]], RankedMapping] = {}
    for name, candidate in _candidates(mapping, places, gpus_per_server):
        grouping = _grouping(candidate, gpus_per_server)
        if grouping not in ranked:
            # The recorded one in the order in which it runs, also where another would cross fewer rails.
            own = tuple(places) if grouping == current else candidate
            measured = _measured(name, own, demands, fabric)
            ranked[grouping] = replace(measured, current=grouping == current)
    best = sorted(ranked.values(), key=_rank)
    return tuple(sorted([*_all_ordered(best[:_MOST_ORDERED], demands, fabric), *best[_MOST_ORDERED:]], key=_rank))


@dataclass(frozen=True, slots=True)
class _Fabric:
    """What the places of GPUs are."""

    gpus_per_server: int
    leaf: NDArray[np.int64]
    """By place."""
    rates: LinkRates


def _rank(one: RankedMapping) -> tuple[int, int, int, int, int, bool, str]:
    return (
        *(one.busiest_nic_bytes, one.spine_bytes, one.cross_rail_bytes),
        *(one.between_servers_bytes, one.busiest_server_bytes),
        *(not one.current, one.name),
    )


def _all_ordered(mappings: Sequence[RankedMapping], demands: Demands, fabric: _Fabric) -> Iterator[RankedMapping]:
    for one in mappings:
        if one.current or not one.spine_bytes:
            yield one
        else:
            yield _measured(one.name, _ordered(one.places, demands, fabric), demands, fabric)


def _candidates(mapping: RankMapping | None, places: Sequence[int], size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and the places of the recorded GPUs."""
    if mapping is None:
        yield AS_RECORDED, tuple(places)
        return
    ranks = mapping.ranks
    wide = [axis for axis in range(ranks.ndim) if ranks.shape[axis] > 1]
    # From default (pipeline, data, tensor, the last fastest) on.
    for order in permutations(wide):
        counted = ranks.transpose([*(axis for axis in range(ranks.ndim) if axis not in order), *order]).ravel()
        yield ", ".join(DIMENSIONS[axis] for axis in reversed(order)), _places_of(counted.tolist())
    for box in _boxes(ranks.shape, size):
        outer = [whole // part for whole, part in zip(ranks.shape, box, strict=True)]
        split = ranks.reshape([edge for pair in zip(outer, box, strict=True) for edge in pair])
        said = " × ".join(f"{part} {DIMENSIONS[axis]}" for axis, part in enumerate(box) if part > 1)
        yield f"{said} on a server", _places_of(split.transpose(0, 2, 4, 1, 3, 5).ravel().tolist())
    yield AS_RECORDED, tuple(places)


def _boxes(shape: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    pipeline, data, tensor = shape
    for stages in range(1, pipeline + 1):
        for replicas in range(1, data + 1):
            inside = stages * replicas
            if pipeline % stages or data % replicas or size % inside or size // inside > tensor:
                continue
            if tensor % (size // inside) == 0:
                yield stages, replicas, size // inside


def _places_of(counted: Sequence[int]) -> tuple[int, ...]:
    places = [0] * len(counted)
    for place, gpu in enumerate(counted):
        places[gpu] = place
    return tuple(places)


def _grouping(places: Sequence[int], size: int) -> frozenset[frozenset[int]]:
    servers: defaultdict[int, set[int]] = defaultdict(set)
    for gpu, place in enumerate(places):
        servers[place // size].add(gpu)
    return frozenset(frozenset(members) for members in servers.values())


def _measured(name: str, places: tuple[int, ...], demands: Demands, fabric: _Fabric) -> RankedMapping:
    place, size = np.array(places, dtype=np.int64), fabric.gpus_per_server
    flows = demands.flows((place // size).tolist())
    source, destination = place[flows.source], place[flows.destination]
    leaves = source // size != destination // size
    out, into = (sum_by_index(end[leaves], flows.wire_bytes[leaves], len(place)) for end in (source, destination))
    crosses = leaves & (source % size != destination % size)
    spine = leaves & (fabric.leaf[source] != fabric.leaf[destination])
    return RankedMapping(
        name=name,
        current=False,
        busiest_nic_bytes=max(int(direction.max(initial=0)) for direction in (out, into)),
        busiest_server_bytes=max(
            int(direction.reshape(-1, size).sum(axis=1).max(initial=0)) for direction in (out, into)
        ),
        between_servers_bytes=int(out.sum()),
        spine_bytes=int(flows.wire_bytes[spine].sum()),
        cross_rail_bytes=int(flows.wire_bytes[crosses].sum()),
        seconds=_seconds(flows, leaves, len(place), fabric.rates),
        places=places,
    )


def _seconds(flows: Flows, leaves: NDArray[np.bool_], gpus: int, rates: LinkRates) -> float | None:
    nic, nvlink = rates.nic_bytes_per_second, rates.nvlink_bytes_per_second
    if nic is None or nvlink is None:
        return None
    slowest = dict.fromkeys(ROLES, 0.0)
    for number, role in enumerate(ROLES):
        for rate, way in ((nic, leaves), (nvlink, ~leaves)):
            own = (flows.role == number) & way
            for end in (flows.source, flows.destination):
                busiest = int(sum_by_index(end[own], flows.wire_bytes[own], gpus).max(initial=0))
                slowest[role] = max(slowest[role], busiest / rate)
    return sum(slowest[role] for role in sorted(slowest))


def _ordered(places: tuple[int, ...], demands: Demands, fabric: _Fabric) -> tuple[int, ...]:
    """The same GPUs on the same servers, each server's in the order that keeps most bytes from the spine."""
    place, size, leaf = np.array(places, dtype=np.int64), fabric.gpus_per_server, fabric.leaf
    server = place // size
    flows = demands.flows(server.tolist())
    leaves = server[flows.source] != server[flows.destination]
    source, destination = flows.source[leaves], flows.destination[leaves]
    # Every flow twice, by the server of each of its ends.
    own, peer = np.concatenate([source, destination]), np.concatenate([destination, source])
    count = np.tile(flows.wire_bytes[leaves], 2)
    order = np.argsort(server[own], kind="stable")
    own, peer, count = own[order], peer[order], count[order]
    bounds = np.searchsorted(server[own], np.arange(len(places) // size + 1))
    for _ in range(_MOST_ROUNDS):
        before = place.copy()
        if (leaf[place[source]] == leaf[place[destination]]).all():
            break
        for number in range(len(places) // size):
            members = np.flatnonzero(server == number)
            members = members[np.argsort(place[members])]
            row = np.empty(len(places), dtype=np.int64)
            row[members] = np.arange(size)
            part = slice(bounds[number], bounds[number + 1])
            kept = np.zeros((size, int(leaf.max()) + 1), dtype=np.int64)
            np.add.at(kept, (row[own[part]], leaf[place[peer[part]]]), count[part])
            here = leaf[number * size : (number + 1) * size]
            place[members] = number * size + np.array(best_assignment(kept[:, here]))
        if (place == before).all():
            break
    return tuple(place.tolist())
