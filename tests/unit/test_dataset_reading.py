"""Opening datasets: several at once, recordings' files too, older ones, and what is damaged in one clear line."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from railscope.agent.dataset.describe import describe_dataset
from railscope.agent.dataset.files import DatasetError, table_files
from railscope.agent.dataset.from_recording import write_dataset
from railscope.agent.dataset.reader import open_dataset
from railscope.agent.dataset.schema import SCHEMA_VERSION, TABLES, schema_page
from railscope.agent.dataset.writer import DatasetWriter, read_part
from railscope.agent.node.recorder.store import save
from tests.unit.datasets import JobDataset
from tests.unit.identities import named
from tests.unit.recordings import recording


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "a job [1]"
    write_dataset(recording(), folder)
    return folder


def refused(path: Path) -> str:
    with pytest.raises(DatasetError) as caught:
        open_dataset([path])
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_every_table_is_there_with_all_of_its_columns_in_their_order(job: Path) -> None:
    with open_dataset([job]) as dataset:
        for name, schema in TABLES.items():
            found = dataset.rows(dataset[name])
            assert found.column_names == schema.names
            for field in schema:
                kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
                assert found.schema.field(field.name).type == kind
        assert dataset.rows(dataset["calls"].count()).as_py() == 100
        assert dataset.rows(dataset["compute"]).num_rows == 0


def test_folders_and_recordings_files_are_read_as_one_and_what_was_converted_goes(job: Path, tmp_path: Path) -> None:
    path, _ = save(replace(recording(calls=30), host="gpu-02"), tmp_path / "other.npz")
    with open_dataset([job, path]) as dataset:
        (converted,) = (folder for folder in dataset.folders if folder != job)
        nodes = dataset.rows(dataset["calls"].group_by("node").aggregate(calls=dataset["calls"].count())).to_pylist()
        assert {row["node"]: row["calls"] for row in nodes} == {"gpu-01": 100, "gpu-02": 30}
        assert converted.is_dir()
    assert not converted.exists()


def test_files_of_a_recording_that_was_never_finished_are_not_read(job: Path) -> None:
    (file,) = table_files(job, "calls")
    # An import writes its row of `recordings` last: this one was stopped before.
    stopped = DatasetWriter(job, "gpu-01")
    stopped.add("calls", read_part(file, "calls"), 0)
    stopped.add_rows("compute", [{"pid": 1}], 0)
    with open_dataset([job]) as dataset:
        assert dataset.rows(dataset["calls"].count()).as_py() == 100
        assert dataset.rows(dataset["compute"]).num_rows == 0


def test_the_same_recording_in_two_folders_is_refused_in_one_line(job: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(job, copy)
    other_name = copy / ".." / "copy"
    for first, second in ((job, copy), (copy, other_name)):
        with pytest.raises(DatasetError) as caught:
            open_dataset([first, second])
        assert str(caught.value) == f"the same recording is in {first} and {second}: name one of them"


def test_a_recordings_file_beside_the_folder_that_it_was_put_into_is_refused(job: Path, tmp_path: Path) -> None:
    path, _ = save(recording(), tmp_path / "one.npz")
    with pytest.raises(
        DatasetError, match=r"^the same recording is in .*a job \[1\] and .*one\.npz: name one of them$"
    ):
        open_dataset([job, path])


def test_a_folder_that_is_named_twice_is_refused(job: Path) -> None:
    with pytest.raises(DatasetError) as caught:
        open_dataset([job, job])
    assert str(caught.value) == f"{job}: it is named twice: name it once"


def test_columns_that_an_older_railscope_did_not_write_are_null(job: Path) -> None:
    (file,) = table_files(job, "operations")
    older = read_part(file, "operations").drop_columns(["handed_over_ns", "channels"])
    pq.write_table(older, file.with_name("older.parquet"))
    with open_dataset([job]) as dataset:
        rows = dataset.rows(dataset["operations"]).to_pylist()
    assert len(rows) == 6
    assert sum(row["end_ns"] is not None for row in rows) == 6
    assert rows[0].keys() == dict.fromkeys(TABLES["operations"].names).keys()


def test_columns_that_a_newer_railscope_writes_are_left_out(job: Path) -> None:
    (file,) = table_files(job, "marks")
    with_more = read_part(file, "marks").append_column("colour", pa.array(["red"]))
    pq.write_table(with_more, file)
    with open_dataset([job]) as dataset:
        assert dataset.rows(dataset["marks"]).column_names == TABLES["marks"].names


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(b""), "cannot be read"),
        (lambda file: file.write_bytes(file.read_bytes()[:-20]), "cannot be read"),
        (lambda file: file.write_bytes(b"PAR1" * 100), "cannot be read"),
        (lambda file: pq.write_table(pa.table({"x": [1]}), file), "this is not a file of a dataset"),
        (
            lambda file: pq.write_table(pa.table({"recording": [1], "time_ns": ["noon"]}), file),
            "column time_ns is of another type",
        ),
    ],
    ids=["empty", "cut", "garbage", "another table", "another type"],
)
def test_a_damaged_part_is_named_in_one_line(job: Path, damage: object, message: str) -> None:
    (file,) = table_files(job, "calls")
    damage(file)  # type: ignore[operator]
    text = refused(job)
    assert text.startswith(f"{file}: {message}")
    assert "remove" in text


def test_damage_that_shows_only_when_rows_are_read_is_one_line_too(job: Path) -> None:
    (file,) = table_files(job, "calls")
    content = bytearray(file.read_bytes())
    content[4:800] = b"\xff" * 796
    file.write_bytes(bytes(content))
    with pytest.raises(DatasetError, match="the dataset cannot be read: ") as caught:
        with open_dataset([job]) as dataset:
            dataset.rows(dataset["calls"])
    assert "\n" not in str(caught.value)


def test_a_part_that_goes_while_it_is_read_is_no_damage(job: Path) -> None:
    with open_dataset([job]) as dataset:
        for file in table_files(job, "calls"):
            file.unlink()
        with pytest.raises(DatasetError, match=r"cannot be read: .*: if it is being written to, try again$"):
            dataset.rows(dataset["calls"])


@pytest.mark.parametrize("payload", [-5, (1 << 50) + 1, 1 << 62])
def test_payloads_that_cannot_be_are_left_out_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, payload: int
) -> None:
    job = JobDataset(tmp_path, (2,))
    job.communicator("aa", (0, 1))
    for size in (1 << 50, payload, None):
        job.call("aa", 0, "AllReduce", size)
        job.operation("aa", 0, "AllReduce", size, 0, 1000)
    with job.open() as dataset:
        for table in ("calls", "operations"):
            found = dataset.rows(dataset[table].select("payload_bytes"))["payload_bytes"].to_pylist()
            assert sorted(found, key=str) == [1 << 50, None]
            assert f"1 of the {table} have a payload below 0 or above a PiB: they are left out" in caplog.text
    assert "have no time" not in caplog.text


def test_sound_payloads_are_not_remarked_on(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_dataset([job]) as dataset:
        assert dataset.rows(dataset["calls"].count()).as_py() == 100
    assert not caplog.records


def test_what_is_no_dataset_is_refused_and_it_is_said_what_to_do(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere").endswith("name one that 'railscope record' or 'railscope import' has written")
    assert refused(tmp_path) == (
        f"{tmp_path}: it contains no recorded dataset: make one with 'railscope record -o FOLDER'"
    )
    text = tmp_path / "notes.txt"
    text.write_text("x")
    assert refused(text).startswith(f"{text}: this is not a railscope recording")


def test_a_folder_of_the_flight_recorders_files_is_refused_with_what_to_name_instead(tmp_path: Path) -> None:
    save(recording(), tmp_path / "railscope-gpu-01.npz")
    assert refused(tmp_path) == f"{tmp_path}: it contains recording files: name those you mean, as {tmp_path}/*.npz"


def test_another_version_of_the_tables_is_refused(tmp_path: Path) -> None:
    DatasetWriter(tmp_path, "a").add_rows("recordings", [{"schema_version": SCHEMA_VERSION + 1}], 0)
    assert refused(tmp_path) == (
        f"{tmp_path}: version {SCHEMA_VERSION + 1} of the tables, and this railscope reads {SCHEMA_VERSION}: "
        "record or import it again"
    )


def test_after_an_error_nothing_stays_open_or_on_disk(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path, _ = save(recording(), tmp_path / "one.npz")
    with pytest.raises(DatasetError):
        open_dataset([path, job, tmp_path / "nowhere"])
    assert not list((tmp_path / "temporary").iterdir())


def test_an_engine_that_was_given_stays_open(job: Path) -> None:
    import ibis

    engine = ibis.duckdb.connect()
    with open_dataset([job], engine):
        pass
    with open_dataset([job], engine) as dataset:
        assert dataset.rows(dataset["calls"].count()).as_py() == 100
    engine.disconnect()


def test_the_description_says_what_is_in_it_and_what_is_missing(job: Path) -> None:
    out = io.StringIO()
    describe_dataset(job, out, as_json=False)
    text = out.getvalue()
    for part in (
        "1 recording, tables of version 1",
        "gpu-01                   railscope SIMULATED 2027-01-15 08:16:40       60.0         3 ms  calls lost, "
        "number unknown",
        "AllReduce        Int8                    100            104,857,600",
        "\n1 communicator\n",
    ):
        assert part in text
    out = io.StringIO()
    describe_dataset(job, out, as_json=True)
    described = json.loads(out.getvalue())
    assert described["ops"] == [{"op": "AllReduce", "data_type": "Int8", "calls": 100, "payload_bytes": 100 << 20}]
    assert {table["table"]: table["rows"] for table in described["tables"]} == {
        "recordings": 1, "communicators": 1, "calls": 100, "operations": 3, "rails": 1, "rail_owners": 2,
            "rail_samples": 3,
        "link_events": 2, "stalls": 1, "marks": 1,
    }  # fmt: skip
    assert described["recordings"][0]["calls_lost"] is None


def test_names_in_a_description_cannot_steer_the_terminal(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path, "a")
    writer.add_rows("recordings", [{"schema_version": SCHEMA_VERSION, "source": "\x1b[2Jme"}], 0)
    writer.add_rows("calls", [{"time_ns": 1, "instance": 1, "op": "All\x1b]0;x\x07\nReduce", "data_type": "\x9b1m"}], 0)
    out = io.StringIO()
    describe_dataset(tmp_path, out, as_json=False)
    assert all(line.isprintable() for line in out.getvalue().split("\n"))
    assert "All\ufffd]0;x\ufffd\ufffdReduce" in out.getvalue()


def test_a_dataset_without_calls_is_described_as_such(tmp_path: Path) -> None:
    DatasetWriter(tmp_path, "a").add_rows("recordings", [{"schema_version": SCHEMA_VERSION}], 0)
    out = io.StringIO()
    describe_dataset(tmp_path, out, as_json=False)
    assert "no calls" in out.getvalue()


def test_the_schema_page_has_every_column_with_its_meaning() -> None:
    page = schema_page()
    assert page.startswith(f"# Recorded datasets, version {SCHEMA_VERSION}\n")
    for name, schema in TABLES.items():
        assert f"\n## `{name}`\n" in page
        for field in schema:
            assert f"| `{field.name}` |" in page.split(f"\n## `{name}`\n")[1].split("\n## ")[0]
    assert "| `op` | text (one of few words) | NCCL's name: AllReduce, Send, … |" in page


def test_recordings_that_hold_the_same_moments_of_the_same_ranks_are_remarked_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a stall and of a signal soon after it; the first is of 60 s."""
    first = recording()
    again = replace(first, began_ns=first.began_ns + 50 * 10**9, ended_ns=first.ended_ns + 50 * 10**9)
    later = replace(first, began_ns=first.ended_ns, ended_ns=first.ended_ns + 10**9)
    elsewhere = replace(again, host="gpu-02")
    other = replace(again, communicators=tuple(named(one, pid=4712) for one in first.communicators))
    files = [
        save(one, tmp_path / f"{place}.npz")[0] for place, one in enumerate((first, again, later, elsewhere, other))
    ]
    for file in files[2:]:
        with open_dataset([files[0], file]):
            pass
    assert not caplog.records
    with open_dataset(files[:2]):
        pass
    assert [one.getMessage() for one in caplog.records] == [
        "recordings of gpu-01 hold the same ranks at the same time, for 10.0 s: calls in both count twice; name one "
        "of them"
    ]
