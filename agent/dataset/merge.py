"""Merges the small parts of a running recording, so that a long one does not become thousands of files.

Sixteen parts in a row become one, sixteen of those again one, until it has some megabytes.  Few rows are in memory at
a time.  The new file gets its name before the old ones go; in between a reader counts the new one only (see `files`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from railscope.agent.dataset.files import Part, parse_part_name, part_name, write_atomically
from railscope.agent.dataset.schema import TABLES
from railscope.agent.dataset.writer import DatasetWriter, read_part, writing_options

_TOGETHER: Final = 16
_LARGE_BYTES: Final = 8 << 20
"""What would be larger stays as it is: of that size few are made, and reading them again costs as much as writing."""
_ROWS_AT_ONCE: Final = 100_000


@dataclass(frozen=True, slots=True)
class _Span:
    """Parts of several tables that were written together."""

    files: tuple[tuple[str, Path], ...]
    """With their tables."""
    level: int
    """How often they were put together."""

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for _, path in self.files if path.exists())


class Merger:
    """Of one recording; for the thread that writes it."""

    def __init__(self, writer: DatasetWriter) -> None:
        self._writer = writer
        self._spans: list[_Span] = []
        """Those that may still be put together, oldest first; levels never rise."""

    def add(self, files: Sequence[tuple[str, Path]]) -> None:
        """Files of tables that were just written; puts together what has become many.

        Raises:
            OSError: a file cannot be read or written; everything that was there can still be read.
        """
        if not files:
            return
        self._spans.append(_Span(tuple(files), 0))
        while True:
            last = self._spans[-_TOGETHER:]
            if len(last) < _TOGETHER or last[0].level != last[-1].level:
                return
            if sum(span.size_bytes() for span in last) > _LARGE_BYTES:
                self._spans.clear()
                return
            del self._spans[-_TOGETHER:]
            by_folder: defaultdict[tuple[str, Path], list[Path]] = defaultdict(list)
            for span in last:
                for table, path in span.files:
                    by_folder[table, path.parent].append(path)
            whole = [(table, self._put_together(table, paths)) for (table, _), paths in by_folder.items()]
            self._spans.append(_Span(tuple((table, path) for table, path in whole if path), last[0].level + 1))

    def _put_together(self, table: str, paths: list[Path]) -> Path | None:
        # The oldest may have been removed meanwhile, to keep the folder small.
        parts: list[Part] = [part for path in paths if path.exists() and (part := parse_part_name(path)) is not None]
        if len(parts) < 2:
            return parts[0].path if parts else None
        name = part_name(parts[0].recording, min(part.first for part in parts), max(part.last for part in parts))
        target = parts[0].path.with_name(name)
        merge_files([part.path for part in parts], target, table, durable=self._writer.durable)
        for part in parts:
            part.path.unlink()
        return target


def merge_files(files: Sequence[Path], target: Path, table: str, *, durable: bool) -> None:
    """Write what several files of a table hold into one, whole or not at all; it is as old as the youngest of them.

    Raises:
        OSError: one cannot be read, or the other not be written.
    """
    modified_ns = max(file.stat().st_mtime_ns for file in files)
    with write_atomically(target, durable=durable) as partial:
        with pq.ParquetWriter(partial, TABLES[table], **writing_options(table)) as whole:
            held: list[pa.Table] = []
            for file in files:
                held.append(read_part(file, table))
                if sum(len(rows) for rows in held) >= _ROWS_AT_ONCE:
                    whole.write_table(pa.concat_tables(held).unify_dictionaries())
                    held.clear()
            if held:
                whole.write_table(pa.concat_tables(held).unify_dictionaries())
        os.utime(partial, ns=(modified_ns, modified_ns))
