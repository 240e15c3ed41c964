"""Traces of PyTorch's profiler (Kineto): Chrome's trace format, one file a rank.

Read are `record_param_comms`, the host's side of each operation, as calls; kernels with a collective's arguments, and
those that communicate by their names, as operations with the times of the GPU; and all other kernels and copies:

    {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)", "pid": 0, "tid": 20, "ts": 12.5,
     "dur": 80.1, "args": {"External id": 7, "device": 0, "stream": 20, "grid": [8, 1, 1], "Collective name":
     "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "Group size": 8, "dtype": "BFloat16", "In split size":
     "[]", "Out split size": "[]", "Process Group Name": "3", "Process Group Description": "tp", "Process Group Ranks":
     "[0, 1, 2, 3, 4, 5, 6, 7]"}}

Where the host's side was not profiled, each kernel is a call as well.  Where it was, `External id` ties a call to its
kernel: hosts run ahead of their GPUs, by steps of a job even, so that only the kernel says in which step a call counts.
Kernels have no arguments if they were launched before profiling began, by a CUDA graph, or by other libraries
(`gpu_work`).  Times are microseconds since `baseTimeNanoseconds`, which stands in front of the events or behind them,
or since 1970.  `distributedInfo` has the rank and all groups; lists of more than 30 ranks are cut short in the events.

PyTorch before 1.12 spelled categories otherwise (`Kernel`, `Memcpy`, `Memset`, `Operator`, `Runtime`).

Source: libkineto/src/output_json.cpp and CuptiActivity.cpp of Kineto, torch/csrc/profiler/util.cpp of PyTorch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from railscope.agent.dataset.files import LARGEST_PAYLOAD_BYTES, UNNAMED_NODE
from railscope.agent.imports.communication_kernels import KernelNames
from railscope.agent.imports.facts import MOST_RANKS, ImportedCall, ImportedEnd, ImportedOperation, Problems
from railscope.agent.imports.gpu_work import SOURCE, GpuWork, KernelTally, Span
from railscope.agent.imports.imported_rows import ImportedRows
from railscope.agent.imports.json_stream import Batch, Element, JsonStream, small_number, text, whole_number
from railscope.agent.imports.sources import Source
from railscope.agent.imports.torch_names import (
    Group,
    Sizes,
    UnknownName,
    expand_transfers,
    parse_data_type,
    parse_kernel_name,
    parse_operation,
    parse_whole_numbers,
    payload_bytes,
    rank_in_name,
)
from railscope.probes.nccl.abi import Op

FORMAT: Final = "kineto"
_HOST_SIDE: Final = "record_param_comms"
_HOST_CATEGORIES: Final = frozenset(
    {"cpu_op", "operator", "cuda_runtime", "cuda_driver", "runtime", "user_annotation", "python_function"}
)
_KERNEL: Final = "kernel"
_COPIES: Final = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
_BETWEEN_GPUS: Final = ("Memcpy PtoP", "Memcpy P2P", "CopyPeerToPeer")
_GPU_CATEGORIES: Final = _COPIES | {_KERNEL}
_BASE: Final = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b')
_SCAN_BYTES: Final = 1 << 20
_OVERLAP_BYTES: Final = 64
_HOST_AND_PID: Final = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*)_(?P<pid>\d+)\.\d+\.pt\.trace\.json")
_MOST_MICROSECONDS: Final = 4e15
_MOST_LENGTH_NS: Final = 1 << 60
_MOST_BASE_NS: Final = 1 << 61
_MOST_CATEGORIES: Final = 256
_MOST_HELD: Final = 1 << 17
"""Calls in memory until their kernels are seen: about 300 bytes each."""
NO_HOST: Final = (
    "these files do not name their host: all ranks are assigned to one host called 'imported' (import each host's "
    "files with --node HOST)"
)
NO_GPU: Final = "a trace has no events of a GPU: it is of the host alone, or of an accelerator that is no GPU"
NO_CALL_ARGUMENTS: Final = "record_param_comms events carry no arguments of their collectives: calls are unknown"


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like a trace of PyTorch's profiler (Kineto)."""
    return b'"traceEvents"' in head or (b'"ph"' in head and b'"ts"' in head)


def import_files(
    sources: Sequence[Source], target: ImportedRows, problems: Problems, node: str | None, names: KernelNames
) -> None:
    """Put operations, calls and kernels of Kineto traces into the dataset; `node` None: as the files say."""
    read_files(sources, target, problems, node, names).add_notes(problems)


def read_files(
    sources: Sequence[Source], target: ImportedRows, problems: Problems, node: str | None, names: KernelNames
) -> KernelTally:
    """As `import_files`; returns what is yet to be said of kernels."""
    tally = KernelTally()
    for source in sources:
        _Trace(source, target, problems, node, names, tally).read()
    return tally


def find_node(label: str, node: str | None) -> str:
    """The host of a trace, by the name of its file if the user does not say."""
    named = _HOST_AND_PID.fullmatch(label)
    return node or (named["host"] if named is not None else UNNAMED_NODE)


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


