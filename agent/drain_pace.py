"""When to read the kernel's rings again: soon enough that a burst fits in, and no sooner.

A look at a ring costs some hundred microseconds, however little is in it, and on a host whose cores are all busy the
job loses more than that to each waking.  So the pause is as long as the ring takes to fill to a part of its size, at
the rate at which it filled just now: what remains is room for a burst.  Somebody who calls now and then may call a
hundred thousand times in the next moment: when half of a ring waits, the programs wake its reader
(RECORDS_BETWEEN_LOOKS in probes/bpf/observed.h).  Where there is no communicator nobody can call: the first call of one
that nobody knows wakes the reader by itself (write_lifecycle() in probes/bpf/communicators.h).
"""

from __future__ import annotations

from typing import Final, NamedTuple

SHORTEST_NS: Final = 5_000_000
UNUSED_NS: Final = 2_000_000_000
"""Of a ring that was empty, without a communicator."""


class Pace(NamedTuple):
    """How long the rings may be left alone."""

    longest_ns: int
    """Where there is a communicator."""
    aim: float
    """Of a ring's size: as full it should be found."""


WOKEN: Final = Pace(250_000_000, 1 / 4)
"""As often as stalls are looked for, which is based on what the rings tell.  As much again may come before the reader
is woken, and then it has the time of two such to come."""
POLLED: Final = Pace(50_000_000, 1 / 16)
"""Where programs cannot wake their reader (probes/bcc_source.py): a burst may be sixteen times as fast as what came
before, and after a pause 2 MiB hold what 650,000 calls a second write."""


def pause_ns(pace: Pace, fullness: float, waited_ns: int, *, used: bool = True) -> int:
    """How long to leave the rings alone.

    Args:
        pace: what is aimed at.
        fullness: of the fullest ring, as it was found, of 1.
        waited_ns: since it was read before.
        used: whether there is a communicator.
    """
    if not fullness:
        return pace.longest_ns if used else UNUSED_NS
    return min(pace.longest_ns, max(SHORTEST_NS, round(pace.aim * waited_ns / fullness)))
