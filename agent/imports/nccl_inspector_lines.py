"""Reads blocks of NCCL Inspector's lines into columns: no object a line outlives its block.

A line says the same few things again and again, which are told apart once: who wrote it (header, host and process), and
what kind of operation it is.  Lines without a header are of the one that stands before them, perhaps in an earlier
block: `nccl_inspector` knows which it was.  So a block needs no other one, and blocks are read on all processors.

A block with a line that is anything but such an operation, or such a header, is not read here at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from railscope.agent.dataset.files import LARGEST_PAYLOAD_BYTES
from railscope.probes.nccl.abi import Op

OPS: Final = {op.name.lower(): op for op in Op if op is not Op.Unknown}
MOST_US: Final = (1 << 62) // 1000
_MOST_NUMBER: Final = (1 << 31) - 1
_NO_NUMBER: Final = -1

Whole = NDArray[np.int64]
_Moment = Annotated[int, msgspec.Meta(ge=0, lt=MOST_US)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=_MOST_NUMBER)]
_Long = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_PAYLOAD_BYTES)]
_Length = Annotated[int, msgspec.Meta(ge=0, lt=MOST_US)] | Annotated[float, msgspec.Meta(ge=0, lt=float(MOST_US))]


class _KernelEvent(msgspec.Struct, gc=False):
    kernel_stop_ts: _Moment = 0


class _Events(msgspec.Struct, gc=False, rename={"start": "coll_start_ts"}):
    start: _Moment = 0
    kernel_events: list[_KernelEvent] = []


class _PeerEvents(msgspec.Struct, gc=False, rename={"start": "p2p_start_ts"}):
    start: _Moment = 0
    kernel_events: list[_KernelEvent] = []


def _names(kind: str) -> dict[str, str]:
    return {
        "op": kind,
        "sequence": f"{kind}_sn",
        "size": f"{kind}_msg_size_bytes",
        "length": f"{kind}_exec_time_us",
        "source": f"{kind}_timing_source",
        "algorithm": f"{kind}_algo",
        "protocol": f"{kind}_proto",
        "peer": f"{kind}_peer",
        "events": "event_trace_ts",
    }


class _Collective(msgspec.Struct, gc=False, rename=_names("coll")):
    op: str
    size: _Size
    length: _Length
    sequence: _Long = _NO_NUMBER
    source: str = ""
    algorithm: str = ""
    protocol: str = ""
    events: _Events | None = None


class _ToPeer(msgspec.Struct, gc=False, rename=_names("p2p")):
    op: str
    size: _Size
    length: _Length
    sequence: _Long = _NO_NUMBER
    source: str = ""
    algorithm: str = ""
    protocol: str = ""
    peer: _Small = _NO_NUMBER
    events: _PeerEvents | None = None


class _Metadata(msgspec.Struct, gc=False):
    dump_timestamp_us: _Moment
    hostname: str
    pid: _Moment


class _Line(msgspec.Struct, gc=False):
    header: msgspec.Raw = msgspec.Raw(b"")
    metadata: _Metadata | None = None
    coll_perf: _Collective | None = None
    p2p_perf: _ToPeer | None = None
    dump_stats: dict[str, Any] | None = None


_LINES: Final = msgspec.json.Decoder(_Line).decode_lines
_ONE: Final = msgspec.json.Decoder(dict[str, Any]).decode
NO_JSON: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""What msgspec raises of bytes that are none, or nested too deep, or no UTF-8."""


class Writer(NamedTuple):
    """What a line says of its writer."""

    header: bytes
    """JSON."""
    host: str
    pid: int