@dataclass(slots=True)
class _Held:
    """Calls of one `External id`, until their kernel is seen or the trace ends."""

    calls: list[ImportedCall]
    from_host: bool
    gpu_begin_ns: int | None = None


class _Event(msgspec.Struct, gc=False):
    """What is needed of an event; None: it does not say."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = 0
    args: Any = None


class _RawEvent(_Event, gc=False):
    """One of those that come many at a time, of which few are needed: `args` is JSON."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    args: msgspec.Raw = msgspec.Raw(b"null")


_EVENTS: Final = msgspec.json.Decoder(list[_RawEvent]).decode
_ARGUMENTS: Final = msgspec.json.Decoder().decode


class _Trace:
    """One file: one rank."""

    def __init__(
        self,
        source: Source,
        target: ImportedRows,
        problems: Problems,
        node: str | None,
        names: KernelNames,
        tally: KernelTally,
    ) -> None:
        named = _HOST_AND_PID.fullmatch(source.label)
        self._source = source
        self._target = target
        self._problems = problems
        self._node = find_node(source.label, node)
        self._work = GpuWork(target, self._node, names, tally)
        self._work.pid = int(named["pid"]) if named is not None else None
        self._base_ns = 0
        self._job = _Job(rank=rank_in_name(source.label))
        self._members: dict[str, _Member] = {}
        self._saw_gpu = False
        self._of_host: set[str] = set()
        """Categories that are none of the GPU's."""
        self._held: dict[int, _Held] = {}
        """By `External id`: at most as many as there is room for."""

    def read(self) -> None:
        self._base_ns = _base_ns(self._source)
        with self._source.open() as stream:
            decoders = {"traceEvents": _EVENTS, "": _EVENTS}
            for one in JsonStream(stream, {"traceEvents"}, self._skip).batches(decoders):
                if isinstance(one, Batch):
                    self._events(one)
                elif one.key in ("traceEvents", ""):
                    if isinstance(one.value, dict):
                        said = {name: one.value[name] for name in _Event.__struct_fields__ if name in one.value}
                        self._event(_Event(**said), one, 0)
                    else:
                        self._skip(one.line, "a malformed event")
                elif one.key == "distributedInfo" and isinstance(one.value, dict):
                    self._distributed(one.value)
            if stream.damage:
                self._skip(0, stream.damage)
        self._finish()

    def _events(self, batch: Batch) -> None:
        of_host = self._of_host
        event: _RawEvent
        for number, event in enumerate(batch.values):
            # As most of them.
            if event.cat in of_host and event.name != _HOST_SIDE and self._work.pid is not None:
                continue
            self._event(event, batch, number)
            if event.cat.lower() not in _GPU_CATEGORIES and len(of_host) < _MOST_CATEGORIES:
                of_host.add(event.cat)

    def _event(self, event: _Event, within: Element | Batch, number: int) -> None:
        """Read one event: the element itself, or the one of this number of a batch."""
        if event.ph != "X" and self._work.pid is not None:
            return
        category, name = text(event.cat).lower(), text(event.name)
        if self._work.pid is None and category in _HOST_CATEGORIES:
            self._work.pid = whole_number(event.pid)
        on_gpu = category in _GPU_CATEGORIES
        if event.ph != "X" or (not on_gpu and name != _HOST_SIDE):
            return
        try:
            arguments = _arguments(event.args)
        except (ValueError, RecursionError):
            self._skip(self._line(within, number), "an event with numbers of too many digits")
            return
        begin_ns, length_ns = self._nanoseconds(event.ts), self._nanoseconds(event.dur)
        reason = ""
        if begin_ns is None or length_ns is None or not 0 <= length_ns < _MOST_LENGTH_NS:
            reason = "an event without its time"
        elif begin_ns + self._base_ns < 0:
            reason = "an event before 1970"
        else:
            begin_ns += self._base_ns
            try:
                if on_gpu:
                    self._on_gpu(category, name, arguments, begin_ns, begin_ns + length_ns)
                else:
                    self._called(arguments, begin_ns, whole_number(event.tid))
            except UnknownName as error:
                reason = str(error)
        if reason:
            self._skip(self._line(within, number), reason)

    @staticmethod
    def _line(within: Element | Batch, number: int) -> int:
        return within.line if isinstance(within, Element) else within.place(number)

    def _on_gpu(self, category: str, name: str, arguments: Mapping[str, Any], begin_ns: int, end_ns: int) -> None:
        self._saw_gpu = True
        gpu = _gpu(arguments)
        span = Span(begin_ns, end_ns, whole_number(arguments.get("stream")), gpu)
        if category in _COPIES:
            self._work.add_copy(name, span, _copied_bytes(arguments), between_gpus=_is_between_gpus(name, arguments))
        elif text(arguments.get("Collective name")):
            self._ran(name, arguments, span)
        else:
            self._work.add_kernel(name, span)

    def _called(self, arguments: Mapping[str, Any], time_ns: int, tid: int | None) -> None:
        name = text(arguments.get("Collective name"))
        if not name:
            self._problems.add_note(NO_CALL_ARGUMENTS)
            return
        op = parse_operation(name)
        if op is None:
            return
        calls = self._calls(op, arguments, time_ns, tid, None)
        external = whole_number(arguments.get("External id"))
        held = None if external is None else self._held.get(external)
        if external is None or (held is not None and held.from_host):
            self._add_calls(calls, None)
        elif held is not None:
            held.calls, held.from_host = calls, True
        else:
            self._hold(external, _Held(calls, from_host=True))

    def _hold(self, external: int, held: _Held) -> None:
        if len(self._held) >= _MOST_HELD:
            self._release_calls()
        self._held[external] = held

    def _release_calls(self) -> None:
        for held in self._held.values():
            self._add_calls(held.calls, held.gpu_begin_ns)
        self._held.clear()

    def _add_calls(self, calls: list[ImportedCall], gpu_begin_ns: int | None) -> None:
        for call in calls:
            self._target.add(self._node, call._replace(gpu_begin_ns=gpu_begin_ns))

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

    def _ran(self, name: str, arguments: Mapping[str, Any], span: Span) -> None:
        """A kernel whose call the trace tells; its operation may still be unknown, as that of several calls in one."""
        said = parse_kernel_name(name)
        op = parse_operation(text(arguments.get("Collective name")))
        calls: list[ImportedCall] = []
        external = whole_number(arguments.get("External id"))
        held = None if external is None else self._held.get(external)
        if op is not None:
            calls = self._calls(op, arguments, span.begin_ns, None, span.stream)
            if external is None:
                self._add_calls(calls, span.begin_ns)
            elif held is None:
                self._hold(external, _Held(calls, from_host=False, gpu_begin_ns=span.begin_ns))
            elif not held.from_host:
                # Another kernel of the same call, or a call of the same number: each counts, as none is seen itself.
                self._add_calls(calls, span.begin_ns)
        if held is not None:
            held.gpu_begin_ns = min(span.begin_ns, held.gpu_begin_ns or span.begin_ns)
        grid = parse_whole_numbers(arguments.get("grid"))
        self._work.add_operation(
            ImportedOperation(
                instance=self._member(arguments).instance,
                begin_ns=span.begin_ns,
                end_ns=span.end_ns,
                op=op.name if op is not None else said.op or None,
                data_type=calls[0].data_type if calls else None,
                payload_bytes=calls[0].payload_bytes if len(calls) == 1 else None,
                algorithm=said.algorithm or None,
                protocol=said.protocol or None,
                channels=small_number(grid[0]) if grid else None,
                peer=calls[0].peer if len(calls) == 1 else None,
                sequence=calls[0].sequence if calls else None,
                stream=span.stream,
                source=SOURCE,
            ),
            span.gpu,
        )

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
        self._release_calls()
        ends = self._work.finish(self._job.rank)
        for member in self._members.values():
            description = member.description or self._job.groups.get(member.name, ("", ()))[0]
            group = Group(member.name, description, member.size, self._ranks(member))
            known = member.size is not None
            ends.append(
                ImportedEnd(
                    instance=member.instance,
                    comm=group.comm if known else f"{self._node}:{self._work.pid}:{self._job.rank}:{member.name}",
                    rank=group.rank_of(self._job.rank),
                    nranks=member.size,
                    pid=self._work.pid,
                    gpu=self._work.only_gpu,
                    world_rank=self._job.rank,
                    group_name=description or None,
                    nccl_version=self._job.nccl_version,
                )
            )
        self._target.add_ends(self._node, ends)
        if not self._saw_gpu:
            self._problems.add_note(NO_GPU)
        if self._node == UNNAMED_NODE:
            self._problems.add_note(NO_HOST)

    def _nanoseconds(self, microseconds: object) -> int | None:
        if type(microseconds) is float and abs(microseconds) <= _MOST_MICROSECONDS:
            return round(microseconds * 1000)  # as nearly always
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


