"""NCCL's profiler plugins as datasets: the example plugin's traces, Inspector's newer lines and textfiles; RAS."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

from railscope.agent.imports.facts import ImportFailure
from tests.unit.importing import imported, written

WRITTEN: Final = 1_790_000_000
HEADER: Final = {"id": "0xabc123", "comm_name": "unknown", "rank": 0, "n_ranks": 4, "nnodes": 1}
METADATA: Final = {
    "inspector_output_format_version": "v4.3",
    "dump_timestamp_us": WRITTEN * 1_000_000,
    "hostname": "n1",
    "pid": 50,
}


def performed(number: int, size: int = 65536, op: str = "AllReduce", **more: Any) -> dict[str, Any]:
    return {
        "coll_perf": {
            "coll": op,
            "coll_sn": number,
            "coll_msg_size_bytes": size,
            "coll_exec_time_us": 100,
            "coll_timing_source": "kernel_gpu",
            **more,
        }
    }


def lines(*values: dict[str, Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def test_header_and_metadata_that_stand_once_are_those_of_the_lines_below(tmp_path: Path) -> None:
    first = {"header": HEADER, "metadata": METADATA, "dump_stats": {"coll_records": 2, "dropped": 3}}
    other = {"header": {**HEADER, "id": "0xdef", "rank": 1}, "metadata": METADATA}
    file = written(tmp_path, "inspector.log", lines(first, performed(1), performed(2, 1 << 20), other, performed(9)))
    result = imported(tmp_path, file)
    assert result.imported.problems.count == 0
    rows = result.rows("operations", "end_ns")
    assert [(row["sequence"], row["payload_bytes"], row["end_ns"] - WRITTEN * 10**9) for row in rows] == [
        (1, 65536, 1), (9, 65536, 1), (2, 1 << 20, 2)
    ]  # fmt: skip
    ends = result.rows("communicators", "comm")
    assert [(row["comm"], row["rank"], row["nranks"]) for row in ends] == [
        ("0000000000000def", 1, 4), ("0000000000abc123", 0, 4)
    ]  # fmt: skip
    assert "NCCL Inspector itself dropped 3 records of a file" in result.imported.problems.notes


def test_a_line_before_any_header_is_left_out(tmp_path: Path) -> None:
    first = {"header": HEADER, "metadata": METADATA}
    result = imported(tmp_path, written(tmp_path, "inspector.log", lines(performed(1), first, performed(2))))
    assert [row["sequence"] for row in result.rows("calls")] == [2]
    assert result.skipped == [(1, "a line without its header")]


def test_sizes_of_bytes_that_older_releases_count_below_2_to_the_64_are_mended(tmp_path: Path) -> None:
    both = {"header": HEADER, "metadata": METADATA}
    values = [{**both, **performed(at, size, "AllGather")} for at, size in enumerate((65536, 2**64 - 65536, 2**63))]
    result = imported(tmp_path, written(tmp_path, "inspector.log", lines(*values)))
    rows = result.rows("calls", "sequence")
    assert [(row["payload_bytes"], row["data_type"]) for row in rows] == [(65536, None), (65536, "Uint8")]
    assert [line for line, _ in result.skipped] == [3]


def test_algorithms_protocols_and_fractions_of_a_microsecond_are_read(tmp_path: Path) -> None:
    more = performed(1, coll_algo="NVLS_TREE", coll_proto="SIMPLE", coll_exec_time_us=56.25)
    result = imported(tmp_path, written(tmp_path, "a.log", lines({"header": HEADER, "metadata": METADATA, **more})))
    row = result.rows("operations")[0]
    assert (row["algorithm"], row["protocol"], row["end_ns"] - row["begin_ns"]) == ("NVLSTree", "Simple", 56_250)


def sample(metric: str, value: float, **labels: str) -> str:
    said = ",".join(f'{name}="{text}"' for name, text in labels.items())
    return f"{metric}{{{said}}} {value}\n"


def test_a_textfile_that_has_single_operations_is_read(tmp_path: Path) -> None:
    labels = {
        "comm_id": "0x7f8c496ae9f661", "hostname": "gpu-1", "rank": "2", "slurm_job": "x", "slurm_job_id": "7",
        "nranks": "8", "n_nodes": "1", "gpu_device_id": "GPU2", "collective": "AllReduce", "coll_sn": "1407",
        "timestamp": "2026-09-21T14:13:20Z", "message_size": "4.50MB",
    }  # fmt: skip
    content = "".join(
        sample(metric, value, **labels)
        for metric, value in (
            ("nccl_algorithm_bandwidth_gbs", 1.5),
            ("nccl_bus_bandwidth_gbs", 2.5),
            ("nccl_collective_exec_time_microseconds", 61974),
        )
    )
    result = imported(tmp_path, written(tmp_path, "nccl_inspector_metrics_GPU-1.prom", content))
    assert result.calls() == [(2, "AllReduce", 4_718_592, None)]
    row = result.rows("operations")[0]
    assert (row["sequence"], row["end_ns"], row["end_ns"] - row["begin_ns"]) == (
        1407, WRITTEN * 10**9, 61_974_000
    )  # fmt: skip
    end = result.rows("communicators")[0]
    assert (end["comm"], end["nranks"], end["node"]) == ("007f8c496ae9f661", 8, "gpu-1")


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", ['"n1"', '"unknown"', '"AllReduce"', '"65536"'])
def test_bytes_that_are_no_utf_8_are_replaced_wherever_they_stand(tmp_path: Path, name: str, place: int) -> None:
    lines = [json.dumps(performed(number) | {"note": "65536"}) for number in range(3)]
    lines = [json.dumps({"header": HEADER, "metadata": METADATA, **json.loads(line)}) for line in lines]
    content = [line.encode() for line in lines]
    content[place] = content[place].replace(name.encode(), b'"\xff' + name[1:].encode(), 1)
    result = imported(tmp_path, written(tmp_path, "inspector.log", b"\n".join(content)))
    assert len(result.calls()) + result.imported.problems.count == 3


@pytest.mark.parametrize(("size", "length"), [("999999999999.99TB", 5.0), ("4.50MB", 1e99), ("4.50MB", 1e25)])
def test_a_sample_of_an_impossible_size_or_time_is_left_out(tmp_path: Path, size: str, length: float) -> None:
    labels = {
        "comm_id": "0x7f8c496ae9f661", "hostname": "gpu-1", "rank": "2", "nranks": "8", "collective": "AllReduce",
        "coll_sn": "1407", "timestamp": "2026-09-21T14:13:20Z",
    }  # fmt: skip
    metric = "nccl_collective_exec_time_microseconds"
    content = sample("nccl_bus_bandwidth_gbs", 2.5, **labels)
    content += sample(metric, length, **labels, message_size=size) + sample(metric, 5, **labels, message_size="1.00KB")
    result = imported(tmp_path, written(tmp_path, "nccl_inspector_metrics_GPU-1.prom", content))
    assert result.calls() == [(2, "AllReduce", 1024, None)]
    assert [(line, reason[:10]) for line, reason in result.skipped] == [(2, "an impossi")]


def test_a_textfile_of_means_says_that_it_holds_no_operations(tmp_path: Path) -> None:
    labels = {"version": "v5.1", "node": "n1", "gpu": "GPU0", "comm_name": "DP", "n_nodes": "1", "nranks": "4"}
    content = sample("nccl_bus_bandwidth_gbs", 10, **labels, collective="AllReduce", message_size="4-5MB")
    content += sample(
        "nccl_collective_exec_time_microseconds", 9, **labels, collective="AllReduce", message_size="4-5MB"
    )
    with pytest.raises(ImportFailure, match="a mean over a range of sizes, which tells no operation"):
        imported(tmp_path, written(tmp_path, "nccl_inspector_metrics_GPU-1.prom", content))


def event(name: str, kind: str, number: int, begin: float, end: float, **arguments: object) -> str:
    """As print_event.cc of NCCL's example plugin writes it."""
    said = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in arguments.items())
    head = f'"name": "{name}", "cat": "{kind}"'
    place = f'"id": {number}, "pid": 900, "tid": 1'
    return (
        f'{{{head}, "ph": "b", {place}, "ts": {begin:f}, "args": {{{said}}}}},\n'
        f'{{{head}, "ph": "e", {place}, "ts": {end:f}}},\n'
    )


