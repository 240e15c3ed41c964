"""What processes moved with libraries other than NCCL, pair by pair: KV caches from prefill to decode, as a rule.

A recording holds totals: operations, bytes, and durations from the call to when the program learned of the end.  A pair
is slow where its mean duration is at least twice the median of the other pairs' means, of the same library, operation
and about the same size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from railscope.agent.analysis.facts.report import TransferUse
from railscope.agent.analysis.tables.gpus import Gpus, name_server
from railscope.agent.dataset.reader import Dataset

SLOW_TIMES: Final = 2.0
_LEAST_OPERATIONS: Final = 8
"""Of a pair that is compared with others."""
_ABOUT_THE_SAME: Final = 2.0
"""The ratio of two pairs' mean sizes, at most."""


def find_transfers(dataset: Dataset, gpus: Gpus) -> tuple[TransferUse, ...]:
    """Every pair, the most bytes first; servers are called as those of GPUs are."""
    alike: defaultdict[tuple[str, str], list[TransferUse]] = defaultdict(list)
    for row in dataset.rows(dataset["transfers"]).to_pylist():
        use = _use(row, name_server(row["node"], row["netns"] or "", gpus.nodes_of_several))
        alike[use.library, use.op].append(use)
    found = (use for uses in alike.values() for use in _compared(uses))
    return tuple(sorted(found, key=lambda use: (-(use.payload_bytes or 0), -use.operations, use.server, use.pid)))


def _use(row: dict[str, Any], server: str) -> TransferUse:
    completed, seconds, payload_bytes = row["completed"] or 0, row["seconds"] or 0.0, row["payload_bytes"]
    moved = None if payload_bytes is None or not row["operations"] else payload_bytes * completed / row["operations"]
    return TransferUse(
        server=server,
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


def _compared(uses: Iterable[TransferUse]) -> Iterator[TransferUse]:
    """The same pairs, with how much longer one takes where it is slow beside others of about its size."""
    timed: list[tuple[float, float, TransferUse]] = []
    for use in uses:
        if use.mean_seconds is not None and use.payload_bytes and use.operations >= _LEAST_OPERATIONS:
            timed.append((use.payload_bytes / use.operations, use.mean_seconds, use))
        else:
            yield use
    timed.sort(key=lambda one: one[0])
    about: list[float] = []
    """Mean durations of the pairs of about the size in question, `timed[first:end]`, in their order."""
    first = end = 0
    for size, seconds, use in timed:
        while end < len(timed) and timed[end][0] <= size * _ABOUT_THE_SAME:
            insort(about, timed[end][1])
            end += 1
        while timed[first][0] < size / _ABOUT_THE_SAME:
            del about[bisect_left(about, timed[first][1])]
            first += 1
        usual = _median_without(about, bisect_left(about, seconds))
        slow = usual > 0 and seconds >= SLOW_TIMES * usual
        yield replace(use, times_as_long=seconds / usual) if slow else use


def _median_without(ordered: list[float], left_out: int) -> float:
    """The median of numbers in order but for the one at this place; 0: it is the only one."""
    count = len(ordered) - 1
    middle = ((count - 1) // 2, count // 2)
    return sum(ordered[at + (at >= left_out)] for at in middle) / 2 if count else 0.0
