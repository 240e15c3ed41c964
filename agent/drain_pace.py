"""When to read the kernel's rings again: soon enough that a burst fits in, and no sooner.

A look at a ring costs some hundred microseconds, however little is in it.  So the pause is as long as the ring takes to
fill to a part of its size, at the rate at which it filled just now: what remains is room for a burst.
"""

from __future__ import annotations

from typing import Final

SHORTEST_NS: Final = 5_000_000
LONGEST_NS: Final = 250_000_000
"""Also of a ring that was empty: 2 MiB hold what 100,000 calls a second write in that time."""
AIM: Final = 1 / 16
"""Of a ring's size: a burst may be sixteen times as fast as what came before."""


def pause_ns(fullness: float, waited_ns: int) -> int:
    """How long to leave the rings alone.

    Args:
        fullness: of the fullest ring, as it was found, of 1.
        waited_ns: since it was read before.
    """
    if not fullness:
        return LONGEST_NS
    return min(LONGEST_NS, max(SHORTEST_NS, round(AIM * waited_ns / fullness)))
