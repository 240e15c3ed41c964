"""PyTorch's profiler traces, flight recorder dumps and execution traces as datasets."""

from __future__ import annotations

import contextlib
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.imports import flight_dump
from railscope.agent.imports.plain_pickle import PickleRefused, read_plain_pickle
from railscope.agent.imports.torch_names import (
    Sizes,
    Transfer,
    UnknownName,
    expand_transfers,
    parse_data_type,
    parse_kernel_name,
    parse_operation,
    parse_whole_numbers,
)
from railscope.probes.nccl.abi import DataType, Op
from tests.unit.importing import SAMPLES, Result, imported, written

BASE_NS = 1_700_000_000_000_000_000
TRACES = sorted(SAMPLES.glob("*.pt.trace.json"))


def trace(*events: dict[str, Any], **header: Any) -> str:
    return json.dumps({"schemaVersion": 1, **header, "traceEvents": list(events)})


def host_side(**arguments: Any) -> dict[str, Any]:
    said = {
        "External id": 1,
        "Collective name": "allreduce",
        "dtype": "Float",
        "In msg nelems": 8,
        "Out msg nelems": 8,
        "Group size": 2,
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]",
        **arguments,
    }
    return {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 7, "tid": 8, "ts": 1.5, "args": said}


def kernel(name: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(a)", **arguments: Any) -> dict[str, Any]:
    own = {"device": 3, "stream": 20, **arguments}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 3, "tid": 20, "ts": 2.5, "dur": 4.25, "args": own}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return imported(tmp_path_factory.mktemp("kineto"), *TRACES)


def test_calls_of_a_trace_have_nccls_meaning_of_count(two_ranks: Result) -> None:
    assert two_ranks.imported.problems.count == 0
    assert two_ranks.calls() == [
        *[(rank, "AllReduce", 4096 * 2, None) for rank in (0, 1)],
        *[(rank, "AllGather", 1024 * 4, None) for rank in (0, 1)],
        *[(rank, "ReduceScatter", 1024 * 4, None) for rank in (0, 1)],
        # An AllToAll of unequal parts is a Send and a Recv for each peer: (300, 100) out and (300, 200) in, of 8 × 2 B.
        *[(0, "Send", 4800, 0), (0, "Send", 1600, 1), (0, "Recv", 4800, 0), (0, "Recv", 3200, 1)],
        *[(1, "Send", 3200, 0), (1, "Send", 8000, 1), (1, "Recv", 1600, 0), (1, "Recv", 8000, 1)],
        *[(0, "Send", 1024, 1), (1, "Recv", 1024, 0)],
    ]


def test_kernels_of_a_trace_are_operations_with_the_times_of_the_gpu(two_ranks: Result) -> None:
    first = two_ranks.rows("operations", "begin_ns")[0]
    assert first["begin_ns"] == BASE_NS + 1_050_500
    assert first["end_ns"] == BASE_NS + 1_130_625
    assert (first["op"], first["algorithm"], first["protocol"], first["channels"]) == ("AllReduce", "Ring", "LL", 16)
    assert (first["payload_bytes"], first["source"], first["stream"]) == (8192, "kernel", 20)
    unequal = [row for row in two_ranks.rows("operations") if row["op"] == "AllToAll"]
    assert [row["payload_bytes"] for row in unequal] == [None, None]


def test_all_other_kernels_are_compute(two_ranks: Result) -> None:
    rows = [row for row in two_ranks.rows("compute", "pid") if not row["copies"]]
    assert [(row["pid"], row["stream"], row["begin_ns"], row["end_ns"]) for row in rows] == [
        (pid, 7, BASE_NS + 1_040_000, BASE_NS + 1_100_000) for pid in (4101, 4102)
    ]
    assert all(row["compute_recorded"] for row in two_ranks.rows("recordings"))


