"""How large calls are (row 2; paper A's request-size distribution, paper B's message sizes).

The table is exact: every size that occurred, with its number of calls.  The cumulative distribution (CDF) of a size is
the part of calls that are at most so large; by bytes, the part of all payload that such calls move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from agent.analysis.calls import NOTHING, CountedCalls, sums
from agent.analysis.report_facts import SizeUse


@dataclass(frozen=True, slots=True)
class CdfPoint:
    """The distribution at one size."""

    bytes: int
    calls_share: float
    """Part of calls that are at most so large: rises from size to size, and ends at exactly 1."""
    payload_share: float
    """Part of the payload that those calls move; 1 of no payload at all."""


def find_sizes(counted: CountedCalls) -> tuple[SizeUse, ...]:
    """Calls by operation and size, in this order; calls of unknown size are left out."""
    known = counted.payload_bytes != NOTHING
    sizes, place = np.unique(counted.payload_bytes[known], return_inverse=True)
    keys, groups = np.unique(counted.op[known] * len(sizes) + place, return_inverse=True)
    calls = sums(groups, counted.calls[known], len(keys))
    return tuple(
        SizeUse(counted.op_names[key // len(sizes)], size, number)
        for key, size, number in zip(
            keys.tolist(), sizes[keys % max(len(sizes), 1)].tolist(), calls.tolist(), strict=True
        )
    )


def cdf(sizes: Iterable[SizeUse]) -> tuple[CdfPoint, ...]:
    """The cumulative distribution over all given operations together, by size."""
    calls: dict[int, int] = {}
    for use in sizes:
        calls[use.bytes] = calls.get(use.bytes, 0) + use.calls
    all_calls = sum(calls.values())
    all_bytes = sum(size * number for size, number in calls.items())
    points = []
    so_many = so_much = 0
    for size in sorted(calls):
        so_many += calls[size]
        so_much += size * calls[size]
        points.append(CdfPoint(size, so_many / all_calls, so_much / all_bytes if all_bytes else 1.0))
    return tuple(points)


def cdf_by_op(sizes: Sequence[SizeUse]) -> dict[str, tuple[CdfPoint, ...]]:
    """The distribution of each operation."""
    ops = sorted({use.op for use in sizes})
    return {op: cdf(use for use in sizes if use.op == op) for op in ops}


def quantile_bytes(points: Sequence[CdfPoint], share: float) -> int | None:
    """The smallest size that at least this part of calls does not exceed; None: there are no calls."""
    return next((point.bytes for point in points if point.calls_share >= share), None)