COLLECTIVE: Final[dict[str, object]] = {
    "SeqNum": 3, "CommHash": 4660123456789, "Rank": 1, "Count": 4096, "Datatype": "ncclFloat32", "Algorithm": "RING",
    "Protocol": "LL128", "nChannels": 8,
}  # fmt: skip
SEND: Final[dict[str, object]] = {
    "CommHash": 18446744073709551615, "Rank": 0, "Peer": 1, "Count": 10, "Datatype": "ncclBfloat16", "nChannels": 2,
}  # fmt: skip
TRACE: Final = "".join(
    (
        "[\n",
        # Older releases write data types and addresses of calls without quotes.
        '{"name": "Send", "cat": "P2P_API", "ph": "b", "id": 0, "pid": 900, "tid": 1, "ts": 0.0, "args": {"count": 10, '
        '"datatype": ncclBfloat16, "GraphCaptured":0, "Stream": 0x4142e90}},\n',
        event("Group", "GROUP", 0, 1000.5, 1010.0, groupId=0),
        event("AllReduce", "COLL", 0, 1001.0, 1009.25, **COLLECTIVE),
        event("ScheduleSend", "PROXY", 0, 1002.0, 1003.0, Channel=0, Peer=1),
        event("Send", "P2P", 0, 1011.0, 1012.0, **SEND),
        "{}]\n",
    )
)


