"""Which operations were called how often, in all and by communicator (paper A, section on operations).

Every recorded rank's call counts: an AllReduce of eight recorded ranks is eight calls.  Payload is count × size of the
data type with NCCL's meaning of count, so that of AllGather, ReduceScatter, AllToAll, Scatter and Gather is what one
rank gives or gets; what it makes on the wire is another module's (traffic).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from railscope.agent.analysis.facts.report import CommunicatorUse, OpUse, Unknown
from railscope.agent.analysis.tables.calls import CountedCalls
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.analysis.tables.grouping import Integers, grouped
from railscope.agent.analysis.traffic.peer_links import find_links


def find_ops(counted: CountedCalls) -> tuple[OpUse, ...]:
    """Calls by operation and data type, the most frequent first."""
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
            Unknown(row, "No call was recorded: record while the job communicates, or import what knows of calls.")
            for row in (1, 2, 3)
        )
    unknown = []
    if counted.of_operations:
        unknown.append(
            Unknown(1, "No call was recorded: operations that completed are counted, and those lost are missing.")
        )
    unsized = counted.calls_of_unknown_payload
    if unsized:
        unknown.append(
            Unknown(
                2,
                f"Of {unsized:,} calls the size is not known: they are counted as operations, and are in no size, "
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
    (op, data_type), (calls, moved) = grouped(
        (kinds.op[chosen], kinds.data_type[chosen]), kinds.calls[chosen], kinds.moved_bytes[chosen]
    )
    uses = [
        OpUse(counted.op_names[own_op], counted.type_names[own_type], number, count)
        for own_op, own_type, number, count in zip(
            op.tolist(), data_type.tolist(), calls.tolist(), moved.tolist(), strict=True
        )
    ]
    return tuple(sorted(uses, key=lambda use: (-use.calls, use.op, use.dtype)))
