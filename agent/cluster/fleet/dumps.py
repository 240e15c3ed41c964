"""What files of a job tell of its ranks at one moment: dumps of a framework, NCCL's own report, an agent's recordings.

The same facts that a store tells (agent/cluster/fleet/facts.py), without hosts and processes where files do not name
them, and with what a dump knows better: which collective each rank waits in, and what it was called with.  The readers
of files are above (agent/imports/hangs.py); agent/cluster/verdict/dumps.py concludes.
"""

from __future__ import annotations

from dataclasses import dataclass

from railscope.agent.cluster.fleet.facts import Rank, StuckTransfer


@dataclass(frozen=True, slots=True)
class WaitedCollective:
    """The first collective of a communicator that some rank did not complete."""

    comm: str
    number: int
    op: str
    """As most ranks called it; empty: no rank's entry is left of it."""
    made: tuple[tuple[int, str, int | None, str], ...]
    """Rank, operation, payload in bytes and data type, of each rank that called it."""
    since: float | None = None
    """When the first rank called it, seconds since the Unix epoch."""


@dataclass(frozen=True, slots=True)
class Dumps:
    """Everything that the files tell together."""

    at: float
    """When the latest of it was, seconds since the Unix epoch."""
    ranks: tuple[Rank, ...]
    """Of every communicator."""
    names: tuple[tuple[str, str], ...] = ()
    """What a framework calls a communicator, by its name here."""
    waited: tuple[WaitedCollective, ...] = ()
    told: tuple[str, ...] = ()
    """What there is, in words: `4 dumps of PyTorch's flight recorder`."""
    lacking: tuple[str, ...] = ()
    """What is not there, in words: `no dump of ranks 4-7`."""
    open: tuple[str, ...] = ()
    """What these files cannot tell, in words, and why."""
    tells_completion: bool = True
    """Whether they would show an operation that does not complete."""
    momentary: bool = False
    """Ranks were asked once, and not all at one moment: of a job that goes on, they may be a few operations apart."""
    notes: tuple[str, ...] = ()
    """What was left out."""
    stuck_transfers: tuple[StuckTransfer, ...] = ()
    """Of libraries other than NCCL, the oldest first."""

    def name_of(self, comm: str) -> str:
        """A communicator as people know it: `default_pg (pg-0-1a2b3c4d)`."""
        name = dict(self.names).get(comm, "")
        return f"{name} ({comm})" if name else comm
