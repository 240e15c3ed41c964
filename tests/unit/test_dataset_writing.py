"""Datasets while they are written: parts whole or not at all, put together, removed, and each event once."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.dataset import recording_writer
from agent.dataset.files import PARTIAL_SUFFIX, DatasetError, node_parts, part_name, table_files
from agent.dataset.merge import Merger, write_together
from agent.dataset.reader import open_dataset
from agent.dataset.record import describe_losses, describe_removed, describe_silence, prepare
from agent.dataset.recording_writer import Losses, RecordingRow, RecordingWriter
from agent.dataset.schema import TABLES
from agent.dataset.size import SizeBound
from agent.dataset.stream import DatasetStream, StreamTotals
from agent.dataset.writer import DatasetWriter, read_part
from agent.flight_recorder import FlightRecorder, Piece
from agent.rails import RailDecision
from agent.record_ring import RecordRing
from agent.recorder_feed import RecorderFeed, StreamPiece
from agent.recording import KINDS, ClockReading, Mark, Recording
from agent.snapshot import Snapshot
from tests.unit.recordings import BEGAN_NS, REALTIME_NS, SECOND_NS, recording, records, stall
from tests.unit.stall_world import SimulatedClock

NO_LOSSES = Losses(0, 0)
ROW = RecordingRow("1.2.3", "6.6.1", None, BEGAN_NS + REALTIME_NS, BEGAN_NS + REALTIME_NS, None)


def piece(number: int, calls: int = 10) -> Recording:
    """A second of a host; its calls are numbered on from those of the piece before."""
    began_ns = BEGAN_NS + number * SECOND_NS
    events = records("calls", calls, instance=7, sequence=1 + number * calls + np.arange(calls))
    events["time_ns"] = began_ns + np.arange(calls) * 1000
    clock = ClockReading(began_ns, began_ns + REALTIME_NS, 100, True, 1_000_000 + number, None)
    empty = {kind: records(kind, 0) for kind in KINDS}
    return replace(
        recording("record"), began_ns=began_ns, ended_ns=began_ns + SECOND_NS, clocks=(clock,), marks=(),
        arrays=empty | {"calls": events},
    )  # fmt: skip


def read(folder: Path, table: str) -> list[dict[str, Any]]:
    return [row for file in table_files(folder, table) for row in read_part(file, table).to_pylist()]


def sequences(folder: Path) -> list[int]:
    return sorted(row["sequence"] for row in read(folder, "calls"))


# Parts


def test_a_part_that_cannot_be_written_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = DatasetWriter(tmp_path, "gpu/01")
    rows = pa.Table.from_pylist([{"recording": 1, "text": "first"}])
    file = writer.put("marks", rows, 0, 1)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    durable = DatasetWriter(tmp_path, "gpu/01", durable=True)
    durable.recording = writer.recording
    with pytest.raises(OSError, match="No space left on device"):
        durable.put("marks", rows.append_column("x", pa.array(["second"])), 0, 1)
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]
    assert [row["text"] for row in read(tmp_path, "marks")] == ["first"]
    assert file.parent.parent.name == "gpu%2F01"


def test_names_that_do_not_count_are_not_read(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path, "a")
    file = writer.add_rows("marks", [{"text": "one"}], 0)
    (file.parent / f".{file.name}.99{PARTIAL_SUFFIX}").write_bytes(b"half")
    (file.parent / ".hidden.parquet").write_bytes(b"half")
    (file.parent / "notes.txt").write_bytes(b"")
    assert table_files(tmp_path, "marks") == [file]


@pytest.mark.parametrize(
    ("time_ns", "hour"), [(-1, "1970-01-01T00"), ((1 << 63) - 1, "2262-04-11T23"), (10**30, "9999-12-31T23")]
)
def test_a_time_that_makes_no_sense_has_a_folder_too(tmp_path: Path, time_ns: int, hour: str) -> None:
    assert DatasetWriter(tmp_path, "").add_rows("marks", [{"text": "one"}], time_ns).parent.name == hour
    assert [row["node"] for row in read(tmp_path, "marks")] == [""]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=12, unique=True))
def test_of_parts_that_others_hold_too_only_the_widest_count(spans: list[tuple[int, int]]) -> None:
    names = [part_name(5, first, first + more if more else None) for first, more in spans]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "calls" / "a" / "1970-01-01T00"
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).touch()
        parts = node_parts(Path(root), "calls", "a")
    widest = {
        (first, first + more)
        for first, more in spans
        if not any(a <= first and first + more <= a + b and (a, b) != (first, more) for a, b in spans)
    }
    assert {(part.first, part.last) for part in parts} == widest
    assert {part.recording for part in parts} <= {5}


# Piece by piece


def test_pieces_make_one_recording_that_goes_on(tmp_path: Path) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    assert [row["ended_ns"] for row in read(tmp_path, "recordings")] == [BEGAN_NS + REALTIME_NS]
    for number in range(3):
        writer.add(piece(number), Losses(number, 0), {(7, 1): stall()})
        assert sequences(tmp_path) == list(range(1, 10 * (number + 1) + 1))
        (row,) = read(tmp_path, "recordings")
        assert row["began_ns"] == BEGAN_NS + REALTIME_NS
        assert row["ended_ns"] == BEGAN_NS + REALTIME_NS + (number + 1) * SECOND_NS
        assert row["clock_error_ns"] == 1_000_100 + number
        assert row["recording"] == writer.writer.recording
    assert row["calls_lost"] == 3
    assert len(read(tmp_path, "communicators")) == len(read(tmp_path, "rails")) == len(read(tmp_path, "stalls")) == 1
    assert writer.rows == {"calls": 30}
    with open_dataset([tmp_path]) as dataset:
        assert dataset.rows(dataset["calls"].count()).as_py() == 30


def test_a_live_recording_begins_when_all_is_attached_or_with_its_first_call(tmp_path: Path) -> None:
    made_ns = BEGAN_NS + REALTIME_NS
    for ready_ns, began_ns in ((made_ns - 5000, made_ns - 5000), (made_ns + SECOND_NS // 2, made_ns)):
        writer = RecordingWriter(DatasetWriter(tmp_path / str(ready_ns), "gpu-01"), ROW)
        writer.begin(ready_ns, 30)
        (row,) = read(tmp_path / str(ready_ns), "recordings")
        assert (row["began_ns"], row["ended_ns"], row["clock_error_ns"]) == (ready_ns, ready_ns, 30)
        for number in range(2):
            writer.add(replace(piece(number), began_ns=BEGAN_NS - 3 * SECOND_NS), NO_LOSSES, {})
        (row,) = read(tmp_path / str(ready_ns), "recordings")
        assert (row["began_ns"], row["ended_ns"]) == (began_ns, made_ns + 2 * SECOND_NS)


def test_what_is_learnt_later_takes_the_place_of_what_was_known_before(tmp_path: Path) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    first = piece(0)
    (known,) = first.communicators
    writer.add(replace(first, communicators=(replace(known, rank="unknown"),)), NO_LOSSES, {(7, 1): stall()})
    assert [row["rank"] for row in read(tmp_path, "communicators")] == [None]
    writer.add(
        replace(piece(1), communicators=(known, replace(known, instance=8))),
        NO_LOSSES,
        {(7, 1): replace(stall(), seconds=9.0, cause="rank_gone"), (7, 2): stall()},
    )
    assert [(row["instance"], row["rank"]) for row in read(tmp_path, "communicators")] == [(7, 3), (8, 3)]
    assert [(row["seconds"], row["cause"]) for row in read(tmp_path, "stalls")] == [
        (9.0, "rank_gone"),
        (2.5, "rail_down"),
    ]
    writer.add(piece(2), NO_LOSSES, {})
    assert len(read(tmp_path, "communicators")) == writer.communicators == 2


def test_who_is_who_is_written_again_when_somebody_has_removed_the_folder(tmp_path: Path) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path / "job", "gpu-01"), ROW)
    writer.add(piece(0), NO_LOSSES, {(7, 1): stall()})
    shutil.rmtree(tmp_path / "job")
    writer.add(piece(1), NO_LOSSES, {})
    assert sequences(tmp_path / "job") == list(range(11, 21))
    assert [row["instance"] for row in read(tmp_path / "job", "communicators")] == [7]
    for table in ("recordings", "rails", "stalls"):
        assert len(read(tmp_path / "job", table)) == 1


def test_who_is_who_goes_on_in_another_file_when_there_are_very_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_writer, "_MOST_RENEWED_ROWS", 3)
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    (known,) = piece(0).communicators
    for number in range(4):
        alive = tuple(replace(known, instance=10 + 2 * number + more) for more in range(4))
        writer.add(replace(piece(number), communicators=alive), NO_LOSSES, {})
    assert sorted(row["instance"] for row in read(tmp_path, "communicators")) == list(range(10, 20))
    assert len(table_files(tmp_path, "communicators")) > 1
    assert writer.communicators == 10


def test_a_piece_over_a_full_hour_lies_in_both_hours(tmp_path: Path) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    one = piece(0)
    hour_ns = 3600 * SECOND_NS
    first_ns = (BEGAN_NS + REALTIME_NS) // hour_ns * hour_ns + hour_ns - REALTIME_NS
    one.calls["time_ns"] = first_ns - 4000 + np.arange(10) * 1000
    files = writer.add(one, NO_LOSSES, {})
    assert [file.parent.name for _, file in files] == ["2027-01-15T08", "2027-01-15T09"]
    assert len({file.name for _, file in files}) == 1
    assert sequences(tmp_path) == list(range(1, 11))


def test_losses_that_nobody_counted_make_the_sum_unknown(tmp_path: Path) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    for losses in (Losses(4, 1), Losses(None, 1), Losses(2, 1)):
        writer.add(piece(0), losses, {})
    assert (writer.row.calls_lost, writer.row.operations_lost) == (None, 3)


# Put together


def test_many_parts_become_few_and_no_call_is_lost_or_doubled(tmp_path: Path) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    merger = Merger(writer.writer)
    for number in range(40):
        merger.add(writer.add(piece(number), NO_LOSSES, {}))
        if number % 7 == 0:
            assert sequences(tmp_path) == list(range(1, 10 * (number + 1) + 1))
    assert sequences(tmp_path) == list(range(1, 401))
    parts = node_parts(tmp_path, "calls", "gpu-01")
    assert [(part.first, part.last) for part in parts] == [(1, 16), (17, 32), *((n, n) for n in range(33, 41))]
    assert not list(tmp_path.rglob(f"*{PARTIAL_SUFFIX}"))
    with open_dataset([tmp_path]) as dataset:
        assert dataset.rows(dataset["calls"].select("op").distinct()).to_pylist() == [{"op": "Broadcast"}]
        assert dataset.rows(dataset["calls"].count()).as_py() == 400


def test_a_merge_that_was_stopped_before_it_had_removed_the_parts_counts_no_call_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    merger = Merger(writer.writer)
    files = [writer.add(piece(number), NO_LOSSES, {}) for number in range(16)]
    for one in files[:15]:
        merger.add(one)
    monkeypatch.setattr(Path, "unlink", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        merger.add(files[15])
    monkeypatch.undo()
    assert len(list((tmp_path / "calls").rglob("*.parquet"))) == 17
    assert sequences(tmp_path) == list(range(1, 161))


def test_large_parts_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.dataset.merge._LARGE_BYTES", 1000)
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    merger = Merger(writer.writer)
    for number in range(20):
        merger.add(writer.add(piece(number), NO_LOSSES, {}))
    assert len(node_parts(tmp_path, "calls", "gpu-01")) == 20


# Bounded


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.parquet"))


def fill(folder: Path, most_bytes: int, pieces: Iterable[int]) -> tuple[RecordingWriter, SizeBound]:
    writer = RecordingWriter(DatasetWriter(folder, "gpu-01"), ROW)
    bound = SizeBound(most_bytes)
    merger = Merger(writer.writer)
    for number in pieces:
        files = writer.add(piece(number), NO_LOSSES, {})
        written = sum(file.stat().st_size for _, file in files)
        merger.add(files)
        bound.keep(writer, written)
        assert bytes_of(folder) <= most_bytes
    return writer, bound


def test_the_oldest_calls_go_and_the_recording_begins_later(tmp_path: Path) -> None:
    writer, bound = fill(tmp_path, 24_000, range(30))
    held = sequences(tmp_path)
    assert held == list(range(held[0], 301))
    assert 1 < held[0] < 300
    (row,) = read(tmp_path, "recordings")
    assert row["calls_removed"] == held[0] - 1 == bound.removed.rows["calls"]
    assert row["calls_lost"] == 0
    first = min(row["time_ns"] for row in read(tmp_path, "calls"))
    last_removed = BEGAN_NS + REALTIME_NS + (held[0] - 2) // 10 * SECOND_NS + 9000
    assert row["began_ns"] == last_removed + 1 <= first
    assert writer.row.began_ns == bound.removed.until_ns
    (line,) = describe_removed(bound.removed)
    assert line.startswith(f"removed to keep within --max-size: {held[0] - 1} calls, up to 2027-01-15 08:1")


def test_recordings_that_ended_go_first_and_those_of_others_stay(tmp_path: Path) -> None:
    old = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    busy = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    other_node = RecordingWriter(DatasetWriter(tmp_path, "gpu-02"), ROW)
    for number in range(3):
        for one in (old, busy, other_node):
            one.add(piece(number), NO_LOSSES, {})
    for file in tmp_path.rglob(f"{old.writer.recording:016x}-*"):
        os.utime(file, (1_000_000, 1_000_000))
    bound = SizeBound(bytes_of(tmp_path / "calls" / "gpu-01") + 3 * 20_000)
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)

    def calls(one: RecordingWriter) -> int:
        return sum(row["recording"] == one.writer.recording for row in read(tmp_path, "calls"))

    seen = []
    for number in range(3, 40):
        files = writer.add(piece(number), NO_LOSSES, {})
        bound.keep(writer, sum(file.stat().st_size for _, file in files))
        seen.append(calls(old))
        if seen[-1] == 20:
            (row,) = (row for row in read(tmp_path, "recordings") if row["recording"] == old.writer.recording)
            assert (row["calls_removed"], row["began_ns"]) == (10, BEGAN_NS + REALTIME_NS + 9001)
    assert sorted(seen, reverse=True) == seen
    assert {30, 20, 10, 0} >= set(seen)
    assert seen[-1] == 0
    assert calls(busy) == calls(other_node) == 30
    assert calls(writer) > 0
    kept = {row["recording"] for table in ("recordings", "communicators") for row in read(tmp_path, table)}
    assert kept == {one.writer.recording for one in (busy, other_node, writer)}


def test_parts_that_a_stopped_merge_left_go_with_the_whole_and_do_not_come_back(tmp_path: Path) -> None:
    old = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    for number in range(16):
        old.add(piece(number), NO_LOSSES, {})
    parts = node_parts(tmp_path, "calls", "gpu-01")
    whole = parts[0].path.with_name(part_name(old.writer.recording, 1, 16))
    write_together([part.path for part in parts], whole, "calls", durable=False)
    for file in tmp_path.rglob("*.parquet"):
        os.utime(file, (1_000_000, 1_000_000))
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    writer.add(piece(20), NO_LOSSES, {})
    SizeBound(1).keep(writer, 0)
    assert sequences(tmp_path) == list(range(201, 211))
    assert not list(tmp_path.rglob(f"{old.writer.recording:016x}-*"))


def test_what_happened_at_one_time_goes_together_also_where_one_table_had_fewer_parts(tmp_path: Path) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    merger = Merger(writer.writer)
    for number in range(32):
        one = piece(number)
        if 3 <= number <= 9:
            done = records("completions", 10, instance=7, duration_ns=1000)
            done["time_ns"] = one.calls["time_ns"] + 5000
            one = replace(one, arrays={**one.arrays, "completions": done})
        files = writer.add(one, NO_LOSSES, {})
        for _, file in files:
            os.utime(file, ns=(number, number))
        merger.add(files)
    assert len(read(tmp_path, "operations")) == 70
    SizeBound(bytes_of(tmp_path) - 1).keep(writer, 0)
    assert sequences(tmp_path) == list(range(161, 321))
    assert read(tmp_path, "operations") == []
    (row,) = read(tmp_path, "recordings")
    assert (row["calls_removed"], row["operations_removed"]) == (160, 70)
    assert row["began_ns"] == BEGAN_NS + REALTIME_NS + 15 * SECOND_NS + 9001


def test_the_last_part_stays_even_where_it_is_too_large(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    bound = SizeBound(1)
    for number in range(3):
        writer.add(piece(number), NO_LOSSES, {})
        bound.keep(writer, 1)
    assert sequences(tmp_path) == list(range(21, 31))
    assert len([one for one in caplog.messages if "nothing older is left: allow more (--max-size)" in one]) == 1


# By count


@given(
    st.integers(1, 20),
    st.lists(st.one_of(st.tuples(st.just("add"), st.integers(0, 30)), st.just(("take", 0))), max_size=20),
)
def test_a_ring_gives_everything_once_and_counts_what_was_overwritten(
    capacity: int, steps: list[tuple[str, int]]
) -> None:
    ring = RecordRing(KINDS["losses"], capacity)
    added = taken = 0
    for step, count in [*steps, ("take", 0)]:
        if step == "add":
            ring.add(records("losses", count, calls=added + np.arange(count)))
            added += count
            continue
        fresh, overwritten = ring.after(taken)
        assert fresh["calls"].tolist() == list(range(max(taken, added - capacity), added))
        assert taken + overwritten + len(fresh) == added == ring.added
        taken = added


def test_what_was_not_added_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="0 records have been added, not 1"):
        RecordRing(KINDS["losses"], 4).after(1)


def test_the_recorder_gives_each_event_once_with_its_losses_and_the_clocks_of_its_time() -> None:
    clock = SimulatedClock()
    recorder = FlightRecorder(clock, host="gpu-01", memory_bytes=64 * 1000)
    snapshot = Snapshot(realtime_ns=0, version="", kernel="")
    seen: list[int] = []
    lost = overwritten = 0
    ended_ns = 0
    for round_number in range(20):
        for _ in range(3):
            recorder.add_calls(records("calls", 100, sequence=len(seen) + overwritten + np.arange(100)))
            clock.sleep(1.0)
            recorder.tick()
            if round_number % 5 == 4:
                break
        recorder.note_losses(calls=10 * (round_number + 1), completions=0, lifecycle=0)
        recorder.mark(f"mark {round_number}")
        taken = recorder.take("record", snapshot)
        one = taken.recording
        seen += one.calls["sequence"].tolist()
        overwritten += taken.overwritten["calls"]
        lost += one.lost()["calls"]
        assert [mark.text for mark in one.marks] == [f"mark {round_number}"]
        assert one.began_ns == ended_ns or round_number == 0
        ended_ns = one.ended_ns
        assert one.clocks[0].monotonic_ns <= one.began_ns
        assert one.clocks[-1].monotonic_ns <= one.ended_ns
    assert lost == 200
    assert overwritten == 0
    assert len(seen) == 300 * 16 + 100 * 4


@dataclass
class Taker:
    """A stream that keeps what it is given."""

    ready: bool = True
    pieces: list[StreamPiece] = field(default_factory=list)

    def take(self, piece: StreamPiece) -> None:
        self.pieces.append(piece)


class Idle:
    """A host on which nothing but the recorder's own events happens."""

    def rail_decisions(self) -> tuple[RailDecision, ...]:
        return ()

    def snapshot(self) -> Snapshot:
        return Snapshot(realtime_ns=0, version="1.2.3", kernel="")


