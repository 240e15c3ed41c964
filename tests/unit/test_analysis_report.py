"""The whole report of small recordings (simulated): what it says, in JSON, as text, and on the command line."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.analysis.facts.options import add_report_arguments
from railscope.agent.analysis.facts.report import Report, Unknown
from railscope.agent.analysis.report.command import run_report
from railscope.agent.analysis.report.html import html_text
from railscope.agent.analysis.report.measurements import BY_NUMBER, MEASUREMENTS
from railscope.agent.analysis.report.report import ReportOptions, make_report, make_runs, report_of
from railscope.agent.analysis.report.report_json import KEYS, as_json, json_parts
from railscope.agent.analysis.report.text import as_text
from railscope.agent.analysis.report.words import summarise
from railscope.agent.analysis.tables.datasets_of import as_datasets
from railscope.agent.dataset.reader import DatasetError
from railscope.agent.model.mapping import default_mapping
from railscope.agent.model.shape import Shape
from railscope.agent.node.recorder.store import save
from railscope.probes.installation import remedy_for_missing_extra
from tests.unit.datasets import BEGAN_NS, SECOND_NS, JobDataset, gpt_job
from tests.unit.recordings import recording

ANALYSIS = remedy_for_missing_extra("analysis")

SAMPLES = Path(__file__).parent / "data" / "imports"

SHAPE = Shape(
    layers=4,
    hidden=64,
    sequence=64,
    vocabulary=300,
    global_batch=8,
    micro_batch=2,
    pipeline=4,
    tensor=2,
    data=2,
)
ISSUE_KEYS = {
    "ops",
    "sizes",
    "communicators",
    "matrix",
    "sparsity",
    "iterations",
    "latency",
    "composition",
    "bandwidth",
    "unknown",
}
SMALL = ReportOptions(memory_bytes=500_000_000)


def training(folder: Path, iterations: int = 6, **columns: Any) -> JobDataset:
    return gpt_job(folder, SHAPE, default_mapping(SHAPE), gpus_per_server=8, iterations=iterations, **columns)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Of a GPT-shaped training job on two servers of eight GPUs, with one slow operation."""
    job = training(tmp_path_factory.mktemp("training"))
    for number in range(20):
        job.operation("dp0", 0, "AllReduce", 4096, number * SECOND_NS, 2_000_000 if number else 90_000_000)
    return report_of(job.open())


def run(arguments: Sequence[str | Path]) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    add_report_arguments(parser)
    out = io.StringIO()
    status = run_report(parser.parse_args([str(one) for one in arguments]), out)
    return status, out.getvalue()


def imported(files: Sequence[Path]) -> Report:
    with as_datasets(files, apart=False) as folders:
        return make_report(folders)


def test_the_measurements_are_those_of_the_papers_each_with_a_definition() -> None:
    assert [one.number for one in MEASUREMENTS] == list(range(1, 18))
    assert all(one.name and one.definition and one.papers for one in MEASUREMENTS)


def test_json_has_the_keys_that_others_build_on(report: Report) -> None:
    content = json.loads("".join(json_parts(report)))
    assert set(content) >= ISSUE_KEYS
    assert tuple(content) == KEYS
    assert set(content["ops"][0]) == {"op", "dtype", "calls", "payload_bytes", "unsized_calls"}
    assert set(content["sizes"][0]) == {"op", "bytes", "calls"}
    assert set(content["matrix"][0]) == {"source", "destination", "wire_bytes"}
    assert {"row", "reason"} <= set(content["unknown"][0])
    assert {"start", "period_seconds", "comm_ratio", "non_overlapped_ratio", "all_to_all"} <= set(
        content["iterations"][0]
    )
    assert set(content["latency"]) == {"rows", "anomalies", "anomaly_count"}


def test_json_is_what_the_report_holds(report: Report) -> None:
    content = as_json(report)
    assert content["sparsity"] == report.matrix.sparsity
    assert sum(row["wire_bytes"] for row in content["matrix"]) == sum(one.wire_bytes for one in report.matrix.pairs)
    assert content["traffic"]["server_transmit_wire_bytes"] == dict(report.matrix.server_transmit_wire_bytes)
    assert "pairs" not in content["traffic"]
    assert content["recording"]["simulated"] is True
    assert len(content["gpus"]) == 16


