"""What the collectives of each communicator were: their shapes, and the signatures of blocks of them.

All ranks of a communicator must make the same collectives in the same order.  The programs (probes/bpf/shapes.h) keep
the last `WINDOW` of each communicator, and one signature for the last full block of 64, 128, 256, … collectives.
Collectives are numbered from 1, point to point is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from railscope.probes.loading.maps import Map, MappedArray
from railscope.probes.nccl.abi import DataType, Op, data_type_name, op_name
from railscope.probes.nccl.programs.shares import Shares
from railscope.probes.nccl.records import calls as records

WINDOW: Final = 1 << records.BLOCK_BITS
"""Collectives of which each is known, and length of the shortest block."""
_NUMBERS: Final = (1 << 32) - 1
_NO_ROOT: Final = 0xFFFF
_PLACE_LEFT: Final = 1 << 31  # as in shapes.h
_ROOTED: Final = frozenset({Op.Broadcast, Op.Reduce, Op.Gather, Op.Scatter})
_COMPUTES: Final = frozenset({Op.Reduce, Op.ReduceScatter, Op.AllReduce})


@dataclass(frozen=True, slots=True)
class Shape:
    """What must be the same in a collective on all ranks."""

    op: int
    data_type: int | None
    """None: it only moves bytes, whatever they are."""
    root: int | None
    payload_bytes: int

    @classmethod
    def from_word(cls, word: int) -> Self:
        """From the word that the programs write."""
        op, data_type, root = word & 0xF, word >> 4 & 0xF, word >> 8 & 0xFFFF
        return cls(
            op, data_type if op in _COMPUTES else None, root if op in _ROOTED and root != _NO_ROOT else None, word >> 24
        )

    def __str__(self) -> str:
        data_type = "" if self.data_type in (None, DataType.Unknown) else f" {data_type_name(self.data_type or 0)}"
        root = "" if self.root is None else f" with root {self.root}"
        return f"{op_name(self.op)} of {self.payload_bytes} bytes{data_type}{root}"


@dataclass(frozen=True, slots=True)
class Block:
    """A full block of collectives of one communicator: `WINDOW` << `level` of them, ending at a multiple of that."""

    level: int
    last: int
    """Number of its last collective, modulo 2^32."""
    signature: int
    """32 bits of what its collectives were."""


class ShapeTable:
    """Reads the programs' map `call_shapes`, whose places are shared out."""

    def __init__(self, table: MappedArray, places: Map, shares: Shares) -> None:
        """`places`: the map `shapes_places`."""
        self._table = table
        self._places = places
        self._shares = shares

    def blocks(self, instances: Sequence[int]) -> npt.NDArray[np.uint64]:
        """The last full block of each length, a row a communicator, as words for `block_from_word`; 0: none is known.

        Reading is a copy of what is asked for, and no system call.
        """
        numbers = np.array(instances, "<u4")
        found = self._table.elements(numbers % records.SHAPES)
        closed: npt.NDArray[np.uint64] = np.where((found["instance"] == numbers)[:, None], found["closed"], 0)
        return closed

    def recent(self, instance: int, calls: int) -> tuple[int, tuple[int, ...]] | None:
        """The number of the last collective of a communicator that made so many calls, and the last of them.

        Also of one that has ended, until another takes its place.

        The latest is last, as words for `Shape.from_word`; numbers are modulo 2^32.  None: they are not known.

        Who calls makes sure that it makes no call meanwhile: otherwise the oldest are others already.
        """
        found = self._of(instance)
        if found is None:
            found = self._of(instance | _PLACE_LEFT)
        if found is None:
            return None
        last = (calls - int(found["unnumbered"])) & _NUMBERS
        words = found["shapes"].tolist()
        return last, tuple(words[(last - back) % WINDOW] for back in range(min(last, WINDOW), 0, -1))

    def free(self, instance: int) -> None:
        """Give the place of a communicator whose process has ended to the next; it did not end itself."""
        if self._of(instance) is not None:
            at = (instance % records.SHAPES).to_bytes(4, "little")
            self._table.update(at, bytes(records.CALL_SHAPES.itemsize))
            place = self._places.lookup(at)
            if place is not None:
                self._shares.free("call_shapes", int(place["owner"]["uid"][0]), int(place["owner"]["tgid"][0]))

    def _of(self, instance: int) -> Any | None:
        found = self._table.elements(np.array([instance % records.SHAPES], "<u4"))[0]
        return found if found["instance"] == instance else None


def block_from_word(level: int, word: int) -> Block | None:
    """A block from the word that the programs write of it; None: there was none yet."""
    return Block(level, (word & _NUMBERS) * WINDOW, word >> 32) if word else None
