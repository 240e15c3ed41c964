"""What bounds the steps of a job: communication, a straggler, computation, input; and what of it cannot be told.

The one home of these words: `railscope top`, `diagnose --job`, the dashboard *Job* and `report` say them.

A step's time has shares.  Waiting for the slowest rank is of no use to anybody: a straggler bounds the job where much
is lost so.  Communication bounds it where an operation is under way for longer than not; what of that is overlapped
with computation only a trace of the GPU tells.  While no operation is under way a GPU computes, or waits for its input:
without a trace of the GPU these are one share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self

LEAST_WAITING: Final = 0.1
"""Of a step: so much waiting is named before what is larger, as it can be got rid of."""
SURE: Final = 0.5
"""A share that is at least as large as all others that could be it together."""
_WORTH: Final = 0.005
"""Smaller shares are not told of."""
_STATES: Final = {
    "start": "before the first step",
    "restart": "until it began again",
    "stalled": "lost to stalls",
    "checkpoint": "writing checkpoints",
    "other": "other, such as evaluations and pauses",
}
"""What follows the time that a job spent so (`railscope_job_time_seconds`), by state; of `steps` a share is told."""


class Bound(StrEnum):
    """What a job is bound by."""

    STRAGGLER = "a straggler"
    COMMUNICATION = "communication"
    COMPUTATION = "computation"
    INPUT = "input"
    COMPUTATION_OR_INPUT = "computation or input"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StepShares:
    """Shares of a step's time, each 0 to 1; together 1 but for rounding."""

    waiting: float | None
    """For the slowest rank of a communicator; None: no ranks are compared, and it is among the others."""
    communication: float
    """An operation was under way otherwise: where `hidden_known`, and nothing was computed meanwhile."""
    computation: float
    """The GPU computed; 0 where no trace tells."""
    idle: float
    """No operation was under way, and the GPU did not compute, or no trace tells whether it did."""
    unknown: float
    """Communication or computation: completions are not seen."""
    hidden_known: bool
    """A trace of the GPU tells what was computed."""

    @classmethod
    def from_parts(cls, seconds: Mapping[str, float]) -> Self | None:
        """Of what agents tell (`railscope_job_step_part_seconds_total`, by part); None: nothing is known."""
        whole = sum(seconds.values())
        if whole <= 0:
            return None
        share = {part: value / whole for part, value in seconds.items()}
        return cls(
            waiting=share.get("waiting"),
            communication=share.get("communication", 0.0),
            computation=0.0,
            idle=share.get("between", 0.0) + share.get("silent", 0.0),
            unknown=share.get("unknown", 0.0),
            hidden_known=False,
        )

    def with_waiting(self, of_communication: float) -> StepShares:
        """The same where so much of the communication, 0 to 1, was waiting, unless more is known to have been."""
        whole = self.communication + (self.waiting or 0.0)
        waiting = max(self.waiting or 0.0, min(1.0, of_communication) * whole)
        return replace(self, waiting=waiting, communication=whole - waiting)


def find_bound(shares: StepShares) -> Bound:
    """What bounds the job, where one thing is as much as all others together or a straggler is waited for."""
    waiting = shares.waiting or 0.0
    if waiting >= LEAST_WAITING and waiting >= shares.communication / 2:
        return Bound.STRAGGLER
    if shares.communication + waiting >= SURE:
        return Bound.COMMUNICATION
    if not shares.hidden_known:
        return Bound.COMPUTATION_OR_INPUT if shares.idle >= SURE else Bound.UNKNOWN
    if shares.computation >= SURE:
        return Bound.COMPUTATION
    return Bound.INPUT if shares.idle >= SURE else Bound.UNKNOWN


