"""What NCCL's Inspector plugin writes (`NCCL_INSPECTOR_ENABLE=1`): a line of JSON for each completed operation.

    {"header": {"id": "0x7f8c496ae9f661", "rank": 2, "n_ranks": 8, "nnodes": 1}, "metadata":
     {"inspector_output_format_version": "v4.0", "dump_timestamp_us": 1748030377748202, "hostname": "gpu-1", "pid": 71},
     "coll_perf": {"coll": "AllReduce", "coll_sn": 1407, "coll_msg_size_bytes": 17179869184, "coll_exec_time_us": 61974,
     "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 277.2, "coll_busbw_gbs": 485.1}}

Send and Recv have `p2p_perf` with `p2p_peer` instead.  `id` is NCCL's commHash, and the size is count × size of the
data type with NCCL's meaning of count.  Newer ones say header and metadata once, in a line with `dump_stats`, of the
lines below it, and `coll_algo` and `coll_proto`.  Those of 2.28 and 2.29 take the size of `ncclUint8` for −1, so that
the size of such an operation is its count below 2^64.

A line says when it was written, which is some time after the operation was complete; with
`NCCL_INSPECTOR_DUMP_VERBOSE=1` it has the times of the kernel as the host saw them.  Operations below
`NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES` (8 KiB unless set) are not in it.

With `NCCL_INSPECTOR_PROM_DUMP=1` it writes textfiles for node_exporter instead.  Those of 2.29 have a sample for each
operation that was the latest when the file was written, with its size rounded to two decimals:

    nccl_collective_exec_time_microseconds{comm_id="0x7f8c496ae9f661",hostname="gpu-1",rank="2",slurm_job="x",
     slurm_job_id="7",nranks="8",n_nodes="1",gpu_device_id="GPU2",collective="AllReduce",coll_sn="1407",
     timestamp="2026-01-06T10:11:12Z",message_size="4.00MB"} 61974

Newer ones hold means by range of sizes, of which neither operations nor their number can be told: they are refused.

Source: plugins/profiler/inspector of NCCL 2.30, ext-profiler/inspector of 2.28 and 2.29.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from railscope.agent.dataset.files import LARGEST_PAYLOAD_BYTES
from railscope.agent.dataset.schema import WORDS
from railscope.agent.imports.facts import MOST_RANKS, ImportedCall, ImportedEnd, ImportedOperation, Problems
from railscope.agent.imports.json_stream import Batch, JsonStream, small_number, text, whole_number
from railscope.agent.imports.line_times import LineTimes
from railscope.agent.imports.nccl_inspector_lines import (
    MOST_US,
    NO_JSON,
    OPS,
    Operations,
    ScannedLines,
    Whole,
    begins_with_a_line,
    scan_lines,
)
from railscope.agent.imports.parallel import Workers
from railscope.agent.imports.sources import Source, SourceStream, line_blocks, numbered_lines
from railscope.agent.imports.target import ImportTarget
from railscope.probes.nccl.abi import Op

FORMAT: Final = "nccl-inspector"
_KINDS: Final = ("coll", "p2p")
_WRAPPED: Final = 1 << 64
_TELLING: Final = ("id", "rank", "n_ranks")
_MOST_KEYS: Final = 1 << 12
_LONGEST_KEPT: Final = 1 << 9
_LINES: Final = msgspec.json.Decoder(dict[str, Any]).decode_lines
_ONE: Final = msgspec.json.Decoder(dict[str, Any]).decode
_ANY: Final = msgspec.json.Decoder().decode
_PEEK_BYTES: Final = 1 << 16
_BLOCK_BYTES: Final = 1 << 21
_TIME_METRIC: Final = "nccl_collective_exec_time_microseconds{"
_LABEL: Final = re.compile(r'(\w{1,40})="((?:[^"\\]|\\.){0,300})"')
_SAMPLE: Final = re.compile(r"\} (\d{1,15}(?:\.\d{1,9})?(?:e\+?\d{1,2})?)$")
_SIZE: Final = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?([KMGT]?B)$")
_UNITS: Final = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_ALGORITHMS: Final = {
    "TREE": "Tree",
    "RING": "Ring",
    "COLLNETDIRECT": "CollNetDirect",
    "COLLNETCHAIN": "CollNetChain",
    "NVLS": "NVLS",
    "NVLSTREE": "NVLSTree",
    "PAT": "PAT",
}
_PROTOCOLS: Final = {"LL": "LL", "LL128": "LL128", "SIMPLE": "Simple"}
_TIMES_OF_WRITING: Final = (
    "timestamps are those of writing, somewhat after the operations: NCCL_INSPECTOR_DUMP_VERBOSE=1 adds exact ones"
)


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like a dump of NCCL's inspector plugin."""
    json_marks = (b'"coll_perf"', b'"p2p_perf"', b'"inspector_output_format_version"')
    return any(mark in head for mark in json_marks) or is_textfile(head)


