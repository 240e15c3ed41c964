"""Findings on transfers of libraries other than NCCL that do not complete: who waits for whom, and who is to blame."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from railscope.agent.cluster.fleet.facts import Fleet, StuckTransfer
from railscope.agent.cluster.verdict.advice import Step
from railscope.agent.cluster.verdict.finding import Finding
from railscope.agent.cluster.verdict.quantities import format_duration
from railscope.agent.cluster.verdict.recent import to_past_tense
from railscope.agent.facts.causes import HELD, About, Cause, facts_of
from railscope.agent.facts.counted import format_count

_MOST_LINES: Final = 4
_STATES: Final = {Cause.PROCESS_STOPPED: "is stopped", Cause.PROCESS_FROZEN: "is frozen by its control group"}
_End = tuple[str, str, str, str]
"""Host, cause, who is to blame, the other end."""


def stuck_transfer_findings(fleet: Fleet, comm: str | None) -> tuple[Finding, ...]:
    """One for each other end that transfers of a host wait for, the clearest and widest first.

    Where one communicator is asked for there are none: they belong to no communicator.
    """
    ends: defaultdict[_End, list[StuckTransfer]] = defaultdict(list)
    for one in fleet.stuck_transfers if comm is None else ():
        ends[one.host, one.cause, one.blamed_pid, one.peer].append(one)
    found = sorted(ends.values(), key=lambda those: (facts_of(those[0].cause).tier, -len(those), -those[0].seconds))
    return tuple(_finding(those) for those in found)


def _finding(those: Sequence[StuckTransfer]) -> Finding:
    """Of what waits for one other end, the oldest first."""
    first = those[0]
    pids = list(dict.fromkeys(one.pid for one in those if one.pid))
    who = f"process {pids[0]}" if len(pids) == 1 else format_count(len(pids), "process", "es") if pids else "a process"
    blamed = _blamed_pid(first)
    to = f" to {first.peer}" if first.peer else ""
    why = f": {held}" if (held := _held(first)) else ""
    return Finding(
        cause=first.cause,
        comm="",
        nranks=None,
        op=f"{first.library} {first.op}",
        seconds=first.seconds,
        strength="strong",
        basis="host",
        ranks=(),
        hosts=(first.host,),
        world_ranks=(),
        pids=(blamed,) if blamed else tuple(pids[:_MOST_LINES]),
        rails=(),
        devices=(),
        headline=f"STALLED: {first.library} {first.op} of {who} on {first.host}{to} does not complete, for "
        f"{format_duration(first.seconds)} so far{why}.",
        evidence=tuple(_evidence(those)),
        healthy=(),
        waiting=(),
        next_steps=tuple(_steps(first, blamed)),
        unknown=()
        if first.peer or first.evidence
        else ("the other end: the library has no name for it, and no connection tells",),
    )


def _blamed_pid(one: StuckTransfer) -> str:
    """Empty: none is known."""
    return one.blamed_pid or (one.pid if one.cause in HELD else "")


def _held(one: StuckTransfer) -> str:
    """Which process is held; empty: none is seen to be."""
    if one.cause not in HELD:
        return ""
    blamed = _blamed_pid(one)
    whose = "the process at its other end" if one.blamed_pid else "the process itself" if blamed else "a process"
    named = f" (pid {blamed})" if blamed else ""
    return f"{whose}{named} {_STATES[Cause(one.cause)]}"


def describe_past_transfers(fleet: Fleet) -> Iterator[str]:
    """Sentences on transfers that were stalls within the window, by the last report."""
    silent = {agent.host for agent in fleet.agents if not agent.up}
    for past in fleet.past_transfers[:_MOST_LINES]:
        one = past.transfer
        to = f" to {one.peer}" if one.peer else ""
        moment = datetime.fromtimestamp(past.last, UTC).strftime("%H:%M:%S UTC")
        ago = f"{moment}, {format_duration(fleet.at - past.last)} ago"
        until = f"until {ago}" if one.host not in silent else f"when {one.host} was last heard of at {ago}"
        why = f": {to_past_tense(held)}" if (held := _held(one)) else ""
        yield (
            f"{one.library} {one.op} of process {one.pid} on {one.host}{to} did not complete for "
            f"{format_duration(one.seconds)}, {until}{why}"
        )
    if len(fleet.past_transfers) > _MOST_LINES:
        more = len(fleet.past_transfers) - _MOST_LINES
        were = "was a stall" if more == 1 else "were stalls"
        yield f"{format_count(more, 'more transfer')} {were} within the last {format_duration(fleet.window_seconds)}"


def _evidence(those: Sequence[StuckTransfer]) -> Iterator[str]:
    for one in those[:_MOST_LINES]:
        if one.evidence:
            yield from (f"{one.host}: {sentence}" for sentence in one.evidence)
            continue
        to = f" to {one.peer}" if one.peer else ""
        yield (
            f"{one.host}: {one.library} {one.op} of process {one.pid}{to} is under way for "
            f"{format_duration(one.seconds)}"
        )
    if len(those) > _MOST_LINES:
        more = len(those) - _MOST_LINES
        waits = "waits" if more == 1 else "wait"
        yield f"{format_count(more, 'more transfer')} of {those[0].host} {waits} for the same"


def _steps(first: StuckTransfer, blamed: str) -> Iterator[Step]:
    """Those of the table of causes that need a process; of a rail's or a host's cause, those of any stuck transfer."""
    facts = facts_of(first.cause)
    if facts.about in (About.RAIL, About.HOST):
        facts = facts_of(Cause.TRANSFER_STUCK)
    values = {"pid": blamed or first.pid, "rank": "", "gpu": ""}
    for step in facts.now:
        if "{rank}" not in step.why and (values["pid"] or "{pid}" not in step.command):
            host = first.host if step.command else ""
            yield Step(host, step.command.format(**values), step.why.format(**values))
