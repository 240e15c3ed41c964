"""Finds the ranks that others wait for before any host calls it a stall.

That they wait is no fault yet: a rank that evaluates, loads data or writes keeps the others waiting for a while.  Who
it is shows as soon as the communicator has stood for two scrapes (agent/cluster/fleet/apart.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from railscope.agent.cluster.fleet.facts import Fleet, Rank
from railscope.agent.cluster.verdict.culprits import find_culprits
from railscope.agent.cluster.verdict.verdict import has_ended
from railscope.agent.facts.causes import Cause


@dataclass(frozen=True, slots=True)
class LateRanks:
    """Ranks that did not enter the operation in which the others of their communicator wait."""

    comm: str
    ranks: tuple[Rank, ...]
    operations: int
    """That they entered less than the foremost rank."""
    seconds: float | None
    """For how long the others have waited; None: not known."""


def find_late_ranks(fleet: Fleet) -> tuple[LateRanks, ...]:
    """Those of all communicators that stand apart and that no host calls stalled, who waits longest first."""
    by_comm: dict[str, list[Rank]] = defaultdict(list)
    for rank in fleet.ranks:
        if rank.comm in fleet.apart:
            by_comm[rank.comm].append(rank)
    found = [late for ranks in by_comm.values() if (late := _late(ranks, fleet)) is not None]
    return tuple(sorted(found, key=lambda late: (-(late.seconds or 0.0), late.comm)))


def _late(ranks: Sequence[Rank], fleet: Fleet) -> LateRanks | None:
    if any(rank.stall or rank.moving for rank in ranks) or has_ended(ranks):
        return None
    culprits = find_culprits(ranks, fleet.rails)
    if any(culprit.cause == Cause.WRITING for culprit in culprits):
        return None
    behind = next((culprit.ranks for culprit in culprits if culprit.basis == "sequence"), ())
    late = frozenset(behind)
    waiting = [rank for rank in ranks if rank.present and rank not in late]
    ages = [rank.inflight_seconds for rank in waiting]
    if not behind or not any(age is None or age > 0 for age in ages):
        return None
    at = [rank.position.entered for rank in behind if rank.position]
    foremost = max((rank.position.entered for rank in waiting if rank.position), default=0)
    return LateRanks(
        behind[0].comm,
        behind,
        foremost - min(at, default=foremost),
        max((age for age in ages if age), default=None),
    )
