"""How often the agent does what nobody waits for: seldom while all is as it was, at once where something changes.

To relate bytes, to judge what probes cost, and to read drivers, queues and connections takes most of the agent's time.
A job that has run alike for ten seconds will as a rule do so for the next four, and where its threads keep every core
busy it loses the agent's time and more.  What is looked for without being told, operations that stall, is looked for
as often as ever, and so are byte counters.

What ends the calm: a communicator, process or link that comes or goes, a ring that fills much faster, a rank that is
suspected, a probe budget that is used up, bytes whose moments do not settle, and somebody who asks every two seconds.

No clock and no probes in here: moments come in.
"""

from __future__ import annotations

from collections import deque
from typing import Final

BRISK_NS: Final = 1_000_000_000
CALM_NS: Final = 4_000_000_000
STEADY_NS: Final = 10_000_000_000
"""Nothing has changed for so long where all is calm."""
FOLLOWED_NS: Final = 4_500_000_000
"""Whoever asks so many times within this time follows what happens: not two Prometheus servers that scrape every five
seconds or more seldom, one right after the other."""
_ASKED: Final = 3


class Pace:
    """Not thread-safe but for `asked`, which whoever asks calls from a thread of its own."""

    def __init__(self, now_ns: int) -> None:
        self._disturbed_ns = self._followed_ns = now_ns
        self._asked_ns: deque[int] = deque(maxlen=_ASKED)
        self.why = "the agent has just come"
        """What was not as it was, last, in words for the log."""

    def disturb(self, now_ns: int, what: str) -> None:
        """Something is not as it was."""
        self._disturbed_ns = now_ns
        self.why = what

    def asked(self, now_ns: int) -> None:
        """Somebody was shown what is known."""
        self._asked_ns.append(now_ns)
        if len(self._asked_ns) == _ASKED and now_ns - self._asked_ns[0] <= FOLLOWED_NS:
            self._followed_ns = now_ns
            self.why = "somebody asks again and again"

    def calm(self, now_ns: int) -> bool:
        """Whether all has been as it was for long enough, and nobody follows it."""
        return now_ns - max(self._disturbed_ns, self._followed_ns) >= STEADY_NS
