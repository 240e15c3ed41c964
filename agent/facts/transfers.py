"""Transfers of libraries other than NCCL, as snapshots and faces know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from railscope.agent.facts.snapshot import Histogram


@dataclass(frozen=True, slots=True)
class TransferTotal:
    """The node's total for one operation of a library; never falls, also when processes end."""

    library: str
    op: str
    direction: str
    """`transmit`, `receive`, `both` (a collective) or `none`."""
    operations: int
    payload_bytes: int | None
    """As arguments say; None: they do not, as of a receive."""
    unsized: int
    """Operations whose payload is not known."""
    failed: int
    unfollowed: int
    """Operations whose completion was not, or could not be, seen."""
    durations: Histogram | None
    """Seconds from the call to when its program learned that it is complete; None: no completion was seen."""


@dataclass(frozen=True, slots=True)
class PeerTransfers:
    """What a process did with one peer."""

    library: str
    op: str
    pid: int
    peer: str
    operations: int
    payload_bytes: int | None
    completed: int
    seconds: float
    """Sum of the durations of those that completed without failure."""


@dataclass(frozen=True, slots=True)
class TransferUnderWay:
    """Operations of one kind that a process has under way."""

    library: str
    op: str
    pid: int
    count: int
    oldest_seconds: float
    peer: str
    """Of the oldest; empty: not known."""


@dataclass(frozen=True, slots=True)
class NodeTransfers:
    """Transfers of this node's programs; built by agent/node/transfers."""

    totals: tuple[TransferTotal, ...] = ()
    under_way: tuple[TransferUnderWay, ...] = ()
    peers: tuple[PeerTransfers, ...] = ()
    """Of peers that have a name, the busiest first."""
    probed: tuple[tuple[str, str, bool], ...] = ()
    """(file, library in it, whether probes are on it)."""
