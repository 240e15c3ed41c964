"""Rows of imported data, written into the parts of a dataset in batches: memory does not grow with what is imported.

Several processes may write the parts of one import side by side: each has numbers of its own for parts and instances.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from railscope.agent.dataset.files import replace_surrogates
from railscope.agent.dataset.schema import TABLES
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.imports.facts import (
    ImportedCall,
    ImportedConnection,
    ImportedEnd,
    ImportedKernel,
    ImportedOperation,
    printable,
)

_BATCH_ROWS: Final = 1 << 16
_MOST_ROWS: Final = 1 << 20
"""In memory, of all nodes: some hundred bytes each."""
_LONGEST_NAME: Final = 1 << 12
_INSTANCES_OF_A_SHARE: Final = 1 << 32
_PARTS_OF_A_SHARE: Final = 1 << 16
MOST_SHARES: Final = 1_000
"""Numbers of parts have eight digits."""
_HOUR_NS: Final = 3_600_000_000_000
_TABLE_OF: Final[dict[type, tuple[str, str]]] = {
    ImportedCall: ("calls", "time_ns"),
    ImportedOperation: ("operations", "begin_ns"),
    ImportedKernel: ("compute", "begin_ns"),
}
"""Table of each kind of row, and the column that says in which hour it belongs."""

Row = ImportedCall | ImportedOperation | ImportedKernel


@dataclass(slots=True)
class NodeRows:
    """What is known of one node so far."""

    writer: DatasetWriter
    instances: int = 0
    rows: dict[type, list[Row]] = field(default_factory=lambda: defaultdict(list))
    """Not yet in columns."""
    columns: dict[type, list[pa.Table]] = field(default_factory=lambda: defaultdict(list))
    """Before these rows."""
    counts: dict[type, int] = field(default_factory=lambda: defaultdict(int))
    ends: list[ImportedEnd] = field(default_factory=list)
    connections: list[ImportedConnection] = field(default_factory=list)
    began_ns: int | None = None
    ended_ns: int | None = None


class ImportedRows:
    """Takes rows of any number of nodes."""

    def __init__(self, folder: Path, recording_of: Callable[[str], int], share: int = 0) -> None:
        """`recording_of`: the number of a node's recording; `share`: which share of the import it is."""
        self.nodes: dict[str, NodeRows] = {}
        self.written: list[Path] = []
        """Files, in their order."""
        self.times_known = True
        """False: the data had no times, and `…_ns` are made up to keep the order."""
        self.clock_error_ns: int | None = None
        """What is known of the accuracy of times."""
        self._folder = folder
        self._recording_of = recording_of
        self._share = share
        self._held = 0
        """Rows in memory."""

    def new_instance(self, node: str) -> int:
        """A number for one rank's end of one communicator on a node."""
        one = self.node(node)
        one.instances += 1
        return one.instances

    def add(self, node: str, row: Row) -> None:
        """Add a call, an operation or a kernel."""
        one = self.nodes.get(node) or self.node(node)
        kind = type(row)
        rows = one.rows[kind]
        rows.append(row)
        self._held += 1
        if len(rows) >= _BATCH_ROWS:
            self._flush(one, kind)
        elif self._held >= _MOST_ROWS:
            self._flush_the_most()

    def add_columns(self, node: str, kind: type[Row], columns: Mapping[str, Any]) -> None:
        """Add many rows of one kind by their columns, as arrays or sequences of equal length; others are null."""
        one = self.node(node)
        self._put_into_columns(one, kind)
        table = _table(_TABLE_OF[kind][0], columns, one.writer, len(columns[_TABLE_OF[kind][1]]))
        one.columns[kind].append(table)
        self._held += len(table)
        if sum(map(len, one.columns[kind])) >= _BATCH_ROWS:
            self._flush(one, kind)
        elif self._held >= _MOST_ROWS:
            self._flush_the_most()

    def add_ends(self, node: str, ends: Iterable[ImportedEnd]) -> None:
        """Add ends of communicators, once all is known of them."""
        self.node(node).ends.extend(ends)

    def add_connections(self, node: str, connections: Iterable[ImportedConnection]) -> None:
        """Add connections of ends that are added as well."""
        self.node(node).connections.extend(connections)

    def node(self, name: str) -> NodeRows:
        """What is known of a node."""
        name = fit_name(name)
        if name not in self.nodes:
            writer = DatasetWriter(self._folder, name, first_part=self._share * _PARTS_OF_A_SHARE)
            writer.recording = self._recording_of(name)
            self.nodes[name] = NodeRows(writer, self._share * _INSTANCES_OF_A_SHARE)
        return self.nodes[name]

    def flush(self) -> None:
        """Write what is left."""
        for one in self.nodes.values():
            for kind in _TABLE_OF:
                self._flush(one, kind)

    def _flush_the_most(self) -> None:
        """Write the nodes with the most rows: as few files as it takes to have half of the room again."""
        waiting = [
            (len(one.rows[kind]) + sum(map(len, one.columns[kind])), name, number)
            for name, one in self.nodes.items()
            for number, kind in enumerate(_TABLE_OF)
        ]
        for _, name, number in sorted(waiting, reverse=True):
            if self._held <= _MOST_ROWS // 2:
                return
            self._flush(self.nodes[name], tuple(_TABLE_OF)[number])

    def _put_into_columns(self, one: NodeRows, kind: type) -> None:
        rows = one.rows.pop(kind, [])
        if rows:
            columns = dict(zip(rows[0]._fields, zip(*rows, strict=True), strict=True))
            one.columns[kind].append(_table(_TABLE_OF[kind][0], columns, one.writer, len(rows)))

    def _flush(self, one: NodeRows, kind: type) -> None:
        self._put_into_columns(one, kind)
        pieces = one.columns.pop(kind, [])
        if not pieces:
            return
        table, time_column = _TABLE_OF[kind]
        whole = pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces).unify_dictionaries().combine_chunks()
        self._held -= len(whole)
        one.counts[kind] += len(whole)
        times = whole[time_column].to_numpy()
        ends = whole["end_ns"].to_numpy() if "end_ns" in whole.column_names else times
        began_ns, ended_ns = int(times.min()), int(ends.max())
        one.began_ns = began_ns if one.began_ns is None else min(one.began_ns, began_ns)
        one.ended_ns = ended_ns if one.ended_ns is None else max(one.ended_ns, ended_ns)
        hours = times // _HOUR_NS
        for hour in np.unique(hours).tolist():
            indices = np.flatnonzero(hours == hour)
            part = whole if len(indices) == len(whole) else whole.take(pa.array(indices))
            self.written.append(one.writer.add(table, part, hour * _HOUR_NS))


def _table(name: str, columns: Mapping[str, Any], writer: DatasetWriter, count: int) -> pa.Table:
    schema = TABLES[name]
    numbers = np.zeros(count, np.int32)
    own = {
        "recording": np.full(count, writer.recording, np.int64),
        "node": pa.DictionaryArray.from_arrays(numbers, pa.array([writer.node])),
    }
    arrays = [
        own[one.name]
        if one.name in own
        else pa.nulls(count, one.type)
        if columns.get(one.name) is None
        else _column(columns[one.name], one.type)
        for one in schema
    ]
    return pa.table(arrays, schema=schema)


def fit_name(name: str) -> str:
    """A name of others, fit for files and terminals; it stays itself where it is one."""
    return printable(name, _LONGEST_NAME)


def _column(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    try:
        return pa.array(values, type=kind)
    except UnicodeEncodeError:
        return pa.array([replace_surrogates(one) if isinstance(one, str) else one for one in values], type=kind)
