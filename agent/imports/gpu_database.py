"""Databases of GPU profilers: Nsight Systems' export (`nsys export --type sqlite`) and rocprofv3's rocpd, both SQLite.

They hold the kernels and copies of all processes that were profiled, with their streams; `gpu_work` sorts them.  What
NCCL was called for is in neither in a form that is read here: sizes and communicators are unknown, times are exact.

nsys: times count from the begin of the session, whose time of day is `utcEpochNs`; `globalPid` holds the process in
bits 24 to 47; devices are numbered as the process sees them.  rocpd: each profiled process has its own set of tables,
whose names end in its uuid; times count from the host's boot, so that hosts are not on one clock.

A database of others is not trusted: only tables are read, no views and no virtual tables.

Source: https://docs.nvidia.com/nsight-systems, "Exporter"; source/share/rocprofiler-sdk-rocpd/rocpd_tables.sql of
rocprofiler-sdk.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from railscope.agent.dataset.files import LARGEST_PAYLOAD_BYTES, UNNAMED_NODE
from railscope.agent.imports.communication_kernels import KernelNames
from railscope.agent.imports.facts import Problems
from railscope.agent.imports.gpu_work import GpuWork, KernelTally, Span
from railscope.agent.imports.json_stream import small_number, text, whole_number
from railscope.agent.imports.sources import Source
from railscope.agent.imports.target import ImportTarget

NSYS: Final = "nsys"
ROCPD: Final = "rocpd"
MAGIC: Final = b"SQLite format 3\0"
_DISPATCHES: Final = "rocpd_kernel_dispatch"
_KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
_LONGEST_VALUE: Final = 1 << 24
_MOST_PROCESSES: Final = 4096
_COPIED_BYTES: Final = 1 << 20
_MOST_NS: Final = 1 << 62
_PEER_TO_PEER: Final = 10
"""CUPTI_ACTIVITY_MEMCPY_KIND_PTOP."""
NO_SIZES: Final = "these files do not say what NCCL was called for: sizes and communicators are unknown"
FROM_BOOT: Final = "times of rocprofv3 count from the boot of each host: what several hosts did is not aligned"

Row = tuple[Any, ...]


def is_nsys(head: bytes) -> bool:
    """Whether the beginning of a file looks like an export of Nsight Systems."""
    return head.startswith(MAGIC) and b"CUPTI_ACTIVITY_KIND_" in head


def is_rocpd(head: bytes) -> bool:
    """Whether the beginning of a file looks like a database of rocprofv3."""
    return head.startswith(MAGIC) and b"rocpd_" in head


def import_nsys(
    sources: Sequence[Source], target: ImportTarget, problems: Problems, node: str | None, names: KernelNames
) -> None:
    """Put the kernels and copies of exports of Nsight Systems into the dataset; `node` None: as the files say."""
    _import(sources, problems, lambda database, tally: _Nsys(database, target, node, names, tally).read())


def import_rocpd(
    sources: Sequence[Source], target: ImportTarget, problems: Problems, node: str | None, names: KernelNames
) -> None:
    """Put the kernels and copies of rocpd databases into the dataset; `node` None: as the files say."""
    problems.add_note(FROM_BOOT)
    _import(sources, problems, lambda database, tally: _Rocpd(database, target, node, names, tally).read())


def _import(
    sources: Sequence[Source],
    problems: Problems,
    read: Callable[[_Database, KernelTally], int],
) -> None:
    tally = KernelTally()
    for source in sources:
        try:
            with _opened(source) as path, closing(_connected(path)) as connection:
                skipped = read(_Database(connection), tally)
        except sqlite3.Error as error:
            problems.count_skipped(source.name, 0, f"the database is damaged, or not whole: {error}")
            continue
        for _ in range(skipped):
            problems.count_skipped(source.name, 0, "a kernel or copy without its time")
    if tally.communication:
        problems.add_note(NO_SIZES)
    tally.add_notes(problems)


@contextmanager
def _opened(source: Source) -> Iterator[Path]:
    """The file itself; of what is compressed or in an archive, a copy."""
    if source.path is not None:
        yield source.path
        return
    with tempfile.NamedTemporaryFile(prefix="railscope-", suffix=".sqlite") as copy:
        with source.open() as stream:
            while content := stream.read(_COPIED_BYTES):
                copy.write(content)
        copy.flush()
        yield Path(copy.name)


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    connection.text_factory = lambda content: content.decode("utf-8", "replace")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


class _Database:
    """The tables of one file."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        found = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        self.tables = frozenset(text(name) for name, sql in found if not text(sql).upper().startswith("CREATE VIRTUAL"))

    def columns(self, table: str) -> frozenset[str]:
        """The names of a table's columns; none: it is not there."""
        if table not in self.tables:
            return frozenset()
        return frozenset(row[1] for row in self._connection.execute(f"PRAGMA table_info({_quoted(table)})"))

    def rows(self, table: str, wanted: Sequence[str], joined: tuple[str, str, str, str] | None = None) -> Iterator[Row]:
        """Columns of a table, None where it lacks one; nothing if it is not there.

        `joined`: a column of the table, another table, its column of the same value, and the column to be added.
        """
        there = self.columns(table)
        if not there:
            return
        chosen = [f"t.{_quoted(name)}" if name in there else "NULL" for name in wanted]
        behind = ""
        if joined is not None:
            column, other, key, added = joined
            if column in there and {key, added} <= self.columns(other):
                chosen.append(f"o.{_quoted(added)}")
                behind = f" LEFT JOIN {_quoted(other)} o ON o.{_quoted(key)} = t.{_quoted(column)}"
            else:
                chosen.append("NULL")
        yield from self._connection.execute(f"SELECT {', '.join(chosen)} FROM {_quoted(table)} t{behind}")


