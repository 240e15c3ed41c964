"""Writes packets of a Perfetto trace: tracks, slices, instants, counters.

Perfetto's own protos do the encoding (the `perfetto` package); what is done here is what makes a million events a
matter of seconds: names are interned, what events have in common is made once (a `Shape`), and packets go to the file
some thousands at a time, since traces that follow each other are one trace.

Source: https://perfetto.dev/docs/reference/synthetic-track-event and protos/perfetto/trace/track_event/*.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any, Final, TypeAlias

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    BuiltinClock,
    Trace,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)

Value = int | float | str | bool

_SEQUENCE: Final = 1
"""All packets are of one: they share the names."""
_AT_ONCE: Final = 20_000


_BEGIN: Final = TrackEvent.TYPE_SLICE_BEGIN
_END: Final = TrackEvent.TYPE_SLICE_END
_INSTANT: Final = TrackEvent.TYPE_INSTANT
_COUNTER: Final = TrackEvent.TYPE_COUNTER

Shape: TypeAlias = Any
"""A packet of what events have in common: what they are called, and what is said about all of them."""


class Packets:
    """Writes one trace; `close` writes what is left."""

    def __init__(self, file: IO[bytes], time_ns: int) -> None:
        """`time_ns`: a moment of the trace; all its times are of the day."""
        self._file = file
        self._trace = Trace()
        self._packets = self._trace.packet
        self._names: dict[str, int] = {}
        self._categories: dict[str, int] = {}
        self._annotations: dict[str, int] = {}
        self._tracks = 0
        self.written = 0
        """Packets so far."""
        first = self._packet()
        first.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        first.timestamp = time_ns
        # Both clocks are the time of day, so that Perfetto can show it; it counts in BOOTTIME unless told otherwise.
        for clock in (BuiltinClock.BUILTIN_CLOCK_BOOTTIME, BuiltinClock.BUILTIN_CLOCK_REALTIME):
            first.clock_snapshot.clocks.add(clock_id=clock, timestamp=time_ns)
        self._sequence_name = self._interned(self._annotations, "debug_annotation_names", "sequence")

    def add_track(self, name: str, parent: int = 0, *, description: str = "", unit: str | None = None) -> int:
        """A new track, below those that were made before it; with a unit, a counter's.

        Tracks of one name with one parent are drawn as one, whose slices may overlap.
        """
        self._tracks += 1
        descriptor = self._packet().track_descriptor
        descriptor.uuid = self._tracks
        descriptor.name = name
        descriptor.child_ordering = TrackDescriptor.EXPLICIT
        descriptor.sibling_order_rank = self._tracks
        if parent:
            descriptor.parent_uuid = parent
        if description:
            descriptor.description = description
        if unit is not None:
            descriptor.counter.unit_name = unit
        return self._tracks

    def make_shape(self, name: str, category: str, said: Mapping[str, Value] | None = None) -> Shape:
        """The common part of several slices or instants; `said`: the annotations that the viewer shows."""
        packet = TracePacket(trusted_packet_sequence_id=_SEQUENCE)
        packet.sequence_flags = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        event = packet.track_event
        event.name_iid = self._interned(self._names, "event_names", name)
        event.category_iids.append(self._interned(self._categories, "event_categories", category))
        for key, value in (said or {}).items():
            self._say(event, key, value)
        return packet

    def add_slice(
        self, track: int, shape: Shape, begin_ns: int, end_ns: int | None, sequence: int | None = None, flow: int = 0
    ) -> None:
        """Something that took a while; `end_ns` None: it has not ended.

        Slices of a track must be given in their order, and may not overlap.  `flow`: slices with the same number are
        joined by arrows, in the order of their times; 0: there are none.
        """
        self._event(track, shape, _BEGIN, begin_ns, sequence, flow)
        if end_ns is not None:
            packet = self._packet()
            packet.timestamp = end_ns
            event = packet.track_event
            event.type = _END
            event.track_uuid = track

    def add_instant(self, track: int, shape: Shape, time_ns: int, sequence: int | None = None, flow: int = 0) -> None:
        """Something that happened at one moment."""
        self._event(track, shape, _INSTANT, time_ns, sequence, flow)

    def add_counter_value(self, track: int, time_ns: int, value: float) -> None:
        """A counter's value from this moment on."""
        packet = self._packet()
        packet.timestamp = time_ns
        event = packet.track_event
        event.type = _COUNTER
        event.track_uuid = track
        event.double_counter_value = value

    def close(self) -> None:
        """Write what is left; the file stays open."""
        self._file.write(self._trace.SerializeToString())
        self._trace = Trace()
        self._packets = self._trace.packet

    def _event(self, track: int, shape: Shape, kind: int, time_ns: int, sequence: int | None, flow: int) -> None:
        packet = self._next()
        packet.CopyFrom(shape)
        packet.timestamp = time_ns
        event = packet.track_event
        event.type = kind
        event.track_uuid = track
        if flow:
            event.flow_ids.append(flow)
        if sequence is not None:
            annotation = event.debug_annotations.add()
            annotation.name_iid = self._sequence_name
            annotation.int_value = sequence

    def _say(self, event: Any, name: str, value: Value) -> None:
        annotation = event.debug_annotations.add()
        annotation.name_iid = self._interned(self._annotations, "debug_annotation_names", name)
        if isinstance(value, bool):
            annotation.bool_value = value
        elif isinstance(value, int):
            annotation.int_value = value
        elif isinstance(value, float):
            annotation.double_value = value
        else:
            annotation.string_value = value

    def _interned(self, known: dict[str, int], kind: str, text: str) -> int:
        number = known.get(text)
        if number is None:
            number = known[text] = len(known) + 1
            packet = self._packet()
            packet.sequence_flags = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            getattr(packet.interned_data, kind).add(iid=number, name=text)
        return number

    def _packet(self) -> Any:
        packet = self._next()
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet

    def _next(self) -> Any:
        self.written += 1
        if self.written % _AT_ONCE == 0:
            self.close()
        return self._packets.add()
