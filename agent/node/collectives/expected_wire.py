"""The wire bytes that the observed collectives should have put on the rails, by network namespace.

Totals only: agent/model/edge_share.py knows what one call sends, agent/node/attribution/explained.py shares the totals
out among rails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from railscope.agent.model.edge_share import Placement
from railscope.agent.model.expected import ExpectedBytes, ObservedCalls, WireTotals, expected_bytes
from railscope.agent.node.collectives.call_counts import CallCount
from railscope.agent.node.collectives.communicators import Communicator
from railscope.agent.node.targets.processes import ProcessOf
from railscope.probes.nccl.abi import Op

CommunicatorOf = Callable[[int], Communicator | None]
"""By instance."""

_OPS: Final = {op.value: op for op in Op}


@dataclass(frozen=True, slots=True)
class _Placed:
    """The placement of an end of a communicator."""

    communicator: Communicator
    name: str
    placement: Placement | None


class ExpectedWire:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(
        self,
        small_payload_bytes: int,
        communicator_of: CommunicatorOf,
        process_of: ProcessOf,
        replays: Callable[[int], bool],
    ) -> None:
        """
        Args:
            small_payload_bytes: messages up to this size may use a single rail.
            replays: whether the communicator of an instance is known to replay CUDA graphs.
        """
        self._small_payload_bytes = small_payload_bytes
        self._communicator_of = communicator_of
        self._process_of = process_of
        self._replays = replays
        self._replayed: set[int] = set()
        """Instances of which replays were seen, also while they are not observed."""
        self._folded: dict[str, ExpectedBytes] = {}
        self._placed: dict[int, _Placed] = {}
        """By instance, as of the last rows: it changes seldom, and each has a row for each kind and size of calls."""

    def fold(self, counts: Iterable[CallCount]) -> None:
        """Keep what rows say that were taken out of the kernel's table."""
        rows = list(counts)
        for expected in self._sum_by_namespace(rows):
            self._folded[expected.rail_set] = _sum(self._folded.get(expected.rail_set), expected)
        self._replayed.difference_update(row.kind.instance for row in rows)

    def sum_with(self, counts: Iterable[CallCount]) -> list[ExpectedBytes]:
        """One entry for each namespace: what was folded and what these rows say."""
        totals = dict(self._folded)
        for expected in self._sum_by_namespace(counts):
            totals[expected.rail_set] = _sum(totals.get(expected.rail_set), expected)
        return list(totals.values())

    def _sum_by_namespace(self, counts: Iterable[CallCount]) -> list[ExpectedBytes]:
        by_namespace: defaultdict[int, list[ObservedCalls]] = defaultdict(list)
        before, self._placed = self._placed, {}
        for count in counts:
            kind = count.kind
            process = self._process_of(kind.tgid)
            communicator = self._communicator_of(kind.instance)
            # Calls without a communicator are NCCL's invalidArgument: nothing was sent for them.
            if process is None or process.namespace is None or communicator is None:
                continue
            known = self._placed.get(kind.instance) or before.get(kind.instance)
            if known is None or known.communicator is not communicator:
                known = _Placed(communicator, communicator.name, communicator.placement)
            self._placed[kind.instance] = known
            if self._replays(kind.instance):
                self._replayed.add(kind.instance)
            by_namespace[process.namespace.inode].append(
                ObservedCalls(
                    known.name,
                    known.placement,
                    _OPS[kind.op],
                    kind.peer,
                    count.payload_bytes,
                    1 << kind.size_bucket,
                    communicator.ended_ns is None,
                    kind.instance in self._replayed,
                )
            )
        return [expected_bytes(str(inode), calls, self._small_payload_bytes) for inode, calls in by_namespace.items()]


def _sum(one: ExpectedBytes | None, other: ExpectedBytes) -> ExpectedBytes:
    if one is None:
        return other

    def add(a: WireTotals, b: WireTotals) -> WireTotals:
        return WireTotals(a.spread_bytes + b.spread_bytes, a.small_bytes + b.small_bytes, a.unknown or b.unknown)

    return ExpectedBytes(other.rail_set, add(one.transmit, other.transmit), add(one.receive, other.receive))
