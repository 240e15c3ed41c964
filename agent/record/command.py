"""`railscope record`: observe this host for a while, as the agent does, and record everything.

To a folder it writes a dataset while it watches (agent/dataset), for as long as it likes; to a file that ends in .npz
the flight recorder's recording, at the end, of what memory holds.  It runs an agent of its own, without a server, and
leaves one that runs already alone: of that one, SIGUSR2 gets the last moments.  Ctrl-C ends it early, and what was
seen until then is written.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, TextIO, TypeVar

from railscope.agent.config.options import Config
from railscope.agent.node.daemon.daemon import Daemon
from railscope.agent.node.daemon.signals import stop_on_signals
from railscope.agent.node.daemon.warm_up import await_first_readings
from railscope.agent.node.recorder.store import save
from railscope.agent.recording.file import RecordingError, read_recording
from railscope.agent.recording.recording import FILE_SUFFIX, Recording
from railscope.agent.recording.summary import describe, describe_overwritten, summarise
from railscope.probes.clock import Clock, SystemClock
from railscope.probes.installation import remedy_for_missing_extra

_log = logging.getLogger("railscope.record")

REASON: Final = "record"
_FILE_MEMORY_BYTES: Final = 256 << 20
_ENDLESS_NS: Final = 86_400_000_000_000
_MARGIN_NS: Final = 5_000_000_000
"""Attaching and writing take time beside the seconds that were asked for."""

_PATIENCE_SECONDS: Final = 0.5
"""For the first reading of rails; meanwhile the rings are not read."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RecordSettings:
    output: Path
    seconds: float | None
    """None: until it is interrupted."""
    memory_bytes: int | None = None
    """None: what is usual."""
    most_bytes: int | None = None
    """Of a dataset's folder, for this node; None: there is no limit."""

    @property
    def to_file(self) -> bool:
        """Whether one file is written at the end; else a folder, meanwhile."""
        return self.output.suffix == FILE_SUFFIX


def run_record(settings: RecordSettings, config: Config, out: TextIO, version: str, clock: Clock | None = None) -> int:
    """Record this host, write, and say what was recorded; returns the exit status.

    Raises:
        RecordingError: the file or the folder cannot be written.
        LoadError: this host does not take the probes.
    """
    if settings.to_file:
        return _record_file(settings, config, out, version, clock or SystemClock())
    with analysis_needed(f"{settings.output}: a dataset"):
        from railscope.agent.dataset.files import DatasetError
        from railscope.agent.record.dataset_recorder import DatasetRecorder
    try:
        recorder = DatasetRecorder(
            settings.output,
            config,
            version,
            clock or SystemClock(),
            memory_bytes=settings.memory_bytes,
            most_bytes=settings.most_bytes,
        )
        with stop_on_signals(recorder.daemon.stop):
            try:
                _watch(recorder.daemon, settings, recorder.finish, recorder.begin)
            finally:
                recorder.close()
    except DatasetError as error:
        raise RecordingError(str(error)) from None
    _say(recorder.describe(), out)
    return 0


def _record_file(settings: RecordSettings, config: Config, out: TextIO, version: str, clock: Clock) -> int:
    if settings.most_bytes is not None:
        raise RecordingError(f"{settings.output}: --max-size is for a folder; a file is bounded by --memory")
    if not settings.output.parent.is_dir():
        raise RecordingError(f"{settings.output}: there is not a folder {settings.output.parent}: make it first")
    if settings.output.is_dir():
        raise RecordingError(f"{settings.output}: this is a folder: name a file, such as -o {settings.output}/job.npz")
    window_ns = _ENDLESS_NS if settings.seconds is None else round(settings.seconds * 1e9) + _MARGIN_NS
    config = replace(
        config,
        once=False,
        recordings_directory=None,
        recordings_window_ns=window_ns,
        recordings_memory_bytes=settings.memory_bytes or _FILE_MEMORY_BYTES,
    )
    daemon = Daemon(config, clock, version, serve=False)
    with stop_on_signals(daemon.stop):
        try:
            recording = _watch(daemon, settings, lambda: daemon.freeze(REASON))
        finally:
            daemon.close()
        try:
            save(recording, settings.output)
        except OSError as error:
            raise RecordingError(f"{settings.output}: the recording cannot be written: {error.strerror}") from None
    _log.info("%d calls were recorded, %s", len(recording.calls), _missing(recording))
    _say((f"wrote {settings.output}", *describe(summarise(recording))), out)
    return 0


def _say(lines: Iterable[str], out: TextIO) -> None:
    try:
        for line in lines:
            print(line, file=out)
        out.flush()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        _log.info("the terminal is gone: the summary is not shown")


def _missing(recording: Recording) -> str:
    """What the kernel had no room for, and what was overwritten in memory before it was written."""
    lost = ", ".join(f"{kind} {count}" for kind, count in recording.lost_events().items() if count)
    overwritten = list(describe_overwritten(recording.overwritten_seconds()))
    told = [f"lost: {lost or 'none'}"] if lost or not overwritten else []
    return "; ".join((*told, *overwritten))


def _watch(
    daemon: Daemon,
    settings: RecordSettings,
    finish: Callable[[], Result],
    started: Callable[[], None] = lambda: None,
) -> Result:
    """Run the daemon until the time is over or it is stopped, then finish.

    `started` is called when everything is attached and rails were read: from then on the seconds count.
    """
    end: threading.Timer | None = None
    try:
        if settings.seconds is not None:
            _log.info("attaching: the %g s begin when that is done", settings.seconds)
        daemon.start()
        await_first_readings(daemon.observer, SystemClock(), 0, _PATIENCE_SECONDS)
        started()
        _log.info("recording into the %s %s", "file" if settings.to_file else "folder", settings.output)
        if settings.seconds is not None:
            end = threading.Timer(settings.seconds, daemon.stop)
            end.start()
        daemon.run(tell_calls=False)
        _log.info("writing what has come in since the last writing")
        return finish()
    finally:
        if end is not None:
            end.cancel()
            end.join()


@contextmanager
def analysis_needed(what: str) -> Iterator[None]:
    """Turn a library that is not installed into one line; `what` needs it.

    Raises:
        RecordingError: a library is missing.
    """
    try:
        yield
    except ImportError as error:
        raise RecordingError(f"{what} needs {error.name}: {remedy_for_missing_extra('analysis')}") from None


def run_describe(path: Path, out: TextIO, *, as_json: bool) -> int:
    """Describe a recording or a dataset (`railscope record describe`); returns the exit status.

    Raises:
        RecordingError: it cannot be read.
    """
    if path.is_dir():
        with analysis_needed(f"{path}: a dataset"):
            from railscope.agent.dataset.describe import describe_dataset
            from railscope.agent.dataset.files import DatasetError
        try:
            describe_dataset(path, out, as_json=as_json)
        except DatasetError as error:
            raise RecordingError(str(error)) from None
        return 0
    summary = summarise(read_recording(path))
    if as_json:
        json.dump(asdict(summary), out, indent=1)
        print(file=out)
        return 0
    for line in describe(summary):
        print(line, file=out)
    return 0


def run_schema(out: TextIO) -> int:
    """Print what the tables of a dataset hold; returns the exit status.

    Raises:
        RecordingError: what knows them is not installed.
    """
    with analysis_needed("the schema of a dataset"):
        from railscope.agent.dataset.schema import schema_page
    out.write(schema_page())
    return 0