def test_json_is_what_the_standard_library_would_write(report: Report) -> None:
    assert "".join(json_parts(report)) == json.dumps(as_json(report), indent=2, ensure_ascii=False) + "\n"


def test_figures_of_different_analyses_agree(report: Report) -> None:
    calls = sum(use.calls for use in report.ops)
    assert calls == sum(use.calls for use in report.sizes) == sum(use.calls for use in report.communicators)
    assert calls == sum(role.calls for role in report.composition.roles)
    assert {use.role for use in report.communicators if use.calls} == {role.role for role in report.composition.roles}
    assert {role.role for role in report.composition.roles} == {"tp", "pp", "dp", "embedding"}
    assert report.regularity is not None
    assert len(report.iterations) == report.regularity.iterations
    assert report.latency.anomaly_count == 1


def test_everything_that_is_not_known_has_its_reason(report: Report) -> None:
    rows = [one.row for one in report.unknown]
    assert rows == sorted(rows)
    assert set(rows) <= set(BY_NUMBER)
    # Of one recording without compute and without a leaf map.
    assert {5, 8, 10, 12, 14, 15, 17} <= set(rows)


def test_the_order_of_rows_changes_nothing(report: Report, tmp_path: Path) -> None:
    job = training(tmp_path, shuffle=5)
    for number in range(20):
        job.operation("dp0", 0, "AllReduce", 4096, number * SECOND_NS, 2_000_000 if number else 90_000_000)
    shuffled = report_of(job.open())
    assert replace(shuffled, folders=()) == replace(report, folders=())


def test_text_has_a_short_section_for_each_question(report: Report) -> None:
    sections = as_text(report).split("\n\n")
    titles = [section.splitlines()[0].split(" (")[0] for section in sections]
    assert titles[0].startswith("16 GPUs on 2 servers, ")
    assert titles[1:] == [
        "Operations",
        "Sizes of calls",
        "Communicators",
        "Busiest pairs of GPUs",
        "Between servers",
        "How long operations take",
        "Far slower than usual, or stalled",
        "Composition",
        "Iterations",
        "Communication by parallelism",
        "Effective bandwidth",
        "Not known",
    ]
    assert all(len(section.splitlines()) <= 40 for section in sections)
    assert "  … and " in as_text(report)


def test_text_says_everything_that_is_not_known(report: Report) -> None:
    words = " ".join(as_text(report).split())
    for one in report.unknown:
        assert f"{BY_NUMBER[one.row].name}: {one.reason}" in words


def test_a_reason_of_several_rows_is_said_once_with_all_of_them() -> None:
    report = imported([SAMPLES / "nccl-launchers.log"])
    reason = "The imported data has no times, only an order: import data with timestamps."
    names = "regularity, all-to-all non-uniformity, communication ratio, non-overlapped ratio, receives"
    words = " ".join(as_text(report).split())
    assert words.count(reason) == 1
    assert f"- {names}: {reason}" in words
    rows = [one["row"] for one in as_json(report)["unknown"] if one["reason"] == reason]
    assert rows == [9, 10, 11, 12, 16]


@pytest.mark.parametrize(
    ("unequal", "said"),
    [
        ((), "In 13 iterations every pair sent as much as any other: 24 MiB in all (median)."),
        ((3, 5), "In 11 of 13 iterations every pair sent as much as any other: 24 MiB in all (median)."),
        (tuple(range(9)), "In 4 of 13 iterations every pair sent as much as any other: 24 MiB in all (median)."),
        (tuple(range(1, 13)), "In 1 of 13 iterations every pair sent as much as any other: 24 MiB in all."),
        (tuple(range(13)), ""),
    ],
    ids=["all are equal", "most are", "few are", "one is", "none is"],
)
def test_all_to_alls_that_are_equal_are_told_in_a_sentence_and_have_no_rows(
    tmp_path: Path, unequal: Sequence[int], said: str
) -> None:
    job = JobDataset(tmp_path, servers=(4,))
    job.communicator("ep", range(4))
    for number in range(14):
        for rank in range(4):
            for call in range(2):
                size = (3 if number in unequal and rank == 1 else 1) << 20
                job.call("ep", rank, "AllToAll", size, time_ns=BEGAN_NS + (number * 100 + call) * 1_000_000)
    report = report_of(job.open())
    (text,) = [part for part in as_text(report).split("\n\n") if part.startswith("Unequal all-to-all")]
    (page,) = [part for part in html_text(report).split("<h2 ") if ">Unequal all-to-all</h2>" in part]
    assert len([line for line in text.splitlines() if line.lstrip().startswith("+")]) == min(len(unequal), 10)
    assert page.count("<td>") == min(len(unequal), 12)
    assert ("(12 iterations; the least equal first" in text) is (len(unequal) == 12)
    for words in (text, page):
        assert said in " ".join(words.split())
        assert ("every pair sent" in words) is bool(said)
        assert "0 B" not in re.sub(r"<svg.*?</svg>", "", words, flags=re.DOTALL)