def test_pieces_are_given_every_few_seconds_sooner_where_memory_is_short_and_later_where_the_disk_is_slow() -> None:
    clock = SimulatedClock()
    recorder = FlightRecorder(clock, host="gpu-01", memory_bytes=64 * 1000)
    feed, taker = RecorderFeed(recorder, Idle(), None, None), Taker()
    feed.stream_to(taker, 5 * SECOND_NS)

    def after(seconds: int, calls: int = 0) -> list[int]:
        """Lengths of the pieces that were given meanwhile."""
        taker.pieces.clear()
        for _ in range(seconds):
            clock.sleep(1.0)
            recorder.add_calls(records("calls", calls))
            feed.tick()
        return [len(piece.piece.recording.calls) for piece in taker.pieces]

    assert after(4, calls=10) == []
    assert after(1, calls=10) == [50]
    assert after(10, calls=1) == [5, 5]
    # The ring holds 620 calls.
    assert after(2, calls=310) == [310, 310]
    taker.ready = False
    assert after(7, calls=100) == []
    taker.ready = True
    assert after(1) == [620]
    assert taker.pieces[0].piece.overwritten["calls"] == 80
    feed.give(taker)
    assert len(taker.pieces[-1].piece.recording.calls) == 0


# In a thread of its own


def given_piece(number: int, overwritten: int = 0) -> StreamPiece:
    return StreamPiece(Piece(piece(number), dict.fromkeys(KINDS, 0) | {"calls": overwritten}), {(7, 1): stall()})


