"""Traces of PyTorch's profiler (Kineto): Chrome's trace format, one file a rank.

Read are `record_param_comms`, the host's side of each operation, as calls; kernels with a collective's arguments, or
of NCCL's name, as operations with the times of the GPU; and all other kernels as compute:

    {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)", "pid": 0, "tid": 20, "ts": 12.5,
     "dur": 80.1, "args": {"External id": 7, "device": 0, "stream": 20, "grid": [8, 1, 1], "Collective name":
     "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "Group size": 8, "dtype": "BFloat16", "In split size":
     "[]", "Out split size": "[]", "Process Group Name": "3", "Process Group Description": "tp", "Process Group Ranks":
     "[0, 1, 2, 3, 4, 5, 6, 7]"}}

Where the host's side was not profiled, each kernel is a call as well.  Times are microseconds since
`baseTimeNanoseconds`, which stands in front of the events or behind them, or since 1970.  `distributedInfo` has the
rank and all groups; lists of more than 30 ranks are cut short in the events.  Traces of older PyTorch have no
arguments of collectives: their kernels' times are good, their sizes and communicators are not known.

Source: libkineto/src/output_json.cpp of Kineto, torch/csrc/profiler/util.cpp of PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from railscope.agent.dataset.schema import UNNAMED_NODE
from railscope.agent.imports.facts import (
    MOST_RANKS,
    ImportedCall,
    ImportedEnd,
    ImportedKernel,
    ImportedOperation,
    Problems,
)
from railscope.agent.imports.json_stream import Element, JsonStream, small_number, text, whole_number
from railscope.agent.imports.sources import Source
from railscope.agent.imports.target import ImportTarget
from railscope.agent.imports.torch_names import (
    Group,
    Sizes,
    UnknownName,
    expand_transfers,
    is_nccl_kernel,
    parse_data_type,
    parse_kernel_name,
    parse_operation,
    parse_whole_numbers,
    payload_bytes,
)
from railscope.probes.nccl.abi import Op

FORMAT: Final = "kineto"
_HOST_SIDE: Final = "record_param_comms"
_HOST_CATEGORIES: Final = frozenset({"cpu_op", "cuda_runtime", "cuda_driver", "user_annotation"})
_BASE: Final = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b')
_SCAN_BYTES: Final = 1 << 20
_OVERLAP_BYTES: Final = 64
_HOST_AND_PID: Final = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*)_(?P<pid>\d+)\.\d+\.pt\.trace\.json")
_RANK: Final = re.compile(r"rank[-_]?(\d{1,7})", re.IGNORECASE)
_NAME_LETTERS: Final = 200
_MOST_MICROSECONDS: Final = 4e15
_MOST_LENGTH_NS: Final = 1 << 60
_MOST_BASE_NS: Final = 1 << 61
_MOST_WAITING: Final = 1 << 20
NO_HOST: Final = (
    "these files do not name their host: all ranks are assigned to one host called 'imported' (import each host's "
    "files with --node HOST)"
)
NO_ARGUMENTS: Final = (
    "some NCCL kernels lack the arguments of their collective (an older PyTorch): their sizes and communicators are "
    "unknown"
)


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like a trace of PyTorch's profiler (Kineto)."""
    return b'"traceEvents"' in head or (b'"ph"' in head and b'"ts"' in head)


def import_files(sources: Sequence[Source], target: ImportTarget, problems: Problems, node: str | None) -> None:
    """Put operations, calls and kernels of Kineto traces into the dataset; `node` None: as the files say."""
    for source in sources:
        _Trace(source, target, problems, node).read()


def rank_in_name(label: str) -> int | None:
    """The rank in the name of a Kineto trace's file, such as `rank3.json` or `trace_rank_3`; None: it has none."""
    found = _RANK.search(label)
    return int(found[1]) if found is not None else None


