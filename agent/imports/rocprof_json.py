"""What rocprofv3 writes as JSON (`rocprofv3 --output-format json`): kernels and copies of one process, on AMD's GPUs.

    {"rocprofiler-sdk-tool": [{"metadata": {"node": {"hostname": "gpu-1"}, "pid": 908}, "agents": [{"id": {"handle": 7},
     "type": 2, "logical_node_type_id": 0}], "kernel_symbols": [{"kernel_id": 8, "kernel_name": "ncclDevKernel_…"}],
     "buffer_records": {"kernel_dispatch": [{"start_timestamp": 63857982592000, "end_timestamp": 63857982594840,
     "dispatch_info": {"agent_id": {"handle": 7}, "kernel_id": 8}, "stream_id": {"handle": 0}}], "memory_copy": [
     {"start_timestamp": …, "end_timestamp": …, "src_agent_id": {"handle": 7}, "dst_agent_id": …, "bytes": 4096}]}}]}

Calls of RCCL (`rccl_api`) have no arguments, so that sizes and communicators are unknown, as in rocpd databases.  An
agent's `type` is 1 for a CPU and 2 for a GPU; times count from the host's boot.

Source: source/lib/output/generateJSON.cpp and cxx/serialization/save.hpp of rocprofiler-sdk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from railscope.agent.dataset.files import UNNAMED_NODE
from railscope.agent.imports.communication_kernels import KernelNames
from railscope.agent.imports.facts import Problems
from railscope.agent.imports.gpu_database import FROM_BOOT, NO_SIZES, known_size, known_span
from railscope.agent.imports.gpu_work import GpuWork, KernelTally
from railscope.agent.imports.json_stream import Batch, Decode, JsonStream, text, whole_number
from railscope.agent.imports.sources import Source
from railscope.agent.imports.target import ImportTarget

FORMAT: Final = "rocprofv3"
_ROOT: Final = "rocprofiler-sdk-tool"
_OPENED: Final = frozenset({_ROOT, "buffer_records", "callback_records", "strings"})
_GPU: Final = 2
_MOST_NAMES: Final = 1 << 20
"""Of kernels of a process, …"""
_MOST_LETTERS: Final = 1 << 27
"""… and letters of all of them."""


class _Handle(msgspec.Struct, gc=False, frozen=True):
    handle: Any = None


_NONE: Final = _Handle()


class _Symbol(msgspec.Struct, gc=False):
    kernel_id: Any = None
    kernel_name: Any = None
    formatted_kernel_name: Any = None


class _Dispatched(msgspec.Struct, gc=False, frozen=True):
    agent_id: _Handle = _NONE
    queue_id: _Handle = _NONE
    kernel_id: Any = None


_NOTHING: Final = _Dispatched()


class _Dispatch(msgspec.Struct, gc=False):
    start_timestamp: Any = None
    end_timestamp: Any = None
    dispatch_info: _Dispatched = _NOTHING
    stream_id: _Handle | None = None


class _Copy(msgspec.Struct, gc=False):
    start_timestamp: Any = None
    end_timestamp: Any = None
    src_agent_id: _Handle = _NONE
    dst_agent_id: _Handle = _NONE
    bytes: Any = None
    stream_id: _Handle | None = None


_KINDS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "kernel_symbols": _Symbol,
    "kernel_dispatch": _Dispatch,
    "memory_copy": _Copy,
}
_PASSED_OVER: Final = (
    *("code_objects", "host_functions", "hip_api", "hsa_api", "marker_api", "rccl_api", "memory_allocation"),
    *("scratch_memory", "rocdecode_api", "rocjpeg_api", "pc_sample_host_trap", "pc_sample_stochastic"),
    *("counter_collection", "counters", "att_filenames", "pc_sample_instructions", "pc_sample_comments"),
)
"""Long arrays of which nothing is needed."""
_DECODERS: Final[Mapping[str, Decode]] = {
    **{name: msgspec.json.Decoder(list[msgspec.Raw]).decode for name in _PASSED_OVER},
    "kernel_symbols": msgspec.json.Decoder(list[_Symbol]).decode,
    "kernel_dispatch": msgspec.json.Decoder(list[_Dispatch]).decode,
    "memory_copy": msgspec.json.Decoder(list[_Copy]).decode,
}


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like JSON of rocprofv3."""
    return b'"rocprofiler-sdk-tool"' in head


def import_files(
    sources: Sequence[Source], target: ImportTarget, problems: Problems, node: str | None, names: KernelNames
) -> None:
    """Put the kernels and copies of rocprofv3's JSON into the dataset; `node` None: as the files say."""
    problems.add_note(FROM_BOOT)
    tally = KernelTally()
    for source in sources:
        _File(source, target, problems, node, names, tally).read()
    if tally.communication:
        problems.add_note(NO_SIZES)
    tally.add_notes(problems)


