"""Takes what the daemon's loop gives it and writes it into a dataset in a thread of its own.

The loop never waits for the disk: while a piece is being written, or cannot be written, the recorder's rings hold what
comes in, and what they have no room for is counted.  A piece that cannot be written is tried again until the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.dataset.files import DatasetError
from agent.dataset.merge import Merger
from agent.dataset.recording_writer import Losses, RecordingWriter
from agent.dataset.size import SizeBound
from agent.recorder_feed import StreamPiece

_log = logging.getLogger("railscope.recordings")

_NICENESS: Final = 10
_AGAIN_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class StreamTotals:
    """What became of everything that was given."""

    kernel_lost: dict[str, int]
    """By kind: the kernel's rings were full."""
    overwritten: dict[str, int]
    """By kind: it was not written in time."""


class DatasetStream:
    """`ready` and `take` are for the daemon's loop, the rest for the thread that made it."""

    def __init__(self, writer: RecordingWriter, bound: SizeBound | None) -> None:
        self._writer = writer
        self._bound = bound
        self._merger = Merger(writer.writer)
        self._changed = threading.Condition()
        self._pieces: deque[StreamPiece] = deque()
        """Given and not written, oldest first."""
        self._closing = False
        self._trouble = ""
        self._kernel_lost: dict[str, int] = {}
        self._overwritten: dict[str, int] = {}
        self._thread = threading.Thread(target=self._write_all, name="dataset")
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether everything that was given is on disk."""
        return not self._pieces and self._thread.is_alive()

    def take(self, piece: StreamPiece) -> None:
        """Have a piece written soon."""
        with self._changed:
            self._pieces.append(piece)
            self._changed.notify()

    @property
    def totals(self) -> StreamTotals:
        return StreamTotals(dict(self._kernel_lost), dict(self._overwritten))

    def close(self) -> None:
        """Wait until everything that was given is on disk.

        Raises:
            DatasetError: some of it could not be written.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self._pieces:
            calls = sum(len(one.piece.recording.calls) for one in self._pieces)
            raise DatasetError(
                f"{self._writer.writer.folder}: the last {calls:,} calls could not be written "
                f"({self._trouble or 'the writer has failed'}); what was written before can be read"
            )

    def _write_all(self) -> None:
        with contextlib.suppress(OSError):
            # Of this thread alone: Linux keeps a niceness for each.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._closing)
                if not self._pieces:
                    return
                piece, last = self._pieces[0], self._closing
            files = self._write(piece)
            if files is not None:
                self._pieces.popleft()
                self._tidy(files)
            elif last:
                return
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, _AGAIN_SECONDS)

    def _write(self, given: StreamPiece) -> list[tuple[str, Path]] | None:
        """Write one piece; returns the files of events, None: it cannot be done now."""
        recording, overwritten = given.piece.recording, given.piece.overwritten
        lost = recording.lost()
        losses = Losses(
            lost["calls"] + overwritten["calls"],
            lost["completions"] + overwritten["completions"],
        )
        try:
            files = self._writer.add(recording, losses, given.stalls)
        except OSError as error:
            self._complain(f"cannot be written to: {error.strerror or error}; trying again")
            return None
        for total, more in ((self._kernel_lost, lost), (self._overwritten, overwritten)):
            for kind, count in more.items():
                if count:
                    total[kind] = total.get(kind, 0) + count
        return files

    def _tidy(self, files: list[tuple[str, Path]]) -> None:
        """Put small parts together, and remove the oldest where there is too much."""
        try:
            written_bytes = sum(path.stat().st_size for _, path in files)
            self._merger.add(files)
            if self._bound is not None:
                self._bound.keep(self._writer, written_bytes)
        except OSError as error:
            self._complain(f"cannot be tidied: {error.strerror or error}")

    def _complain(self, trouble: str) -> None:
        """Once for each trouble."""
        if trouble != self._trouble:
            self._trouble = trouble
            _log.error("%s: %s", self._writer.writer.folder, trouble)
