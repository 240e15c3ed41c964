"""A host's two clocks, read together, so that times of one lead to times of the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from railscope.probes.clock import Clock, clock_error

_CLOCK_ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The two clocks of a host at one moment."""

    monotonic_ns: int
    realtime_ns: int
    uncertainty_ns: int
    """The two were read at most this far apart."""
    synchronised: bool | None = None
    """Whether the clock is synchronised (NTP, PTP); None: the kernel does not tell."""
    maximum_error_ns: int | None = None
    """The time of day is off by no more than this; None: not known."""
    estimated_error_ns: int | None = None


def read_clocks(clock: Clock) -> ClockReading:
    """Both clocks, monotonic and time of day, read as close together as a few attempts allow."""
    best: tuple[int, int, int] | None = None
    for _ in range(_CLOCK_ATTEMPTS):
        before_ns = clock.monotonic_ns()
        realtime_ns = clock.realtime_ns()
        apart_ns = clock.monotonic_ns() - before_ns
        if best is None or apart_ns < best[0]:
            best = (apart_ns, before_ns + apart_ns // 2, realtime_ns)
    assert best is not None
    error = clock_error()
    known = error is not None and error.synchronised
    return ClockReading(
        monotonic_ns=best[1],
        realtime_ns=best[2],
        uncertainty_ns=best[0] // 2 + 1,
        synchronised=None if error is None else error.synchronised,
        maximum_error_ns=error.maximum_ns if error is not None and known else None,
        estimated_error_ns=error.estimated_ns if error is not None and known else None,
    )