def rank_text_in_name(label: str) -> str:
    """What only the name of a Kineto trace's file tells: the rank; empty: nothing."""
    rank = rank_in_name(label)
    return "" if rank is None else str(rank)


@dataclass(slots=True)
class _Member:
    """This rank's end of one group."""

    instance: int
    name: str
    description: str = ""
    size: int | None = None
    ranks: tuple[int, ...] = ()


@dataclass(slots=True)
class _Job:
    """The rank and job that the trace names."""

    rank: int | None = None
    nccl_version: str | None = None
    groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Description and ranks by name."""


class _Trace:
    """One file: one rank."""

    def __init__(self, source: Source, target: ImportTarget, problems: Problems, node: str | None) -> None:
        named = _HOST_AND_PID.fullmatch(source.label)
        self._source = source
        self._target = target
        self._problems = problems
        self._node = node or (named["host"] if named is not None else UNNAMED_NODE)
        self._pid = int(named["pid"]) if named is not None else None
        self._base_ns = 0
        self._job = _Job(rank=rank_in_name(source.label))
        self._members: dict[str, _Member] = {}
        self._devices: set[int] = set()
        self._host_side: set[int] = set()
        """External ids of operations whose host side was profiled."""
        self._alone: list[tuple[int | None, list[ImportedCall]]] = []
        """Calls of kernels, for those whose host side will not have been seen."""
        self._waiting: list[ImportedKernel] = []
        """Kernels before the process is known."""

    def read(self) -> None:
        self._base_ns = _base_ns(self._source)
        with self._source.open() as stream:
            for element in JsonStream(stream, {"traceEvents"}, self._skip).elements():
                if element.key in ("traceEvents", ""):
                    self._event(element)
                elif element.key == "distributedInfo" and isinstance(element.value, dict):
                    self._distributed(element.value)
            if stream.damage:
                self._skip(0, stream.damage)
        self._finish()

    def _event(self, element: Element) -> None:
        event = element.value
        if not isinstance(event, dict):
            self._skip(element.line, "a malformed event")
            return
        category, name = event.get("cat"), text(event.get("name"))
        if self._pid is None and category in _HOST_CATEGORIES:
            self._pid = whole_number(event.get("pid"))
            self._release()
        if event.get("ph") != "X" or (category != "kernel" and name != _HOST_SIDE):
            return
        arguments = event.get("args")
        if not isinstance(arguments, dict):
            arguments = {}
        begin_ns, length_ns = self._nanoseconds(event.get("ts")), self._nanoseconds(event.get("dur", 0))
        if begin_ns is None or length_ns is None or not 0 <= length_ns < _MOST_LENGTH_NS:
            self._skip(element.line, "an event without its time")
            return
        begin_ns += self._base_ns
        if begin_ns < 0:
            self._skip(element.line, "an event before 1970")
            return
        try:
            if category != "kernel":
                self._called(arguments, begin_ns, whole_number(event.get("tid")))
            elif "Collective name" in arguments or is_nccl_kernel(name):
                self._ran(name, arguments, begin_ns, begin_ns + length_ns)
            else:
                self._computed(name, arguments, begin_ns, begin_ns + length_ns)
        except UnknownName as error:
            self._skip(element.line, str(error))

    def _called(self, arguments: Mapping[str, Any], time_ns: int, tid: int | None) -> None:
        name = text(arguments.get("Collective name"))
        if not name:
            raise UnknownName("an operation without its arguments (an older PyTorch)")
        op = parse_operation(name)
        if op is None:
            return
        external = whole_number(arguments.get("External id"))
        for call in self._calls(op, arguments, time_ns, tid, None):
            self._target.add(self._node, call)
        if external is not None:
            self._host_side.add(external)

    def _calls(
        self, op: Op, arguments: Mapping[str, Any], time_ns: int, tid: int | None, stream: int | None
    ) -> list[ImportedCall]:
        kind = parse_data_type(text(arguments.get("dtype")))
        member = self._member(arguments)
        peer = _peer(op, arguments, self._ranks(member))
        sequence = whole_number(arguments.get("Seq"))
        return [
            ImportedCall(
                time_ns=time_ns,
                instance=member.instance,
                tid=tid,
                stream=stream,
                op=one.op.name,
                data_type=kind.name,
                payload_bytes=payload_bytes(kind, one.elements),
                peer=one.peer,
                sequence=sequence,
            )
            for one in expand_transfers(op, _sizes(arguments), peer)
        ]

    def _ran(self, name: str, arguments: Mapping[str, Any], begin_ns: int, end_ns: int) -> None:
        said = parse_kernel_name(name)
        stream = whole_number(arguments.get("stream"))
        device = whole_number(arguments.get("device"))
        if device is not None:
            self._devices.add(device)
        collective = text(arguments.get("Collective name"))
        op = parse_operation(collective) if collective else None
        calls: list[ImportedCall] = []
        if op is not None:
            calls = self._calls(op, arguments, begin_ns, None, stream)
            external = whole_number(arguments.get("External id"))
            if external not in self._host_side:
                self._alone.append((external, calls))
            member = self._member(arguments)
        else:
            self._problems.add_note(NO_ARGUMENTS)
            member = self._member({"Process Group Name": f"stream-{stream}"})
        if op is None and not said.op:
            raise UnknownName(f"an NCCL kernel without a known operation: {name[:60]!r}")
        grid = parse_whole_numbers(arguments.get("grid"))
        self._target.add(
            self._node,
            ImportedOperation(
                instance=member.instance,
                begin_ns=begin_ns,
                end_ns=end_ns,
                op=op.name if op is not None else said.op,
                data_type=calls[0].data_type if calls else None,
                payload_bytes=calls[0].payload_bytes if len(calls) == 1 else None,
                algorithm=said.algorithm or None,
                protocol=said.protocol or None,
                channels=small_number(grid[0]) if grid else None,
                peer=calls[0].peer if len(calls) == 1 else None,
                sequence=calls[0].sequence if calls else None,
                stream=stream,
                source="kernel",
            ),
        )

    def _computed(self, name: str, arguments: Mapping[str, Any], begin_ns: int, end_ns: int) -> None:
        kernel = ImportedKernel(
            self._pid, whole_number(arguments.get("stream")), begin_ns, end_ns, name[:_NAME_LETTERS]
        )
        if self._pid is None and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(kernel)
        else:
            self._target.add(self._node, kernel)

    def _release(self) -> None:
        for kernel in self._waiting:
            self._target.add(self._node, kernel._replace(pid=self._pid))
        self._waiting.clear()

    def _member(self, arguments: Mapping[str, Any]) -> _Member:
        size = small_number(arguments.get("Group size"))
        if size is not None and size > MOST_RANKS:
            raise UnknownName(f"a group of {size} ranks")
        name = text(arguments.get("Process Group Name")) or f"of-{size}-ranks"
        member = self._members.get(name)
        if member is None:
            member = self._members[name] = _Member(self._target.new_instance(self._node), name)
        member.size = member.size or size
        member.description = member.description or text(arguments.get("Process Group Description"))
        if not member.ranks and member.size:
            ranks = parse_whole_numbers(arguments.get("Process Group Ranks")) or _strided(arguments, member.size)
            if len(ranks) == member.size:
                member.ranks = ranks
        return member

    def _ranks(self, member: _Member) -> tuple[int, ...]:
        return member.ranks or self._job.groups.get(member.name, ("", ()))[1]

    def _distributed(self, information: Mapping[str, Any]) -> None:
        rank = small_number(information.get("rank"))
        self._job.rank = rank if rank is not None else self._job.rank
        version = text(information.get("nccl_version"))
        self._job.nccl_version = version if version and version != "unknown" else None
        groups = information.get("pg_config")
        for group in groups if isinstance(groups, list) else []:
            if isinstance(group, dict) and (name := text(group.get("pg_name"))):
                ranks = parse_whole_numbers(group.get("ranks")) or ()
                self._job.groups[name] = text(group.get("pg_desc")), ranks

    def _finish(self) -> None:
        self._release()
        for external, calls in self._alone:
            if external is None or external not in self._host_side:
                for call in calls:
                    self._target.add(self._node, call)
        gpu = str(next(iter(self._devices))) if len(self._devices) == 1 else None
        ends = []
        for member in self._members.values():
            description = member.description or self._job.groups.get(member.name, ("", ()))[0]
            group = Group(member.name, description, member.size, self._ranks(member))
            known = member.size is not None
            ends.append(
                ImportedEnd(
                    instance=member.instance,
                    comm=group.comm if known else f"{self._node}:{self._pid}:{self._job.rank}:{member.name}",
                    rank=group.rank_of(self._job.rank),
                    nranks=member.size,
                    pid=self._pid,
                    gpu=gpu,
                    world_rank=self._job.rank,
                    group_name=description or None,
                    nccl_version=self._job.nccl_version,
                )
            )
        self._target.add_ends(self._node, ends)
        if self._node == UNNAMED_NODE:
            self._problems.add_note(NO_HOST)

    def _nanoseconds(self, microseconds: object) -> int | None:
        if isinstance(microseconds, str):
            try:
                microseconds = float(microseconds)
            except ValueError:
                return None
        if isinstance(microseconds, bool) or not isinstance(microseconds, int | float):
            return None
        # A number that is none compares with nothing, and a whole one of hundreds of digits is no float.
        if not abs(microseconds) <= _MOST_MICROSECONDS:
            return None
        return round(microseconds * 1000)

    def _skip(self, line: int, reason: str) -> None:
        self._problems.count_skipped(self._source.name, line, reason)


def _base_ns(source: Source) -> int:
    """What times count from; 0: they count from 1970."""
    with source.open() as stream:
        window = b""
        while content := stream.read(_SCAN_BYTES):
            window = window[-_OVERLAP_BYTES:] + content
            found = _BASE.search(window)
            if found is not None:
                base_ns = int(found[1])
                return base_ns if base_ns < _MOST_BASE_NS else 0
    return 0


def _strided(arguments: Mapping[str, Any], size: int) -> tuple[int, ...]:
    start, stride = (whole_number(arguments.get(f"Global rank {name}")) for name in ("start", "stride"))
    if start is None or stride is None or start < 0 or stride <= 0 or size > 1 << 20:
        return ()
    return tuple(start + stride * rank for rank in range(size))


def _sizes(arguments: Mapping[str, Any]) -> Sizes:
    inputs, outputs = (whole_number(arguments.get(f"{name} msg nelems")) for name in ("In", "Out"))
    if inputs is None or outputs is None or not 0 <= inputs < 1 << 58 or not 0 <= outputs < 1 << 58:
        raise UnknownName("an operation without its sizes")
    splits = [parse_whole_numbers(arguments.get(f"{name} split size", [])) for name in ("In", "Out")]
    if None in splits:
        raise UnknownName("an AllToAll whose split sizes are truncated in the trace")
    return Sizes(inputs, outputs, small_number(arguments.get("Group size")), splits[0] or (), splits[1] or ())


def _peer(op: Op, arguments: Mapping[str, Any], ranks: tuple[int, ...]) -> int | None:
    """The other rank of a Send or Recv in the group; the trace has its rank in the job.

    Raises:
        UnknownName: the group has no such rank.
    """
    if op not in (Op.Send, Op.Recv):
        return None
    other = whole_number(arguments.get("Dst Rank" if op is Op.Send else "Src Rank"))
    if other is None or not ranks:
        return None
    if other not in ranks:
        raise UnknownName(f"{op.name} with rank {other}, which is not in the group")
    return ranks.index(other)
