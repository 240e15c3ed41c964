"""Sums integers by group over whole columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def sum_by_index(places: NDArray[Any], values: Integers, size: int) -> Integers:
    """Sums of `values` by place, in whole numbers (bincount would make floats)."""
    result = np.zeros(size, dtype=np.int64)
    np.add.at(result, places, values)
    return result


def sum_by_group(columns: Sequence[NDArray[Any]], *values: Integers) -> tuple[list[NDArray[Any]], list[Integers]]:
    """The distinct rows of the columns, in order, as columns; and for each of them the sums of the values."""
    order = _order(columns)
    ordered = [column[order] for column in columns]
    differs = np.zeros(max(len(order) - 1, 0), dtype=bool)
    for column in ordered:
        differs |= column[1:] != column[:-1]
    starts = np.concatenate([np.zeros(min(len(order), 1), dtype=np.int64), np.flatnonzero(differs) + 1])
    # reduceat takes no empty list of values.
    totals = [np.add.reduceat(each[order], starts) if len(starts) else each for each in values]
    return [column[starts] for column in ordered], totals


def _order(columns: Sequence[NDArray[Any]]) -> Integers:
    """What puts the rows in order; by one number each where 63 bits are enough for it, which is much faster."""
    if not len(columns[0]):
        return np.empty(0, dtype=np.int64)
    key, room = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        lowest = int(column.min())
        width = int(column.max()) - lowest + 1
        room *= width
        if room >= 1 << 63:
            return np.lexsort(columns[::-1])
        key *= width
        key += column
        key -= lowest
    return np.argsort(key, kind="stable")
