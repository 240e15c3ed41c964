"""Tells processes that end together, as when a job is ended, from one that ends while others go on counting on it.

A batch system that ends a job kills its processes on a host within milliseconds.  Each takes as long to end as it has
memory to give back.  So of a process that was killed or failed nothing is said before its companions, the other
processes of this host that share a communicator with it, have had a moment to end too, or for as long as they are seen
to end.  When all have ended it was an end: whether ranks elsewhere wait for them is for their hosts to say.  A process
without companions on this host gives no sign of that kind, and is told of at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from railscope.agent.node.stalls.evidence import RankFacts

TOGETHER_NS: Final = 400_000_000
"""A peer that is killed alone is named within a second."""
_LONGEST_END_NS: Final = 30_000_000_000
"""Pinned memory takes seconds to give back; who takes longer hangs."""


@dataclass(frozen=True, slots=True)
class Death:
    """A process that was killed, or failed, in the middle of its work."""

    pid: int
    died_ns: int
    how: str
    """As `killed by signal 9`."""
    comms: Collection[str]
    """Names of its communicators."""
    ranks: tuple[RankFacts, ...]
    """Where it left others alone, with what was in flight."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What is known by now of processes that died."""

    alone: tuple[Death, ...]
    """Others go on."""
    together: tuple[Death, ...]
    """All companions ended, too."""


class Deaths:
    """Processes that died a moment ago.  Not thread-safe: the daemon's lock guards it.

    A job may have many communicators and processes: what is true of a communicator is found out once for all deaths.
    """

    def __init__(self) -> None:
        self._open: dict[int, Death] = {}
        """By pid."""
        self._comms: Counter[str] = Counter()
        """How many of those each communicator has."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def instances(self) -> Iterable[int]:
        """Communicators of those of which nothing is said yet."""
        return (rank.instance for death in self._open.values() for rank in death.ranks)

    def add(self, death: Death, *, accompanied: bool) -> bool:
        """Keep a death until more is known; False: no other process tells more about it.

        `accompanied`: another process of this host that was there until now shares a communicator with it.
        """
        if not accompanied and not any(comm in self._comms for comm in death.comms):
            return False
        self._open[death.pid] = death
        self._comms.update(death.comms)
        return True

    def settle(self, now_ns: int, living: Callable[[str], Iterable[int]], is_ending: Callable[[int], bool]) -> Settled:
        """Those of which it is known by now whether others go on; each is returned once.

        Args:
            now_ns: the moment.
            living: pids that have a communicator, by its name.
            is_ending: by pid, whether a process is about to end, whatever it does.
        """
        left = {comm: frozenset(living(comm)) for comm in self._comms}
        late = any(now_ns - death.died_ns >= TOGETHER_NS for death in self._open.values())
        pids = frozenset[int]().union(*left.values()) if late else frozenset[int]()
        stays = {pid for pid in pids if not is_ending(pid)}
        held = {comm for comm, those in left.items() if not stays.isdisjoint(those)}
        alone, together = [], []
        for death in self._open.values():
            age_ns = now_ns - death.died_ns
            if not any(left[comm] for comm in death.comms):
                together.append(death)
            elif age_ns >= _LONGEST_END_NS or (age_ns >= TOGETHER_NS and any(comm in held for comm in death.comms)):
                alone.append(death)
        for death in (*alone, *together):
            del self._open[death.pid]
            self._comms.subtract(death.comms)
        self._comms = +self._comms
        return Settled(tuple(alone), tuple(together))
