"""The folder of recordings: its size, its names, and disks that do not do what they should."""

from __future__ import annotations

import errno
import io
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from railscope.agent.node.recorder import store as recording_store
from railscope.agent.node.recorder.store import RecordingStore, WriteResult, file_name, make_room, save
from railscope.agent.recording import file as recording_file
from railscope.agent.recording.file import Sink, read_recording, write_recording
from railscope.agent.recording.recording import Mark, Recording
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
    assert file_name(replace(recording(), host=host)) == f"railscope-{shown}-20270115T081740.000Z-stall.npz"


def test_the_oldest_go_first_when_there_is_no_room(tmp_path: Path) -> None:
    room_bytes = 3 * size_of(recording()) + 100
    store = RecordingStore(tmp_path, room_bytes)
    for second in range(6):
        assert write(store, at(second)) == [("stall", WriteResult.WRITTEN)]
        # Writing takes less than the clock of some file systems counts.
        for number, name in enumerate(names(tmp_path)):
            os.utime(tmp_path / name, (number, number))
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= room_bytes
    assert names(tmp_path) == [file_name(at(second)) for second in (3, 4, 5)]


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
    assert names(tmp_path) == [file_name(at(0))]
    assert "above the limit of 100 for all" in caplog.text


class FullDisk:
    """Fails after some bytes, as a disk without room."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, file: io.BufferedWriter, _recording: Recording, _wrote: Callable[[], None]) -> None:
        file.write(bytes(1000))
        raise OSError(self._number, os.strerror(self._number))


@dataclass
class SmallDisk:
    """Simulates a disk that has room for so many bytes, those of others included."""

    folder: Path
    room_bytes: int
    number: int = errno.ENOSPC

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recording_file, "write_recording", self._write)
        monkeypatch.setattr(os, "statvfs", self._statvfs)

    def _used_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.iterdir())

    def _statvfs(self, _path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=self.room_bytes - self._used_bytes(), f_frsize=1)

    def _write(self, file: Sink, what: Recording, wrote: Callable[[], None]) -> None:
        if isinstance(file, io.BufferedWriter) and self._used_bytes() + size_of(what) > self.room_bytes:
            file.write(bytes(1000))
            raise OSError(self.number, os.strerror(self.number))
        write_recording(file, what, wrote)


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


def large(what: Recording, marks: int) -> Recording:
    """The same, with so many marks that do not compress well."""
    return replace(what, marks=tuple(Mark(number, f"{number * 7919:x}") for number in range(marks)))


def aged(folder: Path, *whats: Recording) -> None:
    """Recordings that were written in this order."""
    for number, what in enumerate(whats):
        save(what, folder / file_name(what))
        os.utime(folder / file_name(what), (number, number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_smaller_than_recordings_may_be_keeps_the_newest_that_it_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(recording_store, "_SPARE_BYTES", 0)
    oldest = large(at(0), 10)
    aged(tmp_path, oldest, at(1), at(2))
    SmallDisk(tmp_path, size_of(oldest) + 2 * size_of(at(1)) + 100, number).use(monkeypatch)
    assert write(RecordingStore(tmp_path, 1 << 30), at(3)) == [("stall", WriteResult.WRITTEN)]
    assert names(tmp_path) == [file_name(at(second)) for second in (1, 2, 3)]
    assert caplog.records[-1].getMessage().endswith("; 1 older removed")


def test_a_disk_that_others_have_filled_takes_no_recording_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    aged(tmp_path, at(0), at(1))
    SmallDisk(tmp_path, 2 * size_of(recording())).use(monkeypatch)
    # Both of them together would not make room for it.
    assert write(RecordingStore(tmp_path, 1 << 30), large(at(2), 5_000)) == [("stall", WriteResult.FAILED)]
    assert names(tmp_path) == [file_name(at(0)), file_name(at(1))]
    assert "No space left on device" in caplog.text


def test_recordings_on_signal_make_room_before_those_of_stalls(tmp_path: Path) -> None:
    asked = [at(second, "signal") for second in (0, 3, 4)]
    stalls = [at(second) for second in (1, 2)]
    aged(tmp_path, asked[0], *stalls, *asked[1:])
    one_bytes = size_of(at(0))
    for left in (4, 3, 2, 1):
        assert make_room(tmp_path, left * one_bytes + 200) == 1
        kept = [*asked[1:], *stalls] if left == 4 else [asked[2], *stalls] if left == 3 else stalls[-left:]
        assert names(tmp_path) == sorted(map(file_name, kept))


REST = ".railscope-old.npz.1.partial"


class Vanishing:
    """A file of a folder that another agent removes before, or right after, it is looked at."""

    def __init__(self, entry: os.DirEntry[str], *, before: bool) -> None:
        self.name = entry.name
        self._path = Path(entry.path)
        self._before = before

    def stat(self, *, follow_symlinks: bool) -> os.stat_result:
        if self._before:
            self._path.unlink()
        status = self._path.stat(follow_symlinks=follow_symlinks)
        self._path.unlink()
        return status


@pytest.mark.parametrize("before", [True, False])
def test_what_another_agent_removes_meanwhile_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    aged(tmp_path, at(0), at(1), at(2))
    (tmp_path / REST).touch()
    os.utime(tmp_path / REST, (1, 1))
    vanishing = {REST, file_name(at(0))}
    listed = os.scandir
    monkeypatch.setattr(
        os,
        "scandir",
        lambda folder: [
            Vanishing(entry, before=before) if entry.name in vanishing else entry for entry in listed(folder)
        ],
    )
    assert write(RecordingStore(tmp_path, 2 * size_of(at(0)) + 100), at(3)) == [("stall", WriteResult.WRITTEN)]
    assert names(tmp_path) == [file_name(at(2)), file_name(at(3))]


class SlowDisk:
    """Goes on writing for a while, or does not answer until it is told to."""

    def __init__(self, pieces: int = 0) -> None:
        self._pieces = pieces
        self.answers = threading.Event()

    def __call__(self, file: Sink, what: Recording, wrote: Callable[[], None]) -> None:
        for _ in range(self._pieces):
            time.sleep(0.02)
            wrote()
        if not self._pieces:
            self.answers.wait()
        write_recording(file, what, wrote)


def test_a_disk_that_does_not_answer_does_not_keep_the_agent_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SlowDisk()
    monkeypatch.setattr(recording_file, "write_recording", disk)
    store = RecordingStore(tmp_path, 1 << 20, patience_seconds=0.1)
    assert write(store, recording()) == []
    assert [one.getMessage() for one in caplog.records] == [
        f"{tmp_path}: the disk has not answered for 0.1 s: the recording is given up and lost"
    ]
    assert store.busy
    # Python waits at its end for threads that are none of a daemon's.
    assert [one.daemon for one in threading.enumerate() if one.name == "recording"] == [True]
    disk.answers.set()
    store.close()
    assert names(tmp_path) == [file_name(recording())]


def test_a_disk_that_is_slow_is_waited_for_as_long_as_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording_file, "write_recording", SlowDisk(pieces=60))
    store = RecordingStore(tmp_path, 1 << 20, patience_seconds=0.5)
    assert write(store, recording()) == [("stall", WriteResult.WRITTEN)]
    assert caplog.records == []


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
    assert line.startswith(f"recordings cannot be written: {folder}: {why}")
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
        f"recordings cannot be written: {tmp_path}: it is not writable; see recordings.directory"
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
        f"recorded 60 s (stall): {tmp_path / file_name(recording())}; "
        "calls of the last 48.0 s only: raise recordings.memory to hold more"
    )
    assert whole == f"recorded 60 s (stall): {tmp_path / file_name(at(1))}"


def test_what_a_killed_agent_left_is_removed_and_what_another_one_writes_is_not(tmp_path: Path) -> None:
    left, fresh = tmp_path / ".railscope-old.npz.1.partial", tmp_path / ".railscope-new.npz.2.partial"
    for partial in (left, fresh):
        partial.write_bytes(b"half")
    os.utime(left, (1, 1))
    write(RecordingStore(tmp_path, 1 << 20), recording())
    assert names(tmp_path) == [fresh.name, file_name(recording())]


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
