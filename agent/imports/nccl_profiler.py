"""What NCCL's example profiler plugin writes (`NCCL_PROFILE_DUMP_FILE`): a file for each rank of each communicator.

    [
    {"name": "AllReduce", "cat": "COLL", "ph": "b", "id": 0, "pid": 900, "tid": 1, "ts": 1001.000000, "args":
     {"SeqNum": 0, "CommHash": 4660123456789, "Rank": 0, "Count": 4096, "Datatype": "ncclFloat32", "Algorithm": "RING",
     "Protocol": "LL128", "nChannels": 8}},
    {"name": "AllReduce", "cat": "COLL", "ph": "e", "id": 0, "pid": 900, "tid": 1, "ts": 1009.000000},
    {}]

It is a trace for Chrome, a line for each event.  Read are collectives (COLL) and point to point (P2P), which end when
NCCL's proxy and kernels have done their part of them; copies by copy engine (CE_COLL), which name no rank, are not.
What else is in the file nests in these.  Some releases write data types and addresses without quotes, which is no JSON,
and a process that is killed leaves a file without its end: so lines are read by what is in them.

Times are microseconds since the plugin began, in each process at another moment: lengths and order are exact.  The file
is written when the communicator is destroyed, so its last event is placed where the file was last written.  Neither
host nor size of the communicator is told.

Source: plugins/profiler/example/print_event.cc and plugin.cc of NCCL 2.30, ext-profiler/example of 2.23 to 2.29.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from railscope.agent.dataset.files import LARGEST_PAYLOAD_BYTES, UNNAMED_NODE
from railscope.agent.imports.facts import (
    MOST_RANKS,
    ImportedCall,
    ImportedEnd,
    ImportedOperation,
    Problems,
)
from railscope.agent.imports.json_stream import JsonStream, small_number, text
from railscope.agent.imports.kineto import NO_HOST
from railscope.agent.imports.sources import Source, numbered_lines
from railscope.agent.imports.target import ImportTarget
from railscope.probes.nccl.abi import DATA_TYPE_BYTES, DataType, Op

FORMAT: Final = "nccl-profiler"
_KINDS: Final = ("COLL", "P2P")
_TIME: Final = re.compile(r'"ts": ?(\d{1,15}(?:\.\d{1,9})?)')
_EVENT: Final = re.compile(
    r'\{"name": "(?P<name>[A-Za-z]{1,32})", "cat": "(?P<kind>COLL|P2P)", "ph": "(?P<phase>[be])", '
    r'"id": (?P<id>\d{1,12}), "pid": (?P<pid>\d{1,10}), "tid": \d{1,10}, "ts": (?P<time>-?\d{1,15}(?:\.\d{1,9})?)'
    r'(?:, "args": (?P<args>\{.*\}))?\}'
)
_ARGUMENT: Final = re.compile(r'"(\w{1,40})": ?"?(-?[\w()]{1,64})"?')
_OPS: Final = {op.name.lower(): op for op in Op if op not in (Op.Unknown, Op.SendRecv)}
_TYPES: Final = {f"nccl{kind.name}".lower(): kind for kind in DataType if kind is not DataType.Unknown}
_ALIASES: Final = {
    "ncclchar": DataType.Int8,
    "ncclint": DataType.Int32,
    "ncclhalf": DataType.Float16,
    "ncclfloat": DataType.Float32,
    "nccldouble": DataType.Float64,
}
_ALGORITHMS: Final = {
    "tree": "Tree",
    "ring": "Ring",
    "collnetdirect": "CollNetDirect",
    "collnetchain": "CollNetChain",
    "nvls": "NVLS",
    "nvlstree": "NVLSTree",
    "pat": "PAT",
}
_PROTOCOLS: Final = {"ll": "LL", "ll128": "LL128", "simple": "Simple"}
_MOST_OPEN: Final = 1 << 16
_HASHES: Final = 1 << 64


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like a trace of NCCL's example profiler plugin."""
    marks = (b'"CommHash"', b'"GROUP_API"', b'"COLL_API"', b'"PROXY"')
    return head.lstrip()[:1] == b"[" and b'"ph"' in head and any(mark in head for mark in marks)


