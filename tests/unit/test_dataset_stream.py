"""The thread that writes a dataset: it writes all, tries again, and says what it could not write."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from railscope.agent.dataset.files import DatasetError
from railscope.agent.dataset.recording_writer import RecordingWriter
from railscope.agent.dataset.size import SizeBound
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.node.recorder.feed import StreamPiece
from railscope.agent.node.recorder.flight_recorder import Piece
from railscope.agent.record.dataset_recorder import describe_losses
from railscope.agent.record.stream import DatasetStream
from railscope.agent.recording.recording import KINDS
from tests.unit.dataset_pieces import NO_LOSSES, ROW, piece, sequences
from tests.unit.recordings import stall


def given_piece(number: int, overwritten: int = 0) -> StreamPiece:
    return StreamPiece(Piece(piece(number), dict.fromkeys(KINDS, 0) | {"calls": overwritten}), {(7, 1): stall()})


def test_a_stream_writes_all_that_it_is_given(tmp_path: Path) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    stream = DatasetStream(writer, None)
    for number in range(5):
        stream.enqueue(given_piece(number, overwritten=number))
    stream.close()
    assert sequences(tmp_path) == list(range(1, 51))
    assert writer.row.calls_lost == 10
    assert stream.totals.overwritten == {"calls": 10}
    assert list(describe_losses(stream.totals)) == [
        "overwritten before it was on disk: 10 calls (raise --memory to hold more)"
    ]


def test_a_stream_says_what_it_waits_for_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    told = threading.Event()
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    add = writer.add

    def slow(*given: Any) -> Any:
        assert told.wait(10)
        return add(*given)

    def notice(_: logging.LogRecord) -> bool:
        told.set()
        return True

    monkeypatch.setattr(writer, "add", slow)
    monkeypatch.setattr("railscope.agent.record.stream._TELL_SECONDS", 0.01)
    monkeypatch.setattr(logging.getLogger("railscope.recordings"), "filters", [notice])
    stream = DatasetStream(writer, None)
    stream.enqueue(given_piece(0))
    stream.close()
    assert caplog.messages[0] == f"{tmp_path}: still writing 10 calls"
    assert sequences(tmp_path) == list(range(1, 11))


def test_a_stream_tries_again_and_in_the_end_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    put, failures = DatasetWriter.write_part, [2]

    def full(self: DatasetWriter, table: str, rows: pa.Table, hour_ns: int, part: int) -> Path:
        if table == "recordings" and failures[0]:
            failures[0] -= 1
            raise OSError(28, "No space left on device")
        return put(self, table, rows, hour_ns, part)

    monkeypatch.setattr(DatasetWriter, "write_part", full)
    monkeypatch.setattr("railscope.agent.record.stream._AGAIN_SECONDS", 0.01)
    stream = DatasetStream(writer, None)
    stream.enqueue(given_piece(0))
    while not stream.ready:
        time.sleep(0.01)
    assert sequences(tmp_path) == list(range(1, 11))
    assert len([one for one in caplog.messages if "No space left on device; trying again" in one]) == 1
    failures[0] = 1 << 30
    stream.enqueue(given_piece(1))
    assert not stream.ready
    with pytest.raises(
        DatasetError,
        match=r"the last 10 calls could not be written \(.*No space left on device.*\); earlier rows are",
    ):
        stream.close()


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (pa.ArrowInvalid("no such text"), "cannot be written: no such text; the recording ends"),
        (RuntimeError("what nobody thought of"), "the recording ends"),
    ],
)
def test_a_stream_that_can_write_no_more_says_so_and_ends_the_recording(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: Exception,
    said: str,
) -> None:
    stopped = threading.Event()
    stream = DatasetStream(RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW), None, stopped.set)
    stream.enqueue(given_piece(0))
    while not stream.ready:
        time.sleep(0.01)
    monkeypatch.setattr(RecordingWriter, "add", lambda *_: (_ for _ in ()).throw(trouble))
    stream.enqueue(given_piece(1))
    assert stopped.wait(60)
    assert (stream.failed, stream.ready) == (True, False)
    assert f"{tmp_path}: {said}" in caplog.messages
    with pytest.raises(DatasetError, match=rf"the last 10 calls could not be written \(.*{trouble}"):
        stream.close()
    assert sequences(tmp_path) == list(range(1, 11))


def test_a_damaged_part_of_an_older_recording_stays_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    ((_, damaged),) = old.add(piece(0, 5000), NO_LOSSES, {})
    damaged.write_bytes(b"PAR1" + bytes(3000))
    for file in tmp_path.rglob("*.parquet"):
        os.utime(file, (1_000_000, 1_000_000))
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    stream = DatasetStream(writer, SizeBound(3000))
    for number in range(1, 6):
        stream.enqueue(given_piece(number))
    stream.close()
    assert len([one for one in caplog.messages if f"{damaged}: cannot be read: " in one]) == 1
    assert damaged.exists()
    damaged.unlink()
    # Of the younger ones only the last part stays: there is no room for more.
    assert sequences(tmp_path) == list(range(51, 61))
