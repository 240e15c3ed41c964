"""What the log says of stalls: a line for each that begins or ends, up to a number for each tenant and minute.

One user's process may have thousands of communicators, and a host's log is everybody's: what is beyond the number is
summed up in a line of its own.  All of them stay on `/stalls` and in the metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rank_process import describe_process
from railscope.agent.facts.stall import Stall, describe_operation, rail_name
from railscope.agent.node.inspection.tenants import Tenant
from railscope.probes.clock import Clock

_log = logging.getLogger("railscope.stalls")

MOST_LINES: Final = 20
"""Of one tenant."""
WINDOW_NS: Final = 60_000_000_000


@dataclass(slots=True)
class _Minute:
    """What was logged of one tenant since a moment."""

    began_ns: int
    lines: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """Lines that were not written, by what they would have said."""


class StallLog:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, clock: Clock, tenant_of: Callable[[int], Tenant]) -> None:
        """`tenant_of` knows whose a process is, by pid."""
        self._clock = clock
        self._tenant_of = tenant_of
        self._minutes: dict[Tenant, _Minute] = {}

    @property
    def owes(self) -> bool:
        """Whether something is still to be summed up."""
        return any(minute.left_out for minute in self._minutes.values())

    def begun(self, stall: Stall) -> None:
        """A stall has begun."""
        if self._has_room(stall, "begin to stall"):
            _log.warning("%s", _sentence(stall))

    def ended(self, stall: Stall) -> None:
        """A stall has ended."""
        given_up = stall.diagnosis.cause is Cause.PROCESS_GONE
        if self._has_room(stall, "are given up" if given_up else "go on"):
            _log.info(
                "%s %s after %.1f s (%s)",
                describe_operation(stall.op, stall.comm, stall.rank, stall.pid, stall.peer),
                "is given up" if given_up else "is over",
                stall.length_ns(self._clock.monotonic_ns()) / 1e9,
                stall.diagnosis.cause.value,
            )

    def sum_up(self) -> None:
        """Say what was left out in minutes that are over; call it now and then."""
        now_ns = self._clock.monotonic_ns()
        for tenant in [tenant for tenant, one in self._minutes.items() if now_ns - one.began_ns >= WINDOW_NS]:
            left_out = self._minutes.pop(tenant).left_out
            if left_out:
                counts = " and ".join(f"{count} more {what}" for what, count in left_out.items())
                _log.warning("of the ranks of uid %s, %s: /stalls has them one by one", tenant.label, counts)

    def _has_room(self, stall: Stall, what: str) -> bool:
        now_ns = self._clock.monotonic_ns()
        tenant = self._tenant_of(stall.pid)
        minute = self._minutes.get(tenant)
        if minute is not None and now_ns - minute.began_ns >= WINDOW_NS:
            self.sum_up()
            minute = None
        if minute is None:
            minute = self._minutes[tenant] = _Minute(now_ns)
        if minute.lines < MOST_LINES:
            minute.lines += 1
            return True
        minute.left_out[what] = minute.left_out.get(what, 0) + 1
        return False


def _sentence(stall: Stall) -> str:
    diagnosis = stall.diagnosis
    whom = [f"rank {diagnosis.blamed_rank}"] if diagnosis.blamed_rank is not None else []
    end = " or its other end" if diagnosis.either_end else ""
    whom += [f"{rail_name(diagnosis.rail, diagnosis.device, diagnosis.netns)}{end}"] if diagnosis.rail else []
    blamed = f", blamed on {' and '.join(whom)}" if whom else ""
    if stall.comm == UNKNOWN:
        what = f"{describe_operation(stall.op, stall.comm, stall.rank, stall.pid, stall.peer)} does not complete"
    else:
        what = f"communicator {stall.comm} rank {stall.rank} of {stall.nranks} stalls in {stall.op}"
    return (
        f"{what}: {diagnosis.cause.value}{blamed}: {'; '.join(diagnosis.evidence)} "
        f"({describe_process(stall.pid, stall.owner)})"
    )
