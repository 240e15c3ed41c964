"""The wire bytes that the observed collectives should have put on the rails, by network namespace.

Totals only: agent/model/edge_share.py knows what one call sends, agent/node/attribution/explained.py shares the totals
out among rails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from railscope.agent.model.expected import ExpectedBytes, ExpectedSums, ObservedCalls, WireTotals
from railscope.agent.node.collectives.call_counts import CallCount, CallCounts, CallKind, counts_from_rows
from railscope.agent.node.collectives.communicators import Communicators
from railscope.agent.node.targets.processes import ObservedProcess, ProcessOf
from railscope.probes.nccl.abi import Op

_OPS: Final = {op.value: op for op in Op}


@dataclass(frozen=True, slots=True)
class _Placed:
    """What rows of the table add to the expected bytes: the same while nothing of this changes."""

    kinds: tuple[CallKind, ...]
    changes: int
    """Of what is known of communicators."""
    processes: dict[int, ObservedProcess | None]
    """By pid."""
    replaying: Set[int]
    sums: tuple[tuple[npt.NDArray[np.intp], ExpectedSums], ...]
    """For each namespace: which rows, and what their payload makes."""


class ExpectedWire:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        small_payload_bytes: int,
        communicators: Communicators,
        process_of: ProcessOf,
        replaying: Callable[[], Set[int]],
    ) -> None:
        """
        Args:
            small_payload_bytes: messages up to this size may use a single rail.
            communicators: whose calls the rows are.
            process_of: processes by pid.
            replaying: instances that are known to replay CUDA graphs.
        """
        self._small_payload_bytes = small_payload_bytes
        self._communicators = communicators
        self._process_of = process_of
        self._replaying = replaying
        self._folded: dict[str, ExpectedBytes] = {}
        self._placed: _Placed | None = None
        """Of the last rows: they change seldom, and there is one for each communicator, kind and size of calls."""

    def fold(self, rows: Iterable[CallCount]) -> None:
        """Keep what rows say that were taken out of the kernel's table."""
        counts = counts_from_rows(rows)
        for expected in _sums(self._place(counts.kinds), counts):
            self._folded[expected.rail_set] = _sum(self._folded.get(expected.rail_set), expected)

    def sum_with(self, counts: CallCounts) -> list[ExpectedBytes]:
        """One entry for each namespace: what was folded and what these rows say."""
        if self._placed is None or not self._is_current(self._placed, counts.kinds):
            self._placed = self._place(counts.kinds)
        totals = dict(self._folded)
        for expected in _sums(self._placed, counts):
            totals[expected.rail_set] = _sum(totals.get(expected.rail_set), expected)
        return list(totals.values())

    def _is_current(self, placed: _Placed, kinds: tuple[CallKind, ...]) -> bool:
        return (
            placed.kinds is kinds
            and placed.changes == self._communicators.changes
            and placed.replaying == self._replaying()
            and all(self._process_of(tgid) is process for tgid, process in placed.processes.items())
        )

    def _place(self, kinds: tuple[CallKind, ...]) -> _Placed:
        replaying = frozenset(self._replaying())
        processes = {tgid: self._process_of(tgid) for tgid in {kind.tgid for kind in kinds}}
        rows: defaultdict[int, list[int]] = defaultdict(list)
        calls: defaultdict[int, list[ObservedCalls]] = defaultdict(list)
        for row, kind in enumerate(kinds):
            process, communicator = processes[kind.tgid], self._communicators.get(kind.instance)
            # Calls without a communicator are NCCL's invalidArgument: nothing was sent for them.
            if process is None or process.namespace is None or communicator is None:
                continue
            rows[process.namespace.inode].append(row)
            calls[process.namespace.inode].append(
                ObservedCalls(
                    communicator.name,
                    communicator.placement,
                    _OPS[kind.op],
                    kind.peer,
                    1 << kind.size_bucket,
                    communicator.ended_ns is None,
                    kind.instance in replaying,
                )
            )
        sums = tuple(
            (np.array(rows[inode]), ExpectedSums(str(inode), observed, self._small_payload_bytes))
            for inode, observed in calls.items()
        )
        return _Placed(kinds, self._communicators.changes, processes, replaying, sums)


def _sums(placed: _Placed, counts: CallCounts) -> list[ExpectedBytes]:
    return [sums.expected(counts.payload_bytes[rows]) for rows, sums in placed.sums]


def _sum(one: ExpectedBytes | None, other: ExpectedBytes) -> ExpectedBytes:
    if one is None:
        return other

    def add(a: WireTotals, b: WireTotals) -> WireTotals:
        return WireTotals(a.spread_bytes + b.spread_bytes, a.small_bytes + b.small_bytes, a.unknown or b.unknown)

    return ExpectedBytes(other.rail_set, add(one.transmit, other.transmit), add(one.receive, other.receive))
