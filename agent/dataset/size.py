"""Keeps a node's share of a dataset's folder within a size: it deletes the oldest events and logs which.

Only events are removed, all tables' parts of the same time together; who is who stays as long as there are events.
A recording whose beginning was removed begins later: its row says when, and how many calls and operations went.
Recordings that ended before are older than those that go on, also those of another run; of one that is being written
by somebody else nothing is touched.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from railscope.agent.dataset.check import one_line
from railscope.agent.dataset.files import Part, node_folder, node_parts, parse_part_name
from railscope.agent.dataset.recording_writer import EVENT_TABLES, RecordingWriter
from railscope.agent.dataset.schema import TABLES
from railscope.agent.dataset.writer import last_moment_ns, read_row, write_row

_log = logging.getLogger("railscope.recordings")

_COUNT_AGAIN_NS: Final = 60_000_000_000
"""What others write into the node's folder is noticed after so long."""
_SPARE: Final = 20
"""When something is removed, a twentieth of the size is made free: looking at all files is not for every piece."""
_WRITTEN_TO_SECONDS: Final = 60.0
"""Whoever writes a recording renews its row more often."""


class _DamagedError(Exception):
    """A file cannot be read; one line."""


@dataclass(slots=True)
class Removed:
    """What was removed so far."""

    files: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    """By table."""
    until_ns: int = 0
    """Time of day of the last event that was removed."""


@dataclass(slots=True)
class _Group:
    """Parts of all event tables that were written together."""

    recording: int
    parts: list[tuple[str, Part]] = field(default_factory=list)
    size_bytes: int = 0
    order: tuple[str, int] = ("", 0)
    """Hour, and when it was written."""


class SizeBound:
    """For the thread that writes."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: of all tables of the node, of every recording."""
        self._most_bytes = most_bytes
        self._estimate_bytes = most_bytes + 1
        self._counted_ns = 0
        self._said = False
        self._damaged: set[str] = set()
        """What was said of files that cannot be read: once of each."""
        self.removed = Removed()

    def remove_excess(self, writer: RecordingWriter, written_bytes: int) -> None:
        """Remove what is too much; call after `written_bytes` more were written.

        Raises:
            OSError: something cannot be removed, or the row that says so not be written.
        """
        self._estimate_bytes += written_bytes
        now_ns = time.monotonic_ns()
        if self._estimate_bytes <= self._most_bytes and now_ns - self._counted_ns < _COUNT_AGAIN_NS:
            return
        self._counted_ns = now_ns
        folder, node = writer.writer.folder, writer.writer.node
        self._estimate_bytes = sum(
            file.stat().st_size for table in TABLES for file in node_folder(folder, table, node).glob("*/*.parquet")
        )
        if self._estimate_bytes <= self._most_bytes:
            return
        for group in self._removable(writer):
            if self._estimate_bytes <= self._most_bytes - self._most_bytes // _SPARE:
                return
            try:
                self._remove(group, writer)
            except _DamagedError as damaged:
                # How much went with it could not be said: it stays, and younger ones go.
                if str(damaged) not in self._damaged:
                    self._damaged.add(str(damaged))
                    _log.error("%s: it could not be removed; remove it by hand", damaged)
        if self._estimate_bytes > self._most_bytes and not self._said:
            self._said = True
            _log.warning(
                "%s: node %s has %d bytes of at most %d, and nothing older is left to remove: raise --max-size",
                *(folder, node, self._estimate_bytes, self._most_bytes),
            )

    def _removable(self, writer: RecordingWriter) -> list[_Group]:
        """Groups of parts, the oldest first; never the last one of the running recording."""
        folder, node, own = writer.writer.folder, writer.writer.node, writer.writer.recording
        busy = {
            part.recording
            for part in node_parts(folder, "recordings", node)
            if part.recording != own and time.time() - part.path.stat().st_mtime < _WRITTEN_TO_SECONDS
        }
        parts = [
            (table, part)
            for table in EVENT_TABLES
            for part in node_parts(folder, table, node)
            if part.recording not in busy
        ]
        groups: list[_Group] = []
        reached = -1
        # Where one table has parts that were put together and another one has fewer of them, their names differ.
        for table, part in sorted(parts, key=lambda one: (one[1].recording, one[1].first, -one[1].last)):
            if not groups or groups[-1].recording != part.recording or part.first > reached:
                groups.append(_Group(part.recording))
                reached = -1
            reached = max(reached, part.last)
            status = part.path.stat()
            groups[-1].parts.append((table, part))
            groups[-1].size_bytes += status.st_size
            groups[-1].order = max(groups[-1].order, (part.path.parent.name, status.st_mtime_ns))
        ordered = sorted(groups, key=lambda group: group.order)
        newest = next((group for group in reversed(ordered) if group.recording == own), None)
        return [group for group in ordered if group is not newest]

    def _remove(self, group: _Group, writer: RecordingWriter) -> None:
        rows: defaultdict[str, int] = defaultdict(int)
        until_ns = 0
        for table, part in group.parts:
            with _reading(part):
                rows[table] += pq.read_metadata(part.path).num_rows
                until_ns = max(until_ns, last_moment_ns(part.path, table) + 1)
        # The row is updated first: it never promises what is not there.
        if group.recording == writer.writer.recording:
            writer.record_removed(rows["calls"], rows["operations"], until_ns)
        else:
            _shorten(writer, group.recording, rows["calls"], rows["operations"], until_ns)
        for _, part in group.parts:
            # Before what they were put together into: with that gone they would count again.
            for hidden in _hidden_by(part):
                self._estimate_bytes -= hidden.stat().st_size
                hidden.unlink()
            part.path.unlink()
        self._estimate_bytes -= group.size_bytes
        if group.recording != writer.writer.recording:
            self._estimate_bytes -= _remove_empty(writer, group.recording)
        self.removed.files += len(group.parts)
        self.removed.until_ns = max(self.removed.until_ns, until_ns)
        for table, count in rows.items():
            self.removed.rows[table] = self.removed.rows.get(table, 0) + count


