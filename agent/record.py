"""`railscope record`: watch this host for a while, as the agent does, and write all of it to one file.

It runs an agent of its own, without a server, and leaves one that runs already alone: of that one, SIGUSR2 gets the
last moments.  Ctrl-C ends it early, and what was seen until then is written.
"""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, TextIO

from agent.config import Config
from agent.daemon import Daemon
from agent.recording_file import RecordingError, read_recording
from agent.recording_store import save
from agent.recording_summary import describe, summarise
from probes.clock import Clock, SystemClock

REASON: Final = "record"
_ENDLESS_NS: Final = 86_400_000_000_000
_MARGIN_NS: Final = 5_000_000_000
"""Attaching and writing take time beside the seconds that were asked for."""


@dataclass(frozen=True, slots=True)
class RecordSettings:
    output: Path
    seconds: float | None
    """None: until it is interrupted."""
    memory_bytes: int


def run_record(settings: RecordSettings, config: Config, out: TextIO, version: str, clock: Clock | None = None) -> int:
    """Record, write, and say what was recorded; returns the exit status.

    Raises:
        RecordingError: the file cannot be written.
        LoadError: this host does not take the probes.
    """
    if not settings.output.parent.is_dir():
        raise RecordingError(f"{settings.output}: there is no folder {settings.output.parent}: make it first")
    if settings.output.is_dir():
        raise RecordingError(f"{settings.output}: this is a folder: name a file, such as -o {settings.output}/job.npz")
    window_ns = _ENDLESS_NS if settings.seconds is None else round(settings.seconds * 1e9) + _MARGIN_NS
    config = replace(
        config,
        once=False,
        recordings_directory=None,
        recordings_window_ns=window_ns,
        recordings_memory_bytes=settings.memory_bytes,
    )
    daemon = Daemon(config, clock or SystemClock(), version, serve=False)
    before = {number: signal.signal(number, lambda *_: daemon.stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    end: threading.Timer | None = None
    try:
        daemon.start()
        if settings.seconds is not None:
            end = threading.Timer(settings.seconds, daemon.stop)
            end.start()
        daemon.run()
        recording = daemon.freeze(REASON)
    finally:
        if end is not None:
            end.cancel()
            end.join()
        for number, handler in before.items():
            signal.signal(number, handler)
        daemon.close()
    try:
        save(recording, settings.output)
    except OSError as error:
        raise RecordingError(f"{settings.output}: the recording cannot be written: {error.strerror}") from None
    print(settings.output, file=out)
    for line in describe(summarise(recording)):
        print(line, file=out)
    return 0


def run_describe(path: Path, out: TextIO, *, as_json: bool) -> int:
    """Say what a recording holds; returns the exit status.

    Raises:
        RecordingError: it cannot be read.
    """
    summary = summarise(read_recording(path))
    if as_json:
        json.dump(asdict(summary), out, indent=1)
        print(file=out)
        return 0
    for line in describe(summary):
        print(line, file=out)
    return 0
