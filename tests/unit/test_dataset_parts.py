"""Files of a dataset: whole or not there, few, each event once, and nothing that is none of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.dataset.files import PARTIAL_SUFFIX, node_parts, part_name, table_files
from railscope.agent.dataset.merge import Merger
from railscope.agent.dataset.reader import open_dataset
from railscope.agent.dataset.recording_writer import RecordingWriter
from railscope.agent.dataset.writer import DatasetWriter
from tests.unit.dataset_pieces import NO_LOSSES, ROW, piece, read, sequences


def test_a_part_that_cannot_be_written_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = DatasetWriter(tmp_path, "gpu/01")
    rows = pa.Table.from_pylist([{"recording": 1, "text": "first"}])
    file = writer.write_part("marks", rows, 0, 1)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    durable = DatasetWriter(tmp_path, "gpu/01", durable=True)
    durable.recording = writer.recording
    with pytest.raises(OSError, match="No space left on device"):
        durable.write_part("marks", rows.append_column("x", pa.array(["second"])), 0, 1)
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
    monkeypatch.setattr("railscope.agent.dataset.merge._LARGE_BYTES", 1000)
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    merger = Merger(writer.writer)
    for number in range(20):
        merger.add(writer.add(piece(number), NO_LOSSES, {}))
    assert len(node_parts(tmp_path, "calls", "gpu-01")) == 20


def test_a_durable_part_is_on_disk_before_its_name_and_its_folders_are_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, bool]] = []
    folder = tmp_path / "calls" / "a" / "1970-01-01T00"

    def sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path if path.is_dir() else path.parent, any(folder.glob("*.parquet"))))

    monkeypatch.setattr(os, "fsync", sync)
    DatasetWriter(tmp_path, "a", durable=True).add_rows("calls", [{"op": "Send"}], 0)
    assert synced == [
        *((one, False) for one in (tmp_path, tmp_path / "calls", tmp_path / "calls" / "a")),
        (folder, False),
        (folder, True),
    ]
    synced.clear()
    DatasetWriter(tmp_path, "b").add_rows("calls", [{"op": "Send"}], 0)
    assert synced == []
