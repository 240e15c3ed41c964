"""Attaches exemplars to duration buckets: the recorded operation that a slow bucket counted last.

Completion events come in batches of up to many thousands; of each operation and bucket only the last one is kept, by
one assignment a batch.  Communicator, rank and number are what a recording (`railscope record`, or the flight
recorder's) calls the operation by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from railscope.agent.facts.histogram import Exemplar, Histogram
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import CommunicatorFacts, OpHistogram
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op, op_name
from railscope.probes.nccl.records.internals import BUCKETS

_FIRST_BOUND_NS: Final = 1 << 10
_BOUNDS_NS: Final = _FIRST_BOUND_NS << np.arange(BUCKETS - 1, dtype=np.uint64)
"""As the kernel's: bucket i holds up to 2^(10+i) ns; the last one has no bound."""
_PLACES: Final = 257 * BUCKETS
"""For every number that an op of one byte can have."""
_NOWHERE: Final = _PLACES - 1
_LAST: Final = np.dtype([(name, "<u8") for name in ("time_ns", "duration_ns", "sequence", "instance")])


class Exemplars:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._last = np.zeros(len(Op) * BUCKETS, _LAST)
        """By op, then bucket; `time_ns` 0: there was none."""

    def record(self, completions: Records) -> None:
        """Record completed operations (dtype COMPLETION_EVENT) that were read from the ring."""
        bucket = np.searchsorted(_BOUNDS_NS, completions["duration_ns"], side="left")
        place = completions["op"].astype(np.intp) * BUCKETS + bucket
        place[completions["instance"] == 0] = _NOWHERE
        # Where several go to one place, the last one stays.
        last = np.full(_PLACES, -1)
        last[place] = np.arange(len(completions))
        filled = np.flatnonzero(last[: len(self._last)] >= 0)
        for name in _LAST.names or ():
            self._last[name][filled] = completions[name][last[filled]]

    def attach(
        self, durations: tuple[OpHistogram, ...], communicators: Iterable[CommunicatorFacts], realtime_offset_ns: int
    ) -> tuple[OpHistogram, ...]:
        """Histograms of durations with the last operation of each bucket, where its communicator is still known.

        `realtime_offset_ns`: the time of day less the monotonic one.
        """
        wanted = set(self._last["instance"].tolist())
        named = {
            one.instance: (("comm", one.identity.comm), ("rank", one.identity.rank))
            for one in communicators
            if one.instance in wanted and one.identity.comm != UNKNOWN
        }
        by_name = {op_name(op): self._last[op * BUCKETS :][:BUCKETS] for op in Op}
        return tuple(
            OpHistogram(one.op, _with_last(one.histogram, by_name[one.op], named, realtime_offset_ns))
            for one in durations
        )


def _with_last(
    histogram: Histogram, last: Records, named: Mapping[int, tuple[tuple[str, str], ...]], offset_ns: int
) -> Histogram:
    exemplars: list[Exemplar | None] = []
    for count, (time_ns, duration_ns, sequence, instance) in zip(histogram.counts, last.tolist(), strict=True):
        labels = named.get(instance) if time_ns and count else None
        exemplars.append(
            None
            if labels is None
            else Exemplar(
                labels=(*labels, ("sequence", str(sequence))),
                value=duration_ns / 1e9,
                realtime_ns=time_ns + offset_ns,
            )
        )
    return replace(histogram, exemplars=tuple(exemplars)) if any(exemplars) else histogram
