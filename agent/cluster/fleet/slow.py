"""Which ranks the others wait for although nothing hangs.

A communicator whose ranks all wait for the one that comes last spends least time in operations there.  Of the time of
the other ranks, what they spend longer than that one is what they wait for it.  Where several operations are under way
at once their time counts so many times, and is divided by as much.  Point to point, which has no sequence, ranks wait
for each other by design.  The recording rule that the alert on such ranks asks says the same
(dashboards/rules/railscope-recording.yml).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from railscope.agent.cluster.fleet.facts import SlowRank
from railscope.agent.cluster.fleet.prometheus import Sample
from railscope.agent.facts import catalogue

_LEAST_RATIO: Final = 0.25
"""Less is what ranks of a healthy job wait for each other, now and then."""
_NAMED: Final = 'comm!="unknown",rank!="unknown"'


def waited_for_expression(window: str, least: float = _LEAST_RATIO) -> str:
    """The share of the other ranks' time for which they wait for each rank, where it is more than the least.

    Args:
        window: over which time, as a range of PromQL (`5m`).
        least: of 1.
    """
    spent = f"rate({catalogue.COMM_OPERATION_SECONDS.where(_NAMED)}[{window}])"
    return (
        f"((sum by (cluster, comm) ({spent}) - on (cluster, comm) group_right () {spent})"
        f" / on (cluster, comm) group_left () (count by (cluster, comm) ({spent}) - 1 > 0) - {spent})"
        f" / on (cluster, comm) group_left () clamp_min(max by (cluster, comm) ({spent}), 1) > {least:g}"
    )


def slow_question(window_seconds: float) -> str:
    """The query for ranks that the others wait for."""
    window = f"{window_seconds:.0f}s"
    no_sequence = f"max by (cluster, comm) (delta({catalogue.COMM_SEQUENCE}[{window}])) == 0"
    return f"{waited_for_expression(window)} unless on (cluster, comm) {no_sequence}"


def slow_ranks(samples: Iterable[Sample], names: Mapping[str, str]) -> tuple[SlowRank, ...]:
    """The ranks of an answer, those first for which others wait most; `names`: of hosts, by instance."""
    found = (
        SlowRank(
            one.labels.get("comm", ""),
            one.labels.get("rank", ""),
            names.get(one.labels.get("instance", ""), "unknown"),
            one.value,
        )
        for one in samples
    )
    return tuple(sorted(found, key=lambda one: (-one.waited_ratio, one.comm, one.rank)))
