"""Explains stalls that have ended or paused, from what hosts reported while they lasted.

Where single operations end on a slow rail a stall is on and off, and the operator asks while it is off.
The answer is then the verdict of the moment at which hosts said most, and says so.  What has been over for longer is a
line beside the verdict, and so is a stall of a communicator whose processes have ended: no rank waits any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from railscope.agent.cluster.fleet.facts import Fleet, Stall, StallHistory
from railscope.agent.cluster.fleet.scrapes import rate_seconds_of
from railscope.agent.cluster.verdict.names import name_communicator
from railscope.agent.cluster.verdict.quantities import format_calls, format_duration
from railscope.agent.cluster.verdict.verdict import RootCause, find_root_causes, has_ended
from railscope.agent.facts.causes import ONLY_WAITS, Cause
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.stall import rail_name

_MOST_MOMENTS: Final = 3
"""Each takes as many questions as the verdict on now."""
_MOST_LINES: Final = 4
_CRAWLS: Final = 0.25
"""Of the pace before a stall: who is slower after it has not recovered."""
_LEAST: Final = 0.01
_PAST: Final = {
    "is": "was",
    "are": "were",
    "do": "did",
    "does": "did",
    "keep": "kept",
    "keeps": "kept",
    "loses": "lost",
    "wait": "waited",
    "write": "wrote",
    "writes": "wrote",
}
_VERB: Final = re.compile(rf"(?<= )(?:{'|'.join(_PAST)})(?= |$)")


@dataclass(frozen=True, slots=True)
class RecentCause:
    """A root cause of a moment ago, with the fleet at that time."""

    cause: RootCause
    then: Fleet
    history: StallHistory


def next_read_time(fleet: Fleet, earlier: Sequence[Fleet]) -> float | None:
    """The next moment at which the fleet is to be read for its recent stalls; None: there is none.

    `earlier`: the fleet at the moments that were named before.
    """
    if len(earlier) == _MOST_MOMENTS:
        return None
    read = {rank.comm for then in earlier for rank in then.ranks if rank.stall}
    moments = {then.at for then in earlier}
    return next(
        (one.telling for one in _recent(fleet) if one.comm not in read and one.telling not in moments),
        None,
    )


def find_recent_causes(fleet: Fleet, earlier: Iterable[Fleet]) -> tuple[RecentCause, ...]:
    """Root causes of stalls that were on a moment ago and are not now."""
    pending = {one.comm: one for one in _recent(fleet)}
    now = _stalled_now(fleet)
    found = []
    for then in earlier:
        for cause in find_root_causes(then):
            comms = [cause.stalled.comm, *(one.stalled.comm for one in cause.dependents)]
            told = [pending.pop(comm) for comm in comms if comm in pending]
            # What waited because of a stall that is still on stands below that one.
            if told and cause.stalled.comm not in now:
                latest = max(told, key=lambda one: (one.comm == cause.stalled.comm, one.last))
                found.append(RecentCause(cause, then, latest))
    return tuple(found)


def headline_time(recent: RecentCause, fleet: Fleet) -> str:
    """The beginning of a headline: `STALLED until 4.2 s ago for 6.0 s, not at this moment`."""
    history = recent.history
    length = stalled_seconds(history, fleet, recent.then)
    if _reported_by_lost_hosts(history, fleet):
        # It may be on: who said so says nothing any more.
        return (
            f"STALLED when last heard of, {format_duration(fleet.at - history.last)} ago, for {format_duration(length)}"
        )
    now = _crawl(recent, fleet) or "not at this moment"
    if history.times > 1:
        often = (
            f"{history.times} times and for {format_duration(length)} in the last "
            f"{format_duration(fleet.at - history.first)}"
        )
        return f"STALLED on and off, {often}, {now}"
    return f"STALLED until {format_duration(fleet.at - history.last)} ago for {format_duration(length)}, {now}"


def is_over(recent: RecentCause, fleet: Fleet) -> bool:
    """Whether nothing of a stall is left to be seen as it happens: it does not come and go, nor crawl, nor may it be on
    unheard."""
    lost = _reported_by_lost_hosts(recent.history, fleet)
    return recent.history.times == 1 and not lost and not _crawl(recent, fleet)


def _paces(recent: RecentCause, fleet: Fleet) -> tuple[list[float], list[float]]:
    """Calls per second of the ranks now, and before the stall, as far as they are known."""
    members = [rank for rank in fleet.ranks if rank.comm == recent.history.comm]
    return (
        [rank.calls_per_second for rank in members if rank.calls_per_second is not None],
        [rank.usual_calls_per_second for rank in members if rank.usual_calls_per_second],
    )


def _crawl(recent: RecentCause, fleet: Fleet) -> str:
    """That a communicator goes on at a small part of its pace before; empty: it does not, or that is not known yet."""
    rates, before = _paces(recent, fleet)
    # Until then the stall is within the time over which rates are taken.
    settled = fleet.at - recent.history.last > rate_seconds_of(fleet.scrape_seconds) + (fleet.scrape_seconds or 0.0)
    if not settled or not rates or not before or max(rates) >= _CRAWLS * max(before):
        return ""
    share = max(rates) / max(before)
    pace = f"{share:.0%}" if share >= _LEAST else f"less than {_LEAST:.0%}"
    return f"and goes on at {pace} of its former pace" if share else "and makes no calls since"


def stalled_seconds(history: StallHistory, *fleets: Fleet) -> float:
    """For how long a communicator was stalled within the window, in s: as the hosts measured it, else by scrapes."""
    told = [rank.stalled_seconds or 0.0 for fleet in fleets for rank in fleet.ranks if rank.comm == history.comm]
    longest = max(told, default=0.0)
    return longest or history.last - history.first


def describe_state_now(recent: RecentCause, fleet: Fleet) -> str:
    """As of when the evidence is, and what the ranks do now."""
    moment = datetime.fromtimestamp(recent.then.at, UTC).strftime("%H:%M:%S UTC")
    rates, before = _paces(recent, fleet)
    usual = f", {format_calls(before)} before it" if before else ""
    now = f"; now its ranks make {format_calls(rates)}{usual}" if rates else ""
    return f"what follows was so at {moment}, while it was stalled{now}"


def to_past_tense(words: str) -> str:
    """Put a sentence about now into the past tense."""
    return _VERB.sub(lambda verb: _PAST[verb[0]], words)


def describe_ended_stalls(fleet: Fleet, shown: Iterable[str]) -> Iterable[str]:
    """Sentences on stalls that are over by the last report, except those of communicators in `shown`."""
    told = {*shown, *_stalled_now(fleet)}
    over = [one for one in fleet.history if one.comm not in told and not _left_without_a_word(one)]
    for one in over[:_MOST_LINES]:
        who = "; ".join(dict.fromkeys(_saying(*said) for said in one.said[:2]))
        ended = ", and its processes have ended since" if _ended(one, fleet) else ""
        moment = datetime.fromtimestamp(one.last, UTC).strftime("%H:%M:%S UTC")
        until = "when last heard of at" if _reported_by_lost_hosts(one, fleet) else "until"
        asked = datetime.fromtimestamp(one.telling, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        yield (
            f"{name_communicator(one.comm)} {_state_of(one)} {until} {moment}, {format_duration(fleet.at - one.last)} "
            f"ago{ended}: "
            f"{who}; --time {asked} gives the verdict of then"
        )
    if len(over) > _MOST_LINES:
        yield f"{len(over) - _MOST_LINES} more were stalled within the last {format_duration(fleet.window_seconds)}"
    for brief in [one for one in fleet.brief if one.comm not in told][:_MOST_LINES]:
        yield (
            f"{name_communicator(brief.comm)} was stalled for about {format_duration(brief.seconds)} within the last "
            f"{format_duration(fleet.recent_seconds)}, between two scrapes: {brief.host} said {brief.cause}"
        )


def _recent(fleet: Fleet) -> list[StallHistory]:
    now = _stalled_now(fleet)
    return [
        one
        for one in fleet.history
        if fleet.at - one.last <= fleet.recent_seconds and one.comm not in now and not _ended(one, fleet)
    ]


def _stalled_now(fleet: Fleet) -> set[str]:
    return {rank.comm for rank in fleet.ranks if rank.stall} | {one.comm for one in fleet.reported}


def _ended(history: StallHistory, fleet: Fleet) -> bool:
    """Whether no rank is left that could wait; if unknown, one may be left."""
    ranks = [rank for rank in fleet.ranks if rank.comm == history.comm]
    if any(rank.present for rank in ranks):
        return has_ended(ranks)
    watched = {
        agent.host for agent in fleet.agents if agent.up and (agent.started is None or agent.started <= history.last)
    }
    return bool(ranks) and all(rank.host in watched for rank in ranks)


def _reported_by_lost_hosts(history: StallHistory, fleet: Fleet) -> bool:
    silent = {agent.host for agent in fleet.agents if not agent.up}
    return any(host in silent for host, _, _ in history.said)


def _state_of(history: StallHistory) -> str:
    """What a stall that is over was, as far as one knows without the verdict of then."""
    waited = history.wrote and all(stall.cause in ONLY_WAITS for _, _, stall in history.said)
    return "waited, while one of its ranks wrote to storage," if waited else "was stalled"


def _left_without_a_word(history: StallHistory) -> bool:
    """Whether it was called stalled only because its processes ended, as at the end of a job that is killed."""
    return all(stall.cause == Cause.PROCESS_GONE for _, _, stall in history.said)


def _saying(host: str, rank: str, stall: Stall) -> str:
    named = f" by {rail_name(stall.rail, stall.device, stall.netns)}" if stall.device else ""
    named = named or (f" by rank {stall.blamed_rank}" if stall.blamed_rank not in ("", rank) else "")
    whose = "" if rank in ("", UNKNOWN) else f" of rank {rank}"
    return f"{host} said {stall.cause}{whose}{named}"
