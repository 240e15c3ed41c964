"""DeepSpeed's communication log (`comms_logger` with `verbose`): a line for each operation of rank 0.

    [2023-06-07 12:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] comm op: all_reduce | time (ms): 0.35 |
     msg size: 3.97 MB | algbw (Gbps): 181.49 | busbw (Gbps): 158.80

With `debug`, `comm op: all_reduce | [Caller Func: reduce_tensor] | time (ms): …`.  Sizes are rounded to two decimals,
so bytes are too.  The size is that of the tensor that the rank puts in.  The line does not say among which ranks;
the number of ranks of the job follows from the two bandwidths, whose ratio is (n−1)/n: it is known where only one n
fits all lines.  All operations are taken as of all ranks.  The time in front of a line is that of its end.

The tables of `log_summary()` are not read: they have no order and no times.

Source: deepspeed/utils/comms_logging.py, deepspeed/comm/utils.py of DeepSpeed 0.8 to 0.17.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final

from railscope.agent.dataset.schema import LARGEST_PAYLOAD_BYTES, UNNAMED_NODE
from railscope.agent.imports.facts import ImportedCall, ImportedEnd, ImportedOperation, Problems
from railscope.agent.imports.line_times import LineTimes
from railscope.agent.imports.sources import Source, numbered_lines
from railscope.agent.imports.target import ImportTarget
from railscope.agent.imports.torch_names import UnknownName, parse_operation
from railscope.agent.imports.wrapped_lines import unwrap_line, without_codes
from railscope.probes.nccl.abi import Op

FORMAT: Final = "deepspeed"
_MARK: Final = "comm op: "
_LINE: Final = re.compile(
    r"comm op: (?P<op>\w{1,60})(?: \| \[Caller Func: [^\]]{0,300}\])?(?: \| comm group: \w{1,200})? \| "
    r"time \(ms\): (?P<time>\d{1,12}\.\d{1,6}) \| msg size: (?P<size>\d{1,12}(?:\.\d{1,6})?) ?(?P<unit>[KMGTPE]?B)"
    r"(?: \| algbw \((?:Gbps|GB)\): (?P<algbw>\d{1,12}\.\d\d) ?\| busbw \((?:Gbps|GB)\): (?P<busbw>\d{1,12}\.\d\d))?"
)
_RANK: Final = re.compile(r"\[Rank (\d{1,7})\]")
_UNITS: Final = {unit: 1024**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB", "PB", "EB"))}
_SHARED: Final = frozenset({Op.AllReduce, Op.AllGather, Op.ReduceScatter})
"""Operations whose two bandwidths have the ratio (n−1)/n; AllToAll has it too, but of sums over lists."""
_ROUNDED: Final = 0.005
_MOST_RANKS: Final = 1 << 20


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like a log of DeepSpeed's communication logger."""
    return b"comm op: " in head and b"time (ms): " in head


def import_files(sources: Sequence[Source], target: ImportTarget, problems: Problems, node: str | None) -> None:
    """Put operations of DeepSpeed's logs into the dataset, as calls and as operations; `node` None: they do not say."""
    where = node or UNNAMED_NODE
    for source in sources:
        _Log(source, target, problems, where).read(_world_size(source))
    problems.add_note("DeepSpeed rounds sizes to two decimals and does not name the ranks: all ranks are assumed")


