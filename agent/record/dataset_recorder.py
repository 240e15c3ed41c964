"""Records a dataset for `railscope record -o DIR`: runs an agent of its own and writes what it observes.

Every few seconds, or sooner where the memory fills, the daemon's loop hands over what came in, and a thread of its own
writes it.  What is on disk can be read at any time, also after the recorder was killed: at most what came in since the
last handing over is missing then.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from railscope.agent.config.options import Config
from railscope.agent.dataset.check import check_folder
from railscope.agent.dataset.files import DatasetError, table_files
from railscope.agent.dataset.leftovers import recover_leftovers
from railscope.agent.dataset.recording_writer import RecordingRow, RecordingWriter
from railscope.agent.dataset.size import Removed, SizeBound
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.facts.clocks import read_clocks
from railscope.agent.facts.counted import format_count
from railscope.agent.facts.stall import Stall
from railscope.agent.node.daemon.daemon import Daemon
from railscope.agent.record.stream import DatasetStream, StreamTotals
from railscope.probes.clock import Clock

_log = logging.getLogger("railscope.recordings")

FLUSH_NS: Final = 5_000_000_000
MEMORY_BYTES: Final = 64 << 20
"""For what came in and is not written; several times what a busy host makes until then."""
_WINDOW_NS: Final = 60_000_000_000
"""How long rails that are gone are remembered; everything else is taken within seconds."""
_RECORDED: Final = frozenset({"collective", "netdev", "rdma", "lldp", "tcp", "qp"})
"""Collectors of which something is in the tables; connections and queue pairs tell whose the bytes of rails are."""
_RING_BYTES: Final = 16 << 20
_MOST_NAMED: Final = 3
"""Nodes, where it is said what a folder holds."""


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
        shown: bool = False,
        stall_began: Callable[[Stall], object] | None = None,
    ) -> None:
        """Make the folder, load the programs, and write the recording's first row.

        `most_bytes`: of this node in the folder; None: there is no limit.  `shown`: somebody asks the daemon's observer
        for everything that an agent shows, too.  `stall_began` is told of each stall; None: nobody is.

        Raises:
            DatasetError: the folder cannot be used.
            LoadError: this host does not take the probes.
        """
        made = make_dataset_folder(folder)
        config = recorders_config(config, MEMORY_BYTES if memory_bytes is None else memory_bytes)
        self._folder = folder
        self._pids = config.pids
        self._sees_calls = "collective" in config.collectors
        self._clock = clock
        self._bound = None if most_bytes is None else SizeBound(most_bytes)
        try:
            self.daemon = Daemon(
                config, clock, version, serve=False, keep_ended=shown, shown=shown, stall_began=stall_began
            )
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
            writer = DatasetWriter(folder, socket.gethostname(), durable=True)
            recover_leftovers(folder, writer.node)
            self._writer = RecordingWriter(writer, row)
        except OSError as error:
            self.daemon.close()
            raise _cannot_write(folder, error) from None
        # A recorder that writes nothing any more has nothing left to do.
        self._stream = DatasetStream(self._writer, self._bound, self.daemon.stop)
        self.daemon.start_stream(self._stream, FLUSH_NS)

    def begin(self) -> None:
        """The recording begins now; call when the daemon has started, before its loop runs.

        Raises:
            DatasetError: that cannot be written.
        """
        # Loading the programs and attaching them has taken seconds in which nothing could be seen.
        now = read_clocks(self._clock)
        try:
            self._writer.begin(now.realtime_ns, now.maximum_error_ns)
        except OSError as error:
            raise _cannot_write(self._folder, error) from None

    def finish(self) -> None:
        """Write what is left; call when the daemon's loop has ended.

        Raises:
            DatasetError: some of it cannot be written.
        """
        self.daemon.flush_stream(self._stream)
        self._stream.close()
        row = self.row
        lost = [
            f"{kind} {'some' if count is None else count}"
            for kind, count in (("calls", row.calls_lost), ("operations", row.operations_lost))
            if count != 0
        ]
        _log.info("%d calls were recorded, lost: %s", self.rows.get("calls", 0), ", ".join(lost) or "none")

    def close(self) -> None:
        """Detach, and let the writer end whatever it does; after an error, too."""
        with contextlib.suppress(DatasetError):
            self._stream.close()
        self.daemon.close()

    @property
    def row(self) -> RecordingRow:
        """The recording's row."""
        return self._writer.row

    @property
    def rows(self) -> Mapping[str, int]:
        """Rows written so far, by table of events."""
        return self._writer.rows

    def describe(self) -> Iterator[str]:
        """What was recorded, as lines for people."""
        row, rows = self.row, self.rows
        yield f"wrote {self._folder}"
        yield (
            f"{(row.ended_ns - row.began_ns) / 1e9:.1f} s of {self._writer.writer.node}: "
            f"{format_count(rows.get('calls', 0), 'call')}, "
            f"{format_count(rows.get('operations', 0), 'completed operation')}, "
            f"{format_count(self._writer.communicators, 'rank')} of communicators, "
            f"{format_count(rows.get('rail_samples', 0), 'sample')} of rails"
        )
        if self._sees_calls:
            yield from describe_silence(row, rows.get("calls", 0), self._writer.communicators, self._pids)
        yield from describe_losses(self._stream.totals)
        if self._bound is not None:
            yield from describe_removed(self._bound.removed)


