"""What the flight recorder is not told as it happens: rails as they are, what was lost, what is under way.

The loop gives it calls and completions as it reads them, the samplers give it their readings; the rest is asked for
here, once a second and when a recording is made.
"""

from __future__ import annotations

import logging
import socket
from typing import Protocol

from agent.config import Config
from agent.flight_recorder import FlightRecorder
from agent.rails import RailDecision
from agent.recording import RecordedStall, Recording
from agent.snapshot import Snapshot
from probes.bpf_syscall import KernelRefusal
from probes.clock import Clock
from probes.nccl.internal_records import InternalStat
from probes.nccl.internals import Internals
from probes.nccl.programs import NcclPrograms
from probes.nccl.records import Stat

_log = logging.getLogger("railscope.recordings")


class Known(Protocol):
    """Where to ask what is known: the observer."""

    def rail_decisions(self) -> tuple[RailDecision, ...]: ...

    def snapshot(self) -> Snapshot: ...


def make_recorder(config: Config, clock: Clock) -> FlightRecorder | None:
    """The recorder that a configuration asks for; None: it asks for none."""
    if not config.recordings_memory_bytes or config.once:
        return None
    return FlightRecorder(
        clock,
        host=socket.gethostname(),
        procfs=config.procfs,
        window_ns=config.recordings_window_ns,
        memory_bytes=config.recordings_memory_bytes,
    )


class RecorderFeed:
    """For the daemon's loop only."""

    def __init__(
        self, recorder: FlightRecorder, known: Known, programs: NcclPrograms | None, internals: Internals | None
    ) -> None:
        self._recorder = recorder
        self._known = known
        self._programs = programs
        self._internals = internals

    def look_at_rails(self) -> None:
        """Something about rails may have changed; costs next to nothing when nothing has."""
        self._recorder.take_rails(self._known.rail_decisions())

    def tick(self) -> None:
        """Once a second.

        Raises:
            KernelRefusal: what was lost cannot be read.
        """
        self._recorder.tick()
        self.look_at_rails()
        if self._programs is None:
            return
        lost = self._programs.stats()
        below = {} if self._internals is None else self._internals.stats()
        self._recorder.note_losses(
            calls=lost[Stat.RING_FULL],
            completions=below.get(InternalStat.RING_FULL, 0),
            lifecycle=lost[Stat.LIFECYCLE_RING_FULL],
        )

    def freeze(self, reason: str, stalls: tuple[RecordedStall, ...]) -> Recording:
        """A recording of the last moments, with what the kernel's tables hold now as far as they can be read."""
        operations = connections = None
        try:
            self.tick()
            if self._internals is not None:
                _, operations = self._internals.operations()
                _, connections = self._internals.connections()
        except KernelRefusal as refusal:
            _log.warning("a recording lacks what is under way: %s", refusal.strerror)
        # The samplers understand their last readings when they are asked what is known.
        snapshot = self._known.snapshot()
        return self._recorder.freeze(
            reason, snapshot, stalls=stalls, open_operations=operations, connections=connections
        )
