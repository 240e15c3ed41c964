"""How late the agent's loop is, and ever was.

Late is the loop that wakes after the moment that its schedule wanted, and the loop that does not come to wait again:
the time of a whole turn counts, since whatever becomes due meanwhile waits for it.  The daemon's health check, the
watchdog of systemd and `railscope_loop_late_seconds` all go by this.
"""

from __future__ import annotations

from typing import Final

from railscope.agent.facts.snapshot import LoopFacts
from railscope.probes.clock import Clock

_MINUTE_NS: Final = 60_000_000_000
_RECENT_MINUTES: Final = 5


class LoopLateness:
    """The loop's thread tells it when it waits and wakes; any thread may ask."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_ns = clock.monotonic_ns()
        """Since when the loop is late, or will be: the moment that it wants to wake, or that its turn began."""
        self._begun = False
        self._ever_ns = 0
        self._recent: tuple[tuple[int, int], ...] = ()
        """By minute of the monotonic clock, the last ones: the longest; replaced as a whole, never changed."""

    def begin(self) -> None:
        """The loop begins: what took long before it, such as attaching to running processes, made nothing late."""
        self._begun = True
        self._due_ns = self._clock.monotonic_ns()

    def wait(self, until_ns: int) -> int:
        """A turn ends, and the loop waits until then (monotonic); returns now."""
        now_ns = self._record()
        self._due_ns = max(now_ns, until_ns)
        return now_ns

    def wake(self) -> int:
        """The loop wakes, and a turn begins; returns now."""
        self._due_ns = now_ns = self._record()
        return now_ns

    @property
    def now_ns(self) -> int:
        """How late the loop is at this moment; 0: it is not."""
        return max(0, self._clock.monotonic_ns() - self._due_ns)

    def facts(self) -> LoopFacts:
        """The longest that it was late, ever and within the last minutes, what goes on now included."""
        late_ns = self.now_ns if self._begun else 0
        oldest = self._clock.monotonic_ns() // _MINUTE_NS - _RECENT_MINUTES
        recent_ns = max((longest for minute, longest in self._recent if minute > oldest), default=0)
        return LoopFacts(max(self._ever_ns, late_ns) / 1e9, max(recent_ns, late_ns) / 1e9)

    def _record(self) -> int:
        now_ns = self._clock.monotonic_ns()
        late_ns = now_ns - self._due_ns
        self._ever_ns = max(self._ever_ns, late_ns)
        minute = now_ns // _MINUTE_NS
        if not self._recent or self._recent[-1][0] != minute:
            self._recent = (*self._recent[1 - _RECENT_MINUTES :], (minute, max(0, late_ns)))
        elif late_ns > self._recent[-1][1]:
            self._recent = (*self._recent[:-1], (minute, late_ns))
        return now_ns
