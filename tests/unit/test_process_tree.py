"""What a process and its descendants write, whoever of them does and whatever holds the files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from railscope.probes.processes.tree import MOST_FILES, ProcessTrees, descendants

PROC = Path("/proc")
MIB = 1 << 20
WRITER = """
import os, subprocess, sys, time
if len(sys.argv) > 2:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], stdin=subprocess.PIPE)
for line in sys.stdin:
    if len(sys.argv) > 2:
        child.stdin.write(line.encode())
        child.stdin.flush()
        continue
    with open(sys.argv[1], "wb") as file:
        file.write(bytes(int(line)))
    time.sleep(0.2)
"""


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def written(trees: ProcessTrees, pid: int) -> int:
    totals = trees.totals(pid, look=True)
    assert totals is not None
    return totals.written_bytes


@pytest.fixture(params=["storage", "memory"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    where = tmp_path if request.param == "storage" else Path("/dev/shm")
    if not os.access(where, os.W_OK):
        pytest.skip(f"{where} cannot be written to")
    path = where / f"railscope-test-{os.getpid()}"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("by", ["itself", "a child"])
def test_what_is_written_is_seen_to_storage_and_to_memory_and_by_whomever(file: Path, by: str) -> None:
    arguments = [WRITER] if by == "a child" else []
    command = [sys.executable, "-c", WRITER, str(file), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        trees = ProcessTrees(PROC)
        if by == "a child":
            assert eventually(lambda: len(descendants(PROC, process.pid)) == 1)
        before = written(trees, process.pid)
        process.stdin.write(f"{4 * MIB}\n")
        process.stdin.flush()
        assert eventually(lambda: written(trees, process.pid) - before >= 4 * MIB)
        process.stdin.close()
        process.kill()


def made_up(procfs: Path, pid: int, size: int, *children: int) -> None:
    (procfs / f"{pid}/task/{pid}").mkdir(parents=True, exist_ok=True)
    (procfs / f"{pid}/io").write_text(f"rchar: 1\nwchar: {size}\nwrite_bytes: 0\n")
    (procfs / f"{pid}/task/{pid}/children").write_text(" ".join(map(str, children)))


def test_totals_begin_with_what_is_there_and_never_fall(tmp_path: Path) -> None:
    trees = ProcessTrees(tmp_path)
    made_up(tmp_path, 1, 100, 2)
    made_up(tmp_path, 2, 10**9)
    assert written(trees, 1) == 100
    made_up(tmp_path, 1, 150, 2, 3)
    made_up(tmp_path, 3, 40)
    assert written(trees, 1) == 190
    assert set(trees.descendants(1)) == {2, 3}
    made_up(tmp_path, 3, 50)
    made_up(tmp_path, 4, 70)
    made_up(tmp_path, 1, 150, 2, 3, 4)
    known = trees.totals(1, look=False)
    assert known is not None
    assert known.written_bytes == 200, "of those that are known"
    made_up(tmp_path, 1, 150)
    assert written(trees, 1) == 200
    trees.forget(1)
    assert set(trees.descendants(1)) == set()
    assert trees.totals(9, look=True) is None


def test_descendants_are_looked_for_below_those_that_are_found_and_no_more_than_a_few(tmp_path: Path) -> None:
    made_up(tmp_path, 1, 0, 2, 3)
    made_up(tmp_path, 2, 0, 4)
    made_up(tmp_path, 4, 0, 1)
    assert descendants(tmp_path, 1) == [2, 3, 4, 1]
    made_up(tmp_path, 5, 0, *range(100, 300))
    assert len(descendants(tmp_path, 5)) == 64
    assert descendants(tmp_path, 99) == []


def test_a_look_for_descendants_reads_so_many_files_whatever_threads_the_tree_has(tmp_path: Path) -> None:
    # A chain in which each process has so many threads, the last of which made the next one.
    threads, length = 300, 20
    for pid in range(1, length):
        for tid in range(threads):
            folder = tmp_path / str(pid) / "task" / f"{pid}{tid:03}"
            folder.mkdir(parents=True)
            (folder / "children").write_text(f"{pid + 1} ")
    found = descendants(tmp_path, 1)
    assert found == list(range(2, 2 + -(-MOST_FILES // threads)))
