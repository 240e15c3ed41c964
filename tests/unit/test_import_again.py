"""Files that are imported again: renamed, compressed, grown; and other jobs of the same shape beside them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from agent.dataset.files import table_files
from agent.dataset.writer import read_row, write_row
from agent.imports.facts import ImportFailure
from tests.unit.importing import SAMPLES, Result, imported, written
from tests.unit.test_import_nccl_log import call, init

HOUR_NS = 3_600_000_000_000
REPLACED = "these files, or their beginnings, were in the dataset already: what was there of them is replaced"


def log(calls: int, host: str = "a") -> str:
    process = f"{host}:1:1 [0]"
    return "\n".join([init(process, "0x10", 0, 1), *[call(process=process, nranks=1)] * calls]) + "\n"


def recorded(result: Result) -> list[str]:
    return [row["node"] for row in result.rows("recordings", "node")]


@pytest.mark.parametrize(
    ("name", "content", "calls"),
    [
        ("other", log(3), 3),
        ("log.gz", gzip.compress(log(3).encode()), 3),
        ("log", log(3) + log(2), 5),
        ("other", log(3) + call(process="b:1:1 [0]", nranks=1) + "\n", 4),
    ],
    ids=["renamed", "compressed", "grown", "renamed and grown"],
)
def test_a_log_that_was_imported_before_takes_the_place_of_what_was_there(
    tmp_path: Path, name: str, content: str | bytes, calls: int
) -> None:
    first = imported(tmp_path, written(tmp_path, "log", log(3)))
    assert len(first.calls()) == 3
    again = imported(tmp_path, written(tmp_path, name, content))
    assert len(again.calls()) == calls
    assert len(again.rows("recordings")) == len(again.imported.nodes)
    assert REPLACED in again.imported.problems.notes
    # Nothing of the first import is left.
    numbers = {row["recording"] for row in again.rows("recordings")}
    for table in ("calls", "communicators"):
        assert {row["recording"] for row in again.rows(table)} == numbers


def test_a_log_that_begins_alike_and_is_another_one_stands_beside_the_first(tmp_path: Path) -> None:
    imported(tmp_path, written(tmp_path, "log", log(1) + call(nranks=1, count=1) + "\n"))
    both = imported(tmp_path, written(tmp_path, "other", log(1) + call(nranks=1, count=2) + "\n" + log(3)))
    assert len(both.rows("recordings")) == 2
    assert REPLACED not in both.imported.problems.notes


def test_a_host_that_a_grown_log_no_longer_stands_alone_for_is_replaced_with_the_rest(tmp_path: Path) -> None:
    logs = [written(tmp_path, host, log(2, host)) for host in "ab"]
    assert recorded(imported(tmp_path, *logs)) == ["a", "b"]
    grown = [written(tmp_path, host, log(2, host) + log(1, host)) for host in "ab"]
    again = imported(tmp_path, *grown, written(tmp_path, "c", log(1, "c")))
    assert recorded(again) == ["a", "b", "c"]
    assert len(again.calls()) == 7


def test_one_of_several_that_were_imported_together_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    logs = [written(tmp_path, host, log(2, host)) for host in "abc"]
    before = imported(tmp_path, *logs)
    rows = before.rows("calls", "node", "time_ns")
    with pytest.raises(ImportFailure, match=r"b: it was imported into .*dataset before, together with 2 other files: "):
        imported(tmp_path, logs[1])
    assert before.rows("calls", "node", "time_ns") == rows


def test_a_copy_among_the_files_is_read_once_and_said(tmp_path: Path) -> None:
    files = [written(tmp_path, "log", log(2)), written(tmp_path, "log.gz", gzip.compress(log(2).encode()))]
    result = imported(tmp_path, *files)
    assert len(result.calls()) == 2
    assert f"{files[1]} holds the same as another of these files: it is left out" in result.imported.problems.notes


def test_ranks_that_did_the_same_are_told_apart_by_their_files_names(tmp_path: Path) -> None:
    content = (SAMPLES / "gpt.0.json").read_text()
    together = imported(tmp_path / "a", *(written(tmp_path, f"gpt.{rank}.json", content) for rank in (0, 1)))
    assert {row["rank"] for row in together.rows("communicators")} == {0, 1}
    for rank in (0, 1):
        one_by_one = imported(tmp_path / "b", tmp_path / f"gpt.{rank}.json", node=f"host-{rank}")
    assert recorded(one_by_one) == ["host-0", "host-1"]


def test_what_was_imported_is_known_after_the_recordings_row_was_changed(tmp_path: Path) -> None:
    imported(tmp_path, written(tmp_path, "log", log(3)))
    (file,) = table_files(tmp_path / "dataset", "recordings")
    write_row(file, "recordings", read_row(file, "recordings") | {"calls_removed": 1})
    assert len(imported(tmp_path, written(tmp_path, "other", log(3) + log(1))).rows("recordings")) == 1


# Other jobs


def dumps(folder: Path, hours: int, ranks: int = 2) -> list[Path]:
    """Dumps of the flight recorder of a job that ran some hours later."""
    folder.mkdir()
    dump = json.loads((SAMPLES / "nccl_trace_rank_1.json").read_text())
    for entry in dump["entries"]:
        for name in ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[name] = (entry.get(name) or 0) + hours * HOUR_NS
    for rank in range(ranks):
        written(folder, f"nccl_trace_rank_{rank}.json", json.dumps({**dump, "own": rank}))
    return sorted(folder.iterdir())


def jobs(result: Result) -> dict[str, list[tuple[str, int]]]:
    """Nodes and ranks of each communicator of the default group."""
    found: dict[str, list[tuple[str, int]]] = {}
    for row in result.rows("communicators", "node", "rank"):
        if row["group_name"] == "default_pg":
            found.setdefault(row["comm"], []).append((row["node"], row["rank"]))
    return found


def test_a_second_job_of_the_same_shape_has_communicators_of_its_own(tmp_path: Path) -> None:
    first = imported(tmp_path, *dumps(tmp_path / "first", 0))
    assert [len(ranks) for ranks in jobs(first).values()] == [2]
    both = imported(tmp_path, *dumps(tmp_path / "second", 5))
    assert [len(ranks) for ranks in jobs(both).values()] == [2, 2]
    assert any("another job whose communicators are called the same" in note for note in both.imported.problems.notes)
    again = imported(tmp_path, *sorted((tmp_path / "first").iterdir()))
    assert set(jobs(again)) == set(jobs(both))


def test_hosts_of_a_job_that_are_imported_one_by_one_join_also_beside_another_job(tmp_path: Path) -> None:
    for job, hours in (("first", 0), ("second", 5)):
        for rank, path in enumerate(dumps(tmp_path / job, hours)):
            result = imported(tmp_path, path, node=f"{job}-{rank}")
    assert sorted(jobs(result).values()) == [
        [(f"{job}-{rank}", rank) for rank in (0, 1)] for job in ("first", "second")
    ]


def test_other_ranks_at_another_time_are_of_another_job(tmp_path: Path) -> None:
    early, late = dumps(tmp_path / "early", 0), dumps(tmp_path / "late", 5)
    imported(tmp_path, early[0])
    assert len(jobs(imported(tmp_path, late[1]))) == 2


def test_a_communicator_that_nccl_has_named_is_the_same_in_every_import(tmp_path: Path) -> None:
    for rank, host in enumerate("ab"):
        process = f"{host}:1:1 [0]"
        result = imported(
            tmp_path, written(tmp_path, host, f"{init(process, '0x10', rank)}\n{call(process=process)}\n")
        )
    assert {row["comm"] for row in result.rows("communicators")} == {"0000000000000abc"}


def test_logs_without_identifiers_are_communicators_of_their_own(tmp_path: Path) -> None:
    for job in range(2):
        lines = [call(process=f"a:{job}{rank}:1 [{rank}]") for rank in range(2)]
        result = imported(tmp_path, written(tmp_path, str(job), "\n".join(lines)))
    assert len({row["comm"] for row in result.rows("communicators")}) == 2


def test_one_rank_twice_in_one_import_is_said(tmp_path: Path) -> None:
    files = [*dumps(tmp_path / "first", 0, 1), *dumps(tmp_path / "second", 5, 1)]
    notes: list[Any] = imported(tmp_path, *files).imported.problems.notes
    assert sum("a rank is twice in a communicator" in note for note in notes) == 1
