"""What writers that were killed have left: saved where it is whole, removed where not, and said either way."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from railscope.agent.dataset.files import PARTIAL_SUFFIX, is_abandoned, write_atomically
from railscope.agent.dataset.leftovers import find_leftovers, recover_leftovers
from railscope.agent.dataset.reader import open_dataset
from railscope.agent.dataset.recording_writer import RecordingWriter
from railscope.agent.dataset.writer import DatasetWriter
from tests.unit.dataset_pieces import NO_LOSSES, ROW, piece, read, sequences
from tests.unit.recordings import BEGAN_NS, REALTIME_NS, SECOND_NS

NODE = "gpu/01"


def recorded(folder: Path, pieces: int = 2) -> RecordingWriter:
    writer = RecordingWriter(DatasetWriter(folder, NODE), ROW)
    for number in range(pieces):
        writer.add(piece(number), NO_LOSSES, {})
    return writer


def killed(file: Path, content: bytes | None = None) -> Path:
    """What is left of a file whose writer was killed before the file got its name; None: it was whole."""
    partial = file.with_name(f".{file.name}.4711{PARTIAL_SUFFIX}")
    file.rename(partial)
    if content is not None:
        partial.write_bytes(content)
    return partial


def test_what_was_not_ended_is_removed_and_it_is_said_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (_, part) = sorted((recorded(tmp_path).writer.folder / "calls").rglob("*.parquet"))
    partial = killed(part, b"PAR1 and some calls")
    with open_dataset([tmp_path]) as dataset:
        assert dataset.rows(dataset["calls"].count()).as_py() == 10
    assert caplog.messages == [
        f"{tmp_path}: the writers of {NODE} were killed (1 file in .partial): its last rows are missing"
    ]
    caplog.clear()
    recover_leftovers(tmp_path, NODE)
    assert caplog.messages == [
        f"{part}: its recorder was killed while writing it: 19 bytes of calls are unreadable and removed"
    ]
    assert not partial.exists()
    assert sequences(tmp_path) == list(range(1, 11))
    caplog.clear()
    recover_leftovers(tmp_path, NODE)
    open_dataset([tmp_path]).close()
    assert caplog.messages == []


def test_a_part_that_only_lacked_its_name_is_saved_and_the_recording_goes_so_far(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "railscope.recordings")
    recorded(tmp_path, 1)
    writer = DatasetWriter(tmp_path, NODE)
    (row,) = read(tmp_path, "recordings")
    writer.recording = row["recording"]
    calls = RecordingWriter(DatasetWriter(tmp_path / "elsewhere", NODE), ROW).add(piece(1), NO_LOSSES, {})
    ((_, whole),) = calls
    killed(writer.write_part("calls", pq.read_table(whole), BEGAN_NS + REALTIME_NS, 2))
    assert row["ended_ns"] == BEGAN_NS + REALTIME_NS + SECOND_NS
    recover_leftovers(tmp_path, NODE)
    assert sequences(tmp_path) == list(range(1, 21))
    (row,) = read(tmp_path, "recordings")
    assert row["ended_ns"] == BEGAN_NS + REALTIME_NS + SECOND_NS + 9001
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "recovered: its recorder was killed with 10 rows on disk"
    ]


def test_what_is_being_written_and_what_other_nodes_left_is_not_touched(tmp_path: Path) -> None:
    recorded(tmp_path)
    (first, second) = sorted((tmp_path / "calls").rglob("*.parquet"))
    with write_atomically(first, durable=True) as partial:
        partial.write_bytes(b"half of")
        assert find_leftovers(tmp_path) == []
        recover_leftovers(tmp_path, NODE)
        partial.write_bytes(second.read_bytes())
    assert first.read_bytes() == second.read_bytes()
    partial = killed(second, b"half of")
    recover_leftovers(tmp_path, "another node")
    assert find_leftovers(tmp_path) == [partial]


@pytest.mark.parametrize("table", ["communicators", "recordings"])
def test_a_newer_row_of_who_is_who_that_was_not_ended_gives_way_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, table: str
) -> None:
    recorded(tmp_path)
    (file,) = (tmp_path / table).rglob("*.parquet")
    before = file.read_bytes()
    partial = killed(file)
    file.write_bytes(before)
    recover_leftovers(tmp_path, NODE)
    assert (file.read_bytes(), partial.exists(), caplog.messages) == (before, False, [])


def test_parts_that_were_being_put_together_are_still_there_and_nothing_is_doubled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorded(tmp_path)
    (first, _) = sorted((tmp_path / "calls").rglob("*.parquet"))
    whole = first.with_name(f"{first.name.removesuffix('.parquet')}-00000002.parquet")
    whole.write_bytes(first.read_bytes())
    killed(whole)
    recover_leftovers(tmp_path, NODE)
    assert sequences(tmp_path) == list(range(1, 21))
    assert (find_leftovers(tmp_path), caplog.messages) == ([], [])


def test_a_part_of_a_recording_without_a_row_is_not_saved(tmp_path: Path) -> None:
    recorded(tmp_path)
    (first, _) = sorted((tmp_path / "calls").rglob("*.parquet"))
    for file in (tmp_path / "recordings").rglob("*.parquet"):
        file.unlink()
    killed(first)
    recover_leftovers(tmp_path, NODE)
    assert sequences(tmp_path) == list(range(11, 21))


def test_a_whole_part_whose_times_fit_in_no_row_keeps_no_recorder_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recording = recorded(tmp_path, 1).writer.recording
    (part,) = (tmp_path / "calls").rglob("*.parquet")
    rows = pq.read_table(part)
    at = rows.schema.get_field_index("time_ns")
    last = pa.array([(1 << 63) - 1] * len(rows), rows.schema.field(at).type)
    writer = DatasetWriter(tmp_path, NODE)
    writer.recording = recording
    partial = killed(
        writer.write_part("calls", rows.set_column(at, rows.schema.field(at), last), BEGAN_NS + REALTIME_NS, 2)
    )
    (row,) = read(tmp_path, "recordings")
    recover_leftovers(tmp_path, NODE)
    (message,) = caplog.messages
    assert message.startswith(f"{partial}: left by a killed recorder and kept: ")
    assert read(tmp_path, "recordings") == [row]
    assert sequences(tmp_path) == list(range(1, 11))


def test_a_pipe_under_the_name_of_a_leftover_is_nobodys_and_waits_for_nobody(tmp_path: Path) -> None:
    (part, _) = sorted((recorded(tmp_path).writer.folder / "calls").rglob("*.parquet"))
    pipe = part.with_name(f".{part.name}.4711{PARTIAL_SUFFIX}")
    os.mkfifo(pipe)
    found: list[bool] = []
    asking = threading.Thread(target=lambda: found.append(is_abandoned(pipe)), daemon=True)
    asking.start()
    asking.join(10)
    assert found == [False]
    recover_leftovers(tmp_path, NODE)
    assert find_leftovers(tmp_path) == []
    assert pipe.is_fifo()
