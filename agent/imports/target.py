"""The dataset that importers write to: one recording for each node that the data names.

Rows go to disk in batches, so what is in memory does not grow with what is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from railscope.agent.dataset.files import node_folder, replace_surrogates
from railscope.agent.dataset.leftovers import has_row, remove_recordings
from railscope.agent.dataset.replacement import remove_replaced, replacing
from railscope.agent.dataset.schema import SCHEMA_VERSION, TABLES, UNNAMED_NODE
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.imports.earlier import Content
from railscope.agent.imports.facts import (
    ImportedCall,
    ImportedConnection,
    ImportedEnd,
    ImportedKernel,
    ImportedOperation,
    printable,
)
from railscope.agent.imports.job_names import find_tag, with_tag

_BATCH_ROWS: Final = 1 << 16
_MOST_ROWS: Final = 1 << 20
"""In memory, of all nodes: some hundred bytes each."""
_LONGEST_NAME: Final = 1 << 12
_HOUR_NS: Final = 3_600_000_000_000
_TABLE_OF: Final[dict[type, tuple[str, str]]] = {
    ImportedCall: ("calls", "time_ns"),
    ImportedOperation: ("operations", "begin_ns"),
    ImportedKernel: ("compute", "begin_ns"),
}
"""Table of each kind of row, and the column that says in which hour it belongs."""

Row = ImportedCall | ImportedOperation | ImportedKernel


@dataclass(slots=True)
class _Node:
    """What is known of one node so far."""

    writer: DatasetWriter
    instances: int = 0
    rows: dict[type, list[Row]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[type, int] = field(default_factory=lambda: defaultdict(int))
    ends: list[ImportedEnd] = field(default_factory=list)
    connections: list[ImportedConnection] = field(default_factory=list)
    began_ns: int | None = None
    ended_ns: int | None = None


@dataclass(frozen=True, slots=True)
class ImportedNode:
    """What was put into the dataset for one node."""

    node: str
    communicator_ends: int
    calls: int
    operations: int
    kernels: int


class ImportTarget:
    """Takes what one importer finds in files of one format."""

    def __init__(self, folder: Path, source: str, content: Content) -> None:
        """`source` is the name of the format, for `recordings.source`; `content` stands for what is in the files.

        Numbers of recordings follow from both and the node.  What is imported again has the next number that is free,
        and earlier imports that it replaces go when all of this one is there: until then they count, and this one does
        not.
        """
        self._folder = folder
        self._source = source
        self._content = content
        self._nodes: dict[str, _Node] = {}
        self._written: list[Path] = []
        self._replaces = {recording for earlier in content.replaces for recording in earlier.recordings}
        """Folder of the node and number of each recording that goes when this import is there."""
        self._held = 0
        """Rows in memory."""
        self.times_known = True
        """False: the data had no times, and `…_ns` are made up to keep the order."""
        self.clock_error_ns: int | None = None
        """What is known of the accuracy of times."""
        self.replaced = False
        """The same was in the dataset before, and gave way."""
        self.doubled = False
        """A rank of a communicator was found twice: the files are not those of one job."""
        self.another_job = False
        """Communicators have the names of others in the dataset, and got names of their own."""
        self.several_jobs = False
        """More than one job in the dataset may be the one that these are of."""

    def new_instance(self, node: str) -> int:
        """A number for one rank's end of one communicator on a node."""
        one = self._node(node)
        one.instances += 1
        return one.instances

    def add(self, node: str, row: Row) -> None:
        """Add a call, an operation or a kernel."""
        one = self._nodes.get(node) or self._node(node)
        kind = type(row)
        rows = one.rows[kind]
        rows.append(row)
        self._held += 1
        if len(rows) >= _BATCH_ROWS:
            self._flush(one, kind)
        elif self._held >= _MOST_ROWS:
            self._flush_the_most()

    def add_ends(self, node: str, ends: Iterable[ImportedEnd]) -> None:
        """Add ends of communicators, once all is known of them."""
        self._node(node).ends.extend(ends)

    def add_connections(self, node: str, connections: Iterable[ImportedConnection]) -> None:
        """Add connections of ends that are added as well."""
        self._node(node).connections.extend(connections)

    @property
    def empty(self) -> bool:
        """Whether nothing was found."""
        return not any(one.counts or any(one.rows.values()) or one.ends for one in self._nodes.values())

    def finish(self, lines_skipped: int) -> tuple[ImportedNode, ...]:
        """Write what is left; `lines_skipped` stands in the first node's recording, since no node owns them.

        Raises:
            OSError: something cannot be written, or what was there before not be removed; call `discard`.
        """
        for one in self._nodes.values():
            for kind in list(one.rows):
                self._flush(one, kind)
        self._name_apart()
        places = _places({name: one.ends for name, one in self._nodes.items()})
        for name, one in sorted(self._nodes.items()):
            began_ns = one.began_ns or 0
            if one.ends:
                rows = [_end_row(end, *places[name, end.instance]) for end in one.ends]
                self._written.append(one.writer.add_rows("communicators", rows, began_ns))
            if one.connections:
                links = [link._asdict() for link in one.connections]
                self._written.append(one.writer.add_rows("connections", links, began_ns))
        new = [(_place(self._folder, name), one.writer.recording) for name, one in self._nodes.items()]
        with replacing(self._folder, new, self._replaces):
            try:
                result = self._write_recordings(lines_skipped)
            except BaseException:
                # Before what hides them ends.
                self.discard()
                raise
        # From here on this import is the one that stays, whatever becomes of the others.
        self._written.clear()
        remove_replaced(self._folder, new, self._replaces)
        self.replaced = bool(self._replaces)
        return result

    def _write_recordings(self, lines_skipped: int) -> tuple[ImportedNode, ...]:
        result = []
        for number, (name, one) in enumerate(sorted(self._nodes.items())):
            began_ns, ended_ns = one.began_ns or 0, one.ended_ns or 0
            recording = {
                "schema_version": SCHEMA_VERSION,
                "source": self._source,
                "railscope": metadata.version("railscope"),
                "simulated": False,
                "began_ns": began_ns,
                "ended_ns": ended_ns,
                "clock_error_ns": self.clock_error_ns,
                "lines_skipped": 0 if number else lines_skipped,
                "compute_recorded": one.counts[ImportedKernel] > 0,
                "times_known": self.times_known,
            }
            self._written.append(one.writer.add_rows("recordings", [recording], began_ns, self._content.metadata))
            result.append(
                ImportedNode(
                    node=name,
                    communicator_ends=sum(end.attributed is not False for end in one.ends),
                    calls=one.counts[ImportedCall],
                    operations=one.counts[ImportedOperation],
                    kernels=one.counts[ImportedKernel],
                )
            )
        return tuple(result)

    def _name_apart(self) -> None:
        """Give communicators names that are not those of another job in the dataset."""
        ends = [end for one in self._nodes.values() for end in one.ends]
        ends = [end for end in ends if end.comm is not None]
        ranked = [(end.comm, end.rank) for end in ends if end.rank is not None]
        self.doubled = len(ranked) != len(set(ranked))
        moments = [one.began_ns for one in self._nodes.values() if one.began_ns is not None]
        moments += [one.ended_ns for one in self._nodes.values() if one.ended_ns is not None]
        window = (min(moments), max(moments)) if moments and self.times_known else None
        gone = {one.writer.recording for one in self._nodes.values()}
        gone.update(recording for _, recording in self._replaces)
        named = [(_fit(end.comm), end.rank) for end in ends if end.comm is not None]
        tag, self.several_jobs = find_tag(self._folder, self._source, named, window, gone)
        self.another_job = tag is None
        tag = self._content.digest.hex()[:8] if tag is None else tag
        for one in self._nodes.values():
            one.ends = [
                end if end.comm is None else replace(end, comm=with_tag(_fit(end.comm), tag)) for end in one.ends
            ]

    def discard(self) -> None:
        """Take away what was written and does not count yet: what it replaces is still there, or was not removed."""
        for file in reversed(self._written):
            with contextlib.suppress(OSError):
                file.unlink()

    def _node(self, name: str) -> _Node:
        name = _fit(name)
        if name not in self._nodes:
            writer = DatasetWriter(self._folder, name)
            writer.recording = self._free_number(name)
            self._nodes[name] = _Node(writer)
        return self._nodes[name]

    def _free_number(self, node: str) -> int:
        """The first number for this import of which there is no row; what one that was stopped has left of it goes."""
        place = _place(self._folder, node)
        for times in itertools.count():
            number = _number(self._content.digest, self._source, node, times)
            if not has_row(self._folder, place, number):
                break
            self._replaces.add((place, number))
        remove_recordings(self._folder, [(place, number)])
        return number

    def _flush_the_most(self) -> None:
        """Write the nodes with the most rows: as few files as it takes to have half of the room again."""
        waiting = [(len(rows), name, kind) for name, one in self._nodes.items() for kind, rows in one.rows.items()]
        for _, name, kind in sorted(waiting, key=lambda each: -each[0]):
            if self._held <= _MOST_ROWS // 2:
                return
            self._flush(self._nodes[name], kind)

    def _flush(self, one: _Node, kind: type) -> None:
        rows = one.rows.pop(kind, [])
        if not rows:
            return
        self._held -= len(rows)
        one.counts[kind] += len(rows)
        table, time_column = _TABLE_OF[kind]
        columns: dict[str, Sequence[Any]] = dict(zip(rows[0]._fields, zip(*rows, strict=True), strict=True))
        times = columns[time_column]
        ends = columns.get("end_ns", times)
        one.began_ns = min(times) if one.began_ns is None else min(one.began_ns, *_extremes(times))
        one.ended_ns = max(ends) if one.ended_ns is None else max(one.ended_ns, *_extremes(ends))
        by_hour: defaultdict[int, list[int]] = defaultdict(list)
        for index, time_ns in enumerate(times):
            by_hour[time_ns // _HOUR_NS].append(index)
        whole = _table(table, columns, one.writer, len(rows))
        for hour, indices in sorted(by_hour.items()):
            part = whole if len(indices) == len(rows) else whole.take(indices)
            self._written.append(one.writer.add(table, part, hour * _HOUR_NS))


def _place(folder: Path, node: str) -> str:
    """The name of a node's folders."""
    return node_folder(folder, "recordings", node).name


def _extremes(values: Sequence[int]) -> tuple[int, int]:
    return min(values), max(values)


def _table(name: str, columns: dict[str, Sequence[Any]], writer: DatasetWriter, count: int) -> pa.Table:
    schema = TABLES[name]
    known = {**columns, "recording": [writer.recording] * count, "node": [writer.node] * count}
    return pa.table([_column(known.get(field.name, [None] * count), field.type) for field in schema], schema=schema)


def _number(content: bytes, source: str, node: str, times: int) -> int:
    """A number that another recording has with a chance of one in 2^62; `times`: how often others have it already."""
    text = f"{content.hex()}\n{source}\n{node}" + (f"\n{times}" if times else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2


def _fit(name: str) -> str:
    """A name of others, fit for files and terminals; it stays itself where it is one."""
    return printable(name, _LONGEST_NAME)


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, type=kind)
    except UnicodeEncodeError:
        return pa.array([replace_surrogates(one) if isinstance(one, str) else one for one in values], type=kind)


def _end_row(end: ImportedEnd, local_ranks: int | None, node_rank: int | None) -> dict[str, Any]:
    said = {name: getattr(end, name) for name in end.__slots__}
    row = {name: _fit(value) if isinstance(value, str) else value for name, value in said.items()}
    return {**row, "local_ranks": local_ranks, "node_rank": node_rank}


def _places(nodes: dict[str, list[ImportedEnd]]) -> dict[tuple[str, int], tuple[int | None, int | None]]:
    """Ranks on the node, and index of the node, of every end; known where all ranks and their hosts are.

    NCCL numbers the nodes of a communicator by their lowest rank.
    """
    by_comm: defaultdict[str, list[tuple[str, ImportedEnd]]] = defaultdict(list)
    result: dict[tuple[str, int], tuple[int | None, int | None]] = {}
    for node, ends in nodes.items():
        for end in ends:
            if end.comm is None:
                result[node, end.instance] = None, None
            else:
                by_comm[end.comm].append((node, end))
    for members in by_comm.values():
        hosts = {end.rank: node for node, end in members if end.rank is not None}
        complete = (
            len(hosts) == len(members)
            and {end.nranks for _, end in members} == {len(members)}
            and UNNAMED_NODE not in hosts.values()
        )
        order = list(dict.fromkeys(hosts[rank] for rank in sorted(hosts)))
        counts = Counter(hosts.values())
        for node, end in members:
            result[node, end.instance] = (counts[node], order.index(node)) if complete else (None, None)
    return result