def test_text_cannot_steer_the_terminal(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1), recording={"calls_lost": 7, "node": "\x1b[2Jnode"})
    job.communicator("all", (0, 1))
    job.communicator("\x1b]0;owned\x07", (0, 1))
    job.communicator("twice", (0,), comm="\x1b[8mtwice")
    job.communicator("again", (1,), comm="\x1b[8mtwice")
    job.collective("all", "All\x1b[31mReduce", 8, data_type="\x9b5m")
    report = report_of(job.open())
    report = replace(report, unknown=(*report.unknown, Unknown(5, "\x1b[2J")), losses=("\x1b[2J", *report.losses))
    text = as_text(report)
    assert "\ufffd[2J" in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_a_recording_of_nothing_is_reported_as_such(tmp_path: Path) -> None:
    report = report_of(JobDataset(tmp_path, servers=(1,)).open())
    assert {1, 2, 3, 4, 5, 6, 9, 11, 13} <= {one.row for one in report.unknown}
    assert as_text(report).startswith("0 GPUs, 0 communicators, ")
    assert as_json(report)["matrix"] == []


def test_what_was_lost_is_said_with_its_nodes(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1), recording={"calls_lost": 7, "operations_lost": None})
    job.communicator("all", (0, 1))
    losses = report_of(job.open()).losses
    assert losses == (
        "14 calls were observed and not recorded: counts and bytes are too small by them (on node-0, node-1).",
        "Whether operations were lost is not known of node-0, node-1.",
    )


def test_calls_that_are_missing_are_said_once_before_any_figure(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1), recording={"calls_lost": 7, "calls_removed": 5, "lines_skipped": 1})
    job.communicator("all", (0, 1))
    job.collective("all", "AllReduce", 8)
    report = report_of(job.open())
    assert [sentence.split(" (")[0] for sentence in report.missing_calls] == [
        "14 calls were observed and not recorded: counts and bytes are too small by them",
        "10 calls were removed by --max-size: counts and bytes cover the others",
    ]
    text, page = as_text(report), html_text(report)
    for sentence in report.missing_calls:
        assert text.count(sentence) == page.count(sentence) == 1
        assert text.index(sentence) < text.index("Operations (")
        assert page.index(sentence) < page.index("<h2 ")
        assert sentence in as_json(report)["losses"]
    assert "Losses" in text
    assert "2 lines or events" in text.partition("Losses")[2]


def test_a_communicator_with_ranks_that_were_not_recorded_is_said(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1), silent_servers=frozenset({1}))
    job.communicator("all", (0, 1))
    assert report_of(job.open()).losses == ("1 of 1 communicator has ranks that were not recorded.",)


def test_what_was_removed_to_keep_the_folder_small_is_said(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(1, 1), recording={"calls_removed": 5000, "operations_removed": 7})
    job.communicator("all", (0, 1))
    losses = report_of(job.open()).losses
    assert losses == (
        "10,000 calls were removed by --max-size: counts and bytes cover the others (on node-0, node-1).",
        "14 completed operations were removed by --max-size: latencies cover the others (on node-0, node-1).",
    )