class Kind(NamedTuple):
    """What operations have in common; texts as they are written."""

    op: str
    source: str
    algorithm: str
    protocol: str


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of a block, an element each in their order; 0 where a time is not told, -1 another number."""

    writers: list[Writer]
    kinds: list[Kind]
    writer: Whole
    """Which of `writers`; -1: that of the line before the block."""
    kind: Whole
    written_us: Whole
    """When the line was written; 0: as the header before the block says."""
    below: Whole
    """How many lines the operation is below the header that tells of it, within this block; 0: its line has its own."""
    length_ns: Whole
    size_bytes: Whole
    sequence: Whole
    peer: Whole
    begun_us: Whole
    ended_us: Whole
    headers: list[tuple[Writer, int, dict[str, Any]]]
    """Headers of lines below them: who wrote each, when, and what it says of the dump."""
    below_last: int
    """How many operations stand below the last of these headers, or in the block where there is none."""
    untimed: bool
    """Of some only the time of writing is told."""


@dataclass(frozen=True, slots=True)
class ScannedLines:
    """A block."""

    content: bytes
    lines: int
    operations: Operations | None
    """None: something in it needs a closer look."""


def begins_with_a_line(head: bytes) -> bool:
    """Whether the first bytes of a file are those of lines with an object each."""
    line, end, _ = head.partition(b"\n")
    if not end:
        return False
    try:
        _ONE(line)
    except NO_JSON:
        return False
    return True


def scan_lines(block: bytes) -> ScannedLines:
    """Read a block of lines."""
    try:
        lines = _LINES(block)
    except NO_JSON:
        found = None
    else:
        found = _operations(lines)
    return ScannedLines(block, block.count(b"\n") + 1, found)


def _operations(lines: list[_Line]) -> Operations | None:
    writers: dict[Writer, int] = {}
    kinds: dict[Kind, int] = {}
    headers: list[tuple[Writer, int, dict[str, Any]]] = []
    own_writers: list[int] = []
    own_kinds: list[int] = []
    written: list[int] = []
    below: list[int] = []
    done: list[_Collective | _ToPeer] = []
    said_writer, said_us, since = -1, 0, 0
    for line in lines:
        perf = line.coll_perf or line.p2p_perf
        metadata = line.metadata
        header = bytes(line.header)
        if metadata is not None and header:
            writer = writers.setdefault(Writer(header, metadata.hostname, metadata.pid), len(writers))
            if perf is None:
                said_writer, said_us, since = writer, metadata.dump_timestamp_us, 0
                headers.append((Writer(header, metadata.hostname, metadata.pid), said_us, line.dump_stats or {}))
                continue
            own_writers.append(writer)
            written.append(metadata.dump_timestamp_us)
            below.append(0)
        elif perf is None or metadata is not None or header:
            return None
        else:
            since += 1
            own_writers.append(said_writer)
            written.append(said_us)
            below.append(since)
        done.append(perf)
        own_kinds.append(kinds.setdefault(Kind(perf.op, perf.source, perf.algorithm, perf.protocol), len(kinds)))
    if any(one.op.lower() not in OPS for one in kinds):
        return None
    lengths = [one.length for one in done]
    return Operations(
        writers=list(writers),
        kinds=list(kinds),
        writer=_whole(own_writers),
        kind=_whole(own_kinds),
        written_us=_whole(written),
        below=_whole(below),
        length_ns=_nanoseconds(lengths),
        size_bytes=_whole([one.size for one in done]),
        sequence=_whole([one.sequence for one in done]),
        peer=_whole([one.peer if type(one) is _ToPeer else _NO_NUMBER for one in done]),
        begun_us=_whole([0 if one.events is None else one.events.start for one in done]),
        ended_us=_whole([0 if one.events is None else _latest(one.events) for one in done]),
        headers=headers,
        below_last=since,
        untimed=any(one.events is None for one in done),
    )


def _latest(events: _Events | _PeerEvents) -> int:
    return max((one.kernel_stop_ts for one in events.kernel_events), default=0)


def _nanoseconds(lengths: list[int | float]) -> Whole:
    """Microseconds, which may have a fraction, in ns."""
    if all(type(one) is int for one in lengths):
        return _whole(lengths) * 1000
    return _whole([round(one * 1000) for one in lengths])


def _whole(values: list[Any]) -> Whole:
    return np.array(values, np.int64)
