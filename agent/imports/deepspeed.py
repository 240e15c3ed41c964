"""DeepSpeed's communication log (`comms_logger` with `verbose`): a line for each operation of rank 0.

    [2023-06-07 12:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] comm op: all_reduce | time (ms): 0.35 |
     msg size: 3.97 MB | algbw (Gbps): 181.49 | busbw (Gbps): 158.80

With `debug`, `comm op: all_reduce | [Caller Func: reduce_tensor] | time (ms): …`.  Sizes are rounded to two decimals,
so bytes are too.  The size is that of the tensor that the rank puts in.  The line does not say among which ranks;
the number of ranks of the job follows from the two bandwidths, whose ratio is (n−1)/n: it is known where only one n
fits all lines.  All operations are taken as of all ranks.  The time in front of a line is that of its end.

`batch_isend_irecv` is a batch of Sends and Receives, of which only the bytes together are told: one operation SendRecv.

`log_summary()` prints a table of all operations so far, which is read where a log has no lines of single ones; of
several the last one counts, as each includes those before:

    Comm. Op            Message Size        Count               Total Latency(ms)   Avg Latency(ms)     tput_avg …
    all_reduce
                        64.0 MB             100                 812.50              8.11                132.1    …

It tells how many operations of each size there were, and how long they took together: each is taken to have taken its
share.  It tells neither order nor times.

Source: deepspeed/utils/comms_logging.py, deepspeed/comm/utils.py of DeepSpeed 0.8 to 0.17.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from railscope.agent.dataset.files import LARGEST_PAYLOAD_BYTES, UNNAMED_NODE
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
_TABLE: Final = re.compile(r"Comm\. Op\s+Message Size\s+Count\s+(?P<kind>Total Latency\(ms\)|Total comm lat\(ms\))")
_ROW: Final = re.compile(
    r"(?:^|\s{4})\s*(?P<size>\d{1,12}(?:\.\d{1,6})?) ?(?P<unit>[KMGTPE]?B)\s+(?P<count>\d{1,12})\s+"
    r"(?P<total>\d{1,15}\.\d{1,6})\s+\d{1,15}\.\d{1,6}\s+(?P<algbw>\d{1,12}\.\d\d)\s+(?P<busbw>\d{1,12}\.\d\d)\s*$"
)
_ROW_NAME: Final = re.compile(r"\s*(?:\S{1,100}:\s*)?(?P<op>[a-z]\w{1,60})(?: \| \[Caller Func: [^\]]{0,300}\])?\s*")
_MOST_SUMMED: Final = 1 << 22
"""Operations of a table, which become a row each."""
_BATCH: Final = "batch_isend_irecv"
_RANK: Final = re.compile(r"\[Rank (\d{1,7})\]")
_UNITS: Final = {unit: 1024**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB", "PB", "EB"))}
_SHARED: Final = frozenset({Op.AllReduce, Op.AllGather, Op.ReduceScatter})
"""Operations whose two bandwidths have the ratio (n−1)/n; AllToAll has it too, but of sums over lists."""
_ROUNDED: Final = 0.005
_MOST_RANKS: Final = 1 << 20


def has_format(head: bytes) -> bool:
    """Whether the beginning of a file looks like a log of DeepSpeed's communication logger."""
    single = b"comm op: " in head and b"time (ms): " in head
    return single or (b"Comm. Op" in head and b"Total Latency(ms)" in head)


