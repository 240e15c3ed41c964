"""Which rails carry less than their siblings while they send, or lose packets, although nothing hangs.

In a ring all rails of a job carry what the slowest one does, so that bytes do not tell.  What tells is how many bytes
were acknowledged in the time in which any were under way, beside the best sibling of the host, and how many were sent
again.  A rail that is filled by others is shared, and not slow.  The recording rule that the alert asks says the same
(dashboards/rules/railscope-recording.yml).  Rails without TCP, as of RDMA, are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.facts import SlowRail
from railscope.agent.cluster.fleet.prometheus import Sample
from railscope.agent.cluster.fleet.rails import RailKey, rail_key
from railscope.agent.cluster.fleet.scrapes import Scrapes, match_any
from railscope.agent.cluster.fleet.slow import LATELY_STRETCHES, promql_seconds, stretch_seconds_of
from railscope.agent.facts import catalogue
from railscope.agent.facts.causes import Cause
from railscope.agent.facts.slowness import Slowness, Stretch, find_slowness

PACE_RATIO: Final = 0.75
"""Of the best sibling's; less is no accident where it lasts."""
_LOSSY_RATIO: Final = 0.01
_USED_BYTES_PER_SECOND: Final = 1e6
_BUSY_RATIO: Final = 0.1
"""Of the time, summed over connections: a rail with bytes under way for less slows nobody down."""
_FOREIGN_RATIO: Final = 0.2
QUEUE_BYTES: Final = 65_536
"""A queue that says more of a rail than its pace does."""
_BYTES_A_DROP: Final = 262_144
"""At most so many bytes are sent again for a packet that this host's own, full queue dropped: one that was not yet cut
(64 KiB) and, without selective acknowledgements, what was under way behind it.  Such a rail is slow, not lossy."""
_MORE_CONNECTIONS: Final = 1.25
"""Times those of the sibling with fewest: they share the rail, and each of them carries less."""
_MOST_HOSTS: Final = 64
_HOST: Final = "cluster, job, instance, netns"
_RAIL: Final = f"{_HOST}, rail, device"


def pace_expression(window: str, used: float = _USED_BYTES_PER_SECOND, matchers: str = "") -> str:
    """Bytes that each rail carries while it sends, against the best sibling of its host.

    Args:
        window: over which time, as a range of PromQL (`5m`).
        used: bytes a second; rails that carry less are not compared.
        matchers: of the series of rails, with a comma at the end.
    """
    carried = f"rate({catalogue.RAIL_TCP_ACKNOWLEDGED_BYTES.where(matchers)}[{window}])"
    busy = f"rate({catalogue.RAIL_TCP_BUSY_SECONDS.where(matchers)}[{window}])"
    pace = f"(({carried} > {used:g}) / ({busy} > {_BUSY_RATIO:g}))"
    best = f"max by ({_HOST}) (({carried} > {used:g}) / ({busy} > 0))"
    sent = f"sum by ({_RAIL}) (rate({catalogue.RAIL_TRANSMIT_BYTES.where(matchers)}[{window}]))"
    foreign = (
        f"sum by ({_RAIL}) (rate({catalogue.RAIL_BYTES_BY_ORIGIN}"
        f"{{{matchers}direction='transmit',origin='foreign'}}[{window}]))"
    )
    sending = f"avg_over_time({catalogue.RAIL_TCP_SENDING.where(matchers)}[{window}])"
    return (
        f"{pace} / on ({_HOST}) group_left () {best} unless on ({_RAIL}) {foreign} > {_FOREIGN_RATIO:g} * {sent}"
        f" unless on ({_RAIL}) {sending}"
        f" > on ({_HOST}) group_left () ({_MORE_CONNECTIONS:g} * min by ({_HOST}) ({sending} > 0))"
    )


def lossy_expression(window: str, matchers: str = "") -> str:
    """The share of its payload that a rail which is used sends again, where it is much."""
    sent = f"rate({catalogue.RAIL_TCP_SENT_BYTES.where(matchers)}[{window}])"
    again = f"rate({catalogue.RAIL_TCP_RETRANSMITTED_BYTES.where(matchers)}[{window}])"
    return f"{again} / ({sent} > {_USED_BYTES_PER_SECOND:g}) > {_LOSSY_RATIO:g}"


