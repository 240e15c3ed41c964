"""Rows, the table, what is kept, and what changed since."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.page import PAGE, all_kept, keep, page
from tests.gpu.table import Results, Row, Rows, Verdict, as_text, changes, last_results, read_results, read_rows

RESULTS = Results(
    device="NVIDIA H200",
    simulated=False,
    date="2026-11-26T12:00:00+00:00",
    revision="abc1234",
    seconds=200.0,
    machine={"kernel": "6.18", "driver": "580.1"},
    rows=(
        Row("times", "AllReduce of 1 KiB: ratio", "1.05", value=1.05),
        Row("counts", "calls", "[1, 2]", "[1, 2]", Verdict.OK),
    ),
)


def test_rows_survive_whoever_writes_them_being_killed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = Rows("counts", file)
    assert rows.compared("calls", (1, 2), (1, 2))
    assert not rows.compared("payload", 3, 4)
    rows.figure("ratio", 1.25)
    with file.open("a") as half:
        half.write('{"check": "counts", "wh')
    assert read_rows(file) == [
        Row("counts", "calls", "[1, 2]", "[1, 2]", Verdict.OK),
        Row("counts", "payload", "3", "4", Verdict.DIFFERS),
        Row("counts", "ratio", "1.25", value=1.25),
    ]
    assert read_rows(tmp_path / "none") == []


def test_the_table_says_what_was_wanted_only_where_it_was_not_seen() -> None:
    text = as_text([RESULTS.rows[1], Row("counts", "payload", "3", "4", Verdict.DIFFERS)])
    assert [line.split() for line in text.splitlines()[1:3]] == [
        ["counts", "calls", "[1,", "2]", "ok"],
        ["counts", "payload", "3", "4", "differs"],
    ]
    assert text.endswith("1 ok, 1 differs\n")


def test_results_come_back_from_their_file_and_are_named_by_device_and_day(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(RESULTS.to_json())
    kept = keep(tmp_path / "results.json", tmp_path)
    assert kept.name == "nvidia-h200-2026-11-26T1200.json"
    assert read_results(kept) == RESULTS


def test_a_rehearsal_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(replace(RESULTS, simulated=True).to_json())
    with pytest.raises(ValueError, match="is of a rehearsal"):
        keep(tmp_path / "results.json", tmp_path)


def test_a_run_is_compared_with_the_last_one_of_the_same_device(tmp_path: Path) -> None:
    older = replace(RESULTS, date="2026-10-01T12:00:00+00:00", rows=())
    other = replace(RESULTS, device="NVIDIA H100", date="2026-12-01T12:00:00+00:00")
    for index, one in enumerate((older, RESULTS, other)):
        (tmp_path / f"{index}.json").write_text(one.to_json())
    assert last_results("NVIDIA H200", tmp_path) == RESULTS
    assert last_results("NVIDIA B200", tmp_path) is None


def test_changes_are_verdicts_and_figures_beyond_a_tenth() -> None:
    now = [
        Row("times", "AllReduce of 1 KiB: ratio", "1.10", value=1.10),
        Row("counts", "calls", "[1, 3]", "[1, 2]", Verdict.DIFFERS),
        Row("stalls", "abort", "2", "2", Verdict.OK),
    ]
    assert changes(now, RESULTS) == [
        "changed: counts: calls: [1, 2] (ok) → [1, 3] (differs)",
        "new: stalls: abort: 2 (ok)",
    ]
    assert changes([replace(now[0], value=1.3, seen="1.3")], RESULTS) == [
        "changed: times: AllReduce of 1 KiB: ratio: 1.05 (seen) → 1.3 (seen)",
        "gone: counts: calls: was [1, 2]",
    ]
    assert changes(now, None) == []


def test_the_page_quotes_every_result_that_is_kept_and_says_so_where_there_is_none() -> None:
    later = replace(RESULTS, date="2026-12-01T12:00:00+00:00", rows=RESULTS.rows[:1])
    text = page([RESULTS, later])
    assert text.index("## NVIDIA H200, 2026-12-01") < text.index("## NVIDIA H200, 2026-11-26")
    assert "Since 2026-11-26:\n\n* gone: counts: calls: was [1, 2]\n" in text
    assert "AllReduce of 1 KiB: ratio" in text
    assert "No GPU has been met yet" in page([])


def test_the_committed_page_is_made_of_the_committed_results() -> None:
    assert PAGE.read_text() == page(all_kept()), "run 'python -m tests.gpu.page'"
    assert all(not json.loads(one.to_json())["simulated"] for one in all_kept())
