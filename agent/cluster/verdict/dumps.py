"""The verdict on files of a job that hangs, in the words and with the causes of the one on a live fleet.

The evidence is weighed as of ranks that a store tells of (agent/cluster/verdict/culprits.py).  Files say more of the
operation itself: its number, which ranks did not call it, and what each of the others called it with; that is the first
line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from railscope.agent.cluster.fleet.dumps import Dumps, WaitedCollective
from railscope.agent.cluster.fleet.facts import Fleet
from railscope.agent.cluster.verdict.advice import Step, next_steps
from railscope.agent.cluster.verdict.culprits import missing_ranks
from railscope.agent.cluster.verdict.finding import Finding, Verdict
from railscope.agent.cluster.verdict.quantities import format_rank_numbers
from railscope.agent.cluster.verdict.stuck_transfers import stuck_transfer_findings
from railscope.agent.cluster.verdict.verdict import RootCause, find_root_causes
from railscope.agent.cluster.verdict.words import describe_root_cause, more_findings, what_of
from railscope.agent.facts.causes import Cause

_MOMENTARY: Final = (
    "ranks were asked once, and not all at one moment: of a job that goes on they may be a few operations apart; ask "
    "again and give both answers"
)
_NOT_COMPARED: Final = "these files do not tell of every operation whether it completed"
_WHEN: Final = "dumps do not say when they were made: of a job that goes on they show operations under way, too"


def make_dump_verdict(dumps: Dumps, comm: str | None = None) -> Verdict:
    """The verdict on what files tell; `comm`: only of communicators whose name begins so."""
    ranks = tuple(rank for rank in dumps.ranks if comm is None or rank.comm.startswith(comm))
    comms = {rank.comm for rank in ranks}
    fleet = Fleet(dumps.at, 0.0, None, (), ranks, communicators=len(comms), stuck_transfers=dumps.stuck_transfers)
    of_ranks = (_finding(cause, fleet, dumps) for cause in find_root_causes(fleet, afterwards=True))
    findings = (*of_ranks, *stuck_transfer_findings(fleet, comm))
    told = " and ".join(dumps.told) or "these files"
    unseen = [*dumps.lacking, *dumps.open]
    if findings:
        headline = more_findings(findings)
    elif not ranks:
        headline = f"Unknown whether anything is stalled: {told} tell of no communicator."
    elif unseen or not dumps.tells_completion:
        headline = f"No stall is seen in {told}; {'; '.join(unseen or [_NOT_COMPARED])}."
    else:
        many = f"{len(comms)} communicators" if len(comms) > 1 else "the only communicator"
        headline = f"No stall: every operation on {many} is complete in {told}."
    return Verdict(
        dumps.at,
        bool(findings),
        headline,
        findings,
        notes=dumps.notes,
        answered=dumps.tells_completion and bool(ranks) and not dumps.open,
        unknown=() if findings else tuple(unseen),
        ranks_seen=not dumps.lacking,
        clock="of the latest entry in these files",
    )


def _finding(cause: RootCause, fleet: Fleet, dumps: Dumps) -> Finding:
    found = describe_root_cause(cause, fleet)
    name = dumps.name_of(found.comm)
    waited = next((one for one in dumps.waited if one.comm == found.comm), None)
    said = what_of(cause)
    evidence = list(found.evidence)
    weak = dumps.momentary
    if waited is None:
        headline = found.headline.removesuffix(".")
    else:
        headline = f"STALLED: {name}: {_waited(waited, cause)}"
        evidence.insert(1, said)
        if waited.since is not None:
            moment = datetime.fromtimestamp(waited.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            evidence.insert(2, f"{_called(waited)} was first called at {moment}")
    if weak and " (weak evidence)" not in headline:
        headline += " (weak evidence)"
    return replace(
        found,
        headline=f"{headline}.",
        evidence=tuple(evidence),
        strength="weak" if weak else found.strength,
        next_steps=tuple(_steps(cause)),
        unknown=tuple(_unknown(cause, dumps)),
    )


def _steps(cause: RootCause) -> Iterable[Step]:
    """What to do next: of each cause that was found beside the first as well, as both are in the first line."""
    stalled = cause.stalled
    late = [one for one in stalled.others if one.cause == Cause.RANK_BEHIND and one.basis == "sequence"]
    steps = [step for culprit in (stalled.culprit, *late) for step in next_steps(replace(stalled, culprit=culprit))]
    return dict.fromkeys(steps)


def _called(waited: WaitedCollective) -> str:
    return f"{waited.op or 'collective'} {waited.number}"


def _waited(waited: WaitedCollective, cause: RootCause) -> str:
    """`AllReduce 7 unfinished, rank 2 missing, rank 3 has 8,192 B against 4,096 B`."""
    stalled = cause.stalled
    parts = [f"{_called(waited)} unfinished"]
    late = {
        rank.rank
        for culprit in (stalled.culprit, *stalled.others)
        if culprit.cause == Cause.RANK_BEHIND and culprit.basis == "sequence"
        for rank in culprit.ranks
    }
    in_job = {rank.rank: rank.world_rank for rank in stalled.ranks if rank.world_rank}
    if late:
        parts.append(f"{_name(late, in_job)} missing")
    parts += _differences(waited, in_job)
    if unseen := missing_ranks(stalled.ranks):
        parts.append(f"no word of {format_rank_numbers(unseen)}")
    if len(parts) == 1:
        parts.append("all ranks called it alike")
    return ", ".join(parts)


def _name(ranks: Collection[str], in_job: Mapping[str, str]) -> str:
    """`ranks 2-3`; of a communicator of some ranks of the job `rank 13 of the job`, as its log numbers them."""
    numbers = [in_job.get(rank, "") for rank in ranks]
    if "" in numbers or all(in_job[rank] == rank for rank in in_job):
        return format_rank_numbers(ranks)
    return f"{format_rank_numbers(numbers)} of the job"


def _differences(waited: WaitedCollective, in_job: Mapping[str, str]) -> Iterable[str]:
    """Who called it otherwise than most, by operation, size or data type."""
    shapes = Counter((op, payload, kind) for _, op, payload, kind in waited.made)
    if len(shapes) < 2:
        return
    # Of equally many, those with the lowest rank.
    (op, payload, kind), _ = shapes.most_common(1)[0]
    others: dict[str, list[str]] = {}
    for rank, own_op, own_payload, own_kind in waited.made:
        if own_op != op:
            said = f"{own_op} against {op}"
        elif own_payload != payload:
            said = f"{_bytes(own_payload)} against {_bytes(payload)}"
        elif own_kind != kind:
            said = f"{own_kind} against {kind}"
        else:
            continue
        others.setdefault(said, []).append(str(rank))
    for said, ranks in others.items():
        yield f"{_name(ranks, in_job)} {'has' if len(ranks) == 1 else 'have'} {said}"


def _bytes(payload: int | None) -> str:
    return "an unknown size" if payload is None else f"{payload:,} B"


def _unknown(cause: RootCause, dumps: Dumps) -> Iterable[str]:
    yield from dumps.lacking
    yield from dumps.open
    if dumps.momentary:
        yield _MOMENTARY
    elif any(one.comm == cause.stalled.comm for one in dumps.waited):
        yield _WHEN
    if cause.stalled.nranks is None:
        yield "how many ranks the communicator has is not known, so some may be missing"
