"""What NCCL's Inspector plugin writes (`NCCL_INSPECTOR_ENABLE=1`): a line of JSON for each completed operation.

    {"header": {"id": "0x7f8c496ae9f661", "rank": 2, "n_ranks": 8, "nnodes": 1}, "metadata":
     {"inspector_output_format_version": "v4.0", "dump_timestamp_us": 1748030377748202, "hostname": "gpu-1", "pid": 71},
     "coll_perf": {"coll": "AllReduce", "coll_sn": 1407, "coll_msg_size_bytes": 17179869184, "coll_exec_time_us": 61974,
     "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 277.2, "coll_busbw_gbs": 485.1}}

Send and Recv have `p2p_perf` with `p2p_peer` instead.  `id` is NCCL's commHash, and the size is count × size of the
data type with NCCL's meaning of count.  A line says when it was written, which is some time after the operation was
complete; with `NCCL_INSPECTOR_DUMP_VERBOSE=1` it has the times of the kernel as the host saw them.  Operations below
`NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES` (8 KiB unless set) are not in it.

Source: plugins/profiler/inspector of NCCL 2.30, ext-profiler/inspector of 2.28.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from railscope.agent.dataset.schema import LARGEST_PAYLOAD_BYTES
from railscope.agent.imports.facts import MOST_RANKS, ImportedCall, ImportedEnd, ImportedOperation, Problems
from railscope.agent.imports.json_stream import Element, JsonStream, small_number, text, whole_number
from railscope.agent.imports.sources import Source
from railscope.agent.imports.target import ImportTarget
from railscope.probes.nccl.abi import Op

FORMAT: Final = "nccl-inspector"
_KINDS: Final = ("coll", "p2p")
_OPS: Final = {op.name.lower(): op for op in Op if op is not Op.Unknown}
_MOST: Final = 1 << 62


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like a dump of NCCL's inspector plugin."""
    return b'"coll_perf"' in head or b'"p2p_perf"' in head


def import_files(sources: Sequence[Source], target: ImportTarget, problems: Problems) -> None:
    """Put the operations that NCCL's inspector plugin saw into the dataset, as operations and as calls."""
    reader = _Reader(target, problems)
    for source in sources:
        reader.read(source)
    reader.finish()
    problems.add_note("NCCL Inspector omits operations below NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES (8 KiB unless set)")


class _NotKnown(ValueError):
    """A line lacks something that it must have."""


@dataclass(frozen=True, slots=True)
class _Key:
    """One rank's end of one communicator."""

    host: str
    pid: int
    comm: int
    rank: int
    nranks: int


