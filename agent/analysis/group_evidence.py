"""What each communicator carried, in the few numbers that tell one kind of parallelism from another.

Messages of up to a KiB are control messages: barriers, losses, norms, flags.  They say nothing of a group's purpose
and are left out of the evidence, unless a job sends nothing larger.  Broadcasts, Reduces and other rooted operations
begin a job or feed it, in groups of every kind, and are no evidence either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.analysis.calls import CountedCalls, Integers, sums
from agent.analysis.gpus import Communicator, Gpus

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
    """The evidence of every communicator of two or more ranks, the largest first, in the order of `gpus`."""
    wanted = [one for one in gpus.communicators if (one.nranks or len(one.members)) > 1]
    numbers = {one.comm: number for number, one in enumerate(wanted)}
    comm_of_end = np.array([_number(gpus, numbers, end) for end in counted.ends], dtype=np.int64)
    rank_of_end = np.array([gpus.rank_of.get(end, -1) for end in counted.ends], dtype=np.int64)
    comm = comm_of_end[counted.end]
    largest = int(counted.payload_bytes.max(initial=0))
    counts = (comm >= 0) & (counted.payload_bytes > (CONTROL_BYTES if largest > CONTROL_BYTES else 0))
    ops = _op_evidence(counted, comm, np.flatnonzero(counts))
    links = _links(counted, comm, rank_of_end, np.flatnonzero(counts))
    control = sums(comm[(comm >= 0) & ~counts], counted.calls[(comm >= 0) & ~counts], len(wanted))
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


def grouped(columns: Sequence[Integers], *values: Integers) -> tuple[Integers, list[Integers]]:
    """The distinct rows of the columns, in order, and for each of them the sums of the values."""
    order = _order(columns)
    sorted_columns = [column[order] for column in columns]
    differs = np.zeros(max(len(order) - 1, 0), dtype=bool)
    for column in sorted_columns:
        differs |= column[1:] != column[:-1]
    starts = np.concatenate([np.zeros(min(len(order), 1), dtype=np.int64), np.flatnonzero(differs) + 1])
    # reduceat takes no empty list of values.
    totals = [np.add.reduceat(each[order], starts) if len(starts) else each for each in values]
    return np.stack([column[starts] for column in sorted_columns], axis=1), totals


def _order(columns: Sequence[Integers]) -> Integers:
    """What puts the rows in order; by one number each where 63 bits are enough for it, which is much faster."""
    if not len(columns[0]):
        return np.empty(0, dtype=np.int64)
    key, room = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        lowest = int(column.min())
        width = int(column.max()) - lowest + 1
        room *= width
        if room >= 1 << 63:
            return np.lexsort(columns[::-1])
        key = key * width + (column - lowest)
    return np.argsort(key, kind="stable")


def _op_evidence(counted: CountedCalls, comm: Integers, rows: Integers) -> defaultdict[int, dict[str, OpEvidence]]:
    wide_types = np.array([name in _WIDE for name in counted.type_names], dtype=bool)
    own_calls = counted.calls[rows]
    keys, (calls, wide) = grouped(
        (comm[rows], counted.op[rows], counted.payload_bytes[rows]),
        own_calls,
        own_calls * wide_types[counted.data_type[rows]],
    )
    found: defaultdict[int, dict[str, OpEvidence]] = defaultdict(dict)
    if not len(keys):
        return found
    starts = np.flatnonzero(np.any(np.diff(keys[:, :2], axis=0, prepend=-1), axis=1))
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(keys)], strict=True):
        number, op, _ = keys[start].tolist()
        payload, own = keys[start:end, 2], calls[start:end]
        common = int(np.lexsort((payload, own))[-1])
        found[number][counted.op_names[op]] = OpEvidence(
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
    counted: CountedCalls, comm: Integers, rank_of_end: Integers, rows: Integers
) -> defaultdict[int, dict[tuple[int, int], int]]:
    found: defaultdict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    for name in ("Send", "Recv"):
        if name not in counted.op_names:
            continue
        own = rows[counted.op[rows] == counted.op_names.index(name)]
        rank, peer = rank_of_end[counted.end[own]], counted.peer[own]
        own, rank, peer = (column[(rank >= 0) & (peer >= 0)] for column in (own, rank, peer))
        ends = (rank, peer) if name == "Send" else (peer, rank)
        keys, (calls,) = grouped((comm[own], *ends), counted.calls[own])
        for (number, source, destination), count in zip(keys.tolist(), calls.tolist(), strict=True):
            links = found[number]
            links[source, destination] = max(links.get((source, destination), 0), count)
    return found
