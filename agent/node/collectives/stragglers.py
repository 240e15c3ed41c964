"""Finds the rank that arrives last at each call, among a communicator's ranks on this host.

A rank's calls are numbered, and the n-th call of every rank is the same collective; so calls match by communicator and
number.  That holds for communicators that were seen from their first call on.  Numbers stop matching where ranks make
different calls, as they do with Send and Recv: a communicator that was used for these is left out from then on.

Batches arrive as the ring gives them: what is incomplete waits for the other ranks, a bounded number of calls for each
communicator, and is given up when it is overtaken.  Calls of all communicators are matched at once, in columns: where
there are thousands, each makes a few.

So many communicators are followed at a time, which tenants share: one that is beyond its tenant's share is looked at
again when another one ends, or is left out.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.snapshot import RankArrivals
from railscope.agent.node.collectives.communicators import Communicator, format_label
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.shares import Places

WINDOW: Final = 1024
"""Calls of a communicator that may wait for their other ranks."""
_ENOUGH: Final = 16384
"""Events that are looked at together."""
MOST_GROUPS: Final = 1024
"""Communicators with several ranks on a host that are followed at a time: more than any job makes."""
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


_WAITING: Final = np.dtype(
    [
        ("number", np.int64),
        ("count", np.int64),  # how many ranks have made it; 0: nothing waits here
        ("last_ns", np.int64),
        ("before_ns", np.int64),  # when the last and the one before it came
        ("last", np.int64),  # who came last: a member
    ]
)
"""A call that not all ranks have made."""


@dataclass(slots=True)
class _Group:
    """The ranks of one communicator on this host."""

    number: int
    """Below MOST_GROUPS; given to another one once this one is gone, or is left out."""
    tenant: Tenant
    """Whose first rank it was."""
    instances: list[int] = field(default_factory=list)
    """Those of ranks that ended included."""
    members: list[int] = field(default_factory=list)
    """Where what is counted of each of these is."""
    matches: bool = True
    """False: it is left out from now on."""
    expected: int = 0
    """Ranks on this host, as NCCL says; 0: it does not."""
    shown: tuple[RankArrivals, ...] | None = None
    """None: to be made again."""


class _Counts:
    """What is counted of members, and of groups up to when; members have room as they come."""

    def __init__(self) -> None:
        self.totals = np.zeros((3, 64), np.int64)
        """By member: calls that it made last, its lag in them, and how much of that the others waited for it alone."""
        self._free: list[int] = []
        self._next = 0

    def add_member(self) -> int:
        """A place for one more."""
        if self._free:
            return self._free.pop()
        if self._next == self.totals.shape[1]:
            self.totals = np.concatenate((self.totals, np.zeros_like(self.totals)), axis=1)
        self._next += 1
        return self._next - 1

    def remove(self, members: list[int]) -> None:
        """These places are free for others."""
        self.totals[:, members] = 0
        self._free += members


class _Refused:
    """Communicators for which there was no place."""

    def __init__(self) -> None:
        self._of_tenants: dict[Tenant, dict[str, set[int]]] = {}
        """Instances by name; first those that were not looked at again for longest."""
        self._which: dict[int, tuple[Tenant, str]] = {}
        """By instance."""
        self.by_user: Counter[int | None] = Counter()
        """How many there were so far, by uid: users are few, and containers come and go without end."""

    def add(self, tenant: Tenant, name: str, instance: int) -> None:
        own = self._of_tenants.setdefault(tenant, {})
        self.by_user[tenant.uid] += name not in own
        own.setdefault(name, set()).add(instance)
        self._which[instance] = tenant, name

    def discard(self, instance: int) -> None:
        """An instance has a place, or is gone."""
        if instance not in self._which:
            return
        tenant, name = self._which.pop(instance)
        own = self._of_tenants[tenant]
        own[name].discard(instance)
        if not own[name]:
            del own[name]
        if not own:
            del self._of_tenants[tenant]

    def take_turns(self, room_of: Callable[[Tenant], int]) -> list[int]:
        """Instances of those that may have a place now: of each tenant's as many communicators as it has room for."""
        found: list[int] = []
        for tenant, own in self._of_tenants.items():
            for name in list(islice(own, room_of(tenant))):
                own[name] = instances = own.pop(name)
                found += instances
        return found


