"""How long ranks have stalled, by cause, how many stalls began, and the last ones that ended.

A stall's cause may change while it lasts: what it has grown by since it was counted last is of the cause that it has
now.  Totals never fall, and go with their communicator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from railscope.agent.facts.snapshot import CommunicatorStall, StallTotal
from railscope.agent.facts.stall import Stall
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.probes.shares import FairMemory

MOST_ENDED: Final = 100
"""Stalls that are told of when they have ended; of more the oldest are forgotten, of whoever has most of them first."""

_Key = tuple[str, str, str]
"""Communicator, rank and cause."""


class StallTotals:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, tenant_of: Callable[[int], Tenant] = lambda _pid: UNKNOWN_TENANT) -> None:
        """`tenant_of` says by pid whose a process is, or was."""
        self._tenant_of = tenant_of
        self._begun: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By operation and cause."""
        self._lengths: defaultdict[int, defaultdict[_Key, int]] = defaultdict(lambda: defaultdict(int))
        """Sum of all stalls, ns, by instance."""
        self._counted_ns: dict[int, int] = {}
        """By instance: up to when its current stall is part of that sum."""
        self._ended = FairMemory[Tenant, tuple[int, int], Stall](MOST_ENDED)
        """By instance and beginning."""

    def begin(self, stall: Stall) -> None:
        """A stall has begun."""
        self._begun[stall.op, stall.diagnosis.cause.value] += 1

    def end(self, stall: Stall, ended_ns: int) -> None:
        """A stall has ended."""
        self.count((stall,), ended_ns)
        del self._counted_ns[stall.instance]
        self._ended.put(self._tenant_of(stall.pid), (stall.instance, stall.since_ns), stall)

    def count(self, stalls: Iterable[Stall], now_ns: int) -> None:
        """Add what stalls that go on have grown by to the sums of the causes that they have now."""
        for stall in stalls:
            since_ns = self._counted_ns.get(stall.instance, stall.since_ns)
            self._lengths[stall.instance][_key(stall)] += max(0, now_ns - since_ns)
            self._counted_ns[stall.instance] = now_ns

    def forget(self, instances: Iterable[int]) -> None:
        """Nobody can ask about these communicators any more."""
        for instance in instances:
            self._lengths.pop(instance, None)

    @property
    def begun(self) -> tuple[StallTotal, ...]:
        """How many stalls began on this node."""
        return tuple(StallTotal(op, cause, count) for (op, cause), count in self._begun.items())

    @property
    def ended(self) -> tuple[Stall, ...]:
        """The last ones that ended."""
        return tuple(stall for _, stall in self._ended.items())

    def lengths(self, current: Iterable[Stall]) -> tuple[CommunicatorStall, ...]:
        """The sums as of when stalls were counted last, with those of these that go on."""
        going_on = {(stall.instance, *_key(stall)): stall for stall in current}
        return tuple(
            CommunicatorStall(*key, length / 1e9, going_on.get((instance, *key)))
            for instance, lengths in self._lengths.items()
            for key, length in lengths.items()
        )


def _key(stall: Stall) -> _Key:
    return stall.comm, stall.rank, stall.diagnosis.cause.value
