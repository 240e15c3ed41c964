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

import numpy as np
import numpy.typing as npt

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import CompletedTotal, RankTimes
from railscope.agent.model.bus_factor import bus_factor
from railscope.agent.node.collectives.call_counts import sum_groups
from railscope.agent.node.collectives.communicators import Communicator, format_label
from railscope.agent.node.collectives.kind_slots import KindSlots, Slots
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op, op_name
from railscope.probes.nccl.records.internals import UNKNOWN_SIZE

_SUMS: Final = ("operations", "duration_ns", "payload_bytes")
"""Of HISTORY."""
_WITH_A_FACTOR: Final = frozenset(op for op in Op if bus_factor(op, 2) is not None)


@dataclass(slots=True)
class _Sum:
    operations: int = 0
    duration_ns: int = 0
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Whose the rows of the kernel's table are: the same while rows and communicators are."""

    slots: Slots
    instances: tuple[int, ...]
    communicators: tuple[Communicator | None, ...]
    """By instance."""
    rank: npt.NDArray[np.intp]
    """Of each row, the place of its instance among `instances`."""
    known: npt.NDArray[np.bool_]
    """Whether it is known whose each row is."""
    kinds: tuple[tuple[int, int, int], ...]
    kind: npt.NDArray[np.intp]
    """Of each row, the place of its op, size bucket and number of ranks among `kinds`; -1: it has no factor."""


class OperationTimes:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._slots = KindSlots()
        self._last = np.zeros((0, len(_SUMS)), np.uint64)
        """By slot: operations, ns and bytes, as the kernel last had them."""
        self._rows: _Rows | None = None
        """Of the last reading."""
        self._ranks: dict[int, tuple[str, str]] = {}
        """By instance: communicator and rank, as labels."""
        self._of_rank: defaultdict[int, _Sum] = defaultdict(_Sum)
        self._of_node: defaultdict[tuple[int, int, int], _Sum] = defaultdict(_Sum)
        """By op, size bucket and number of ranks; of what has a factor."""

    def record(self, keys: Records, values: Records, communicator_of: Callable[[int], Communicator | None]) -> None:
        """Record a reading of the kernel's table (HISTORY_KEY, HISTORY).

        What a communicator did is counted once it is known who it is: its rows stay in the kernel's table till then.
        """
        slots = self._slots.of_keys(keys)
        if self._slots.size > len(self._last):
            more = max(self._slots.size - len(self._last), len(self._last))
            self._last = np.concatenate((self._last, np.zeros((more, len(_SUMS)), np.uint64)))
        now = np.stack([values[name] for name in _SUMS], axis=1)
        changed = (now != self._last[slots]).any(axis=1)
        if not changed.any():
            return
        rows = self._rows = self._rows_of(keys, slots, communicator_of)
        at = np.flatnonzero(changed & rows.known)
        now, before = now[at], self._last[slots[at]]
        before[(now < before)[:, :2].any(axis=1)] = 0  # the kernel has forgotten the row in between
        self._last[slots[at]] = now
        self._add(rows, at, now - before)

    def _rows_of(self, keys: Records, slots: Slots, communicator_of: Callable[[int], Communicator | None]) -> _Rows:
        known = self._rows
        if known is not None and known.slots is slots:
            current = zip(known.instances, known.communicators, strict=True)
            if all(communicator_of(instance) is communicator for instance, communicator in current):
                return known
        numbers = keys["instance"].tolist()
        place = {instance: at for at, instance in enumerate(dict.fromkeys(numbers))}
        communicators = tuple(map(communicator_of, place))
        rank = np.array([place[instance] for instance in numbers], np.intp)
        kinds: dict[tuple[int, int, int], int] = {}
        kind = []
        for op, size, at in zip(keys["op"].tolist(), keys["size_bucket"].tolist(), rank.tolist(), strict=True):
            communicator = communicators[at]
            nranks = communicator.nranks if communicator is not None else None
            counts = nranks and op in _WITH_A_FACTOR and size != UNKNOWN_SIZE
            kind.append(kinds.setdefault((op, size, nranks), len(kinds)) if nranks and counts else -1)
        met = np.array([communicator is not None for communicator in communicators], bool)
        return _Rows(slots, tuple(place), communicators, rank, met[rank], tuple(kinds), np.array(kind, np.intp))

    def _add(self, rows: _Rows, at: npt.NDArray[np.intp], more: npt.NDArray[np.uint64]) -> None:
        """Add what these rows have grown by."""
        ranks, number = rows.rank[at], len(rows.instances)
        operations, duration_ns = (sum_groups(ranks, number, more[:, column]) for column in range(2))
        for place in np.flatnonzero(np.bincount(ranks, minlength=number)).tolist():
            instance, communicator = rows.instances[place], rows.communicators[place]
            if communicator is not None and UNKNOWN in self._ranks.get(instance, (UNKNOWN,)):
                self._ranks[instance] = communicator.name, format_label(communicator.rank)
            rank = self._of_rank[instance]
            rank.operations += operations[place]
            rank.duration_ns += duration_ns[place]
        with_a_factor = np.flatnonzero(rows.kind[at] >= 0)
        kinds, more, number = rows.kind[at][with_a_factor], more[with_a_factor], len(rows.kinds)
        operations, duration_ns, payload_bytes = (sum_groups(kinds, number, column) for column in more.T)
        for place in np.flatnonzero(np.bincount(kinds, minlength=number)).tolist():
            node = self._of_node[rows.kinds[place]]
            node.operations += operations[place]
            node.duration_ns += duration_ns[place]
            node.payload_bytes += payload_bytes[place]

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
            self._last[self._slots.forget(instance)] = 0
            self._ranks.pop(instance, None)
            self._of_rank.pop(instance, None)
