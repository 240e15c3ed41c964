"""Findings on rails that are merely slow, or lose packets, while everything goes on.

Nobody waits for one rank, and no host calls it a stall: operations take longer on all ranks of every ring through the
rail.  Both ends of a slow way have data under way for longer: of one rail number the end with a queue is named, and
where no end has one, both are, as what the slow way is between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from railscope.agent.cluster.fleet.facts import Fleet, Rail, SlowRail
from railscope.agent.cluster.fleet.slow_rails import QUEUE_BYTES
from railscope.agent.cluster.verdict.advice import next_steps
from railscope.agent.cluster.verdict.culprits import Culprit
from railscope.agent.cluster.verdict.finding import Finding
from railscope.agent.cluster.verdict.hardware import hardware_evidence
from railscope.agent.cluster.verdict.links import StalledCommunicator
from railscope.agent.cluster.verdict.names import WHICH_END, format_hosts, format_rail, format_rail_between
from railscope.agent.cluster.verdict.quantities import format_decimal_bytes, format_duration
from railscope.agent.cluster.verdict.verdict import by_communicator, is_stalled
from railscope.agent.facts.causes import facts_of
from railscope.agent.facts.counted import format_count

_MOST_LINES: Final = 4


def slow_rail_findings(fleet: Fleet, told: Iterable[Finding], comm: str | None) -> tuple[Finding, ...]:
    """One finding for each rail number with slow or lossy rails, of all hosts or of those of one communicator.

    `told`: findings on stalls.  Rails that these blame are left out, and those of hosts with a rank that stalls now.
    """
    blamed = {(host, device) for one in told for host in one.hosts for device in one.devices}
    stalled = {
        rank.host for ranks in by_communicator(fleet).values() if is_stalled(ranks) for rank in ranks if rank.stall
    }
    asked = {rank.host for rank in fleet.ranks if rank.comm == comm} if comm is not None else None
    planes: defaultdict[str, list[SlowRail]] = defaultdict(list)
    for one in fleet.slow_rails:
        if asked is None or one.host in asked:
            planes[one.rail].append(one)
    return tuple(
        _finding(rows, fleet)
        for rows in planes.values()
        if not any((one.host, one.device) in blamed or one.host in stalled for one in rows)
    )


def _finding(rows: Sequence[SlowRail], fleet: Fleet) -> Finding:
    worst = rows[0]
    rails = tuple(Rail(one.host, one.rail, one.device, one.netns) for one in rows)
    seconds = fleet.at - worst.slowness.since
    also = sorted({one.host for one in rows[1:]} - {worst.host})
    ends = tuple({rail.place: rail for rail in reversed(rails)}.values())[::-1]
    if len(ends) > 1 and worst.backlog_bytes < QUEUE_BYTES:
        culprit = Culprit(worst.cause, rails=ends, alike=len(ends), basis="pace", strength="weak")
        rail, seen = format_rail_between(ends), WHICH_END
    else:
        culprit = Culprit(worst.cause, rails=rails[:1], basis="pace", strength="strong")
        rail = format_rail(rails[0])
        seen = f" (and at {format_hosts(also)}, which may be its other end)" if also else ""
    words = facts_of(worst.cause).words.format(rail=rail, unnamed="")
    hardware = hardware_evidence(culprit, (rail.host for rail in rails), seconds, fleet)
    evidence = (line for one in rows[:_MOST_LINES] for line in _evidence(one, fleet))
    return Finding(
        cause=worst.cause,
        comm="",
        nranks=None,
        op="",
        seconds=seconds,
        strength=culprit.strength,
        basis="pace",
        ranks=(),
        hosts=tuple(dict.fromkeys(one.host for one in rows)),
        world_ranks=(),
        pids=(),
        rails=tuple(dict.fromkeys(one.rail for one in rows)),
        devices=tuple(dict.fromkeys(one.device for one in rows)),
        headline=f"SLOW for {format_duration(seconds)}: {words}, {_by_how_much(worst)}{seen}.",
        evidence=(*hardware.first, *evidence, *hardware.last),
        healthy=("nothing hangs: what goes through the rail goes at its pace",),
        waiting=(),
        next_steps=next_steps(StalledCommunicator("", (), culprit, (), (), None, "", seconds, ())),
        unknown=("which communicators it slows down: every ring through the rail",),
    )


def _by_how_much(one: SlowRail) -> str:
    parts = []
    if one.pace_ratio is not None:
        parts.append(f"it carries {one.pace_ratio:.0%} of what its best sibling does while it sends")
    if one.retransmitted_ratio is not None:
        parts.append(f"{one.retransmitted_ratio:.1%} of the bytes are sent again")
    return " and ".join(parts) or "less than its siblings"


def _evidence(one: SlowRail, fleet: Fleet) -> Iterable[str]:
    name = format_rail(Rail(one.host, one.rail, one.device, one.netns))
    queue = f"; {format_decimal_bytes(one.backlog_bytes)} waited in its queue" if one.backlog_bytes else ""
    yield f"{name}: {_by_how_much(one)}{queue}"
    known, length = one.slowness, format_duration(one.stretch_seconds)
    moment = datetime.fromtimestamp(known.since, UTC).strftime("%H:%M:%S UTC")
    before = ", when the window of this verdict began, or before" if one.of_window else ""
    yield (
        f"{name}: so in {known.waited} of {format_count(known.stretches, 'stretch', 'es')} of {length} in which it "
        f"sent, since {moment}, "
        f"{format_duration(fleet.at - known.since)} ago{before}"
    )