def import_files(sources: Sequence[Source], target: ImportTarget, problems: Problems, node: str | None) -> None:
    """Put operations of the plugin's traces into the dataset, as calls and as operations; `node` None: not said."""
    reader = _Reader(target, problems, node or UNNAMED_NODE)
    for source in sources:
        reader.read(source)
    reader.finish()
    problems.add_note(
        "times of NCCL's example profiler plugin count from the start of each process: lengths and order are exact, "
        "ranks are not comparable by them"
    )
    if node is None:
        problems.add_note(NO_HOST)


class _Odd(ValueError):
    """An event that makes no sense; the message says why."""


@dataclass(frozen=True, slots=True)
class _End:
    """One rank's end of one communicator."""

    pid: int
    comm: int
    rank: int


@dataclass(frozen=True, slots=True)
class _Begun:
    """An operation whose end is awaited."""

    begin_ns: int
    end: _End
    op: Op
    arguments: Mapping[str, str]


class _Event(NamedTuple):
    """A beginning or an end."""

    line: int
    name: str
    kind: str
    begins: bool
    number: str
    pid: int
    time_us: float
    arguments: Mapping[str, str]


def _events(source: Source, problems: Problems) -> Iterator[_Event]:
    """The events of a file that are read, by its lines; of one that was written anew by another tool, by its JSON."""
    found = False
    with source.open() as stream:
        for number, line in numbered_lines(stream):
            if line is None:
                problems.count_skipped(source.name, number, "the line is too long")
                continue
            for event in _EVENT.finditer(line):
                found = True
                yield _Event(
                    number,
                    event["name"],
                    event["kind"],
                    event["phase"] == "b",
                    event["id"],
                    int(event["pid"]),
                    float(event["time"]),
                    dict(_ARGUMENT.findall(event["args"] or "")),
                )
        if stream.damage:
            problems.count_skipped(source.name, 0, stream.damage)
    if not found:
        yield from _events_of_json(source, problems)


def _events_of_json(source: Source, problems: Problems) -> Iterator[_Event]:
    def skip(line: int, reason: str) -> None:
        problems.count_skipped(source.name, line, reason)

    with source.open() as stream:
        for element in JsonStream(stream, (), skip).elements():
            said = element.value
            if not isinstance(said, dict) or said.get("cat") not in _KINDS or said.get("ph") not in ("b", "e"):
                continue
            pid, time_us, listed = small_number(said.get("pid")), said.get("ts"), said.get("args")
            if (
                pid is None
                or isinstance(time_us, bool)
                or not isinstance(time_us, int | float)
                or not 0 <= time_us < 1e15
            ):
                skip(element.line, "an event without its process and time")
                continue
            arguments = {str(name): str(value) for name, value in listed.items()} if isinstance(listed, dict) else {}
            kind, number = str(said["cat"]), str(said.get("id"))
            yield _Event(
                element.line, text(said.get("name")), kind, said["ph"] == "b", number, pid, float(time_us), arguments
            )


def _last_us(source: Source) -> float:
    """The latest time in a file."""
    latest = 0.0
    with source.open() as stream:
        for _, line in numbered_lines(stream):
            for found in _TIME.finditer(line or ""):
                latest = max(latest, float(found[1]))
    return latest


