"""Reads all counters of all ports from open descriptors and parses many readings at once: for short periods.

Reading a file of a counter takes a microsecond, making a number of what it shows and finding its column takes more.
So the texts are only checked for being what a counter shows, and kept; numbers are made of all of them together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from railscope.probes.native.beats import FilesQuestion
from railscope.probes.netdev.counters import CounterShape, Values
from railscope.probes.rdma.port import PortFiles

_READ_BYTES: Final = 20
"""Of a number with more than 19 digits, which may not go into 64 bits, no line feed is read: it is not taken here."""
_DIGITS_AND_ENDS: Final = b"0123456789\n|"


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """The files of ports that are read together, and where in a reading their numbers belong."""

    names: tuple[str, ...]
    """Ports, one a row."""
    generations: tuple[int, ...]
    fields: tuple[str, ...]
    shape: CounterShape
    question: FilesQuestion
    places: npt.NDArray[np.intp]
    """Of each file: where in a reading, row by row."""
    units: Values
    """Of each file: what its number is multiplied by."""
    first: npt.NDArray[np.intp]
    """Files whose number stands in its place as it is."""
    added: tuple[int, ...]
    """Files whose number is added to that of another one in the same place."""

    @classmethod
    def from_files(
        cls,
        ports: Sequence[PortFiles],
        names: tuple[str, ...],
        generations: tuple[int, ...],
        fields: tuple[str, ...],
        shape: CounterShape,
    ) -> KeptFiles | None:
        """Those of these ports, a row each; None: some counter has no column."""
        descriptors: list[int] = []
        places: list[int] = []
        units: list[int] = []
        added: list[int] = []
        for row, port in enumerate(ports):
            first = len(descriptors)
            descriptors += port.descriptors
            places += [-1] * len(port.descriptors)
            units += [1] * len(port.descriptors)
            for column, unit, files in port.columns:
                if column not in fields:
                    return None
                for file in files:
                    places[first + file] = row * len(fields) + fields.index(column)
                    units[first + file] = unit
                added += [first + file for file in files[1:]]
        if -1 in places:
            return None
        return cls(
            names,
            generations,
            fields,
            shape,
            FilesQuestion(tuple(descriptors)),
            np.array(places, dtype=np.intp),
            np.array(units, dtype=np.uint64),
            np.array(sorted({*range(len(descriptors))}.difference(added)), dtype=np.intp),
            tuple(added),
        )

    def read(self) -> bytes | None:
        """What the files show now, for `values`; None: something else than a number and a line feed.

        Raises:
            OSError: a file cannot be read.
        """
        pread, descriptors = os.pread, self.question.descriptors
        texts = b"|" + b"|".join([pread(descriptor, _READ_BYTES, 0) for descriptor in descriptors]) + b"|"
        count = len(descriptors)
        # One line feed a file, at its end, nothing but digits before it, and at least one of them.
        if texts.count(b"\n|") != count or texts.count(b"\n") != count or texts.count(b"|") != count + 1:
            return None
        if b"|\n" in texts or texts.translate(None, _DIGITS_AND_ENDS):
            return None
        return texts

    def parse(self, readings: Sequence[bytes | memoryview]) -> Values:
        """Readings by rows by columns."""
        count = len(readings)
        texts = b"".join(readings).replace(b"|", b"")
        shown = np.fromstring(texts, dtype=np.uint64, sep="\n").reshape(count, len(self.units)) * self.units
        values: Values = np.zeros((count, len(self.names), len(self.fields)), dtype=np.uint64)
        flat = values.reshape(count, -1)
        flat[:, self.places[self.first]] = shown[:, self.first]
        for file in self.added:
            flat[:, self.places[file]] += shown[:, file]
        return values
