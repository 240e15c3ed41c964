"""Facts of which a report may hold millions, as columns: bytes of pairs of GPUs, and calls of sizes.

An all-to-all among three thousand GPUs has nine million pairs, and a job of which no two calls are of one size has as
many sizes as calls.  As columns of numbers they take a few bytes each; as objects it would be hundreds.  Whoever wants
one gets it as an object (`PairTraffic`, `SizeUse`), made when it is asked for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

_AT_A_TIME: Final = 1 << 16
"""Facts that are made into objects together."""
_PART: Final = 1 << 20
Fact = TypeVar("Fact")


@dataclass(frozen=True, slots=True)
class PairTraffic:
    """What one GPU sent to another (bytes by GPU pair)."""

    source: int
    destination: int
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class SizeUse:
    """All calls of one operation with one size (transfer sizes)."""

    op: str
    bytes: int
    """Payload of one call."""
    calls: int


class Columns(Sequence[Fact]):
    """Facts whose parts are columns of equal length; equal to any sequence of the same facts."""

    __slots__ = ()

    @abstractmethod
    def _columns(self) -> tuple[NDArray[Any], ...]:
        """Of equal length."""

    @abstractmethod
    def _facts(self, rows: slice) -> list[Fact]:
        """These rows as objects."""

    def __len__(self) -> int:
        return len(self._columns()[0])

    @overload
    def __getitem__(self, place: int) -> Fact: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Fact]: ...
    def __getitem__(self, place: int | slice) -> Fact | Sequence[Fact]:
        if isinstance(place, slice):
            return self._facts(place)
        index = range(len(self))[place]
        return self._facts(slice(index, index + 1))[0]

    def __iter__(self) -> Iterator[Fact]:
        for first in range(0, len(self), _AT_A_TIME):
            yield from self._facts(slice(first, first + _AT_A_TIME))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(own == one for own, one in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,})"


class Pairs(Columns[PairTraffic]):
    """Directed pairs of GPUs, each once, in order of source and destination."""

    __slots__ = ("destination", "source", "wire_bytes")

    def __init__(self, source: NDArray[Any], destination: NDArray[Any], wire_bytes: NDArray[Any]) -> None:
        self.source = source.astype(np.int32, copy=False)
        self.destination = destination.astype(np.int32, copy=False)
        self.wire_bytes = wire_bytes.astype(np.int64, copy=False)

    @classmethod
    def from_pairs(cls, pairs: Iterable[PairTraffic]) -> Pairs:
        """These pairs, which are in order."""
        rows = [(pair.source, pair.destination, pair.wire_bytes) for pair in pairs]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    @property
    def total_bytes(self) -> int:
        return int(self.wire_bytes.sum())

    def sent_apart(self, gpus: int, *places: NDArray[np.int32]) -> NDArray[np.int64]:
        """Bytes by sending GPU, of pairs whose GPUs are at different places, of each kind of place."""
        return self._apart(gpus, self.source, places)

    def received_apart(self, gpus: int, *places: NDArray[np.int32]) -> NDArray[np.int64]:
        """Bytes by receiving GPU, of pairs whose GPUs are at different places, of each kind of place."""
        return self._apart(gpus, self.destination, places)

    def _apart(self, gpus: int, ends: NDArray[np.int32], places: tuple[NDArray[np.int32], ...]) -> NDArray[np.int64]:
        found = np.zeros(gpus, dtype=np.int64)
        for part in chunk_slices(len(self)):
            apart = np.ones(len(ends[part]), dtype=np.bool_)
            for place in places:
                apart &= place[self.source[part]] != place[self.destination[part]]
            np.add.at(found, ends[part][apart], self.wire_bytes[part][apart])
        return found

    def busiest(self, most: int) -> list[PairTraffic]:
        """So many pairs at most, those with most bytes first; of equal ones those that come first."""
        return [self[place] for place in largest_indices(self.wire_bytes, most)]

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self.source, self.destination, self.wire_bytes

    def _facts(self, rows: slice) -> list[PairTraffic]:
        return [PairTraffic(*row) for row in zip(*(column[rows].tolist() for column in self._columns()), strict=True)]


class Sizes(Columns[SizeUse]):
    """Sizes by operation, each once, in order of the operation's name and the size."""

    __slots__ = ("bytes", "calls", "op", "op_names")

    def __init__(self, op_names: Sequence[str], op: NDArray[Any], size: NDArray[Any], calls: NDArray[Any]) -> None:
        self.op_names = tuple(op_names)
        self.op = op.astype(np.int32, copy=False)
        """Index in `op_names`."""
        self.bytes = size.astype(np.int64, copy=False)
        self.calls = calls.astype(np.int64, copy=False)

    @classmethod
    def from_uses(cls, uses: Iterable[SizeUse]) -> Sizes:
        """These sizes, in whatever order they come."""
        uses = sorted(uses, key=lambda use: (use.op, use.bytes))
        names = sorted({use.op for use in uses})
        place = {name: index for index, name in enumerate(names)}
        rows = [(place[use.op], use.bytes, use.calls) for use in uses]
        return cls(names, *np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    @property
    def total_calls(self) -> int:
        return int(self.calls.sum())

    def most_frequent(self, most: int) -> list[SizeUse]:
        """So many sizes at most, those of most calls first; of equal ones those that come first."""
        return [self[place] for place in largest_indices(self.calls, most)]

    def sizes_of_op(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sizes of an operation, rising, and their calls."""
        low, high = np.searchsorted(self.op, (number, number + 1)).tolist()
        return self.bytes[low:high], self.calls[low:high]

    def sum_over_ops(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sizes of all operations, rising and each once, and their calls."""
        if len(self.op_names) == 1:
            return self.bytes, self.calls
        order = np.argsort(self.bytes, kind="stable")
        sizes, calls = self.bytes[order], self.calls[order]
        starts = np.flatnonzero(np.diff(sizes, prepend=-1))
        return sizes[starts], np.add.reduceat(calls, starts) if len(starts) else calls

    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self.op, self.bytes, self.calls

    def _facts(self, rows: slice) -> list[SizeUse]:
        return [
            SizeUse(self.op_names[op], size, calls)
            for op, size, calls in zip(*(column[rows].tolist() for column in self._columns()), strict=True)
        ]


def chunk_slices(count: int) -> Iterator[slice]:
    """Long columns part by part, so that what is made of them on the way stays small."""
    return (slice(first, first + _PART) for first in range(0, count, _PART))


def largest_indices(values: NDArray[np.int64], most: int) -> list[int]:
    """Places of the largest values, the largest first, of equal ones the first; without putting all in order."""
    if len(values) > most:
        bound = np.partition(values, len(values) - most)[len(values) - most]
        above = np.flatnonzero(values > bound)
        places = np.concatenate([above, np.flatnonzero(values == bound)[: most - len(above)]])
    else:
        places = np.arange(len(values))
    order: list[int] = places[np.lexsort((places, -values[places]))].tolist()
    return order