def describe_bound(shares: StepShares, awaited: str = "") -> tuple[str, ...]:
    """The verdict in sentences, the most important first; the second has the shares of a step.

    Args:
        shares: of the job's steps.
        awaited: who is waited for most, as in `rank 3 on node7`; empty: unknown.
    """
    slowest = awaited or "the slowest rank"
    first = _verdict(shares, slowest)
    parts = [
        (shares.waiting, f"waiting for {slowest}"),
        (shares.communication, "communication that is not overlapped" if shares.hidden_known else "communication"),
        (shares.computation, "computation"),
        (shares.idle, "neither" if shares.hidden_known else "computation or input"),
        (shares.unknown, "communication or computation"),
    ]
    told = [f"{_share(share)} {what}" for share, what in parts if share is not None and share >= _WORTH]
    sentences = [first, f"Of a step: {', '.join(told)}."]
    if shares.waiting is None:
        sentences.append("Whether ranks wait for a slow one is not known: no two of them are compared.")
    if shares.unknown >= _WORTH:
        sentences.append(
            f"In {_share(shares.unknown)} of a step communication and computation cannot be told apart: completions "
            "are not seen of all communicators."
        )
    if not shares.hidden_known and shares.communication >= _WORTH:
        sentences.append(
            f"How much of the {_share(shares.communication)} is overlapped with computation cannot be told without a "
            "trace of the GPU."
        )
    return tuple(sentences)


def describe_goodput(spent_seconds: Mapping[str, float], format_time: Callable[[float], str]) -> str:
    """What a job's time went into since it began, in a sentence; empty: nothing is known.

    Args:
        spent_seconds: as in `railscope_job_time_seconds`, by state.
        format_time: seconds as the reader's other texts write them.
    """
    whole = sum(spent_seconds.values())
    if whole <= 0:
        return ""
    rest = sorted(((seconds, state) for state, seconds in spent_seconds.items() if state != "steps"), reverse=True)
    lost = [f"{format_time(seconds)} {_STATES.get(state, state)}" for seconds, state in rest if seconds >= 1]
    took = f"; the rest was {', '.join(lost)}" if lost else ""
    steps = _share(spent_seconds.get("steps", 0.0) / whole)
    return f"The job began {format_time(whole)} ago; steps took {steps} of that time{took}."


def describe_bound_briefly(shares: StepShares) -> str:
    """The verdict as what follows the length of a step, with the share that cannot be told."""
    bound = find_bound(shares)
    if bound is Bound.UNKNOWN:
        told = "what bounds it cannot be told" if shares.unknown >= _WORTH else "nothing is half of it"
    elif bound is Bound.STRAGGLER:
        told = f"bound by {bound}: ranks wait {_share(shares.waiting)} of it"
    else:
        told = f"bound by {bound}, {_share(_share_of(bound, shares))} of it"
    if shares.unknown >= _WORTH:
        told += f"; {_share(shares.unknown)} is communication or computation"
    return told


def _verdict(shares: StepShares, slowest: str) -> str:
    bound = find_bound(shares)
    share = _share(_share_of(bound, shares))
    match bound:
        case Bound.STRAGGLER:
            return f"The job is bound by a straggler: ranks wait {share} of a step for {slowest}."
        case Bound.COMMUNICATION if shares.hidden_known:
            return f"The job is bound by communication: computation does not hide it for {share} of a step."
        case Bound.COMMUNICATION:
            return f"The job is bound by communication: operations are under way for {share} of a step."
        case Bound.COMPUTATION:
            return f"The job is bound by computation: the GPU computes for {share} of a step."
        case Bound.INPUT:
            return f"The job is bound by input: the GPU neither computes nor communicates for {share} of a step."
        case Bound.COMPUTATION_OR_INPUT:
            return f"The job is bound by computation or input: no operation is under way for {share} of a step."
        case _ if shares.unknown >= SURE:
            return "What bounds the job cannot be told: completions are not seen of all its communicators."
    return "No single thing bounds the job: nothing is half of a step."


def _share_of(bound: Bound, shares: StepShares) -> float | None:
    match bound:
        case Bound.STRAGGLER:
            return shares.waiting
        case Bound.COMMUNICATION:
            return shares.communication + (shares.waiting or 0.0)
        case Bound.COMPUTATION:
            return shares.computation
        case Bound.INPUT | Bound.COMPUTATION_OR_INPUT:
            return shares.idle
    return None


def _share(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.0f} %"
