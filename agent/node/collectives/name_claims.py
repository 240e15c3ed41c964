"""Which process a communicator's name belongs to, where several give the same one.

NCCL's commHash and the rank are what a process's own memory holds, and what series are named by: a process that writes
another one's numbers there would add its calls to the other's series.  So a name belongs to those who had it first.  A
communicator is given a mark, which becomes part of its name (`00c0ffee00c0ffee~4711`: process 4711), if while they live

- another process has the same hash and rank,
- the hash belongs to a communicator of another size, or
- the hash belongs to processes of another user, where neither runs in a container: what users are there, and how many
  pods share a job, is for those to say who made them.

Whoever came first keeps the name, and its series do not change.  A mark stays as long as its communicator.

What one host cannot tell: that a rank has its owner on another host, where the user and the size are the same; and of
two that are older than the agent, which came first.  Then it is the one that is seen to call first.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.agent.node.targets.processes import ProcessOf

_log = logging.getLogger("railscope.communicators")

_MOST_LINES: Final = 8
"""Conflicts of one user that are told in the log; all are counted."""
_MOST_TENANTS: Final = 1024
"""Whose conflicts are counted for that; then it begins anew, as containers come and go without end."""


class Named(Protocol):
    """What is needed of a communicator."""

    @property
    def instance(self) -> int: ...
    @property
    def tgid(self) -> int: ...
    @property
    def comm_hash(self) -> int | None: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def nranks(self) -> int | None: ...
    @property
    def ended_ns(self) -> int | None: ...


@dataclass(slots=True)
class _Owners:
    """Who has a hash."""

    by_rank: dict[int, Named] = field(default_factory=dict)
    by_process: defaultdict[int, dict[int, Named]] = field(default_factory=lambda: defaultdict(dict))
    """By instance, so that asking for one of a process takes no longer where it has many."""

    def add(self, one: Named, rank: int) -> None:
        self.by_rank[rank] = one
        self.by_process[one.tgid][one.instance] = one

    def remove(self, one: Named) -> None:
        if one.rank is not None and (owner := self.by_rank.get(one.rank)) and owner.instance == one.instance:
            del self.by_rank[one.rank]
        of_process = self.by_process.get(one.tgid, {})
        of_process.pop(one.instance, None)
        if not of_process:
            self.by_process.pop(one.tgid, None)


class NameClaims:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, process_of: ProcessOf, is_running: Callable[[int], bool]) -> None:
        """`is_running` looks at a process by pid now: that it has ended may not be known yet."""
        self._process_of = process_of
        self._is_running = is_running
        self._owners: dict[int, _Owners] = {}
        """By hash."""
        self._decided: set[int] = set()
        self._told: Counter[Tenant] = Counter()
        """Conflicts of each one's communicators so far."""
        self.conflicts = 0
        """Communicators that were marked so far."""

    def is_decided(self, instance: int) -> bool:
        return instance in self._decided

    def claim(self, one: Named, current: Callable[[int], Named | None]) -> str:
        """Decide whose a name is, once for each communicator; returns the mark of one that comes second, or nothing.

        `current` knows by instance what has become of an earlier one.
        """
        if one.comm_hash is None or one.rank is None or one.instance in self._decided:
            return ""
        self._decided.add(one.instance)
        owners = self._owners.setdefault(one.comm_hash, _Owners())
        why = self._why_not(one, owners, current)
        if why:
            self.conflicts += 1
            process = self._process_of(one.tgid)
            tenant = process.tenant if process is not None else UNKNOWN_TENANT
            if len(self._told) >= _MOST_TENANTS:
                self._told.clear()
            self._told[tenant] += 1
            if self._told[tenant] <= _MOST_LINES:
                last = "; further ones of this user are counted only" if self._told[tenant] == _MOST_LINES else ""
                _log.warning(
                    "communicator %016x, rank %d of process %d: %s%s", one.comm_hash, one.rank, one.tgid, why, last
                )
            return str(one.tgid)
        owners.add(one, one.rank)
        return ""

    def release(self, one: Named) -> None:
        """A communicator is kept no longer."""
        self._decided.discard(one.instance)
        owners = self._owners.get(one.comm_hash) if one.comm_hash is not None else None
        if owners is None or one.comm_hash is None:
            return
        owners.remove(one)
        if not owners.by_process:
            del self._owners[one.comm_hash]

    def _why_not(self, one: Named, owners: _Owners, current: Callable[[int], Named | None]) -> str:
        """Why a communicator may not have the name that it gives; empty: it may."""
        rival = owners.by_rank.get(one.rank) if one.rank is not None else None
        if rival is not None and rival.tgid != one.tgid and self._lives(rival, current):
            return f"process {rival.tgid} has that rank"
        # Owners agree with each other: one that lives tells for all.
        for tgid, of_process in list(owners.by_process.items()):
            if tgid == one.tgid:
                continue
            owner = next(iter(of_process.values()))
            differs = self._difference(one, owner)
            if not differs:
                return ""
            if any(self._lives(each, current) for each in of_process.values()):
                return differs
            for each in list(of_process.values()):
                owners.remove(each)
        return ""

    def _difference(self, one: Named, owner: Named) -> str:
        if one.nranks is not None and owner.nranks is not None and one.nranks != owner.nranks:
            return f"it has {one.nranks} ranks, and that of process {owner.tgid} {owner.nranks}"
        mine, other = self._process_of(one.tgid), self._process_of(owner.tgid)
        if mine is None or other is None:
            return ""
        apart = mine.tenant.is_other_user(other.tenant)
        return f"user {mine.tenant.uid} has it, and user {other.tenant.uid} had it first" if apart else ""

    def _lives(self, owner: Named, current: Callable[[int], Named | None]) -> bool:
        now = current(owner.instance)
        return now is not None and now.ended_ns is None and self._is_running(owner.tgid)
