"""The node's totals of transfers: operations, bytes and durations of all processes, those that have ended included.

A total never falls, whatever arguments programs pass: sums have no bound, as those of all processes may be more than a
word holds.  What the kernel's table holds is added to what was taken out of it; a row is in exactly one of the
two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from railscope.agent.facts.histogram import Histogram
from railscope.agent.facts.transfers import TransferTotal
from railscope.probes.loading.maps import Records
from railscope.probes.transfers.functions import OPERATIONS
from railscope.probes.transfers.records import BUCKETS, FIRST_BUCKET_NS

BOUNDS: Final = tuple((FIRST_BUCKET_NS << bucket) / 1e9 for bucket in range(BUCKETS - 1))
"""Of durations, seconds."""
_COUNTS: Final = ("operations", "bytes", "unsized", "completed", "failed", "lost", "sum_ns")


@dataclass(slots=True)
class Sums:
    """By number of the function."""

    counts: dict[str, list[int]] = field(default_factory=lambda: {name: [0] * len(OPERATIONS) for name in _COUNTS})
    buckets: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((len(OPERATIONS), BUCKETS), np.int64))

    def add(self, functions: npt.NDArray[np.uint32], totals: Records) -> None:
        """Add rows of dtype TRANSFER_TOTAL, each of one function."""
        known = functions < len(OPERATIONS)
        functions, totals = functions[known], totals[known]
        for name, sums in self.counts.items():
            # Half a word at a time: no table has so many entries that a sum of halves would not fit.
            halves = np.zeros((2, len(OPERATIONS)), np.int64)
            np.add.at(halves[0], functions, (totals[name] >> np.uint64(32)).astype(np.int64))
            np.add.at(halves[1], functions, (totals[name] & np.uint64(0xFFFFFFFF)).astype(np.int64))
            for number, (high, low) in enumerate(halves.T.tolist()):
                sums[number] += (high << 32) + low
        np.add.at(self.buckets, functions, totals["buckets"].astype(np.int64))

    def give_up(self, functions: npt.NDArray[np.uint32]) -> None:
        """Operations of these functions, one each, whose end will not be seen."""
        for function in functions[functions < len(OPERATIONS)].tolist():
            self.counts["lost"][function] += 1

    def copy(self) -> Sums:
        return Sums({name: sums.copy() for name, sums in self.counts.items()}, self.buckets.copy())

    def totals(self) -> tuple[TransferTotal, ...]:
        """Of the functions that were called."""
        return tuple(self._total(number) for number, called in enumerate(self.counts["operations"]) if called)

    def _total(self, number: int) -> TransferTotal:
        operation = OPERATIONS[number]
        counts = {name: sums[number] for name, sums in self.counts.items()}
        seen = bool(counts["completed"] - counts["failed"])
        return TransferTotal(
            library=operation.library.value,
            op=operation.op,
            direction=operation.direction.value,
            operations=counts["operations"],
            payload_bytes=counts["bytes"] if operation.sized else None,
            unsized=counts["unsized"] if operation.sized else counts["operations"],
            failed=counts["failed"],
            unfollowed=counts["lost"],
            durations=histogram_of(self.buckets[number], counts["sum_ns"]) if seen else None,
        )


def histogram_of(buckets: Iterable[int], sum_ns: int) -> Histogram:
    """Durations in seconds, of the programs' buckets."""
    return Histogram(BOUNDS, tuple(int(count) for count in buckets), sum_ns / 1e9)
