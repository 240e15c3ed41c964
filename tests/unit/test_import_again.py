"""Files that are imported again: renamed, compressed, grown; and other jobs of the same shape beside them."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.dataset.files import DatasetError, node_parts, table_files
from railscope.agent.dataset.reader import open_dataset
from railscope.agent.dataset.replacement import replacing
from railscope.agent.dataset.writer import DatasetWriter, read_row, write_row
from railscope.agent.imports import target
from railscope.agent.imports.facts import ImportFailure
from tests.unit.importing import SAMPLES, Result, imported, written
from tests.unit.test_import_nccl_log import call, init

HOUR_NS = 3_600_000_000_000
REPLACED = "these files, or their beginnings, were already in the dataset: their earlier import is replaced"


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
    assert (
        f"{files[1]} has the same content as another of these files: it is left out" in result.imported.problems.notes
    )


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


class Killed(BaseException):
    """Nothing of the process runs after this."""


def counted(folder: Path) -> list[int]:
    """Calls and recordings as the analyses see them."""
    with open_dataset([folder / "dataset"]) as dataset:
        return [dataset.rows(dataset[name].count()).as_py() for name in ("calls", "recordings")]


def full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("table", ["calls", "communicators", "recordings"])
def test_an_import_that_fails_leaves_the_earlier_one_of_the_same_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    files = [written(tmp_path, host, log(3, host)) for host in "ab"]
    imported(tmp_path, *files)
    put: Callable[..., Path] = DatasetWriter.write_part

    def full(writer: DatasetWriter, name: str, *rest: Any, **more: Any) -> Path:
        # The disk is full at the second host's part.
        if name == table and writer.node == "b":
            full_disk()
        return put(writer, name, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(DatasetWriter, "write_part", full)
        with pytest.raises(OSError, match="No space"):
            imported(tmp_path, *files)
    assert counted(tmp_path) == [6, 2]
    assert len(table_files(tmp_path / "dataset", "calls")) == 2, "parts of the second import are left"


def test_an_import_that_cannot_write_its_first_rows_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "log", log(3))
    imported(tmp_path, file)
    monkeypatch.setattr(target.ImportTarget, "_flush", full_disk)
    with pytest.raises(OSError, match="No space"):
        imported(tmp_path, file)
    assert counted(tmp_path) == [3, 1]


def test_an_import_that_is_killed_counts_not_beside_the_earlier_one_and_the_next_one_tidies_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "log", log(3))
    imported(tmp_path, file)

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(target.ImportTarget, "_name_apart", killed)
        patched.setattr(target.ImportTarget, "discard", killed)
        with pytest.raises(Killed):
            imported(tmp_path, file)
    assert len(table_files(tmp_path / "dataset", "calls")) == 2
    assert counted(tmp_path) == [3, 1]
    again = imported(tmp_path, file)
    assert counted(tmp_path) == [3, 1]
    assert len(again.calls()) == 3, "what the killed one has left is still there"
    assert REPLACED in again.imported.problems.notes


def test_what_cannot_remove_the_earlier_import_is_there_itself_and_the_next_one_takes_both_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "log", log(3))
    imported(tmp_path, file)

    def stuck(*_: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr("railscope.agent.dataset.replacement.remove_recordings", stuck)
        with pytest.raises(PermissionError):
            imported(tmp_path, file)
    assert len(table_files(tmp_path / "dataset", "calls")) == 2
    assert counted(tmp_path) == [3, 1]
    imported(tmp_path, file)
    assert counted(tmp_path) == [3, 1]
    assert len(table_files(tmp_path / "dataset", "calls")) == 1


KILLED_AT = {
    "the first row is there": (
        "railscope.agent.dataset.writer.DatasetWriter.write_part",
        "rest[0] == 'recordings'",
        "after",
    ),
    "all rows are there": ("railscope.agent.imports.target.ImportTarget._write_recordings", "True", "after"),
    "the new ones count": ("railscope.agent.dataset.replacement.remove_recordings", "rest[1]", "before"),
    "the first old row is gone": ("pathlib.Path.unlink", "'recordings/' in str(self)", "after"),
    "the old ones are gone": ("railscope.agent.dataset.replacement.remove_recordings", "rest[1]", "after"),
}
"""What is called at that moment, when it is that moment, and whether before or after the call."""

KILLED = """
import os, signal, sys
from importlib import import_module
from pathlib import Path
from railscope.agent.imports.runner import import_paths

place, condition, when, folder, *files = sys.argv[1:]
parts = place.split(".")
owner = import_module(".".join(parts[:-2])) if parts[-2][0].isupper() else import_module(".".join(parts[:-1]))
owner = getattr(owner, parts[-2]) if parts[-2][0].isupper() else owner
call = getattr(owner, parts[-1])

def replaced(*arguments, **named):
    self, rest = arguments[0], arguments[1:] if parts[-2][0].isupper() else arguments
    now = eval(condition)
    if now and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = call(*arguments, **named)
    if now:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, parts[-1], replaced)
