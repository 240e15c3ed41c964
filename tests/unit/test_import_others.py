"""Chakra traces, NCCL Inspector's lines, DeepSpeed's log and railscope's own recordings as datasets."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.imports import chakra_messages, imported_rows
from railscope.agent.imports.chakra_messages import BrokenMessage, attribute_values, decode_metadata, decode_node
from railscope.agent.imports.deepspeed import ranks_of_bandwidths
from railscope.agent.imports.facts import ImportFailure
from railscope.agent.recording.file import write_recording
from tests.unit.importing import SAMPLES, imported, written
from tests.unit.recordings import recording

TRACES = sorted(SAMPLES.glob("gpt.*.et"))
START_NS = 1_700_000_000_000_000_000


def test_chakras_messages_give_calls_operations_and_compute(tmp_path: Path) -> None:
    result = imported(tmp_path, *TRACES, ranks=2)
    assert result.imported.problems.count == 0
    # comm_size is what a rank puts in: for a ReduceScatter among two, twice what it receives.
    assert result.calls() == [
        *[(rank, "AllReduce", 16384, None) for rank in (0, 1)],
        *[(rank, "ReduceScatter", 8192, None) for rank in (0, 1)],
        *[(rank, "AllGather", 8192, None) for rank in (0, 1)],
        *[(0, "Send", 4096, 1), (1, "Recv", 4096, 0)],
    ]
    first = result.rows("operations", "begin_ns")[0]
    assert (first["begin_ns"] - START_NS, first["end_ns"] - START_NS) == (100_000, 180_000)
    assert (first["algorithm"], first["protocol"]) == ("Ring", "LL")
    assert [row["end_ns"] - row["begin_ns"] for row in result.rows("compute")] == [9_000, 9_000]
    assert {row["pid"] for row in result.rows("compute")} == {row["pid"] for row in result.rows("communicators")}
    ends = result.rows("communicators", "rank")
    assert [(row["rank"], row["nranks"], row["world_rank"], row["group_name"]) for row in ends] == [
        (0, 2, 0, "0"),
        (1, 2, 1, "0"),
    ]
    assert result.imported.times_known


def test_the_hosts_side_of_a_node_is_not_counted_again_in_chakras_json(tmp_path: Path) -> None:
    assert imported(tmp_path, SAMPLES / "gpt.0.json").calls() == [(0, "AllReduce", 16384, None)]


def test_a_trace_that_is_cut_keeps_what_came_before(tmp_path: Path) -> None:
    content = TRACES[0].read_bytes()
    result = imported(tmp_path, written(tmp_path, "cut.0.et", content[:-20]))
    assert len(result.calls()) == 4
    assert result.skipped == [(7, "the file ends in the middle of a message: the rest is left out")]


def test_a_broken_message_is_counted_with_its_number(tmp_path: Path) -> None:
    content = bytearray(TRACES[0].read_bytes())
    at = content.index(b"ncclDevKernel_AllGather") - 1
    content[at] = 0x7F
    result = imported(tmp_path, written(tmp_path, "broken.0.et", bytes(content)))
    assert [row[1] for row in result.calls()] == ["AllReduce", "ReduceScatter", "Send"]
    assert [line for line, _ in result.skipped] == [5]


@given(st.binary(max_size=60))
def test_no_bytes_make_the_reader_of_messages_fail_otherwise(message: bytes) -> None:
    for decode in (decode_node, decode_metadata):
        try:
            attribute_values(decode(message).attr)
        except BrokenMessage:
            continue


MINUS_ONE: Final = b"\xff" * 9 + b"\x01"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"\x19" + struct.pack("<d", 0.5), 0.5),
        (b"\x2d" + struct.pack("<f", 0.25), 0.25),
        (b"\x38" + MINUS_ONE, -1),
        (b"\x48" + MINUS_ONE, -1),
        (b"\x58\x96\x01", 150),
        (b"\x68" + MINUS_ONE, (1 << 64) - 1),
        (b"\x78\x03", -2),
        (b"\x88\x01\x01", -1),
        (b"\x9d\x01" + struct.pack("<I", 7), 7),
        (b"\xa9\x01" + struct.pack("<Q", 1 << 63), 1 << 63),
        (b"\xbd\x01" + struct.pack("<i", -7), -7),
        (b"\xc9\x01" + struct.pack("<q", -7), -7),
        (b"\xd8\x01\x00", False),
        (b"\xea\x01\x02hi", "hi"),
        (b"\x52\x02\x01\x02", None),  # a list of int64
        (b"\xfa\x01\x02hi", None),  # bytes
    ],
    ids="double float int32 int64 uint32 uint64 sint32 sint64 fixed32 fixed64 sfixed32 sfixed64 bool string list bytes"
    .split(),
)  # fmt: skip
def test_attributes_of_every_kind_are_read_as_the_encoding_guide_has_them(value: bytes, expected: object) -> None:
    attribute = b"\x0a\x01a" + value
    for decode, field in ((decode_node, b"\x52"), (decode_metadata, b"\x12")):
        found = attribute_values(decode(field + bytes([len(attribute)]) + attribute).attr)
        assert found == ({} if expected is None else {"a": expected})


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"\x12\x02\xff\xfe", id="a name that is no text"),
        pytest.param(b"\x12\x7f", id="a text that is cut"),
        pytest.param(b"\x30" + b"\xff" * 11, id="a number that is too long"),
        pytest.param(b"\xa3\x06" * 500_000, id="groups within groups"),
        pytest.param(b"\x52\x05\x0a\x01a\x49\x01", id="an attribute that is cut"),
    ],
)
def test_a_message_that_is_none_is_told_from_one(message: bytes) -> None:
    with pytest.raises(BrokenMessage):
        decode_node(message)


def test_a_length_of_any_size_takes_no_memory(tmp_path: Path) -> None:
    content = TRACES[0].read_bytes()
    for length, reason in (
        (b"\xff" * 9 + b"\x01", f"a message of {(1 << 64) - 1} bytes"),
        (b"\x81\x80\x80\x08", f"a message of {chakra_messages.LARGEST_MESSAGE_BYTES + 1} bytes"),
        (b"\xff" * 11, "a malformed length"),
        (b"\x80", "the file ends in the middle of a length"),
    ):
        result = imported(tmp_path / str(len(length)), written(tmp_path, "long.0.et", content + length))
        assert len(result.calls()) == 4
        assert [one for _, one in result.skipped] == [f"{reason}: the rest is left out"]


def test_a_node_of_nothing_but_attributes_is_read_in_bounded_memory() -> None:
    # In a process of its own: the most memory that one ever had is never given back.
    script = (
        "import resource\n"
        "from railscope.agent.imports import chakra_messages as messages\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "node = messages.decode_node(b'\\x52\\x00' * (messages.LARGEST_MESSAGE_BYTES // 8))\n"
        "assert messages.attribute_values(node.attr) == {}\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 50 * chakra_messages.LARGEST_MESSAGE_BYTES // 4


def test_the_inspectors_lines_give_operations_and_calls(tmp_path: Path) -> None:
    result = imported(tmp_path, SAMPLES / "nccl-inspector.log")
    assert result.imported.problems.count == 0
    assert result.calls() == [
        *[(rank, "AllReduce", 1 << 20, None) for rank in (0, 1)],
        *[(rank, "AllGather", 1 << 18, None) for rank in (0, 1)],
        *[(0, "Send", 65536, 1), (1, "Recv", 65536, 0)],
        (0, "AllReduce", 1 << 20, None),
    ]
    operations = result.rows("operations", "begin_ns")
    assert [row["end_ns"] - row["begin_ns"] for row in operations][:2] == [120_000, 120_000]
    assert operations[0]["end_ns"] == START_NS
    # The verbose line has the kernel's own times.
    assert operations[-1]["end_ns"] == START_NS + 100_140_000
    ends = result.rows("communicators", "rank")
    assert [(row["comm"], row["rank"], row["nranks"], row["node"], row["pid"]) for row in ends] == [
        ("007f8c496ae9f661", 0, 2, "gpu-node-1", 4101),
        ("007f8c496ae9f661", 1, 2, "gpu-node-2", 4102),
    ]


def test_a_broken_line_of_the_inspector_is_counted_with_its_number(tmp_path: Path) -> None:
    lines = (SAMPLES / "nccl-inspector.log").read_text().splitlines()
    lines[2:2] = ['{"header": {"id": "0x1"', '{"coll_perf": {"coll": "AllReduce"}}', '{"other": 1}']
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(lines)))
    assert len(result.calls()) >= 6
    assert {line for line, _ in result.skipped} >= {3, 5}


def test_deepspeeds_lines_give_operations_that_end_at_their_time(tmp_path: Path) -> None:
    result = imported(tmp_path, SAMPLES / "deepspeed.log")
    mib = 1 << 20
    assert result.calls() == [
        (0, "Broadcast", 2 * mib, None),
        (0, "AllReduce", 64 * mib, None),
        (0, "AllGather", 16 * mib, None),
        (0, "ReduceScatter", 16 * mib, None),
    ]
    last = result.rows("operations", "begin_ns")[-1]
    assert last["end_ns"] - last["begin_ns"] == 8_000_000
    assert last["end_ns"] == 1_686_139_203_500_000_000
    assert result.rows("communicators")[0]["nranks"] == 8


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_the_number_of_ranks_follows_from_the_two_bandwidths(ranks: int) -> None:
    pairs = [(round(speed, 2), round(speed * (ranks - 1) / ranks, 2)) for speed in (0.4, 12.5, 3870.4, 99.99)]
    assert ranks_of_bandwidths(pairs) == ranks


def test_bandwidths_that_fit_several_numbers_of_ranks_or_none_tell_nothing() -> None:
    assert ranks_of_bandwidths([(0.05, 0.04)]) is None
    assert ranks_of_bandwidths([(100.0, 50.0), (100.0, 75.0)]) is None
    assert ranks_of_bandwidths([]) is None


def test_a_reduce_scatter_among_an_unknown_number_of_ranks_is_left_out(tmp_path: Path) -> None:
    said = "comm op: {} | time (ms): 1.00 | msg size: 1.0 KB | algbw (Gbps): 0.01 | busbw (Gbps): 0.01\n"
    result = imported(tmp_path, written(tmp_path, "log", said.format("broadcast") + said.format("reduce_scatter")))
    assert [row[1] for row in result.calls()] == ["Broadcast"]
    assert result.skipped == [(2, "ReduceScatter among a number of ranks that the log does not contain")]


def test_a_recording_of_railscopes_own_goes_into_the_dataset(tmp_path: Path) -> None:
    path = tmp_path / "railscope-1.npz"
    with path.open("wb") as file:
        write_recording(file, recording(calls=40))
    result = imported(tmp_path, path)
    assert result.imported.recordings == 1
    assert len(result.rows("calls")) == 40


def test_a_damaged_recording_is_one_line_to_the_user(tmp_path: Path) -> None:
    from railscope.agent.dataset.files import DatasetError

    with pytest.raises(DatasetError, match="this is not a railscope recording"):
        imported(tmp_path, written(tmp_path, "railscope-1.npz", b"PK\x03\x04" + b"\0" * 100))


def inspectors(host: str) -> str:
    """A line of the Inspector from this host."""
    return json.dumps(
        {
            "header": {"id": "0x7f", "rank": 0, "n_ranks": 2},
            "metadata": {"dump_timestamp_us": 1_700_000_000_000_000, "hostname": host, "pid": 41},
            "coll_perf": {"coll": "AllReduce", "coll_sn": 1, "coll_msg_size_bytes": 4096, "coll_exec_time_us": 120},
        }
    )


@pytest.mark.parametrize("host", ["..", ".", ".hidden", "a" * 300, "a/../../b", "\ud800", "h\x1b[31mX"])
def test_a_host_of_any_name_has_its_rows_within_the_dataset(tmp_path: Path, host: str) -> None:
    result = imported(tmp_path, written(tmp_path, "log", f"{inspectors(host)}\n{inspectors('a')}\n"))
    assert len(result.calls()) == 2
    assert result.imported.nodes == tuple(sorted(result.imported.nodes, key=lambda one: one.node))
    assert all(one.node.isprintable() for one in result.imported.nodes)
    places = {file.relative_to(result.imported.folder).parts[1] for file in tmp_path.rglob("*.parquet")}
    assert len(places) == 2
    assert not any(place.startswith(".") for place in places)


def test_long_names_that_begin_alike_are_two_hosts(tmp_path: Path) -> None:
    lines = "\n".join(inspectors("a" * 300 + end) for end in "bc")
    result = imported(tmp_path, written(tmp_path, "log", lines))
    assert len({file.parts[-3] for file in (tmp_path / "dataset" / "calls").rglob("*.parquet")}) == 2
    assert [one.calls for one in result.imported.nodes] == [1, 1]


def test_the_same_files_imported_again_take_their_own_place(tmp_path: Path) -> None:
    first, second = (written(tmp_path, name, inspectors(name)) for name in ("a", "b"))
    once = imported(tmp_path, first, second)
    assert not any("already" in note for note in once.imported.problems.notes)
    rows = [{**row, "recording": 0} for row in once.rows("calls", "node")]
    again = imported(tmp_path, second, first, first)
    assert [{**row, "recording": 0} for row in again.rows("calls", "node")] == rows
    assert len(again.rows("recordings")) == 2
    assert sum("already" in note for note in again.imported.problems.notes) == 1
    assert again.imported.nodes == once.imported.nodes


def test_other_files_of_the_same_host_stand_beside_the_first(tmp_path: Path) -> None:
    imported(tmp_path, written(tmp_path, "log", inspectors("a")))
    both = imported(tmp_path, written(tmp_path, "log.1", inspectors("a").replace("4096", "4097")))
    assert [row["node"] for row in both.rows("recordings")] == ["a", "a"]
    assert len(both.calls()) == 2


def test_what_a_killed_import_has_left_does_not_count_twice(tmp_path: Path) -> None:
    log = written(tmp_path, "log", inspectors("a"))
    [row] = imported(tmp_path, log).rows("calls")
    for file in (tmp_path / "dataset" / "recordings").rglob("*.parquet"):
        file.unlink()
    [calls] = (tmp_path / "dataset" / "calls").rglob("*.parquet")
    elsewhere = calls.parent.with_name("2020-01-01T00")
    elsewhere.mkdir()
    calls.rename(elsewhere / calls.name)
    assert imported(tmp_path, log).rows("calls") == [row]


def test_rows_of_many_hosts_are_written_before_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imported_rows, "_MOST_ROWS", 8)
    hosts = ["a", "b", "a", "c", "a", "a", "b", "c", "a"]
    held = []
    flush = imported_rows.ImportedRows._flush_the_most

    def watched(self: imported_rows.ImportedRows) -> None:
        flush(self)
        held.append(self._held)

    monkeypatch.setattr(imported_rows.ImportedRows, "_flush_the_most", watched)
    result = imported(tmp_path, written(tmp_path, "log", "\n".join(map(inspectors, hosts))))
    assert held
    assert max(held) <= 4
    assert {one.node: (one.calls, one.operations) for one in result.imported.nodes} == {
        host: (hosts.count(host), hosts.count(host)) for host in "abc"
    }
    assert len(result.calls()) == len(hosts)


def test_a_node_of_chakras_without_the_time_that_others_have_is_left_out(tmp_path: Path) -> None:
    attributes = [{"name": "comm_type", "int64Val": "0"}, {"name": "comm_size", "int64Val": "4096"}]
    nodes = [
        {"id": "1", "name": "n", "type": "COMM_COLL_NODE", "durationMicros": "8", "attr": attributes, **when}
        for when in ({"startTimeMicros": "1790000000000000"}, {}, {"startTimeMicros": "1790000000000900"})
    ]
    result = imported(tmp_path, written(tmp_path, "gpt.0.json", "\n".join(map(json.dumps, nodes))))
    assert [row["time_ns"] for row in result.rows("calls", "time_ns")] == [179 * 10**16, 179 * 10**16 + 900_000]
    assert result.skipped == [(2, "a node without its time, where others have theirs")]


@pytest.mark.parametrize("peer", [2, -1, 1 << 40, "x", None])
def test_a_peer_that_the_communicator_does_not_have_is_left_out_with_its_line(tmp_path: Path, peer: object) -> None:
    line = json.loads(inspectors("a"))
    line["p2p_perf"] = {
        name.replace("coll", "p2p"): value for name, value in line.pop("coll_perf").items() if name != "coll"
    }
    line["p2p_perf"] |= {"p2p": "Send", "p2p_peer": peer}
    good = json.dumps({**line, "p2p_perf": {**line["p2p_perf"], "p2p_peer": 1}})
    result = imported(tmp_path, written(tmp_path, "log", f"{good}\n{json.dumps(line)}\n"))
    assert result.calls() == [(0, "Send", 4096, 1)]
    assert result.skipped == [(2, f"Send with rank {peer!r} of 2")]


def test_sizes_whose_sums_would_not_fit_are_left_out_with_their_line(tmp_path: Path) -> None:
    line = json.loads(inspectors("a"))
    more = copy.deepcopy(line)
    more["coll_perf"]["coll_msg_size_bytes"] = (1 << 50) + 1
    result = imported(tmp_path / "a", written(tmp_path, "log", f"{json.dumps(line)}\n{json.dumps(more)}\n"))
    assert len(result.calls()) == 1
    assert result.skipped == [(2, f"an impossible size: {(1 << 50) + 1} bytes")]

    said = "comm op: broadcast | time (ms): 1.00 | msg size: {} | algbw (Gbps): 0.01 | busbw (Gbps): 0.01\n"
    log = written(tmp_path, "ds.log", said.format("1.0 PB") + said.format("1.1 PB"))
    result = imported(tmp_path / "b", log)
    assert [row[2] for row in result.calls()] == [1 << 50]
    assert result.skipped == [(2, "an impossible size")]

    trace = (SAMPLES / "gpt.0.json").read_text()
    large = written(tmp_path, "gpt.1.json", trace.replace('"16384"', f'"{(1 << 50) + 1}"'))
    result = imported(tmp_path / "c", SAMPLES / "gpt.0.json", large)
    assert len(result.calls()) == 1
    assert {reason for _, reason in result.skipped} == {"a node with an impossible comm_size"}


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    1 << 31,
    1 << 40,
    1 << 63,
    1 << 80,
    10**400,
    1.5,
    1e300,
    "",
    "x",
    "\ud800",
    "-7",
    [],
    [[]],
    {},
    [None],
)
FILES = {
    "nccl-inspector.log": "nccl-inspector",
    "nccl-profiler.json": "nccl-profiler",
    "nccl-ras.json": "nccl-ras",
    "nccl_trace_rank_1.json": "torch-flight-recorder",
    "pytorch_et_rank1.json": "chakra",
    "pytorch_et_old_rank0.json": "chakra",
    "gpt.0.json": "chakra",
    "gpu-node-1_4101.1700000000123456789.pt.trace.json": "kineto",
}


def mutated(value: Any, dice: random.Random) -> Any:
    """The same with some of its parts replaced."""
    if dice.random() < 0.04:
        return copy.deepcopy(dice.choice(ODD))
    if isinstance(value, dict):
        return {key: mutated(one, dice) for key, one in value.items()}
    return [mutated(one, dice) for one in value] if isinstance(value, list) else value


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(FILES)), st.integers(0, 1 << 30))
def test_no_odd_value_makes_an_importer_fail(name: str, seed: int) -> None:
    dice = random.Random(seed)
    values = json_values((SAMPLES / name).read_text())
    text = "\n".join(json.dumps(mutated(value, dice)) for value in values)
    with tempfile.TemporaryDirectory() as folder:
        file = written(Path(folder), name, text)
        with contextlib.suppress(ImportFailure):
            imported(Path(folder), file, chosen=FILES[name])


def json_values(text: str) -> list[Any]:
    """Values that stand one after the other."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while rest := text[at:].lstrip():
        value, end = decoder.raw_decode(rest)
        values.append(value)
        at = len(text) - len(rest) + end
    return values