@pytest.mark.parametrize(("began", "said"), [(0.0, False), (0.4, False), (6.0, True)])
def test_nodes_that_were_recorded_at_different_times_are_named(tmp_path: Path, began: float, said: bool) -> None:
    folders = []
    for server, since in ((0, 0.0), (1, began)):
        times = {"began_ns": BEGAN_NS + int(since * SECOND_NS), "ended_ns": BEGAN_NS + 12 * SECOND_NS}
        silent = frozenset({1 - server})
        job = JobDataset(tmp_path / str(server), servers=(1, 1), silent_servers=silent, recording=times)
        job.communicator("all", (0, 1))
        folders.append(job.write())
    assert make_report(folders, SMALL).losses == (
        (
            "node-0 was recorded 12 s, node-1 6 s, up to 6 s apart: figures that need several nodes combine "
            "different times.",
        )
        if said
        else ()
    )


def test_gpus_that_share_no_communicator_are_said_to_be_of_several_jobs(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(6,))
    for comm, gpus in (("a", (0, 1)), ("b", (1, 2)), ("c", (3, 4)), ("d", (5,))):
        job.communicator(comm, gpus, job="4711" if comm in "ab" else None)
    (said,) = report_of(job.open()).losses
    assert said == (
        "3 groups of GPUs share no communicator, several jobs or one restarted, and figures are of all of them "
        "together: job 4711 (GPUs 0–2, communicator a), GPUs 3, 4 (communicator c) and 1 more.  'railscope report "
        "--only COMM' reports one of them alone."
    )


def test_several_jobs_are_said_before_any_figure_and_one_alone_can_be_asked_for(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2, 2))
    for comm, gpus, size, name in (("a", (0, 1), 8, "train"), ("b", (2, 3), 32, None)):
        job.communicator(comm, gpus, job=name)
        job.collective(comm, "AllReduce", size)
        for rank in (0, 1):
            job.operation(comm, rank, "AllReduce", size, 0, 1000 * size)
    folder = job.write()
    text = " ".join(as_text(make_report([folder], SMALL)).split())
    assert text.index("job train (GPUs 0, 1, communicator a) and GPUs 2, 3") < text.index("Operations (")
    assert text.count("'railscope report --only COMM' reports one of them alone") == 1
    for only, payload_bytes, server in (("train", 16, "node-0"), ("a", 16, "node-0"), ("b", 64, "node-1")):
        alone = make_report([folder], replace(SMALL, only=only))
        assert (alone.several_jobs, alone.losses) == ("", ())
        assert {gpu.server for gpu in alone.gpus} == {server}
        assert sum(use.payload_bytes for use in alone.ops) == payload_bytes
        assert {row.payload_bytes for row in alone.latency.rows} == {payload_bytes // 2}
        assert "--only" not in as_text(alone)
    with pytest.raises(DatasetError, match=r"--only c: no communicator and no job is called so; there are job train"):
        make_report([folder], replace(SMALL, only="c"))


def test_a_rank_that_two_gpus_claim_is_said(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2, 2))
    job.communicator("aa", (0, 1))
    job.communicator("another", (2, 3), comm="aa")
    assert report_of(job.open()).losses == (
        "Two or more GPUs claim to be rank 0 of aa, rank 1 of aa: only one's traffic with others is shown.",
    )


def test_several_folders_are_servers_of_one_job(tmp_path: Path) -> None:
    for server in (0, 1):
        job = JobDataset(tmp_path / str(server), servers=(1, 1), silent_servers=frozenset({1 - server}))
        job.communicator("all", (0, 1))
        job.collective("all", "AllReduce", 8)
        job.write()
    report = make_report([tmp_path / "0", tmp_path / "1"], SMALL)
    assert [gpu.server for gpu in report.gpus] == ["node-0", "node-1"]
    assert len(report.matrix.pairs) == 2
    assert report.losses == ()


def test_a_report_of_runs_has_their_scaling_and_says_which_has_no_iterations(tmp_path: Path) -> None:
    training(tmp_path / "first").write()
    training(tmp_path / "second").write()
    job = JobDataset(tmp_path / "still", servers=(1,))
    job.communicator("alone", (0,))
    job.write()
    report = make_runs([tmp_path / name for name in ("first", "second", "still")], SMALL)
    assert [(one.name, one.gpus, one.factor) for one in report.scaling] == [("first", 16, 1.0), ("second", 16, 1.0)]
    assert [one.reason for one in report.unknown if one.row == 14] == [
        "No iterations were found in still: record some of them."
    ]
    assert report.folders == (str(tmp_path / "first"),)