def test_groups_of_a_trace_are_communicators_of_the_same_name_on_all_ranks(two_ranks: Result) -> None:
    ends = two_ranks.rows("communicators", "group_name", "rank")
    assert [(row["group_name"], row["rank"], row["nranks"], row["pid"], row["gpu"]) for row in ends] == [
        ("default_pg", 0, 2, 4101, "0"),
        ("default_pg", 1, 2, 4102, "1"),
        ("tp", 0, 2, 4101, "0"),
        ("tp", 1, 2, 4102, "1"),
    ]
    assert len({row["comm"] for row in ends}) == 2
    assert {row["node"] for row in ends} == {"gpu-node-1"}
    assert [row["world_rank"] for row in ends] == [0, 1, 0, 1]


def test_without_the_hosts_side_each_kernel_is_a_call_too(tmp_path: Path) -> None:
    arguments = host_side()["args"]
    text = trace(kernel(**arguments), kernel(**{**arguments, "External id": 2}))
    result = imported(tmp_path, written(tmp_path, "rank0.json", text))
    assert [row[1:3] for row in result.calls()] == [("AllReduce", 32)] * 2


def test_a_kernel_counts_once_wherever_its_hosts_side_stands(tmp_path: Path) -> None:
    arguments = host_side()["args"]
    for name, events in (
        ("before", [host_side(), kernel(**arguments)]),
        ("behind", [kernel(**arguments), host_side()]),
    ):
        result = imported(tmp_path / name, written(tmp_path, f"{name}_rank0.json", trace(*events)))
        assert len(result.calls()) == 1


def test_the_time_base_counts_where_it_stands_behind_the_events(tmp_path: Path) -> None:
    text = f'{{"traceEvents": [{json.dumps(host_side())}], "baseTimeNanoseconds": {BASE_NS}}}'
    assert imported(tmp_path, written(tmp_path, "t.json", text)).rows("calls")[0]["time_ns"] == BASE_NS + 1500


