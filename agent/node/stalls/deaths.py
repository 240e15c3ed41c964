"""Tells processes that end together, as when a job is ended, from one that ends while others go on counting on it.

Whoever ends a job kills its processes on a host within milliseconds, and each takes as long to end as it has memory to
give back.  So of a process that was killed or failed nothing is said before its companions, the other processes of this
host that share a communicator with it, have had a moment to end too, or for as long as they are seen to end.  When all
have ended it was an end: whether ranks elsewhere wait for them is for their hosts to say.  A process without companions
on this host gives no sign of that kind, and is told of at once.
"""

from __future__ import annotations

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
    companions: Collection[int]
    """Pids of processes that lived then, and share a communicator with it."""
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
    """Processes that died a moment ago.  Not thread-safe: the daemon's lock guards it."""

    def __init__(self, lives: Callable[[int], bool], is_ending: Callable[[int], bool]) -> None:
        """By pid: `lives`: it has not ended; `is_ending`: it is about to, whatever it does."""
        self._lives = lives
        self._is_ending = is_ending
        self._open: dict[int, Death] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def instances(self) -> Iterable[int]:
        """Communicators of those of which nothing is said yet."""
        return (rank.instance for death in self._open.values() for rank in death.ranks)

    def add(self, death: Death) -> bool:
        """Keep a death until more is known; False: it has nobody to be held against, and nothing more will be."""
        one_of_them = any(death.pid in other.companions for other in self._open.values())
        if not death.companions and not one_of_them:
            return False
        self._open[death.pid] = death
        return True

    def settle(self, now_ns: int) -> Settled:
        """Those of which it is known by now whether others go on; each is returned once."""
        alone, together = [], []
        for death in self._open.values():
            left = [pid for pid in death.companions if self._lives(pid)]
            age_ns = now_ns - death.died_ns
            if not left:
                together.append(death)
            elif age_ns >= _LONGEST_END_NS or (age_ns >= TOGETHER_NS and not all(map(self._is_ending, left))):
                alone.append(death)
        for death in (*alone, *together):
            del self._open[death.pid]
        return Settled(tuple(alone), tuple(together))
