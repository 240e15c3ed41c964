"""A recording that is written piece by piece: what it says of itself at any time, and who is who in it."""

from __future__ import annotations

import shutil
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.dataset import recording_writer
from railscope.agent.dataset.files import table_files
from railscope.agent.dataset.reader import open_dataset
from railscope.agent.dataset.recording_writer import Losses, RecordingWriter
from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.facts.transfers import PeerTransfers
from railscope.agent.recording.recording import Mark, RecordedOwner, Recording
from railscope.probes.nccl.records.calls import LifecycleKind
from tests.unit.dataset_pieces import NO_LOSSES, ROW, piece, read, sequences
from tests.unit.identities import named
from tests.unit.recordings import BEGAN_NS, REALTIME_NS, SECOND_NS, records, stall


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
    writer.add(replace(first, communicators=(named(known, rank="unknown"),)), NO_LOSSES, {(7, 1): stall()})
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


def test_it_is_kept_whose_calls_are_numbered_from_the_first_one_on(tmp_path: Path) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    (known,) = piece(0).communicators
    ends = tuple(replace(known, instance=instance) for instance in (7, 8, 9, 10))
    first = records("lifecycle", 4, instance=[7, 7, 8, 9])
    first["kind"] = [LifecycleKind.INIT, LifecycleKind.CONFIRMED, LifecycleKind.SEEN, LifecycleKind.CONFIRMED]
    later = records("lifecycle", 2, instance=[7, 10])
    later["kind"] = [LifecycleKind.SEEN, LifecycleKind.SPLIT]
    for number, events in enumerate((first, later, later[:0])):
        one = replace(piece(number), communicators=ends)
        writer.add(replace(one, arrays={**one.arrays, "lifecycle": events}), NO_LOSSES, {})
    assert {row["instance"]: row["numbered_from_start"] for row in read(tmp_path, "communicators")} == {
        7: True,
        8: False,
        9: None,
        10: True,
    }


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


def test_a_pair_that_goes_on_has_its_totals_however_many_end_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_writer, "_MOST_RENEWED_ROWS", 3)
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    for number in range(8):
        pids = (70, 80 + number, 90 + number)
        writes = 10 * (number + 1)
        pairs: dict[Hashable, tuple[PeerTransfers]] = {
            pid: (PeerTransfers("nixl", "Write", "transmit", pid, "decode-0", writes, 0, writes, 0, 1.0, None),)
            for pid in pids
        }
        writer.add(piece(number), NO_LOSSES, {}, pairs)
        assert {row["pid"]: row["operations"] for row in read(tmp_path, "transfers")}[70] == writes
    assert len(table_files(tmp_path, "transfers")) > 2
    rows = read(tmp_path, "transfers")
    assert sorted(row["pid"] for row in rows) == [70, *range(80, 88), *range(90, 98)]


def owned(number: int, *owners: RecordedOwner) -> Recording:
    """A piece at whose end a rail's ledger holds this."""
    one = piece(number)
    (rail,) = one.rails
    return replace(one, rails=(replace(rail, owners=owners),))


def test_who_moved_a_rail_s_bytes_is_kept_with_what_an_earlier_ledger_of_it_had(tmp_path: Path) -> None:
    """A rail is forgotten where nobody uses it for a while; what it carries later is in a ledger that begins with 0."""
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    nccl, unknown = (RecordedOwner("transmit", owner, "foreign", 100, 0.1) for owner in ("nccl", "unknown"))
    grown = replace(nccl, port_bytes=900, error_ratio=0.02)
    steps: list[tuple[tuple[RecordedOwner, ...], list[int]]] = [
        ((unknown,), [100]),
        ((grown, unknown), [900, 100]),
        ((), [900, 100]),
        ((nccl,), [900, 100, 100]),
        ((replace(nccl, port_bytes=150),), [900, 100, 150]),
    ]
    for number, (owners, counts) in enumerate(steps):
        writer.add(owned(number, *owners), NO_LOSSES, {})
        assert [row["port_bytes"] for row in read(tmp_path, "rail_owners")] == counts
    (row, *_) = read(tmp_path, "rail_owners")
    assert (row["owner"], row["direction"], row["error_ratio"]) == ("nccl", "transmit", 0.02)


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


def test_names_that_are_no_utf_8_are_written_with_what_is_readable_of_them(tmp_path: Path) -> None:
    writer = RecordingWriter(DatasetWriter(tmp_path, "gpu-01"), ROW)
    one = piece(0)
    (end,) = one.communicators
    marks = (Mark(one.began_ns, "m\udcff"),)
    odd = named(end, netns="x\udcff", job=(("job", "né\udcff"),))
    rails = tuple(replace(rail, name="e\udcff") for rail in one.rails)
    writer.add(replace(one, communicators=(odd,), rails=rails, marks=marks), NO_LOSSES, {})
    assert [(row["netns"], row["job"]) for row in read(tmp_path, "communicators")] == [("x?", "né?")]
    assert [row["device"] for row in read(tmp_path, "rails")] == ["e?"]
    assert [row["text"] for row in read(tmp_path, "marks")] == ["m?"]