def import_files(
    sources: Sequence[Source], target: ImportTarget, problems: Problems, node: str | None, all_ranks: int | None = None
) -> None:
    """Put operations of DeepSpeed's logs into the dataset, as calls and as operations.

    Args:
        node: the host; None: they do not say.
        all_ranks: how many ranks the job has, as the user says; None: as the logs tell.
    """
    where = node or UNNAMED_NODE
    for source in sources:
        _Log(source, target, problems, where).read(all_ranks or _world_size(source))
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
        summary = _Summary()
        single = False
        with self._source.open() as stream:
            for number, line in numbered_lines(stream):
                if line is None:
                    self._problems.count_skipped(self._source.name, number, "the line is too long")
                elif _MARK in line:
                    single = True
                    self._wrapped_line(number, line, ranks)
                else:
                    summary.read_line(number, line)
            if stream.damage:
                self._problems.count_skipped(self._source.name, 0, stream.damage)
        if not single:
            self._summed(summary.rows, ranks)
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
        op = _operation(found["op"])
        if op is None:
            return
        before = line[: found.start()]
        rank = _RANK.search(before)
        self._times.read_prefix(number, before)
        length_ns = round(float(found["time"]) * 1e6)
        self._operation(op, _payload(op, _size(found), ranks), length_ns, 0 if rank is None else int(rank[1]))

    def _summed(self, rows: Sequence[_Row], ranks: int | None) -> None:
        """Add the operations of a table, each with its share of the time."""
        left = _MOST_SUMMED
        for row in rows:
            try:
                op = _operation(row.name)
                if op is None:
                    continue
                if row.times > left:
                    raise UnknownName(f"{row.times} operations in one row of a table")
                payload_bytes = _payload(op, row.size_bytes, ranks)
            except UnknownName as error:
                self._problems.count_skipped(self._source.name, row.line, str(error))
                continue
            left -= row.times
            self._times.read_prefix(row.line, "")
            for _ in range(row.times):
                self._operation(op, payload_bytes, round(row.total_ms * 1e6 / row.times), 0)
        if rows:
            self._problems.add_note(
                "DeepSpeed's table tells how many operations of a size there were, and their time together: each has "
                "its share"
            )

    def _operation(self, op: Op, payload_bytes: int, length_ns: int, rank: int) -> None:
        instance = self._instance(rank)
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


class _Row(NamedTuple):
    """A row of a table."""

    line: int
    name: str
    size_bytes: int
    times: int
    """How often."""
    total_ms: float
    algbw: float
    busbw: float


class _Summary:
    """The last table of a log."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self._name = ""
        self._inside = False

    def read_line(self, number: int, line: str) -> None:
        """Read a line that is no single operation."""
        if "Comm. Op" in line and (header := _TABLE.search(line)) is not None:
            # The second table, of stragglers, has the same operations.
            self._inside = header["kind"].startswith("Total Latency")
            if self._inside:
                self.rows = []
            self._name = ""
        elif self._inside:
            row = _ROW.search(line)
            if row is not None:
                if self._name:
                    self.rows.append(_row(number, self._name, row))
            elif (name := _ROW_NAME.fullmatch(line)) is not None:
                self._name = name["op"]
            elif line.strip():
                self._inside = False


def _row(number: int, name: str, row: re.Match[str]) -> _Row:
    size_bytes = round(float(row["size"]) * _UNITS[row["unit"]])
    return _Row(
        number, name, size_bytes, int(row["count"]), float(row["total"]), float(row["algbw"]), float(row["busbw"])
    )


def _operation(name: str) -> Op | None:
    return Op.SendRecv if name == _BATCH else parse_operation(name)


def _size(found: re.Match[str]) -> int:
    size_bytes: int = round(float(found["size"]) * _UNITS[found["unit"]])
    if size_bytes > LARGEST_PAYLOAD_BYTES:
        raise UnknownName("an impossible size")
    return size_bytes


def _payload(op: Op, size_bytes: int, ranks: int | None) -> int:
    """Bytes with NCCL's meaning of count."""
    if op not in (Op.ReduceScatter, Op.AllToAll):
        return size_bytes
    if ranks is None:
        raise UnknownName(f"{op.name} among a number of ranks that the log does not contain")
    return round(size_bytes / ranks)


def _world_size(source: Source) -> int | None:
    """Ranks of the job; None: the log does not tell, or its lines contradict each other."""
    summary = _Summary()
    ranks = ranks_of_bandwidths(_bandwidths(source, summary))
    return ranks or ranks_of_bandwidths((row.algbw, row.busbw) for row in summary.rows if _is_shared(row.name))


def _bandwidths(source: Source, summary: _Summary) -> Iterator[tuple[float, float]]:
    """Both bandwidths of single operations; other lines are given to `summary`."""
    with source.open(counted=False) as stream:
        for number, line in numbered_lines(stream):
            if line is not None and _MARK not in line:
                summary.read_line(number, line)
            elif (
                line is not None
                and (found := _LINE.search(line)) is not None
                and found["algbw"] is not None
                and _is_shared(found["op"])
            ):
                yield float(found["algbw"]), float(found["busbw"])


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
