"""When to read the kernel's rings again: soon enough that a burst fits in, and no sooner.

A look at a ring costs some hundred microseconds, however little is in it.  So the pause is as long as the ring takes to
fill to a part of its size, at the rate at which it filled just now: what remains is room for a burst.  Somebody who
calls now and then may call a hundred thousand times in the next moment: a ring that is in use is never left alone for
as long as an empty one.  Where there is no communicator nobody can call: the first call of one that nobody knows wakes
the reader by itself (write_lifecycle() in probes/bpf/communicators.h).
"""

from __future__ import annotations

from typing import Final

SHORTEST_NS: Final = 5_000_000
LONGEST_NS: Final = 50_000_000
"""Of a ring that is in use: 2 MiB hold what 580,000 calls a second write in that time."""
EMPTY_NS: Final = 250_000_000
"""Of one that was empty."""
UNUSED_NS: Final = 2_000_000_000
"""Of one that was empty, without a communicator."""
AIM: Final = 1 / 16
"""Of a ring's size: a burst may be sixteen times as fast as what came before."""


def pause_ns(fullness: float, waited_ns: int, *, used: bool = True) -> int:
    """How long to leave the rings alone.

    Args:
        fullness: of the fullest ring, as it was found, of 1.
        waited_ns: since it was read before.
        used: whether there is a communicator.
    """
    if not fullness:
        return EMPTY_NS if used else UNUSED_NS
    return min(LONGEST_NS, max(SHORTEST_NS, round(AIM * waited_ns / fullness)))
