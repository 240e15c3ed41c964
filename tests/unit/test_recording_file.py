"""Recordings as files: what is written is read again, and what is damaged is told in one line."""

from __future__ import annotations

import hashlib
import io
import json
import math
import struct
import time
import zipfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from railscope.agent.facts.clocks import ClockReading
from railscope.agent.recording.file import HEADER, RecordingError, read_recording, write_recording
from railscope.agent.recording.recording import FORMAT_VERSION, KINDS, Mark, Recording
from tests.unit.recordings import BEGAN_NS, REALTIME_NS, SECOND_NS, recording

YEAR_NS = 365 * 86_400 * SECOND_NS


def as_bytes(what: Recording) -> bytes:
    file = io.BytesIO()
    write_recording(file, what)
    return file.getvalue()


def assert_equal(one: Recording, other: Recording) -> None:
    for field in fields(Recording):
        if field.name != "arrays":
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert one.arrays.keys() == other.arrays.keys() == KINDS.keys()
    for kind in KINDS:
        assert one.arrays[kind].dtype == other.arrays[kind].dtype == KINDS[kind]
        assert one.arrays[kind].tobytes() == other.arrays[kind].tobytes(), kind


@pytest.mark.parametrize("calls", [0, 1, 10_000])
@pytest.mark.parametrize("reason", ["stall", "signal"])
def test_what_was_written_is_read_again(tmp_path: Path, calls: int, reason: str) -> None:
    path = tmp_path / "one.npz"
    written = recording(reason, calls)
    path.write_bytes(as_bytes(written))
    assert_equal(read_recording(path), written)


def test_a_host_whose_clock_is_before_1980_writes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The zip module asks for the time of day by itself.
    monkeypatch.setattr(time, "localtime", lambda *_: time.gmtime(1_000))
    one = recording()
    early = replace(one, clocks=tuple(replace(clock, realtime_ns=clock.monotonic_ns) for clock in one.clocks))
    path = tmp_path / "one.npz"
    path.write_bytes(as_bytes(early))
    assert_equal(read_recording(path), early)


def test_the_largest_numbers_of_a_long_lived_host_are_read_again(tmp_path: Path) -> None:
    one = recording()
    (comm,), (rail,), (what,) = one.communicators, one.rails, one.stalls
    at_ns = 30 * YEAR_NS
    busy = replace(
        one,
        began_ns=at_ns,
        ended_ns=at_ns,
        clocks=(ClockReading(at_ns, 2_100 * YEAR_NS - 1_970 * YEAR_NS, at_ns),),
        communicators=(replace(comm, instance=(1 << 32) - 1, enqueued=1 << 59, inflight_seconds=at_ns / 1e9),),
        rails=(replace(rail, device=(1 << 31) - 1, netns_inode=(1 << 32) - 1, speed_bytes_per_second=1 << 50),),
        # Before 1970: a clock that began there was set back.
        stalls=(replace(what, since_realtime_ns=-at_ns, seconds=at_ns / 1e9),),
        marks=(Mark(at_ns, "x"),),
    )
    path = tmp_path / "one.npz"
    path.write_bytes(as_bytes(busy))
    assert_equal(read_recording(path), busy)


def test_a_name_that_is_no_text_is_read_as_some(tmp_path: Path) -> None:
    path = tmp_path / "one.npz"
    path.write_bytes(as_bytes(replace(recording(), host="gpu\udcff01")))
    assert read_recording(path).host == "gpu?01"


def test_numpy_reads_the_events_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "one.npz"
    path.write_bytes(as_bytes(recording()))
    with np.load(path, allow_pickle=False) as file:
        assert file["calls"]["sequence"].tolist() == list(range(100))


def refusal_of(path: Path) -> str | None:
    """Why a file is refused, if it is."""
    try:
        read_recording(path)
    except RecordingError as error:
        return str(error)
    return None


