"""What is in a dataset, in a few lines: for `railscope record --describe DIR`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

from railscope.agent.dataset.files import DatasetError, table_files
from railscope.agent.dataset.reader import Dataset, open_dataset
from railscope.agent.dataset.schema import SCHEMA_VERSION, TABLES
from railscope.agent.facts.counted import format_count
from railscope.probes.printable import printable

_MOST_ROWS: Final = 20


@dataclass(frozen=True, slots=True)
class RecordingFacts:
    """One recording of a dataset; what is not known is None."""

    recording: int
    node: str | None
    source: str | None
    railscope: str | None
    simulated: bool | None
    began_ns: int | None
    ended_ns: int | None
    clock_error_ns: int | None
    calls_lost: int | None
    operations_lost: int | None
    calls_removed: int | None
    operations_removed: int | None
    lines_skipped: int | None


@dataclass(frozen=True, slots=True)
class TableFacts:
    """What is on disk of one table."""

    table: str
    rows: int
    files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Calls of one op with one data type."""

    op: str | None
    data_type: str | None
    calls: int
    payload_bytes: int | None


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    folder: str
    schema_version: int
    recordings: tuple[RecordingFacts, ...]
    """By node and beginning."""
    tables: tuple[TableFacts, ...]
    """Those that have rows."""
    communicators: int
    """Different ones; ends of them are rows of the table."""
    ops: tuple[OpFacts, ...]
    """The most frequent first."""


def describe_dataset(folder: Path, out: TextIO, *, as_json: bool) -> None:
    """Describe a dataset folder: recordings, tables, rows, times.

    Raises:
        DatasetError: it cannot be read.
    """
    with open_dataset([folder]) as dataset:
        summary = summarise_dataset(dataset, folder)
    if as_json:
        json.dump(asdict(summary), out, indent=1)
        print(file=out)
        return
    for line in describe_lines(summary):
        print(line, file=out)


def summarise_dataset(dataset: Dataset, folder: Path) -> DatasetSummary:
    """Count what an opened dataset holds.

    Raises:
        DatasetError: a file cannot be read.
    """
    names = list(RecordingFacts.__dataclass_fields__)
    recordings = dataset.rows(dataset["recordings"].select(names)).to_pylist()
    calls = dataset["calls"]
    kinds = calls.group_by("op", "data_type").aggregate(
        calls=calls.count(), payload_bytes=calls.payload_bytes.sum().cast("int64")
    )
    ops = [OpFacts(**row) for row in dataset.rows(kinds).to_pylist()]
    comms = dataset.rows(dataset["communicators"].select("comm").distinct()).to_pylist()
    return DatasetSummary(
        folder=str(folder),
        schema_version=SCHEMA_VERSION,
        recordings=tuple(
            sorted(
                (RecordingFacts(**row) for row in recordings),
                key=lambda one: (one.node or "", one.began_ns or 0, one.recording),
            )
        ),
        tables=tuple(facts for name in TABLES if (facts := _table_facts(dataset, folder, name)).rows),
        communicators=len(comms),
        ops=tuple(sorted(ops, key=lambda one: (-one.calls, one.op or "", one.data_type or ""))),
    )


def describe_lines(summary: DatasetSummary) -> Iterator[str]:
    """The summary of a dataset as lines for people."""
    recordings = format_count(len(summary.recordings), "recording")
    yield f"{printable(summary.folder)}: {recordings}, tables of version {summary.schema_version}"
    yield f"\n{'node':<24} {'source':<12} {'began (UTC)':<19} {'seconds':>10} {'clock error':>12}  lost, removed"
    for one in summary.recordings[:_MOST_ROWS]:
        seconds = "-" if one.began_ns is None or one.ended_ns is None else f"{(one.ended_ns - one.began_ns) / 1e9:.1f}"
        error = "unknown" if one.clock_error_ns is None else f"{one.clock_error_ns / 1e6:.3g} ms"
        node = printable(one.node or "-")
        source = f"{printable(one.source or '-')}{' SIMULATED' if one.simulated else ''}"
        yield (f"{node:<24} {source:<12} {_moment(one.began_ns):<19} {seconds:>10} {error:>12}  {_missing(one)}")
    if len(summary.recordings) > _MOST_ROWS:
        yield f"and {len(summary.recordings) - _MOST_ROWS} more; --json shows all"
    yield f"\n{'table':<16} {'rows':>14} {'files':>8} {'bytes':>16} {'bytes a row':>12}"
    for table in summary.tables:
        yield (
            f"{table.table:<16} {table.rows:>14,} {table.files:>8,} {table.size_bytes:>16,} "
            f"{table.size_bytes / table.rows:>12.1f}"
        )
    yield f"\n{format_count(summary.communicators, 'communicator')}"
    yield f"\n{'op':<16} {'data type':<12} {'calls':>14} {'payload bytes':>22}"
    for op in summary.ops[:_MOST_ROWS]:
        payload = "unknown" if op.payload_bytes is None else f"{op.payload_bytes:,}"
        name, kind = printable(op.op or "unknown"), printable(op.data_type or "unknown")
        yield f"{name:<16} {kind:<12} {op.calls:>14,} {payload:>22}"
    if not summary.ops:
        yield "no calls"
    if len(summary.ops) > _MOST_ROWS:
        rest = sum(op.calls for op in summary.ops[_MOST_ROWS:])
        kinds = format_count(len(summary.ops) - _MOST_ROWS, "more kind")
        yield f"and {kinds} with {format_count(rest, 'call')}; --json shows all"


def _table_facts(dataset: Dataset, folder: Path, name: str) -> TableFacts:
    files = table_files(folder, name)
    if not files:
        return TableFacts(name, 0, 0, 0)
    rows: dict[str, Any] = dataset.rows(dataset[name].aggregate(rows=dataset[name].count())).to_pylist()[0]
    try:
        size_bytes = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise DatasetError(f"{folder}: cannot be read: {error.strerror}") from None
    return TableFacts(name, rows["rows"], len(files), size_bytes)


def _missing(one: RecordingFacts) -> str:
    parts = []
    for kind in ("calls", "operations"):
        lost, removed = getattr(one, f"{kind}_lost"), getattr(one, f"{kind}_removed")
        if lost is None and one.source == "railscope":
            parts.append(f"{kind} lost, number unknown")
        if lost:
            parts.append(f"{lost:,} {kind} lost")
        if removed:
            parts.append(f"{removed:,} {kind} removed")
    if one.lines_skipped:
        parts.append(f"{format_count(one.lines_skipped, 'line')} skipped")
    return ", ".join(parts) or "nothing"


def _moment(time_ns: int | None) -> str:
    return "-" if time_ns is None else datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