def test_kernels_of_old_traces_have_times_and_no_sizes(tmp_path: Path) -> None:
    file = written(tmp_path, "t.json", trace(kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)")))
    result = imported(tmp_path, file)
    row = result.rows("operations")[0]
    assert (row["op"], row["payload_bytes"], row["end_ns"] - row["begin_ns"]) == ("SendRecv", None, 4250)
    # Nothing says whose it is: it stands for no communicator.
    (end,) = result.rows("communicators")
    assert (end["comm"], end["rank"], end["attributed"]) == (None, None, False)
    assert find_gpus(result.dataset).communicators == ()
    (note,) = (note for note in result.imported.problems.notes if "1 of 1 communication kernel does not say" in note)
    assert "PyTorch" not in note


def test_lists_of_ranks_that_are_cut_short_are_taken_from_the_job(tmp_path: Path) -> None:
    ranks = list(range(0, 80, 2))
    config = {"rank": 4, "pg_config": [{"pg_name": "9", "pg_desc": "dp", "pg_size": 40, "ranks": ranks}]}
    said = {"Process Group Name": "9", "Process Group Ranks": "[0, 2, 4, ...]", "Group size": 40}
    text = trace(host_side(**said), distributedInfo=config)
    end = imported(tmp_path, written(tmp_path, "t.json", text)).rows("communicators")[0]
    assert (end["rank"], end["nranks"], end["group_name"]) == (2, 40, "dp")


def test_events_that_make_no_sense_are_counted_with_their_line(tmp_path: Path) -> None:
    events = [
        json.dumps(host_side()),
        '{"ph": "X", "cat": "kernel", "name": "x", "ts": }',
        json.dumps({**kernel(), "ts": "soon"}),
        json.dumps(host_side(dtype="ComplexFloat")),
        json.dumps(host_side(**{"Collective name": "make_coffee"})),
        "7",
        json.dumps(host_side(**{"External id": 2})),
    ]
    text = '{"traceEvents": [\n' + ",\n".join(events) + "\n]}"
    result = imported(tmp_path, written(tmp_path, "t.json", text))
    assert len(result.calls()) == 2
    assert [line for line, _ in result.skipped] == [3, 4, 5, 6, 7]
    assert "'ComplexFloat'" in result.skipped[2][1]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"traceEvents": ' + '[{"a":' * 100_000, '{"traceEvents": [1' + "1" * 5000]
)
def test_json_that_is_nested_too_deep_is_one_problem_and_no_failure(tmp_path: Path, text: str) -> None:
    good = written(tmp_path, "good_rank0.json", trace(host_side()))
    result = imported(tmp_path, good, written(tmp_path, "deep.json", text), chosen="kineto")
    assert len(result.calls()) == 1
    assert result.imported.problems.count >= 1


def test_a_truncated_trace_keeps_what_came_before(tmp_path: Path) -> None:
    text = trace(host_side(), kernel(**host_side()["args"]))
    result = imported(tmp_path, written(tmp_path, "t.json", text[: text.rindex('"dur"')]))
    assert len(result.calls()) == 1
    assert any("no JSON" in reason for _, reason in result.skipped)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dump_of_the_flight_recorder_is_read_from_a_pickle_and_from_json(tmp_path: Path, rank: int) -> None:
    file = SAMPLES / ("nccl_trace_rank_0" if rank == 0 else "nccl_trace_rank_1.json")
    result = imported(tmp_path, file)
    assert result.imported.problems.count == 0
    assert result.calls() == [
        (rank, "AllReduce", 128 * 4, None),
        (rank, "AllGather", 100 * 2, None),
        (rank, "ReduceScatter", 100 * 2, None),
        (rank, "Send", 256, 1) if rank == 0 else (rank, "Recv", 256, 0),
        (rank, "AllReduce", 28, None),
    ]
    operations = result.rows("operations", "begin_ns")
    # The GPU's own time where the dump has it, what the watchdog noticed where not, nothing of what is not over.
    assert [row["end_ns"] - row["begin_ns"] for row in operations] == [250_000, 500_000, 500_000, 500_000]
    ends = result.rows("communicators", "group_name")
    assert [(row["group_name"], row["rank"], row["nranks"], row["world_rank"]) for row in ends] == [
        ("default_pg", rank, 2, rank),
        ("dp", rank, 2, rank),
    ]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", "3"),
        ("dump12.json", "12"),
        ("nccl_trace_rank_4.pkl", "4"),
        ("dump", ""),
        ("7th.pickle", ""),
    ],
)
def test_the_rank_of_a_dump_is_the_number_at_the_end_of_its_file_s_name(name: str, rank: str) -> None:
    assert flight_dump.rank_text_in_name(name) == rank


def test_both_ranks_dumps_name_their_communicators_alike(tmp_path: Path) -> None:
    result = imported(tmp_path, SAMPLES / "nccl_trace_rank_0", SAMPLES / "nccl_trace_rank_1.json", node="gpu-node-1")
    assert len({row["comm"] for row in result.rows("communicators")}) == 2
    assert {row["node"] for row in result.rows("calls")} == {"gpu-node-1"}
    gpus = find_gpus(result.dataset)
    assert [(gpu.number, gpu.world_rank) for gpu in gpus.gpus] == [(0, 0), (1, 1)]
    assert [dict(one.members) for one in gpus.communicators] == [{0: 0, 1: 1}] * 2


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(tempfile.gettempdir()) / "a-pickle-was-run",))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_asks_for_more_than_plain_data_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps({"entries": [_Harmful()]}, protocol=protocol)
    with pytest.raises(PickleRefused, match="more than plain data"):
        read_plain_pickle(content)
    good = SAMPLES / "nccl_trace_rank_0"
    result = imported(tmp_path, good, written(tmp_path, "nccl_trace_rank_5", content))
    assert len(result.calls()) == 5
    assert "more than plain data" in result.skipped[0][1]
    assert not (Path(tempfile.gettempdir()) / "a-pickle-was-run").exists()


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=12)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4), st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@given(PLAIN, st.integers(2, 5))
def test_plain_data_comes_out_of_a_pickle_as_it_went_in(value: Any, protocol: int) -> None:
    assert read_plain_pickle(pickle.dumps(value, protocol=protocol)) == value


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_of_pickles_fail_otherwise(content: bytes) -> None:
    for tried in (content, b"\x80\x02" + content, content + b"."):
        with contextlib.suppress(PickleRefused):
            read_plain_pickle(tried)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x80\x02}" + b")" + b"\x85" * 400_000 + b"K\x01s.", id="deep tuple as a key"),
        pytest.param(b"\x80\x02})K\x01s.", id="tuple as a key"),
        pytest.param(b"\x80\x02(" + b")" + b"\x85" * 400_000 + b"K\x01d.", id="deep tuple as a first key"),
        pytest.param(b"\x80\x02" + b"]" * 1000 + b"a" * 999 + b".", id="deep list"),
        pytest.param(b"\x80\x02" + b"}U\x01a" * 1000 + b"K\x01" + b"s" * 1000 + b".", id="deep dictionary"),
    ],
)
def test_a_pickle_that_is_nested_too_deep_or_has_odd_keys_is_refused(content: bytes) -> None:
    with pytest.raises(PickleRefused, match="not read"):
        read_plain_pickle(content)