def _arguments(args: Any) -> Mapping[str, Any]:
    """An event's arguments; none where it has none.

    Raises:
        ValueError: a number has too many digits.
        RecursionError: they are nested too deep.
    """
    if isinstance(args, msgspec.Raw):
        content = bytes(args)
        try:
            args = _ARGUMENTS(content)
        except msgspec.DecodeError:
            # A number out of msgspec's range: what is skipped as Raw is not looked at closely.
            args = json.loads(content, strict=False)
    return args if isinstance(args, dict) else {}


def _gpu(arguments: Mapping[str, Any]) -> str | None:
    """The device that worked; of a copy between devices the one that made it."""
    device = small_number(arguments.get("device", arguments.get("inDevice")))
    return None if device is None else str(device)


def _is_between_gpus(name: str, arguments: Mapping[str, Any]) -> bool:
    source, destination = (small_number(arguments.get(f"{end}Device")) for end in ("from", "to"))
    if source is not None and destination is not None and source != destination:
        return True
    return name.startswith(_BETWEEN_GPUS)


def _copied_bytes(arguments: Mapping[str, Any]) -> int | None:
    size = whole_number(arguments.get("bytes"))
    return size if size is not None and 0 <= size <= LARGEST_PAYLOAD_BYTES else None


def _base_ns(source: Source) -> int:
    """What times count from; 0: they count from 1970."""
    with source.open(counted=False) as stream:
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
