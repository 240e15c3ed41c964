"""Transfers of libraries other than NCCL, as snapshots and faces know them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from railscope.agent.facts.histogram import Histogram


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
    """What a process did with one peer, or with all whose names are not known."""

    library: str
    op: str
    direction: str
    """As of `TransferTotal`."""
    pid: int
    peer: str
    """As the library calls it; empty: those without a name, and those beyond the busiest."""
    operations: int
    payload_bytes: int | None
    completed: int
    """Without failures."""
    failed: int
    seconds: float
    """Sum of the durations of those that completed without failure."""
    durations: Histogram | None
    """Of those, in seconds; None: none has completed."""
    life: int = 0
    """Tells processes apart that had the same pid, one after the other."""
    netns: str = ""
    """Network namespace of the process, as communicators have it; empty: the agent's own, or not known."""


@dataclass(frozen=True, slots=True)
class TransferUnderWay:
    """Operations of one kind that a process has under way with one peer, or with all whose names are not known."""

    library: str
    op: str
    pid: int
    count: int
    oldest_seconds: float
    peer: str
    """As the library calls it; empty: not known."""


@dataclass(frozen=True, slots=True)
class NodeTransfers:
    """Transfers of this node's programs; built by agent/node/transfers."""

    totals: tuple[TransferTotal, ...] = ()
    under_way: tuple[TransferUnderWay, ...] = ()
    """The oldest first."""
    by_peer: tuple[PeerTransfers, ...] = ()
    """Of processes that run, by peer, the busiest first.  Of a process and operation all are there or none."""
    ended: Mapping[int, tuple[PeerTransfers, ...]] = field(default_factory=dict)
    """All of a process and operation together, of the processes that ended last, by how many of these there were
    before, the latest last; `pid` may be another's by now."""
    ended_count: int = 0
    """How many of these there were so far, those that are not told of any more included."""
    most_peers: int = 0
    """Of each process that become series, the busiest of those that have a name."""
    probed: tuple[tuple[str, str, bool], ...] = ()
    """(file, library in it, whether probes are on it)."""

    def shown_peers(self) -> Iterator[PeerTransfers]:
        """Those of `by_peer` that become series."""
        of_process: Counter[int] = Counter()
        for one in self.by_peer:
            if one.peer and of_process[one.pid] < self.most_peers:
                of_process[one.pid] += 1
                yield one
