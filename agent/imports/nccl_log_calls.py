"""Calls of NCCL's log: what their words say, and many of them as columns."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from railscope.agent.dataset.files import LARGEST_PAYLOAD_BYTES
from railscope.agent.dataset.schema import WORDS
from railscope.agent.imports.facts import MOST_RANKS, ImportedCall
from railscope.agent.imports.nccl_log_communicators import LoggedEnd
from railscope.agent.imports.target import ImportTarget
from railscope.probes.nccl.abi import DATA_TYPE_BYTES, DataType, Op

_DATA_TYPES: Final = {
    int(kind): (kind.name, DATA_TYPE_BYTES[kind]) for kind in DataType if kind is not DataType.Unknown
}
_WITH_PEER: Final = frozenset(
    {Op.Send, Op.Recv, Op.Broadcast, Op.Reduce, Op.Scatter, Op.Gather, Op.PutSignal, Op.Signal}
)
_OPS: Final = {op.name.lower(): (op.name, op in _WITH_PEER) for op in Op if op not in (Op.Unknown, Op.SendRecv)}
"""Name, and whether `root` says anything, by the name in small letters: RCCL writes AllToAll, NCCL AlltoAll."""


class Shape(NamedTuple):
    """What a call is, but for when and of whom."""

    op: str
    data_type: str
    payload_bytes: int
    peer: int | None
    nranks: int


def parse_shape(name: str, count: str, type_number: str, root: str, nranks: str) -> Shape | str:
    """What the texts of a call tell; a text: why they cannot be."""
    op = _OPS.get(name.lower())
    if op is None:
        return f"an unknown operation: {name}"
    kind = _DATA_TYPES.get(int(type_number))
    if kind is None:
        return f"an unknown data type: {type_number}"
    payload_bytes = int(count) * kind[1]
    if payload_bytes > LARGEST_PAYLOAD_BYTES:
        return f"an impossible count: {count}"
    size = int(nranks)
    if not 0 < size <= MOST_RANKS:
        return f"a communicator of {size} ranks"
    if op[1] and not 0 <= int(root) < size:
        return f"{op[0]} with rank {root} of {size}"
    return Shape(op[0], kind[0], payload_bytes, int(root) if op[1] else None, size)


class Kind(NamedTuple):
    """What calls have in common that the same thread made in the same way."""

    end: LoggedEnd
    host: str
    tid: int | None
    stream: int
    shape: Shape
    counted: bool
    """Whether it has a number."""


class Calls:
    """Calls of a block, as columns."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.sequences: list[int | None] = []
        self.kinds: list[int] = []
        """Which of `all_kinds` each call is."""
        self.all_kinds: list[Kind] = []

    def add_kind(self, kind: Kind) -> int:
        """The number of a kind of calls."""
        self.all_kinds.append(kind)
        return len(self.all_kinds) - 1

    def flush(self, target: ImportTarget) -> None:
        """Put them into the dataset."""
        kinds = np.array(self.kinds, np.int64)
        sequences = pa.array(self.sequences, pa.int64())
        times = np.array(self.times, np.int64)
        hosts: dict[str, int] = {}
        host_of = np.array([hosts.setdefault(kind.host, len(hosts)) for kind in self.all_kinds], np.int64)
        for host, number in hosts.items():
            own = np.flatnonzero(host_of[kinds] == number)
            whole = len(own) == len(kinds)
            these = kinds if whole else kinds[own]
            if not len(these):
                continue
            numbers = pa.array(these)
            columns: dict[str, Any] = {
                "time_ns": times if whole else times[own],
                "sequence": sequences if whole else sequences.take(pa.array(own)),
            }
            for name, kind, values in (
                ("instance", pa.int64(), [one.end.instance for one in self.all_kinds]),
                ("tid", pa.int64(), [one.tid for one in self.all_kinds]),
                ("stream", pa.int64(), [one.stream for one in self.all_kinds]),
                ("payload_bytes", pa.int64(), [one.shape.payload_bytes for one in self.all_kinds]),
                ("peer", pa.int32(), [one.shape.peer for one in self.all_kinds]),
                ("op", WORDS, [one.shape.op for one in self.all_kinds]),
                ("data_type", WORDS, [one.shape.data_type for one in self.all_kinds]),
            ):
                columns[name] = pa.array(values, kind).take(numbers)
            target.add_columns(host, ImportedCall, columns)
        self.times, self.sequences, self.kinds, self.all_kinds = [], [], [], []
