"""Describes in a few words what a communicator carries, in the terms of the papers.

A communicator of collectives is called by the one that moves most.  One of Sends and Receives says who sends to whom:
a pipeline is written as the chain of its stages' GPUs, `0 ⇄ 8 ⇄ 16`, where activations go one way and gradients come
back, or `0 → 8 → 16`, where nothing comes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Final

from railscope.agent.analysis.facts.quantities import UNKNOWN, format_bytes
from railscope.agent.analysis.facts.report import CommunicatorUse, PeerLink
from railscope.agent.analysis.parallelism.groups import EP, PP
from railscope.agent.facts.counted import format_count

_DIRECT: Final = frozenset({"Send", "Recv"})
_MOST_STAGES: Final = 8
_MOST_CHAINS: Final = 2

_Gpu = int | None


def describe_calls(use: CommunicatorUse) -> str:
    """`AllReduce`, or for Sends and Receives the pairs and bytes; a dash: no calls."""
    if not use.ops:
        return UNKNOWN
    direct = [op for op in use.ops if op.op in _DIRECT]
    others = [op for op in use.ops if op.op not in _DIRECT]
    most = max(others, key=lambda op: (op.payload_bytes, op.calls), default=None)
    if most is not None and most.payload_bytes >= sum(op.payload_bytes for op in direct):
        return most.op
    if use.role == EP:
        return "Send/Recv, all to all"
    if not use.links:
        return "Send/Recv"
    chains = _chains(use.links)
    if chains is None:
        return f"Send/Recv over {format_count(len(use.links), 'link')}, {_bytes(use.links)} each"
    told = ", ".join(_chain(chain, use.links) for chain in chains[:_MOST_CHAINS])
    more = f" and {len(chains) - _MOST_CHAINS:,} more" if len(chains) > _MOST_CHAINS else ""
    back = {(link.destination, link.source) for link in use.links}
    way = "each way" if any((link.source, link.destination) in back for link in use.links) else "one way"
    what = "pipeline " if use.role == PP else ""
    return f"{what}Send/Recv {told}{more}, {_bytes(use.links)} {way}"


def select_communicators(uses: Sequence[CommunicatorUse], most: int) -> list[CommunicatorUse]:
    """Which communicators a report shows, in their order: the first of every role, then those that come first."""
    first = {use.role: place for place, use in reversed(list(enumerate(uses)))}
    chosen = sorted(first.values())[:most]
    rest = (place for place in range(len(uses)) if place not in set(chosen))
    return [uses[place] for place in sorted([*chosen, *islice(rest, most - len(chosen))])]


def _bytes(links: Sequence[PeerLink]) -> str:
    low, high = (found(link.payload_bytes for link in links) for found in (min, max))
    return format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"


def _chain(gpus: Sequence[_Gpu], links: Sequence[PeerLink]) -> str:
    directed = {(link.source, link.destination) for link in links}
    told = [_name(gpus[0])]
    for before, after in pairwise(gpus):
        forth, back = (before, after) in directed, (after, before) in directed
        told.append(f"{'⇄' if forth and back else '→' if forth else '←'} {_name(after)}")
    if len(told) > _MOST_STAGES:
        told[_MOST_STAGES - 2 : -1] = ["…"]
    return " ".join(told)


def _name(gpu: _Gpu) -> str:
    return UNKNOWN if gpu is None else str(gpu)


def _chains(links: Sequence[PeerLink]) -> list[list[_Gpu]] | None:
    """The GPUs one after the other, each chain from the end whose rank is lowest; None: they are no chains.

    A chain that closes, as that of interleaved stages, ends with the GPU that it begins with.
    """
    neighbours: defaultdict[_Gpu, dict[_Gpu, None]] = defaultdict(dict)
    for link in links:
        if link.source != link.destination:
            neighbours[link.source].setdefault(link.destination)
            neighbours[link.destination].setdefault(link.source)
    if None in neighbours or any(len(found) > 2 for found in neighbours.values()):
        # Ranks that were not recorded cannot be told apart.
        return None if len(neighbours) != 2 else [list(neighbours)]
    chains, seen = [], set[_Gpu]()
    ends = [gpu for gpu, found in neighbours.items() if len(found) == 1]
    for first in (*ends, *neighbours):
        if first not in seen:
            chains.append(list(_walk(first, neighbours, seen)))
    return chains or None


def _walk(first: _Gpu, neighbours: defaultdict[_Gpu, dict[_Gpu, None]], seen: set[_Gpu]) -> Iterator[_Gpu]:
    gpu: _Gpu = first
    length = 0
    while True:
        seen.add(gpu)
        length += 1
        yield gpu
        following = [other for other in neighbours[gpu] if other not in seen]
        if not following:
            break
        gpu = following[0]
    if length > 2 and first in neighbours[gpu]:
        yield first
