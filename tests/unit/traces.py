"""Reads a Perfetto trace back, as strictly as trace_processor does: with Perfetto's own protos.

What trace_processor would drop or count as an error is an error here: an event on a track that nobody described, a
name that was not interned before, a slice that ends before it begins or that nobody began, a counter on a track that
is none, times that no clock leads to.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import BuiltinClock, Trace, TracePacket, TrackEvent

Where = tuple[str, ...]
"""Names of a track and those above it, from the top."""


@dataclass(slots=True)
class Slice:
    where: Where
    track: int
    name: str
    category: str
    begin_ns: int
    end_ns: int | None
    """None: it did not end; as `begin_ns` for an instant."""
    said: dict[str, Any]
    flows: tuple[int, ...]


@dataclass(slots=True)
class ReadTrace:
    tracks: dict[int, Where] = field(default_factory=dict)
    descriptions: dict[Where, str] = field(default_factory=dict)
    units: dict[Where, str] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    instants: list[Slice] = field(default_factory=list)
    counters: dict[Where, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))

    def below(self, *names: str) -> list[Slice]:
        """Slices and instants on tracks whose place ends so."""
        return [one for one in (*self.slices, *self.instants) if one.where[-len(names) :] == names]

    def arrows(self) -> dict[int, list[Slice]]:
        """What each arrow leads through, in the order of time."""
        found = defaultdict(list)
        for one in sorted((*self.slices, *self.instants), key=lambda one: one.begin_ns):
            for flow in one.flows:
                found[flow].append(one)
        return dict(found)


def read_trace(content: bytes | Path) -> ReadTrace:
    """The trace in these bytes, or in this file."""
    trace = Trace()
    trace.ParseFromString(content.read_bytes() if isinstance(content, Path) else content)
    assert trace.packet
    read = ReadTrace()
    interned: defaultdict[str, dict[int, str]] = defaultdict(dict)
    counters: set[int] = set()
    events: list[tuple[int, Any]] = []
    cleared = clocks = False
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id
        cleared |= bool(packet.sequence_flags & TracePacket.SEQ_INCREMENTAL_STATE_CLEARED)
        for entries in packet.interned_data.DESCRIPTOR.fields:
            for entry in getattr(packet.interned_data, entries.name):
                assert cleared
                assert entry.iid not in interned[entries.name]
                interned[entries.name][entry.iid] = entry.name
        if packet.HasField("clock_snapshot"):
            moments = {one.clock_id: one.timestamp for one in packet.clock_snapshot.clocks}
            # What trace_processor counts in, and the time of day, are one.
            assert moments[BuiltinClock.BUILTIN_CLOCK_BOOTTIME] == moments[BuiltinClock.BUILTIN_CLOCK_REALTIME]
            clocks = True
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in read.tracks
            above = read.tracks[track.parent_uuid] if track.HasField("parent_uuid") else ()
            where = read.tracks[track.uuid] = (*above, track.name)
            read.descriptions[where] = track.description
            if track.HasField("counter"):
                counters.add(track.uuid)
                read.units[where] = track.counter.unit_name
        if packet.HasField("track_event"):
            assert clocks
            assert packet.HasField("timestamp")
            assert not packet.HasField("timestamp_clock_id")
            events.append((packet.timestamp, packet.track_event))
            if packet.track_event.name_iid:
                assert packet.sequence_flags & TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
    open_slices: defaultdict[int, list[Slice]] = defaultdict(list)
    # As trace_processor sorts: by time, and as they came where that is the same.
    for time_ns, event in sorted(events, key=lambda event: event[0]):
        where = read.tracks[event.track_uuid]
        assert (event.type == TrackEvent.TYPE_COUNTER) == (event.track_uuid in counters)
        if event.type == TrackEvent.TYPE_COUNTER:
            read.counters[where].append((time_ns, event.double_counter_value))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            open_slices[event.track_uuid].pop().end_ns = time_ns
        else:
            one = Slice(
                where,
                event.track_uuid,
                interned["event_names"][event.name_iid],
                interned["event_categories"][event.category_iids[0]],
                time_ns,
                time_ns if event.type == TrackEvent.TYPE_INSTANT else None,
                {
                    interned["debug_annotation_names"][said.name_iid]: getattr(said, said.WhichOneof("value"))
                    for said in event.debug_annotations
                },
                tuple(event.flow_ids),
            )
            if event.type == TrackEvent.TYPE_INSTANT:
                read.instants.append(one)
            else:
                assert event.type == TrackEvent.TYPE_SLICE_BEGIN
                # Ours never lie in each other: what overlaps has tracks of its own.
                assert not open_slices[event.track_uuid]
                open_slices[event.track_uuid].append(one)
                read.slices.append(one)
    return read
