"""How a rail is, in a line, and which rails nobody blames."""

from __future__ import annotations

from collections.abc import Iterable

from railscope.agent.cluster.fleet.facts import Fleet, Rail
from railscope.agent.cluster.verdict.culprits import Culprit
from railscope.agent.cluster.verdict.names import format_rail
from railscope.agent.cluster.verdict.quantities import format_decimal_bytes, format_rate
from railscope.agent.facts.counted import format_count


def describe_rail_state(rail: Rail) -> str:
    """One rail's state in a line."""
    words = [] if rail.up is None else ["up" if rail.up else "DOWN"]
    if rail.transmit is not None and rail.up is not False:  # the rate is that of the last seconds, as it was up
        usual = f" (at most {format_rate(rail.usual_transmit)} before)" if rail.usual_transmit else ""
        speed = f" of {format_rate(rail.speed)}" if rail.speed else ""
        words.append(f"sends {format_rate(rail.transmit)}{speed}{usual}")
    if rail.backlog_bytes is not None:
        up_to = "up to " if rail.backlog_bytes else ""
        words.append(f"{up_to}{format_decimal_bytes(rail.backlog_bytes)} wait in its queue")
    if rail.round_trip_seconds is not None:
        words.append(f"round trip {rail.round_trip_seconds * 1000:.3g} ms")
    if rail.retransmitted_ratio is not None:
        words.append(f"{rail.retransmitted_ratio:.2%} sent again")
    if rail.unacknowledged_segments:
        words.append(f"{format_count(round(rail.unacknowledged_segments), 'segment')} not acknowledged")
    if rail.mute and rail.unsent_bytes:
        words.append(f"{format_decimal_bytes(rail.unsent_bytes)} were never sent")
    words += [f"{counter} +{increase:,.0f}" for counter, _, increase in rail.events[:3]]
    return f"{format_rail(rail)}: {', '.join(words) or 'nothing is known of it but what its host says'}"


def rails_that_nobody_blames(fleet: Fleet, culprits: Iterable[Culprit]) -> list[Rail]:
    """Rails that may be healthy: up, and blamed by no host and no finding.

    Where others have no unacknowledged segments, one that has some is none of them.  `culprits`: all that is found of
    a stall.
    """
    found = [rail for culprit in culprits for rail in culprit.rails]
    blamed = {(rail.host, rail.device) for rail in found}
    blamed |= {(rail.host, rail.device) for rail in fleet.slow_rails}
    blamed |= {(rank.host, rank.stall.device) for rank in fleet.ranks if rank.stall and rank.stall.device}
    others_have_answers = any(rail.unacknowledged_segments == 0 for rail in fleet.rails)
    return [
        rail
        for rail in fleet.rails
        if (rail.host, rail.device) not in blamed
        and rail.up is not False
        and not (others_have_answers and rail.unacknowledged_segments)
    ]