def recorders_config(config: Config, memory_bytes: int) -> Config:
    """The configuration of the agent in `railscope record`: it does not observe what no table holds.

    Whoever asked for the host time of calls gets the probes that measure it, as with any agent.  A ring of the usual
    size becomes a larger one: an agent that misses an event has counted the call all the same, a recording has not.
    """
    return replace(
        config,
        once=False,
        collectors=config.collectors & _RECORDED,
        probe_enqueue_time="off" if config.probe_enqueue_time == "auto" else config.probe_enqueue_time,
        recordings_directory=None,
        recordings_window_ns=_WINDOW_NS,
        recordings_memory_bytes=memory_bytes,
        ring_bytes=_RING_BYTES if config.ring_bytes == Config().ring_bytes else config.ring_bytes,
    )


def describe_silence(row: RecordingRow, calls: int, communicators: int, pids: Sequence[int]) -> Iterator[str]:
    """Why a recording has no call; nothing where there were some. `pids`: the only ones that were watched, if any."""
    if calls or row.calls_lost or row.calls_removed:
        return
    if communicators:
        was = "was" if communicators == 1 else "were"
        yield f"nobody called NCCL meanwhile, though {format_count(communicators, 'rank')} of communicators {was} there"
    elif not pids:
        yield "no process used NCCL during the recording"
    else:
        numbers = ", ".join(map(str, pids))
        these = f"none of the processes {numbers} used" if len(pids) > 1 else f"process {numbers} did not use"
        yield f"{these} NCCL meanwhile: are these the pids of the job's ranks?"


def describe_losses(totals: StreamTotals) -> Iterator[str]:
    """What is missing of a recording, and what helps."""
    if not totals.kernel_lost and not totals.overwritten:
        yield "nothing was lost"
    if totals.kernel_lost:
        # Of the others' rings the size is fixed.
        remedy = "raise --limit.ring, or leave" if "calls" in totals.kernel_lost else "leave"
        yield (
            f"lost by the kernel, whose ring was full: {_counts(totals.kernel_lost)} "
            f"({remedy} the recorder a processor that the job does not take)"
        )
    if totals.overwritten:
        yield f"overwritten before it was on disk: {_counts(totals.overwritten)} (raise --memory to hold more)"


def describe_removed(removed: Removed) -> Iterator[str]:
    """What a recorder removed to keep the folder within its size; nothing where nothing did."""
    if removed.files:
        until = datetime.fromtimestamp(removed.until_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        yield f"removed to keep within --max-size: {_counts(removed.rows)}, up to {until}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in sorted(counts.items()) if count)


def make_dataset_folder(folder: Path) -> list[Path]:
    """Make the folder to record to, or say what it has already; returns what had to be made, the innermost first.

    Raises:
        DatasetError: it cannot be used.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any((folder / "recordings").glob("*/*/*.parquet")):
            check_folder(folder)
            _say_what_is_there(folder)
        elif any(folder.iterdir()):
            raise DatasetError(
                f"{folder}: this folder contains other files: name a new one for a dataset, or a file that ends in .npz"
            )
    except FileExistsError:
        raise DatasetError(
            f"{folder}: this is a file: name a folder for a dataset, or a file that ends in .npz"
        ) from None
    except OSError as error:
        raise _cannot_write(folder, error) from None
    return made


def _say_what_is_there(folder: Path) -> None:
    """Whoever takes an old folder by mistake sees it before the analyses mix two jobs."""
    files = table_files(folder, "recordings")
    nodes = sorted({unquote(file.parent.parent.name) for file in files})
    named = ", ".join(nodes[:_MOST_NAMED]) + (f" and {len(nodes) - _MOST_NAMED} more" * (len(nodes) > _MOST_NAMED))
    count = format_count(len(files), "recording")
    _log.info("%s already holds %s of %s: this recording is added", folder, count, named)


def _cannot_write(folder: Path, error: OSError) -> DatasetError:
    return DatasetError(f"{folder}: the dataset cannot be written: {error.strerror or error}")