def is_textfile(head: bytes) -> bool:
    """Whether the beginning of a file looks like a textfile of NCCL's inspector plugin."""
    return b"nccl_bus_bandwidth_gbs{" in head or b"nccl_p2p_bus_bandwidth_gbs{" in head


def import_files(sources: Sequence[Source], target: ImportTarget, problems: Problems, workers: Workers) -> None:
    """Put the operations that NCCL's inspector plugin saw into the dataset, as operations and as calls."""
    reader = _Reader(target, problems)
    for source in sources:
        reader.read(source, workers)
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


@dataclass(frozen=True, slots=True)
class _Done:
    """One completed operation."""

    op: Op
    payload_bytes: int
    called_ns: int
    begin_ns: int
    end_ns: int
    sequence: int | None
    source: str
    peer: int | None = None
    data_type: str | None = None
    algorithm: str | None = None
    protocol: str | None = None


class _Reader:
    def __init__(self, target: ImportTarget, problems: Problems) -> None:
        self._target = target
        self._problems = problems
        self._instances: dict[_Key, tuple[int, str]] = {}
        """The instance, and the name that the communicator was given."""
        self._keys: dict[str, _Key] = {}
        """By what tells them."""
        self._said_once: dict[str, Any] = {}
        """Header and metadata of the file's lines that have none of their own."""
        self._below = 0
        """How many such lines there were."""

    def read(self, source: Source, workers: Workers) -> None:
        """Read a file; its blocks are read by processes where there are some."""

        def skip(line: int, reason: str) -> None:
            self._problems.count_skipped(source.name, line, reason)

        self._said_once, self._below = {}, 0
        with source.open() as stream:
            head = stream.peek(_PEEK_BYTES)
            if is_textfile(head):
                self._textfile(stream, skip)
                return
            if begins_with_a_line(head):
                first = 0
                for block in workers.map(scan_lines, line_blocks(stream, _BLOCK_BYTES)):
                    self._block(first, block, skip)
                    first += block.lines
            else:
                self._closely(0, stream, skip)
            if stream.damage:
                skip(0, stream.damage)

    def _block(self, first: int, block: ScannedLines, skip: Callable[[int, str], None]) -> None:
        """Read the lines of a block, before which there are `first` others."""
        if block.operations is not None and self._operations(block.operations):
            return
        for number, line in enumerate(block.content.split(b"\n"), first + 1):
            try:
                self._operation(_ANY(line))
            except _NotKnown as error:
                skip(number, str(error))
            except NO_JSON:
                self._closely(number - 1, io.BytesIO(line), skip)

    def _closely(self, first: int, stream: io.BufferedIOBase, skip: Callable[[int, str], None]) -> None:
        """Read what is JSON in any form, an object at a time, before which there are `first` lines."""

        def skip_behind(line: int, reason: str) -> None:
            skip(first + line, reason)

        for one in JsonStream(stream, (), skip_behind).batches({"": _LINES}):
            values = one.values if isinstance(one, Batch) else (one.value,)
            for number, value in enumerate(values):
                try:
                    self._operation(value)
                except _NotKnown as error:
                    skip_behind(one.place(number) if isinstance(one, Batch) else one.line, str(error))

    def _operations(self, found: Operations) -> bool:
        """Add the operations of a block; False: something in it needs a closer look, and nothing is added."""
        inherited = found.writer < 0
        said_us = 0
        try:
            headers: list[Mapping[str, Any]] = [_ONE(one.header) for one in found.writers]
            keys = [
                self._key_of(header, {"hostname": one.host, "pid": one.pid})
                for header, one in zip(headers, found.writers, strict=True)
            ]
            if inherited.any():
                # Behind the others, where -1 finds it.
                headers.append(_mapping(self._said_once, "header"))
                metadata = _mapping(self._said_once, "metadata")
                keys.append(self._key_of(headers[-1], metadata))
                said_us = _required(metadata, "dump_timestamp_us")
        except (_NotKnown, *NO_JSON):
            return False
        if keys and (found.peer >= np.array([one.nranks for one in keys])[found.writer]).any():
            return False
        if found.untimed:
            self._problems.add_note(_TIMES_OF_WRITING)
        # They were all written then: a nanosecond each keeps their order.
        written_ns = np.where(inherited, said_us, found.written_us) * 1000 + found.below + self._below * inherited
        self._add_columns(found, keys, [_name_of(one) for one in headers], written_ns)
        if found.headers:
            writer, written_us, _ = found.headers[-1]
            self._said_once = {
                "header": _ONE(writer.header),
                "metadata": {"dump_timestamp_us": written_us, "hostname": writer.host, "pid": writer.pid},
            }
            self._below = 0
        self._below += found.below_last
        for _, _, stats in found.headers:
            self._dropped(stats)
        return True

    def _add_columns(self, found: Operations, keys: list[_Key], names: list[str], written_ns: Whole) -> None:
        end_ns = np.where(found.ended_us > 0, found.ended_us * 1000, written_ns)
        begin_ns = end_ns - found.length_ns
        called_ns = np.where(found.begun_us > 0, found.begun_us * 1000, begin_ns)
        called = np.unique(found.writer)
        instances = np.zeros(len(keys), np.int64)
        hosts: dict[str, int] = {}
        host_of = np.full(len(keys), -1)
        for writer in called.tolist():
            instances[writer] = self._instance(keys[writer], names[writer])
            host_of[writer] = hosts.setdefault(keys[writer].host, len(hosts))
        kinds = found.kinds
        for host, number in hosts.items():
            own = np.flatnonzero(host_of[found.writer] == number)
            numbers = pa.array(found.kind[own])
            both = {
                "instance": instances[found.writer[own]],
                "payload_bytes": found.size_bytes[own],
                "op": pa.array([OPS[one.op.lower()].name for one in kinds], WORDS).take(numbers),
                "sequence": _known(found.sequence[own]),
                "peer": _known(found.peer[own]).cast(pa.int32()),
            }
            self._target.add_columns(host, ImportedCall, {**both, "time_ns": called_ns[own]})
            said = {
                "source": [_source(one.source) for one in kinds],
                "algorithm": [_algorithm(one.algorithm) for one in kinds],
                "protocol": [_protocol(one.protocol) for one in kinds],
            }
            words = {name: pa.array(values, WORDS).take(numbers) for name, values in said.items()}
            times = {"begin_ns": begin_ns[own], "end_ns": end_ns[own]}
            self._target.add_columns(host, ImportedOperation, {**both, **words, **times})

    def _instance(self, key: _Key, name: str) -> int:
        found = self._instances.get(key)
        if found is None:
            found = self._instances[key] = self._target.new_instance(key.host), name
        return found[0]

    def _textfile(self, stream: SourceStream, skip: Callable[[int, str], None]) -> None:
        for number, line in numbered_lines(stream):
            if line is None:
                skip(number, "the line is too long")
            elif line.startswith((_TIME_METRIC, "nccl_p2p_exec_time_microseconds{")):
                try:
                    self._sample(line)
                except _NotKnown as error:
                    skip(number, str(error))
        if stream.damage:
            skip(0, stream.damage)
        self._problems.add_note("textfiles of NCCL Inspector round sizes, and hold the latest operation of each moment")

    def _sample(self, line: str) -> None:
        labels, value = dict(_LABEL.findall(line)), _SAMPLE.search(line)
        if "coll_sn" not in labels:
            raise _NotKnown(
                "a mean over a range of sizes, which tells no operation: without NCCL_INSPECTOR_PROM_DUMP=1 the plugin "
                "writes each one"
            )
        op, size = OPS.get(labels.get("collective", "").lower()), _SIZE.match(labels.get("message_size", ""))
        if op is None or size is None or value is None:
            raise _NotKnown("a sample without its operation, size and time")
        moment = LineTimes(0)
        moment.read_number(1, labels.get("timestamp", ""))
        written_ns = moment.next_call_ns()
        if moment.made_up:
            raise _NotKnown("a sample without the time of writing")
        key = _key(
            {"id": labels.get("comm_id"), "rank": labels.get("rank"), "n_ranks": labels.get("nranks")},
            {"hostname": labels.get("hostname"), "pid": 0},
        )
        length_us, payload_bytes = float(value[1]), round(float(size[1]) * _UNITS[size[2]])
        if length_us >= MOST_US or payload_bytes > LARGEST_PAYLOAD_BYTES:
            raise _NotKnown(f"an impossible size or time: {size[0]} in {value[1]} µs")
        length_ns = round(length_us * 1000)
        self._add(
            key,
            "",
            _Done(
                op=op,
                payload_bytes=payload_bytes,
                called_ns=written_ns - length_ns,
                begin_ns=written_ns - length_ns,
                end_ns=written_ns,
                sequence=whole_number(labels["coll_sn"]),
                source="kernel",
            ),
        )

    def _operation(self, line: Any) -> None:
        if not isinstance(line, dict):
            raise _NotKnown("a line that is not a JSON object")
        kind = next((one for one in _KINDS if isinstance(line.get(f"{one}_perf"), dict)), None)
        if kind is None:
            if "header" not in line or "metadata" not in line:
                raise _NotKnown("a line without coll_perf and p2p_perf")
            self._said_once = {name: _mapping(line, name) for name in ("header", "metadata")}
            self._below = 0
            self._dropped(line.get("dump_stats"))
            return
        said: Mapping[str, Any] = line[f"{kind}_perf"]
        op = OPS.get(text(said.get(kind)).lower())
        if op is None:
            raise _NotKnown(f"an unknown operation: {said.get(kind)!r}")
        header, metadata = (
            _mapping(line if name in line else self._said_once, name) for name in ("header", "metadata")
        )
        key = self._key_of(header, metadata)
        peer = small_number(said.get("p2p_peer"))
        if "p2p_peer" in said and (peer is None or peer >= key.nranks):
            raise _NotKnown(f"{op.name} with rank {said['p2p_peer']!r} of {key.nranks}")
        payload_bytes, wrapped = self._payload(said, f"{kind}_msg_size_bytes")
        length_ns = _length_ns(said, f"{kind}_exec_time_us")
        written_ns = _required(metadata, "dump_timestamp_us") * 1000
        if "metadata" not in line:
            # They were all written then: a nanosecond each keeps their order.
            self._below += 1
            written_ns += self._below
        called_ns, end_ns = self._times(kind, said, written_ns, length_ns)
        self._add(
            key,
            _name_of(header),
            _Done(
                op=op,
                payload_bytes=payload_bytes,
                called_ns=called_ns,
                begin_ns=end_ns - length_ns,
                end_ns=end_ns,
                sequence=whole_number(said.get(f"{kind}_sn")),
                source=_source(text(said.get(f"{kind}_timing_source"))),
                peer=peer,
                data_type="Uint8" if wrapped else None,
                algorithm=_algorithm(text(said.get(f"{kind}_algo"))),
                protocol=_protocol(text(said.get(f"{kind}_proto"))),
            ),
        )

    def _key_of(self, header: Mapping[str, Any], metadata: Mapping[str, Any]) -> _Key:
        """As `_key`, of which a file has few."""
        told = f"{[header.get(name) for name in _TELLING]}{metadata.get('hostname')!r}{metadata.get('pid')!r}"
        key = self._keys.get(told)
        if key is None:
            key = _key(header, metadata)
            if len(self._keys) < _MOST_KEYS and len(told) <= _LONGEST_KEPT:
                self._keys[told] = key
        return key

    def _dropped(self, stats: object) -> None:
        dropped = small_number(stats.get("dropped")) if isinstance(stats, dict) else None
        if dropped:
            self._problems.add_note(f"NCCL Inspector itself dropped {dropped} records of a file")

    def _payload(self, said: Mapping[str, Any], name: str) -> tuple[int, bool]:
        """Bytes, and whether they are of `ncclUint8` as releases have it that do not know its size."""
        value = said.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < _WRAPPED - value <= LARGEST_PAYLOAD_BYTES:
            self._problems.add_note(
                "sizes of ncclUint8, which NCCL Inspector of 2.28 and 2.29 counts below 2^64, are mended"
            )
            return _WRAPPED - value, True
        payload_bytes = _required(said, name)
        if payload_bytes > LARGEST_PAYLOAD_BYTES:
            raise _NotKnown(f"an impossible size: {payload_bytes} bytes")
        return payload_bytes, False

    def _add(self, key: _Key, name: str, done: _Done) -> None:
        instance = self._instance(key, name)
        self._target.add(
            key.host,
            ImportedCall(
                time_ns=done.called_ns,
                instance=instance,
                op=done.op.name,
                payload_bytes=done.payload_bytes,
                data_type=done.data_type,
                peer=done.peer,
                sequence=done.sequence,
            ),
        )
        self._target.add(
            key.host,
            ImportedOperation(
                instance=instance,
                begin_ns=done.begin_ns,
                end_ns=done.end_ns,
                op=done.op.name,
                payload_bytes=done.payload_bytes,
                data_type=done.data_type,
                algorithm=done.algorithm,
                protocol=done.protocol,
                peer=done.peer,
                sequence=done.sequence,
                source=done.source,
            ),
        )

    def _times(self, kind: str, said: Mapping[str, Any], written_ns: int, length_ns: int) -> tuple[int, int]:
        """When it was called, and when it was complete."""
        events = said.get("event_trace_ts")
        if not isinstance(events, dict):
            self._problems.add_note(_TIMES_OF_WRITING)
            return written_ns - length_ns, written_ns
        kernels = events.get("kernel_events")
        stops = [
            stop
            for one in (kernels if isinstance(kernels, list) else [])
            if isinstance(one, dict) and (stop := whole_number(one.get("kernel_stop_ts")))
        ]
        end_us = max(stops, default=0)
        end_ns = end_us * 1000 if 0 < end_us < MOST_US else written_ns
        started_us = whole_number(events.get(f"{kind}_start_ts"))
        begun = started_us is not None and 0 < started_us < MOST_US
        return (started_us * 1000 if begun and started_us is not None else end_ns - length_ns), end_ns

    def finish(self) -> None:
        """Put the ends of communicators into the dataset."""
        for key, (instance, name) in self._instances.items():
            end = ImportedEnd(
                instance=instance,
                comm=f"{key.comm:016x}",
                rank=key.rank,
                nranks=key.nranks,
                pid=key.pid or None,
                group_name=name or None,
            )
            self._target.add_ends(key.host, [end])


