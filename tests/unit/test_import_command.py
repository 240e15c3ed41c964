"""`railscope import` as its user sees it."""

from __future__ import annotations

import argparse
import errno
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from railscope.agent.dataset.writer import DatasetWriter
from railscope.agent.imports import imported_rows
from railscope.agent.imports.command import add_import_arguments, run_import
from railscope.probes.installation import remedy_for_missing_extra
from tests.unit.importing import SAMPLES, written


def run(*arguments: str | Path) -> tuple[int, str]:
    """Exit status and output."""
    parser = argparse.ArgumentParser()
    add_import_arguments(parser)
    out = io.StringIO()
    return run_import(parser.parse_args([str(one) for one in arguments]), out), out.getvalue()


def test_it_says_what_was_imported_left_out_and_made_up(tmp_path: Path) -> None:
    status, text = run(SAMPLES / "nccl-launchers.log", "-o", tmp_path / "d")
    assert status == 0
    lines = text.splitlines()
    assert lines[:3] == [
        "1 file of nccl-log",
        "gpu-node-1: 3 calls, 0 operations with times, 0 other kernels, 2 ranks of communicators",
        "gpu-node-2: 4 calls, 0 operations with times, 0 other kernels, 2 ranks of communicators",
    ]
    assert lines[3].startswith("note: timestamps are synthetic")
    assert lines[4] == "left out: 2 malformed lines or events"
    assert lines[5] == f"  {SAMPLES}/nccl-launchers.log:13: an unknown data type: 99"
    assert lines[-1] == f"wrote {tmp_path}/d: look at it with 'railscope report {tmp_path}/d'"


def test_a_file_that_was_cut_off_meanwhile_is_said_and_no_failure(tmp_path: Path) -> None:
    whole = (SAMPLES / "nccl-launchers.log").read_bytes()
    assert run(SAMPLES / "nccl-launchers.log", "-o", tmp_path / "d")[0] == 0
    short = written(tmp_path, "short", whole[: len(whole) // 2])
    assert run(short, "-o", tmp_path / "d") == (
        0,
        f"1 file of nccl-log\nnote: {short} is the beginning of a file that was imported before: the longer import is "
        f"kept\nnothing new for {tmp_path}/d: look at it with 'railscope report {tmp_path}/d'\n",
    )


def test_json_says_the_same(tmp_path: Path) -> None:
    files = [SAMPLES / "nccl-launchers.log", SAMPLES / "gpt.0.et"]
    status, text = run(*files, "-o", tmp_path / "d", "--json", "--node", "gpu-node-9")
    said = json.loads(text)
    assert status == 0
    assert said["files"] == [
        {"file": str(files[0]), "format": "nccl-log"},
        {"file": str(files[1]), "format": "chakra"},
    ]
    assert [(one["node"], one["calls"]) for one in said["nodes"]] == [
        ("gpu-node-1", 3),
        ("gpu-node-2", 4),
        ("gpu-node-9", 4),
    ]
    assert (said["skipped"], said["first_skipped"][0]["line"], said["times_known"]) == (2, 13, False)


def test_more_problems_than_are_shown_are_counted(tmp_path: Path) -> None:
    bad = "a:1:1 [0] NCCL INFO Coffee: opCount 0 nothing\n"
    good = (SAMPLES / "nccl-2.32.3-split.log").read_text()
    _, text = run(written(tmp_path, "log", good + bad * 100), "-o", tmp_path / "d")
    assert "left out: 100 malformed lines or events" in text
    assert "  and 80 more" in text


def test_two_imports_into_one_folder_are_one_dataset(tmp_path: Path) -> None:
    from railscope.agent.dataset.reader import open_dataset

    for rank in (0, 1):
        name = "nccl_trace_rank_0" if rank == 0 else "nccl_trace_rank_1.json"
        assert run(SAMPLES / name, "-o", tmp_path / "d", "--node", f"gpu-node-{rank}")[0] == 0
    dataset = open_dataset([tmp_path / "d"])
    ends = dataset.rows(dataset["communicators"]).to_pylist()
    assert sorted((row["comm"], row["rank"], row["node"]) for row in ends) == [
        (comm, rank, f"gpu-node-{rank}") for comm in sorted({row["comm"] for row in ends}) for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("notes.txt", "hello", "unknown format: choose one of nccl-log, kineto, chakra"),
        ("empty", "", "unknown format"),
        ("r.npz", "PK\x03\x04", "this is not a railscope recording"),
    ],
)
def test_what_cannot_be_imported_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, said: str
) -> None:
    status, _ = run(written(tmp_path, name, content), "-o", tmp_path / "d")
    errors = capsys.readouterr().err
    assert status == 2
    assert errors.startswith(f"railscope import: {tmp_path}/{name}: ")
    assert said in errors
    assert errors.count("\n") == 1


def test_a_dataset_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = run(SAMPLES / "deepspeed.log", "-o", written(tmp_path, "file", "in the way"))
    assert status == 2
    assert capsys.readouterr().err.endswith(": Not a directory\n")


def test_an_import_that_fails_leaves_no_rows_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: DatasetWriter, _table: str, _rows: object, _hour_ns: int) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", "part")

    monkeypatch.setattr(imported_rows, "_BATCH_ROWS", 2)
    # Calls are written as they are found, the row of the recording comes last.
    monkeypatch.setattr(DatasetWriter, "add_rows", full)
    assert run(SAMPLES / "nccl-2.32.3-split.log", "-o", tmp_path / "d")[0] == 2
    assert [one for one in (tmp_path / "d").rglob("*") if one.is_file()] == []


@pytest.mark.parametrize(("module", "package"), [("pyarrow", "pyarrow"), ("google.protobuf", "protobuf")])
def test_without_a_library_it_says_what_to_install_and_help_needs_none(module: str, package: str) -> None:
    script = (
        f"import sys; sys.modules['{module}'] = None\n"
        "import argparse; from railscope.agent.imports.command import add_import_arguments, run_import\n"
        "parser = argparse.ArgumentParser(); add_import_arguments(parser); parser.format_help()\n"
        "sys.exit(run_import(parser.parse_args(['x', '-o', 'y']), sys.stdout))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"railscope import: needs {package}: {remedy_for_missing_extra('analysis')}\n"
