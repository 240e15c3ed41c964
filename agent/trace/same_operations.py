"""Joins the rows of several ranks that belong to one operation.

Ranks of a communicator give it the same collectives in the same order, so communicator, number and kind name one
operation on all hosts: where each rank was watched from its first call on, the numbers compare.  Where one was not,
its numbers may begin anywhere.  Then times and sizes tell how far: a collective is under way on all its ranks at some
moment, and its count is the same on all of them, so the right distance makes every pair overlap, within what the
clocks may be off, and be of one size; if not exactly one distance does, nothing is joined.  Send and Recv have numbers
of their own on each rank, and are not joined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from railscope.agent.trace.timeline import NOT_ENDED, NOT_KNOWN, HostTimeline, Rows, TimelineCommunicator

_POINT_TO_POINT: Final = ("Send", "Recv", "SendRecv", "PutSignal", "Signal", "WaitSignal")
_MOST_DISTANCES: Final = 64
"""That are tried for one rank: operations that overlap with one of its own."""
_ENDLESS_NS: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class SameOperations:
    """What stands for one operation has one number, from 1 on; 0: it is not joined with another."""

    calls: tuple[Rows, ...]
    """For each host, for each row of its calls."""
    operations: tuple[Rows, ...]
    """Likewise; of one communicator either calls or operations are joined."""
    joined: int
    """Operations that two ranks or more are joined in."""
    not_joined: tuple[str, ...]
    """Communicators with ranks that cannot be joined: numbers do not compare, and times do not tell."""
    making_missed: frozenset[str]
    """Of these, those with a rank that was first seen at a call, not at its making: earlier calls may be missing."""

    @property
    def not_known(self) -> tuple[str, ...]:
        """Those that are not joined because their ranks' sequence numbers may not be comparable."""
        return tuple(comm for comm in self.not_joined if comm not in self.making_missed)


@dataclass(slots=True)
class _End:
    """One rank's collectives, in the order of their numbers."""

    host: int
    communicator: TimelineCommunicator
    rows: Rows
    """Where they stand in the host's array."""
    sequence: Rows
    op: Rows
    """Places in the words of all hosts."""
    payload_bytes: Rows
    begin_ns: Rows
    end_ns: Rows


def join_operations(hosts: Sequence[HostTimeline]) -> SameOperations:
    """Join what several ranks recorded of one operation, so that a trace can draw arrows."""
    joiner = _Joiner(hosts)
    ends: defaultdict[str, list[tuple[int, TimelineCommunicator]]] = defaultdict(list)
    for at, host in enumerate(hosts):
        for one in host.communicators:
            if one.comm:
                ends[one.comm].append((at, one))
    for comm, of_comm in ends.items():
        if len(of_comm) > 1:
            joiner.join(comm, of_comm)
    return SameOperations(
        tuple(joiner.calls),
        tuple(joiner.operations),
        joiner.joined,
        tuple(sorted(joiner.not_joined)),
        frozenset(joiner.making_missed),
    )


