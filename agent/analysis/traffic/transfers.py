"""What processes moved with libraries other than NCCL, pair by pair: KV caches from prefill to decode, as a rule.

A recording holds totals: operations, bytes, and durations from the call to when the program learned of the end.  A pair
is slow where its mean duration is at least twice the median of the other pairs' means, of the same library, operation
and about the same size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final

from railscope.agent.analysis.facts.report import TransferUse
from railscope.agent.dataset.reader import Dataset

SLOW_TIMES: Final = 2.0
_LEAST_OPERATIONS: Final = 8
"""Of a pair that is compared with others."""
_ABOUT_THE_SAME: Final = 2.0
"""The ratio of two pairs' mean sizes, at most."""


def find_transfers(dataset: Dataset) -> tuple[TransferUse, ...]:
    """Every pair, the most bytes first."""
    uses = [_use(row) for row in dataset.rows(dataset["transfers"]).to_pylist()]
    alike: defaultdict[tuple[str, str], list[TransferUse]] = defaultdict(list)
    for use in uses:
        if use.mean_seconds is not None and use.payload_bytes and use.operations >= _LEAST_OPERATIONS:
            alike[use.library, use.op].append(use)
    found = (_compared(use, alike.get((use.library, use.op), ())) for use in uses)
    return tuple(sorted(found, key=lambda use: (-(use.payload_bytes or 0), -use.operations, use.server, use.pid)))


def _use(row: dict[str, Any]) -> TransferUse:
    completed, seconds, payload_bytes = row["completed"] or 0, row["seconds"] or 0.0, row["payload_bytes"]
    moved = None if payload_bytes is None or not row["operations"] else payload_bytes * completed / row["operations"]
    return TransferUse(
        server=row["node"],
        pid=row["pid"],
        library=row["library"],
        op=row["op"],
        direction=row["direction"],
        peer=row["peer"] or "",
        operations=row["operations"],
        payload_bytes=payload_bytes,
        failed=row["failed"] or 0,
        mean_seconds=seconds / completed if completed else None,
        p50_seconds=row["p50_seconds"],
        p99_seconds=row["p99_seconds"],
        bytes_per_second=moved / seconds if moved and seconds else None,
        times_as_long=None,
    )


def _compared(use: TransferUse, alike: Sequence[TransferUse]) -> TransferUse:
    """The same, with how much longer it takes where it is slow beside others of about its size."""
    if use.mean_seconds is None or not any(one is use for one in alike):
        return use
    size = _mean_bytes(use)
    others = [
        one.mean_seconds
        for one in alike
        if one is not use
        and one.mean_seconds is not None
        and size / _ABOUT_THE_SAME <= _mean_bytes(one) <= size * _ABOUT_THE_SAME
    ]
    if not others or use.mean_seconds < SLOW_TIMES * (usual := median(others)) or not usual:
        return use
    return replace(use, times_as_long=use.mean_seconds / usual)


def _mean_bytes(use: TransferUse) -> float:
    return (use.payload_bytes or 0) / use.operations
