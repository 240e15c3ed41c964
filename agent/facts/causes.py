"""Causes of a stall: the one table from which verdicts and recording rules take their order.

Causes stand in the order of their evidence, best first: how little each leaves open.  A host speaks of its own ranks
only, so what it calls `rank_behind` says no more than that its rank waits; that a rank did not enter the operation that
the others wait in shows where the sequences of all ranks are compared, in `railscope diagnose` and in the recording
rules, and is better evidence than a GPU that does not progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final


class Cause(StrEnum):
    """Why an operation stalls, best evidence first."""

    PROCESS_GONE = "process_gone"
    """A process of the communicator has ended."""
    PROCESS_STOPPED = "process_stopped"
    """A process is stopped, by SIGSTOP or a debugger."""
    RAIL_DOWN = "rail_down"
    """A rail has no carrier, or is switched off."""
    RAIL_FILTERED = "rail_filtered"
    """Packets on a rail are dropped on the way or at its other end."""
    RAIL_LOSSY = "rail_lossy"
    """A rail loses packets."""
    RAIL_SLOW = "rail_slow"
    """A rail is slow beside its siblings."""
    WRITING = "writing"
    """The others wait for a rank that writes to storage: no fault."""
    GPU_NOT_PROGRESSING = "gpu_not_progressing"
    """A rank's GPU has not begun with the operation."""
    RANK_BEHIND = "rank_behind"
    """A rank has not entered the operation that the others wait in."""
    RANK_MISSING = "rank_missing"
    """No agent sees a rank of the communicator."""
    UNSEEN = "unseen"
    """Operations run that railscope does not see."""
    UNKNOWN = "unknown"
    """Nothing stands out."""


class Tier(IntEnum):
    """Kinds of evidence; within a tier the order of `Cause` decides."""

    PLAIN = 0
    """A process or a link is seen to be as it is."""
    RAIL = 1
    WRITING = 2
    SEQUENCE = 3
    """The sequences of all ranks show who did not enter the operation that the others wait in."""
    GPU = 4
    HINT = 5
    """A host says that its rank waits for another."""
    MISSING = 6
    UNSEEN = 7
    UNKNOWN = 8


@dataclass(frozen=True, slots=True)
class CauseFacts:
    """How good the evidence for a cause is, and who tells of it."""

    tier: Tier
    """Of the cause as a host tells of it; for the fleet's own causes, as the fleet shows it."""
    by_host: bool
    """A host tells of it (`comm_stalled`); else only `railscope diagnose` does, which sees all hosts."""


CAUSES: Final[Mapping[Cause, CauseFacts]] = {
    Cause.PROCESS_GONE: CauseFacts(Tier.PLAIN, True),
    Cause.PROCESS_STOPPED: CauseFacts(Tier.PLAIN, True),
    Cause.RAIL_DOWN: CauseFacts(Tier.PLAIN, True),
    Cause.RAIL_FILTERED: CauseFacts(Tier.RAIL, True),
    Cause.RAIL_LOSSY: CauseFacts(Tier.RAIL, True),
    Cause.RAIL_SLOW: CauseFacts(Tier.RAIL, True),
    Cause.WRITING: CauseFacts(Tier.WRITING, False),
    Cause.GPU_NOT_PROGRESSING: CauseFacts(Tier.GPU, True),
    Cause.RANK_BEHIND: CauseFacts(Tier.HINT, True),
    Cause.RANK_MISSING: CauseFacts(Tier.MISSING, False),
    Cause.UNSEEN: CauseFacts(Tier.UNSEEN, True),
    Cause.UNKNOWN: CauseFacts(Tier.UNKNOWN, True),
}


def tier_of(cause: str, *, by_sequence: bool = False) -> Tier:
    """How good the evidence for a cause is; one that is not in the table, as of a newer agent, ranks with `unknown`.

    Args:
        cause: a value of `Cause`.
        by_sequence: the sequences of all ranks show it.
    """
    if by_sequence and cause == Cause.RANK_BEHIND:
        return Tier.SEQUENCE
    try:
        return CAUSES[Cause(cause)].tier
    except ValueError:
        return Tier.UNKNOWN