def error_of(path: Path) -> str:
    with pytest.raises(RecordingError) as caught:
        read_recording(path)
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.data())
def test_a_damaged_file_is_an_error_of_one_line_or_still_a_recording(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(as_bytes(recording(calls=20)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "damaged.npz"
    path.write_bytes(content)
    refusal = refusal_of(path)
    assert refusal is None or refusal.isprintable()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, len(as_bytes(recording())) - 1))
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "short.npz"
    path.write_bytes(as_bytes(recording())[:length])
    assert error_of(path) == "this is not a railscope recording, or only a part of one"


def test_a_file_that_is_not_there_or_is_something_else_is_named(tmp_path: Path) -> None:
    assert error_of(tmp_path / "none") == "cannot read the recording: No such file or directory"
    assert error_of(tmp_path) == "cannot read the recording: Is a directory"
    other = tmp_path / "other.npz"
    np.savez(other, calls=np.zeros(3))
    assert error_of(other) == "this is not a railscope recording"


def test_in_the_file_an_end_s_identity_lies_among_what_else_is_told_of_it() -> None:
    with zipfile.ZipFile(io.BytesIO(as_bytes(recording()))) as archive:
        (end,) = json.loads(archive.read(HEADER))["communicators"]
    assert list(end) == [
        *("instance", "comm", "rank", "nranks", "gpu", "node_rank", "local_ranks", "nccl_version", "pid", "netns"),
        *("job", "identity_source", "gpu_uuid", "pci_bus_id"),
        *("enqueued", "completed", "inflight_seconds", "alive"),
    ]


def changed(path: Path, *, header: Callable[[dict[str, Any]], object] = lambda _: None, **members: bytes) -> None:
    """Write a recording with another header or other members; the zip itself is sound."""
    with zipfile.ZipFile(io.BytesIO(as_bytes(recording()))) as archive, zipfile.ZipFile(path, "w") as other:
        for name in archive.namelist():
            content = archive.read(name)
            if name == HEADER:
                values = json.loads(content)
                header(values)
                content = json.dumps(values).encode()
            other.writestr(name, members.get(name.removesuffix(".npy"), content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda header: header.update(version=FORMAT_VERSION + 1),
            f"format {FORMAT_VERSION + 1}, this railscope reads format {FORMAT_VERSION}: read it with",
        ),
        (lambda header: header.update(format="other"), "this is not a railscope recording"),
        (lambda header: header.pop("host"), r"damaged: recording lacks fields, or has others \(host\)"),
        (lambda header: header.update(extra=1), r"damaged: recording lacks fields, or has others \(extra\)"),
        (lambda header: header.update(host=7), "damaged: host is 7"),
        (lambda header: header.update(began_ns=True), "damaged: began_ns is True"),
        (lambda header: header.update(clocks={"a": 1}), "damaged: clocks is {'a': 1}"),
        (lambda header: header.update(clocks=[]), "damaged: it has no reading of the clocks"),
        (lambda header: header["communicators"][0].update(job=[["a"]]), r"damaged: job is \['a'\]"),
        (lambda header: header["clocks"][0].update(maximum_error_ns="x"), "damaged: maximum_error_ns is 'x'"),
        (lambda header: header.update(complete_from_ns={"calls": "x"}), "damaged: complete_from_ns is 'x'"),
        (lambda header: header.update(complete_from_ns={"calls": 1, "a\x1b": 1}), r"complete_from_ns has 'a\\x1b'"),
        (lambda header: header.update(ended_ns=header["began_ns"] - 1), "damaged: it ends before it begins"),
        (lambda header: header.update({"a\x1b[31m": 1}), r"or has others \(a\ufffd\[31m\)"),
        (lambda header: header.update(version="\x1b[31m"), r"has format \ufffd\[31m, this"),
    ],
)
def test_a_header_that_means_something_else_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = tmp_path / "other.npz"
    changed(path, header=change)
    with pytest.raises(RecordingError, match=message):
        read_recording(path)


def as_version_3(header: dict[str, Any]) -> None:
    """As railscope wrote it before rails had owners, and stalls processes."""
    header.update(version=3)
    for rail in header["rails"]:
        del rail["owners"]
    as_version_4(header, version=3)


def as_version_4(header: dict[str, Any], *, version: int = 4) -> None:
    """As railscope wrote it before stalls had processes."""
    header.update(version=version)
    for one in header["stalls"]:
        del one["pid"], one["peer"], one["blamed_pid"]


@pytest.mark.parametrize(("older", "tells_owners"), [(as_version_3, False), (as_version_4, True)])
def test_an_older_recording_is_read_and_what_it_does_not_tell_is_unknown(
    tmp_path: Path, older: Callable[[dict[str, Any]], None], tells_owners: bool
) -> None:
    path = tmp_path / "older.npz"
    changed(path, header=older)
    one = recording()
    (rail,), (waits,) = one.rails, one.stalls
    assert rail.owners
    assert waits.pid
    read = read_recording(path)
    assert read.rails == (rail if tells_owners else replace(rail, owners=()),)
    assert read.stalls == (replace(waits, pid=0, peer="", blamed_pid=0),)
    assert read.host == one.host


@pytest.mark.parametrize("table", ["rails", "stalls"])
@pytest.mark.parametrize("rows", [7, [7], "x", {"a": 1}, [{"owners": 7}], [{"pid": 7}]])
def test_a_damaged_older_recording_is_one_line(tmp_path: Path, table: str, rows: object) -> None:
    path = tmp_path / "older.npz"
    changed(path, header=lambda header: header.update({"version": 3, table: rows}))
    assert error_of(path).startswith("the recording is damaged: ")


