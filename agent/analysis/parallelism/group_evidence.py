"""Computes for each communicator the few numbers that distinguish the kinds of parallelism.

Messages of up to a KiB are control messages: barriers, losses, norms, flags.  They say nothing of a group's purpose
and are left out of the evidence, unless a job sends nothing larger.  Broadcasts, Reduces and other rooted operations
begin a job or feed it, in groups of every kind, and are no evidence either.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from railscope.agent.analysis.tables.calls import CountedCalls
from railscope.agent.analysis.tables.gpus import Communicator, Gpus
from railscope.agent.analysis.tables.grouping import Integers, sum_by_group, sum_by_index

CONTROL_BYTES: Final = 1024
"""Largest payload of a control message."""
COLLECTIVES: Final = ("AllReduce", "AllGather", "ReduceScatter")
"""What tensor and data parallelism are made of."""
_WIDE: Final = frozenset({"Float32", "Float64"})
"""Data types in which gradients may be summed; activations travel in half precision or less."""


@dataclass(frozen=True, slots=True)
class OpEvidence:
    """What is not control among the calls of one operation in a communicator, all ranks together."""

    calls: int
    payload_bytes: int
    sizes: int
    """Distinct payloads."""
    common_bytes: int
    """The payload that most calls have; of several the largest."""
    common_calls: int
    wide_calls: int
    """With Float32 or Float64."""
    largest_bytes: int


@dataclass(frozen=True, slots=True)
class CommEvidence:
    """One communicator and what it carried."""

    communicator: Communicator
    gpus: frozenset[int]
    """Its recorded members."""
    callers: int
    """Ranks that called anything."""
    ops: dict[str, OpEvidence]
    """Of operations that carried more than control messages."""
    links: dict[tuple[int, int], int]
    """Sends and receives by pair of ranks (from, to), the larger number of both ends'; a rank may send to itself."""
    control_calls: int
    """Calls that are left out of the evidence."""

    @property
    def comm(self) -> str:
        return self.communicator.comm

    @property
    def size(self) -> int:
        """Ranks, also those that were not recorded."""
        return self.communicator.nranks or len(self.gpus)

    @property
    def collective_calls(self) -> float:
        """AllReduces, AllGathers and ReduceScatters of one rank."""
        return sum(self.ops[op].calls for op in COLLECTIVES if op in self.ops) / max(self.callers, 1)

    @property
    def common_collective(self) -> OpEvidence | None:
        """The collective operation with the most calls."""
        found = [(self.ops[op].calls, -place, op) for place, op in enumerate(COLLECTIVES) if op in self.ops]
        return self.ops[max(found)[2]] if found else None

    @property
    def sent_bytes(self) -> int:
        """By Send."""
        return self.ops["Send"].payload_bytes if "Send" in self.ops else 0

    @property
    def collective_bytes(self) -> int:
        return sum(self.ops[op].payload_bytes for op in COLLECTIVES if op in self.ops)


def find_evidence(counted: CountedCalls, gpus: Gpus) -> tuple[CommEvidence, ...]:
    """What every communicator of two or more ranks shows of its role, the largest first, in the order of `gpus`."""
    wanted = [one for one in gpus.communicators if (one.nranks or len(one.members)) > 1]
    numbers = {one.comm: number for number, one in enumerate(wanted)}
    comm_of_end = np.array([_number(gpus, numbers, end) for end in counted.ends], dtype=np.int64)
    rank_of_end = np.array([gpus.rank_of.get(end, -1) for end in counted.ends], dtype=np.int64)
    comm = counted.by_row(comm_of_end[counted.kinds.end].astype(np.int32))
    largest = int(counted.payload_bytes.max(initial=0))
    counts = (comm >= 0) & (counted.payload_bytes > (CONTROL_BYTES if largest > CONTROL_BYTES else 0))
    ops = _op_evidence(counted, comm, np.flatnonzero(counts))
    links = _links(counted, comm_of_end, rank_of_end, counts)
    control = sum_by_index(comm[(comm >= 0) & ~counts], counted.calls[(comm >= 0) & ~counts], len(wanted))
    callers = np.bincount(comm_of_end[comm_of_end >= 0], minlength=len(wanted))
    return tuple(
        CommEvidence(
            communicator=one,
            gpus=frozenset(one.members.values()),
            callers=int(callers[number]),
            ops=ops[number],
            links=links[number],
            control_calls=int(control[number]),
        )
        for number, one in enumerate(wanted)
    )


def _number(gpus: Gpus, numbers: dict[str, int], end: tuple[int, int]) -> int:
    communicator = gpus.communicator_of.get(end)
    return -1 if communicator is None else numbers.get(communicator.comm, -1)


def _op_evidence(
    counted: CountedCalls, comm: NDArray[np.int32], rows: Integers
) -> defaultdict[int, dict[str, OpEvidence]]:
    wide_types = np.array([name in _WIDE for name in counted.type_names], dtype=bool)
    own_calls = counted.calls[rows]
    op, wide_kind = counted.kinds.op.astype(np.int32), wide_types[counted.kinds.data_type]
    (numbers, ops, payloads), (calls, wide) = sum_by_group(
        (comm[rows], counted.by_row(op)[rows], counted.payload_bytes[rows]),
        own_calls,
        own_calls * counted.by_row(wide_kind)[rows],
    )
    found: defaultdict[int, dict[str, OpEvidence]] = defaultdict(dict)
    if not len(calls):
        return found
    starts = np.flatnonzero((np.diff(numbers, prepend=-1) != 0) | (np.diff(ops, prepend=-1) != 0))
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(calls)], strict=True):
        payload, own = payloads[start:end], calls[start:end]
        # Of several that are as frequent the largest, which is the last one.
        common = len(own) - 1 - int(np.argmax(own[::-1]))
        found[int(numbers[start])][counted.op_names[ops[start]]] = OpEvidence(
            calls=int(own.sum()),
            payload_bytes=int((own * payload).sum()),
            sizes=end - start,
            common_bytes=int(payload[common]),
            common_calls=int(own[common]),
            wide_calls=int(wide[start:end].sum()),
            largest_bytes=int(payload[-1]),
        )
    return found


def _links(
    counted: CountedCalls, comm_of_end: Integers, rank_of_end: Integers, counts: NDArray[np.bool_]
) -> defaultdict[int, dict[tuple[int, int], int]]:
    """Sends and receives by communicator and pair of ranks; of the rows that count."""
    found: defaultdict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    kinds = counted.kinds
    calls = np.add.reduceat(counted.calls * counts, kinds.first) if len(kinds) else kinds.calls
    for name in ("Send", "Recv"):
        if name not in counted.op_names:
            continue
        rank = rank_of_end[kinds.end]
        own = np.flatnonzero((kinds.op == counted.op_names.index(name)) & (calls > 0) & (rank >= 0) & (kinds.peer >= 0))
        ends = (rank[own], kinds.peer[own])
        keys, (many,) = sum_by_group(
            (comm_of_end[kinds.end[own]], *(ends if name == "Send" else ends[::-1])), calls[own]
        )
        for number, source, destination, count in zip(*(column.tolist() for column in (*keys, many)), strict=True):
            links = found[number]
            links[source, destination] = max(links.get((source, destination), 0), count)
    return found
