"""Opens recorded datasets for the analyses: every table as an Ibis expression, on DuckDB or on Spark.

DuckDB runs inside the process and takes what fits one machine, spilling to disk; Spark takes the same expressions
where that is too little.  Files of the flight recorder (`.npz`) are converted into a temporary folder first.

Only recordings that have a row in `recordings` are read, and that no other one replaces: what else lies there was left
by a writer that was stopped before it had finished, and a second import wrote the same again.

Recordings that hold the same moments of the same ranks count what is in both twice, which is said.  A stall and a
signal within a minute each write what the flight recorder holds, and two recorders may run beside each other.
Recordings of one host that have different ranks, or different times, belong together.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import unquote

import duckdb
import ibis
import pyarrow as pa
import pyarrow.parquet as pq

from railscope.agent.dataset.check import check_folder, one_line, unreadable_error
from railscope.agent.dataset.files import (
    LARGEST_PAYLOAD_BYTES,
    PARTIAL_SUFFIX,
    DatasetError,
    parse_part_name,
    table_files,
)
from railscope.agent.dataset.from_recording import convert_file
from railscope.agent.dataset.leftovers import find_leftovers
from railscope.agent.dataset.replacement import uncounted_recordings
from railscope.agent.dataset.schema import TABLES, TIME_OF
from railscope.agent.facts.counted import format_count

_SHORTEST_NS: Final = 100_000_000
"""Clocks are corrected, and what follows without a gap may seem to overlap a little."""
_OWN: Final = "railscope"
"""Formats that are imported keep ranks apart themselves (agent/imports)."""


def describe_overlaps(recordings: Any, communicators: Any, rows: Callable[[Any], pa.Table]) -> tuple[str, ...]:
    """A line for each node of which two recordings have the same ranks at the same time.

    Args:
        recordings, communicators: the tables, as expressions; `rows`: what brings a small result into memory.
    """
    own = recordings.filter(recordings["source"] == _OWN)
    found = rows(own.select("recording", "node", "began_ns", "ended_ns")).to_pylist()
    together = [
        (node, *pair) for node, spans in sorted(_by_node(found).items()) for pair in _overlapping(sorted(spans))
    ]
    if not together:
        return ()
    concerned = sorted({number for _, first, second, _ in together for number in (first, second)})
    ends = communicators.filter(communicators["recording"].isin(concerned) & (communicators["comm"] != "unknown"))
    members: defaultdict[int, set[tuple[Any, ...]]] = defaultdict(set)
    for row in rows(ends.select("recording", "comm", "rank", "pid").distinct()).to_pylist():
        members[row["recording"]].add((row["comm"], row["rank"], row["pid"]))
    longest: dict[str, int] = {}
    for node, first, second, shared_ns in together:
        if members[first] & members[second]:
            longest[node] = max(shared_ns, longest.get(node, 0))
    return tuple(
        f"recordings of {node} hold the same ranks at the same time, for {shared_ns / 1e9:.1f} s: calls in both count "
        "twice; name one of them"
        for node, shared_ns in longest.items()
    )


def _by_node(recordings: Iterable[dict[str, Any]]) -> dict[str, list[tuple[int, int, int]]]:
    spans: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for row in recordings:
        if row["began_ns"] is not None and row["ended_ns"] is not None:
            spans[row["node"]].append((row["began_ns"], row["ended_ns"], row["recording"]))
    return spans


def _overlapping(spans: list[tuple[int, int, int]]) -> Iterable[tuple[int, int, int]]:
    """Pairs of recordings and for how long they overlap, in ns: each with the one that ended last before it."""
    last: tuple[int, int, int] | None = None
    for span in spans:
        if last is not None:
            shared_ns = min(last[1], span[1]) - span[0]
            if shared_ns >= _SHORTEST_NS:
                yield last[2], span[2], shared_ns
        if last is None or span[1] > last[1]:
            last = span


__all__ = ("Dataset", "DatasetError", "check_folder", "open_dataset")

_log = logging.getLogger("railscope.recordings")

_MEMORY_LIMIT: Final = "3GB"
"""Of DuckDB, which spills to disk beyond."""
_SPARK: Final = "pyspark"
"""As Ibis calls it."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """One or more datasets, read as one.  `close` it, or use it in a `with` statement."""

    folders: tuple[Path, ...]
    """Those that are read; of a recording's file the temporary one it was converted into."""
    backend: Any
    """An Ibis backend."""
    tables: dict[str, Any]
    """By the names of `TABLES`, all of them: Ibis table expressions; of what was not recorded, without rows."""
    temporary: tempfile.TemporaryDirectory[str] | None = None
    owned: bool = False
    """Whether the backend ends with the dataset."""

    def __getitem__(self, name: str) -> Any:
        return self.tables[name]

    def rows(self, expression: Any) -> pa.Table:
        """The result of an expression, in memory; for results that are small.

        Raises:
            DatasetError: a file cannot be read.
        """
        with _engine(self.backend, self.folders):
            return self.backend.to_pyarrow(expression)

    def close(self) -> None:
        """Close the engine, unless the caller gave it, and remove converted files."""
        if self.owned:
            self.backend.disconnect()
        if self.temporary is not None:
            self.temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_dataset(paths: Sequence[Path], backend: Any = None) -> Dataset:
    """The dataset in these folders and recordings' files; `backend` is an Ibis backend, by default a DuckDB of its own.

    Raises:
        DatasetError: one is neither, is damaged, is of another version, or cannot be read; or two of them hold the same
            recording.
    """
    temporary: tempfile.TemporaryDirectory[str] | None = None
    engine = backend
    try:
        folders = []
        found_in: dict[int, Path] = {}
        for path in paths:
            if path.is_file():
                if temporary is None:
                    temporary = tempfile.TemporaryDirectory(prefix="railscope-dataset-")
                found = {convert_file(path, Path(temporary.name))}
            else:
                check_folder(path)
                _say_what_is_left(path)
                folders.append(path)
                found = _recordings(path)
            for recording in sorted(found):
                if recording in found_in:
                    raise _named_twice(found_in[recording], path)
                found_in[recording] = path
        if temporary is not None:
            folders.append(Path(temporary.name))
        if engine is None:
            engine = _own_engine()
        with _engine(engine, folders):
            tables = {name: _table(engine, folders, name, found_in) for name in TABLES}
            tables |= {name: _possible(engine, folders, tables[name], name, time) for name, time in TIME_OF.items()}
            for line in describe_overlaps(tables["recordings"], tables["communicators"], engine.to_pyarrow):
                _log.warning("%s", line)
        return Dataset(tuple(folders), engine, tables, temporary, owned=backend is None)
    except BaseException:
        if backend is None and engine is not None:
            engine.disconnect()
        if temporary is not None:
            temporary.cleanup()
        raise


