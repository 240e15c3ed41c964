"""All calls of a dataset, counted once: the one pass over `calls` that the pattern's figures share.

Equal calls of one end of a communicator (same operation, data type, payload, root or peer) become one row with their
number.  A training job repeats itself, so millions of calls make a few hundred rows; only a job whose every message
has another size makes many.  What the figures of rows 1 to 5 and 7 need is in them, and nothing of time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.analysis.gpus import Instance
from agent.dataset.reader import Dataset

Integers = NDArray[np.int64]

NOTHING: Final = -1
"""In `payload_bytes` and `peer`: not known, or none."""
_KEYS: Final = ("recording", "instance", "op", "data_type", "payload_bytes", "peer")


@dataclass(frozen=True, eq=False)
class CountedCalls:
    """Calls by end, operation, data type, payload and peer; columns of equal length, in a fixed order."""

    ends: tuple[Instance, ...]
    """Every end that called."""
    end: Integers
    """Index in `ends`."""
    op_names: tuple[str, ...]
    op: Integers
    """Index in `op_names`."""
    type_names: tuple[str, ...]
    data_type: Integers
    """Index in `type_names`."""
    payload_bytes: Integers
    """Of one call, or `NOTHING`."""
    peer: Integers
    """Rank in the communicator, or `NOTHING`."""
    calls: Integers
    of_operations: bool
    """Counted from `operations`, as there are no calls."""

    def __len__(self) -> int:
        return len(self.calls)

    @cached_property
    def moved_bytes(self) -> Integers:
        """Payload of all calls of each row; those of unknown payload count as none."""
        product: Integers = self.calls * np.maximum(self.payload_bytes, 0)
        return product

    @cached_property
    def total_calls(self) -> int:
        return int(self.calls.sum())

    @cached_property
    def calls_of_unknown_payload(self) -> int:
        return int(self.calls[self.payload_bytes == NOTHING].sum())


def count_calls(dataset: Dataset) -> CountedCalls:
    """Count the calls of a dataset; where it has none, the operations, each of which somebody called."""
    counted = _counted(dataset, "calls")
    of_operations = not counted.num_rows
    if of_operations:
        counted = _counted(dataset, "operations")
    recording, instance = _numbers(counted["recording"]), _numbers(counted["instance"])
    begins = np.ones(len(recording), dtype=np.bool_)
    begins[1:] = (recording[1:] != recording[:-1]) | (instance[1:] != instance[:-1])
    op_names, op = _names(counted["op"])
    type_names, data_type = _names(counted["data_type"])
    return CountedCalls(
        ends=tuple(zip(recording[begins].tolist(), instance[begins].tolist(), strict=True)),
        end=np.cumsum(begins) - 1,
        op_names=op_names,
        op=op,
        type_names=type_names,
        data_type=data_type,
        payload_bytes=_numbers(counted["payload_bytes"]),
        peer=_numbers(counted["peer"]),
        calls=_numbers(counted["calls"]),
        of_operations=of_operations and bool(counted.num_rows),
    )


def sums(places: Integers, values: Integers, size: int) -> Integers:
    """Sums of `values` by place, in whole numbers (bincount would make floats)."""
    result = np.zeros(size, dtype=np.int64)
    np.add.at(result, places, values)
    return result


def _counted(dataset: Dataset, name: str) -> Any:
    """Groups and their calls, in order of the groups: engines return them in any order, and figures must not follow."""
    rows = dataset[name]
    rows = rows.select(
        **{key: rows[key].fill_null(NOTHING) for key in ("recording", "instance", "payload_bytes", "peer")},
        **{key: rows[key].fill_null("unknown") for key in ("op", "data_type")},
    )
    return dataset.rows(rows.group_by(list(_KEYS)).agg(calls=rows.count()).order_by(list(_KEYS)))


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
