"""The folder of recordings: atomic writes, bounded in size and by free disk space.

Room for a recording is made by those that were made on a signal, the oldest first, and only then by those of stalls:
quick successive signals lose nothing that cannot be requested again.

A recording is written by a thread of its own, at a lower priority than the agent, under a name that no reader looks
at; only when all of it is on disk does it get its own.  A disk that does not answer blocks only that thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Final

from railscope.agent.recording.recording import STALL, Recording

_log = logging.getLogger("railscope.recordings")

_NAME: Final = re.compile(r"railscope-[A-Za-z0-9._-]+-\d{8}T\d{6}\.\d{3}Z-(?P<reason>[a-z_]+)\.npz")
_PARTIAL_PREFIX: Final = ".railscope-"
_PARTIAL_SUFFIX: Final = ".partial"
_PARTIAL_SECONDS: Final = 600.0
"""Nobody takes so long to write one: what is older was left behind."""
_NICENESS: Final = 10
_PATIENCE_SECONDS: Final = 2.0
"""So long may a disk answer nothing at the end."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_SPARE_BYTES: Final = 1 << 16
"""What a file system needs besides the content of a file."""


class WriteResult(Enum):
    """How writing a recording ended; the value is the label of `railscope_recordings_total`."""

    WRITTEN = "written"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, order=True)
class _Held:
    """A recording in the folder; they make room in the order of these fields."""

    of_stall: bool
    written_ns: int
    name: str
    size_bytes: int


class _Size:
    """A file of which only the size is kept."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._position = 0

    def write(self, content: bytes, /) -> int:
        self._position += len(content)
        self.size_bytes = max(self.size_bytes, self._position)
        return len(content)

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self._position = position

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing is open."""


class RecordingStore:
    """Writes one recording at a time; every method may be called from the thread that made it only."""

    def __init__(self, folder: Path, most_bytes: int, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        """`most_bytes` for all recordings together; `close` waits `patience_seconds` for a sign of life of the disk."""
        self._folder = folder
        self.most_bytes = most_bytes
        self._patience_seconds = patience_seconds
        self._thread: threading.Thread | None = None
        self._pieces = 0
        """Written so far, of all recordings: a disk that answers makes it rise."""
        self._trouble = ""

    @property
    def busy(self) -> bool:
        """Whether a recording is being written."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self) -> None:
        """Make the folder, and warn if recordings cannot be kept in it; call only while not `busy`.

        In a thread, as writing is: a disk that does not answer must not keep the agent from starting.
        """
        self._begin(self._prepare)

    def _prepare(self) -> None:
        try:
            self._make_folder()
            if not os.access(self._folder, os.W_OK | os.X_OK, effective_ids=True):
                raise OSError(errno.EACCES, "it is not writable")
        except OSError as error:
            _log.warning(
                "recordings cannot be written: %s: %s; see recordings.directory", self._folder, error.strerror or error
            )

    def write(self, recording: Recording, done: Callable[[str, WriteResult], None]) -> None:
        """Begin to write; call only while not `busy`.  `done` hears of the reason and the result, in that thread."""
        self._begin(self._write, recording, done)

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        # Python waits at its end for every thread that is none of a daemon's.
        self._thread = threading.Thread(target=work, args=arguments, name="recording", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until what is being written is on disk; still `busy` afterwards: the disk does not answer."""
        if self._thread is None:
            return
        seen = -1
        while self._thread.is_alive() and seen != self._pieces:
            seen = self._pieces
            self._thread.join(self._patience_seconds)
        if self._thread.is_alive():
            _log.error(
                "%s: the disk has not answered for %g s: the recording is given up and lost",
                self._folder,
                self._patience_seconds,
            )
        else:
            self._thread = None

    def _wrote(self) -> None:
        self._pieces += 1

    def _write(self, recording: Recording, done: Callable[[str, WriteResult], None]) -> None:
        with contextlib.suppress(OSError):
            # Of this thread alone: Linux keeps a niceness for each.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._make_folder()
            _remove_partials(self._folder)
            path, removed = self._save(recording)
        except OSError as error:
            trouble = f"{self._folder}: {error.strerror}"
            if trouble != self._trouble:
                self._trouble = trouble
                _log.error(
                    "the recording was not written: %s; see recordings.directory and recordings.max_bytes", trouble
                )
            done(recording.reason, WriteResult.FAILED)
            return
        self._trouble = ""
        older = f"; {removed} older removed" if removed else ""
        reach = _reach(recording)
        _log.info("recorded %.0f s (%s): %s%s%s", recording.seconds, recording.reason, path, reach, older)
        done(recording.reason, WriteResult.WRITTEN)

    def _save(self, recording: Recording) -> tuple[Path, int]:
        path = self._folder / file_name(recording)
        try:
            return save(recording, path, self.most_bytes, self._wrote)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            removed = self._make_room_on_disk(recording, error)
        path, more = save(recording, path, self.most_bytes, self._wrote)
        return path, removed + more

    def _make_room_on_disk(self, recording: Recording, error: OSError) -> int:
        """Remove as few recordings as a disk needs that is smaller than they may be; returns how many went.

        Raises:
            OSError: this one, where even all of them would not make room: then they stay.
        """
        from railscope.agent.recording.file import write_recording

        held_bytes = sum(one.size_bytes for one in _held(self._folder))
        if not held_bytes:
            raise error
        size = _Size()
        write_recording(size, recording, self._wrote)
        free_bytes = 0  # a used-up quota does not show its size
        if error.errno == errno.ENOSPC:
            disk = os.statvfs(self._folder)
            free_bytes = disk.f_bavail * disk.f_frsize
        needed_bytes = max(1, size.size_bytes + _SPARE_BYTES - free_bytes)
        if needed_bytes > held_bytes:
            raise error
        return make_room(self._folder, held_bytes - needed_bytes)

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o750, parents=True, exist_ok=True)


