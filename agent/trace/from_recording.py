"""Timelines from flight recordings.

The one clock that all events of a recording have is led to the time of day by its last pair of readings: so lengths
stay exact, and the stated error holds for every moment (`Recording.realtime_error_ns`).  Recordings of one boot of one
machine share that clock, whatever the time of day was thought to be: they are led by one pair, without an error
between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from railscope.agent.facts.clocks import ClockReading
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.recording.recording import NOT_SEEN, Recording
from railscope.agent.trace.timeline import (
    CALL,
    COMPUTE,
    LINK_EVENT,
    NOT_ENDED,
    NOT_KNOWN,
    OPERATION,
    RAIL_SAMPLE,
    HostTimeline,
    Rows,
    TimelineCommunicator,
    TimelineMark,
    TimelineRail,
    Words,
    unnamed_communicator,
)
from railscope.probes.nccl.abi import data_type_name, op_name
from railscope.probes.nccl.records.calls import LifecycleKind
from railscope.probes.nccl.records.internals import ALGORITHMS, PROTOCOLS, UNKNOWN_BYTES

PROXY: Final = "proxy"
"""What the times of recorded operations are: those of NCCL's network threads."""
_KINDS: Final = frozenset(LifecycleKind)


@dataclass(frozen=True, slots=True)
class RecordingFile:
    path: Path
    recording: Recording


def make_timelines(files: Sequence[RecordingFile]) -> tuple[HostTimeline, ...]:
    """A timeline of each flight recording, for a trace, in their order."""
    clocks: dict[str, ClockReading] = {}
    for file in files:
        one = file.recording
        clocks[_clock(file)] = max(clocks.get(_clock(file), one.clocks[-1]), one.clocks[-1], key=_moment)
    shared = {key: [file.recording for file in files if _clock(file) == key] for key in clocks}
    return tuple(_timeline(file, clocks[_clock(file)], _error_ns(shared[_clock(file)])) for file in files)


def _clock(file: RecordingFile) -> str:
    return file.recording.boot_id or str(file.path)


def _moment(reading: ClockReading) -> int:
    return reading.monotonic_ns


def _error_ns(recordings: Iterable[Recording]) -> int | None:
    """Of any of these: their clock is one, read at many moments."""
    all_errors = [one.realtime_error_ns() for one in recordings]
    errors = [error for error in all_errors if error is not None]
    if len(errors) < len(all_errors):
        return None
    offsets = [clock.realtime_ns - clock.monotonic_ns for one in recordings for clock in one.clocks]
    return max(errors) + max(offsets) - min(offsets) if len(all_errors) > 1 else errors[0]


def _timeline(file: RecordingFile, clock: ClockReading, error_ns: int | None) -> HostTimeline:
    one = file.recording
    offset_ns = clock.realtime_ns - clock.monotonic_ns
    words = Words()
    operations = np.concatenate((_completed(one, offset_ns, words), _open(one, offset_ns, words)))
    return HostTimeline(
        host=one.host,
        source=str(file.path),
        recorder=f"railscope {one.railscope}",
        kernel=one.kernel,
        reason=one.reason,
        simulated=one.simulated,
        clock=one.boot_id,
        error_ns=error_ns,
        began_ns=one.began_ns + offset_ns,
        ended_ns=one.ended_ns + offset_ns,
        missing=tuple(_missing(one)),
        communicators=_communicators(one),
        rails=tuple(
            TimelineRail(rail.device, rail.rail, rail.name, rail.netns, rail.speed_bytes_per_second)
            for rail in one.rails
        ),
        marks=(*_marks(one, offset_ns), *_lifecycle(one, offset_ns)),
        stalls=one.stalls,
        calls=_calls(one, offset_ns, words),
        operations=operations,
        tells_unfinished=True,
        compute=np.empty(0, COMPUTE),
        rail_samples=_samples(one, offset_ns),
        link_events=_links(one, offset_ns),
        words=words.as_tuple(),
    )


def _missing(one: Recording) -> Iterable[str]:
    if not one.completion_seen():
        yield NOT_SEEN
    for kind, count in one.lost_events().items():
        if count:
            yield f"{count:,} {kind} were lost: the kernel had no room for them"
    for kind, seconds in one.overwritten_seconds().items():
        yield f"the first {seconds:.1f} s of {kind.replace('_', ' ')} were overwritten"


def _communicators(one: Recording) -> tuple[TimelineCommunicator, ...]:
    numbered = one.numbered_from_start()
    known = {
        communicator.instance: TimelineCommunicator(
            instance=communicator.instance,
            comm=_text_or_empty(communicator.identity.comm),
            rank=_text_or_empty(communicator.identity.rank),
            nranks=_text_or_empty(communicator.identity.nranks),
            pid=communicator.identity.pid,
            gpu=_text_or_empty(communicator.identity.gpu),
            netns=_text_or_empty(communicator.identity.netns),
            job=communicator.identity.of_job("job"),
            world_rank=communicator.identity.of_job("world_rank"),
            numbered_from_start=numbered.get(communicator.instance),
        )
        for communicator in one.communicators
    }
    # Events may name one that no record describes: then only its process is known.
    for events in (one.calls, one.completions):
        found, first = np.unique(events["instance"], return_index=True)
        for instance, at in zip(found.tolist(), first.tolist(), strict=True):
            known.setdefault(instance, unnamed_communicator(instance, int(events["tgid"][at])))
    for instance in np.unique(one.open_operations["instance"]).tolist():
        known.setdefault(instance, unnamed_communicator(instance, 0))
    return tuple(known.values())