def _hidden_by(whole: Part) -> list[Path]:
    """Files whose content is in a merged one, left by a writer that was killed while merging."""
    if whole.first == whole.last:
        return []
    beside = whole.path.parent.glob(f"{whole.recording:016x}-*.parquet")
    parts = [part for path in beside if path != whole.path and (part := parse_part_name(path)) is not None]
    return [part.path for part in parts if whole.first <= part.first and part.last <= whole.last]


@contextlib.contextmanager
def _reading(part: Part) -> Iterator[None]:
    """Turn what a damaged file makes of reading it into one kind of error."""
    try:
        yield
    except (OSError, pa.ArrowException, ValueError) as error:
        raise _DamagedError(f"{part.path}: cannot be read: {one_line(error)}") from None


def _shorten(writer: RecordingWriter, recording: int, calls: int, operations: int, until_ns: int) -> None:
    """Note in the row of an ended recording that its beginning is removed."""
    for part in _recording_parts(writer, "recordings", recording):
        with _reading(part):
            row = read_row(part.path, "recordings")
        row["began_ns"] = max(row["began_ns"] or 0, until_ns)
        row["calls_removed"] = (row["calls_removed"] or 0) + calls
        row["operations_removed"] = (row["operations_removed"] or 0) + operations
        write_row(part.path, "recordings", row)


def _remove_empty(writer: RecordingWriter, recording: int) -> int:
    """Remove a recording of which no event is left; returns its bytes."""
    if any(True for table in EVENT_TABLES for _ in _recording_parts(writer, table, recording)):
        return 0
    size_bytes = 0
    # Its own row last: until then the others belong to something.
    for table in sorted(TABLES, key=lambda name: name == "recordings"):
        for part in _recording_parts(writer, table, recording):
            size_bytes += part.path.stat().st_size
            part.path.unlink()
    return size_bytes


def _recording_parts(writer: RecordingWriter, table: str, recording: int) -> Iterator[Part]:
    parts = node_parts(writer.writer.folder, table, writer.writer.node)
    return (part for part in parts if part.recording == recording)
