"""Counts all calls of a dataset once, for all analyses that need them.

Calls of one end of a communicator with the same operation, data type and root or peer are of one *kind*; of each kind
there is a row for every payload, with its number of calls.  A training job repeats itself, so millions of calls make a
few hundred rows; a job whose every message has another size makes as many as it has calls, and still few kinds: what
does not need single sizes goes by kinds.  What the measurements of calls, bytes and composition need is in them, and
nothing of time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import ibis
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from railscope.agent.analysis.tables.gpus import Instance
from railscope.agent.analysis.tables.grouping import Integers
from railscope.agent.dataset.reader import Dataset

NOTHING: Final = -1
"""In `payload_bytes` and `peer`: not known, or none."""
_KEYS: Final = ("recording", "instance", "op", "data_type", "peer")


@dataclass(frozen=True, slots=True, eq=False)
class CallKinds:
    """Calls by end, operation, data type and peer; columns of equal length, in this order."""

    end: Integers
    """Index in `CountedCalls.ends`."""
    op: Integers
    """Index in `CountedCalls.op_names`."""
    data_type: Integers
    """Index in `CountedCalls.type_names`."""
    peer: Integers
    """Rank in the communicator, or `NOTHING`."""
    calls: Integers
    moved_bytes: Integers
    """Payload of all calls; those of unknown payload count as none."""
    unsized_calls: Integers
    """Of unknown payload."""
    first: Integers
    """The first row of each kind; its rows follow each other."""
    rows: Integers
    """How many there are of each."""

    def __len__(self) -> int:
        return len(self.end)


@dataclass(frozen=True, eq=False)
class CountedCalls:
    """Calls by kind and payload; columns of equal length, in this order."""

    ends: tuple[Instance, ...]
    """Every end that called."""
    op_names: tuple[str, ...]
    type_names: tuple[str, ...]
    kinds: CallKinds
    payload_bytes: Integers
    """Of one call, or `NOTHING`."""
    calls: Integers
    of_operations: bool
    """Counted from `operations`, as there are no calls."""

    def __len__(self) -> int:
        return len(self.calls)

    def by_row(self, of_kind: NDArray[Any]) -> NDArray[Any]:
        """What each row's kind has."""
        return np.repeat(of_kind, self.kinds.rows)

    @cached_property
    def end(self) -> Integers:
        return self.by_row(self.kinds.end)

    @cached_property
    def op(self) -> Integers:
        return self.by_row(self.kinds.op)

    @cached_property
    def data_type(self) -> Integers:
        return self.by_row(self.kinds.data_type)

    @cached_property
    def peer(self) -> Integers:
        return self.by_row(self.kinds.peer)

    @cached_property
    def moved_bytes(self) -> Integers:
        """Payload of all calls of each row; those of unknown payload count as none."""
        product: Integers = self.calls * np.maximum(self.payload_bytes, 0)
        return product

    @property
    def total_calls(self) -> int:
        return int(self.kinds.calls.sum())

    @property
    def calls_of_unknown_payload(self) -> int:
        return int(self.kinds.unsized_calls.sum())


def count_calls(dataset: Dataset) -> CountedCalls:
    """Count the calls of a dataset, or its operations if it has no calls."""
    rows = _rows(dataset, "calls")
    found = dataset.rows(rows.select(*_KEYS).distinct())
    of_operations = not found.num_rows
    if of_operations:
        rows = _rows(dataset, "operations")
        found = dataset.rows(rows.select(*_KEYS).distinct())
    op_names, op = _names(found["op"])
    type_names, data_type = _names(found["data_type"])
    columns = [*(_numbers(found[key]) for key in ("recording", "instance")), op, data_type, _numbers(found["peer"])]
    # Engines return rows in any order, and figures must not follow.
    order = np.lexsort(columns[::-1])
    recording, instance, op, data_type, peer = (column[order] for column in columns)
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = (np.diff(recording) != 0) | (np.diff(instance) != 0)
    kind, payload_bytes, calls = _counted(dataset, rows, found, order)
    first = np.searchsorted(kind, np.arange(len(order)))
    moved = calls * np.maximum(payload_bytes, 0)
    return CountedCalls(
        ends=tuple(zip(recording[begins].tolist(), instance[begins].tolist(), strict=True)),
        op_names=op_names,
        type_names=type_names,
        kinds=CallKinds(
            end=np.cumsum(begins) - 1,
            op=op,
            data_type=data_type,
            peer=peer,
            calls=np.add.reduceat(calls, first) if len(first) else calls,
            moved_bytes=np.add.reduceat(moved, first) if len(first) else moved,
            # What is not known comes first of each kind.
            unsized_calls=np.where(payload_bytes[first] == NOTHING, calls[first], 0),
            first=first,
            rows=np.diff(first, append=len(kind)),
        ),
        payload_bytes=payload_bytes,
        calls=calls,
        of_operations=of_operations and bool(found.num_rows),
    )


def _rows(dataset: Dataset, name: str) -> Any:
    rows = dataset[name]
    return rows.select(
        **{key: rows[key].fill_null(NOTHING) for key in ("recording", "instance", "payload_bytes", "peer")},
        **{key: rows[key].fill_null("unknown") for key in ("op", "data_type")},
    )


def _counted(
    dataset: Dataset, rows: Any, kinds: pa.Table, order: Integers
) -> tuple[NDArray[np.int32], Integers, Integers]:
    """Kind, payload and calls of each row, in order; `order` are the places of the kinds in their order."""
    number = np.empty(len(order), dtype=np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    numbered = ibis.memtable(kinds.append_column("kind", pa.array(number)))
    joined = rows.join(numbered, list(_KEYS))
    keys = ("kind", "payload_bytes")
    found = dataset.rows(joined.group_by(list(keys)).agg(calls=joined.count()).order_by(list(keys)))
    return found["kind"].to_numpy(), _numbers(found["payload_bytes"]), _numbers(found["calls"])


def _numbers(column: Any) -> Integers:
    return column.to_numpy().astype(np.int64, copy=False)  # type: ignore[no-any-return]


def _names(column: Any) -> tuple[tuple[str, ...], Integers]:
    """The distinct texts in order, and for each row the index of its own."""
    encoded = column.dictionary_encode().unify_dictionaries()
    if not len(encoded):
        return (), np.empty(0, dtype=np.int64)
    found = encoded.chunk(0).dictionary.to_pylist()
    names = tuple(sorted(found))
    place = {name: index for index, name in enumerate(names)}
    own = np.array([place[name] for name in found], dtype=np.int64)
    return names, own[np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks])]
