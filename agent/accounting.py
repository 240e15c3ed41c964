"""Exact counts of calls and payload, from the kernel's aggregates to totals that never fall.

The BPF programs count by (process, communicator, op, data type, size bucket, peer).  A row whose process has ended is
moved out of the kernel's map into this module's memory, so the map stays small; rows of communicators that nobody
can ask about any more are folded into the node's totals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from probes.maps import Map


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

    def __init__(self, aggregates: Map) -> None:
        self._aggregates = aggregates
        self._ended: dict[CallKind, tuple[int, int]] = {}

    def read(self) -> list[CallCount]:
        """Every kind of call not folded yet, of living and of ended processes.

        Raises:
            KernelRefusal: the map cannot be read.
        """
        counts = {kind: list(totals) for kind, totals in self._ended.items()}
        for kind, calls, payload_bytes, _ in self._live():
            total = counts.setdefault(kind, [0, 0])
            total[0] += calls
            total[1] += payload_bytes
        return [CallCount(kind, calls, payload_bytes) for kind, (calls, payload_bytes) in counts.items()]

    def end_processes(self, tgids: Collection[int]) -> None:
        """Move the rows of processes that have ended out of the kernel's map: nobody adds to them any more."""
        if tgids:
            self._move(lambda kind: kind.tgid in tgids)

    def end_communicators(self, instances: Collection[int]) -> None:
        """Move the rows of communicators that have ended out of the kernel's map."""
        if instances:
            self._move(lambda kind: kind.instance in instances)

    def fold(self, instances: Collection[int]) -> list[CallCount]:
        """Take the rows of communicators that nobody can ask about any more, for the caller to keep as totals."""
        self.end_communicators(instances)
        return self._take(lambda kind: kind.instance in instances)

    def fold_process(self, tgid: int) -> list[CallCount]:
        """Take what is left of a process that ended long ago, calls without a communicator for instance."""
        return self._take(lambda kind: kind.tgid == tgid)

    def _take(self, chosen: Callable[[CallKind], bool]) -> list[CallCount]:
        return [CallCount(kind, *self._ended.pop(kind)) for kind in list(self._ended) if chosen(kind)]

    def _move(self, chosen: Callable[[CallKind], bool]) -> None:
        for kind, calls, payload_bytes, raw_key in self._live():
            if not chosen(kind):
                continue
            before = self._ended.get(kind, (0, 0))
            self._ended[kind] = (before[0] + calls, before[1] + payload_bytes)
            self._aggregates.delete(raw_key)

    def _live(self) -> Iterable[tuple[CallKind, int, int, bytes]]:
        keys, values = self._aggregates.read()
        calls = values["calls"].sum(axis=1).tolist()
        payload_bytes = values["payload_bytes"].sum(axis=1).tolist()
        for index, (tgid, instance, peer, op, data_type, bucket, _) in enumerate(keys.tolist()):
            kind = CallKind(tgid, instance, peer, op, data_type, bucket)
            yield kind, calls[index], payload_bytes[index], keys[index].tobytes()
