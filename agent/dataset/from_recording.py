"""A flight recorder's recording as a dataset, so that every analysis reads both alike."""

from __future__ import annotations

import hashlib
from pathlib import Path

from railscope.agent.dataset.files import DatasetError
from railscope.agent.dataset.recording_writer import Losses, RecordingRow, RecordingWriter
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.recording.file import RecordingError, read_recording
from railscope.agent.recording.recording import Recording

_UNKNOWN_NODE = "unknown"


def write_dataset(recording: Recording, folder: Path) -> int:
    """Put a recording into a dataset's folder; returns its number there.

    The number follows from the recording: put into a folder again, it takes its own place.  Where memory was too short
    for all of the window, how many calls or operations are missing is not known, and null.

    Raises:
        DatasetError: it cannot be written.
    """
    writer = DatasetWriter(folder, recording.host or _UNKNOWN_NODE)
    writer.recording = _number(recording)
    row = RecordingRow(
        railscope=recording.railscope or None,
        kernel=recording.kernel or None,
        simulated=recording.simulated,
        began_ns=recording.realtime_ns(recording.began_ns),
        ended_ns=recording.realtime_ns(recording.ended_ns),
        clock_error_ns=recording.realtime_error_ns(),
    )
    try:
        RecordingWriter(writer, row).add(
            recording,
            Losses(calls=_lost(recording, "calls"), operations=_lost(recording, "completions")),
            dict(enumerate(recording.stalls)),
        )
    except OSError as error:
        raise DatasetError(f"{folder}: the dataset cannot be written: {error.strerror or error}") from None
    return writer.recording


def convert_file(path: Path, folder: Path) -> int:
    """As `write_dataset`, from a recording's file.

    Raises:
        DatasetError: it cannot be read or written.
    """
    try:
        recording = read_recording(path)
    except RecordingError as error:
        raise DatasetError(str(error)) from None
    return write_dataset(recording, folder)


def _lost(recording: Recording, kind: str) -> int | None:
    complete = recording.complete_from_ns.get(kind, recording.began_ns) <= recording.began_ns
    return recording.lost_events()[kind] if complete else None


def _number(recording: Recording) -> int:
    """A number that another recording has with a chance of one in 2^62."""
    text = "\n".join(
        (
            recording.host,
            recording.boot_id,
            str(recording.began_ns),
            str(recording.ended_ns),
            *(f"{clock.monotonic_ns} {clock.realtime_ns}" for clock in recording.clocks),
            *(f"{kind} {len(records)}" for kind, records in sorted(recording.arrays.items())),
        )
    )
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2
