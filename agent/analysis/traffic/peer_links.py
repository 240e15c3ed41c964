"""Who sends to whom by Send and Recv, communicator by communicator: the links of pipelines (paper B's table 3).

A message is known from its Send, its Recv, or both: of the two ends the one that recorded more counts.  A PutSignal has
no call at its other end.  Exchanges of all with all have no links here: their pairs are in the matrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import numpy as np

from railscope.agent.analysis.facts.report import PeerLink
from railscope.agent.analysis.tables.calls import CountedCalls
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.analysis.tables.grouping import grouped

_SENT: Final = ("Send", "PutSignal")
_MOST_OF_A_MEMBER: Final = 4
"""Links a rank: an interleaved pipeline has two neighbours, and bytes in both directions."""


def find_links(counted: CountedCalls, gpus: Gpus) -> Mapping[str, tuple[PeerLink, ...]]:
    """The links of every communicator that has few for its ranks, in the order of ranks."""
    kinds = counted.kinds
    names = [communicator.comm for communicator in gpus.communicators]
    place = {comm: number for number, comm in enumerate(names)}
    ends = [gpus.communicator_of.get(end) for end in counted.ends]
    comm = np.array([-1 if end is None else place[end.comm] for end in ends], dtype=np.int64)[kinds.end]
    rank = np.array([gpus.rank_of.get(end, -1) for end in counted.ends], dtype=np.int64)[kinds.end]
    found: defaultdict[int, dict[tuple[int, int], tuple[int, int]]] = defaultdict(dict)
    for wanted in (_SENT, ("Recv",)):
        ops = [number for number, name in enumerate(counted.op_names) if name in wanted]
        own = np.flatnonzero(np.isin(kinds.op, ops) & (comm >= 0) & (rank >= 0) & (kinds.peer >= 0))
        pair = (rank[own], kinds.peer[own]) if wanted == _SENT else (kinds.peer[own], rank[own])
        keys, (calls, moved) = grouped((comm[own], *pair), kinds.calls[own], kinds.moved_bytes[own])
        for number, source, destination, *more in zip(
            *(column.tolist() for column in (*keys, calls, moved)), strict=True
        ):
            links = found[number]
            before = links.get((source, destination), (0, 0))
            links[source, destination] = (max(before[0], more[0]), max(before[1], more[1]))
    return {
        names[number]: tuple(
            PeerLink(members.get(source), members.get(destination), *told)
            for (source, destination), told in sorted(links.items())
        )
        for number, links in found.items()
        if len(links) <= _MOST_OF_A_MEMBER * len(members := gpus.communicators[number].members)
    }
