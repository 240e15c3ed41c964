"""Sums the durations of completed operations: by rank, and for the node by kind and size.

From these sums follows effective bandwidth as nccl-tests means it: algbw is payload over time, busbw is bus bytes
over time, where bus bytes are payload x a factor that makes ranks of any number comparable (nccl-tests'
doc/PERFORMANCE.md).  Payload here is as NCCL's calls give it: of one rank for AllGather, ReduceScatter and AllToAll.

A communicator whose ranks all wait for the one that comes last spends least time in operations there: compared over
all hosts, the rank with the smallest mean is the straggler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import CompletedTotal, RankTimes
from railscope.agent.model.bus_factor import bus_factor
from railscope.agent.node.collectives.communicators import Communicator, format_label
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op, op_name
from railscope.probes.nccl.records.internals import UNKNOWN_SIZE

_NOTHING: Final = (0, 0, 0)


_WITH_A_FACTOR: Final = frozenset(op for op in Op if bus_factor(op, 2) is not None)


@dataclass(slots=True)
class _Sum:
    operations: int = 0
    duration_ns: int = 0
    payload_bytes: int = 0


class OperationTimes:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._last: dict[int, dict[tuple[int, int], tuple[int, int, int]]] = {}
        """By instance, then op and size bucket: operations, ns and bytes, as the kernel last had them."""
        self._ranks: dict[int, tuple[str, str]] = {}
        """By instance: communicator and rank, as labels."""
        self._of_rank: defaultdict[int, _Sum] = defaultdict(_Sum)
        self._of_node: defaultdict[tuple[int, int, int], _Sum] = defaultdict(_Sum)
        """By op, size bucket and number of ranks; of what has a factor."""

    def record(self, keys: Records, values: Records, communicator_of: Callable[[int], Communicator | None]) -> None:
        """Record a reading of the kernel's table (HISTORY_KEY, HISTORY).

        What a communicator did is counted once it is known who it is: its rows stay in the kernel's table till then.
        """
        for (instance, op, size, _), now in zip(keys.tolist(), values.tolist(), strict=True):
            rows = self._last.setdefault(instance, {})
            before = rows.get((op, size), _NOTHING)
            if now == before:
                continue
            communicator = communicator_of(instance)
            if communicator is None:
                continue
            if now[0] < before[0]:
                before = _NOTHING  # the kernel has forgotten the row in between
            rows[op, size] = now
            if UNKNOWN in self._ranks.get(instance, (UNKNOWN,)):
                self._ranks[instance] = communicator.name, format_label(communicator.rank)
            operations, duration_ns, payload_bytes = now[0] - before[0], now[1] - before[1], now[2] - before[2]
            rank = self._of_rank[instance]
            rank.operations += operations
            rank.duration_ns += duration_ns
            nranks = communicator.nranks
            if nranks and op in _WITH_A_FACTOR and size != UNKNOWN_SIZE:
                node = self._of_node[op, size, nranks]
                node.operations += operations
                node.duration_ns += duration_ns
                node.payload_bytes += payload_bytes

    def by_rank(self) -> tuple[RankTimes, ...]:
        """Of every communicator that is not forgotten, ended ones included."""
        return tuple(
            RankTimes(*self._ranks[instance], total.operations, total.duration_ns / 1e9)
            for instance, total in self._of_rank.items()
        )

    def by_size(self) -> tuple[CompletedTotal, ...]:
        """Of the node; never falls."""
        sums: defaultdict[tuple[int, int], _Sum] = defaultdict(_Sum)
        bus_bytes: defaultdict[tuple[int, int], Fraction] = defaultdict(Fraction)
        for (op, size, nranks), more in self._of_node.items():
            total = sums[op, size]
            total.operations += more.operations
            total.duration_ns += more.duration_ns
            total.payload_bytes += more.payload_bytes
            bus_bytes[op, size] += (bus_factor(op, nranks) or 0) * more.payload_bytes
        return tuple(
            CompletedTotal(
                op_name(op),
                1 << size,
                total.operations,
                total.payload_bytes,
                int(bus_bytes[op, size]),
                total.duration_ns / 1e9,
            )
            for (op, size), total in sorted(sums.items())
        )

    def forget(self, instances: Iterable[int]) -> None:
        """Nobody can ask about these communicators any more; the node's sums stay."""
        for instance in instances:
            self._last.pop(instance, None)
            self._ranks.pop(instance, None)
            self._of_rank.pop(instance, None)
