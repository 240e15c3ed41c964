"""The words on ranks for which the others wait in most operations: by how much, how often, since when."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from railscope.agent.cluster.fleet.facts import Fleet, SlowRank
from railscope.agent.cluster.verdict.links import StalledCommunicator
from railscope.agent.cluster.verdict.quantities import format_duration, format_short_duration
from railscope.agent.facts.counted import format_count

_MOST_RANKS: Final = 4


def slow_ranks_of(stalled: StalledCommunicator, fleet: Fleet) -> tuple[SlowRank, ...]:
    """What is known of the ranks that are blamed for the pace of a communicator, the slowest first."""
    blamed = {(rank.host, rank.rank) for rank in stalled.culprit.ranks}
    return tuple(one for one in fleet.slow if one.comm == stalled.comm and (one.host, one.rank) in blamed)


def format_amount(slow: SlowRank) -> str:
    """By how much, for a headline: `by 0.41 s each (11 times the median)`; empty: not known."""
    if slow.waited_seconds is None:
        return ""
    times = f" ({slow.times_median:.2g} times the median)" if slow.times_median is not None else ""
    return f"by {format_short_duration(slow.waited_seconds)} each{times}"


def describe_pace(stalled: StalledCommunicator, fleet: Fleet) -> Iterable[str]:
    """The evidence: for how much of their time the others wait, how often, since when."""
    for slow in slow_ranks_of(stalled, fleet)[:_MOST_RANKS]:
        name = f"rank {slow.rank}"
        each = f", {format_short_duration(slow.waited_seconds)} an operation" if slow.waited_seconds is not None else ""
        yield f"by how much: the other ranks wait for {name} for {slow.waited_ratio:.0%} of their time{each}"
        if slow.times_median is not None:
            yield (
                f"from one operation to the next {name} takes {slow.times_median:.2g} times as long as the median of "
                "the others"
            )
        known = slow.slowness
        if slow.stretch_seconds is None:
            yield (
                f"how often: of the ranks on {slow.host} it was the last to make {known.waited:,} of "
                f"{format_count(known.stretches, 'call')}; whether GPUs wait is not seen"
            )
        else:
            length = format_duration(slow.stretch_seconds)
            yield (
                f"how often: in {known.waited} of {format_count(known.stretches, 'stretch', 'es')} of {length} in "
                "which "
                f"operations completed, {format_count(round(known.operations), 'operation')} in all"
            )
        moment = datetime.fromtimestamp(known.since, UTC).strftime("%H:%M:%S UTC")
        before = ", when the window of this verdict began, or before" if slow.of_window else ""
        yield f"since when: {moment}, {format_duration(fleet.at - known.since)} ago{before}"