def _possible(backend: Any, folders: Sequence[Path], table: Any, name: str, time: str) -> Any:
    """The rows with a possible payload; others would silently falsify sums."""
    wrong = (table.payload_bytes < 0) | (table.payload_bytes > LARGEST_PAYLOAD_BYTES)
    counts = table.aggregate(
        wrong=table.recording.count(where=wrong), untimed=table.recording.count(where=table[time].isnull())
    )
    (found,) = backend.to_pyarrow(counts).to_pylist()
    named = ", ".join(map(str, folders))
    if found["untimed"]:
        _log.warning("%s: %s of the %s have no time: they belong to no iteration", named, f"{found['untimed']:,}", name)
    if not found["wrong"]:
        return table
    _log.warning(
        "%s: %s of the %s have a payload below 0 or above a PiB: they are left out", named, f"{found['wrong']:,}", name
    )
    return table.filter(table.payload_bytes.isnull() | ~wrong)


def _say_what_is_left(folder: Path) -> None:
    """Whoever reads a recording whose recorder was killed learns that its end may be missing."""
    left = find_leftovers(folder)
    if left:
        nodes = ", ".join(sorted({unquote(one.parent.parent.name) for one in left}))
        _log.warning(
            "%s: the writers of %s were killed (%s): its last rows are missing",
            *(folder, nodes, f"{format_count(len(left), 'file')} in {PARTIAL_SUFFIX}"),
        )


def _own_engine() -> Any:
    spill = Path(tempfile.gettempdir()) / f"railscope-duckdb-{os.getpid()}"
    return ibis.duckdb.connect(memory_limit=_MEMORY_LIMIT, temp_directory=str(spill), preserve_insertion_order=False)


def _recordings(folder: Path) -> set[int]:
    """The numbers of the recordings that count in a folder.

    Raises:
        DatasetError: a file cannot be read.
    """
    while True:
        hidden = uncounted_recordings(folder)
        numbers = _with_rows(folder)
        if uncounted_recordings(folder) == hidden:
            return numbers - hidden
        # Meanwhile some took the place of others.