class Stragglers:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, tenant_of: Callable[[int], Tenant] = lambda _pid: UNKNOWN_TENANT) -> None:
        """`tenant_of` says by pid whose a process is."""
        self._tenant_of = tenant_of
        self._groups: dict[str, _Group] = {}
        self._by_number: dict[int, _Group] = {}
        """Those that are not left out."""
        self._share = Places[Tenant](MOST_GROUPS)
        self._free_numbers = list(range(MOST_GROUPS - 1, -1, -1))
        self._sizes = np.zeros(MOST_GROUPS, np.int64)
        """By group: how many ranks make each call."""
        self._waited_until_ns = np.zeros(MOST_GROUPS, np.int64)
        """By group: up to then it is counted who was waited for."""
        self._waiting: Records | None = None
        """By group and number modulo the window; None: there was no group yet."""
        self._counts = _Counts()
        self._places: dict[int, tuple[int, int]] = {}
        """By instance: number of the group, and its member; `_NOBODY`: no rank to compare it with."""
        self._labels: dict[int, tuple[str, str]] = {}
        """By instance: communicator and rank."""
        self._refused = _Refused()
        self._freed = False
        """Whether one of them may have a place by now."""
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
        if self._freed:
            self._freed = False
            for instance in self._refused.take_turns(self._share.room):
                self._places.pop(instance, None)
                self._table = None
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
        made = np.zeros(len(starts), _WAITING)
        made["number"], made["count"] = keys[starts] & 0xFFFFFFFF, ends - starts + 1
        made["last_ns"], made["last"] = times_ns[ends], members[ends]
        made["before_ns"] = np.where(ends > starts, times_ns[np.maximum(ends - 1, 0)], 0)
        self._add(keys[starts] >> 32, made)

    @property
    def refused(self) -> Mapping[int | None, int]:
        """How many communicators had no place so far, by uid: who came last at their calls is not known."""
        return self._refused.by_user

    def arrivals(self) -> tuple[RankArrivals, ...]:
        """Of every rank that can be compared with another one on this host."""
        self._match()
        changed = [group for group in self._groups.values() if group.shown is None]
        if changed:
            last, lag_ns, alone_ns = self._counts.totals.tolist()
            for group in changed:
                compared = any(last[one] for one in group.members)
                group.shown = tuple(
                    RankArrivals(*self._labels[instance], last[member], lag_ns[member] / 1e9, alone_ns[member] / 1e9)
                    for instance, member in zip(group.instances, group.members, strict=True)
                    if compared and instance in self._labels
                )
        return tuple(one for group in self._groups.values() for one in group.shown or ())

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
            self._places.pop(instance, None)
            self._refused.discard(instance)
            self._table = None
            label = self._labels.pop(instance, None)
            group = None if label is None else self._groups.get(label[0])
            if group is None or label is None:
                continue
            group.shown = None
            if not any(one in self._labels for one in group.instances):
                del self._groups[label[0]]
                self._counts.remove(group.members)
                if group.matches:
                    self._free_number(group)

    def _free_number(self, group: _Group) -> None:
        """Another communicator may have its place."""
        number = group.number
        del self._by_number[number]
        self._free_numbers.append(number)
        self._share.leave(group.tenant)
        self._freed = True
        self._sizes[number] = self._waited_until_ns[number] = 0
        if self._waiting is not None:
            self._waiting["count"][number * WINDOW : (number + 1) * WINDOW] = 0

    def _add(self, groups: Integers, made: Records) -> None:
        """Add calls, each once (dtype _WAITING), in the order of their groups and numbers."""
        whole = made["count"] == self._sizes[groups]
        if whole.all():
            self._count(groups, made)
            return
        late_groups, completed = self._wait(groups[~whole], made[~whole])
        self._count(np.concatenate((groups[whole], late_groups)), np.concatenate((made[whole], completed)))

    def _wait(self, groups: Integers, made: Records) -> tuple[Integers, Records]:
        """Let calls wait for their other ranks; returns those that waited for these alone, with their groups."""
        if self._waiting is None:
            self._waiting = _empty_window()
        at = groups * WINDOW + made["number"] % WINDOW
        # Of calls that fall on one place the newest stays.  The kernel's numbers begin again at 2^32.
        newest = np.zeros(len(at), np.bool_)
        newest[len(at) - 1 - np.unique(at[::-1], return_index=True)[1]] = True
        old = self._waiting[at]
        newest &= (old["count"] == 0) | ((made["number"] - old["number"]).astype(np.int32) >= 0)
        at, groups, made, old = at[newest], groups[newest], made[newest], old[newest]
        same = (old["count"] > 0) & (old["number"] == made["number"])
        old_last_ns, old_before_ns = np.where(same, old["last_ns"], 0), np.where(same, old["before_ns"], 0)
        later = made["last_ns"] >= old_last_ns
        made["before_ns"] = np.where(
            later, np.maximum(made["before_ns"], old_last_ns), np.maximum(made["last_ns"], old_before_ns)
        )
        made["last"] = np.where(later, made["last"], old["last"])
        made["last_ns"] = np.maximum(made["last_ns"], old_last_ns)
        made["count"] += np.where(same, old["count"], 0)
        whole = made["count"] == self._sizes[groups]
        self._waiting[at] = made
        self._waiting["count"][at[whole]] = 0
        return groups[whole], made[whole]

    def _count(self, groups: Integers, made: Records) -> None:
        """Count calls that all ranks have made (dtype _WAITING)."""
        several = self._sizes[groups] > 1
        groups, made = groups[several], made[several]
        if not len(groups):
            return
        # Of calls that are made ahead many are late at once: that time counts once.
        order = np.lexsort((made["last_ns"], groups))
        groups, made = groups[order], made[order]
        last, last_ns, before_ns = made["last"], made["last_ns"], made["before_ns"]
        begins = np.concatenate(([True], groups[1:] != groups[:-1]))
        until_ns = np.where(begins, 0, np.concatenate(([0], last_ns[:-1])))
        until_ns = np.maximum(until_ns, self._waited_until_ns[groups])
        alone_ns = np.maximum(last_ns - np.maximum(before_ns, until_ns), 0)
        ends = np.concatenate((begins[1:], [True]))
        counted = groups[ends]
        self._waited_until_ns[counted] = np.maximum(self._waited_until_ns[counted], last_ns[ends])
        totals = self._counts.totals
        for total, weights in zip(totals, (None, last_ns - before_ns, alone_ns), strict=True):
            total += np.bincount(last, weights, minlength=len(total)).astype(np.int64)
        for number in counted.tolist():
            self._by_number[number].shown = None

    def _places_of(
        self, instances: npt.NDArray[Any], communicator_of: Callable[[int], Communicator | None]
    ) -> tuple[Integers, Integers]:
        """Number of the group and member of each; group -1: not wanted."""
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
        """Find the group and member of an instance; an unknown one is looked up again at the next call."""
        if communicator is None or communicator.name == UNKNOWN:
            return
        self._table = None
        group = self._groups.get(communicator.name)
        if group is None:
            alone = communicator.nranks == 1 or communicator.local_ranks == 1
            if alone or not communicator.whole:
                self._places[instance] = _NOBODY
                return
            tenant = self._tenant_of(communicator.tgid)
            if not self._share.take(tenant):
                self._refused.add(tenant, communicator.name, instance)
                self._places[instance] = _NOBODY
                return
            number = self._free_numbers.pop()
            group = self._groups[communicator.name] = self._by_number[number] = _Group(number, tenant)
        if not communicator.whole:
            # Its calls are numbered from when it was first seen: they do not match those of the others.
            self._places[instance] = _NOBODY
            self._leave_out(group)
            return
        group.expected = communicator.local_ranks or 0
        member = self._counts.add_member()
        self._labels[instance] = communicator.name, format_label(communicator.rank)
        self._places[instance] = (group.number, member) if group.matches else _NOBODY
        group.instances.append(instance)
        group.members.append(member)
        group.shown = None
        self._refused.discard(instance)
        if group.matches:
            self._sizes[group.number] = max(group.expected, len(group.members))

    def _leave_out(self, group: _Group) -> None:
        if not group.matches:
            return
        group.matches = False
        self._free_number(group)
        for instance in group.instances:
            if instance in self._places:
                self._places[instance] = _NOBODY
        self._table = None


def _empty_window() -> Records:
    """Room for the calls of all groups that may wait; only what is written to takes memory."""
    memory = mmap.mmap(-1, MOST_GROUPS * WINDOW * _WAITING.itemsize)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # each group's pages lie apart
    return np.frombuffer(memory, _WAITING)