def _folded(levels: int) -> list[Any]:
    """A list of so many levels that holds one four times over at each."""
    value: list[Any] = [1]
    for _ in range(levels):
        value = [value] * 4
    return value


_GROWING = b"\x80\x02" + b"".join(b"]q%c0" % number for number in range(40))
"""Forty empty lists, by number."""
_GROWN_LATER = _GROWING + b"".join(b"h%c(" % at + b"h%c" % (at + 1) * 4 + b"e0" for at in range(39)) + b"h\x00."
"""Each holds the next one four times, and grows after the one before has taken it in."""


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(pickle.dumps(_folded(30)), id="the same list again and again"),
        pytest.param(pickle.dumps(["x" * 1_000_000] * 10_000), id="the same text again and again"),
        pytest.param(_GROWN_LATER, id="lists that grow later"),
        pytest.param(b"\x80\x02]q\x00h\x00ah\x00a.", id="a list in itself"),
        pytest.param(pickle.dumps([[1 << 20_000]]), id="a number that no text can hold"),
    ],
)
def test_a_pickle_that_is_small_and_whose_value_is_not_is_refused(content: bytes) -> None:
    with pytest.raises(PickleRefused, match="not read"):
        read_plain_pickle(content)


@pytest.mark.parametrize("field", ["input_sizes", "input_dtypes", "process_group", "pg_id", "thread_id"])
def test_a_dump_whose_entry_unfolds_to_more_than_memory_is_left_out(tmp_path: Path, field: str) -> None:
    entry = {"profiling_name": "nccl:all_reduce", "input_sizes": [[3]], "output_sizes": [[3]], "duration_ms": 1.5}
    entry |= {"time_created_ns": 5, "time_discovered_completed_ns": 9_000_000, "input_dtypes": ["Float"]}
    content = pickle.dumps({"entries": [{**entry, field: _folded(30)}]})
    good = SAMPLES / "nccl_trace_rank_0"
    result = imported(tmp_path, good, written(tmp_path, "nccl_trace_rank_5", content))
    assert len(result.calls()) == 5
    assert "again and again" in result.skipped[0][1]


def test_a_pickle_that_claims_to_be_huge_costs_nothing() -> None:
    for content in (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fx.", b"\x80\x02]r\xff\xff\xff\x7f."):
        with contextlib.suppress(PickleRefused):
            read_plain_pickle(content)


