"""The files of a recorded dataset: their names, and which of them count.

A part is written under a name that no reader looks at and gets its own when all of it is there: whatever happens to
the writer, a dataset holds whole parts.  Parts are numbered within their recording:

    DIR/calls/gpu-node-1/2026-11-21T14/00f1…e7-00000012.parquet
    DIR/calls/gpu-node-1/2026-11-21T14/00f1…e7-00000013-00000028.parquet

The second one holds what parts 13 to 28 held.  Where some of those are still there, they count no more: whoever put
them together was stopped before it had removed them.  What a writer that was killed has left under the other name is
the business of `leftovers`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote

LARGEST_PAYLOAD_BYTES: Final = 1 << 50
"""Of one call: no GPU has so much memory, and sums over thousands of such calls still fit 64 bits."""
UNNAMED_NODE: Final = "imported"
"""The node of imported data that does not say where it is from: perhaps of several."""
_PART: Final = re.compile(r"([0-9a-f]{16})-(\d{8})(?:-(\d{8}))?\.parquet")
_LONGEST_FOLDER: Final = 200
"""Letters of a node's folder; file systems have 255 for a name."""
PARTIAL_SUFFIX: Final = ".partial"
HOUR_NS: Final = 3_600_000_000_000
_LAST_HOUR_SECOND: Final = 253_402_297_200
"""The last hour of the year 9999."""


class DatasetError(Exception):
    """A dataset cannot be read or written; one line that names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of one table."""

    path: Path
    recording: int
    first: int
    """The number of the part; of parts that were put together, of the first one."""
    last: int


def part_name(recording: int, first: int, last: int | None = None) -> str:
    """The file name of a part, or of the parts from `first` to `last` in one."""
    return f"{recording:016x}-{first:08d}{'' if last is None else f'-{last:08d}'}.parquet"


def node_folder(folder: Path, table: str, node: str) -> Path:
    """Where a node's rows of a table are."""
    name = quote(replace_surrogates(node), safe="") or "unknown"
    if name.startswith("."):
        # A folder of this name would be another one, or hidden.
        name = "%2E" + name[1:]
    if len(name) > _LONGEST_FOLDER:
        digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
        name = f"{name[:_LONGEST_FOLDER]}-{digest}"
    return folder / table / name


def replace_surrogates(text: str) -> str:
    """A text as UTF-8 can have it: JSON and pickles may hold halves of letters."""
    return text.encode("utf-8", "replace").decode()


def hour_folder(folder: Path, table: str, node: str, time_ns: int) -> Path:
    """Where a node's rows of the hour of a time of day are; times that no calendar has are with the nearest it has."""
    second = min(max(time_ns // HOUR_NS * 3600, 0), _LAST_HOUR_SECOND)
    hour = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H")
    return node_folder(folder, table, node) / hour


def table_files(folder: Path, table: str) -> list[Path]:
    """Every file of a table that counts, in the order of their names."""
    return _counting(sorted((folder / table).glob("*/*/*.parquet")))


def node_parts(folder: Path, table: str, node: str) -> list[Part]:
    """Every part of a node's rows of a table that counts; files that are named otherwise are left out."""
    files = _counting(sorted(node_folder(folder, table, node).glob("*/*.parquet")))
    return [part for file in files if (part := parse_part_name(file)) is not None]


def parse_part_name(file: Path) -> Part | None:
    """Parse the name of a part's file; None: it is not such a name."""
    found = _PART.fullmatch(file.name)
    if found is None:
        return None
    return Part(file, int(found[1], 16), int(found[2]), int(found[3] or found[2]))


def _counting(files: Iterable[Path]) -> list[Path]:
    """Without parts that another one holds as well, and without what an unusual system hides: names that begin so."""
    counting = []
    spans: defaultdict[tuple[Path, int], list[Part]] = defaultdict(list)
    for file in files:
        part = parse_part_name(file)
        if part is not None:
            spans[file.parent, part.recording].append(part)
        elif not file.name.startswith("."):
            counting.append(file)
    for parts in spans.values():
        reached = -1
        # The widest of those that begin together comes first.
        for part in sorted(parts, key=lambda one: (one.first, -one.last)):
            if part.last > reached:
                counting.append(part.path)
                reached = part.last
    return sorted(counting)


def make_folder(folder: Path, *, durable: bool) -> None:
    """Make a folder of a dataset and those that it is in, as far as they are not there.

    `durable`: they are still there after a power failure.

    Raises:
        OSError: one cannot be made.
    """
    if folder.is_dir():
        return
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if durable:
        for one in reversed(missing):
            _sync(one.parent)


@contextlib.contextmanager
def write_atomically(path: Path, *, durable: bool) -> Iterator[Path]:
    """A name to write to, which becomes `path` at the end, and what was there gives way; after an error nothing stays.

    `durable`: it is on disk before it gets its name, and its name is, so that it is whole and there after a power
    failure, too.  As long as this writes, `is_abandoned` knows; write to the file that is there.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    descriptor = _made_and_locked(partial)
    try:
        yield partial
        if durable:
            os.fsync(descriptor)
        partial.replace(path)
        if durable:
            _sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    finally:
        os.close(descriptor)


def is_abandoned(partial: Path) -> bool:
    """Whether this file's writer has exited without finishing it; False if unknown, or if it is no file."""
    try:
        # Non-blocking: a pipe of this name would have no writer.
        descriptor = os.open(partial, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def final_path(partial: Path) -> Path:
    """What a file that `write_atomically` writes to would have become."""
    return partial.with_name(partial.name.removeprefix(".").removesuffix(PARTIAL_SUFFIX).rpartition(".")[0])


def _made_and_locked(partial: Path) -> int:
    """A new file's descriptor, with a lock that goes when its process does, however that ends."""
    while True:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # A file system without locks: then no writer takes the file for a leftover, either.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # Before it was locked, another writer took it for a leftover.
        os.close(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
