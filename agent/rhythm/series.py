"""The calls of one GPU as columns of small numbers, the form in which they are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Codes = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class CallSeries:
    """The calls of one GPU, in order of time; all columns of equal length."""

    time_ns: Integers
    kind: Codes
    """Which communicator, operation, data type and peer."""
    symbol: Codes
    """Which kind and payload, or where that is not known, about how long it takes: equal calls have equal numbers."""
    communicator: Codes
    payload_bytes: Integers
    """0: nothing, or not known."""
    end_ns: Integers | None = None
    """When operations ended; None: calls have no duration."""
    sized: NDArray[np.bool_] | None = None
    """Whether the payload is known; None: all are."""

    def __len__(self) -> int:
        return len(self.time_ns)

    @property
    def silence_ns(self) -> Integers:
        """Before each: since the call before it, or since all operations before it had ended; of the first one 0."""
        if self.end_ns is None:
            return np.diff(self.time_ns, prepend=self.time_ns[:1])
        silence = np.zeros(len(self), np.int64)
        silence[1:] = np.maximum(self.time_ns[1:] - np.maximum.accumulate(self.end_ns[:-1]), 0)
        return silence


def dense_codes(column: Integers) -> Codes:
    """Equal numbers get equal codes, 0 … k−1 in the order of their values."""
    return np.unique(column, return_inverse=True)[1].astype(np.int32)


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers that look random, equal for equal values (splitmix64)."""
    numbers = values + np.uint64(0x9E3779B97F4A7C15)
    numbers ^= numbers >> np.uint64(30)
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    numbers ^= numbers >> np.uint64(27)
    numbers *= np.uint64(0x94D049BB133111EB)
    numbers ^= numbers >> np.uint64(31)
    return numbers