def slow_rails_questions(scrapes: Scrapes) -> dict[str, str]:
    """The queries for rails that are slow or lossy of late."""
    lately = promql_seconds(LATELY_STRETCHES * stretch_seconds_of(scrapes))
    return {
        "slow_rails": f"({pace_expression(lately)}) < {PACE_RATIO:g}",
        "lossy_rails": lossy_expression(lately),
    }


@dataclass(frozen=True, slots=True)
class _Course:
    """Stretches of the window, by rail."""

    active: dict[RailKey, list[tuple[float, float]]]
    """Those in which it was used."""
    slow: dict[RailKey, frozenset[float]]
    lossy: dict[RailKey, frozenset[float]]

    def slowness(self, key: RailKey, of: dict[RailKey, frozenset[float]], seconds: float) -> Slowness | None:
        at = of.get(key, frozenset())
        return find_slowness([Stretch(moment, 1, moment in at) for moment, _ in self.active.get(key, ())], seconds)


def read_slow_rails(
    ask: Asker, scrapes: Scrapes, slow: Iterable[Sample], lossy: Iterable[Sample], window_seconds: float
) -> tuple[SlowRail, ...]:
    """The rails that have been slow or lossy for a while, the worst first.

    Args:
        ask: the store.
        scrapes: of the hosts.
        slow, lossy: the answers to `slow_rails_questions`.
        window_seconds: how far back is looked.

    Raises:
        PrometheusError: the store does not answer.
    """
    paces, losses = _by_rail(slow), _by_rail(lossy)
    instances = tuple(dict.fromkeys(key[0] for key in (*paces, *losses)))[:_MOST_HOSTS]
    if not instances:
        return ()
    seconds = stretch_seconds_of(scrapes)
    course = _course(ask, instances, window_seconds, seconds)
    lately = promql_seconds(LATELY_STRETCHES * seconds)
    of = match_any("instance", instances)
    backlogs = _by_rail(ask(f"max_over_time({catalogue.RAIL_QUEUE_BACKLOG_BYTES.where(of)}[{lately}])"))
    dropped = _by_rail(ask(f"increase({catalogue.RAIL_QUEUE_DROPS.where(of)}[{lately}])"))
    again = _by_rail(ask(f"increase({catalogue.RAIL_TCP_RETRANSMITTED_BYTES.where(of)}[{lately}])"))
    found = []
    for key in dict.fromkeys((*paces, *losses)):
        known = course.slowness(key, course.slow, seconds) or course.slowness(key, course.lossy, seconds)
        if known is None:
            continue
        backlog = backlogs.get(key, 0.0)
        dropped_here = dropped.get(key, 0.0) * _BYTES_A_DROP >= again.get(key, math.inf)
        found.append(
            SlowRail(
                host=scrapes.names.get(key[0], "unknown"),
                rail=key[1],
                device=key[2],
                netns=key[3],
                cause=Cause.RAIL_SLOW if key not in losses or dropped_here else Cause.RAIL_LOSSY,
                slowness=known,
                stretch_seconds=seconds,
                pace_ratio=paces.get(key),
                retransmitted_ratio=losses.get(key),
                backlog_bytes=backlog,
                of_window=known.since - seconds <= ask.at - window_seconds,
            )
        )
    return tuple(sorted(found, key=lambda one: (-(one.backlog_bytes // QUEUE_BYTES), one.pace_ratio or 1.0, one.host)))


def _course(ask: Asker, instances: Collection[str], window_seconds: float, seconds: float) -> _Course:
    of, length = f"{match_any('instance', instances)},", promql_seconds(seconds)
    used = f"rate({catalogue.RAIL_TCP_SENT_BYTES.where(of)}[{length}]) > {_USED_BYTES_PER_SECOND:g}"

    def at(expression: str) -> dict[RailKey, frozenset[float]]:
        series = ask.store.evaluations(expression, window_seconds, seconds, ask.at)
        return {rail_key(one): frozenset(moment for moment, _ in one.points) for one in series}

    return _Course(
        {rail_key(one): list(one.points) for one in ask.store.evaluations(used, window_seconds, seconds, ask.at)},
        at(f"({pace_expression(length, matchers=of)}) < {PACE_RATIO:g}"),
        at(lossy_expression(length, of)),
    )


def _by_rail(samples: Iterable[Sample]) -> dict[RailKey, float]:
    return {rail_key(one): one.value for one in samples}