class _Reader:
    def __init__(self, target: ImportTarget, problems: Problems, node: str) -> None:
        self._target = target
        self._problems = problems
        self._node = node
        self._instances: dict[_End, int] = {}

    def read(self, source: Source) -> None:
        open_events: dict[tuple[str, str], tuple[int, _Begun]] = {}
        base_ns = source.modified_ns - round(_last_us(source) * 1000)
        for event in _events(source, self._problems):
            try:
                self._event(event, base_ns, open_events)
            except _Odd as error:
                self._problems.count_skipped(source.name, event.line, str(error))
        for number, begun in open_events.values():
            self._problems.count_skipped(source.name, number, f"{begun.op.name} has no end: its time is unknown")
            self._call(begun)

    def _event(self, event: _Event, base_ns: int, open_events: dict[tuple[str, str], tuple[int, _Begun]]) -> None:
        key = event.kind, event.number
        time_ns = base_ns + round(event.time_us * 1000)
        if event.begins:
            if len(open_events) >= _MOST_OPEN:
                self._call(open_events.pop(next(iter(open_events)))[1])
            open_events[key] = event.line, _begun(event, time_ns)
            return
        _, begun = open_events.pop(key, (0, None))
        if begun is None:
            return
        instance = self._call(begun)
        size_bytes, kind = _size(begun.arguments)
        said = begun.arguments
        if time_ns >= begun.begin_ns:
            self._target.add(
                self._node,
                ImportedOperation(
                    instance=instance,
                    begin_ns=begun.begin_ns,
                    end_ns=time_ns,
                    op=begun.op.name,
                    source="proxy",
                    payload_bytes=size_bytes,
                    data_type=kind.name,
                    algorithm=_ALGORITHMS.get(said.get("Algorithm", "").lower().replace("_", "")),
                    protocol=_PROTOCOLS.get(said.get("Protocol", "").lower()),
                    channels=_number(said, "nChannels", 1 << 16),
                    peer=_number(said, "Peer", MOST_RANKS),
                    sequence=_sequence(begun),
                ),
            )

    def _call(self, begun: _Begun) -> int:
        if begun.end not in self._instances:
            self._instances[begun.end] = self._target.new_instance(self._node)
        instance = self._instances[begun.end]
        size_bytes, kind = _size(begun.arguments)
        self._target.add(
            self._node,
            ImportedCall(
                time_ns=begun.begin_ns,
                instance=instance,
                op=begun.op.name,
                payload_bytes=size_bytes,
                data_type=kind.name,
                peer=_number(begun.arguments, "Peer", MOST_RANKS),
                sequence=_sequence(begun),
            ),
        )
        return instance

    def finish(self) -> None:
        """Put the ends of communicators into the dataset."""
        ends = [
            ImportedEnd(instance=instance, comm=f"{end.comm:016x}", rank=end.rank, nranks=None, pid=end.pid)
            for end, instance in self._instances.items()
        ]
        self._target.add_ends(self._node, ends)


def _begun(event: _Event, time_ns: int) -> _Begun:
    op = _OPS.get(event.name.lower())
    if op is None:
        raise _Odd(f"an unknown operation: {event.name[:40]}")
    comm, rank = _number(event.arguments, "CommHash", _HASHES), _number(event.arguments, "Rank", MOST_RANKS)
    if comm is None or rank is None:
        raise _Odd(f"{op.name} without its communicator and rank")
    _size(event.arguments)
    return _Begun(time_ns, _End(event.pid, comm, rank), op, event.arguments)


def _sequence(begun: _Begun) -> int | None:
    return None if begun.op in (Op.Send, Op.Recv) else _number(begun.arguments, "SeqNum", 1 << 62)


def _number(arguments: Mapping[str, str], name: str, below: int) -> int | None:
    said = arguments.get(name, "")
    return int(said) if said.isdecimal() and len(said) <= 20 and int(said) < below else None


def _size(arguments: Mapping[str, str]) -> tuple[int, DataType]:
    """Payload, with NCCL's meaning of count, and data type."""
    name = arguments.get("Datatype", "").lower()
    kind = _TYPES.get(name) or _ALIASES.get(name)
    count = _number(arguments, "Count", 1 << 62)
    if kind is None:
        raise _Odd(f"an unknown data type: {arguments.get('Datatype', '')!r}")
    if count is None or count * DATA_TYPE_BYTES[kind] > LARGEST_PAYLOAD_BYTES:
        raise _Odd("an operation without its count")
    return count * DATA_TYPE_BYTES[kind], kind
