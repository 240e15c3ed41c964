"""Writes recorded datasets: rows of the tables of `schema`, into files by table, node and hour."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from railscope.agent.dataset.files import hour_folder, make_folder, part_name, replace_surrogates, write_atomically
from railscope.agent.dataset.schema import TABLES

_COMPRESSION: Final = "zstd"
_COMPRESSION_LEVEL: Final = 1
"""Higher ones take longer for little: what is in these tables is small once it is encoded."""
_RISING: Final = frozenset({"time_ns", "begin_ns", "end_ns", "handed_over_ns", "sequence"})
"""Columns whose differences are smaller than their values: stored as such, a call takes 5 to 8 bytes in all."""
_TIMES: Final = frozenset({"time_ns", "begin_ns", "end_ns"})
_NO_METADATA: Final[Mapping[str, str]] = {}


class DatasetWriter:
    """Writes what one node recorded; several may write into one folder at a time."""

    def __init__(self, folder: Path, node: str, *, durable: bool = False, first_part: int = 0) -> None:
        """`durable`: what was written outlives a power failure, which takes some milliseconds a file; `first_part`:
        where parts are numbered from, if others write parts of the same recording."""
        self._folder = folder
        self._node = replace_surrogates(node)
        self._durable = durable
        self.recording = secrets.randbits(62)
        """The number of this recording: the column `recording` of all its rows."""
        self._parts = first_part

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def durable(self) -> bool:
        return self._durable

    @property
    def node(self) -> str:
        return self._node

    def add(self, table: str, rows: pa.Table, hour_ns: int) -> Path:
        """Write rows into a file of their own, in the folder of the hour of `hour_ns` (time of day).

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        self._parts += 1
        return self.write_part(table, rows, hour_ns, self._parts)

    def add_rows(
        self, table: str, rows: list[dict[str, Any]], hour_ns: int, metadata: Mapping[str, str] = _NO_METADATA
    ) -> Path:
        """As `add`, from rows by column; columns that a row lacks are null, `recording` and `node` are filled in."""
        self._parts += 1
        return self.write_part(table, self.make_table(table, rows), hour_ns, self._parts, metadata)

    def write_part(
        self, table: str, rows: pa.Table, hour_ns: int, part: int, metadata: Mapping[str, str] = _NO_METADATA
    ) -> Path:
        """As `add`, as the part of this number; one that is there already gives way.

        `metadata` is kept in the file, beside the rows.

        Raises:
            OSError: it cannot be written; what was there stays.
        """
        self._parts = max(self._parts, part)
        folder = hour_folder(self._folder, table, self._node, hour_ns)
        make_folder(folder, durable=self._durable)
        file = folder / part_name(self.recording, part)
        write_table(file, table, rows, durable=self._durable, metadata=metadata)
        return file

    def make_table(self, table: str, rows: list[dict[str, Any]]) -> pa.Table:
        """Rows by column as a table, as `add_rows` takes them."""
        own: Mapping[str, Any] = {"recording": self.recording, "node": self._node}
        return pa.Table.from_pylist([{**own, **row} for row in rows], schema=TABLES[table])


def write_table(
    file: Path, table: str, rows: pa.Table, *, durable: bool, metadata: Mapping[str, str] = _NO_METADATA
) -> None:
    """Write one file of a table, whole or not at all; columns that the rows lack are null.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    with (
        write_atomically(file, durable=durable) as partial,
        pq.ParquetWriter(partial, TABLES[table], **writing_options(table)) as writer,
    ):
        writer.write_table(_completed(table, rows))
        if metadata:
            writer.add_key_value_metadata(dict(metadata))


def read_part(file: Path, table: str, most_rows: int | None = None) -> pa.Table:
    """The rows of one file of a table, in memory; columns that it lacks are null.

    `most_rows` None: any number, however few bytes they take in the file.

    Raises:
        OSError, ValueError: it cannot be read, or has more rows.
    """
    words = [field.name for field in TABLES[table] if pa.types.is_dictionary(field.type)]
    with pq.ParquetFile(file, read_dictionary=words) as part:
        if most_rows is not None and part.metadata.num_rows > most_rows:
            raise ValueError(f"it has {part.metadata.num_rows} rows, and {most_rows} at most are read")
        return _completed(table, part.read())


def read_row(file: Path, table: str) -> dict[str, Any]:
    """The row of a file that has one.

    Raises:
        OSError, ValueError: it cannot be read, or has another number of rows.
    """
    (row,) = read_part(file, table, most_rows=1).to_pylist()
    found: dict[str, Any] = row
    return found


def write_row(file: Path, table: str, row: dict[str, Any]) -> None:
    """Replace the only row of a file; the file keeps its modification time, by which its age is judged.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    status = file.stat()
    said = pq.read_metadata(file).metadata or {}
    metadata = {key.decode(): value.decode() for key, value in said.items()}
    write_table(file, table, pa.Table.from_pylist([row], schema=TABLES[table]), durable=True, metadata=metadata)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def last_moment_ns(file: Path, table: str) -> int:
    """The last time in a part of events, as the file's own statistics have it; 0: they have none.

    Raises:
        OSError: it cannot be read.
    """
    metadata = pq.read_metadata(file)
    at = metadata.schema.names.index("end_ns" if table == "operations" else "time_ns")
    groups = (metadata.row_group(number).column(at).statistics for number in range(metadata.num_row_groups))
    return max((one.max for one in groups if one is not None and one.has_min_max), default=0)


def _completed(table: str, rows: pa.Table) -> pa.Table:
    schema = TABLES[table]
    if rows.schema.equals(schema):
        return rows
    for field in schema:
        if field.name not in rows.column_names:
            rows = rows.append_column(field, pa.nulls(len(rows), field.type))
    return rows.select(schema.names).cast(schema)


def writing_options(table: str) -> dict[str, Any]:
    """How the columns of a dataset's table are encoded, as pyarrow's Parquet writer wants to know it."""
    names = TABLES[table].names
    rising = _RISING.intersection(names)
    return {
        # The descriptions of columns would be most of a small file.
        "store_schema": False,
        "compression": _COMPRESSION,
        "compression_level": _COMPRESSION_LEVEL,
        # Readers look for times; counting the least and the most of everything costs a fifth of the writing.
        "write_statistics": [name for name in names if name in _TIMES],
        "use_dictionary": [name for name in names if name not in rising],
        "column_encoding": dict.fromkeys(rising, "DELTA_BINARY_PACKED"),
    }
