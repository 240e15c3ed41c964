"""Recorded events as rows of a dataset: the same values, in the same order, and null for what is not known."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.dataset.conversion import DayTimes
from railscope.agent.dataset.files import DatasetError, table_files
from railscope.agent.dataset.from_recording import convert_file, write_dataset
from railscope.agent.dataset.reader import open_dataset
from railscope.agent.dataset.schema import TABLES
from railscope.agent.dataset.writer import read_part
from railscope.agent.facts.clocks import ClockReading
from railscope.agent.node.recorder.store import save
from railscope.agent.recording.recording import KINDS, Recording
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import DataType, Op
from railscope.probes.nccl.records.calls import LifecycleKind
from railscope.probes.nccl.records.internals import ALGORITHMS, PROTOCOLS, UNKNOWN_BYTES
from tests.unit.identities import named
from tests.unit.recordings import BEGAN_NS, REALTIME_NS, SECOND_NS, recording, records

U8 = st.integers(0, 255)
U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
SIZE = st.integers(0, 1 << 62)
TIME = st.integers(BEGAN_NS - SECOND_NS, BEGAN_NS + 60 * SECOND_NS)


def rows_of(one: Recording, table: str, folder: Path) -> list[dict[str, Any]]:
    write_dataset(one, folder)
    return [row for file in table_files(folder, table) for row in read_part(file, table).to_pylist()]


def only(kind: str, events: Records) -> Recording:
    one = recording("signal", calls=0)
    return replace(one, marks=(), arrays={other: records(other, 0) for other in KINDS} | {kind: events})


def signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


@settings(max_examples=20)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "time_ns": TIME, "stream": U64, "payload_bytes": SIZE, "tid": U32, "instance": U32, "sequence": U32,
                "peer": st.integers(-5, 70_000), "op": U8, "data_type": U8,
            }
        ),
        max_size=30,
    )
)  # fmt: skip
def test_calls_come_back_as_they_were(events: list[dict[str, int]]) -> None:
    calls = records("calls", len(events))
    for at, event in enumerate(events):
        for name, value in event.items():
            calls[name][at] = value
    ops = {int(op): op.name for op in Op if op is not Op.Unknown}
    types = {int(kind): kind.name for kind in DataType if kind is not DataType.Unknown}
    with tempfile.TemporaryDirectory() as folder:
        found = rows_of(only("calls", calls), "calls", Path(folder))
    number = {row.pop("recording") for row in found}
    assert len(number) == (1 if events else 0)
    assert found == [
        {
            "node": "gpu-01",
            "time_ns": event["time_ns"] + REALTIME_NS,
            "instance": event["instance"] or None,
            "tid": event["tid"] or None,
            "stream": signed(event["stream"]) or None,
            "op": ops.get(event["op"]),
            "data_type": types.get(event["data_type"]),
            "payload_bytes": event["payload_bytes"],
            "peer": None if event["peer"] < 0 else event["peer"],
            "sequence": event["sequence"] if event["instance"] else None,
            "gpu_begin_ns": None,
        }
        for event in in_order_of_hours(events)
    ]


def in_order_of_hours(events: list[dict[str, int]]) -> list[dict[str, int]]:
    """Files are read hour by hour; within an hour the order stays."""
    return sorted(events, key=lambda event: (event["time_ns"] + REALTIME_NS) // (3600 * SECOND_NS))


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(TIME, st.integers(0, SECOND_NS), st.integers(0, SECOND_NS), U8, U8, U8, st.booleans()), max_size=20
    )
)
def test_completed_operations_keep_their_lengths_and_when_they_were_handed_over(
    events: list[tuple[int, int, int, int, int, int, bool]],
) -> None:
    done = records("completions", len(events), instance=3, payload_bytes=5, sequence=9, op=int(Op.AllReduce))
    for at, (time_ns, before_ns, duration_ns, algorithm, protocol, channels, sized) in enumerate(events):
        done[at]["time_ns"], done[at]["duration_ns"] = time_ns, duration_ns
        done[at]["posted_ns"] = time_ns - duration_ns - before_ns
        done[at]["algorithm"], done[at]["protocol"], done[at]["channels"] = algorithm, protocol, channels
        if not sized:
            done[at]["payload_bytes"] = UNKNOWN_BYTES
    with tempfile.TemporaryDirectory() as folder:
        found = rows_of(only("completions", done), "operations", Path(folder))
    events = sorted(events, key=lambda event: (event[0] + REALTIME_NS) // (3600 * SECOND_NS))
    for row, (time_ns, before_ns, duration_ns, algorithm, protocol, channels, sized) in zip(found, events, strict=True):
        assert row["end_ns"] == time_ns + REALTIME_NS
        assert row["end_ns"] - row["begin_ns"] == duration_ns
        assert row["begin_ns"] - row["handed_over_ns"] == before_ns
        assert row["algorithm"] == (ALGORITHMS[algorithm] if algorithm < len(ALGORITHMS) else None)
        assert row["protocol"] == (PROTOCOLS[protocol] if protocol < len(PROTOCOLS) else None)
        assert row["channels"] == (channels or None)
        assert row["payload_bytes"] == (5 if sized else None)
        assert (row["op"], row["sequence"], row["source"], row["peer"]) == ("AllReduce", 9, "proxy", None)


def test_an_operation_that_nobody_saw_handed_over_has_no_such_time(tmp_path: Path) -> None:
    done = records("completions", 1, posted_ns=0, instance=0, sequence=0)
    (row,) = rows_of(only("completions", done), "operations", tmp_path)
    assert (row["handed_over_ns"], row["instance"], row["sequence"]) == (None, None, None)


def test_rails_and_links_keep_what_is_not_known_apart_from_what_is_down(tmp_path: Path) -> None:
    events = records("link_events", 3, up=[1, 0, -1], carrier=[0, -1, 1], present=[1, 1, 0], carrier_changes=[4, 5, 6])
    events["speed_bytes_per_second"] = [10, 0, 30]
    rows = rows_of(only("link_events", events), "link_events", tmp_path)
    columns = ("up", "carrier", "carrier_changes", "speed_bytes_per_second", "present")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        (True, False, 4, 10, True),
        (False, None, 5, None, True),
        (None, True, None, 30, False),
    ]


CLOCKS = st.lists(
    st.tuples(st.integers(0, 1 << 50), st.integers(0, 1 << 60)), min_size=1, max_size=6, unique_by=lambda one: one[0]
)


@given(CLOCKS, st.lists(st.integers(0, 1 << 50), max_size=20))
def test_times_of_day_are_those_of_the_recording_whatever_the_clocks_did(
    read: list[tuple[int, int]], moments: list[int]
) -> None:
    clocks = tuple(ClockReading(monotonic_ns, realtime_ns, 1) for monotonic_ns, realtime_ns in sorted(read))
    one = replace(recording(), clocks=clocks)
    halfway = [(a.monotonic_ns + b.monotonic_ns) // 2 for a, b in itertools.pairwise(clocks)]
    asked = [*moments, *halfway, *(moment + 1 for moment in halfway), *(clock.monotonic_ns for clock in clocks)]
    assert DayTimes(clocks).to_realtime_ns(np.array(asked, np.uint64)).tolist() == [
        one.realtime_ns(moment) for moment in asked
    ]


def test_who_is_who_is_there_with_nulls_for_what_nobody_knows(tmp_path: Path) -> None:
    one = recording()
    known = one.communicators[0]
    nameless = named(
        replace(known, instance=8), comm="unknown", rank="unknown", nranks="4", gpu="unknown", netns="job-a",
        job=(("world_rank", "17"), ("job", "4242")), nccl_version="unknown",
    )  # fmt: skip
    connections = records("connections", 4, instance=7, peer=[1, 1, -1, 9], channel=[0, 0, 2, 3], send=[1, 1, 0, 1])
    connections["net_device"], connections["network"] = [0, 0, -1, 0], [1, 1, 1, 0]
    born = records("lifecycle", 1, instance=7)
    born["kind"] = LifecycleKind.INIT
    arrays = {**one.arrays, "connections": connections, "lifecycle": born}
    one = replace(one, communicators=(known, nameless), arrays=arrays)
    rows = rows_of(one, "communicators", tmp_path)
    for row in rows:
        del row["recording"]
    assert rows == [
        {
            "node": "gpu-01", "instance": 7, "comm": "00c0ffee00c0ffee", "rank": 3, "nranks": 4, "local_ranks": 2,
            "node_rank": 0, "pid": 4711, "netns": None, "gpu": "0", "world_rank": None, "job": "pretrain",
            "group_name": None, "nccl_version": "2.27.3", "numbered_from_start": True, "attributed": None,
        },
        {
            "node": "gpu-01", "instance": 8, "comm": None, "rank": None, "nranks": 4, "local_ranks": 2,
            "node_rank": 0, "pid": 4711, "netns": "job-a", "gpu": None, "world_rank": 17, "job": "4242",
            "group_name": None, "nccl_version": None, "numbered_from_start": None, "attributed": None,
        },
    ]  # fmt: skip
    found = rows_of(one, "connections", tmp_path)
    assert [(row["peer"], row["channel"], row["send"], row["network"], row["net_device"]) for row in found] == [
        (None, 2, False, None, None),
        (1, 0, True, None, 0),
    ]
    (stall,) = rows_of(one, "stalls", tmp_path)
    assert (stall["cause"], stall["since_ns"], stall["blamed_rank"], stall["rail"]) == (
        *("rail_down", REALTIME_NS, None, "1"),
    )
    (mark,) = rows_of(one, "marks", tmp_path)
    assert (mark["time_ns"], mark["text"]) == (BEGAN_NS + REALTIME_NS + 5, "a stall began")


def test_a_recording_with_too_little_memory_does_not_say_how_many_calls_are_missing(tmp_path: Path) -> None:
    (row,) = rows_of(recording(), "recordings", tmp_path)
    assert (row["calls_lost"], row["operations_lost"]) == (None, 0)
    assert (row["began_ns"], row["ended_ns"]) == (BEGAN_NS + REALTIME_NS, BEGAN_NS + REALTIME_NS + 60 * SECOND_NS)
    assert (row["clock_error_ns"], row["kernel"], row["simulated"]) == (3_000_200, "6.6.1", True)
    whole = replace(recording(), complete_from_ns=dict.fromkeys(KINDS, BEGAN_NS), boot_id="another")
    rows = rows_of(whole, "recordings", tmp_path)
    assert sorted(row["calls_lost"] for row in rows if row["calls_lost"] is not None) == [3]


def test_the_same_recording_put_in_twice_is_there_once(tmp_path: Path) -> None:
    path, _ = save(recording(), tmp_path / "one.npz")
    first = convert_file(path, tmp_path / "job")
    assert convert_file(path, tmp_path / "job") == first
    assert write_dataset(replace(recording(), host="gpu-02"), tmp_path / "job") != first
    with open_dataset([tmp_path / "job"]) as dataset:
        assert dataset.rows(dataset["calls"].count()).as_py() == 200
        assert dataset.rows(dataset["recordings"].count()).as_py() == 2


def test_a_file_that_is_no_recording_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "one.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(DatasetError, match=r"one\.npz: this is not a railscope recording, or only a part of one$"):
        convert_file(tmp_path / "one.npz", tmp_path / "job")


def test_every_table_says_what_its_columns_mean() -> None:
    assert all(field.metadata[b"description"] for schema in TABLES.values() for field in schema)
