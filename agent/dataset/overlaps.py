"""Recordings that hold the same moments of the same ranks: what is in both counts twice.

A stall and a signal within a minute each write what the flight recorder holds, and two recorders may run beside each
other.  Recordings of one host that have different ranks, or different times, belong together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final

import pyarrow as pa

_SHORTEST_NS: Final = 100_000_000
"""Clocks are corrected, and what follows without a gap may seem to overlap a little."""
_OWN: Final = "railscope"
"""Formats that are imported keep ranks apart themselves (agent/imports)."""


def overlaps(recordings: Any, communicators: Any, rows: Callable[[Any], pa.Table]) -> tuple[str, ...]:
    """A line for each node of which two recordings have the same ranks at the same time.

    Args:
        recordings, communicators: the tables, as expressions; `rows`: what brings a small result into memory.
    """
    own = recordings.filter(recordings["source"] == _OWN)
    found = rows(own.select("recording", "node", "began_ns", "ended_ns")).to_pylist()
    together = [
        (node, *pair) for node, spans in sorted(_by_node(found).items()) for pair in _overlapping(sorted(spans))
    ]
    if not together:
        return ()
    concerned = sorted({number for _, first, second, _ in together for number in (first, second)})
    ends = communicators.filter(communicators["recording"].isin(concerned) & (communicators["comm"] != "unknown"))
    members: defaultdict[int, set[tuple[Any, ...]]] = defaultdict(set)
    for row in rows(ends.select("recording", "comm", "rank", "pid").distinct()).to_pylist():
        members[row["recording"]].add((row["comm"], row["rank"], row["pid"]))
    longest: dict[str, int] = {}
    for node, first, second, shared_ns in together:
        if members[first] & members[second]:
            longest[node] = max(shared_ns, longest.get(node, 0))
    return tuple(
        f"recordings of {node} hold the same ranks at the same time, for {shared_ns / 1e9:.1f} s: what is in both "
        "counts twice; name one of them"
        for node, shared_ns in longest.items()
    )


def _by_node(recordings: Iterable[dict[str, Any]]) -> dict[str, list[tuple[int, int, int]]]:
    spans: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for row in recordings:
        if row["began_ns"] is not None and row["ended_ns"] is not None:
            spans[row["node"]].append((row["began_ns"], row["ended_ns"], row["recording"]))
    return spans


def _overlapping(spans: list[tuple[int, int, int]]) -> Iterable[tuple[int, int, int]]:
    """Pairs of recordings and for how long they overlap, in ns: each with the one that ended last before it."""
    last: tuple[int, int, int] | None = None
    for span in spans:
        if last is not None:
            shared_ns = min(last[1], span[1]) - span[0]
            if shared_ns >= _SHORTEST_NS:
                yield last[2], span[2], shared_ns
        if last is None or span[1] > last[1]:
            last = span
