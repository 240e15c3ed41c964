"""How many ranks the groups of Chakra's traces have: what the trace says, or the user, or nobody; and odd metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from railscope.agent.imports.chakra import has_format
from tests.unit.importing import Result, imported, written

ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER = 0, 6, 7
COLLECTIVE: Final = 7
UNKNOWN: Final = (
    "these traces do not say how many ranks their groups have, so payload of ReduceScatter and AllToAll is unknown: "
    "with the files of all N ranks of the job, --ranks N says it"
)


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def numbered(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def text(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def attribute(name: str, value: int | str) -> bytes:
    said = numbered(9, value) if isinstance(value, int) else text(29, value.encode())
    return text(10, text(1, name.encode()) + said)


def node(number: int, name: str, kind: int, *attributes: bytes, inputs: str = "") -> bytes:
    listed = text(8, text(1, inputs.encode())) if inputs else b""
    return numbered(1, number) + text(2, name.encode()) + numbered(3, kind) + listed + b"".join(attributes)


def collective(number: int, kind: int, size: int, **more: int | str) -> bytes:
    said = {"comm_type": kind, "comm_size": size, **more}
    return node(number, f"step{number}", COLLECTIVE, *(attribute(name, value) for name, value in said.items()))


def metadata(letters: int) -> bytes:
    attributes = text(2, text(1, b"input_file") + text(29, b"x" * letters)) if letters else b""
    return text(1, b"0.0.4") + attributes


def trace(folder: Path, rank: int, *messages: bytes, first: bytes = b"\x0a\x050.0.4") -> Path:
    content = b"".join(varint(len(message)) + message for message in (first, *messages))
    return written(folder, f"job.{rank}.et", content)


def job(folder: Path, ranks: Sequence[int], said: int | None = None, **more: int | str) -> Result:
    nodes = (collective(1, REDUCE_SCATTER, 800_000, **more), collective(2, ALL_TO_ALL, 1_600_000, **more))
    return imported(folder, *(trace(folder, rank, *nodes) for rank in ranks), ranks=said)


@pytest.mark.parametrize("ranks", [(3,), (0, 1, 2, 3), tuple(range(8))])
def test_a_group_has_not_as_many_ranks_as_files_were_given(tmp_path: Path, ranks: Sequence[int]) -> None:
    result = job(tmp_path, ranks)
    assert {row[1:] for row in result.calls()} == {("ReduceScatter", None, None), ("AllToAll", None, None)}
    assert {row["nranks"] for row in result.rows("communicators")} == {None}
    assert {row["rank"] for row in result.rows("communicators")} == set(ranks)
    assert UNKNOWN in result.imported.problems.notes


@pytest.mark.parametrize("ranks", [(3,), (0, 1, 2, 3), tuple(range(8))])
def test_the_user_says_how_many_ranks_the_job_has(tmp_path: Path, ranks: Sequence[int]) -> None:
    result = job(tmp_path, ranks, said=8)
    assert {row[1:] for row in result.calls()} == {("ReduceScatter", 100_000, None), ("AllToAll", 200_000, None)}
    assert {row["nranks"] for row in result.rows("communicators")} == {8}
    assert UNKNOWN not in result.imported.problems.notes


def test_of_a_group_of_some_the_size_of_the_job_tells_nothing_unless_all_files_are_there(tmp_path: Path) -> None:
    assert {row[2] for row in job(tmp_path, (0, 1), said=8, pg_name="tp").calls()} == {None}
    both = job(tmp_path / "..", (0, 1), said=2, pg_name="tp")
    assert {row[2] for row in both.calls()} == {400_000, 800_000}


def test_a_node_says_the_size_of_its_group(tmp_path: Path) -> None:
    result = job(tmp_path, (5,), pg_name="tp", pg_size=4)
    assert [row[2] for row in result.calls()] == [200_000, 400_000]
    assert [(row["rank"], row["nranks"], row["world_rank"]) for row in result.rows("communicators")] == [(None, 4, 5)]


def test_the_list_of_groups_that_pytorch_writes_is_kept_by_the_converter(tmp_path: Path) -> None:
    groups = [
        {"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 16},
        {"pg_name": "3", "pg_desc": "tp", "ranks": [4, 5, 6, 7], "group_size": 4},
    ]
    listed = node(1, "## process_group:init ##", 1, inputs=json.dumps([json.dumps(groups)]))
    scatter = collective(2, REDUCE_SCATTER, 800_000, pg_name="3")
    world = collective(3, REDUCE_SCATTER, 800_000, pg_name="0")
    result = imported(tmp_path, trace(tmp_path, 6, listed, scatter, world))
    assert [row["payload_bytes"] for row in result.rows("calls", "time_ns")] == [200_000, 50_000]
    ends = result.rows("communicators", "nranks")
    assert [(row["rank"], row["nranks"], row["group_name"]) for row in ends] == [(2, 4, "3"), (6, 16, "0")]


@pytest.mark.parametrize("letters", [0, 1, 100, 200, 20_000, 3_000_000])
def test_metadata_of_any_size_begins_a_trace(tmp_path: Path, letters: int) -> None:
    result = imported(tmp_path, trace(tmp_path, 0, collective(1, ALL_REDUCE, 800_000), first=metadata(letters)))
    assert result.calls() == [(0, "AllReduce", 800_000, None)]


def test_metadata_that_says_nothing_begins_a_trace(tmp_path: Path) -> None:
    result = imported(tmp_path, trace(tmp_path, 0, collective(1, ALL_REDUCE, 800_000), first=b""))
    assert result.calls() == [(0, "AllReduce", 800_000, None)]


def test_metadata_without_a_version_begins_a_trace() -> None:
    only = text(2, text(1, b"input_file") + text(29, b"x" * 300))
    assert has_format(varint(len(only)) + only)


@pytest.mark.parametrize(
    "head",
    [b"", b"\x00", b"\x00\x00\x00\x00", b"\x7fELF\x02\x01", b"\x05\x0a\x7f", b"\x07\x0a\x05\x00\x01\x02\x03\x04"],
)
def test_other_bytes_begin_none(head: bytes) -> None:
    assert not has_format(head)
