"""The node's totals: calls, payload and sizes of all processes, those that have ended included.

A total never falls.  What the kernel's table still holds is added to what was taken out of it; a row is in exactly one
of the two.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import CollectiveTotal, OpHistogram
from railscope.agent.node.collectives.call_counts import CallCount, CallCounts, CallKind, sum_groups
from railscope.agent.node.collectives.communicators import Communicators
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import data_type_name, op_name

SIZE_BOUNDS: Final = tuple(float(1 << bucket) for bucket in range(40))
"""Bytes."""

_Sums = defaultdict[tuple[int, int, str], list[int]]
_Sizes = defaultdict[tuple[int, int], list[int]]


def _pair() -> list[int]:
    """Calls, payload bytes."""
    return [0, 0]


@dataclass(frozen=True, slots=True)
class _Grouped:
    """Which total each row of the table adds to: the same while nothing of this changes."""

    kinds: tuple[CallKind, ...]
    changes: int
    """Of what is known of communicators."""
    sums: tuple[tuple[int, int, str], ...]
    sizes: tuple[tuple[int, int], ...]
    of_sum: npt.NDArray[np.intp]
    of_size: npt.NDArray[np.intp]


class NodeTotals:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, communicators: Communicators) -> None:
        """`communicators` know their GPUs."""
        self._communicators = communicators
        self._sums: _Sums = defaultdict(_pair)
        """By op, data type, gpu."""
        self._sizes: _Sizes = defaultdict(_pair)
        """By op, size bucket."""
        self._grouped: _Grouped | None = None
        """Of the last rows."""

    def fold(self, count: CallCount) -> None:
        """Keep a row that was taken out of the kernel's table."""
        kind = count.kind
        sums = self._sums[kind.op, kind.data_type, self._gpu_of(kind.instance)]
        for total in (sums, self._sizes[kind.op, kind.size_bucket]):
            _add(total, count.calls, count.payload_bytes)

    def sum_with(
        self, counts: CallCounts, overflow: Records | None
    ) -> tuple[tuple[CollectiveTotal, ...], tuple[OpHistogram, ...]]:
        """Totals and size histograms of what was folded, of rows, and of what found no row.

        `overflow` has the shape (ops, data types) and dtype AGGREGATE; the sizes of its calls are not known.
        """
        sums: _Sums = defaultdict(_pair, {key: list(value) for key, value in self._sums.items()})
        sizes: _Sizes = defaultdict(_pair, {key: list(value) for key, value in self._sizes.items()})
        grouped = self._group(counts.kinds)
        of_sums = _sums_of(grouped.of_sum, len(grouped.sums), counts)
        for key, (calls, payload_bytes) in zip(grouped.sums, of_sums, strict=True):
            _add(sums[key], calls, payload_bytes)
        of_sizes = _sums_of(grouped.of_size, len(grouped.sizes), counts)
        for size, (calls, payload_bytes) in zip(grouped.sizes, of_sizes, strict=True):
            _add(sizes[size], calls, payload_bytes)
        if overflow is not None:
            for op, data_type in zip(*(axis.tolist() for axis in overflow["calls"].nonzero()), strict=True):
                total = sums[op, data_type, UNKNOWN]
                _add(total, int(overflow["calls"][op, data_type]), int(overflow["payload_bytes"][op, data_type]))
        collectives = tuple(
            CollectiveTotal(op_name(op), data_type_name(data_type), gpu, calls, payload_bytes)
            for (op, data_type, gpu), (calls, payload_bytes) in sorted(sums.items())
        )
        return collectives, _histograms(sizes)

    def _group(self, kinds: tuple[CallKind, ...]) -> _Grouped:
        known, changes = self._grouped, self._communicators.changes
        if known is not None and known.kinds is kinds and known.changes == changes:
            return known
        sums: dict[tuple[int, int, str], int] = {}
        sizes: dict[tuple[int, int], int] = {}
        of_sum = [sums.setdefault((kind.op, kind.data_type, self._gpu_of(kind.instance)), len(sums)) for kind in kinds]
        of_size = [sizes.setdefault((kind.op, kind.size_bucket), len(sizes)) for kind in kinds]
        self._grouped = _Grouped(
            kinds, changes, tuple(sums), tuple(sizes), np.array(of_sum, np.intp), np.array(of_size, np.intp)
        )
        return self._grouped

    def _gpu_of(self, instance: int) -> str:
        communicator = self._communicators.get(instance)
        return communicator.gpu if communicator is not None else UNKNOWN


def _sums_of(groups: npt.NDArray[np.intp], number: int, counts: CallCounts) -> list[tuple[int, int]]:
    """Calls and payload bytes of each group."""
    calls, payload_bytes = (sum_groups(groups, number, one) for one in (counts.calls, counts.payload_bytes))
    return list(zip(calls, payload_bytes, strict=True))


def _add(total: list[int], calls: int, payload_bytes: int) -> None:
    total[0] += calls
    total[1] += payload_bytes


def _histograms(sizes: _Sizes) -> tuple[OpHistogram, ...]:
    counts: dict[int, list[int]] = {}
    sums: defaultdict[int, int] = defaultdict(int)
    for (op, bucket), (calls, payload_bytes) in sizes.items():
        buckets = counts.setdefault(op, [0] * (len(SIZE_BOUNDS) + 1))
        buckets[min(bucket, len(SIZE_BOUNDS))] += calls
        sums[op] += payload_bytes
    return tuple(
        OpHistogram(op_name(op), Histogram(SIZE_BOUNDS, tuple(buckets), float(sums[op])))
        for op, buckets in sorted(counts.items())
    )