class _Log:
    def __init__(self, source: Source, target: ImportTarget, problems: Problems, node: str) -> None:
        self._source = source
        self._target = target
        self._problems = problems
        self._node = node
        self._times = LineTimes(source.modified_ns)
        self._instances: dict[int, int] = {}
        """By rank."""

    def read(self, ranks: int | None) -> None:
        with self._source.open() as stream:
            for number, line in numbered_lines(stream):
                if line is None:
                    self._problems.count_skipped(self._source.name, number, "the line is too long")
                elif _MARK in line:
                    self._wrapped_line(number, line, ranks)
            if stream.damage:
                self._problems.count_skipped(self._source.name, 0, stream.damage)
        if self._times.made_up:
            self._target.times_known = False
            self._problems.add_note("timestamps are synthetic and give only the order: the log has none")
        elif self._times.resolution_ns is not None:
            self._target.clock_error_ns = max(self._target.clock_error_ns or 0, self._times.resolution_ns)
            self._times.report_doubts(self._problems)
        for rank, instance in self._instances.items():
            end = ImportedEnd(
                instance=instance,
                comm="deepspeed",
                rank=rank,
                nranks=ranks,
                world_rank=rank,
            )
            self._target.add_ends(self._node, [end])

    def _wrapped_line(self, number: int, line: str, ranks: int | None) -> None:
        line = without_codes(line)
        wrapped = unwrap_line(line, _MARK)
        if wrapped is not None:
            self._times.read_prefix(number, wrapped.before)
            if wrapped.time is not None:
                self._times.read_number(number, wrapped.time)
        for text in (line,) if wrapped is None else wrapped.texts:
            if _MARK in text:
                try:
                    self._line(number, text, ranks)
                except UnknownName as error:
                    self._problems.count_skipped(self._source.name, number, str(error))

    def _line(self, number: int, line: str, ranks: int | None) -> None:
        found = _LINE.search(line)
        if found is None:
            raise UnknownName("an operation without its time and size")
        op = parse_operation(found["op"])
        if op is None:
            return
        before = line[: found.start()]
        rank = _RANK.search(before)
        self._times.read_prefix(number, before)
        size_bytes = round(float(found["size"]) * _UNITS[found["unit"]])
        if size_bytes > LARGEST_PAYLOAD_BYTES:
            raise UnknownName("an impossible size")
        payload_bytes = _payload(op, size_bytes, ranks)
        length_ns = round(float(found["time"]) * 1e6)
        instance = self._instance(0 if rank is None else int(rank[1]))
        end_ns = self._times.next_call_ns()
        begin_ns = end_ns if self._times.made_up else end_ns - length_ns
        self._target.add(
            self._node,
            ImportedCall(
                time_ns=begin_ns,
                instance=instance,
                op=op.name,
                payload_bytes=payload_bytes,
            ),
        )
        self._target.add(
            self._node,
            ImportedOperation(
                instance=instance,
                begin_ns=begin_ns,
                end_ns=begin_ns + length_ns,
                op=op.name,
                payload_bytes=payload_bytes,
                source="cuda",
            ),
        )

    def _instance(self, rank: int) -> int:
        if rank not in self._instances:
            self._instances[rank] = self._target.new_instance(self._node)
        return self._instances[rank]


def _payload(op: Op, size_bytes: int, ranks: int | None) -> int:
    """Bytes with NCCL's meaning of count."""
    if op not in (Op.ReduceScatter, Op.AllToAll):
        return size_bytes
    if ranks is None:
        raise UnknownName(f"{op.name} among a number of ranks that the log does not contain")
    return round(size_bytes / ranks)


def _world_size(source: Source) -> int | None:
    """Ranks of the job; None: the log does not tell, or its lines contradict each other."""
    with source.open() as stream:
        return ranks_of_bandwidths(
            (float(found["algbw"]), float(found["busbw"]))
            for _, line in numbered_lines(stream)
            if line is not None
            and _MARK in line
            and (found := _LINE.search(line)) is not None
            and found["algbw"] is not None
            and _is_shared(found["op"])
        )


def _is_shared(name: str) -> bool:
    try:
        return parse_operation(name) in _SHARED
    except UnknownName:
        return False


def ranks_of_bandwidths(pairs: Iterable[tuple[float, float]]) -> int | None:
    """The ranks of a line of DeepSpeed's log: the only n for which every busbw is algbw × (n−1)/n, to two decimals."""
    least, most = 1, _MOST_RANKS
    for algbw, busbw in pairs:
        if algbw <= _ROUNDED:
            continue
        # n = algbw / (algbw − busbw); each of the two may be off by half of the last decimal.
        smallest, largest = algbw - busbw - 2 * _ROUNDED, algbw - busbw + 2 * _ROUNDED
        if largest <= 0:
            return None
        least = max(least, math.ceil((algbw - _ROUNDED) / largest))
        if smallest > 0:
            most = min(most, math.floor((algbw + _ROUNDED) / smallest))
    return least if least == most else None