NO_NUMBERS: dict[str, list[float]] = {
    "time of the host": [-1, 1 << 60, 10**400],
    "time of day": [-1, 1 << 62, 10**400],
    "time of day reckoned back": [-(1 << 62), 1 << 62, 10**400],
    "number of a thing": [-1, 1 << 32, 10**20, 10**400],
    "count": [-(1 << 60), 1 << 60, 10**400],
    "length": [-math.inf, math.inf, math.nan, 10**400, 1.2e9],
}


@pytest.mark.parametrize(
    ("of", "name", "kind"),
    [
        ("", "began_ns", "time of the host"),
        ("", "ended_ns", "time of the host"),
        ("marks", "time_ns", "time of the host"),
        ("clocks", "monotonic_ns", "time of the host"),
        ("clocks", "realtime_ns", "time of day"),
        ("clocks", "uncertainty_ns", "count"),
        ("clocks", "maximum_error_ns", "count"),
        ("stalls", "since_realtime_ns", "time of day reckoned back"),
        ("stalls", "seconds", "length"),
        ("communicators", "instance", "number of a thing"),
        ("communicators", "pid", "number of a thing"),
        ("communicators", "enqueued", "count"),
        ("communicators", "completed", "count"),
        ("communicators", "inflight_seconds", "length"),
        ("rails", "device", "number of a thing"),
        ("rails", "netns_inode", "count"),
        ("rails", "speed_bytes_per_second", "count"),
    ],
)
def test_a_number_that_no_agent_writes_is_refused(tmp_path: Path, of: str, name: str, kind: str) -> None:
    path = tmp_path / "other.npz"
    for number in NO_NUMBERS[kind]:

        def change(header: dict[str, Any], number: float = number) -> None:
            (header[of][0] if of else header)[name] = number

        changed(path, header=change)
        assert error_of(path).startswith(f"the recording is damaged: {name} is {number!r}"[:80])


def npy(dtype: np.dtype[Any], shape: tuple[int, ...], content: bytes = b"") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.descr, "fortran_order": False, "shape": shape})
    return file.getvalue() + content


def pickled() -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.array([{"hostile": 1}], object), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "calls.npy is not an array"),
        (b"\x93NUMPY\x01\x00", "calls.npy is not an array"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 9) + b"(" * 9, "calls.npy is not an array"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 60_000) + b"(" * 60_000, "calls.npy is not an array"),
        (pickled(), "calls.npy holds other records than its version has"),
        (npy(np.dtype("<u8"), (0,)), "calls.npy is not an array|calls.npy holds other records"),
        (npy(KINDS["losses"], (0,)), "calls.npy holds other records than its version has"),
        (npy(KINDS["calls"], (1 << 50,)), "calls.npy has another length than it says"),
        (npy(KINDS["calls"], (-1,)), "calls.npy has another length than it says"),
        (npy(KINDS["calls"], (1, 1), bytes(64)), "calls.npy has another length than it says"),
        (npy(KINDS["calls"], (1,), bytes(63)), "calls.npy has another length than it says"),
    ],
)
def test_an_array_that_is_not_what_it_should_be_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "other.npz"
    changed(path, calls=content)
    with pytest.raises(RecordingError, match=message):
        read_recording(path)


def test_other_records_are_another_version() -> None:
    """A change of a dtype makes old files unreadable: raise FORMAT_VERSION with it, and put the new digest here."""
    described = json.dumps({kind: dtype.descr for kind, dtype in KINDS.items()})
    assert (FORMAT_VERSION, hashlib.sha256(described.encode()).hexdigest()[:16]) == (5, "c812de4a5548447b")


def test_times_of_day_come_from_the_nearest_reading_of_the_clocks() -> None:
    one = recording()
    assert one.realtime_ns(BEGAN_NS + 7) == BEGAN_NS + 7 + REALTIME_NS
    assert one.realtime_ns(BEGAN_NS + 50 * SECOND_NS) == BEGAN_NS + 50 * SECOND_NS + REALTIME_NS


def test_the_stated_error_counts_the_clocks_own_the_reading_and_steps_between_readings() -> None:
    one = recording()
    assert one.realtime_error_ns() == 3_000_000 + 200
    first, second = one.clocks
    stepped = replace(one, clocks=(first, replace(second, realtime_ns=second.realtime_ns + 9_000)))
    assert stepped.realtime_error_ns() == 3_000_000 + 200 + 9_000
    unknown = replace(one, clocks=(first, replace(second, synchronised=False, maximum_error_ns=None)))
    assert unknown.realtime_error_ns() is None