def _text_or_empty(text: str) -> str:
    return "" if text == UNKNOWN else text


def _calls(one: Recording, offset_ns: int, words: Words) -> Rows:
    rows = np.empty(len(one.calls), CALL)
    rows["time_ns"] = one.calls["time_ns"].astype(np.int64) + offset_ns
    for name in ("instance", "sequence", "tid", "peer"):
        rows[name] = one.calls[name]
    rows["payload_bytes"] = one.calls["payload_bytes"].astype(np.int64)
    rows["op"] = _places(one.calls["op"], {number: op_name(number) for number in range(256)}, words)
    rows["data_type"] = _places(one.calls["data_type"], {n: data_type_name(n) for n in range(256)}, words)
    return rows


def _completed(one: Recording, offset_ns: int, words: Words) -> Rows:
    rows = _operations(one.completions, words)
    rows["begin_ns"] = one.completions["posted_ns"].astype(np.int64) + offset_ns
    rows["end_ns"] = one.completions["time_ns"].astype(np.int64) + offset_ns
    return rows


def _open(one: Recording, offset_ns: int, words: Words) -> Rows:
    rows = _operations(one.open_operations, words)
    rows["begin_ns"] = one.open_operations["posted_ns"].astype(np.int64) + offset_ns
    rows["end_ns"] = NOT_ENDED
    return rows


def _operations(records: Rows, words: Words) -> Rows:
    """What a COMPLETION_EVENT and the kernel's OPERATION have in common."""
    rows = np.empty(len(records), OPERATION)
    for name in ("instance", "channels"):
        rows[name] = records[name]
    rows["sequence"] = records["sequence"].astype(np.int64)
    payload = records["payload_bytes"]
    rows["payload_bytes"] = np.where(payload == np.uint64(UNKNOWN_BYTES), NOT_KNOWN, payload.astype(np.int64))
    rows["op"] = _places(records["op"], {number: op_name(number) for number in range(256)}, words)
    rows["data_type"] = _places(records["data_type"], {n: data_type_name(n) for n in range(256)}, words)
    rows["algorithm"] = _places(records["algorithm"], dict(enumerate(ALGORITHMS)), words)
    rows["protocol"] = _places(records["protocol"], dict(enumerate(PROTOCOLS)), words)
    rows["source"] = words.index_of(PROXY)
    return rows


def _places(numbers: Rows, names: Mapping[int, str], words: Words) -> Rows:
    """Places of the words that numbers of one byte stand for."""
    table = np.full(256, NOT_KNOWN, np.int32)
    for number in np.unique(numbers).tolist():
        table[number] = words.index_of(_text_or_empty(names.get(number, "")))
    return table[numbers]


def _samples(one: Recording, offset_ns: int) -> Rows:
    rows = np.empty(len(one.rail_samples), RAIL_SAMPLE)
    rows["time_ns"] = one.rail_samples["time_ns"].astype(np.int64) + offset_ns
    rows["rail"] = one.rail_samples["device"]
    for name in ("transmit_bytes", "receive_bytes"):
        rows[name] = one.rail_samples[name].astype(np.int64)
    return rows[np.lexsort((rows["time_ns"], rows["rail"]))]


def _links(one: Recording, offset_ns: int) -> Rows:
    rows = np.empty(len(one.link_events), LINK_EVENT)
    rows["time_ns"] = one.link_events["time_ns"].astype(np.int64) + offset_ns
    rows["rail"] = one.link_events["device"]
    for name in ("speed_bytes_per_second", "carrier_changes", "up", "carrier", "present"):
        rows[name] = one.link_events[name]
    return rows[np.lexsort((rows["time_ns"], rows["rail"]))]


def _marks(one: Recording, offset_ns: int) -> Iterable[TimelineMark]:
    for mark in one.marks:
        yield TimelineMark(mark.time_ns + offset_ns, mark.text, None)


def _lifecycle(one: Recording, offset_ns: int) -> Iterable[TimelineMark]:
    for event in one.lifecycle:
        kind, result = int(event["kind"]), int(event["result"])
        if kind == LifecycleKind.CONFIRMED:
            continue  # our own knowledge, not the communicator, changed
        name = LifecycleKind(kind).name.lower().replace("_", " ") if kind in _KINDS else f"lifecycle {kind}"
        text = name if result == 0 else f"{name} returned {result}"
        yield TimelineMark(int(event["time_ns"]) + offset_ns, text, int(event["instance"]) or None)
