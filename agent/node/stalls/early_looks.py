"""Decides when to look early at processes to which the kernel told that something happened.

A process was stopped or frozen, or a rail of its network namespace lost its carrier.  That alone is no stall: a
debugger holds a process for a moment, a batch system stops the ranks of a job one after the other, a link comes back.
`SETTLED_NS` later its communicators are looked at, whatever look would be due: who is still held then, while another
rank waits for him, is told of (agent/node/stalls/root_cause.py).

What happens to processes is for their users to decide, so each tenant gets a look every `_TENANT_PAUSE_NS` at most, and
all of them together one every `_PAUSE_NS`; what happened meanwhile waits for the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.targets.processes import ProcessOf

SETTLED_NS: Final = 200_000_000
"""Who is stopped for longer is stopped on purpose: profilers and debuggers that only look take less."""
RECENT_NS: Final = 4_000_000_000
"""So long the moment of an event counts: afterwards the usual limits have told of what it did."""
_TENANT_PAUSE_NS: Final = 500_000_000
_PAUSE_NS: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class _Event:
    tenant: Tenant
    happened_ns: int
    due_ns: int
    """When the process may be looked at because of it."""


class EarlyLooks:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, process_of: ProcessOf) -> None:
        self._process_of = process_of
        self._waiting: dict[int, _Event] = {}
        """By pid: what it was not looked at for yet."""
        self._looked_ns: dict[Tenant, int] = {}
        self._last_ns = 0
        self._happened_ns: dict[int, int] = {}
        """By pid: the last event, for `RECENT_NS`."""

    def record_events(self, happened: Mapping[int, int]) -> None:
        """Record that processes were held, or that their rails lost a carrier: by pid, and when, ns."""
        for pid, happened_ns in happened.items():
            process = self._process_of(pid)
            if process is not None and process.ended_ns is None:
                self._record(pid, process.tenant, happened_ns)

    def _record(self, pid: int, tenant: Tenant, happened_ns: int) -> None:
        self._happened_ns[pid] = happened_ns
        due_ns = max(happened_ns + SETTLED_NS, self._looked_ns.get(tenant, 0) + _TENANT_PAUSE_NS)
        self._waiting[pid] = _Event(tenant, happened_ns, due_ns)

    @property
    def due_ns(self) -> int | None:
        """When the next early look is due; None: nothing happened."""
        if not self._waiting:
            return None
        return max(min(event.due_ns for event in self._waiting.values()), self._last_ns + _PAUSE_NS)

    def pop_due(self, now_ns: int) -> frozenset[int]:
        """Processes to look at now, by pid: of a tenant one of whose is due, all whose event has settled."""
        tenants = {event.tenant for event in self._waiting.values() if event.due_ns <= now_ns}
        found = set()
        for pid, event in list(self._waiting.items()):
            if event.tenant not in tenants:
                continue
            if now_ns - event.happened_ns >= SETTLED_NS:
                found.add(pid)
                del self._waiting[pid]
            else:
                self._waiting[pid] = replace(event, due_ns=now_ns + _TENANT_PAUSE_NS)
        self._looked_ns = {one: at_ns for one, at_ns in self._looked_ns.items() if now_ns - at_ns < _TENANT_PAUSE_NS}
        self._looked_ns |= dict.fromkeys(tenants, now_ns)
        self._last_ns = now_ns
        return frozenset(found)

    def recent(self, now_ns: int) -> Mapping[int, int]:
        """When something last happened to processes, by pid, where that is no longer ago than `RECENT_NS`."""
        self._happened_ns = {pid: at_ns for pid, at_ns in self._happened_ns.items() if now_ns - at_ns <= RECENT_NS}
        return self._happened_ns

    def forget(self, pid: int) -> None:
        """A process has ended."""
        self._waiting.pop(pid, None)
        self._happened_ns.pop(pid, None)
