"""Drains the kernel's event rings into the observer and the flight recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from railscope.agent.node.daemon.observer import Observer
from railscope.agent.node.daemon.ring_pace import AIM, LONGEST_NS, pause_ns
from railscope.agent.node.recorder.flight_recorder import FlightRecorder
from railscope.probes.clock import Clock
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.programs.calls import NcclPrograms
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.rings.ring_buffer import Ring
from railscope.probes.rings.slots import SlotRings

_MOST_BATCHES: Final = 64
"""Of one ring, before other things have their turn."""


class RingDrain:
    """For the daemon's loop only."""

    def __init__(
        self,
        clock: Clock,
        programs: NcclPrograms | None,
        internals: Internals | None,
        observer: Observer,
        recorder: FlightRecorder | None,
    ) -> None:
        self._clock = clock
        self._programs = programs
        self._internals = internals
        self._observer = observer
        self._recorder = recorder
        self.drained_ns = clock.monotonic_ns()
        """When the rings were read last."""

    def drain(self, *, used: bool) -> int:
        """Make room in the rings of events; returns when to come again, ns.  `used`: there is a communicator."""
        if self._programs is None:
            return LONGEST_NS
        recorder = self._recorder
        now_ns = self._clock.monotonic_ns()
        waited_ns, self.drained_ns = now_ns - self.drained_ns, now_ns
        fullness = 0.0
        if self._internals is not None:
            add_completions = recorder.add_completions if recorder is not None else None
            fullness = drain_ring(self._internals.completion_events, self._observer.record_completions, add_completions)
        add_calls = recorder.add_calls if recorder is not None else None
        fullness = max(fullness, drain_ring(self._programs.call_events, self._observer.record_calls, add_calls))
        return pause_ns(fullness, waited_ns, used=used)


def drain_ring(
    ring: Ring | SlotRings, learn: Callable[[Records], None], record: Callable[[Records], None] | None
) -> float:
    """Pass the records of a BPF ring to `learn` and to the recorder, if any; returns how full the ring was, or is."""
    fullness = left = ring.fullness()
    for _ in range(_MOST_BATCHES):
        with ring.batch() as records:
            if not len(records):
                break
            learn(records)
            if record is not None:
                record(records)
        left = ring.fullness()
        if left < AIM:  # as a rule: a batch takes all that waits, unless that is very much
            break
    return max(fullness, left)