class _Reader:
    def __init__(self, target: ImportTarget, problems: Problems) -> None:
        self._target = target
        self._problems = problems
        self._instances: dict[_Key, tuple[int, str]] = {}
        """The instance, and the name that the communicator was given."""

    def read(self, source: Source) -> None:
        def skip(line: int, reason: str) -> None:
            self._problems.count_skipped(source.name, line, reason)

        with source.open() as stream:
            for element in JsonStream(stream, (), skip).elements():
                try:
                    self._operation(element)
                except _NotKnown as error:
                    skip(element.line, str(error))
            if stream.damage:
                skip(0, stream.damage)

    def _operation(self, element: Element) -> None:
        line = element.value
        if not isinstance(line, dict):
            raise _NotKnown("a line that is not a JSON object")
        kind = next((one for one in _KINDS if isinstance(line.get(f"{one}_perf"), dict)), None)
        if kind is None:
            raise _NotKnown("a line without coll_perf and p2p_perf")
        said: Mapping[str, Any] = line[f"{kind}_perf"]
        op = _OPS.get(text(said.get(kind)).lower())
        if op is None:
            raise _NotKnown(f"an unknown operation: {said.get(kind)!r}")
        header, metadata = (_mapping(line, name) for name in ("header", "metadata"))
        key = _Key(
            host=text(metadata.get("hostname")) or "unknown",
            pid=_required(metadata, "pid"),
            comm=_hexadecimal(header),
            rank=_required(header, "rank", MOST_RANKS),
            nranks=_required(header, "n_ranks", MOST_RANKS + 1),
        )
        if key.rank >= key.nranks:
            raise _NotKnown(f"rank {key.rank} of {key.nranks}")
        peer = small_number(said.get("p2p_peer"))
        if "p2p_peer" in said and (peer is None or peer >= key.nranks):
            raise _NotKnown(f"{op.name} with rank {said['p2p_peer']!r} of {key.nranks}")
        if key not in self._instances:
            name = text(header.get("comm_name"))
            self._instances[key] = self._target.new_instance(key.host), "" if name == "unknown" else name
        instance, _ = self._instances[key]
        payload_bytes = _required(said, f"{kind}_msg_size_bytes")
        if payload_bytes > LARGEST_PAYLOAD_BYTES:
            raise _NotKnown(f"an impossible size: {payload_bytes} bytes")
        length_ns = _required(said, f"{kind}_exec_time_us") * 1000
        called_ns, end_ns = self._times(kind, said, _required(metadata, "dump_timestamp_us") * 1000, length_ns)
        sequence = whole_number(said.get(f"{kind}_sn"))
        self._target.add(
            key.host,
            ImportedCall(
                time_ns=called_ns,
                instance=instance,
                op=op.name,
                payload_bytes=payload_bytes,
                peer=peer,
                sequence=sequence,
            ),
        )
        self._target.add(
            key.host,
            ImportedOperation(
                instance=instance,
                begin_ns=end_ns - length_ns,
                end_ns=end_ns,
                op=op.name,
                payload_bytes=payload_bytes,
                peer=peer,
                sequence=sequence,
                source="kernel" if text(said.get(f"{kind}_timing_source")).startswith("kernel") else "cuda",
            ),
        )

    def _times(self, kind: str, said: Mapping[str, Any], written_ns: int, length_ns: int) -> tuple[int, int]:
        """When it was called, and when it was complete."""
        events = said.get("event_trace_ts")
        if not isinstance(events, dict):
            self._problems.add_note(
                "timestamps are those of writing, somewhat after the operations: NCCL_INSPECTOR_DUMP_VERBOSE=1 adds "
                "exact ones"
            )
            return written_ns - length_ns, written_ns
        kernels = events.get("kernel_events")
        stops = [
            stop
            for one in (kernels if isinstance(kernels, list) else [])
            if isinstance(one, dict) and (stop := whole_number(one.get("kernel_stop_ts")))
        ]
        end_us = max(stops, default=0)
        end_ns = end_us * 1000 if 0 < end_us < _MOST // 1000 else written_ns
        started_us = whole_number(events.get(f"{kind}_start_ts"))
        begun = started_us is not None and 0 < started_us < _MOST // 1000
        return (started_us * 1000 if begun and started_us is not None else end_ns - length_ns), end_ns

    def finish(self) -> None:
        """Put the ends of communicators into the dataset."""
        for key, (instance, name) in self._instances.items():
            end = ImportedEnd(
                instance=instance,
                comm=f"{key.comm:016x}",
                rank=key.rank,
                nranks=key.nranks,
                pid=key.pid,
                group_name=name or None,
            )
            self._target.add_ends(key.host, [end])


def _mapping(line: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = line.get(name)
    if not isinstance(value, dict):
        raise _NotKnown(f"a line without its {name}")
    return value


def _required(values: Mapping[str, Any], name: str, most: int = _MOST // 1000) -> int:
    value = whole_number(values.get(name))
    if value is None or not 0 <= value < most:
        raise _NotKnown(f"a line without its {name}")
    return value


def _hexadecimal(header: Mapping[str, Any]) -> int:
    try:
        value = int(text(header.get("id")), 16)
    except ValueError:
        raise _NotKnown("a line without its communicator's id") from None
    if not 0 <= value < 1 << 64:
        raise _NotKnown("a line without its communicator's id")
    return value