def _reach(recording: Recording) -> str:
    """How far back those kinds of events reach whose beginning was overwritten; empty: all of them reach back."""
    short = ", ".join(
        f"{kind.replace('_', ' ')} of the last {recording.seconds - missing:.1f} s only"
        for kind, missing in recording.overwritten_seconds().items()
    )
    return f"; {short}: raise recordings.memory to hold more" if short else ""


def file_name(recording: Recording) -> str:
    """The file of a flight recording, `railscope-HOST-20260102T030405.678Z-stall.npz`: sorted by host, then by time."""
    moment = datetime.fromtimestamp(recording.realtime_ns(recording.ended_ns) / 1e9, UTC)
    stamp = moment.strftime("%Y%m%dT%H%M%S.") + f"{moment.microsecond // 1000:03d}Z"
    host = re.sub(r"[^A-Za-z0-9._-]", "_", recording.host)[:64] or "unknown"
    return f"railscope-{host}-{stamp}-{recording.reason}.npz"


def save(
    recording: Recording, path: Path, most_bytes: int | None = None, wrote: Callable[[], None] = lambda: None
) -> tuple[Path, int]:
    """Write a flight recording to `path`, whole or not at all; returns where it is, and how many older ones made room.

    `most_bytes`: recordings beside it are removed as `make_room` does, until all together have no more.  `wrote` is
    called now and then, as long as the disk takes something.

    Raises:
        OSError: it cannot be written, or is larger than `most_bytes` by itself; what was there stays.
    """
    from railscope.agent.recording.file import write_recording

    partial = path.with_name(f"{_PARTIAL_PREFIX}{path.name}.{os.getpid()}{_PARTIAL_SUFFIX}")
    removed = 0
    try:
        with partial.open("xb") as file:
            write_recording(file, recording, wrote)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = os.fstat(file.fileno()).st_size
        if most_bytes is not None:
            if size_bytes > most_bytes:
                raise OSError(
                    0,
                    f"one recording has {size_bytes} bytes, above the limit of {most_bytes} for all recordings",
                    str(path),
                )
            removed = make_room(path.parent, most_bytes - size_bytes)
        partial.replace(path)
    except BaseException as error:
        if not isinstance(error, FileExistsError):
            with contextlib.suppress(OSError):
                partial.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(partial)):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    return path, removed


def make_room(folder: Path, most_bytes: int) -> int:
    """Remove flight recordings of a folder until those left have at most `most_bytes`; returns how many went.

    Those of stalls go last, and otherwise the oldest first.  Only files that are named as `name_of` does are touched,
    whatever else lies there.

    Raises:
        OSError: one cannot be removed.
    """
    found = _held(folder)
    total_bytes = sum(one.size_bytes for one in found)
    removed = 0
    for one in found:
        if total_bytes <= most_bytes:
            break
        (folder / one.name).unlink(missing_ok=True)
        total_bytes -= one.size_bytes
        removed += 1
    return removed


def _held(folder: Path) -> list[_Held]:
    """The recordings of a folder, in the order in which they make room."""
    found = []
    for entry in os.scandir(folder):
        named = _NAME.fullmatch(entry.name)
        # Another agent may make room in the same folder.
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            if named and stat.S_ISREG(status.st_mode):
                found.append(_Held(named["reason"] == STALL, status.st_mtime_ns, entry.name, status.st_size))
    return sorted(found)


def _remove_partials(folder: Path) -> None:
    """What an agent that was killed while it wrote has left."""
    old_s = time.time() - _PARTIAL_SECONDS
    for entry in os.scandir(folder):
        if entry.name.startswith(_PARTIAL_PREFIX) and entry.name.endswith(_PARTIAL_SUFFIX):
            # Another agent may remove it, or have written it whole.
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime < old_s:
                    (folder / entry.name).unlink()
