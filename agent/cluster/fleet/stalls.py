"""Reads the stalls that hosts reported, now and before: rank, cause, begin, count, end.

A stall may be on and off, as where single operations end on a slow rail, and whoever asks comes a moment late as a
rule; so what was said within the last minute counts too (agent/cluster/verdict/recent.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.facts import BriefStall, Stall, StallHistory
from railscope.agent.cluster.fleet.history import spans
from railscope.agent.cluster.fleet.prometheus import Sample, Series
from railscope.agent.cluster.fleet.scrapes import MOST_POINTS, Scrapes
from railscope.agent.cluster.fleet.sequences import StoredRankKey, stored_rank_key
from railscope.agent.cluster.fleet.stuck_transfers import TransferStalls
from railscope.agent.facts import catalogue
from railscope.agent.facts.causes import ONLY_WAITS, tier_of
from railscope.agent.facts.label_numbers import UNKNOWN

_GAP: Final = 1.5
"""Scrape intervals: where the next one did not show it, the stall had ended in between."""
_MOST_CANDIDATES: Final = 100
"""For the telling moment: thousands of hosts have as many."""


def parse_stalls(stalled: Iterable[Sample], info: Iterable[Sample]) -> dict[StoredRankKey, Stall]:
    """The stalls that hosts report, with their evidence."""
    details = {(stored_rank_key(one), one.labels.get("cause", "")): one.labels for one in info}
    found: dict[StoredRankKey, Stall] = {}
    for sample in stalled:
        key, cause = stored_rank_key(sample), sample.labels.get("cause", "unknown")
        labels = details.get((key, cause))
        op = sample.labels.get("op", UNKNOWN)
        stall = Stall(op="" if op == UNKNOWN else op, cause=cause)
        if labels is not None:
            stall = with_details(stall, labels)
        # Of two for one rank the one that blames a rank or rail.
        if key not in found or found[key].cause in ONLY_WAITS:
            found[key] = stall
    return found


def with_details(stall: Stall, labels: Mapping[str, str]) -> Stall:
    """The stall with what else its host reports of it: device, rail, blamed rank."""
    return replace(
        stall,
        strength=labels.get("strength", "unknown"),
        blamed_rank=labels.get("blamed_rank", ""),
        rail=labels.get("rail", ""),
        device=labels.get("device", ""),
        netns=labels.get("netns", ""),
    )


def stall_histories(
    ask: Asker,
    scrapes: Scrapes,
    series: int,
    window_seconds: float,
    recent_seconds: float,
    of_transfers: TransferStalls,
) -> tuple[StallHistory, ...]:
    """The stalls reported within the window, by communicator, the latest first; `series`: the number of series.

    Raises:
        PrometheusError: the store does not answer.
    """
    if not series:
        return ()
    interval = scrapes.spacing_seconds
    seconds = max(recent_seconds, min(window_seconds, interval * MOST_POINTS / series))
    by_comm: dict[str, list[Series]] = defaultdict(list)
    for one in ask.store.scrapes(catalogue.COMM_STALL_INFO.name, seconds, ask.at):
        if one.points and not of_transfers.is_one(one.labels):
            by_comm[one.labels.get("comm", "")].append(one)
    found = [_history(comm, said, scrapes, recent_seconds) for comm, said in by_comm.items()]
    return tuple(sorted(found, key=lambda one: (-one.last, one.comm)))


@dataclass(frozen=True, slots=True)
class _Saying:
    """One report of a host on one of its ranks, from one scrape to another."""

    series: Series
    first: float
    last: float


def _history(comm: str, said: Sequence[Series], scrapes: Scrapes, recent_seconds: float) -> StallHistory:
    interval = scrapes.spacing_seconds
    times = {t for one in said for t, _ in one.points}
    on = spans(times, _GAP * interval)
    last = on[-1][1]
    sayings = [
        _Saying(one, first, until)
        for one in said
        for first, until in spans([t for t, _ in one.points], _GAP * interval)
    ]

    def at(moment: float) -> list[_Saying]:
        # Until the next scrape of that host, which ends it, what its last one showed holds.
        return [one for one in sayings if one.first <= moment <= one.last + 0.9 * interval]

    def told(moment: float) -> tuple[int, int, float]:
        tiers = [tier_of(one.series.labels.get("cause", "")) for one in at(moment)]
        return -min(tiers), len(tiers), moment

    # Only where something began to be said, or is said for the last time, is there more to hear than before.
    candidates = {t for one in sayings for t in (one.first, one.last) if t >= last - recent_seconds}
    step = 1 + len(candidates) // _MOST_CANDIDATES
    telling = max(sorted(candidates, reverse=True)[::step], key=told)
    return StallHistory(
        comm=comm,
        times=len(on),
        first=on[0][0],
        last=last,
        telling=telling,
        said=tuple(
            (
                scrapes.names.get(one.series.labels.get("instance", ""), "unknown"),
                one.series.labels.get("rank", ""),
                with_details(Stall("", one.series.labels.get("cause", "unknown")), one.series.labels),
            )
            for one in at(telling)
        ),
    )


def brief_questions(recent_seconds: float) -> dict[str, str]:
    """What to ask for stalls that no scrape may show."""
    seconds, ago = catalogue.COMM_STALL_SECONDS.name, f"{recent_seconds:.0f}s"
    return {
        "lengthened": f"max by (instance, comm, cause) (increase({seconds}[{ago}])) > 0",
        # Of a rank that never stalled there is no such counter: it appears, and had nothing to rise from.
        "appeared": f"max by (instance, comm, cause) ({seconds} unless {seconds} offset {ago} and on (job, instance) "
        f"{catalogue.BUILD_INFO} offset {ago}) > 0",
    }


def brief_stalls(
    found: Mapping[str, Iterable[Sample]], history: Iterable[StallHistory], scrapes: Scrapes
) -> tuple[BriefStall, ...]:
    """Those of communicators of which no scrape shows a stall."""
    shown = {one.comm for one in history}
    seconds: dict[tuple[str, str, str], float] = {}
    for sample in (*found["lengthened"], *found["appeared"]):
        comm = sample.labels.get("comm", "")
        host = scrapes.names.get(sample.labels.get("instance", ""), "unknown")
        if comm not in shown:
            seconds[comm, host, sample.labels.get("cause", "unknown")] = sample.value
    return tuple(BriefStall(comm, host, cause, value) for (comm, host, cause), value in sorted(seconds.items()))
