"""Decides when to read the event rings again: before a burst overflows them, and no sooner.

A look at a ring costs some hundred microseconds, however little is in it, and on a host whose cores are all busy the
job loses more than that to each waking.  So the pause is as long as the ring takes to fill to a part of its size, at
the rate at which it filled just now: what remains is room for a burst.  Somebody who calls now and then may call a
hundred thousand times in the next moment: when half of a ring waits, or half of what one process may fill of it, the
programs wake its reader (call_slots.h and completion.h in probes/bpf).  Where there is no communicator nobody can call:
the first call of one that nobody knows wakes the reader by itself (write_lifecycle() in probes/bpf/communicators.h).
"""

from __future__ import annotations

from typing import Final

SHORTEST_NS: Final = 5_000_000
UNUSED_NS: Final = 2_000_000_000
"""Of a ring that was empty, without a communicator."""
LONGEST_NS: Final = 1_000_000_000
"""Where there is a communicator; before each look for stalls they are read anyway, as it is based on what they tell."""
AIM: Final = 1 / 4
"""Of a ring's size: as full it should be found.  As much again may come before the reader is woken, and then it has the
time of two such to come."""


def pause_ns(fullness: float, waited_ns: int, *, used: bool = True) -> int:
    """How long the daemon leaves the BPF rings alone.

    Args:
        fullness: of the fullest ring, as it was found, of 1.
        waited_ns: since it was read before.
        used: whether there is a communicator.
    """
    if not fullness:
        return LONGEST_NS if used else UNUSED_NS
    return min(LONGEST_NS, max(SHORTEST_NS, round(AIM * waited_ns / fullness)))
