"""The node's totals: calls, payload and sizes of all processes, those that have ended included.

A total never falls.  What the kernel's table still holds is added to what was taken out of it; a row is in exactly one
of the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import CollectiveTotal, Histogram, OpHistogram
from railscope.agent.node.collectives.call_counts import CallCount
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import data_type_name, op_name

SIZE_BOUNDS: Final = tuple(float(1 << bucket) for bucket in range(40))
"""Bytes."""

_Sums = defaultdict[tuple[int, int, str], list[int]]
_Sizes = defaultdict[tuple[int, int], list[int]]


def _pair() -> list[int]:
    """Calls, payload bytes."""
    return [0, 0]


class NodeTotals:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._sums: _Sums = defaultdict(_pair)
        """By op, data type, gpu."""
        self._sizes: _Sizes = defaultdict(_pair)
        """By op, size bucket."""

    def fold(self, count: CallCount, gpu: str) -> None:
        """Keep a row that was taken out of the kernel's table."""
        _add(self._sums, self._sizes, count, gpu)

    def sum_with(
        self, living: Iterable[tuple[CallCount, str]], overflow: Records | None
    ) -> tuple[tuple[CollectiveTotal, ...], tuple[OpHistogram, ...]]:
        """Totals and size histograms of what was folded, of rows with their GPUs, and of what found no row.

        `overflow` has the shape (ops, data types) and dtype AGGREGATE; the sizes of its calls are not known.
        """
        sums: _Sums = defaultdict(_pair, {key: list(value) for key, value in self._sums.items()})
        sizes: _Sizes = defaultdict(_pair, {key: list(value) for key, value in self._sizes.items()})
        for count, gpu in living:
            _add(sums, sizes, count, gpu)
        if overflow is not None:
            for op, data_type in zip(*(axis.tolist() for axis in overflow["calls"].nonzero()), strict=True):
                total = sums[op, data_type, UNKNOWN]
                total[0] += int(overflow["calls"][op, data_type])
                total[1] += int(overflow["payload_bytes"][op, data_type])
        collectives = tuple(
            CollectiveTotal(op_name(op), data_type_name(data_type), gpu, calls, payload_bytes)
            for (op, data_type, gpu), (calls, payload_bytes) in sorted(sums.items())
        )
        return collectives, _histograms(sizes)


def _add(sums: _Sums, sizes: _Sizes, count: CallCount, gpu: str) -> None:
    kind = count.kind
    for total in (sums[kind.op, kind.data_type, gpu], sizes[kind.op, kind.size_bucket]):
        total[0] += count.calls
        total[1] += count.payload_bytes


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
