"""Recorded datasets as Perfetto traces: the datasets are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from railscope.agent.dataset.files import table_files
from railscope.agent.dataset.from_recording import write_dataset
from railscope.agent.dataset.writer import read_part
from railscope.agent.node.recorder.store import save
from railscope.agent.recording.file import RecordingError
from railscope.agent.trace import from_dataset as timeline_dataset
from tests.unit.datasets import BEGAN_NS, SECOND_NS, JobDataset
from tests.unit.recordings import recording
from tests.unit.test_perfetto import COMM, export, rank
from tests.unit.traces import ReadTrace, read_trace

MICROSECOND_NS = 1000


@pytest.fixture
def job(tmp_path: Path) -> JobDataset:
    """Two servers of one GPU, one communicator, three collectives of 40 µs, 100 µs apart, on both."""
    job = JobDataset(tmp_path / "dataset", servers=(1, 1), world_ranks=True)
    job.communicator("aa", (0, 1))
    for number in range(3):
        job.collective("aa", "AllReduce", 1 << 20)
        for rank_of_comm in (0, 1):
            begin_ns = SECOND_NS + number * 100 * MICROSECOND_NS + rank_of_comm * 5 * MICROSECOND_NS
            job.operation(
                *("aa", rank_of_comm, "AllReduce", 1 << 20, begin_ns, 40 * MICROSECOND_NS),
                sequence=number,
                algorithm="Ring",
                handed_over_ns=BEGAN_NS + begin_ns - 10 * MICROSECOND_NS,
            )
    return job


def traced(job: JobDataset, tmp_path: Path, *options: str) -> tuple[ReadTrace, str]:
    said = export(tmp_path / "out", job.write(), options=options)
    return read_trace(tmp_path / "out"), said


def test_a_dataset_becomes_the_same_kind_of_trace_as_a_recording(job: JobDataset, tmp_path: Path) -> None:
    job.compute(0, 2 * SECOND_NS, 500, name="gemm")
    job.row(0, "rails", rail_id=3, rail="0", device="eth2")
    for at, sent in enumerate((0, 1000, 3000)):
        job.row(
            *(0, "rail_samples"),
            rail_id=3,
            time_ns=BEGAN_NS + at * 1_000_000,
            transmit_bytes=sent,
            receive_bytes=0,
        )
    job.row(0, "link_events", rail_id=3, time_ns=BEGAN_NS, up=True, carrier=False, present=True)
    job.row(0, "marks", time_ns=BEGAN_NS + 5, text="somebody looked")
    trace, said = traced(job, tmp_path)
    legs = trace.below("comm aa · rank 0 of 2", "network")
    assert [((leg.end_ns or 0) - leg.begin_ns, leg.said["algorithm"]) for leg in legs] == [(50_000, "Ring")] * 3
    assert len(trace.below("comm aa · rank 1 of 2", "calls")) == 3
    assert [kernel.name for kernel in trace.below("kernels of stream 0x7")] == ["gemm"]
    (sent_at,) = [where for where in trace.counters if where[-2:] == ("rail 0 · eth2", "transmit")]
    assert [rate for _, rate in trace.counters[sent_at]] == [1e6, 2e6, 0.0]
    assert [link.name for link in trace.below("link")] == ["no carrier"]
    assert [mark.name for mark in trace.below("marks")] == ["somebody looked"]
    assert "6 calls, 6 completed operations, " in said
    assert "operations in flight at the end are unknown" in said
    assert {where[1] for where in trace.tracks.values() if len(where) == 2 and "pid" in where[1]} == {
        "pid 1000 · GPU 0 · world rank 0",
        "pid 1001 · GPU 0 · world rank 1",
    }


def test_ranks_of_a_dataset_are_joined_where_times_prove_it(job: JobDataset, tmp_path: Path) -> None:
    trace, said = traced(job, tmp_path)
    assert "arrows join what ranks did for 3 operations" in said
    assert all(a.said["sequence"] == b.said["sequence"] for a, b in trace.arrows().values())


def test_unknown_clocks_prove_nothing_but_imported_numbers_compare(job: JobDataset, tmp_path: Path) -> None:
    job.recording["clock_error_ns"] = None
    _, said = traced(job, tmp_path)
    assert "arrows join what ranks did for 0 operations" in said
    assert "not all ranks of aa are joined" in said
    assert "the clock error is unknown on" in said
    other = JobDataset(
        tmp_path / "imported", servers=(1, 1), recording={"source": "nccl-debug", "clock_error_ns": None}
    )
    other.communicator("bb", (0, 1))
    other.collective("bb", "AllGather", 64)
    assert "arrows join what ranks did for 1 operation" in traced(other, tmp_path)[1]


@pytest.mark.parametrize(
    ("from_start", "with_column", "joined", "why"),
    [
        (True, True, 5, None),
        (False, True, 0, "some were first seen at a call, not at their making, so that earlier calls may be missing"),
        (True, False, 0, "the recording does not tell whether they were watched from the first call on"),
    ],
    ids=["from its making on", "from a call on", "an older dataset"],
)
def test_ranks_of_a_dataset_are_joined_by_their_numbers_where_it_says_that_these_compare(
    tmp_path: Path, from_start: bool, with_column: bool, joined: int, why: str | None
) -> None:
    # Clocks that may be 6 ms apart tell nothing of operations of 4 ms.
    for number in (0, 1):
        write_dataset(rank(number, host=f"host-{number}", from_start=from_start or not number), tmp_path / "job")
    if not with_column:
        for file in table_files(tmp_path / "job", "communicators"):
            pq.write_table(read_part(file, "communicators").drop_columns(["numbered_from_start"]), file)
    said = export(tmp_path / "out", tmp_path / "job")
    assert f"arrows join what ranks did for {joined} operations" in said
    assert [line for line in said.splitlines() if "are joined" in line] == (
        []
        if why is None
        else [f"not all ranks of {COMM} are joined: {why}, and times do not tell which operations are the same"]
    )


def test_only_the_wanted_window_of_a_dataset_is_read(job: JobDataset, tmp_path: Path) -> None:
    trace, _ = traced(job, tmp_path, "--from", "1.00012", "--seconds", "0.00005")
    assert [leg.said["sequence"] for leg in trace.below("network")] == [1, 1]
    export(tmp_path / "out", job.folder, options=["--comm", "aa", "--seconds", "0.1"])
    trace = read_trace(tmp_path / "out")
    assert not trace.below("network")
    assert len([call for call in trace.instants if call.where[-1] == "calls"]) == 6


def test_more_than_a_viewer_can_show_is_refused_with_what_to_do(
    job: JobDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_dataset, "_MOST_ROWS", 2)
    with pytest.raises(RecordingError, match=r"3 calls are more than a viewer can show: choose a shorter time"):
        traced(job, tmp_path)


def test_calls_of_communicators_that_nobody_described_are_there(tmp_path: Path) -> None:
    job = JobDataset(tmp_path / "dataset", servers=(1,))
    job.row(0, "calls", time_ns=BEGAN_NS + 5, op="AllReduce", payload_bytes=1)
    trace, _ = traced(job, tmp_path)
    (call,) = trace.below("process not known", "communicator not known", "calls")
    assert call.name == "AllReduce"


def test_times_that_only_tell_the_order_are_said_to_be_so(job: JobDataset, tmp_path: Path) -> None:
    job.recording["times_known"] = False
    assert "node-0: times were not recorded: these give only the order" in traced(job, tmp_path)[1]


def test_a_folder_that_is_no_dataset_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"it contains no recorded dataset"):
        export(tmp_path / "out", tmp_path)


def test_files_and_folders_go_into_one_trace(job: JobDataset, tmp_path: Path) -> None:
    save(rank(0, host="a"), tmp_path / "a.npz")
    export(tmp_path / "out", tmp_path / "a.npz", job.write())
    hosts = [where[0].partition(" ")[0] for where in read_trace(tmp_path / "out").tracks.values() if len(where) == 1]
    assert hosts == ["a", "node-0", "node-1"]


def test_a_recording_and_the_dataset_made_of_it_give_the_same_trace(tmp_path: Path) -> None:
    one = rank(0, host="a")
    whole = recording()
    one = replace(
        one,
        stalls=(replace(whole.stalls[0], rank="0"),),
        marks=whole.marks,
        arrays={**one.arrays, **{kind: whole.arrays[kind] for kind in ("rail_samples", "link_events")}},
    )
    save(one, tmp_path / "a.npz")
    write_dataset(one, tmp_path / "dataset")
    export(tmp_path / "of file", tmp_path / "a.npz")
    export(tmp_path / "of folder", tmp_path / "dataset")
    of_file, of_folder = (read_trace(tmp_path / name) for name in ("of file", "of folder"))
    # What only a file holds: the life of communicators.  Data types are called otherwise in a dataset.
    assert [
        (one.where[1:], one.name, one.begin_ns, one.end_ns, one.said.get("sequence"), one.said.get("payload_bytes"))
        for one in (*of_file.slices, *of_file.instants)
        if one.category not in ("life", "recording")
    ] == [
        (one.where[1:], one.name, one.begin_ns, one.end_ns, one.said.get("sequence"), one.said.get("payload_bytes"))
        for one in (*of_folder.slices, *of_folder.instants)
        if one.category != "recording"
    ]
    assert {where[1:]: values for where, values in of_file.counters.items()} == {
        where[1:]: values for where, values in of_folder.counters.items()
    }


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"began_ns": None, "ended_ns": None}, "has no begin and end"),
        ({"began_ns": -5}, "before 1970"),
    ],
)
def test_a_recording_whose_times_no_trace_can_have_is_one_line(
    tmp_path: Path, columns: dict[str, int | None], message: str
) -> None:
    job = JobDataset(tmp_path / "dataset", servers=(1,), recording=columns)
    job.communicator("aa", (0,))
    job.collective("aa", "AllReduce", 1 << 20)
    with pytest.raises(RecordingError, match=message):
        traced(job, tmp_path)


def test_an_operation_before_1970_is_one_line(job: JobDataset, tmp_path: Path) -> None:
    job.operation("aa", 0, "AllReduce", 1 << 20, -BEGAN_NS - 5, BEGAN_NS + SECOND_NS)
    with pytest.raises(RecordingError, match="before 1970"):
        traced(job, tmp_path)


def test_recordings_that_say_nothing_of_their_clocks_share_none(tmp_path: Path) -> None:
    job = JobDataset(tmp_path / "dataset", servers=(1, 1), recording={"node": "imported", "clock_error_ns": None})
    job.communicator("aa", (0, 1))
    job.collective("aa", "AllReduce", 1 << 20)
    _, said = traced(job, tmp_path)
    assert "share one clock" not in said
    assert "the clock error is unknown on" in said