class _Processes:
    """The GPUs' work of each process of a database."""

    def __init__(self, target: ImportTarget, names: KernelNames, tally: KernelTally) -> None:
        self._target = target
        self._names = names
        self._tally = tally
        self._works: dict[tuple[str, int | None], GpuWork] = {}

    def work_of(self, node: str, pid: int | None) -> GpuWork | None:
        """What takes the work of a process; None: there are too many."""
        work = self._works.get((node, pid))
        if work is None and len(self._works) < _MOST_PROCESSES:
            work = self._works[node, pid] = GpuWork(self._target, node, self._names, self._tally)
            work.pid = pid
        return work

    def finish(self) -> None:
        for (node, _), work in self._works.items():
            self._target.add_ends(node, work.finish(None))


class _Nsys:
    """One export of Nsight Systems."""

    def __init__(
        self, database: _Database, target: ImportTarget, node: str | None, names: KernelNames, tally: KernelTally
    ) -> None:
        self._database = database
        self._processes = _Processes(target, names, tally)
        self._node = node or self._hostname()
        starts = (whole_number(row[0]) for row in database.rows("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"]))
        self._began_ns = next((start for start in starts if start is not None and 0 <= start < _MOST_NS), 0)

    def _hostname(self) -> str:
        said = self._database.rows("TARGET_INFO_SYSTEM_ENV", ["name", "value"])
        return next((text(value) for name, value in said if name == "Hostname" and text(value)), UNNAMED_NODE)

    def read(self) -> int:
        """Put everything into the dataset; returns how many rows make no sense."""
        skipped = 0
        columns = ["start", "end", "streamId", "deviceId", "globalPid"]
        available = self._database.columns(_KERNELS)
        name_column = "demangledName" if "demangledName" in available else "shortName"
        for *place, name in self._database.rows(_KERNELS, columns, (name_column, "StringIds", "id", "value")):
            span, work = self._place(place)
            if span is None or work is None:
                skipped += 1
            else:
                work.add_kernel(text(name), span)
        for table, kind in (("MEMCPY", "Memcpy"), ("MEMSET", "Memset")):
            more = [*columns, "bytes", "copyKind", "srcDeviceId", "dstDeviceId"]
            for *place, size, copy_kind, source, destination in self._database.rows(
                f"CUPTI_ACTIVITY_KIND_{table}", more
            ):
                span, work = self._place(place)
                if span is None or work is None:
                    skipped += 1
                    continue
                ends = small_number(source), small_number(destination)
                between = copy_kind == _PEER_TO_PEER or (None not in ends and ends[0] != ends[1])
                work.add_copy(f"{kind} PtoP" if between else kind, span, known_size(size), between_gpus=between)
        self._processes.finish()
        return skipped

    def _place(self, place: Sequence[Any]) -> tuple[Span | None, GpuWork | None]:
        start, end, stream, device, global_pid = place
        process = whole_number(global_pid)
        pid = None if process is None else process >> 24 & 0xFFFFFF
        return known_span(start, end, stream, device, self._began_ns), self._processes.work_of(self._node, pid)