def test_a_stream_writes_all_that_it_is_given(tmp_path: Path) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    stream = DatasetStream(writer, None)
    for number in range(5):
        stream.take(given_piece(number, overwritten=number))
    stream.close()
    assert sequences(tmp_path) == list(range(1, 51))
    assert writer.row.calls_lost == 10
    assert stream.totals.overwritten == {"calls": 10}
    assert list(describe_losses(stream.totals)) == [
        "overwritten before it was on disk: 10 calls (more memory holds more: --memory)"
    ]


def test_a_stream_tries_again_and_in_the_end_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    put, failures = DatasetWriter.put, [2]

    def full(self: DatasetWriter, table: str, rows: pa.Table, hour_ns: int, part: int) -> Path:
        if table == "recordings" and failures[0]:
            failures[0] -= 1
            raise OSError(28, "No space left on device")
        return put(self, table, rows, hour_ns, part)

    monkeypatch.setattr(DatasetWriter, "put", full)
    monkeypatch.setattr("agent.dataset.stream._AGAIN_SECONDS", 0.01)
    stream = DatasetStream(writer, None)
    stream.take(given_piece(0))
    while not stream.ready:
        time.sleep(0.01)
    assert sequences(tmp_path) == list(range(1, 11))
    assert len([one for one in caplog.messages if "No space left on device; trying again" in one]) == 1
    failures[0] = 1 << 30
    stream.take(given_piece(1))
    assert not stream.ready
    with pytest.raises(
        DatasetError,
        match=r"the last 10 calls could not be written \(.*No space left on device.*\); what was written before can be",
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
    stream.take(given_piece(0))
    while not stream.ready:
        time.sleep(0.01)
    monkeypatch.setattr(RecordingWriter, "add", lambda *_: (_ for _ in ()).throw(trouble))
    stream.take(given_piece(1))
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
        stream.take(given_piece(number))
    stream.close()
    assert len([one for one in caplog.messages if f"{damaged}: cannot be read: " in one]) == 1
    assert damaged.exists()
    damaged.unlink()
    # Of the younger ones only the last part stays: there is no room for more.
    assert sequences(tmp_path) == list(range(51, 61))


def test_names_that_are_no_utf_8_are_written_with_what_is_readable_of_them(tmp_path: Path) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    one = piece(0)
    (end,) = one.communicators
    marks = (Mark(one.began_ns, "m\udcff"),)
    named = replace(end, netns="x\udcff", job=(("job", "né\udcff"),))
    rails = tuple(replace(rail, name="e\udcff") for rail in one.rails)
    writer.add(replace(one, communicators=(named,), rails=rails, marks=marks), NO_LOSSES, {})
    assert [(row["netns"], row["job"]) for row in read(tmp_path, "communicators")] == [("x?", "né?")]
    assert [row["device"] for row in read(tmp_path, "rails")] == ["e?"]
    assert [row["text"] for row in read(tmp_path, "marks")] == ["m?"]


@pytest.mark.parametrize(
    ("row", "communicators", "pids", "said"),
    [
        (ROW, 0, (), ["no process used NCCL meanwhile"]),
        (ROW, 0, (4711,), ["process 4711 did not use NCCL meanwhile: are these the pids of the job's ranks?"]),
        (
            ROW,
            0,
            (4711, 4712),
            ["none of the processes 4711, 4712 used NCCL meanwhile: are these the pids of the job's ranks?"],
        ),
        (ROW, 2, (), ["nobody called NCCL meanwhile, though 2 ends of communicators were there"]),
        (replace(ROW, calls_lost=1), 0, (), []),
        (replace(ROW, calls_removed=1), 0, (), []),
    ],
)
def test_a_recording_without_a_call_says_so(
    row: RecordingRow, communicators: int, pids: tuple[int, ...], said: list[str]
) -> None:
    assert list(describe_silence(row, 0, communicators, pids)) == said
    assert list(describe_silence(row, 1, communicators, pids)) == []


def test_a_folder_that_has_recordings_is_added_to_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "railscope.recordings")
    assert len(prepare(tmp_path / "new" / "job")) == 2
    assert caplog.messages == []
    for node in ("gpu/01", "gpu/01", "gpu-02"):
        RecordingWriter(DatasetWriter(tmp_path / "new" / "job", node), ROW)
        prepare(tmp_path / "new" / "job")
    assert caplog.messages == [
        f"{tmp_path}/new/job holds 1 recording of gpu/01: this one is added",
        f"{tmp_path}/new/job holds 2 recordings of gpu/01: this one is added",
        f"{tmp_path}/new/job holds 3 recordings of gpu-02, gpu/01: this one is added",
    ]


def test_losses_are_told_by_their_cause() -> None:
    assert list(describe_losses(StreamTotals({}, {}))) == ["nothing was lost"]
    assert list(describe_losses(StreamTotals({"calls": 1234}, {"rail_samples": 2}))) == [
        "lost by the kernel, whose ring was full: 1,234 calls (a larger one: --limit.ring)",
        "overwritten before it was on disk: 2 rail samples (more memory holds more: --memory)",
    ]


def test_a_dataset_has_files_only_of_its_tables(tmp_path: Path) -> None:
    fill(tmp_path, 1 << 30, range(3))
    assert {entry.name for entry in tmp_path.iterdir()} <= set(TABLES)
