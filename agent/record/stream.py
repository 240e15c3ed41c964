"""Writes pieces of a recording into a dataset, in a thread of its own.

The loop never waits for the disk: while a piece is being written, or cannot be written, the recorder's rings hold what
comes in, and what they have no room for is counted.  A piece that the disk does not take is tried again until the end;
what no disk would take, and whatever else ends the thread, ends the recording.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import pyarrow as pa

from railscope.agent.dataset.check import one_line
from railscope.agent.dataset.files import DatasetError
from railscope.agent.dataset.merge import Merger
from railscope.agent.dataset.recording_writer import Losses, RecordingWriter
from railscope.agent.dataset.size import SizeBound
from railscope.agent.facts.counted import format_count
from railscope.agent.node.recorder.feed import StreamPiece

_log = logging.getLogger("railscope.recordings")

THREAD_NAME: Final = "dataset"
_AGAIN_SECONDS: Final = 1.0
_TELL_SECONDS: Final = 5.0
"""Whoever waits for the end of the writing hears this often what is left."""


@dataclass(frozen=True, slots=True)
class StreamTotals:
    """What became of everything that was given."""

    kernel_lost: dict[str, int]
    """By kind: the kernel's rings were full."""
    overwritten: dict[str, int]
    """By kind: it was not written in time."""


class DatasetStream:
    """`ready` and `enqueue` are for the daemon's loop, the rest for the thread that made it."""

    def __init__(
        self, writer: RecordingWriter, bound: SizeBound | None, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        """`on_failure` is called in the thread that writes, when it ends before it should."""
        self._writer = writer
        self._bound = bound
        self._merger = Merger(writer.writer)
        self._changed = threading.Condition()
        self._pieces: deque[StreamPiece] = deque()
        """Given and not written, oldest first."""
        self._on_failure = on_failure
        self._closing = False
        self._failed = False
        self._trouble = ""
        self._kernel_lost: dict[str, int] = {}
        self._overwritten: dict[str, int] = {}
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether everything that was given is on disk."""
        return not self._pieces and not self._failed and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether nothing more will be written."""
        return self._failed

    def enqueue(self, piece: StreamPiece) -> None:
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
        self._thread.join(_TELL_SECONDS)
        while self._thread.is_alive():
            calls = sum(len(one.piece.recording.calls) for one in self._pieces.copy())
            what = format_count(calls, "call") if calls else "the last rows"
            _log.info("%s: still writing %s", self._writer.writer.folder, what)
            self._thread.join(_TELL_SECONDS)
        if self._pieces or self._failed:
            calls = sum(len(one.piece.recording.calls) for one in self._pieces)
            rest = f"the last {format_count(calls, 'call')}" if calls else "the last rows"
            raise DatasetError(
                f"{self._writer.writer.folder}: {rest} could not be written "
                f"({self._trouble or 'the writer has failed'}); earlier rows are readable"
            )

    def _work(self) -> None:
        # As nice as the loop, not nicer: what the loop waits for on a busy host is the interpreter's lock, which a
        # thread that is seldom scheduled holds for longer.
        with contextlib.ExitStack() as ending:
            ending.push(self._fail)
            self._write_all()

    def _fail(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        """Log an unexpected error, which ends the thread; otherwise the recording would silently write nothing."""
        if error is not None:
            self._trouble = one_line(error)
            self._failed = True
            _log.error("%s: the recording ends", self._writer.writer.folder, exc_info=error)
            self._on_failure()
        return True

    def _write_all(self) -> None:
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
            elif self._failed:
                self._on_failure()
                return
            elif last:
                return
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, _AGAIN_SECONDS)

    def _write(self, given: StreamPiece) -> list[tuple[str, Path]] | None:
        """Write one piece; returns the files of events, None: it cannot be done now."""
        recording, overwritten = given.piece.recording, given.piece.overwritten
        lost = recording.lost_events()
        losses = Losses(
            lost["calls"] + overwritten["calls"],
            lost["completions"] + overwritten["completions"],
        )
        try:
            files = self._writer.add(recording, losses, given.stalls, given.transfers, given.neighbours)
        except OSError as error:
            self._complain(f"cannot be written to: {error.strerror or error}; trying again")
            return None
        except (pa.ArrowException, ValueError) as error:
            # The same piece would fail in the same way for ever.
            self._complain(f"cannot be written: {one_line(error)}; the recording ends")
            self._failed = True
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
            try:
                self._merger.add(files)
            finally:
                if self._bound is not None:
                    self._bound.remove_excess(self._writer, written_bytes)
        except (OSError, pa.ArrowException, ValueError) as error:
            self._complain(f"cannot be tidied: {one_line(error)}")

    def _complain(self, trouble: str) -> None:
        """Once for each trouble."""
        if trouble != self._trouble:
            self._trouble = trouble
            _log.error("%s: %s", self._writer.writer.folder, trouble)
