"""Finds pipelines: chains of GPUs that send activations forward and gradients back.

Frameworks run these Sends and Receives in a communicator of the whole pipeline, in communicators of two ranks, or in
that of all ranks; the chain is the same.  Where stages are interleaved (virtual pipelines), the last one also sends to
the first, and the chain closes to a ring; gradients come back the other way, which tells it from the one-way rings of
context parallelism.  All-to-all exchanges that are made of grouped Sends and Receives are told
apart by their shape: every rank sends to every other, and to itself.

Two ranks that send to each other are a chain, a ring and an exchange at once.  A pipeline's second stage returns what
it was sent, so each size comes twice: where hardly any does, the two are experts' ranks.  Stages hold different
parameters: GPUs of a chain that reduce gradients together are none (`Pipelines.denied`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from railscope.agent.analysis.parallelism.group_evidence import CommEvidence

GRADIENT_BYTES: Final = 1 << 20
"""PyTorch's smallest bucket of gradients: what is never larger is hardly gradients."""
MOST_OF_AN_EMBEDDING: Final = 3
"""Ranks that share the embedding: first and last stage, and with encoder and decoder the first of the latter."""
_FEWEST_OF_AN_EXCHANGE: Final = 3
"""Ranks from which on "every rank sends to every other" tells an exchange from a chain."""
_OF_THEIR_OWN_SIZE: Final = 0.75
"""Sizes for each Send, from which on two ranks exchange tokens; a pipeline's have half as many at most."""


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
    two_way_pairs: tuple[tuple[int, ...], ...] = ()
    """Those of the chains that are two GPUs which send to each other: a ring or an exchange of two looks the same."""
    denied: tuple[tuple[int, ...], ...] = ()
    """What would be chains if their GPUs did not reduce gradients together; then there are no `chains`."""

    def chain_of(self, gpus: frozenset[int]) -> tuple[int, ...] | None:
        """The chain that all these GPUs are on."""
        return next((chain for chain in self.chains if gpus <= set(chain)), None)


def is_exchange(one: CommEvidence) -> bool:
    """Whether a communicator's Sends and Receives, or its AllToAlls, are exchanges among all of its ranks."""
    if "AllToAll" in one.ops:
        return True
    if any(source == destination for source, destination in one.links):
        return True
    if one.size == 2:
        return _is_exchange_of_two(one)
    if one.size < _FEWEST_OF_AN_EXCHANGE or not one.links:
        return False
    destinations: defaultdict[int, set[int]] = defaultdict(set)
    for source, destination in one.links:
        destinations[source].add(destination)
    complete = all(len(found) == one.size - 1 for found in destinations.values())
    # Three stages that are interleaved also all send to each other, but always as much.
    return complete and (one.size > _FEWEST_OF_AN_EXCHANGE or ("Send" in one.ops and one.ops["Send"].sizes > 1))


def _is_exchange_of_two(one: CommEvidence) -> bool:
    """Whether two ranks, both recorded, send each other hardly any size twice."""
    sends = one.ops.get("Send")
    if sends is None or len(one.links) < 2 or not one.communicator.complete:
        return False
    return sends.calls > 2 and sends.sizes > _OF_THEIR_OWN_SIZE * sends.calls


def reduces(one: CommEvidence, more_than_bytes: int = 0) -> bool:
    """Whether a communicator sums what is larger than this, as gradients are."""
    return any(op in one.ops and one.ops[op].largest_bytes > more_than_bytes for op in ("AllReduce", "ReduceScatter"))


def find_pipelines(evidence: Sequence[CommEvidence]) -> Pipelines:
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
    denied = [chain for chain in chains if any(_holds_same_parameters(one, chain) for one in evidence)]
    if denied:
        return Pipelines((), tangled, {}, 0, denied=tuple(sorted(chains)))
    return Pipelines(
        chains=tuple(sorted(chains)),
        tangled=tangled,
        calls=calls,
        message_bytes=max(sizes, key=lambda size: (sizes[size], size), default=0),
        two_way_pairs=tuple(chain for chain in sorted(chains) if len(chain) == 2 and {chain, chain[::-1]} <= directed),
    )


def _holds_same_parameters(one: CommEvidence, chain: tuple[int, ...]) -> bool:
    """Whether GPUs of a chain reduce gradients together, and not only those of an embedding."""
    return one.size > MOST_OF_AN_EMBEDDING and len(one.gpus.intersection(chain)) > 1 and reduces(one, GRADIENT_BYTES)


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
