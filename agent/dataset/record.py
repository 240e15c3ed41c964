"""The recording side of `railscope record -o DIR`: an agent of its own that writes a dataset while it watches.

Every few seconds, or sooner where the memory fills, the daemon's loop hands over what came in, and a thread of its own
writes it.  What is on disk can be read at any time, also after the recorder was killed: at most what came in since the
last handing over is missing then.
"""

from __future__ import annotations

import contextlib
import platform
import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from agent.config import Config
from agent.daemon import Daemon
from agent.dataset.check import check_folder
from agent.dataset.files import DatasetError
from agent.dataset.recording_writer import RecordingRow, RecordingWriter
from agent.dataset.size import Removed, SizeBound
from agent.dataset.stream import DatasetStream, StreamTotals
from agent.dataset.writer import DatasetWriter
from agent.recorder_feed import Stream
from agent.recording import read_clocks
from probes.clock import Clock

FLUSH_NS: Final = 5_000_000_000
MEMORY_BYTES: Final = 64 << 20
"""For what came in and is not written; several times what a busy host makes until then."""
_WINDOW_NS: Final = 60_000_000_000
"""How long rails that are gone are remembered; everything else is taken within seconds."""


class _StreamingDaemon(Daemon):
    """An agent without a server that gives what it records to a stream."""

    def __init__(self, config: Config, clock: Clock, version: str, *, keep_ended: bool) -> None:
        super().__init__(config, clock, version, serve=False, keep_ended=keep_ended)

    def stream_to(self, stream: Stream) -> None:
        """Give all that comes in from now on; call before `start`."""
        if self._feed is not None:
            self._feed.stream_to(stream, FLUSH_NS)

    def give_rest(self, stream: Stream) -> None:
        """Give what came in since; call when the loop has ended."""
        self._drain()
        if self._feed is not None:
            self._feed.give(stream)


class DatasetRecorder:
    """One run of the recorder."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        version: str,
        clock: Clock,
        *,
        memory_bytes: int | None = None,
        most_bytes: int | None = None,
        keep_ended: bool = False,
    ) -> None:
        """Make the folder, load the programs, and write the recording's first row.

        `most_bytes`: of this node in the folder; None: there is no limit.  `keep_ended` is the daemon's.

        Raises:
            DatasetError: the folder cannot be used.
            LoadError: this host does not take the probes.
        """
        made = _prepare(folder)
        config = replace(
            config,
            once=False,
            recordings_directory=None,
            recordings_window_ns=_WINDOW_NS,
            recordings_memory_bytes=MEMORY_BYTES if memory_bytes is None else memory_bytes,
        )
        self._folder = folder
        self._bound = None if most_bytes is None else SizeBound(most_bytes)
        try:
            self.daemon = _StreamingDaemon(config, clock, version, keep_ended=keep_ended)
        except BaseException:
            for one in made:
                with contextlib.suppress(OSError):
                    one.rmdir()
            raise
        try:
            now = read_clocks(clock)
            row = RecordingRow(
                railscope=version,
                kernel=platform.release(),
                simulated=None,
                began_ns=now.realtime_ns,
                ended_ns=now.realtime_ns,
                clock_error_ns=now.maximum_error_ns,
            )
            self._writer = RecordingWriter(DatasetWriter(folder, socket.gethostname(), durable=True), row)
        except OSError as error:
            self.daemon.close()
            raise _cannot_write(folder, error) from None
        self._stream = DatasetStream(self._writer, self._bound)
        self.daemon.stream_to(self._stream)

    def finish(self) -> None:
        """Write what is left; call when the daemon's loop has ended.

        Raises:
            DatasetError: some of it cannot be written.
        """
        self.daemon.give_rest(self._stream)
        self._stream.close()

    def close(self) -> None:
        """Detach, and let the writer end whatever it does; after an error, too."""
        with contextlib.suppress(DatasetError):
            self._stream.close()
        self.daemon.close()

    def describe(self) -> Iterator[str]:
        """What was recorded, as lines for people."""
        row, rows = self._writer.row, self._writer.rows
        yield str(self._folder)
        yield (
            f"{(row.ended_ns - row.began_ns) / 1e9:.1f} s of {self._writer.writer.node}: "
            f"{rows.get('calls', 0):,} calls, {rows.get('operations', 0):,} completed operations, "
            f"{self._writer.communicators:,} ends of communicators, {rows.get('rail_samples', 0):,} samples of rails"
        )
        yield from describe_losses(self._stream.totals)
        if self._bound is not None:
            yield from describe_removed(self._bound.removed)


def describe_losses(totals: StreamTotals) -> Iterator[str]:
    """What is missing, and what helps."""
    if not totals.kernel_lost and not totals.overwritten:
        yield "nothing was lost"
    if totals.kernel_lost:
        yield f"lost by the kernel, whose ring was full: {_counts(totals.kernel_lost)} (a larger one: --limit.ring)"
    if totals.overwritten:
        yield f"overwritten before it was on disk: {_counts(totals.overwritten)} (more memory holds more: --memory)"


def describe_removed(removed: Removed) -> Iterator[str]:
    """What went to keep the folder within its size; nothing where nothing did."""
    if removed.files:
        until = datetime.fromtimestamp(removed.until_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        yield f"removed to keep within --max-size: {_counts(removed.rows)}, up to {until}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in sorted(counts.items()) if count)


def _prepare(folder: Path) -> list[Path]:
    """Make the folder; returns what had to be made, the innermost first."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any((folder / "recordings").glob("*/*/*.parquet")):
            check_folder(folder)
        elif any(folder.iterdir()):
            raise DatasetError(
                f"{folder}: this folder holds other things: name a new one for a dataset, or a file that ends in .npz"
            )
    except FileExistsError:
        raise DatasetError(
            f"{folder}: this is a file: name a folder for a dataset, or a file that ends in .npz"
        ) from None
    except OSError as error:
        raise _cannot_write(folder, error) from None
    return made


def _cannot_write(folder: Path, error: OSError) -> DatasetError:
    return DatasetError(f"{folder}: the dataset cannot be written: {error.strerror or error}")
