"""Pairs of GPUs as observed and as predicted, as columns of numbers: there may be millions (predicted matrix)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from railscope.agent.analysis.facts.fact_columns import Columns, chunk_slices


@dataclass(frozen=True, slots=True)
class PairBytes:
    """One directed pair of GPUs, observed and predicted."""

    source: int
    destination: int
    observed: int
    predicted: int


class ComparedPairs(Columns[PairBytes]):
    """Each pair once."""

    __slots__ = ("destination", "observed", "predicted", "source")

    def __init__(
        self, source: NDArray[Any], destination: NDArray[Any], observed: NDArray[Any], predicted: NDArray[Any]
    ) -> None:
        self.source = source.astype(np.int32, copy=False)
        self.destination = destination.astype(np.int32, copy=False)
        self.observed = observed.astype(np.int64, copy=False)
        self.predicted = predicted.astype(np.int64, copy=False)

    @classmethod
    def from_pairs(cls, pairs: Iterable[PairBytes]) -> ComparedPairs:
        """Pairs of GPUs with their bytes as columns, in their order."""
        rows = [(pair.source, pair.destination, pair.observed, pair.predicted) for pair in pairs]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)

    def select(self, chosen: NDArray[Any]) -> ComparedPairs:
        """The chosen ones, by a flag for each or by their places."""
        return ComparedPairs(*(column[chosen] for column in self._columns()))

    @property
    def observed_bytes(self) -> int:
        return _exact_sum(self.observed)

    @property
    def predicted_bytes(self) -> int:
        return _exact_sum(self.predicted)

    @property
    def difference_bytes(self) -> int:
        """Σ|predicted − observed|."""
        return _exact_sum(np.abs(self.predicted - self.observed))

    def most_different_first(self) -> ComparedPairs:
        """Of equally different ones those that come first."""
        return self.select(np.argsort(-np.abs(self.observed - self.predicted), kind="stable"))

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self.source, self.destination, self.observed, self.predicted

    def _facts(self, rows: slice) -> list[PairBytes]:
        return [PairBytes(*row) for row in zip(*(column[rows].tolist() for column in self._columns()), strict=True)]


def compared_pairs(
    gpus: int,
    observed: tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]],
    predicted: tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]],
) -> ComparedPairs:
    """All pairs of GPUs that have bytes on either side, observed or predicted, in order of source and destination.

    Each side is sources, destinations and bytes; none has a pair twice.
    """
    sides = [
        (source.astype(np.int64) * gpus + destination, count) for source, destination, count in (observed, predicted)
    ]
    # Each side is in order already, or nearly: a merge, which np.union1d does not see.
    keys = np.sort(np.concatenate([key for key, _ in sides]), kind="stable")
    keys = keys[np.diff(keys, prepend=-1) != 0]
    columns = []
    for key, count in sides:
        column = np.zeros(len(keys), dtype=np.int64)
        column[np.searchsorted(keys, key)] = count
        columns.append(column)
    return ComparedPairs(keys // max(gpus, 1), keys % max(gpus, 1), *columns)


def _exact_sum(column: NDArray[np.int64]) -> int:
    """Also where it passes 63 bits: months of iterations of a large job do."""
    total = 0
    for part in chunk_slices(len(column)):
        # A part has a million values at most, so that neither half's sum passes 63 bits.
        total += (int((column[part] >> 32).sum()) << 32) + int((column[part] & 0xFFFFFFFF).sum())
    return total