def _key(header: Mapping[str, Any], metadata: Mapping[str, Any]) -> _Key:
    key = _Key(
        host=text(metadata.get("hostname")) or "unknown",
        pid=_required(metadata, "pid"),
        comm=_hexadecimal(header),
        rank=_required(header, "rank", MOST_RANKS),
        nranks=_required(header, "n_ranks", MOST_RANKS + 1),
    )
    if key.rank >= key.nranks:
        raise _NotKnown(f"rank {key.rank} of {key.nranks}")
    return key


def _name_of(header: Mapping[str, Any]) -> str:
    """The name that a communicator was given; empty: none."""
    name = text(header.get("comm_name"))
    return "" if name == "unknown" else name


def _source(said: str) -> str:
    return "kernel" if said.startswith("kernel") else "cuda"


def _algorithm(said: str) -> str | None:
    return _ALGORITHMS.get(said.upper().replace("_", ""))


def _protocol(said: str) -> str | None:
    return _PROTOCOLS.get(said.upper())


def _known(numbers: Whole) -> pa.Array:
    """Numbers of which those below 0 are not told."""
    return pa.array(numbers, mask=numbers < 0)


def _length_ns(said: Mapping[str, Any], name: str) -> int:
    """A length in microseconds, which may have a fraction, in ns."""
    value = said.get(name)
    if isinstance(value, float) and 0 <= value < MOST_US:
        return round(value * 1000)
    return _required(said, name) * 1000


def _mapping(line: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = line.get(name)
    if not isinstance(value, dict):
        raise _NotKnown(f"a line without its {name}")
    return value


def _required(values: Mapping[str, Any], name: str, most: int = MOST_US) -> int:
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
