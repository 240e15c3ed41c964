"""Pipelines, from who sends to whom: chains of GPUs that hand activations on and gradients back.

Frameworks run these Sends and Receives in a communicator of the whole pipeline, in communicators of two ranks, or in
that of all ranks; the chain is the same.  Where stages are interleaved (virtual pipelines), the last one also sends to
the first, and the chain closes to a ring; gradients come back the other way, which tells it from the one-way rings of
context parallelism.  All-to-all exchanges that are made of grouped Sends and Receives are told
apart by their shape: every rank sends to every other, and to itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from agent.analysis.group_evidence import CommEvidence

_FEWEST_OF_AN_EXCHANGE = 3
"""Ranks from which on "every rank sends to every other" tells an exchange from a chain."""


@dataclass(frozen=True, slots=True)
class Pipelines:
    """The chains of a job."""

    chains: tuple[tuple[int, ...], ...]
    """GPUs by stage, of those whose order is clear; negative: a rank that was not recorded."""
    tangled: bool
    """Some GPUs send to each other in another pattern."""
    calls: dict[int, int]
    """By GPU: Sends over one of its links, the busiest."""
    message_bytes: int
    """Payload of most Sends; 0: there are none."""

    def holds(self, gpus: frozenset[int]) -> tuple[int, ...] | None:
        """The chain that all these GPUs are on."""
        return next((chain for chain in self.chains if gpus <= set(chain)), None)


def is_exchange(one: CommEvidence) -> bool:
    """Whether a communicator's Sends and Receives, or its AllToAlls, are exchanges of everyone with everyone."""
    if "AllToAll" in one.ops:
        return True
    if any(source == destination for source, destination in one.links):
        return True
    if one.size < _FEWEST_OF_AN_EXCHANGE or not one.links:
        return False
    destinations: defaultdict[int, set[int]] = defaultdict(set)
    for source, destination in one.links:
        destinations[source].add(destination)
    complete = all(len(found) == one.size - 1 for found in destinations.values())
    # Three stages that are interleaved also all send to each other, but always as much.
    return complete and (one.size > _FEWEST_OF_AN_EXCHANGE or ("Send" in one.ops and one.ops["Send"].sizes > 1))


def find_pipelines(evidence: Iterable[CommEvidence]) -> Pipelines:
    """The chains among GPUs that send to each other; exchanges are left out."""
    neighbours: defaultdict[int, set[int]] = defaultdict(set)
    directed: set[tuple[int, int]] = set()
    order: dict[int, tuple[int, int]] = {}
    calls: dict[int, int] = {}
    sizes: defaultdict[int, int] = defaultdict(int)
    unrecorded: dict[tuple[str, int], int] = {}
    for one in evidence:
        if is_exchange(one) or not one.links:
            continue
        for (source, destination), count in one.links.items():
            ends = []
            for rank in (source, destination):
                gpu = one.communicator.members.get(rank)
                if gpu is None:
                    gpu = unrecorded.setdefault((one.comm, rank), -1 - len(unrecorded))
                # Ranks of a larger communicator say more of the stages' order than those of a pair.
                order[gpu] = min(order.get(gpu, (0, 0)), (-one.size, rank))
                calls[gpu] = max(calls.get(gpu, 0), count)
                ends.append(gpu)
            neighbours[ends[0]].add(ends[1])
            neighbours[ends[1]].add(ends[0])
            directed.add((ends[0], ends[1]))
        for op in ("Send", "Recv"):
            if op in one.ops:
                sizes[one.ops[op].common_bytes] += one.ops[op].common_calls
    chains, tangled = [], False
    for component in _components(neighbours):
        closed = len(component) > 2 and all(len(neighbours[gpu]) == 2 for gpu in component)
        one_way = any((other, gpu) not in directed for gpu, other in directed if gpu in component)
        chain = None if closed and one_way else _chain(component, neighbours, order)
        if chain is None:
            tangled = True
        else:
            chains.append(chain)
    return Pipelines(
        chains=tuple(sorted(chains)),
        tangled=tangled,
        calls=calls,
        message_bytes=max(sizes, key=lambda size: (sizes[size], size), default=0),
    )


def _components(neighbours: dict[int, set[int]]) -> list[set[int]]:
    left, found = set(neighbours), []
    while left:
        component, edge = set(), {min(left)}
        while edge:
            component |= edge
            edge = set().union(*(neighbours[gpu] for gpu in edge)) - component
        left -= component
        found.append(component)
    return found


def _chain(
    component: set[int], neighbours: dict[int, set[int]], order: dict[int, tuple[int, int]]
) -> tuple[int, ...] | None:
    """The component's GPUs one after the other, from the stage with the lowest rank; None: it is no chain."""
    if any(len(neighbours[gpu]) > 2 for gpu in component):
        return None
    ends = [gpu for gpu in component if len(neighbours[gpu]) == 1]
    # In pairs of ranks everybody is 0 or 1: there the GPU's number says more.
    alike = len({order[gpu] for gpu in component}) < len(component)
    first = min(ends or component, key=lambda gpu: (gpu < 0, gpu) if alike else order[gpu])
    chain = [first]
    while len(chain) < len(component):
        following = neighbours[chain[-1]] - set(chain)
        chain.append(min(following, key=lambda gpu: (gpu < 0, gpu) if alike else order[gpu]))
    return tuple(chain)
