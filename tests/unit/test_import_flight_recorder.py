"""Dumps of PyTorch's flight recorder by newer PyTorch and torchcomms: their names, coalesced groups, and places."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.unit.importing import Result, imported, written

BEGAN_NS: Final = 1_790_000_000_000_000_000
Sizes = Sequence[Sequence[int]]
NAMES: Final[tuple[tuple[str, Sizes, Sizes, tuple[tuple[str, int], ...]], ...]] = (
    ("all_reduce", [[100]], [[100]], (("AllReduce", 100),)),
    ("all_gather_single", [[10]], [[40]], (("AllGather", 10),)),
    ("all_gather_v", [[10]], [[10], [12], [8], [10]], (("AllGather", 10),)),
    ("reduce_scatter_single", [[40]], [[10]], (("ReduceScatter", 10),)),
    ("reduce_scatter_v", [[10], [12], [8], [10]], [[10]], (("ReduceScatter", 10),)),
    ("all_to_all_v_single", [[40]], [[40]], (("AllToAll", 10),)),
    ("all_to_all_single", [[40]], [[40]], (("AllToAll", 10),)),
    ("gather_single", [[10]], [[40]], (("Gather", 10),)),
    ("_reduce_oop", [[10]], [[10]], (("Reduce", 10),)),
    ("_broadcast_oop", [[10]], [[10]], (("Broadcast", 10),)),
    ("REDUCE_SCATTER_coalesced", [], [], ()),
    ("ALLGATHER_coalesced", [], [], ()),
    ("ALLGATHER_coalesced", [[]], [[]], ()),
    ("REDUCE_SCATTER_coalesced", [[]], [[]], ()),
    ("coalesced", [], [], ()),
    ("coalesced", [[]], [[]], ()),
    ("allreduce_coalesced", [[]], [[]], (("AllReduce", 1),)),
    ("barrier", [[1]], [[1]], (("AllReduce", 1),)),
    ("split", [], [], ()),
    ("new_window", [], [], ()),
    ("finalize", [], [], ()),
    ("batch_op_issue", [], [], ()),
    ("reduce_scatter_tensor_coalesced", [[40], [80]], [[10], [20]], (("ReduceScatter", 10), ("ReduceScatter", 20))),
    ("all_gather_into_tensor_coalesced", [[10], [20]], [[40], [80]], (("AllGather", 10), ("AllGather", 20))),
    ("allreduce_coalesced", [[10], [20]], [[10], [20]], (("AllReduce", 10), ("AllReduce", 20))),
    ("all_reduce_barrier", [[1]], [[1]], (("AllReduce", 1),)),
    ("gather", [[10]], [[10]] * 4, (("Gather", 10),)),
    ("scatter", [[10]] * 4, [[10]], (("Scatter", 10),)),
)


def entry(number: int, name: str, inputs: Sizes, outputs: Sizes, **said: Any) -> dict[str, Any]:
    return {
        "record_id": number,
        "pg_id": 7,
        "process_group": ["7", "fsdp"],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": name,
        "time_created_ns": BEGAN_NS + number * 1_000_000,
        "input_sizes": inputs,
        "output_sizes": outputs,
        "input_dtypes": ["BFloat16"] * len(inputs),
        "output_dtypes": ["BFloat16"] * len(outputs),
        "is_p2p": False,
        "state": "scheduled",
        **said,
    }


def done(number: int, length_ms: float = 0.25) -> dict[str, Any]:
    end_ns = BEGAN_NS + number * 1_000_000 + 500_000
    return {"state": "completed", "time_discovered_completed_ns": end_ns, "duration_ms": length_ms}


def dump(folder: Path, *entries: dict[str, Any]) -> Result:
    config = {"7": {"name": "7", "desc": "fsdp", "ranks": "[0, 1, 2, 3]"}}
    # As PyTorch writes it: one line.
    content = json.dumps({"version": "2.10", "pg_config": config, "entries": entries})
    return imported(folder, written(folder, "nccl_trace_rank_0.json", content))


@pytest.mark.parametrize("library", ["nccl", "ncclx", "rcclx", "xccl"])
def test_every_name_of_newer_pytorch_and_torchcomms_is_the_call_that_it_makes(tmp_path: Path, library: str) -> None:
    made = [entry(at, f"{library}:{name}", *sizes, **done(at)) for at, (name, *sizes, _) in enumerate(NAMES)]
    result = dump(tmp_path, *made)
    assert result.imported.problems.count == 0
    expected = [(at, op, 2 * elements) for at, (*_, calls) in enumerate(NAMES) for op, elements in calls]
    rows = result.rows("calls", "time_ns")
    assert [(row["sequence"], row["op"], row["payload_bytes"]) for row in rows] == expected
    assert len(result.rows("operations")) == sum(1 for *_, calls in NAMES if calls)


def test_what_was_sent_and_received_in_one_batch_is_one_operation_with_the_times_of_its_end(tmp_path: Path) -> None:
    batch: dict[str, Any] = {"is_p2p": True, "p2p_seq_id": 3, "collective_seq_id": 5}
    result = dump(
        tmp_path,
        entry(1, "nccl:send 0->1", [[64]], [[64]], **batch),
        entry(2, "nccl:recv 0<-3", [[16]], [[16]], **batch),
        entry(3, "nccl:coalesced", [], [], **batch, **done(3, 2.0)),
        entry(4, "nccl:send 0->2", [[8]], [[8]], **{**batch, "p2p_seq_id": 4}, **done(4)),
    )
    assert result.calls() == [(0, "Send", 128, 1), (0, "Recv", 32, 3), (0, "Send", 16, 2)]
    rows = result.rows("operations", "begin_ns")
    assert [(row["op"], row["payload_bytes"], row["peer"], row["end_ns"] - row["begin_ns"]) for row in rows] == [
        ("SendRecv", None, None, 2_000_000),
        ("Send", 16, 2, 250_000),
    ]


def test_gathers_that_were_called_together_are_one_operation(tmp_path: Path) -> None:
    together: dict[str, Any] = {"collective_seq_id": 9}
    result = dump(
        tmp_path,
        *(entry(at, "nccl:_all_gather_base", [[8 * at]], [[32 * at]], **together) for at in (1, 2)),
        entry(3, "nccl:ALLGATHER_coalesced", [], [], **together, **done(3, 1.5)),
    )
    assert [row[1:3] for row in result.calls()] == [("AllGather", 16), ("AllGather", 32)]
    rows = result.rows("operations")
    assert [(row["op"], row["sequence"], row["end_ns"] - row["begin_ns"]) for row in rows] == [
        ("AllGather", 9, 1_500_000)
    ]


def test_what_is_left_out_of_a_dump_of_one_line_is_told_apart_by_the_number_of_its_entry(tmp_path: Path) -> None:
    result = dump(tmp_path, entry(1, "nccl:all_reduce", [[4]], [[4]]), entry(2, "nccl:teleport", [[4]], [[4]]))
    file = tmp_path / "nccl_trace_rank_0.json"
    assert [str(one) for one in result.imported.problems.first] == [
        f"{file}:1: entry 2: an unknown operation: 'nccl:teleport'"
    ]


def test_a_dump_of_a_hang_is_said_to_be_one(tmp_path: Path) -> None:
    waits = [entry(1, "nccl:all_reduce", [[4]], [[4]], **done(1)), entry(2, "nccl:all_reduce", [[4]], [[4]])]
    batch: dict[str, Any] = {"is_p2p": True, "p2p_seq_id": 3}
    whole = [
        entry(3, "nccl:send 0->1", [[64]], [[64]], **batch),
        entry(4, "nccl:coalesced", [], [], **batch, **done(4)),
    ]
    said = "if the job hangs, railscope diagnose FILE… says who is to blame"
    note = f"1 operation is not complete in these dumps: {said}"
    assert note in dump(tmp_path, *waits, *whole).imported.problems.notes
    healthy = tmp_path / "healthy"
    healthy.mkdir()
    assert not any(said in one for one in dump(healthy, waits[0], *whole).imported.problems.notes)