def traced(folder: Path, content: str, name: str = "nccl_4660123456789_1.json") -> Path:
    file = written(folder, name, content)
    os.utime(file, (WRITTEN, WRITTEN))
    return file


def test_the_example_plugins_collectives_and_sends_are_calls_and_operations(tmp_path: Path) -> None:
    result = imported(tmp_path, traced(tmp_path, TRACE))
    assert result.imported.problems.count == 0
    assert [name for _, name in result.imported.files] == ["nccl-profiler"]
    assert result.calls() == [(1, "AllReduce", 16384, None), (0, "Send", 20, 1)]
    rows = result.rows("operations", "begin_ns")
    assert [
        (row["op"], row["end_ns"] - row["begin_ns"], row["algorithm"], row["protocol"], row["channels"]) for row in rows
    ] == [("AllReduce", 8_250, "Ring", "LL128", 8), ("Send", 1_000, None, None, 2)]
    assert rows[0]["sequence"] == 3
    # The last event is where the file was last written.
    assert rows[-1]["end_ns"] == WRITTEN * 10**9
    ends = result.rows("communicators", "rank")
    assert [(row["comm"], row["rank"], row["nranks"], row["pid"]) for row in ends] == [
        ("ffffffffffffffff", 0, None, 900), (f"{4660123456789:016x}", 1, None, 900)
    ]  # fmt: skip


def test_a_trace_without_its_end_keeps_what_it_has(tmp_path: Path) -> None:
    cut = TRACE[: TRACE.index('"ph": "e"', TRACE.index('"P2P", "ph": "b"'))]
    result = imported(tmp_path, traced(tmp_path, cut))
    assert [row[1] for row in result.calls()] == ["AllReduce", "Send"]
    assert [row["op"] for row in result.rows("operations")] == ["AllReduce"]
    assert [reason for _, reason in result.skipped] == ["Send has no end: its time is unknown"]


def test_a_trace_that_was_written_anew_is_read_by_its_json(tmp_path: Path) -> None:
    values = json.loads(TRACE.replace('ncclBfloat16, "Graph', '"x", "Graph').replace("0x4142e90", "1"))
    result = imported(tmp_path, traced(tmp_path, json.dumps(values, indent=1)))
    assert result.calls() == [(1, "AllReduce", 16384, None), (0, "Send", 20, 1)]


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"Datatype": "ncclFloat7"}, "an unknown data type: 'ncclFloat7'"),
        ({"Count": -1}, "an operation without its count"),
        ({"Count": 1 << 62}, "an operation without its count"),
        ({"Rank": -1}, "AllReduce without its communicator and rank"),
        ({"CommHash": 1 << 64}, "AllReduce without its communicator and rank"),
    ],
)
def test_events_that_make_no_sense_are_counted_with_their_line(
    tmp_path: Path, odd: dict[str, Any], reason: str
) -> None:
    content = "[\n" + event("AllReduce", "COLL", 0, 1, 2, **{**COLLECTIVE, **odd})
    content += event("AllReduce", "COLL", 1, 3, 4, **COLLECTIVE)
    result = imported(tmp_path, traced(tmp_path, content))
    assert len(result.calls()) == 1
    assert result.skipped == [(2, reason)]