KEYS = (
    "profiling_name",
    "process_group",
    "input_sizes",
    "output_sizes",
    "input_dtypes",
    "time_created_ns",
    "thread_id",
)
VALUES = st.one_of(PLAIN, st.just("nccl:all_reduce"), st.just([[3]]), st.just(["Float"]), st.just(1 << 63))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=7), max_size=5))
def test_no_entries_make_the_flight_recorders_importer_fail(entries: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = written(Path(folder), "odd_rank_1", pickle.dumps({"entries": entries}, protocol=2))
        result = imported(Path(folder), SAMPLES / "nccl_trace_rank_0", file)
        assert len(result.calls()) >= 5


def test_names_without_an_end_and_numbers_of_many_digits_cost_their_entry_alone(tmp_path: Path) -> None:
    entry = {
        "process_group": ["0", ""], "profiling_name": "nccl:send " + "a" * 300_000, "time_created_ns": BASE_NS,
        "input_sizes": [[3, 4]], "input_dtypes": ["Float"], "output_sizes": [[3, 4]],
        "time_discovered_completed_ns": BASE_NS, "duration_ms": 10**400,
    }  # fmt: skip
    dump = {"pg_config": {}, "entries": [entry, {**entry, "profiling_name": "nccl:send 0->1"}]}
    result = imported(tmp_path, written(tmp_path, "nccl_trace_rank_0.json", json.dumps(dump)))
    assert sorted(row["peer"] or 0 for row in result.rows("calls")) == [0, 1]
    assert result.rows("operations") == []


def test_an_event_whose_time_cannot_be_is_left_out(tmp_path: Path) -> None:
    odd = [{**host_side(), "ts": time} for time in (10**400, -5, "nan", float("inf"))]
    result = imported(tmp_path, written(tmp_path, "rank0.json", trace(*odd, host_side())))
    assert len(result.calls()) == 1
    assert [reason for _, reason in result.skipped] == [
        "an event without its time", "an event before 1970", *["an event without its time"] * 2
    ]  # fmt: skip


@pytest.mark.parametrize("elements", [(1 << 48) + 1, 1 << 50])
def test_sizes_whose_sums_would_not_fit_are_left_out(tmp_path: Path, elements: int) -> None:
    reason = f"an impossible size: {elements} elements"
    events = [host_side(**{"In msg nelems": number}) for number in (elements, 1 << 48)]
    result = imported(tmp_path / "trace", written(tmp_path, "rank0.json", trace(*events)))
    assert [row[2] for row in result.calls()] == [1 << 50]
    assert [said for _, said in result.skipped] == [reason]
    entry = {
        "process_group": ["0", ""], "profiling_name": "nccl:send 0->1", "time_created_ns": BASE_NS,
        "input_sizes": [[3, 4]], "input_dtypes": ["Float"], "output_sizes": [[3, 4]],
    }  # fmt: skip
    dump = {"pg_config": {}, "entries": [entry, {**entry, "input_sizes": [[elements, 1]]}]}
    result = imported(tmp_path / "dump", written(tmp_path, "nccl_trace_rank_0.json", json.dumps(dump)))
    assert [row[2] for row in result.calls()] == [48]
    assert [said for _, said in result.skipped] == [reason]


def test_execution_traces_of_both_kinds_give_their_calls_in_order(tmp_path: Path) -> None:
    new = imported(tmp_path / "new", SAMPLES / "pytorch_et_rank1.json")
    assert new.calls() == [(1, "AllReduce", 4096, None)]
    end = new.rows("communicators")[0]
    assert (end["nranks"], end["world_rank"], end["group_name"], end["pid"]) == (2, 1, "default_pg", 4101)
    old = imported(tmp_path / "old", SAMPLES / "pytorch_et_old_rank0.json")
    assert old.calls() == [(0, "AllGather", 1024, None)]
    assert not new.imported.times_known
    assert not old.imported.times_known


@pytest.mark.parametrize(
    ("op", "sizes", "expected"),
    [
        (Op.AllReduce, Sizes(12, 12, 4), [Transfer(Op.AllReduce, 12)]),
        (Op.AllGather, Sizes(12, 48, 4), [Transfer(Op.AllGather, 12)]),
        (Op.ReduceScatter, Sizes(48, 12, 4), [Transfer(Op.ReduceScatter, 12)]),
        (Op.AllToAll, Sizes(48, 48, 4), [Transfer(Op.AllToAll, 12)]),
        (Op.Gather, Sizes(12, 48, 4), [Transfer(Op.Gather, 12, 1)]),
        (Op.Gather, Sizes(12, 0, 4), [Transfer(Op.Gather, 12, 1)]),
        (Op.Scatter, Sizes(0, 12, 4), [Transfer(Op.Scatter, 12, 1)]),
        (Op.Send, Sizes(12, 0, None), [Transfer(Op.Send, 12, 1)]),
        (Op.Recv, Sizes(0, 12, None), [Transfer(Op.Recv, 12, 1)]),
    ],
)
def test_sizes_of_tensors_become_nccls_counts(op: Op, sizes: Sizes, expected: list[Transfer]) -> None:
    assert expand_transfers(op, sizes, 1) == expected


@pytest.mark.parametrize("sizes", [Sizes(50, 50, 4), Sizes(48, 48, None), Sizes(7, 7, 2, (1, 2), (2, 1))])
def test_an_all_to_all_whose_parts_are_not_known_is_not_made_up(sizes: Sizes) -> None:
    with pytest.raises(UnknownName):
        expand_transfers(Op.AllToAll, sizes, None)


def test_names_of_operations_and_types_in_every_spelling() -> None:
    for name in ("allreduce", "all_reduce", "nccl:all_reduce", "c10d::allreduce_", "nccl:all_reduce_barrier"):
        assert parse_operation(name) is Op.AllReduce
    for name in ("_allgather_base", "nccl:_all_gather_base", "all_gather_into_tensor", "ALLGATHER_coalesced"):
        assert parse_operation(name) is Op.AllGather
    assert parse_operation("nccl:send 0->1") is Op.Send
    assert parse_operation("wait") is None
    assert parse_data_type("c10::BFloat16") is parse_data_type("BFloat16") is DataType.Bfloat16
    assert parse_data_type("long int") is DataType.Int64


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", ("AllReduce", "Ring", "LL")),
        ("ncclKernel_AllGather_TREE_LL128_Sum_int8_t(ncclDevComm*)", ("AllGather", "Tree", "LL128")),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_NVLS_SIMPLE(a)", ("ReduceScatter", "NVLS", "Simple")),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", ("SendRecv", "", "")),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", ("", "", "")),
        ("nccl", ("", "", "")),
    ],
)
def test_what_names_of_kernels_say(name: str, expected: tuple[str, str, str]) -> None:
    said = parse_kernel_name(name)
    assert (said.op, said.algorithm, said.protocol) == expected


