"""What users lost because they had reached a limit of their own: totals that never fall, and who reached one lately.

Tables, places and inspections are shared out by user (probes/bpf/shares.h, agent/node/targets/libraries.py,
agent/node/inspection).  Whoever is at his limit loses his own detail, and here it says what and who.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.node.inspection.tenants import ROOT
from railscope.probes.clock import Clock
from railscope.probes.nccl.records.calls import DEEPLY_NESTED
from railscope.probes.processes.namespaces import FIRST_NAMESPACE

RECENT_NS: Final = 600_000_000_000
"""For so long after a loss its user is said to be at a limit."""
MOST_USERS: Final = 64
"""Users that are named for each limit; the others are one."""
OTHERS: Final = "other"


def user_of_share(number: int | None) -> int | None:
    """The uid of whoever has the share of this number in the programs' tables (probes/bpf/answerable.h).

    A container has a share of its own, by the inode of its pid namespace, where its processes are root's.  None: not
    known.
    """
    if number is None or number < FIRST_NAMESPACE:
        return number
    return None if number == DEEPLY_NESTED else ROOT.uid


class LimitsReached:
    """Not thread-safe: the daemon's lock guards it; what the properties return does not change any more."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, dict[int | None, int]] = {}
        """The last reading of each limit."""
        self._lost_ns: dict[tuple[str, str], int] = {}
        """When each lost something the last time."""
        self._totals: dict[tuple[str, str], int] = {}

    @property
    def totals(self) -> Mapping[tuple[str, str], int]:
        """What was lost, by limit and user."""
        return self._totals

    def record(self, limit: str, lost: Mapping[int | None, int]) -> None:
        """What users have lost at a limit so far, by uid, None: not known; a number that falls begins anew."""
        before = self._seen.get(limit, {})
        more = {uid: count - (before.get(uid, 0) if before.get(uid, 0) <= count else 0) for uid, count in lost.items()}
        self._seen[limit] = dict(lost)
        totals = dict(self._totals)
        for uid, count in more.items():
            if count:
                key = limit, self._name(limit, uid)
                totals[key] = totals.get(key, 0) + count
                self._lost_ns[key] = self._clock.monotonic_ns()
                self._totals = totals

    def _name(self, limit: str, uid: int | None) -> str:
        name = UNKNOWN if uid is None else str(uid)
        if (limit, name) in self._totals or sum(known == limit for known, _ in self._totals) < MOST_USERS:
            return name
        return OTHERS

    def recent(self) -> str:
        """Who lost something lately, in words; empty: nobody.  Safe from any thread."""
        now_ns = self._clock.monotonic_ns()
        recent = sorted(key for key, at_ns in self._lost_ns.copy().items() if now_ns - at_ns < RECENT_NS)
        return ", ".join(f"{limit} of uid {uid}" for limit, uid in recent)
