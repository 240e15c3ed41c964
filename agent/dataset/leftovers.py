"""Recovers or removes the unfinished files of writers that were killed.

No reader takes them for data.  Whoever records on the node next settles them.  A part of events that is whole, and has
only not got its name, gets it, and the row of its recording says that it goes so far.  Of a file that is not whole
nothing can be read, since Parquet has its index at the end: it is removed, and what is lost is said, the last seconds
before the end.  A file of who is who, or of parts that were being put together, held nothing that is not elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from railscope.agent.dataset.check import one_line
from railscope.agent.dataset.files import (
    PARTIAL_SUFFIX,
    final_path,
    is_abandoned,
    node_folder,
    node_parts,
    parse_part_name,
)
from railscope.agent.dataset.recording_writer import EVENT_TABLES
from railscope.agent.dataset.schema import TABLES
from railscope.agent.dataset.writer import last_moment_ns, read_part, read_row, write_row

_log = logging.getLogger("railscope.recordings")

_PARTIAL: Final = f".*{PARTIAL_SUFFIX}"


def find_leftovers(folder: Path) -> list[Path]:
    """Files of all nodes that were not ended, and whose writers are gone."""
    return sorted(one for table in TABLES for one in (folder / table).glob(f"*/*/{_PARTIAL}") if is_abandoned(one))


def recover_leftovers(folder: Path, node: str) -> None:
    """Save what a node's writers have left, or remove it, and say so; what cannot be touched stays."""
    for table, partial in list(_abandoned_parts(folder, node)):
        try:
            rows = _save(folder, node, table, partial)
            if rows is not None:
                _log.info("%s: recovered: its recorder was killed with %d rows on disk", final_path(partial), rows)
                continue
            size_bytes = partial.stat().st_size
            partial.unlink()
        except (OSError, pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            # What others have left never keeps a recorder from starting.
            _log.warning("%s: left by a killed recorder and kept: %s", partial, one_line(error))
            continue
        # An empty one may belong to a writer that is about to write, and notices.
        if size_bytes and table in EVENT_TABLES and not _put_together(partial):
            _log.warning(
                "%s: its recorder was killed while writing it: %d bytes of %s are unreadable and removed",
                *(final_path(partial), size_bytes, table.replace("_", " ")),
            )


def has_row(folder: Path, place: str, recording: int) -> bool:
    """Whether a recording of a dataset counts; `place`: the name of its node's folders."""
    return any((folder / "recordings" / place).glob(f"*/{recording:016x}-*.parquet"))


def remove_recordings(folder: Path, recordings: Collection[tuple[str, int]]) -> None:
    """Remove recordings, or what is there of them: the rows of all of them first, so that they end to count together.

    `recordings`: the name of the node's folders, and the number, of each.

    Raises:
        OSError: something cannot be removed.
    """
    for table in ("recordings", *TABLES):
        for place, recording in recordings:
            for file in (folder / table / place).glob(f"*/{recording:016x}-*.parquet"):
                file.unlink(missing_ok=True)
            for partial in (folder / table / place).glob(f"*/.{recording:016x}-*{PARTIAL_SUFFIX}"):
                if is_abandoned(partial):
                    partial.unlink(missing_ok=True)


def _abandoned_parts(folder: Path, node: str) -> Iterator[tuple[str, Path]]:
    for table in TABLES:
        for partial in sorted(node_folder(folder, table, node).glob(f"*/{_PARTIAL}")):
            if is_abandoned(partial):
                yield table, partial


def _put_together(partial: Path) -> bool:
    part = parse_part_name(final_path(partial))
    return part is not None and part.first != part.last


def _save(folder: Path, node: str, table: str, partial: Path) -> int | None:
    """Give a whole part its name; returns its rows, or None where there is nothing to save.

    Raises:
        OSError: it cannot be renamed, or the row of its recording not be written.
        pa.ArrowException, ValueError, TypeError, OverflowError: its times fit in no row.
    """
    path = final_path(partial)
    part = parse_part_name(path)
    if table not in EVENT_TABLES or part is None or _put_together(partial) or path.exists():
        return None
    recordings = [one.path for one in node_parts(folder, "recordings", node) if one.recording == part.recording]
    try:
        rows = len(read_part(partial, table))
        last_ns = last_moment_ns(partial, table)
        said = [(file, read_row(file, "recordings")) for file in recordings]
    except (OSError, pa.ArrowException, ValueError):
        return None
    if not said:
        return None
    for file, row in said:
        row["ended_ns"] = max(row["ended_ns"] or 0, last_ns + 1)
        write_row(file, "recordings", row)
    partial.replace(path)
    return rows
