"""The folder of recordings: written whole or not at all, never larger than allowed, the oldest removed first.

A recording is written by a thread of its own, at a lower priority than the agent, under a name that no reader looks
at; only when all of it is on disk does it get its own.
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
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Final

from agent.recording import Recording

_log = logging.getLogger("railscope.recordings")

_NAME: Final = re.compile(r"railscope-[A-Za-z0-9._-]+-\d{8}T\d{6}\.\d{3}Z-[a-z_]+\.npz")
_PARTIAL_PREFIX: Final = ".railscope-"
_PARTIAL_SUFFIX: Final = ".partial"
_PARTIAL_SECONDS: Final = 600.0
"""Nobody takes so long to write one: what is older was left behind."""
_NICENESS: Final = 10


class WriteResult(Enum):
    """How writing a recording ended; the value is the label of `railscope_recordings_total`."""

    WRITTEN = "written"
    FAILED = "failed"


class RecordingStore:
    """Writes one recording at a time; every method may be called from the thread that made it only."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """`most_bytes` for all recordings together."""
        self._folder = folder
        self._most_bytes = most_bytes
        self._thread: threading.Thread | None = None
        self._trouble = ""

    @property
    def busy(self) -> bool:
        """Whether a recording is being written."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self) -> None:
        """Make the folder, and warn if recordings cannot be kept in it; call only while not `busy`.

        In a thread, as writing is: a disk that does not answer must not keep the agent from starting.
        """
        self._thread = threading.Thread(target=self._prepare, name="recording")
        self._thread.start()

    def _prepare(self) -> None:
        try:
            self._make_folder()
            if not os.access(self._folder, os.W_OK | os.X_OK, effective_ids=True):
                raise OSError(errno.EACCES, "it cannot be written to")
        except OSError as error:
            _log.warning(
                "no recording will be kept: %s: %s; see recordings.directory", self._folder, error.strerror or error
            )

    def write(self, recording: Recording, done: Callable[[str, WriteResult], None]) -> None:
        """Begin to write; call only while not `busy`.  `done` hears of the reason and the result, in that thread."""
        self._thread = threading.Thread(target=self._write, args=(recording, done), name="recording")
        self._thread.start()

    def close(self) -> None:
        """Wait until what is being written is on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, recording: Recording, done: Callable[[str, WriteResult], None]) -> None:
        with contextlib.suppress(OSError):
            # Of this thread alone: Linux keeps a niceness for each.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._make_folder()
            _remove_partials(self._folder)
            path, removed = save(recording, self._folder / name_of(recording), self._most_bytes)
        except OSError as error:
            trouble = f"{self._folder}: {error.strerror}"
            if trouble != self._trouble:
                self._trouble = trouble
                _log.error("no recording is kept: %s; see recordings.directory and recordings.max_bytes", trouble)
            done(recording.reason, WriteResult.FAILED)
            return
        self._trouble = ""
        older = f"; {removed} older removed" if removed else ""
        reach = _reach(recording)
        _log.info("recorded %.0f s (%s): %s%s%s", recording.seconds, recording.reason, path, reach, older)
        done(recording.reason, WriteResult.WRITTEN)

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o750, parents=True, exist_ok=True)


def _reach(recording: Recording) -> str:
    """How far back those kinds of events reach whose beginning was overwritten; empty: all of them reach back."""
    short = ", ".join(
        f"{kind.replace('_', ' ')} of the last {recording.seconds - missing:.1f} s only"
        for kind, missing in recording.overwritten_seconds().items()
    )
    return f"; {short}: more memory holds more (recordings.memory)" if short else ""


def name_of(recording: Recording) -> str:
    """`railscope-HOST-20260102T030405.678Z-stall.npz`: sorted by host, then by time."""
    moment = datetime.fromtimestamp(recording.realtime_ns(recording.ended_ns) / 1e9, UTC)
    stamp = moment.strftime("%Y%m%dT%H%M%S.") + f"{moment.microsecond // 1000:03d}Z"
    host = re.sub(r"[^A-Za-z0-9._-]", "_", recording.host)[:64] or "unknown"
    return f"railscope-{host}-{stamp}-{recording.reason}.npz"


def save(recording: Recording, path: Path, most_bytes: int | None = None) -> tuple[Path, int]:
    """Write a recording to `path`, whole or not at all; returns where it is, and how many older ones made room.

    `most_bytes`: recordings beside it are removed, oldest first, until all together have no more.

    Raises:
        OSError: it cannot be written, or is larger than `most_bytes` by itself; what was there stays.
    """
    from agent.recording_file import write_recording  # not before there is something to write

    partial = path.with_name(f"{_PARTIAL_PREFIX}{path.name}.{os.getpid()}{_PARTIAL_SUFFIX}")
    removed = 0
    try:
        with partial.open("xb") as file:
            write_recording(file, recording)
            file.flush()
            os.fsync(file.fileno())
            size_bytes = os.fstat(file.fileno()).st_size
        if most_bytes is not None:
            if size_bytes > most_bytes:
                raise OSError(0, f"one recording has {size_bytes} bytes, more than the {most_bytes} for all", str(path))
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
    """Remove the oldest recordings of a folder until those left have at most `most_bytes`; returns how many went.

    Only files that are named as `name_of` does are touched, whatever else lies there.

    Raises:
        OSError: one cannot be removed.
    """
    found = []
    for entry in os.scandir(folder):
        if _NAME.fullmatch(entry.name):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime_ns, entry.name, status.st_size))
    total_bytes = sum(size for _, _, size in found)
    removed = 0
    for _, name, size in sorted(found):
        if total_bytes <= most_bytes:
            break
        (folder / name).unlink()
        total_bytes -= size
        removed += 1
    return removed


def _remove_partials(folder: Path) -> None:
    """What an agent that was killed while it wrote has left."""
    old_s = time.time() - _PARTIAL_SECONDS
    for entry in os.scandir(folder):
        if (
            entry.name.startswith(_PARTIAL_PREFIX)
            and entry.name.endswith(_PARTIAL_SUFFIX)
            and entry.stat(follow_symlinks=False).st_mtime < old_s
        ):
            (folder / entry.name).unlink()