class _Joiner:
    def __init__(self, hosts: Sequence[HostTimeline]) -> None:
        self._hosts = hosts
        self.calls = [np.zeros(len(host.calls), np.uint64) for host in hosts]
        self.operations = [np.zeros(len(host.operations), np.uint64) for host in hosts]
        self.joined = 0
        self.not_joined: set[str] = set()
        self.making_missed: set[str] = set()
        places: dict[str, int] = {}
        self._words = [
            np.array([places.setdefault(word, len(places)) for word in (*host.words, "")], np.int64) for host in hosts
        ]
        """By host: places of its words among those of all; the last is for what is not known."""
        self._left_out = np.array([places[word] for word in (*_POINT_TO_POINT, "") if word in places], np.int64)
        self._by_instance = [
            {kind: _rows_by_instance(getattr(host, kind)) for kind in ("calls", "operations")} for host in hosts
        ]

    def join(self, comm: str, members: Iterable[tuple[int, TimelineCommunicator]]) -> None:
        for kind in ("operations", "calls"):
            ends = [end for end in (self._end(*member, kind) for member in members) if len(end.rows)]
            if len(ends) > 1:
                self._join(comm, ends, self.operations if kind == "operations" else self.calls)
                return

    def _end(self, host: int, communicator: TimelineCommunicator, kind: str) -> _End:
        table = self._hosts[host].operations if kind == "operations" else self._hosts[host].calls
        rows = self._by_instance[host][kind].get(communicator.instance, np.empty(0, np.intp))
        op = self._words[host][table["op"][rows]]
        wanted = (table["sequence"][rows] != NOT_KNOWN) & ~np.isin(op, self._left_out)
        rows, op = rows[wanted], op[wanted]
        order = np.argsort(table["sequence"][rows], kind="stable")
        rows, op = rows[order], op[order]
        if kind == "calls":
            begin_ns = end_ns = table["time_ns"][rows]
        else:
            begin_ns = table["begin_ns"][rows]
            end_ns = np.where(table["end_ns"][rows] == NOT_ENDED, _ENDLESS_NS, table["end_ns"][rows])
        return _End(
            host, communicator, rows, table["sequence"][rows], op, table["payload_bytes"][rows], begin_ns, end_ns
        )

    def _join(self, comm: str, ends: list[_End], numbers: list[Rows]) -> None:
        # The one that others are compared with: numbered from the start if there is such, and with most to compare.
        ends.sort(key=lambda end: (not end.communicator.numbered_from_start, -len(end.rows)))
        first, together = ends[0], [ends[0]]
        for end in ends[1:]:
            if not (end.communicator.numbered_from_start and first.communicator.numbered_from_start):
                distance = self._distance(first, end) if numbers is self.operations else None
                if distance is None:
                    self.not_joined.add(comm)
                    if False in (end.communicator.numbered_from_start, first.communicator.numbered_from_start):
                        self.making_missed.add(comm)
                    continue
                end.sequence = end.sequence + distance
            together.append(end)
        sequence = np.concatenate([end.sequence for end in together])
        op = np.concatenate([end.op for end in together])
        # Calls of one group are handed over together, with one number: then their order tells them apart.
        nth = np.concatenate([_nth_of_its_like(end.sequence, end.op) for end in together])
        member = np.repeat(np.arange(len(together)), [len(end.rows) for end in together])
        order = np.lexsort((member, nth, op, sequence))
        new = np.arange(len(order)) == 0
        for field in (sequence, op, nth):
            ordered = field[order]
            new[1:] |= ordered[1:] != ordered[:-1]
        group = np.cumsum(new) - 1
        of_several = np.bincount(group) > 1
        ranked = np.cumsum(of_several)
        found = np.empty(len(order), np.uint64)
        found[order] = np.where(of_several[group], self.joined + ranked[group], 0)
        self.joined += int(of_several.sum())
        for at, end in enumerate(together):
            numbers[end.host][end.rows] = found[member == at]

    def _distance(self, first: _End, other: _End) -> int | None:
        """What to add to the numbers of `other` so that they are those of `first`; None: times do not tell."""
        within_ns = self._error_between_ns(first.host, other.host)
        if within_ns is None:
            return None
        shortest = int(np.argmin(other.end_ns - other.begin_ns))
        near = np.flatnonzero(
            (first.op == other.op[shortest])
            & _of_one_size(first.payload_bytes, other.payload_bytes[shortest])
            & (first.begin_ns <= other.end_ns[shortest] + within_ns)
            & (first.end_ns >= other.begin_ns[shortest] - within_ns)
        )
        distances = {int(first.sequence[at]) - int(other.sequence[shortest]) for at in near[: _MOST_DISTANCES + 1]}
        if len(distances) > _MOST_DISTANCES:
            return None
        fitting = [distance for distance in distances if _overlap(first, other, distance, within_ns)]
        return fitting[0] if len(fitting) == 1 else None

    def _error_between_ns(self, host: int, other: int) -> int | None:
        one, two = self._hosts[host], self._hosts[other]
        if host == other or (one.clock and one.clock == two.clock):
            return 0
        return None if one.error_ns is None or two.error_ns is None else one.error_ns + two.error_ns


def _overlap(first: _End, other: _End, distance: int, within_ns: int) -> bool:
    """Whether all operations that have the same number at this distance are of one kind, and under way together."""
    _, mine, theirs = np.intersect1d(first.sequence, other.sequence + distance, return_indices=True)
    if 2 * len(mine) < min(len(np.unique(first.sequence)), len(np.unique(other.sequence))):
        return False
    return bool(
        (first.op[mine] == other.op[theirs]).all()
        and _of_one_size(first.payload_bytes[mine], other.payload_bytes[theirs]).all()
        and (first.begin_ns[mine] <= other.end_ns[theirs] + within_ns).all()
        and (first.end_ns[mine] >= other.begin_ns[theirs] - within_ns).all()
    )


def _of_one_size(payload_bytes: Rows, others: Rows) -> Rows:
    """Where two may be; what is not known may be anything."""
    alike: Rows = (payload_bytes == others) | (payload_bytes == NOT_KNOWN) | (others == NOT_KNOWN)
    return alike


def _rows_by_instance(table: Rows) -> dict[int, Rows]:
    order = np.argsort(table["instance"], kind="stable")
    instances, begins = np.unique(table["instance"][order], return_index=True)
    return dict(zip(instances.tolist(), np.split(order, begins[1:]), strict=True)) if len(order) else {}


def _nth_of_its_like(sequence: Rows, op: Rows) -> Rows:
    """How many before each have the same number and kind."""
    order = np.lexsort((np.arange(len(op)), op, sequence))
    new = np.ones(len(op), bool)
    new[1:] = (sequence[order][1:] != sequence[order][:-1]) | (op[order][1:] != op[order][:-1])
    begins = np.flatnonzero(new)
    nth = np.empty(len(op), np.int64)
    nth[order] = np.arange(len(op)) - np.repeat(begins, np.diff((*begins, len(op))))
    return nth
