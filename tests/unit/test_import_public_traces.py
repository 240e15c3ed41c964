"""Traces in the forms that public collections of them have, held against a small parser that knows nothing of ours.

`RAILSCOPE_TRACES=FOLDER` names a folder with such files, which are not part of this repository: the tests of
HolisticTraceAnalysis, TraceLens, Chakra and PARAM and the examples of ASTRA-sim have some dozens, also in archives;
those of ranks of one job lie in a folder of their own.  Without it the same forms are made here: microseconds as whole
numbers without a base (PyTorch before 2.2), categories of PyTorch before 1.12, ROCm's, no object around the events,
collectives without arguments, and traces of the host alone; rocprofv3's JSON; execution traces of PyTorch before 2.1;
the JSON that Chakra's feeder takes, and its messages.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from railscope.agent.imports.execution_trace import NO_COLLECTIVES
from railscope.agent.imports.facts import ImportFailure
from railscope.agent.imports.kineto import NO_CALL_ARGUMENTS, NO_GPU
from tests.unit.importing import Result, imported, written

_FOLDER: Final = os.environ.get("RAILSCOPE_TRACES", "")
_ON_GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
Event = dict[str, Any]


class Work(NamedTuple):
    """What the GPUs of a trace did."""

    pieces: int
    nanoseconds: int
    nccl: int
    """Kernels of NCCL's."""


def read_json(path: Path) -> Any:
    """A file read whole."""
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content, strict=False)


def work_of(said: Any) -> Work:
    """What a trace of Kineto's says."""
    events = said if isinstance(said, list) else said.get("traceEvents", [])
    done = [one for one in events if one.get("ph") == "X" and str(one.get("cat")).lower() in _ON_GPU]
    nccl = [one for one in done if "nccl" in str(one["name"]).lower() and str(one["cat"]).lower() == "kernel"]
    return Work(len(done), sum(round(float(one.get("dur", 0)) * 1000) for one in done), len(nccl))


def work_of_rocprof(said: Any) -> Work:
    """What JSON of rocprofv3 says."""
    pieces = nanoseconds = nccl = 0
    for process in said["rocprofiler-sdk-tool"]:
        names = {one["kernel_id"]: one["kernel_name"] for one in process["kernel_symbols"]}
        kernels = process["buffer_records"]["kernel_dispatch"]
        done = [*kernels, *process["buffer_records"]["memory_copy"]]
        pieces += len(done)
        nanoseconds += sum(one["end_timestamp"] - one["start_timestamp"] for one in done)
        nccl += sum("nccl" in names[one["dispatch_info"]["kernel_id"]] for one in kernels)
    return Work(pieces, nanoseconds, nccl)


def check(folder: Path, path: Path) -> None:
    """Import a trace and hold it against the other parsers."""
    said = read_json(path)
    if isinstance(said, dict) and "rocprofiler-sdk-tool" in said:
        check_work(imported(folder, path), work_of_rocprof(said))
    elif isinstance(said, dict) and "workload_graph" in said:
        check_calls(imported(folder, path), calls_of_graph(said))
    elif isinstance(said, dict) and "nodes" in said:
        check_execution_trace(folder, path, said)
    elif (expected := work_of(said)).pieces:
        check_work(imported(folder, path), expected)
    else:
        with pytest.raises(ImportFailure, match="no calls and no operations") as failure:
            imported(folder, path, chosen="kineto")
        assert "no events of a GPU" in str(failure.value) or NO_CALL_ARGUMENTS in str(failure.value)


def check_work(result: Result, expected: Work) -> None:
    """Hold what the GPUs did against what another parser has found."""
    rows = [*result.rows("operations"), *result.rows("compute")]
    found = Work(len(rows), sum(row["end_ns"] - row["begin_ns"] for row in rows), len(result.rows("operations")))
    assert found[:2] == expected[:2]
    # Others communicate as well.
    assert found.nccl >= expected.nccl
    assert result.imported.problems.count == 0


Calls = Counter[tuple[str, int | None]]
"""By operation and payload."""


