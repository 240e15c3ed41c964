"""Which ranks the others wait for in most operations although nothing hangs.

A communicator whose ranks all wait for the one that comes last spends least time in operations there.  Of the time of
the other ranks, what they spend longer than that one is what they wait for it.  Where several operations are under way
at once their time counts so many times, and is divided by as much.  Point to point, which has no sequence, ranks wait
for each other by design.  The recording rule that the alert on such ranks asks says the same
(dashboards/rules/railscope-recording.yml).

Who is waited for of late is looked at more closely: in how many stretches of the window it was, and since when
(agent/facts/slowness.py).  Where completions are not seen, hosts tell which of their ranks the others wait for there,
by calls (agent/node/collectives/slow_ranks.py).  A rank that wrote to storage meanwhile is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.facts import SlowRank
from railscope.agent.cluster.fleet.prometheus import Sample
from railscope.agent.cluster.fleet.scrapes import Scrapes, match_any
from railscope.agent.cluster.fleet.sequences import StoredRankKey, stored_rank_key
from railscope.agent.facts import catalogue
from railscope.agent.facts.slowness import WAITED_RATIO, Slowness, Stretch, find_slowness, medians_of_others

_NAMED: Final = 'comm!="unknown",rank!="unknown"'
_SCRAPES_OF_STRETCH: Final = 2.5
"""Two scrapes are in it, however they fall."""
_LEAST_STRETCH_SECONDS: Final = 5.0
LATELY_STRETCHES: Final = 4
_MOST_COMPARED: Final = 256
"""Communicators whose ranks are compared one by one, those first whose ranks are most unlike."""
_MOST_COMMS: Final = 64
"""Of which the stretches are asked for, those first whose ranks wait most."""


def waited_for_expression(window: str, least: float = WAITED_RATIO, matchers: str = _NAMED) -> str:
    """The share of the other ranks' time for which they wait for each rank, where it is more than the least.

    Args:
        window: over which time, as a range of PromQL (`5m`).
        least: of 1.
        matchers: of the series of ranks.
    """
    spent = f"rate({catalogue.COMM_OPERATION_SECONDS.where(matchers)}[{window}])"
    return (
        # Of n ranks the mean of the others is the mean of all, moved away from this one by n / (n - 1).
        f"(avg by (cluster, comm) ({spent}) - on (cluster, comm) group_right () {spent})"
        f" / on (cluster, comm) group_left () (clamp_min(max by (cluster, comm) ({spent}), 1)"
        f" * (1 - 1 / (count by (cluster, comm) ({spent}) > 1))) > {least:g}"
    )


def uneven_question(scrapes: Scrapes) -> str:
    """The query for communicators whose ranks spend unlike times in operations, as where some wait for others.

    It takes a third of what it takes to compare all ranks of a fleet one by one.
    """
    spent = f"rate({catalogue.COMM_OPERATION_SECONDS.where(_NAMED)}[{_lately(scrapes)}])"
    apart = f"max by (cluster, comm) ({spent}) - min by (cluster, comm) ({spent}) > {WAITED_RATIO:g}"
    return f"topk({_MOST_COMPARED}, {apart} unless on (cluster, comm) {catalogue.COMM_STALLED} == 1)"


def slow_question(scrapes: Scrapes, comms: Collection[str]) -> str:
    """The query for ranks of these communicators that the others wait for of late."""
    of = f"{match_any('comm', comms)},{_NAMED}"
    lately = _lately(scrapes)
    no_sequence = f"max by (cluster, comm) (delta({catalogue.COMM_SEQUENCE.where(of)}[{lately}])) == 0"
    return f"{waited_for_expression(lately, matchers=of)} unless on (cluster, comm) {no_sequence}"


def _lately(scrapes: Scrapes) -> str:
    return promql_seconds(LATELY_STRETCHES * stretch_seconds_of(scrapes))


def read_slow_ranks(
    ask: Asker, scrapes: Scrapes, lately: Iterable[Sample], awaited: Iterable[Sample], window_seconds: float
) -> tuple[SlowRank, ...]:
    """The ranks that have been slow for a while, those first for which others wait most.

    Args:
        ask: the store.
        scrapes: of the hosts.
        lately: the answer to `slow_question`, of communicators that `uneven_question` finds.
        awaited: ranks for which the others of their host wait, as hosts tell.
        window_seconds: how far back is looked.

    Raises:
        PrometheusError: the store does not answer.
    """
    found = _by_completions(ask, scrapes, lately, window_seconds)
    seen = {one.comm for one in found}
    found += _by_calls(ask, scrapes, [one for one in awaited if one.labels.get("comm") not in seen], window_seconds)
    return tuple(sorted(found, key=lambda one: (-one.waited_ratio, one.comm, one.rank)))


def _by_completions(ask: Asker, scrapes: Scrapes, lately: Iterable[Sample], window_seconds: float) -> list[SlowRank]:
    ratios = {stored_rank_key(one): one.value for one in lately}
    worst = sorted(ratios, key=lambda key: (-ratios[key], key))
    comms = tuple(dict.fromkeys(comm for _, comm, _ in worst))[:_MOST_COMMS]
    if not comms:
        return []
    stretch_seconds = stretch_seconds_of(scrapes)
    stretches = _stretches(ask, comms, window_seconds, stretch_seconds)
    paces = _paces(ask, comms, LATELY_STRETCHES * stretch_seconds)
    found = []
    for key in worst:
        instance, comm, rank = key
        slowness = find_slowness(stretches.get(key, ()), stretch_seconds)
        if slowness is not None:
            waited_seconds, times_median = paces.get(key, (None, None))
            found.append(
                SlowRank(
                    comm,
                    rank,
                    scrapes.names.get(instance, "unknown"),
                    ratios[key],
                    slowness,
                    stretch_seconds,
                    waited_seconds,
                    times_median,
                    of_window=slowness.since - stretch_seconds <= ask.at - window_seconds,
                )
            )
    return found


def _by_calls(ask: Asker, scrapes: Scrapes, awaited: Sequence[Sample], window_seconds: float) -> list[SlowRank]:
    """What hosts tell of their own ranks; how often and by how much, from the calls that each made last."""
    if not awaited:
        return []
    of = f"{match_any('comm', {one.labels.get('comm', '') for one in awaited})},{_NAMED}"
    window = f"{window_seconds:.0f}s"
    told = ask.query_all(
        since=catalogue.COMM_AWAITED_SINCE.where(of),
        last=f"increase({catalogue.COMM_LAST_ARRIVALS.where(of)}[{window}])",
        lag=f"increase({catalogue.COMM_ARRIVAL_LAG_SECONDS.where(of)}[{window}])",
        calls=f"sum by (instance, comm) (increase({catalogue.COMM_LAST_ARRIVALS.where(of)}[{window}]))",
    )
    since, last, lag = ({stored_rank_key(one): one.value for one in told[name]} for name in ("since", "last", "lag"))
    calls = {(one.labels.get("instance", ""), one.labels.get("comm", "")): one.value for one in told["calls"]}
    found = []
    for sample in awaited:
        key = stored_rank_key(sample)
        instance, comm, rank = key
        made = calls.get((instance, comm), 0.0)
        if key in since and last.get(key) and made:
            found.append(
                SlowRank(
                    comm,
                    rank,
                    scrapes.names.get(instance, "unknown"),
                    sample.value,
                    Slowness(min(since[key], ask.at), round(last[key]), round(made), made),
                    None,
                    lag[key] / last[key] if key in lag else None,
                    of_window=since[key] <= ask.at - window_seconds,
                )
            )
    return found


def stretch_seconds_of(scrapes: Scrapes) -> float:
    """Length of the stretches of time in which slowness is counted."""
    return max(_LEAST_STRETCH_SECONDS, _SCRAPES_OF_STRETCH * scrapes.spacing_seconds)


def promql_seconds(seconds: float) -> str:
    """A duration of PromQL."""
    return f"{1000 * seconds:.0f}ms"


def _stretches(
    ask: Asker, comms: Collection[str], window_seconds: float, stretch_seconds: float
) -> dict[StoredRankKey, list[Stretch]]:
    """What came of each stretch of the window, for each rank that was waited for in any."""
    of, length = f"{match_any('comm', comms)},{_NAMED}", promql_seconds(stretch_seconds)
    waited = ask.store.evaluations(waited_for_expression(length, matchers=of), window_seconds, stretch_seconds, ask.at)
    made = ask.store.evaluations(
        f"max by (comm) (increase({catalogue.COMM_OPERATIONS.where(of)}[{length}]))",
        window_seconds,
        stretch_seconds,
        ask.at,
    )
    operations = {one.labels.get("comm", ""): one.points for one in made}
    found: dict[StoredRankKey, list[Stretch]] = {}
    for one in waited:
        key, at = stored_rank_key(one), {moment for moment, _ in one.points}
        found[key] = [Stretch(moment, count, moment in at) for moment, count in operations.get(key[1], ())]
    return found


def _paces(
    ask: Asker, comms: Collection[str], seconds: float
) -> dict[StoredRankKey, tuple[float | None, float | None]]:
    """Of each rank: by how many seconds the others wait for it in an operation, and how many times as long as the
    median of the others it takes from one operation to the next."""
    of = f"{match_any('comm', comms)},{_NAMED}"
    found = ask.query_all(
        operations=f"rate({catalogue.COMM_OPERATIONS.where(of)}[{promql_seconds(seconds)}])",
        seconds=f"rate({catalogue.COMM_OPERATION_SECONDS.where(of)}[{promql_seconds(seconds)}])",
    )
    spent = {stored_rank_key(one): one.value for one in found["seconds"]}
    inside: defaultdict[str, dict[StoredRankKey, tuple[float, float]]] = defaultdict(dict)
    for one in found["operations"]:
        key = stored_rank_key(one)
        if one.value > 0 and key in spent:
            # Where several operations are under way at once there is no time between them.
            mean = spent[key] / one.value
            inside[key[1]][key] = mean, max(0.0, 1 / one.value - mean)
    paces: dict[StoredRankKey, tuple[float | None, float | None]] = {}
    for ranks in inside.values():
        if len(ranks) < 2:
            continue
        waits, gaps = (medians_of_others(values) for values in zip(*ranks.values(), strict=True))
        for (key, (mean, between)), usual, usual_between in zip(ranks.items(), waits, gaps, strict=True):
            longer = between > usual_between > 0
            paces[key] = max(0.0, usual - mean), between / usual_between if longer else None
    return paces