def test_the_command_prints_text_or_json_and_writes_a_page(tmp_path: Path) -> None:
    training(tmp_path / "job").write()
    status, text = run([tmp_path / "job", "--html", tmp_path / "report.html"])
    assert status == 0
    assert text.startswith("16 GPUs on 2 servers")
    assert text.endswith(f"\nwrote {tmp_path / 'report.html'}\n")
    assert "<html" in (tmp_path / "report.html").read_text()
    status, text = run([tmp_path / "job", "--json", "--memory", "512MiB"])
    assert status == 0
    assert set(json.loads(text)) >= ISSUE_KEYS


def test_no_name_is_not_every_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([tmp_path, "--only", " "])
    assert "--only: write a communicator's hash" in capsys.readouterr().err


def test_a_flight_recorders_file_is_reported_like_a_dataset(tmp_path: Path) -> None:
    save(recording(), tmp_path / "stall.npz")
    status, text = run([tmp_path / "stall.npz", "--json"])
    assert status == 0
    content = json.loads(text)
    assert sum(use["calls"] for use in content["ops"]) == 100
    assert content["recording"]["folders"] == [str(tmp_path / "stall.npz")]


def test_the_leaf_map_tells_what_reaches_the_spine(tmp_path: Path) -> None:
    training(tmp_path / "job").write()
    leaves = tmp_path / "leaves.csv"
    leaves.write_text("server,leaf\nnode-0,a\nnode-1,b\n")
    status, text = run([tmp_path / "job", "--json", "--leaf-map", leaves])
    assert status == 0
    traffic = json.loads(text)["traffic"]
    assert traffic["spine_wire_bytes"] == traffic["between_servers_wire_bytes"] > 0


def test_files_of_other_tools_are_imported_first_and_together() -> None:
    status, text = run(sorted(SAMPLES.glob("gpu-node-1_*.pt.trace.json")))
    assert status == 0
    assert text.startswith("2 GPUs on 1 server, 2 communicators")


def test_data_without_times_has_no_iterations_and_says_so() -> None:
    report = imported([SAMPLES / "nccl-launchers.log"])
    assert report.ops
    assert (report.regularity, report.iterations, report.receives) == (None, (), ())
    assert {9, 10, 11, 12, 16} <= {one.row for one in report.unknown if "no times, only an order" in one.reason}
    heading = as_text(report).splitlines()[0]
    assert heading.endswith(", times are not known")
    assert summarise(report)[0].endswith(" were recorded at times that are not known.")


def test_data_that_names_no_host_is_not_said_to_stay_inside_one() -> None:
    report = imported([SAMPLES / "nccl_trace_rank_0", SAMPLES / "nccl_trace_rank_1.json"])
    assert any(one.row == 5 and "--node NAME" in one.reason for one in report.unknown)


def test_missing_packages_are_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "railscope.agent.analysis.tables.datasets_of", raising=False)
    monkeypatch.delitem(sys.modules, "railscope.agent.dataset.reader", raising=False)
    monkeypatch.setitem(sys.modules, "ibis", None)
    assert run(["job"]) == (2, "")
    assert capsys.readouterr().err == f"railscope report: ibis-framework is not installed: {ANALYSIS}\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere"], "nowhere"),
        (["job", "--leaf-map", "nowhere.csv"], "nowhere.csv: cannot read the leaf map: No such file or directory"),
        (["job", "--html", "nowhere/report.html"], "nowhere/report.html"),
        (["notes.txt"], "notes.txt"),
    ],
)
def test_what_cannot_be_reported_is_one_line_that_names_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
) -> None:
    job = JobDataset(tmp_path / "job", servers=(1,))
    job.communicator("alone", (0,))
    job.write()
    (tmp_path / "notes.txt").write_text("what I had for lunch\n")
    monkeypatch.chdir(tmp_path)
    status, text = run(arguments)
    assert (status, text) == (2, "")
    error = capsys.readouterr().err
    assert error.startswith("railscope report: ")
    assert problem in error
    assert error.count("\n") == 1


def test_an_engine_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.errors", None)
    with pytest.raises(DatasetError, match=r"run .* -m pip install .*pyspark"):
        make_report([tmp_path], ReportOptions(engine="spark"))