def _with_rows(folder: Path) -> set[int]:
    numbers: set[int | None] = set()
    for file in table_files(folder, "recordings"):
        try:
            with pq.ParquetFile(file) as rows:
                numbers.update(rows.read(["recording"])["recording"].to_pylist())
        except (OSError, KeyError, pa.ArrowException) as error:
            raise unreadable_error(file, error) from None
    return {number for number in numbers if number is not None}


def _named_twice(first: Path, second: Path) -> DatasetError:
    if first == second:
        return DatasetError(f"{first}: it is named twice: name it once")
    return DatasetError(f"the same recording is in {first} and {second}: name one of them")


def _table(backend: Any, folders: Sequence[Path], name: str, recordings: Container[int]) -> Any:
    """All rows of a table that are of these recordings, with the columns of `TABLES` in that order."""
    by_columns: defaultdict[tuple[str, ...], list[Path]] = defaultdict(list)
    for folder in folders:
        for file in table_files(folder, name):
            part = parse_part_name(file)
            if part is not None and part.recording not in recordings:
                continue
            by_columns[_columns(file, name)].append(file)
    schema = TABLES[name]
    if not by_columns:
        return ibis.memtable(_plain(schema).empty_table())
    tables = []
    for columns, files in by_columns.items():
        table = _parquet(backend, files)
        # An older railscope wrote fewer columns.
        missing = {field.name: ibis.null(_plain_type(field.type)) for field in schema if field.name not in columns}
        tables.append(table.mutate(**missing).select(schema.names) if missing else table.select(schema.names))
    return tables[0] if len(tables) == 1 else ibis.union(*tables)


def _columns(file: Path, name: str) -> tuple[str, ...]:
    """The columns that a file has, of those that its table has.

    Raises:
        DatasetError: it is no whole Parquet file, or holds something else.
    """
    try:
        found = pq.read_schema(file)
    except (OSError, pa.ArrowException) as error:
        raise unreadable_error(file, error) from None
    for field in TABLES[name]:
        if field.name in found.names and _plain_type(found.field(field.name).type) != _plain_type(field.type):
            raise DatasetError(f"{file}: column {field.name} is of another type than in a dataset: remove the file")
    columns = tuple(column for column in TABLES[name].names if column in found.names)
    if "recording" not in columns:
        raise DatasetError(f"{file}: this is not a file of a dataset: remove it, or name another folder")
    return columns


def _parquet(backend: Any, files: Sequence[Path]) -> Any:
    names = [str(file.absolute()) for file in files]
    # Both take patterns, and names may have their characters.
    if backend.name != _SPARK:
        return backend.read_parquet([re.sub(r"[*?[]", r"[\g<0>]", name) for name in names])
    # Ibis takes one path for Spark, Spark itself takes many.
    frame = backend._session.read.parquet(*(re.sub(r"[*?\[\]{}\\]", r"\\\g<0>", name) for name in names))
    view = ibis.util.gen_name("railscope")
    frame.createOrReplaceTempView(view)
    return backend.table(view)


def _plain(schema: pa.Schema) -> pa.Schema:
    """Without dictionaries: not every engine takes them from memory."""
    return pa.schema([(field.name, _plain_type(field.type)) for field in schema])


def _plain_type(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


@contextmanager
def _engine(backend: Any, folders: Sequence[Path]) -> Iterator[None]:
    """What the engine has to say about files becomes one line."""
    errors: tuple[type[Exception], ...] = (duckdb.Error, OSError)
    if backend.name == _SPARK:
        from py4j.protocol import Py4JJavaError  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from pyspark.errors import PySparkException

        errors = (PySparkException, Py4JJavaError, OSError)
    try:
        with warnings.catch_warnings():
            # Ibis 12 asks DuckDB 2 under a name that it had before.
            warnings.filterwarnings("ignore", "fetch_arrow_table", DeprecationWarning)
            yield
    except errors as error:
        if isinstance(error, duckdb.ProgrammingError) and not isinstance(error, duckdb.InvalidInputException):
            raise  # it is the question that is wrong, not a file
        named = ", ".join(map(str, folders))
        hint = ": if it is being written to, try again" if isinstance(error, (duckdb.IOException, OSError)) else ""
        raise DatasetError(f"{named}: the dataset cannot be read: {one_line(error)}{hint}") from None
