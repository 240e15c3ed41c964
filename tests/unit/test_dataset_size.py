"""A dataset that is kept within a size: the oldest goes, together, and it is said what went."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from railscope.agent.dataset.files import node_parts, part_name
from railscope.agent.dataset.merge import Merger, merge_files
from railscope.agent.dataset.recording_writer import RecordingWriter
from railscope.agent.dataset.schema import TABLES
from railscope.agent.dataset.size import SizeBound
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.record.dataset_recorder import describe_removed
from tests.unit.dataset_pieces import NO_LOSSES, ROW, bytes_of, piece, read, sequences
from tests.unit.recordings import BEGAN_NS, REALTIME_NS, SECOND_NS, records


def fill(folder: Path, most_bytes: int, pieces: Iterable[int]) -> tuple[RecordingWriter, SizeBound]:
    writer = RecordingWriter(DatasetWriter(folder, "gpu-01"), ROW)
    bound = SizeBound(most_bytes)
    merger = Merger(writer.writer)
    for number in pieces:
        files = writer.add(piece(number), NO_LOSSES, {})
        written = sum(file.stat().st_size for _, file in files)
        merger.add(files)
        bound.remove_excess(writer, written)
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
        bound.remove_excess(writer, sum(file.stat().st_size for _, file in files))
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
    merge_files([part.path for part in parts], whole, "calls", durable=False)
    for file in tmp_path.rglob("*.parquet"):
        os.utime(file, (1_000_000, 1_000_000))
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    writer.add(piece(20), NO_LOSSES, {})
    SizeBound(1).remove_excess(writer, 0)
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
    SizeBound(bytes_of(tmp_path) - 1).remove_excess(writer, 0)
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
        bound.remove_excess(writer, 1)
    assert sequences(tmp_path) == list(range(21, 31))
    assert len([one for one in caplog.messages if "nothing older is left to remove: raise --max-size" in one]) == 1


def test_a_dataset_has_files_only_of_its_tables(tmp_path: Path) -> None:
    fill(tmp_path, 1 << 30, range(3))
    assert {entry.name for entry in tmp_path.iterdir()} <= set(TABLES)