import_paths([Path(file) for file in files], Path(folder), None, None)
"""


@pytest.mark.parametrize("moment", KILLED_AT)
def test_whenever_an_import_is_killed_either_it_counts_or_the_one_that_it_replaces(tmp_path: Path, moment: str) -> None:
    files = [written(tmp_path, host, log(3, host)) for host in "ab"]
    imported(tmp_path, *files)
    for host in "ab":
        written(tmp_path, host, log(5, host))
    command = [sys.executable, "-c", KILLED, *KILLED_AT[moment], str(tmp_path / "dataset"), *map(str, files)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    done = moment not in ("the first row is there", "all rows are there")
    assert counted(tmp_path) == ([10, 2] if done else [6, 2])
    # Whatever is imported next tidies up.
    imported(tmp_path, written(tmp_path, "c", log(1, "c")))
    assert counted(tmp_path) == ([11, 3] if done else [7, 3])
    assert len(table_files(tmp_path / "dataset", "calls")) == 3
    assert list((tmp_path / "dataset" / "recordings").glob("*replaced*")) == []
    imported(tmp_path, *files)
    assert counted(tmp_path) == [11, 3]


def test_what_another_process_is_about_to_put_there_does_not_count_and_stays(tmp_path: Path) -> None:
    file = written(tmp_path, "log", log(3))
    imported(tmp_path, file)
    (recording,) = (part.recording for part in node_parts(tmp_path / "dataset", "recordings", "a"))
    with replacing(tmp_path / "dataset", [("a", recording)], []):
        assert counted(tmp_path) == [0, 0]
        imported(tmp_path, written(tmp_path, "b", log(2, "b")))
        assert counted(tmp_path) == [2, 1]
    assert counted(tmp_path) == [5, 2]


def test_a_damaged_note_of_what_replaces_what_is_one_line(tmp_path: Path) -> None:
    imported(tmp_path, written(tmp_path, "log", log(3)))
    note = tmp_path / "dataset" / "recordings" / "replaced-0123456789abcdef.json"
    for content in ("{", "[]", '{"new": 3, "old": []}', '{"new": [["a", "b"]], "old": []}'):
        note.write_text(content)
        with pytest.raises(DatasetError, match=r"replaced-0123456789abcdef.json: cannot be read: .*: remove it"):
            counted(tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 90], ids=["at a line's end", "before it", "in a line"])
def test_of_a_log_that_was_cut_off_the_longer_one_stays(tmp_path: Path, cut: int) -> None:
    whole = log(50)
    short = whole[: len(log(30)) - cut]
    imported(tmp_path, written(tmp_path, "log", whole))
    again = imported(tmp_path, written(tmp_path, "short", short))
    assert counted(tmp_path) == [50, 1]
    assert again.imported.problems.notes == [
        f"{tmp_path}/short is the beginning of a file that was imported before: the longer import is kept"
    ]
    # What comes with it is imported all the same.
    imported(tmp_path, tmp_path / "short", written(tmp_path, "b", log(4, "b")))
    assert counted(tmp_path) == [54, 2]
    # In a dataset of its own it is a log like others.
    shutil.rmtree(tmp_path / "dataset")
    imported(tmp_path, tmp_path / "short")
    assert counted(tmp_path)[0] in {29, 30}
    imported(tmp_path, tmp_path / "log")
    assert counted(tmp_path) == [50, 1]


def test_a_log_that_was_cut_off_among_others_of_its_import_is_refused(tmp_path: Path) -> None:
    logs = [written(tmp_path, host, log(30, host)) for host in "ab"]
    imported(tmp_path, *logs)
    written(tmp_path, "a", log(20, "a"))
    with pytest.raises(ImportFailure, match=r"/a: its earlier import into .*dataset, together "):
        imported(tmp_path, *logs)
    imported(tmp_path, logs[0])
    assert counted(tmp_path) == [60, 2]


def test_a_shorter_log_that_only_begins_alike_stands_beside_the_first(tmp_path: Path) -> None:
    imported(tmp_path, written(tmp_path, "log", log(50)))
    lines = log(30).splitlines()
    lines[-2] = call(process="a:1:1 [0]", nranks=1, count=77)
    imported(tmp_path, written(tmp_path, "other", "\n".join(lines) + "\n"))
    assert counted(tmp_path) == [80, 2]


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
    assert any("another job with the same communicator names" in note for note in both.imported.problems.notes)
    beside = "another recording or import is in the folder too: a report covers all of them together"
    assert not any("in the folder too" in note for note in first.imported.problems.notes)
    assert beside in both.imported.problems.notes
    again = imported(tmp_path, *sorted((tmp_path / "first").iterdir()))
    assert set(jobs(again)) == set(jobs(both))
    # What it replaces is not beside it.
    assert beside in again.imported.problems.notes


def test_hosts_of_a_job_that_are_imported_one_by_one_join_also_beside_another_job(tmp_path: Path) -> None:
    for job, hours in (("first", 0), ("second", 5)):
        for rank, path in enumerate(dumps(tmp_path / job, hours)):
            result = imported(tmp_path, path, node=f"{job}-{rank}")
    assert sorted(jobs(result).values()) == [
        [(f"{job}-{rank}", rank) for rank in (0, 1)] for job in ("first", "second")
    ]


def test_hosts_that_two_jobs_of_the_same_time_may_lack_are_with_the_first_and_that_is_said(tmp_path: Path) -> None:
    both = [dumps(tmp_path / job, 0) for job in ("first", "second")]
    for path in both[1]:
        path.write_text(json.dumps({**json.loads(path.read_text()), "job": "second"}))
    said = [
        any("these hosts may belong to any of several jobs" in note for note in result.imported.problems.notes)
        for rank in (0, 1)
        for job in (0, 1)
        for result in [imported(tmp_path, both[job][rank], node=f"{job}-{rank}")]
    ]
    # Of the last host there is but one job left.
    assert said == [False, False, True, False]


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
    assert sum("a rank occurs twice in a communicator" in note for note in notes) == 1