def check_calls(result: Result, expected: Calls) -> None:
    """Hold calls against what another parser has found."""
    assert Counter((row["op"], row["payload_bytes"]) for row in result.rows("calls")) == expected
    assert result.imported.problems.count == 0


def calls_of_graph(said: Any) -> Calls:
    """What JSON of Chakra's feeder says: the operation stands in the kernel's name."""
    nodes = [node for node in said["workload_graph"] if node["NodeType"] == 7 and not node["is_cpu_op"]]
    ops = [re.findall("AllReduce|AllGather|ReduceScatter|Broadcast", node["Name"])[0] for node in nodes]
    return Counter((op, node.get("comm_size")) for op, node in zip(ops, nodes, strict=True))


_OF_TORCH: Final = {"allreduce": "AllReduce", "broadcast": "Broadcast", "all_to_all": "AllToAll"}


def check_execution_trace(folder: Path, path: Path, said: Any) -> None:
    """Import PyTorch's own trace: what is called stands in the values of a node's inputs, in either of two forms."""
    expected: Calls = Counter()
    for node in said["nodes"]:
        inputs = node["inputs"]["values"] if isinstance(node.get("inputs"), dict) else node.get("inputs")
        if node["name"] != "record_param_comms" or "wait" in inputs:
            continue
        name = next(one for one in inputs if isinstance(one, str))
        op = _OF_TORCH[name.removesuffix("v")]
        parts = inputs[inputs.index(name) + 1 :][:2]
        if op == "AllToAll" and len({*parts[0], *parts[1]}) > 1:
            # Of unequal parts it is a Send and a Recv a peer, but for those of which nothing is sent.
            for one, own, tensor in zip(("Send", "Recv"), parts, (inputs[0], node["outputs"][0]), strict=True):
                expected.update((one, tensor[3] * tensor[4] * part // sum(own)) for part in own if part)
            continue
        tensors = inputs[0] if isinstance(inputs[0][0], list) else [inputs[0]]
        size_bytes = sum(tensor[3] * tensor[4] for tensor in tensors)
        # These jobs have eight ranks.
        expected[op, size_bytes // 8 if op == "AllToAll" else size_bytes] += 1
    if expected:
        check_calls(imported(folder, path), expected)
        return
    with pytest.raises(ImportFailure, match=re.escape(NO_COLLECTIVES)):
        imported(folder, path)


def fields_of(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of the fields of a protobuf message; what is of a fixed length is left out."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            at += 1
            value |= (message[at - 1] & 0x7F) << shift
            shift += 7
            if message[at - 1] < 0x80:
                return value

    while at < len(message):
        tag = number()
        if tag & 7 == 0:
            yield tag >> 3, number()
        elif tag & 7 == 2:
            size = number()
            at += size
            yield tag >> 3, message[at - size : at]
        else:
            at += {1: 8, 5: 4}[tag & 7]


_CHAKRA_OPS: Final = ("AllReduce", "Reduce", "AllGather", "Gather", "Scatter", "Broadcast", "AllToAll", "ReduceScatter")


def calls_of_messages(content: bytes, ranks: int) -> Calls:
    """What a Chakra trace says, where all ranks of the job take part in everything."""
    # A file is what a message would be that had all nodes in one field, but for the field's tag.
    at, found = 0, Counter[tuple[str, int | None]]()
    while at < len(content):
        size = shift = 0
        while True:
            size |= (content[at] & 0x7F) << shift
            shift += 7
            at += 1
            if content[at - 1] < 0x80:
                break
        message, at = content[at : at + size], at + size
        node = list(fields_of(message))
        kind = next((value for number, value in node if number == 3), 0)
        attributes: dict[bytes, int] = {}
        for number, value in node:
            if number == 10 and isinstance(value, bytes):
                parts = dict(fields_of(value))
                name = parts.pop(1, b"")
                whole = [one for one in parts.values() if isinstance(one, int)]
                if isinstance(name, bytes) and whole:
                    attributes[name] = whole[0]
        if b"comm_size" not in attributes or kind not in (5, 6, 7):
            continue
        op = {5: "Send", 6: "Recv"}.get(int(kind)) or _CHAKRA_OPS[attributes[b"comm_type"]]
        shared = op in ("AllToAll", "ReduceScatter")
        found[op, attributes[b"comm_size"] // ranks if shared else attributes[b"comm_size"]] += 1
    return found


def kernel(name: str, category: str, begin: float, length: float, **arguments: object) -> Event:
    said = {"device": 0, "stream": 7, **arguments}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": begin, "dur": length, "args": said}


def events(kernels: str = "kernel", copies: str = "gpu_memcpy", *, whole: bool = False) -> list[Event]:
    """Host and GPU of a step that computes, copies and communicates."""
    unit = 1 if whole else 1.125
    host = {"ph": "X", "cat": "cpu_op", "pid": 9, "tid": 9}
    return [
        {"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "args": {"name": "python"}},
        {**host, "name": "aten::mm", "ts": 5 * unit, "dur": 3 * unit, "args": {"External id": 1}},
        {**host, "name": "record_param_comms", "ts": 9 * unit, "dur": 2 * unit, "args": {"External id": 2}},
        kernel("ampere_sgemm_128x64_tn", kernels, 20 * unit, 40 * unit, correlation=1),
        kernel("Memcpy HtoD (Pinned -> Device)", copies, 61 * unit, 4 * unit, bytes=4096),
        kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", kernels, 70 * unit, 15 * unit),
    ]


SHAPES: Final[dict[str, Any]] = {
    "whole microseconds without a base": {"schemaVersion": 1, "traceEvents": events(whole=True)},
    "nanoseconds with a base": {"baseTimeNanoseconds": 1_790_000_000_000_000_000, "traceEvents": events()},
    "categories of PyTorch before 1.12": {"traceEvents": events("Kernel", "Memcpy", whole=True)},
    "events alone": events(),
    "no GPU": {"traceEvents": [one for one in events() if one.get("cat") == "cpu_op"]},
    "another accelerator": {"traceEvents": [{**kernel("matmul", "mtia_ccp_events", 1, 2)}]},
    "nothing but the host's operators": {"traceEvents": [events()[1]]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_trace_is_imported_as_it_says(tmp_path: Path, shape: str) -> None:
    check(tmp_path, written(tmp_path, "trace.json", json.dumps(SHAPES[shape], indent=1)))


def test_what_has_no_gpu_says_so(tmp_path: Path) -> None:
    trace = written(tmp_path, "trace.json", json.dumps(SHAPES["another accelerator"]))
    with pytest.raises(ImportFailure, match=NO_GPU):
        imported(tmp_path, trace)


ROCPROF: Final = {
    "rocprofiler-sdk-tool": [
        {
            "metadata": {"node": {"hostname": "gpu-1"}, "pid": 908},
            "agents": [
                {"id": {"handle": 5}, "type": 1, "logical_node_type_id": 0},
                *({"id": {"handle": 7 + gpu}, "type": 2, "logical_node_type_id": gpu} for gpu in range(2)),
            ],
            "strings": {"buffer_records": [{"kind": "NONE", "operations": []}], "att_filenames": ["x"]},
            "code_objects": [{"uri": "memory://1"}],
            "kernel_symbols": [
                {
                    "kernel_id": 8,
                    "kernel_name": "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>) [clone .kd]",
                },
                {"kernel_id": 9, "kernel_name": "Cijk_Ailk_Bljk_SB_MT128x64.kd"},
            ],
            "buffer_records": {
                "kernel_dispatch": [
                    {
                        "start_timestamp": 1000 * at,
                        "end_timestamp": 1000 * at + 700,
                        "dispatch_info": {
                            "agent_id": {"handle": 7},
                            "queue_id": {"handle": 3},
                            "kernel_id": 9 - at % 2,
                        },
                        **({"stream_id": {"handle": 2}} if at > 2 else {}),
                    }
                    for at in range(1, 7)
                ],
                "hip_api": [{"kind": 1}],
                "memory_copy": [
                    {
                        "start_timestamp": 9000,
                        "end_timestamp": 9100,
                        "src_agent_id": {"handle": source},
                        "dst_agent_id": {"handle": 7},
                        "bytes": 4096,
                    }
                    for source in (5, 8)
                ],
            },
        }
    ]
}


def test_json_of_rocprofv3_tells_kernels_and_copies(tmp_path: Path) -> None:
    trace = written(tmp_path, "908_results.json", json.dumps(ROCPROF, indent=1))
    check(tmp_path / "as it says", trace)
    result = imported(tmp_path, trace)
    operations = result.rows("operations", "begin_ns")
    assert [(row["node"], row["begin_ns"], row["stream"]) for row in operations] == [
        ("gpu-1", 1000, 3), ("gpu-1", 3000, 2), ("gpu-1", 5000, 2), ("gpu-1", 9000, None)
    ]  # fmt: skip
    # A copy between two GPUs communicates; one from the host does not.
    assert operations[-1]["payload_bytes"] == 4096
    assert {row["gpu"] for row in result.rows("compute")} == {"0"}
    assert {row["pid"] for row in result.rows("compute")} == {908}
    assert result.imported.files[0][1] == "rocprofv3"


def test_a_record_of_rocprofv3_that_makes_no_sense_is_counted(tmp_path: Path) -> None:
    said = json.loads(json.dumps(ROCPROF))
    dispatches = said["rocprofiler-sdk-tool"][0]["buffer_records"]["kernel_dispatch"]
    dispatches[2]["end_timestamp"] = 0
    dispatches[4]["dispatch_info"] = "x"
    result = imported(tmp_path, written(tmp_path, "908_results.json", json.dumps(said, indent=1)))
    assert result.imported.problems.count == 2
    assert len(result.rows("operations")) + len(result.rows("compute")) == 6


@pytest.mark.parametrize("key", ["kernel_symbols", "kernel_dispatch", "memory_copy"])
def test_half_a_character_in_place_of_records_of_rocprofv3_is_counted(tmp_path: Path, key: str) -> None:
    said = json.dumps(ROCPROF).replace(f'"{key}": [', f'"{key}": "\\ud800", "{key}": [')
    result = imported(tmp_path, written(tmp_path, "908_results.json", said))
    assert result.imported.problems.count == 1
    assert len(result.rows("operations")) + len(result.rows("compute")) == 8


def test_names_of_kernels_take_so_much_memory_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.loads(json.dumps(ROCPROF))
    room = sum(len(one["kernel_name"]) for one in said["rocprofiler-sdk-tool"][0]["kernel_symbols"])
    for most, told in ((room, 0), (room - 1, 1)):
        monkeypatch.setattr("railscope.agent.imports.rocprof_json._MOST_LETTERS", most)
        folder = tmp_path / f"{most} letters"
        folder.mkdir()
        result = imported(folder, written(folder, "908_results.json", json.dumps(said)))
        notes = [one for one in result.imported.problems.notes if "names of kernels" in one]
        assert len(notes) == told
        assert len(result.rows("operations")) + len(result.rows("compute")) == 8


def test_execution_traces_of_older_schemas_are_read(tmp_path: Path) -> None:
    tensor = [320, 713, 0, 6144, 4, "cuda:2"]
    parts = [768] * 8
    said = [
        [tensor, 147, 93891384002768, 2, "all_to_allv", parts, parts],
        [[322, 713, 0, 24, 8, "cuda:2"], 148, 93891384002768, 2, "all_to_all", [], []],
        [[tensor], 149, 93891384002768, 2, "allreduce", [], []],
        [147, 0, 2, "wait", [], []],
    ]
    types = ["Tensor(float)", "Tensor(long int)", "GenericList[Tensor(float)]", "Int"]
    nodes = [
        {
            "name": "record_param_comms",
            "id": number,
            "inputs": inputs,
            "input_types": [kind],
            "outputs": inputs[:1],
            "output_types": [kind],
        }
        for number, (inputs, kind) in enumerate(zip(said, types, strict=True), 1)
    ]
    trace = written(tmp_path, "rank2.json", json.dumps({"schema": "1.0.1", "pid": 7, "nodes": nodes}, indent=1))
    check(tmp_path / "as it says", trace)
    result = imported(tmp_path, trace)
    assert [row[1:3] for row in result.calls()] == [("AllToAll", 3072), ("AllToAll", 24), ("AllReduce", 24576)]
    assert [(row["rank"], row["nranks"]) for row in result.rows("communicators")] == [(2, 8)]


@pytest.mark.parametrize("before", ["", " \n", "\ufeff"], ids=["", "space", "mark"])
def test_json_of_chakras_feeder_is_known_behind_a_long_description(tmp_path: Path, before: str) -> None:
    nodes = [{"Id": 4, "Name": "AllReduce", "NodeType": 7, "is_cpu_op": False, "comm_type": 0, "comm_size": 4096}]
    described = {"comm_groups": {str(at): list(range(64)) for at in range(200)}, "workload_graph": nodes}
    said = json.dumps(described)
    assert said.index("workload_graph") > 1 << 15
    result = imported(tmp_path, written(tmp_path, "chakra.0.json", before + said))
    assert [row[1:3] for row in result.calls()] == [("AllReduce", 4096)]


@pytest.mark.parametrize("before", ["", "\n", "\ufeff"], ids=["", "space", "mark"])
def test_chakras_json_of_nodes_is_known_by_what_it_is_and_not_by_what_a_node_is_called(
    tmp_path: Path, before: str
) -> None:
    description = {"version": "0.0.4", "attr": [{"name": "workload_graph", "stringVal": "NodeType"}]}
    node = {
        "id": "4",
        "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        "type": "COMM_COLL_NODE",
        "attr": [{"name": "comm_type", "int64Val": "0"}, {"name": "comm_size", "int64Val": "4096"}],
    }
    content = before + "\n".join(json.dumps(one) for one in (description, node))
    result = imported(tmp_path, written(tmp_path, "chakra.0.json", content))
    assert [row[1:3] for row in result.calls()] == [("AllReduce", 4096)]


def test_json_of_chakras_feeder_tells_operations_and_the_sizes_that_it_has(tmp_path: Path) -> None:
    nodes = [
        {"Id": 1, "Name": "c10d::broadcast_(0)", "NodeType": 7, "runtime": 85, "is_cpu_op": True},
        {"Id": 2, "Name": "ncclKernel_Broadcast_RING_LL_Sum_int8_t()", "NodeType": 7, "is_cpu_op": False},
        {"Id": 3, "Name": "aten::mm", "NodeType": 4, "runtime": 9, "is_cpu_op": False},
        {"Id": 4, "Name": "AllReduce", "NodeType": 7, "is_cpu_op": False, "comm_type": 0, "comm_size": 4096},
    ]
    trace = written(tmp_path, "chakra.0.json", json.dumps({"workload_graph": nodes, "ngpus": 8}, indent=1))
    check(tmp_path, trace)


@pytest.mark.skipif(not _FOLDER, reason="RAILSCOPE_TRACES names no folder with traces of others")
def test_traces_of_others_are_imported_as_they_say(tmp_path: Path) -> None:
    for archive in sorted(Path(_FOLDER).rglob("*.tar.gz")):
        with tarfile.open(archive) as content:
            content.extractall(tmp_path / "unpacked" / archive.name, filter="data")
    files = [
        file
        for folder in (Path(_FOLDER), tmp_path / "unpacked")
        for file in sorted(folder.rglob("*.json*"))
        if file.is_file() and ".tar." not in file.name
    ]
    assert files
    for number, file in enumerate(files):
        check(tmp_path / str(number), file)


@pytest.mark.skipif(not _FOLDER, reason="RAILSCOPE_TRACES names no folder with traces of others")
def test_chakra_traces_of_others_are_imported_as_they_say(tmp_path: Path) -> None:
    folders = sorted({file.parent for file in Path(_FOLDER).rglob("*.et")})
    assert folders
    for number, folder in enumerate(folders):
        files = sorted(folder.glob("*.et"))
        expected: Calls = Counter()
        for file in files:
            expected += calls_of_messages(file.read_bytes(), len(files))
        result = imported(tmp_path / str(number), *files, ranks=len(files))
        check_calls(result, expected)
        assert {row["nranks"] for row in result.rows("communicators")} == {len(files)}, folder
