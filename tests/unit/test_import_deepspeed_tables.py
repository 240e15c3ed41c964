"""DeepSpeed's batches of point to point, other operations of its log, and the tables of `log_summary()`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import pytest

from tests.unit.importing import imported, written

RANKS: Final = 8


def size_text(size: int) -> str:
    """As DeepSpeed's convert_size has it."""
    if size == 0:
        return "0B"
    power = math.floor(math.log(size, 1024))
    return f"{round(size / 1024**power, 2)} {('B', 'KB', 'MB', 'GB')[power]}"


def bandwidths(op: str, size: int, length_ms: float) -> tuple[float, float]:
    """As DeepSpeed's calc_bw_log has them, in Gbit/s."""
    share = (RANKS - 1) / RANKS
    if op.startswith("all_gather"):
        size *= RANKS
    if op.startswith("all_reduce"):
        return 2 * size / length_ms * 8e-6, 2 * share * size / length_ms * 8e-6
    whole = size / length_ms * 8e-6
    return whole, whole * (share if op.startswith(("all_", "reduce_scatter")) else 1)


def line(op: str, size: int, length_ms: float) -> str:
    algbw, busbw = bandwidths(op, size, length_ms)
    return (
        f"[2026-01-06 10:11:12,123] [INFO] [logging.py:107:log_dist] [Rank 0] comm op: {op} | "
        f"time (ms): {length_ms:.2f} | msg size: {size_text(size)} | "
        f"algbw (Gbps): {algbw:.2f} | busbw (Gbps): {busbw:.2f}"
    )


Table = dict[str, list[tuple[int, int, float]]]


def table(content: Table) -> str:
    """As DeepSpeed's log_all prints it: sizes, counts and lengths of one by operation."""
    heads = (
        "Comm. Op",
        "Message Size",
        "Count",
        "Total Latency(ms)",
        "Avg Latency(ms)",
        "tput_avg (Gbps)",
        "busbw_avg (Gbps)",
    )
    made = ["".join(f"{head: <20}" for head in heads)]
    for op, rows in content.items():
        made.append(op)
        for size, count, length_ms in rows:
            algbw, busbw = bandwidths(op, size, length_ms)
            values = (count, f"{count * length_ms:.2f}", f"{length_ms:.2f}", f"{algbw:.2f}", f"{busbw:.2f}")
            made.append(f"{' ': <20}{size_text(size): <20}" + "".join(f"{value: <20}" for value in values))
    return "\n".join(made) + "\n"


SUMMARY: Final[Table] = {
    "broadcast": [(2048, 146, 0.08)],
    "all_reduce": [(64 << 20, 100, 8.25), (4096, 7, 0.5)],
    "reduce_scatter_tensor": [(512 << 20, 3, 3.6)],
    "all_to_all_single": [(80 << 20, 2, 2.0)],
    "batch_isend_irecv": [(1 << 20, 5, 0.2)],
    "barrier": [(0, 1, 0.05)],
}
EXPECTED: Final = {
    ("Broadcast", 2048): 146,
    ("AllReduce", 64 << 20): 100,
    ("AllReduce", 4096): 7,
    ("ReduceScatter", 64 << 20): 3,
    ("AllToAll", 10 << 20): 2,
    ("SendRecv", 1 << 20): 5,
    ("AllReduce", 0): 1,
}


def counts(folder: Path, content: str, ranks: int | None = None) -> dict[tuple[str, int], int]:
    result = imported(folder, written(folder, "train.log", content), ranks=ranks)
    found: dict[tuple[str, int], int] = {}
    for row in result.rows("calls"):
        key = row["op"], row["payload_bytes"]
        found[key] = found.get(key, 0) + 1
    return found


def test_batches_and_lists_of_objects_are_operations_too(tmp_path: Path) -> None:
    ops = (
        "batch_isend_irecv",
        "broadcast_object_list",
        "isend",
        "irecv",
        "inference_all_reduce",
        "all_reduce_coalesced",
    )
    content = "\n".join(line(op, 1 << 20, 0.2) for op in ops)
    result = imported(tmp_path, written(tmp_path, "train.log", content))
    assert result.imported.problems.count == 0
    assert [row["op"] for row in result.rows("calls", "time_ns")] == [
        "SendRecv", "Broadcast", "Send", "Recv", "AllReduce", "AllReduce"
    ]  # fmt: skip
    assert {row["payload_bytes"] for row in result.rows("operations")} == {1 << 20}


def test_a_table_tells_how_many_operations_there_were(tmp_path: Path) -> None:
    assert counts(tmp_path, table(SUMMARY)) == EXPECTED
    result = imported(tmp_path, tmp_path / "train.log")
    assert result.imported.problems.count == 0
    assert not result.imported.times_known
    assert {row["nranks"] for row in result.rows("communicators")} == {RANKS}
    lengths = [row["end_ns"] - row["begin_ns"] for row in result.rows("operations") if row["payload_bytes"] == 64 << 20]
    assert sum(lengths) == pytest.approx((100 * 8.25 + 3 * 3.6) * 1e6)


def test_of_several_tables_the_last_one_counts_and_that_of_stragglers_does_not(tmp_path: Path) -> None:
    straggling = table(SUMMARY).replace("Total Latency(ms)", "Total comm lat(ms)").replace("tput_avg", "Avg comm lat")
    content = f"{table({'broadcast': [(2048, 9, 0.08)]})}step 10\n{table(SUMMARY)}_____\nBreakdown\n-----\n{straggling}"
    assert counts(tmp_path, content) == EXPECTED


def test_a_table_beside_lines_of_single_operations_is_not_counted_again(tmp_path: Path) -> None:
    content = f"{line('all_reduce', 4 << 20, 0.5)}\n{table(SUMMARY)}"
    assert counts(tmp_path, content) == {("AllReduce", 4 << 20): 1}


def test_the_user_says_how_many_ranks_there_are_where_bandwidths_do_not(tmp_path: Path) -> None:
    only = table({"reduce_scatter_tensor": [(8192, 2, 900.0)]})
    assert counts(tmp_path, only, ranks=4) == {("ReduceScatter", 2048): 2}


def test_a_row_of_very_many_operations_is_left_out(tmp_path: Path) -> None:
    big = table({"broadcast": [(2048, 1 << 39, 0.08), (4096, 2, 0.1)]})
    assert counts(tmp_path, big) == {("Broadcast", 4096): 2}