class _File:
    """One file: nearly always one process; where there are several, what each is stands before its records."""

    def __init__(
        self,
        source: Source,
        target: ImportTarget,
        problems: Problems,
        node: str | None,
        names: KernelNames,
        tally: KernelTally,
    ) -> None:
        self._source = source
        self._target = target
        self._problems = problems
        self._chosen = node
        self._kernel_names = names
        self._tally = tally
        self._node = node or UNNAMED_NODE
        self._work: GpuWork | None = None
        """Of the process whose records are read."""
        self._pid: int | None = None
        self._gpus: dict[object, object] = {}
        """Which GPU an agent is, by its handle; None: it is none."""
        self._symbols: dict[object, str] = {}
        """Names of kernels by number."""
        self._letters = 0
        """Of these names."""

    def read(self) -> None:
        with self._source.open() as stream:
            elements = JsonStream(stream, frozenset(_DECODERS), self._skip, _OPENED)
            for one in elements.batches(_DECODERS):
                if one.key in _PASSED_OVER:
                    continue
                if isinstance(one, Batch):
                    for number, value in enumerate(one.values):
                        if not self._take(one.key, value):
                            self._skip(one.place(number), "a kernel or copy without its time")
                elif not self._take(one.key, _typed(one.key, one.value)):
                    self._skip(one.line, "a kernel or copy without its time")
            if stream.damage:
                self._skip(0, stream.damage)
        self._finish()

    def _take(self, key: str, value: Any) -> bool:
        """Take what stands under a key; False: it makes no sense."""
        if isinstance(value, _Dispatch):
            return self._dispatched(value)
        if isinstance(value, _Copy):
            return self._copied(value)
        if isinstance(value, _Symbol):
            name = text(value.kernel_name) or text(value.formatted_kernel_name)
            number = whole_number(value.kernel_id)
            if number is not None and len(self._symbols) < _MOST_NAMES and self._letters + len(name) <= _MOST_LETTERS:
                self._symbols[number] = name.removesuffix(".kd")
                self._letters += len(name)
            elif number is not None:
                self._problems.add_note(
                    "a process has more names of kernels than are kept: those of the rest are unknown"
                )
        elif key == "metadata" and isinstance(value, dict):
            self._finish()
            said = value.get("node")
            host = text(said.get("hostname")) if isinstance(said, dict) else ""
            self._node = self._chosen or host or UNNAMED_NODE
            self._pid = whole_number(value.get("pid"))
        elif key == "agents" and isinstance(value, list):
            self._gpus = dict(map(_agent, value))
        return key not in _KINDS or isinstance(value, _Symbol)

    def _dispatched(self, one: _Dispatch) -> bool:
        said = one.dispatch_info
        queue = (one.stream_id or said.queue_id).handle
        span = known_span(one.start_timestamp, one.end_timestamp, queue, self._gpu(said.agent_id), 0)
        if span is None:
            return False
        self._worked().add_kernel(self._symbols.get(whole_number(said.kernel_id), ""), span)
        return True

    def _copied(self, one: _Copy) -> bool:
        source, destination = self._gpu(one.src_agent_id), self._gpu(one.dst_agent_id)
        stream = one.stream_id.handle if one.stream_id is not None else None
        gpu = destination if destination is not None else source
        span = known_span(one.start_timestamp, one.end_timestamp, stream, gpu, 0)
        if span is None:
            return False
        between = None not in (source, destination) and source != destination
        name = "Memcpy PtoP" if between else "Memcpy"
        self._worked().add_copy(name, span, known_size(one.bytes), between_gpus=between)
        return True

    def _gpu(self, agent: _Handle) -> object:
        return self._gpus.get(whole_number(agent.handle))

    def _worked(self) -> GpuWork:
        if self._work is None:
            self._work = GpuWork(self._target, self._node, self._kernel_names, self._tally)
            self._work.pid = self._pid
        return self._work

    def _finish(self) -> None:
        """End what is known of a process."""
        if self._work is not None:
            self._target.add_ends(self._node, self._work.finish(None))
        self._work, self._pid = None, None
        self._gpus, self._symbols, self._letters = {}, {}, 0

    def _skip(self, line: int, reason: str) -> None:
        self._problems.count_skipped(self._source.name, line, reason)


def _typed(key: str, value: Any) -> Any:
    """An element of a long array that came by itself; itself where it cannot be."""
    kind = _KINDS.get(key)
    if kind is None:
        return value
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError):  # the last of half a character
        return None


def _agent(said: Any) -> tuple[object, object]:
    """Handle and GPU of an agent."""
    if not isinstance(said, dict):
        return None, None
    identity = said.get("id")
    handle = whole_number(identity.get("handle")) if isinstance(identity, dict) else None
    return handle, said.get("logical_node_type_id") if said.get("type") == _GPU else None
