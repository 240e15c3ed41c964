"""Exact counts of calls and payload, from the kernel's table: the accounting, and its last reading.

The BPF programs count by (process, communicator, op, data type, size bucket, peer).  Rows that no call adds to any
more are taken out of the table, so that it stays small, and kept by who takes them
(agent/node/collectives/node_totals.py for the node, agent/node/collectives/communicator_facts.py for the
communicator).  The table is read once for everything that ends at one time.

A reading is columns of numbers beside one tuple of kinds, which stays the same object while the table has the same
rows: whoever groups rows by what does not change does so once, and adds numbers up after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from railscope.probes.loading.maps import Records

Numbers = npt.NDArray[np.uint64]

_HALF: Final = np.uint64(32)
_LOW_HALF: Final = np.uint64((1 << 32) - 1)


class Table(Protocol):
    """What is needed of the kernel's table (probes/loading/maps.py)."""

    def read(self) -> tuple[Records, Records]: ...

    def lookup(self, key: bytes) -> Records | None: ...

    def delete(self, key: bytes) -> object: ...


class CallKind(NamedTuple):
    """What calls are counted by."""

    tgid: int
    instance: int
    """The communicator, as the programs number them; 0: none could be told."""
    peer: int
    op: int
    data_type: int
    size_bucket: int
    """Payload in (2^(b-1), 2^b] bytes."""


@dataclass(frozen=True, slots=True)
class CallCount:
    """Calls of one kind so far."""

    kind: CallKind
    calls: int
    payload_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CallCounts:
    """Calls of many kinds so far, by column."""

    kinds: tuple[CallKind, ...]
    """The same object from one reading to the next, while the rows are the same in the same order."""
    calls: Numbers
    payload_bytes: Numbers

    def __len__(self) -> int:
        return len(self.kinds)

    def __iter__(self) -> Iterator[CallCount]:
        """Row by row: for who has few, or looks at them seldom."""
        return map(CallCount, self.kinds, self.calls.tolist(), self.payload_bytes.tolist())


def counts_from_rows(rows: Iterable[CallCount]) -> CallCounts:
    """The columns of some rows."""
    kept = list(rows)
    return CallCounts(
        tuple(row.kind for row in kept),
        np.array([row.calls for row in kept], np.uint64),
        np.array([row.payload_bytes for row in kept], np.uint64),
    )


def sum_groups(groups: npt.NDArray[np.intp], number: int, values: Numbers) -> list[int]:
    """The sum of the values of each of `number` groups, exact also where it takes more than 64 bits."""
    low, high = np.zeros(number, np.uint64), np.zeros(number, np.uint64)
    np.add.at(low, groups, values & _LOW_HALF)
    np.add.at(high, groups, values >> _HALF)
    return [below + (above << 32) for below, above in zip(low.tolist(), high.tolist(), strict=True)]


class Accounting:
    """Reads the aggregates.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self, aggregates: Table) -> None:
        self._aggregates = aggregates
        self._keys = b""
        """Of the last reading, one after the other."""
        self._key_bytes = 1
        self._last = counts_from_rows(())

    @property
    def last(self) -> CallCounts:
        """The last reading, without what has been taken since."""
        return self._last

    def read(self) -> CallCounts:
        """Every row of the table.

        Raises:
            KernelRefusal: the table cannot be read; `last` is as before.
        """
        keys, values = self._aggregates.read()
        raw, kinds = keys.tobytes(), self._last.kinds
        if raw != self._keys:
            # A table that changes while it is read may show a row twice, and the later one counts.
            place = {row[:-1]: at for at, row in enumerate(keys.tolist())}
            if len(place) != len(keys):
                shown = list(place.values())
                keys, values, raw = keys[shown], values[shown], keys[shown].tobytes()
            self._keys, self._key_bytes = raw, keys.dtype.itemsize
            kinds = tuple(map(CallKind._make, place))
        self._last = CallCounts(kinds, values["calls"].sum(axis=1), values["payload_bytes"].sum(axis=1))
        return self._last

    def pop_rows(self, chosen: Callable[[CallKind], bool]) -> Iterator[CallCount]:
        """Take rows of the last reading out of the table, each with the value that it has at that moment.

        Every row that was given out has been deleted: keep it before asking for the next.

        Raises:
            KernelRefusal: a row cannot be deleted; it and those after it stay.
        """
        last, keys, size = self._last, self._keys, self._key_bytes
        kept = np.ones(len(last), bool)
        try:
            for at in [at for at, kind in enumerate(last.kinds) if chosen(kind)]:
                key = keys[at * size : (at + 1) * size]
                # What the reading said may have grown since: a call may have been under way.
                values = self._aggregates.lookup(key)
                self._aggregates.delete(key)
                kept[at] = False
                if values is not None:
                    yield CallCount(last.kinds[at], int(values["calls"].sum()), int(values["payload_bytes"].sum()))
        finally:
            if not kept.all():
                self._last = CallCounts(
                    tuple(kind for kind, stays in zip(last.kinds, kept.tolist(), strict=True) if stays),
                    last.calls[kept],
                    last.payload_bytes[kept],
                )
                self._keys = b"".join(keys[at * size : (at + 1) * size] for at in np.flatnonzero(kept).tolist())