def test_lists_in_texts() -> None:
    assert parse_whole_numbers("[0, 1, 12]") == (0, 1, 12)
    assert parse_whole_numbers("[]") == parse_whole_numbers([]) == ()
    for text in ("[0, 1, ...]", "0, 1", "[a]", 7, None, [1.5], [True]):
        assert parse_whole_numbers(text) is None


def test_a_peer_that_is_not_in_the_group_is_left_out(tmp_path: Path) -> None:
    sends = [
        host_side(**{"Collective name": "send", "Dst Rank": peer, "Process Group Ranks": "[4, 6]"}) for peer in (6, 5)
    ]
    result = imported(tmp_path, written(tmp_path, "rank4.json", trace(*sends)))
    assert [(row["op"], row["peer"]) for row in result.rows("calls")] == [("Send", 1)]
    assert [reason for _, reason in result.skipped] == ["Send with rank 5, which is not in the group"]
    dump = json.loads((SAMPLES / "nccl_trace_rank_1.json").read_text())
    entry = {**dump["entries"][0], "is_p2p": True}
    entries = [{**entry, "profiling_name": f"nccl:send 0->{peer}"} for peer in (1, 7)]
    result = imported(tmp_path / "b", written(tmp_path, "dump_0.json", json.dumps({**dump, "entries": entries})))
    assert [(row["op"], row["peer"]) for row in result.rows("calls")] == [("Send", 1)]
    assert [reason for _, reason in result.skipped] == ["Send with rank 7 of 2"]


def test_parts_of_an_all_to_all_for_more_ranks_than_there_are_are_left_out() -> None:
    with pytest.raises(UnknownName, match="an AllToAll of 3 parts among 2 ranks"):
        expand_transfers(Op.AllToAll, Sizes(6, 6, 2, (1, 2, 3), (2, 2, 2)), None)
