"""Exact counts of calls and payload, from the kernel's table.

The BPF programs count by (process, communicator, op, data type, size bucket, peer).  Rows that no call adds to any
more are taken out of the table, so that it stays small, and kept by who takes them
(agent/node/collectives/node_totals.py for the node, agent/node/collectives/communicator_facts.py for the
communicator).  The table is read once for everything that ends at one time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from railscope.probes.loading.maps import Records


class Table(Protocol):
    """What is needed of the kernel's table (probes/loading/maps.py)."""

    def read(self) -> tuple[Records, Records]: ...

    def lookup(self, key: bytes) -> Records | None: ...

    def delete(self, key: bytes) -> None: ...


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


class Accounting:
    """Reads the aggregates.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self, aggregates: Table) -> None:
        self._aggregates = aggregates
        self._last: dict[CallKind, tuple[bytes, CallCount]] = {}
        """The last reading: the row's key in the kernel, and what it held."""

    @property
    def last(self) -> list[CallCount]:
        """The last reading, without what has been taken since."""
        return [count for _, count in self._last.values()]

    def read(self) -> list[CallCount]:
        """Every row of the table.

        Raises:
            KernelRefusal: the table cannot be read; `last` is as before.
        """
        keys, values = self._aggregates.read()
        calls = values["calls"].sum(axis=1).tolist()
        payload_bytes = values["payload_bytes"].sum(axis=1).tolist()
        raw, size = keys.tobytes(), keys.dtype.itemsize
        last = {}
        for index, (tgid, instance, peer, op, data_type, bucket, _) in enumerate(keys.tolist()):
            kind = CallKind(tgid, instance, peer, op, data_type, bucket)
            key = raw[index * size : (index + 1) * size]
            last[kind] = key, CallCount(kind, calls[index], payload_bytes[index])
        self._last = last
        return self.last

    def pop_rows(self, chosen: Callable[[CallKind], bool]) -> Iterator[CallCount]:
        """Take rows of the last reading out of the table, each with the value that it has at that moment.

        Every row that was given out has been deleted: keep it before asking for the next.

        Raises:
            KernelRefusal: a row cannot be deleted; it and those after it stay.
        """
        for kind, (key, _) in list(self._last.items()):
            if not chosen(kind):
                continue
            # What the reading said may have grown since: a call may have been under way.
            values = self._aggregates.lookup(key)
            self._aggregates.delete(key)
            del self._last[kind]
            if values is not None:
                yield CallCount(kind, int(values["calls"].sum()), int(values["payload_bytes"].sum()))
