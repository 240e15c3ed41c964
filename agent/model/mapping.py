"""Which rank does which part of the job.

A part is a position (P, D, T): pipeline stage, replica, tensor rank.  Launchers number positions in some order of the
three dimensions; the paper compares two such orders:

| Mapping | Rank | Which means |
|---|---|---|
| default | P·(d·t) + D·t + T | Megatron-LM's: stages lie furthest apart, gradients stay near |
| custom | D·(p·t) + P·t + T | replicas lie furthest apart, a whole pipeline stays near |

Any other mapping can be read from text, CSV with one line a rank in any order:

    rank,pipeline,tensor,data
    0,0,0,0
    1,0,1,0

Columns may stand in another order; empty lines and lines that begin with `#` are skipped.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from railscope.agent.model.shape import Shape, ShapeError

DIMENSIONS: Final = ("pipeline", "data", "tensor")
"""The axes of a mapping, in their order."""
DEFAULT_ORDER: Final = ("pipeline", "data", "tensor")
CUSTOM_ORDER: Final = ("data", "pipeline", "tensor")
COLUMNS: Final = ("rank", "pipeline", "tensor", "data")


@dataclass(frozen=True, slots=True, eq=False)
class Mapping:
    """The rank at every position.

    Raises:
        ShapeError: these are not the ranks 0 to n−1, each at one position.
    """

    ranks: NDArray[np.int64]
    """Axes: pipeline stage, replica, tensor rank."""

    def __post_init__(self) -> None:
        if self.ranks.ndim != len(DIMENSIONS) or not np.array_equal(np.sort(self.ranks, None), np.arange(self.count)):
            raise ShapeError("a mapping needs every rank from 0 on at exactly one position (pipeline, data, tensor)")

    @property
    def count(self) -> int:
        """Ranks of the job."""
        return self.ranks.size

    def rank_at(self, pipeline: int, data: int, tensor: int) -> int:
        """The rank at a position."""
        return int(self.ranks[pipeline, data, tensor])

    def position_of(self, rank: int) -> tuple[int, int, int]:
        """Pipeline stage, replica and tensor rank of a rank.

        Raises:
            ShapeError: the job has no such rank.
        """
        places = np.argwhere(self.ranks == rank)
        if not len(places):
            raise ShapeError(f"there is no rank {rank}: they are 0 to {self.count - 1}")
        pipeline, data, tensor = (int(index) for index in places[0])
        return pipeline, data, tensor

    def renumber(self, new_ranks: NDArray[np.int64]) -> Mapping:
        """The mapping of the same job with rank r called new_ranks[r].

        Raises:
            ShapeError: new_ranks does not name every rank once.
        """
        return Mapping(new_ranks[self.ranks])

    def check_fits(self, shape: Shape) -> None:
        """Raises ShapeError unless the mapping has the shape's stages, replicas and tensor ranks."""
        wanted = (shape.pipeline, shape.data, shape.tensor)
        if self.ranks.shape != wanted:
            raise ShapeError(
                f"the mapping is for pipeline, data, tensor = {self.ranks.shape}, the job has {wanted}: map this job"
            )


def ordered_mapping(shape: Shape, order: Sequence[str]) -> Mapping:
    """Ranks counted with the last dimension of `order` fastest, as launchers do; see `DEFAULT_ORDER`."""
    sizes = {"pipeline": shape.pipeline, "data": shape.data, "tensor": shape.tensor}
    counted = np.arange(shape.ranks, dtype=np.int64).reshape([sizes[dimension] for dimension in order])
    return Mapping(counted.transpose([order.index(dimension) for dimension in DIMENSIONS]))


def default_mapping(shape: Shape) -> Mapping:
    """Megatron-LM's own mapping of ranks: rank = P·(d·t) + D·t + T."""
    return ordered_mapping(shape, DEFAULT_ORDER)


def custom_mapping(shape: Shape) -> Mapping:
    """The paper's other mapping of ranks: rank = D·(p·t) + P·t + T."""
    return ordered_mapping(shape, CUSTOM_ORDER)


def parse_mapping(text: str, shape: Shape) -> Mapping:
    """The mapping of a job from CSV text; this module's docstring shows the form.

    Raises:
        ShapeError: the text is no such mapping, or not one of this job; the message begins with the line, where one
            line is at fault.
    """
    limits = {"rank": shape.ranks, "pipeline": shape.pipeline, "tensor": shape.tensor, "data": shape.data}
    lines = _fields(text.removeprefix("\ufeff").splitlines())
    first = next(lines, None)
    if first is None:
        raise ShapeError(f"the file is empty: begin with the line {','.join(COLUMNS)}")
    number, names = first
    if sorted(names) != sorted(COLUMNS):
        raise ShapeError(
            f"line {number}: the first line must name the columns {','.join(COLUMNS)}, not {_quoted(','.join(names))}"
        )
    ranks = np.full((shape.pipeline, shape.data, shape.tensor), -1, dtype=np.int64)
    line_of_rank: dict[int, int] = {}
    for number, texts in lines:
        if len(texts) != len(names):
            raise ShapeError(f"line {number}: {len(texts)} values, where the columns are {','.join(names)}")
        row = {name: _index(number, name, value, limits[name]) for name, value in zip(names, texts, strict=True)}
        rank, position = row["rank"], (row["pipeline"], row["data"], row["tensor"])
        if rank in line_of_rank:
            raise ShapeError(f"line {number}: rank {rank} is given twice; line {line_of_rank[rank]} has it too")
        if ranks[position] >= 0:
            raise ShapeError(f"line {number}: rank {rank} takes the position of rank {ranks[position]}")
        line_of_rank[rank] = number
        ranks[position] = rank
    if len(line_of_rank) < shape.ranks:
        missing = next(rank for rank in range(shape.ranks) if rank not in line_of_rank)
        raise ShapeError(f"{len(line_of_rank)} of {shape.ranks} ranks are given; rank {missing} is missing")
    return Mapping(ranks)


def _fields(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """The stripped fields of each non-empty line, with its number."""
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                fields = next(csv.reader([line]))
            except csv.Error as error:
                raise ShapeError(f"line {number}: this is not CSV: {error}") from None
            yield number, [field.strip() for field in fields]


def _index(line: int, name: str, text: str, limit: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) < limit):
        raise ShapeError(f"line {line}: {name} is {_quoted(text)}: allowed is 0 to {limit - 1}")
    return int(text)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")
