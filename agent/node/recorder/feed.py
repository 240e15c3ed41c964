"""Feeds the flight recorder with state that no event reports: rails, losses, operations in flight.

The loop gives it calls and completions as it reads them, the samplers give it their readings; the rest is asked for
here, at each of the loop's ticks and when a recording is made.
"""

from __future__ import annotations

import logging
import socket
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from railscope.agent.config.options import Config
from railscope.agent.facts.hardware import NeighbourFacts
from railscope.agent.facts.rail_decision import RailDecision
from railscope.agent.facts.rail_ledger import RailKey, RailLedger
from railscope.agent.facts.snapshot import Snapshot
from railscope.agent.facts.transfers import NodeTransfers, PeerTransfers
from railscope.agent.node.recorder.flight_recorder import FlightRecorder, Piece
from railscope.agent.node.recorder.triggers import make_recorded_stall
from railscope.agent.recording.recording import RecordedStall, Recording
from railscope.probes.clock import Clock
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.programs.calls import NcclPrograms
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.calls import Stat
from railscope.probes.nccl.records.internals import InternalStat

_MOST_UNTAKEN: Final = 0.5
"""Of the recorder's memory: events are taken no later than when so much of it is filled."""

_log = logging.getLogger("railscope.recordings")


class Known(Protocol):
    """Where to ask what is known: the observer."""

    def rail_decisions(self) -> tuple[RailDecision, ...]: ...

    def rail_ledgers(self) -> Mapping[RailKey, RailLedger]: ...

    def snapshot(self) -> Snapshot: ...


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """One piece of what a recorder is given, with what stalled meanwhile."""

    piece: Piece
    stalls: Mapping[tuple[int, int], RecordedStall]
    """By instance and beginning (monotonic, ns), which tell one stall from another: those that go on and the last ones
    that ended, whether or not an earlier piece had them."""
    transfers: Mapping[Hashable, tuple[PeerTransfers, ...]] = field(default_factory=dict)
    """What processes have transferred with other libraries so far, peer by peer, by pid, which of its processes that
    is, library and operation.  All that an earlier piece had of the same key gives way: a peer that is no longer among
    the busiest is part of the sum of the others."""
    neighbours: tuple[NeighbourFacts, ...] = ()
    """The switches at the rails' other ends, as far as they were heard by now."""


class Stream(Protocol):
    """Takes pieces, one after the other; called on the daemon's loop, which must not wait."""

    @property
    def ready(self) -> bool:
        """Whether it has room for another piece."""

    def enqueue(self, piece: StreamPiece) -> None:
        """Only called while it is ready, or at the end."""


def make_recorder(config: Config, clock: Clock) -> FlightRecorder | None:
    """The flight recorder that a configuration asks for; None: it asks for none."""
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
        self._stream: Stream | None = None
        self._stream_period_ns = 0
        self._next_take_ns = 0
        self._ended_transfers = 0
        """Operations of processes that had ended by the last piece."""

    def start_stream(self, stream: Stream, period_ns: int) -> None:
        """Give all that comes in from now on to a stream, every `period_ns` or sooner where memory is short."""
        self._stream, self._stream_period_ns = stream, period_ns
        self._next_take_ns = self._recorder.now_ns() + period_ns

    def record_rail_changes(self) -> None:
        """Something about rails may have changed; costs next to nothing when nothing has."""
        self._recorder.record_rails(self._known.rail_decisions())

    def update(self) -> None:
        """Run the periodic work of the feed.

        Raises:
            KernelRefusal: what was lost cannot be read.
        """
        self._recorder.update()
        self.record_rail_changes()
        self._note_losses()
        if self._stream is not None and self._stream.ready:
            now_ns = self._recorder.now_ns()
            if now_ns >= self._next_take_ns or self._recorder.fullness >= _MOST_UNTAKEN:
                self._next_take_ns = now_ns + self._stream_period_ns
                self.write_to(self._stream)

    def _note_losses(self) -> None:
        if self._programs is None:
            return
        lost = self._programs.stats()
        below = {} if self._internals is None else self._internals.stats()
        self._recorder.record_losses(
            calls=lost[Stat.RING_FULL],
            completions=below.get(InternalStat.RING_FULL, 0),
            lifecycle=lost[Stat.LIFECYCLE_RING_FULL],
        )

    def write_to(self, stream: Stream) -> None:
        """Give a stream what came in since it was given something."""
        operations, connections = self._under_way()
        snapshot = self._known.snapshot()
        now = self._recorder.clocks()
        stalls = {
            (stall.instance, stall.since_ns): make_recorded_stall(stall, now)
            for stall in (*snapshot.stalls.ended, *snapshot.stalls.current)
        }
        piece = self._recorder.read_new(
            "record",
            snapshot,
            open_operations=operations,
            connections=connections,
            ledgers=self._known.rail_ledgers(),
        )
        stream.enqueue(StreamPiece(piece, stalls, self._transfers(snapshot.transfers), snapshot.fabric.neighbours))

    def _transfers(self, known: NodeTransfers) -> Mapping[Hashable, tuple[PeerTransfers, ...]]:
        """What has ended since the last piece, and what goes on."""
        found: defaultdict[Hashable, list[PeerTransfers]] = defaultdict(list)
        fresh = [one for number, several in known.ended.items() if number >= self._ended_transfers for one in several]
        self._ended_transfers = known.ended_count
        for one in (*fresh, *known.by_peer):
            found[one.pid, one.life, one.library, one.op].append(one)
        return {key: tuple(several) for key, several in found.items()}

    def freeze(self, reason: str, stalls: tuple[RecordedStall, ...]) -> Recording:
        """A recording of the last moments, with what the kernel's tables hold now as far as they can be read."""
        operations, connections = self._under_way()
        # The samplers understand their last readings when they are asked what is known.
        snapshot = self._known.snapshot()
        return self._recorder.freeze(
            reason,
            snapshot,
            stalls=stalls,
            open_operations=operations,
            connections=connections,
            ledgers=self._known.rail_ledgers(),
        )

    def _under_way(self) -> tuple[Records | None, Records | None]:
        """Operations and connections in the kernel's tables, with losses noted; None: they are not seen."""
        operations = connections = None
        try:
            self._recorder.update()
            self.record_rail_changes()
            self._note_losses()
            if self._internals is not None:
                _, operations = self._internals.operations()
                _, connections = self._internals.connections()
        except KernelRefusal as refusal:
            _log.warning("a recording lacks operations in flight: %s", refusal.strerror)
        return operations, connections