class _Rocpd:
    """One database of rocprofv3."""

    def __init__(
        self, database: _Database, target: ImportTarget, node: str | None, names: KernelNames, tally: KernelTally
    ) -> None:
        self._database = database
        self._processes = _Processes(target, names, tally)
        self._node = node

    def read(self) -> int:
        """As of `_Nsys`."""
        found = sorted(name for name in self._database.tables if name.startswith(_DISPATCHES))
        skipped = sum(self._read_process(name.removeprefix(_DISPATCHES)) for name in found)
        self._processes.finish()
        return skipped

    def _read_process(self, uuid: str) -> int:
        database = self._database
        hosts = database.rows(f"rocpd_info_node{uuid}", ["hostname"])
        node = self._node or next((text(row[0]) for row in hosts if text(row[0])), UNNAMED_NODE)
        pids = {row[0]: whole_number(row[1]) for row in database.rows(f"rocpd_info_process{uuid}", ["id", "pid"])}
        agents = database.rows(f"rocpd_info_agent{uuid}", ["id", "type", "type_index", "logical_index"])
        # None: no GPU.
        gpus = {
            number: (by_type if by_type is not None else logical) if kind == "GPU" else None
            for number, kind, by_type, logical in agents
        }
        symbols = database.rows(f"rocpd_info_kernel_symbol{uuid}", ["id", "kernel_name", "display_name"])
        kernels = {number: text(name) or text(shown) for number, name, shown in symbols}
        skipped = 0
        columns = ["start", "end", "stream_id", "pid"]
        for start, end, stream, process, agent, kernel in database.rows(
            f"{_DISPATCHES}{uuid}", [*columns, "agent_id", "kernel_id"]
        ):
            span = known_span(start, end, stream, gpus.get(agent), 0)
            work = self._processes.work_of(node, pids.get(process))
            if span is None or work is None:
                skipped += 1
            else:
                work.add_kernel(kernels.get(kernel, ""), span)
        for start, end, stream, process, source, destination, size in database.rows(
            f"rocpd_memory_copy{uuid}", [*columns, "src_agent_id", "dst_agent_id", "size"]
        ):
            ends = gpus.get(source), gpus.get(destination)
            span = known_span(start, end, stream, ends[1] if ends[1] is not None else ends[0], 0)
            work = self._processes.work_of(node, pids.get(process))
            if span is None or work is None:
                skipped += 1
                continue
            between = None not in ends and source != destination
            work.add_copy("Memcpy PtoP" if between else "Memcpy", span, known_size(size), between_gpus=between)
        return skipped


def known_span(start: object, end: object, stream: object, device: object, began_ns: int) -> Span | None:
    """When and where a GPU worked, by what a profiler's file says, `began_ns` after 1970; None: it makes no sense."""
    begin_ns, end_ns = whole_number(start), whole_number(end)
    if begin_ns is None or end_ns is None or not 0 <= begin_ns <= end_ns < _MOST_NS - began_ns:
        return None
    gpu = small_number(device)
    return Span(began_ns + begin_ns, began_ns + end_ns, whole_number(stream), None if gpu is None else str(gpu))


def known_size(value: object) -> int | None:
    """Bytes of a copy; None: they are not told."""
    size = whole_number(value)
    return size if size is not None and 0 <= size <= LARGEST_PAYLOAD_BYTES else None


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
