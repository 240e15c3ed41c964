"""The events of some hosts on one time scale, from which a trace is drawn.

Times are nanoseconds of the time of day.  A recording of ours and a dataset folder both become this; the writer of
traces opens neither.  Words, such as the names of operations, stand in `words` once and in the arrays by place.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from railscope.agent.recording.recording import RecordedStall

Rows = npt.NDArray[Any]

NOT_KNOWN: Final = -1
"""In every field of an array but a time and a byte counter."""
NOT_ENDED: Final = -1
"""In `end_ns`: it was under way when the recording ended."""

CALL: Final = np.dtype(
    [
        *((name, "<i8") for name in ("time_ns", "instance", "payload_bytes", "sequence", "tid")),
        *((name, "<i4") for name in ("op", "data_type", "peer")),
    ]
)
"""`op` and `data_type` are places in `words`; `peer`: the other rank of Send and Recv, the root of rooted ones."""
OPERATION: Final = np.dtype(
    [
        *((name, "<i8") for name in ("begin_ns", "end_ns", "instance", "payload_bytes", "sequence")),
        *((name, "<i4") for name in ("op", "data_type", "algorithm", "protocol", "channels", "source")),
    ]
)
"""From hand-over, or from the GPU's beginning, as the word `source` says, to completion."""
COMPUTE: Final = np.dtype([(name, "<i8") for name in ("begin_ns", "end_ns", "pid", "stream", "name")])
"""Kernels that are no communication."""
RAIL_SAMPLE: Final = np.dtype([(name, "<i8") for name in ("time_ns", "rail", "transmit_bytes", "receive_bytes")])
"""Port bytes, running totals; where they fall, the device began anew."""
LINK_EVENT: Final = np.dtype(
    [
        *((name, "<i8") for name in ("time_ns", "rail", "speed_bytes_per_second", "carrier_changes")),
        *((name, "i1") for name in ("up", "carrier", "present")),
    ]
)
"""How a link was found when something about it had changed; 1, 0 or NOT_KNOWN."""


@dataclass(frozen=True, slots=True)
class TimelineCommunicator:
    """One rank's end of one communicator, as a trace names it; what is not known is empty.

    It holds no RankIdentity: a dataset folder has columns for a part of one only, and importers fill few of them.
    """

    instance: int
    """What arrays call it by."""
    comm: str
    """The same on all ranks."""
    rank: str
    nranks: str
    pid: int
    gpu: str
    netns: str
    job: str
    world_rank: str
    numbered_from_start: bool | None
    """Its calls are numbered from its first one on, as those of other ranks are.  False: it was first seen at a call,
    so that earlier ones may be missing; None: unknown."""


def unnamed_communicator(instance: int, pid: int) -> TimelineCommunicator:
    """A communicator of a timeline that events name and no record describes; `pid` 0: its process is unknown, too."""
    return TimelineCommunicator(instance, "", "", "", pid, "", "", "", "", numbered_from_start=None)


@dataclass(frozen=True, slots=True)
class TimelineRail:
    """One rail of a host, as a trace names it; what is not known is empty or None."""

    rail_id: int
    """What arrays call it by."""
    rail: str
    device: str
    netns: str
    speed_bytes_per_second: int | None


@dataclass(frozen=True, slots=True)
class TimelineMark:
    time_ns: int
    text: str
    instance: int | None
    """Whom it happened to; None: the host."""


@dataclass(frozen=True, slots=True)
class HostTimeline:
    """One host, for one while."""

    host: str
    source: str
    """The file or folder that it was read from."""
    recorder: str
    """Who recorded it: `railscope 1.2.3`, or the format that was imported."""
    kernel: str
    reason: str
    """Why it was recorded; empty: not known."""
    simulated: bool
    """The hardware was a recorded or synthesised tree."""
    clock: str
    """Hosts with the same clock have no error between them; empty: a clock of its own."""
    error_ns: int | None
    """Times are off from the true time of day by no more than this; None: unknown."""
    began_ns: int
    ended_ns: int
    missing: tuple[str, ...]
    """What happened and is not there, a sentence each."""
    communicators: tuple[TimelineCommunicator, ...]
    rails: tuple[TimelineRail, ...]
    marks: tuple[TimelineMark, ...]
    stalls: tuple[RecordedStall, ...]
    words: tuple[str, ...]
    calls: Rows
    """Dtype CALL."""
    operations: Rows
    """Dtype OPERATION: those that were complete, and those that were in flight at the end, as far as known."""
    tells_unfinished: bool
    """Whether it is."""
    compute: Rows
    """Dtype COMPUTE."""
    rail_samples: Rows
    """Dtype RAIL_SAMPLE, of each rail oldest first."""
    link_events: Rows
    """Dtype LINK_EVENT, of each rail oldest first; the first may be older than the window."""

    def word(self, place: int) -> str:
        """A word by its place; empty: not known."""
        return self.words[place] if 0 <= place < len(self.words) else ""


class Words:
    """Gives words their places, while a timeline is made."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def index_of(self, word: str | None) -> int:
        """Where this word stands; NOT_KNOWN for none."""
        return NOT_KNOWN if not word else self._places.setdefault(word, len(self._places))

    def as_tuple(self) -> tuple[str, ...]:
        return tuple(self._places)


def cut_timeline(host: HostTimeline, from_ns: int, until_ns: int, comms: Collection[str] = ()) -> HostTimeline:
    """What of a host's timeline lies between two moments; with `comms`, of these communicators and of rails only.

    Operations and stalls that only reach into the window stay whole.
    """
    communicators = host.communicators
    calls, operations, compute = host.calls, host.operations, host.compute
    stalls, marks = host.stalls, host.marks
    if comms:
        communicators = tuple(one for one in communicators if one.comm in comms)
        instances = np.array([one.instance for one in communicators], np.int64)
        calls = calls[np.isin(calls["instance"], instances)]
        operations = operations[np.isin(operations["instance"], instances)]
        compute = compute[:0]
        stalls = tuple(one for one in stalls if one.comm in comms)
        marks = tuple(one for one in marks if one.instance is None or one.instance in instances)
    return replace(
        host,
        began_ns=max(host.began_ns, from_ns),
        ended_ns=min(host.ended_ns, until_ns),
        communicators=communicators,
        calls=calls[_within(calls["time_ns"], from_ns, until_ns)],
        operations=operations[_overlapping(operations, from_ns, until_ns)],
        compute=compute[_overlapping(compute, from_ns, until_ns)],
        rail_samples=host.rail_samples[_within(host.rail_samples["time_ns"], from_ns, until_ns)],
        link_events=host.link_events[host.link_events["time_ns"] <= until_ns],
        marks=tuple(one for one in marks if from_ns <= one.time_ns <= until_ns),
        stalls=tuple(
            one
            for one in stalls
            if one.since_realtime_ns <= until_ns and one.since_realtime_ns + one.seconds * 1e9 >= from_ns
        ),
    )


def _within(times_ns: Rows, from_ns: int, until_ns: int) -> Rows:
    return (times_ns >= from_ns) & (times_ns <= until_ns)


def _overlapping(rows: Rows, from_ns: int, until_ns: int) -> Rows:
    reaches: Rows = (rows["begin_ns"] <= until_ns) & ((rows["end_ns"] >= from_ns) | (rows["end_ns"] == NOT_ENDED))
    return reaches
