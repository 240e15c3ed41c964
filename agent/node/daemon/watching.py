"""Takes the probes off calls at the level *watch*, and puts them back for a moment now and then.

At *watch* no call meets a probe where NCCL numbers its collectives (agent/node/collectives/watched.py); what makes and
ends communicators, and what tells of their errors, is probed as ever.  Payload is in no memory, nor is whether NCCL
numbers all that a communicator calls: so calls are counted for about a second in every two minutes, sooner after the
level was reached and after a communicator has begun to be used.  One that was made before the agent came is known from
the first such second on.  A library that has no numbers keeps its probes, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Set
from typing import Final, Protocol

from railscope.probes.clock import Clock
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.memory.sequence_numbers import FIRST_VERSION

_log = logging.getLogger("railscope.levels")

PERIOD_NS: Final = 120_000_000_000
"""From one moment in which calls are counted to the next."""
SOON_NS: Final = 2_000_000_000
"""From when the level was reached to the first one; the next ones come after three times as long each."""
AWAITED_NS: Final = 30_000_000_000
"""The longest wait where calls are to be counted of which none was yet."""
_LEAST_SHARE: Final = 0.9
"""Of a job's calls NCCL must number so many, or *watch* would not see it."""


class CallProbes(Protocol):
    """The libraries that are probed (agent/node/targets/libraries.py)."""

    @property
    def uncounted(self) -> frozenset[int]: ...
    def set_watched(self, numbers: Collection[int]) -> list[str]: ...


class NumberedCalls(Protocol):
    """What is known of calls without a probe (agent/node/collectives/collectives.py)."""

    def watch_libraries(self, watching: Collection[int], uncounted: Collection[int]) -> None: ...
    @property
    def awaits_counts(self) -> bool: ...
    @property
    def share_numbered(self) -> float: ...


class NumberedLibraries(Protocol):
    """The levels of the libraries (agent/node/completion/levels.py)."""

    @property
    def target_level(self) -> Level: ...
    @property
    def numbered(self) -> frozenset[int]: ...
    @property
    def unnumbered(self) -> tuple[tuple[str, str], ...]: ...


class Watching:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, probes: CallProbes, calls: NumberedCalls, levels: NumberedLibraries, clock: Clock) -> None:
        self._probes = probes
        self._calls = calls
        self._levels = levels
        self._clock = clock
        self._watching: frozenset[int] = frozenset()
        self._counted_ns = 0
        """When calls were counted last."""
        self._pause_ns = SOON_NS
        """From then to the next time."""
        self.counts_for_a_moment = False
        """Whether calls are counted at the level *watch* just now."""
        self._said: Set[tuple[str, str]] = frozenset()

    def lowest(self, *, asked: bool) -> Level:
        """*watch* where a library can do without probes on its calls, and NCCL numbers most of them.

        `asked`: a person chose *watch*, whatever it sees.
        """
        self._say_unnumbered(self._levels.unnumbered if asked else ())
        can = bool(self._levels.numbered) and (asked or self._calls.share_numbered >= _LEAST_SHARE)
        return Level.WATCH if can else Level.COUNTS

    def begin_update(self) -> None:
        """Call it before the tables are read: what is off since the last update is uncounted."""
        self._calls.watch_libraries(self._watching, self._probes.uncounted)

    def follow(self) -> list[str]:
        """Bring the probes on calls to what the level asks for; returns errors, one line each."""
        now_ns = self._clock.monotonic_ns()
        watch = self._levels.target_level is Level.WATCH
        watching = self._levels.numbered if watch else frozenset()
        if watching and not self._watching:
            self._counted_ns, self._pause_ns = now_ns, SOON_NS
        self._watching = watching
        self.counts_for_a_moment = bool(watching) and not self.counts_for_a_moment and self._is_due(now_ns)
        if self.counts_for_a_moment:
            self._counted_ns, self._pause_ns = now_ns, min(3 * self._pause_ns, PERIOD_NS)
        off = frozenset() if self.counts_for_a_moment else watching
        # Before any probe is back: what it counts is not to be taken for uncounted.
        self._calls.watch_libraries(watching, self._probes.uncounted & off)
        return self._probes.set_watched(off)

    def _is_due(self, now_ns: int) -> bool:
        pause_ns = min(self._pause_ns, AWAITED_NS) if self._calls.awaits_counts else self._pause_ns
        return now_ns - self._counted_ns >= pause_ns

    def _say_unnumbered(self, libraries: Collection[tuple[str, str]]) -> None:
        for path, version in sorted(set(libraries) - self._said):
            _log.warning(
                "%s: its calls are counted although the level is watch: NCCL %s, or this build of it, does not tell "
                "how many collectives a communicator launched (listed builds of %s and newer do)",
                path,
                version,
                ".".join(map(str, FIRST_VERSION)),
            )
        self._said = frozenset(libraries)
