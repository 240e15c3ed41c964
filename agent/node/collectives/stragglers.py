"""Finds the rank that arrives last at each call, among a communicator's ranks on this host.

A rank's calls are numbered, and the n-th call of every rank is the same collective; so calls match by communicator and
number.  That holds for communicators that were seen from their first call on.  Numbers stop matching where ranks make
different calls, as they do with Send and Recv: a communicator that was used for these is left out from then on.

Batches arrive as the ring gives them: what is incomplete waits for the other ranks, a bounded number of calls for each
communicator, and is given up when it is overtaken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import RankArrivals
from railscope.agent.node.collectives.communicators import Communicator, format_label
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op

WINDOW: Final = 1024
"""Calls of a communicator that may wait for their other ranks."""
_ENOUGH: Final = 16384
"""Events that are looked at together."""
MOST_GROUPS: Final = 1024
"""Communicators with several ranks on a host: more than any job makes."""
NOT_BY_ALL: Final = np.isin(np.arange(256), (Op.Send, Op.Recv, Op.PutSignal, Op.Signal, Op.WaitSignal))
"""By number of the operation: whether only some ranks call it."""
_NOT_WANTED: Final = -1
_NOBODY: Final = (_NOT_WANTED, 0)

Integers = npt.NDArray[np.int64]


class _Calls(NamedTuple):
    """Columns of calls, as dtype CALL_EVENT has them."""

    instance: npt.NDArray[np.uint32]
    sequence: npt.NDArray[np.uint32]
    time_ns: npt.NDArray[np.uint64]
    op: npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Waiting:
    """Calls that not all ranks have made, by number modulo the window."""

    number: Integers = field(default_factory=lambda: np.full(WINDOW, -1, np.int64))
    count: Integers = field(default_factory=lambda: np.zeros(WINDOW, np.int64))
    """How many ranks have made it."""
    last_ns: Integers = field(default_factory=lambda: np.zeros(WINDOW, np.int64))
    before_ns: Integers = field(default_factory=lambda: np.zeros(WINDOW, np.int64))
    """When the last and the one before it came."""
    last: Integers = field(default_factory=lambda: np.zeros(WINDOW, np.int64))
    """Who came last: an index into `_Group.members`."""


@dataclass(slots=True)
class _Group:
    """The ranks of one communicator on this host."""

    number: int
    members: list[int] = field(default_factory=list)
    """Instances, those of ranks that ended included."""
    waiting: _Waiting = field(default_factory=_Waiting)
    lasts: list[int] = field(default_factory=list)
    lags_ns: list[int] = field(default_factory=list)
    alone_ns: list[int] = field(default_factory=list)
    """By member."""
    waited_until_ns: int = 0
    """Up to then it is counted who was waited for."""
    matches: bool = True
    expected: int = 0
    """Ranks on this host, as NCCL says; 0: it does not."""

    @property
    def size(self) -> int:
        """How many ranks make each call."""
        return max(self.expected, len(self.members))


class Stragglers:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._by_number: dict[int, _Group] = {}
        self._next_number = 0
        self._places: dict[int, tuple[int, int]] = {}
        """By instance: number of the group, and index of the member; `_NOT_WANTED`: no rank to compare it with."""
        self._labels: dict[int, tuple[str, str]] = {}
        """By instance: communicator and rank."""
        self._table: tuple[npt.NDArray[np.uint32], Integers, Integers] | None = None
        """`_places` as sorted arrays; None: to be made again."""
        self._pending: list[_Calls] = []
        self._pending_count = 0
        self._communicator_of: Callable[[int], Communicator | None] = lambda _instance: None

    def record(
        self, events: Records, called: Iterable[int], communicator_of: Callable[[int], Communicator | None]
    ) -> None:
        """Record calls (dtype CALL_EVENT) of the instances `called`.

        `communicator_of` says who an instance is, None: not known yet.  What is needed of the events is kept until
        there are many, or they are requested: matching thousands costs little more than a few.
        """
        if all(self._places.get(instance) == _NOBODY for instance in called):  # one that is not known yet may be wanted
            return
        self._pending.append(_Calls(*(events[name].copy() for name in _Calls._fields)))
        self._pending_count += len(events)
        self._communicator_of = communicator_of
        if self._pending_count >= _ENOUGH:
            self._match()

    def _match(self) -> None:
        """Match the calls that wait for those of other ranks."""
        if not self._pending:
            return
        calls = _Calls(*map(np.concatenate, zip(*self._pending, strict=True)))
        self._pending.clear()
        self._pending_count = 0
        groups, members = self._places_of(calls.instance, self._communicator_of)
        wanted = groups >= 0
        if not wanted.any():
            return
        groups, members, ops = groups[wanted], members[wanted], calls.op[wanted]
        numbers, times_ns = calls.sequence[wanted].astype(np.int64), calls.time_ns[wanted].astype(np.int64)
        unmatched = NOT_BY_ALL[ops]
        if unmatched.any():
            left_out = np.unique(groups[unmatched])
            for number in left_out.tolist():
                self._leave_out(self._by_number[number])
            kept = ~np.isin(groups, left_out)
            if not kept.any():
                return
            groups, members, numbers, times_ns = groups[kept], members[kept], numbers[kept], times_ns[kept]
        keys = groups << 32 | numbers
        order = np.lexsort((times_ns, keys))
        keys, members, times_ns = keys[order], members[order], times_ns[order]
        starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        ends = np.concatenate((starts[1:], [len(keys)])) - 1
        several = ends > starts
        before_ns = np.where(several, times_ns[np.maximum(ends - 1, 0)], 0)
        found = keys[starts], ends - starts + 1, times_ns[ends], before_ns, members[ends]
        edges = np.flatnonzero(np.diff(found[0] >> 32)) + 1
        for part in zip(*(np.split(column, edges) for column in found), strict=True):
            self._add(self._by_number[int(part[0][0]) >> 32], *part)

    def arrivals(self) -> tuple[RankArrivals, ...]:
        """Of every rank that can be compared with another one on this host."""
        self._match()
        return tuple(
            RankArrivals(*self._labels[instance], last, lag_ns / 1e9, alone_ns / 1e9)
            for group in self._groups.values()
            if any(group.lasts)
            for instance, last, lag_ns, alone_ns in zip(
                group.members, group.lasts, group.lags_ns, group.alone_ns, strict=True
            )
            if instance in self._labels
        )

    def leave_out(self, instances: Iterable[int]) -> None:
        """Calls of these communicators were missed: their ranks' calls match no more."""
        gone = tuple(instances)
        if gone:
            self._match()
        for instance in gone:
            label = self._labels.get(instance)
            group = None if label is None else self._groups.get(label[0])
            if group is not None:
                self._leave_out(group)

    def forget(self, instances: Iterable[int]) -> None:
        """Nobody can ask about these communicators any more."""
        gone = tuple(instances)
        if not gone:
            return
        self._match()
        for instance in gone:
            self._labels.pop(instance, None)
            number, _ = self._places.pop(instance, _NOBODY)
            self._table = None
            group = self._by_number.get(number)
            if group is not None and not any(member in self._labels for member in group.members):
                del self._by_number[number]
                self._groups = {name: one for name, one in self._groups.items() if one is not group}

    def _add(
        self,
        group: _Group,
        keys: Integers,
        counts: Integers,
        last_ns: Integers,
        before_ns: Integers,
        last: Integers,
    ) -> None:
        """Add calls of one communicator, each once: how many ranks made it, and the last two of them."""
        numbers = keys & 0xFFFFFFFF
        whole = counts == group.size
        if whole.all():
            self._count(group, last_ns, before_ns, last)
            return
        waiting = group.waiting
        self._count(group, last_ns[whole], before_ns[whole], last[whole])
        rest = np.flatnonzero(~whole)[-WINDOW:]
        numbers, counts, last_ns, before_ns, last = (
            column[rest] for column in (numbers, counts, last_ns, before_ns, last)
        )
        at = numbers % WINDOW
        # Of calls that fall on one place the newest stays.  The kernel's numbers begin again at 2^32.
        newest = np.zeros(len(at), np.bool_)
        newest[len(at) - 1 - np.unique(at[::-1], return_index=True)[1]] = True
        distance = (numbers - waiting.number[at]).astype(np.int32)
        newest &= (waiting.number[at] < 0) | (distance >= 0)
        at, numbers, counts, last_ns, before_ns, last = (
            column[newest] for column in (at, numbers, counts, last_ns, before_ns, last)
        )
        same = waiting.number[at] == numbers
        old_last_ns = np.where(same, waiting.last_ns[at], 0)
        old_before_ns = np.where(same, waiting.before_ns[at], 0)
        later = last_ns >= old_last_ns
        counts = counts + np.where(same, waiting.count[at], 0)
        last = np.where(later, last, waiting.last[at])
        before_ns = np.where(later, np.maximum(before_ns, old_last_ns), np.maximum(last_ns, old_before_ns))
        last_ns = np.maximum(last_ns, old_last_ns)
        whole = counts == group.size
        self._count(group, last_ns[whole], before_ns[whole], last[whole])
        waiting.number[at] = np.where(whole, -1, numbers)
        waiting.count[at], waiting.last_ns[at], waiting.before_ns[at], waiting.last[at] = (
            counts,
            last_ns,
            before_ns,
            last,
        )

    def _count(self, group: _Group, last_ns: Integers, before_ns: Integers, last: Integers) -> None:
        members = len(group.members)
        if members < 2 or not len(last):
            return
        # Of calls that are made ahead many are late at once: that time counts once.
        order = np.argsort(last_ns, kind="stable")
        until_ns = np.concatenate(([group.waited_until_ns], np.maximum(last_ns[order][:-1], group.waited_until_ns)))
        alone_ns = np.maximum(last_ns[order] - np.maximum(before_ns[order], until_ns), 0)
        group.waited_until_ns = max(group.waited_until_ns, int(last_ns[order[-1]]))
        lasts = np.bincount(last, minlength=members).tolist()
        lags = np.bincount(last, weights=last_ns - before_ns, minlength=members).tolist()
        alone = np.bincount(last[order], weights=alone_ns, minlength=members).tolist()
        for member in range(members):
            group.lasts[member] += lasts[member]
            group.lags_ns[member] += int(lags[member])
            group.alone_ns[member] += int(alone[member])

    def _places_of(
        self, instances: npt.NDArray[Any], communicator_of: Callable[[int], Communicator | None]
    ) -> tuple[Integers, Integers]:
        """Number of the group and index of the member of each; group -1: not wanted."""
        known, groups, members = self._arrays()
        at = np.searchsorted(known, instances)
        strange = known[np.minimum(at, len(known) - 1)] != instances
        if strange.any():
            for instance in np.unique(instances[strange]).tolist():
                self._add_instance(instance, communicator_of(instance))
            if self._table is None:
                known, groups, members = self._arrays()
                at = np.searchsorted(known, instances)
                strange = known[np.minimum(at, len(known) - 1)] != instances
            at = np.where(strange, 0, at)
        return np.where(strange, _NOT_WANTED, groups[at]), members[at]

    def _arrays(self) -> tuple[npt.NDArray[np.uint32], Integers, Integers]:
        if self._table is None:
            # Instance 0 is no communicator: with it the arrays are never empty.
            rows = sorted({**self._places, 0: _NOBODY}.items())
            self._table = (
                np.array([instance for instance, _ in rows], np.uint32),
                np.array([group for _, (group, _) in rows], np.int64),
                np.array([member for _, (_, member) in rows], np.int64),
            )
        return self._table

    def _add_instance(self, instance: int, communicator: Communicator | None) -> None:
        """Find the index of an instance; an unknown one is looked up again at the next call."""
        if communicator is None or communicator.name == UNKNOWN:
            return
        self._table = None
        group = self._groups.get(communicator.name)
        if group is None:
            alone = communicator.nranks == 1 or communicator.local_ranks == 1
            if alone or not communicator.whole or len(self._groups) >= MOST_GROUPS:
                self._places[instance] = _NOBODY
                return
            group = self._groups[communicator.name] = self._by_number[self._next_number] = _Group(self._next_number)
            self._next_number += 1
        if not communicator.whole:
            # Its calls are numbered from when it was first seen: they do not match those of the others.
            self._places[instance] = _NOBODY
            self._leave_out(group)
            return
        group.expected = communicator.local_ranks or 0
        self._labels[instance] = communicator.name, format_label(communicator.rank)
        self._places[instance] = (group.number if group.matches else _NOT_WANTED), len(group.members)
        group.members.append(instance)
        group.lasts.append(0)
        group.lags_ns.append(0)
        group.alone_ns.append(0)

    def _leave_out(self, group: _Group) -> None:
        group.matches = False
        for member in group.members:
            if member in self._places:
                self._places[member] = _NOBODY
        self._table = None
