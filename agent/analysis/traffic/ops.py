"""Which operations were called how often; which ranks a link of Send and Recv joins (paper A, section on operations).

Every recorded rank's call counts: an AllReduce of eight recorded ranks is eight calls.  Payload is count × size of the
data type with NCCL's meaning of count, so that of AllGather, ReduceScatter, AllToAll, Scatter and Gather is what one
rank gives or gets; what it makes on the wire is another module's (traffic).

Who sends to whom by Send and Recv are the links of pipelines (paper B's table 3).  A message is known from its Send,
its Recv, or both: of the two ends the one that recorded more counts.  A PutSignal has no call at its other end.
Exchanges of all with all have no links here: their pairs are in the matrix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import numpy as np

from railscope.agent.analysis.facts.report import CommunicatorUse, OpUse, PeerLink, Unknown
from railscope.agent.analysis.tables.calls import CountedCalls
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.analysis.tables.grouping import Integers, sum_by_group
from railscope.agent.facts.counted import format_count

_SENT: Final = ("Send", "PutSignal")
_MOST_OF_A_MEMBER: Final = 4
"""Links a rank: an interleaved pipeline has two neighbours, and bytes in both directions."""


def find_ops(counted: CountedCalls) -> tuple[OpUse, ...]:
    """Calls and payload by operation and data type, the most frequent first."""
    return _uses(counted, np.arange(len(counted.kinds)))


def find_communicators(counted: CountedCalls, gpus: Gpus, roles: Mapping[str, str]) -> tuple[CommunicatorUse, ...]:
    """Every communicator with its calls, those that moved most payload first; `roles` by communicator."""
    names = [communicator.comm for communicator in gpus.communicators]
    place = {comm: index for index, comm in enumerate(names)}
    of_end = np.array([_place(place, gpus, counted.ends[index]) for index in range(len(counted.ends))], dtype=np.int64)
    kinds = counted.kinds
    own = of_end[kinds.end] if len(kinds) else np.empty(0, dtype=np.int64)
    order = np.argsort(own, kind="stable")
    bounds = np.searchsorted(own[order], np.arange(len(names) + 1))
    links = find_links(counted, gpus)
    received = np.array([name == "Recv" for name in counted.op_names], dtype=bool)
    sent = np.where(received[kinds.op], 0, kinds.moved_bytes) if len(kinds) else kinds.moved_bytes
    uses = []
    for index, communicator in enumerate(gpus.communicators):
        chosen = order[bounds[index] : bounds[index + 1]]
        uses.append(
            CommunicatorUse(
                comm=communicator.comm,
                nranks=communicator.nranks,
                gpus=tuple(communicator.members[rank] for rank in sorted(communicator.members)),
                role=roles.get(communicator.comm, "unknown"),
                calls=int(kinds.calls[chosen].sum()),
                payload_bytes=int(sent[chosen].sum()),
                ops=_uses(counted, chosen),
                links=links.get(communicator.comm, ()),
            )
        )
    return tuple(sorted(uses, key=lambda use: (-use.payload_bytes, -use.calls, use.gpus, use.comm)))


def unknown_of_calls(counted: CountedCalls) -> tuple[Unknown, ...]:
    """What the calls do not tell."""
    if not len(counted):
        return tuple(
            Unknown(row, "No call was recorded: record while the job communicates, or import data with calls.")
            for row in (1, 2, 3)
        )
    unknown = []
    if counted.of_operations:
        unknown.append(
            Unknown(1, "No call was recorded: completed operations are counted instead, and lost ones are missing.")
        )
    unsized = counted.calls_of_unknown_payload
    if unsized:
        unknown.append(
            Unknown(
                2,
                f"Of {format_count(unsized, 'call')} the size is not known: such a call counts as an operation, and is "
                "in no size, "
                "pair or sum of bytes.",
            )
        )
    return tuple(unknown)


def _place(places: Mapping[str, int], gpus: Gpus, end: tuple[int, int]) -> int:
    """The index of an end's communicator; −1: the recording does not describe this end."""
    communicator = gpus.communicator_of.get(end)
    return -1 if communicator is None else places[communicator.comm]


def _uses(counted: CountedCalls, chosen: Integers) -> tuple[OpUse, ...]:
    """Calls of these kinds by operation and data type."""
    kinds = counted.kinds
    (op, data_type), sums = sum_by_group(
        (kinds.op[chosen], kinds.data_type[chosen]),
        *(column[chosen] for column in (kinds.calls, kinds.moved_bytes, kinds.unsized_calls)),
    )
    uses = [
        OpUse(counted.op_names[own_op], counted.type_names[own_type], *numbers)
        for own_op, own_type, *numbers in zip(*(column.tolist() for column in (op, data_type, *sums)), strict=True)
    ]
    return tuple(sorted(uses, key=lambda use: (-use.calls, use.op, use.dtype)))


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
        keys, (calls, moved) = sum_by_group((comm[own], *pair), kinds.calls[own], kinds.moved_bytes[own])
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
