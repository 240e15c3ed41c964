"""The folder of recordings: its size, its names, and disks that do not do what they should."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent import recording_file
from agent.recording import Recording
from agent.recording_file import read_recording, write_recording
from agent.recording_store import RecordingStore, WriteResult, make_room, name_of, save
from tests.unit.recordings import REALTIME_NS, SECOND_NS, recording

Results = list[tuple[str, WriteResult]]


def write(store: RecordingStore, what: Recording) -> Results:
    """Write one and wait; returns what was told of it."""
    told: Results = []
    store.write(what, lambda reason, result: told.append((reason, result)))
    store.close()
    return told


def at(seconds: int, reason: str = "stall") -> Recording:
    """A recording that ended at another second."""
    one = recording(reason)
    clocks = tuple(replace(clock, realtime_ns=clock.realtime_ns + seconds * SECOND_NS) for clock in one.clocks)
    return replace(one, clocks=clocks)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def size_of(what: Recording) -> int:
    file = io.BytesIO()
    write_recording(file, what)
    return len(file.getvalue())


def test_a_recording_is_written_whole_under_a_name_that_says_host_time_and_reason(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    assert write(RecordingStore(folder, 1 << 20), recording()) == [("stall", WriteResult.WRITTEN)]
    assert names(folder) == ["railscope-gpu-01-20270115T081740.000Z-stall.npz"]
    assert (1_000 + 60) * SECOND_NS + REALTIME_NS == 1_800_001_060 * SECOND_NS
    assert read_recording(folder / names(folder)[0]).reason == "stall"
    assert stat.S_IMODE(folder.stat().st_mode) & stat.S_IRWXO == 0


@pytest.mark.parametrize(("host", "shown"), [("a/../b c", "a_.._b_c"), ("", "unknown"), ("x" * 300, "x" * 64)])
def test_a_hosts_name_cannot_lead_elsewhere(host: str, shown: str) -> None:
    assert name_of(replace(recording(), host=host)) == f"railscope-{shown}-20270115T081740.000Z-stall.npz"


def test_the_oldest_go_first_when_there_is_no_room(tmp_path: Path) -> None:
    room_bytes = 3 * size_of(recording()) + 100
    store = RecordingStore(tmp_path, room_bytes)
    for second in range(6):
        assert write(store, at(second)) == [("stall", WriteResult.WRITTEN)]
        # Writing takes less than the clock of some file systems counts.
        for number, name in enumerate(names(tmp_path)):
            os.utime(tmp_path / name, (number, number))
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= room_bytes
    assert names(tmp_path) == [name_of(at(second)) for second in (3, 4, 5)]


def test_nothing_but_recordings_is_removed(tmp_path: Path) -> None:
    others = ("notes.txt", "railscope-x.npz", "railscope-gpu-01-20270115T081740.000Z-stall.npz.bak")
    for name in others:
        (tmp_path / name).write_bytes(bytes(1000))
    inside = tmp_path / "railscope-gpu-01-20270115T081740.000Z-stall.npz"
    inside.mkdir()
    elsewhere = tmp_path / "railscope-gpu-02-20270115T081740.000Z-stall.npz"
    elsewhere.symlink_to(tmp_path / "notes.txt")
    assert make_room(tmp_path, 0) == 0
    assert names(tmp_path) == sorted((*others, inside.name, elsewhere.name))


def test_a_recording_larger_than_all_may_be_is_not_kept_and_removes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert write(RecordingStore(tmp_path, 1 << 20), at(0)) == [("stall", WriteResult.WRITTEN)]
    assert write(RecordingStore(tmp_path, 100), at(1)) == [("stall", WriteResult.FAILED)]
    assert names(tmp_path) == [name_of(at(0))]
    assert "more than the 100 for all" in caplog.text


class FullDisk:
    """Fails after some bytes, as a disk without room."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, file: io.BufferedWriter, _recording: Recording) -> None:
        file.write(bytes(1000))
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_behind_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    store = RecordingStore(tmp_path, 1 << 20)
    with monkeypatch.context() as disk:
        disk.setattr(recording_file, "write_recording", FullDisk(number))
        for second in range(3):
            assert write(store, at(second)) == [("stall", WriteResult.FAILED)]
    assert names(tmp_path) == []
    lines = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert len(lines) == 1
    assert os.strerror(number) in lines[0]
    assert str(tmp_path) in lines[0]
    assert write(store, recording()) == [("stall", WriteResult.WRITTEN)]


def occupied(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


def below_a_file(tmp_path: Path) -> Path:
    return occupied(tmp_path) / "below"


@pytest.mark.parametrize("make", [occupied, below_a_file])
def test_a_folder_that_cannot_be_made_is_a_failure_and_not_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], Path]
) -> None:
    assert write(RecordingStore(make(tmp_path), 1 << 20), recording()) == [("stall", WriteResult.FAILED)]
    assert str(tmp_path / "file") in caplog.text


@pytest.mark.parametrize(
    ("make", "why"), [(occupied, "File exists"), (below_a_file, "Not a directory"), (lambda _: Path("/proc/nope"), "")]
)
def test_a_folder_that_cannot_be_used_is_told_before_it_is_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], Path], why: str
) -> None:
    folder = make(tmp_path)
    store = RecordingStore(folder, 1 << 20)
    store.prepare()
    store.close()
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith(f"no recording will be kept: {folder}: {why}")
    assert line.endswith("; see recordings.directory")


def test_a_folder_that_nobody_may_write_to_is_told_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Root may write anywhere.
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    store = RecordingStore(tmp_path, 1 << 20)
    store.prepare()
    store.close()
    assert [one.getMessage() for one in caplog.records] == [
        f"no recording will be kept: {tmp_path}: it cannot be written to; see recordings.directory"
    ]


def test_a_folder_that_can_be_used_is_made_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = RecordingStore(tmp_path / "not" / "there yet", 1 << 20)
    store.prepare()
    store.close()
    assert (names(tmp_path / "not" / "there yet"), caplog.records) == ([], [])


def test_it_is_said_how_far_back_calls_reach_whose_beginning_was_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write(RecordingStore(tmp_path, 1 << 20), recording())
    write(RecordingStore(tmp_path, 1 << 20), replace(at(1), complete_from_ns={}))
    short, whole = [one.getMessage() for one in caplog.records]
    assert short == (
        f"recorded 60 s (stall): {tmp_path / name_of(recording())}; "
        "calls of the last 48.0 s only: more memory holds more (recordings.memory)"
    )
    assert whole == f"recorded 60 s (stall): {tmp_path / name_of(at(1))}"


def test_what_a_killed_agent_left_is_removed_and_what_another_one_writes_is_not(tmp_path: Path) -> None:
    left, fresh = tmp_path / ".railscope-old.npz.1.partial", tmp_path / ".railscope-new.npz.2.partial"
    for partial in (left, fresh):
        partial.write_bytes(b"half")
    os.utime(left, (1, 1))
    write(RecordingStore(tmp_path, 1 << 20), recording())
    assert names(tmp_path) == [fresh.name, name_of(recording())]


def test_saving_over_a_file_keeps_the_old_one_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.npz"
    save(recording("signal"), path)
    with monkeypatch.context() as disk:
        disk.setattr(recording_file, "write_recording", FullDisk(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left on device") as caught:
            save(recording("stall"), path)
    assert caught.value.filename == str(path)
    assert read_recording(path).reason == "signal"
    save(recording("stall"), path)
    assert read_recording(path).reason == "stall"
    assert names(tmp_path) == ["job.npz"]
