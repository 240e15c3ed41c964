"""`railscope matrix`: what GPUs sent each other, in the terminal and as files, beside what the model expects."""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.analysis.facts.report import Iteration, Regularity
from railscope.agent.analysis.matrix.command import add_matrix_arguments, run_matrix
from railscope.agent.analysis.matrix.compared_pairs import ComparedPairs, PairBytes, compared_pairs
from railscope.agent.analysis.matrix.matrix import Comparison, matrix_of
from railscope.agent.analysis.matrix.text import as_text
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.tables.missing import DISTRIBUTIONS
from railscope.agent.analysis.timing.iteration_count import CountedIterations, count_iterations
from railscope.agent.dataset.reader import open_dataset
from railscope.agent.model.mapping import custom_mapping, default_mapping
from railscope.agent.model.traffic import estimate_traffic
from railscope.probes.installation import remedy_for_missing_extra
from tests.unit.datasets import BEGAN_NS, SECOND_NS, JobDataset, gpt_job
from tests.unit.gpt_datasets import moe_job
from tests.unit.model_shapes import GPT_3B

ANALYSIS = remedy_for_missing_extra("analysis")

SHAPE = replace(
    GPT_3B, layers=8, hidden=64, sequence=16, vocabulary=1000, global_batch=16, micro_batch=2, pipeline=2, data=2
)
"""8 ranks: two stages, two tensor ranks, two replicas."""
OPTIONS = (
    *("--layers", "8", "--hidden", "64", "--seq", "16", "--vocab", "1000", "--global-batch", "16"),
    *("--micro-batch", "2", "--pp", "2", "--tp", "2", "--dp", "2", "--gpus-per-node", "4"),
)


MS = SECOND_NS // 1000


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations of SHAPE on two servers."""
    return gpt_job(tmp_path_factory.mktemp("job"), SHAPE, default_mapping(SHAPE), 4, 3).write()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="railscope matrix")
    add_matrix_arguments(made)
    return made


def matrix(*arguments: str | Path) -> str:
    """What the command prints; it must succeed."""
    out = io.StringIO()
    assert run_matrix(parser().parse_args([str(argument) for argument in arguments]), out) == 0
    return out.getvalue()


def as_json(*arguments: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(matrix(*arguments, "--json"))
    return content


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line of a command that could not run."""
    out = io.StringIO()
    assert run_matrix(parser().parse_args([str(argument) for argument in arguments]), out) == 2
    printed = capsys.readouterr().err
    assert out.getvalue() == ""
    assert printed.startswith("railscope matrix: ")
    assert printed.count("\n") == 1
    return printed


def test_the_recording_of_a_shape_is_as_predicted_to_the_byte(recording: Path) -> None:
    found = as_json(recording, *OPTIONS)["comparison"]
    expected = 3 * estimate_traffic(SHAPE, default_mapping(SHAPE)).total_bytes
    assert found["iterations"] == 3
    assert found["observed_wire_bytes"] == found["predicted_wire_bytes"] == expected
    assert (found["accuracy"], found["pair_accuracy"]) == (1.0, 1.0)
    assert (found["only_observed"], found["only_predicted"]) == (0, 0)
    assert all(pair["observed_wire_bytes"] == pair["predicted_wire_bytes"] for pair in found["pairs"])
    assert "every pair is as predicted, to the byte" in matrix(recording, *OPTIONS)


def test_another_mapping_has_the_same_bytes_between_other_pairs(recording: Path) -> None:
    found = as_json(recording, *OPTIONS, "--mapping", "custom")["comparison"]
    seen = set(zip(*estimate_traffic(SHAPE, default_mapping(SHAPE)).pairs()[:2], strict=True))
    told = set(zip(*estimate_traffic(SHAPE, custom_mapping(SHAPE)).pairs()[:2], strict=True))
    assert found["accuracy"] == 1.0
    assert found["pair_accuracy"] < 1.0
    assert found["only_observed"] == len(seen - told)
    assert found["only_predicted"] == len(told - seen)


def compared(*pairs: PairBytes) -> Comparison:
    return Comparison(1, ComparedPairs.from_pairs(pairs))


def test_pairs_of_thousands_of_gpus_are_compared_as_columns() -> None:
    gpus = 4096
    near, far = (np.arange(gpus), (np.arange(gpus) + 1) % gpus), (np.arange(gpus), (np.arange(gpus) + 2) % gpus)
    count = np.full(gpus, 1 << 61)
    both = compared_pairs(gpus, (*near, count), (np.tile(near[0], 2), np.append(near[1], far[1]), np.tile(count, 2)))
    assert isinstance(both.observed, np.ndarray)
    assert len(both) == 2 * gpus
    assert both[:3] == [
        PairBytes(0, 1, 1 << 61, 1 << 61),
        PairBytes(0, 2, 0, 1 << 61),
        PairBytes(1, 2, 1 << 61, 1 << 61),
    ]
    # What 64 bits cannot count is exact all the same.
    assert (both.observed_bytes, both.predicted_bytes) == (gpus << 61, gpus << 62)
    assert both.difference_bytes == gpus << 61
    comparison = Comparison(1, both)
    assert (len(comparison.only_predicted), len(comparison.only_observed), len(comparison.different)) == (gpus, 0, gpus)
    assert comparison.accuracy == comparison.pair_accuracy == 0.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 9), st.integers(0, 9)), max_size=20))
def test_compared_pairs_are_the_pairs_of_both_sides(rows: list[tuple[int, int, int, int]]) -> None:
    seen = {row[:2]: row[2] for row in rows}
    told = {row[:2]: row[3] for row in rows if row[3]}

    def columns(side: dict[tuple[int, int], int]) -> tuple[Any, Any, Any]:
        ends = np.array(list(side), dtype=np.int32).reshape(-1, 2)
        return ends[:, 0], ends[:, 1], np.array(list(side.values()), dtype=np.int64)

    found = compared_pairs(4, columns(seen), columns(told))
    assert list(found) == [PairBytes(*pair, seen.get(pair, 0), told.get(pair, 0)) for pair in sorted({*seen, *told})]
    order = [abs(pair.observed - pair.predicted) for pair in found.most_different_first()]
    assert order == sorted(order, reverse=True)
    assert found.difference_bytes == sum(order)


def test_the_largest_differences_are_listed_first(recording: Path) -> None:
    text = matrix(recording, *OPTIONS, "--mapping", "custom")
    rows = text.split("Largest differences\n")[1].splitlines()[1:]
    assert rows
    assert "accuracy of all bytes  100 %" in text
    comparison = compared(PairBytes(0, 1, 5, 6), PairBytes(0, 2, 100, 0), PairBytes(1, 0, 7, 7))
    assert [(pair.source, pair.destination) for pair in comparison.different] == [(0, 2), (0, 1)]
    assert comparison.pair_accuracy == 1 - 101 / 112
    assert comparison.accuracy == 1 - 99 / 112


def test_too_much_here_does_not_make_up_for_too_little_there() -> None:
    comparison = compared(PairBytes(0, 1, 10, 0), PairBytes(1, 0, 0, 10))
    assert (comparison.accuracy, comparison.pair_accuracy) == (1.0, -1.0)


def test_accuracy_is_not_rounded_up_to_a_hundred_per_cent(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (2,))
    job.communicator("aa", (0, 1))
    job.collective("aa", "AllReduce", 1 << 40)
    found = matrix_of(job.open())
    off = compared(PairBytes(0, 1, 1 << 40, (1 << 40) - 1))
    text = as_text(replace(found, comparison=off))
    assert "above 99.99 %" in text
    assert " 100 %" not in text.split("Against")[1]


@pytest.mark.parametrize("options", [(), OPTIONS, (*OPTIONS, "--mapping", "custom")])
def test_the_json_is_as_the_standard_library_writes_it(recording: Path, options: tuple[str, ...]) -> None:
    text = matrix(recording, "--json", *options)
    assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"


def test_without_a_shape_there_is_nothing_to_compare_with(recording: Path) -> None:
    assert as_json(recording)["comparison"] is None
    text = matrix(recording)
    assert "observed" in text
    assert "predicted" not in text
    assert "pairs that talk: " in text


def test_a_shape_from_a_file_is_that_from_options(recording: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    pairs = zip(OPTIONS[::2], OPTIONS[1::2], strict=True)
    file.write_text("".join(f"{name.removeprefix('--')} = {value}\n" for name, value in pairs))
    assert as_json(recording, "--estimate", file) == as_json(recording, *OPTIONS)


def test_iterations_can_be_said(recording: Path) -> None:
    found = as_json(recording, *OPTIONS, "--iterations", "6")["comparison"]
    assert found["iterations"] == 6
    assert found["accuracy"] == pytest.approx(0.0)


def test_iterations_that_do_not_come_out_whole_are_said(tmp_path: Path) -> None:
    # In a single iteration only its micro-batches repeat.
    folder = gpt_job(tmp_path, SHAPE, default_mapping(SHAPE), 4, 1).write()
    assert any("Give their number with --iterations N." in note for note in as_json(folder, *OPTIONS)["notes"])
    told = as_json(folder, *OPTIONS, "--iterations", "1")
    assert told["comparison"]["pair_accuracy"] == 1.0
    assert not any("--iterations" in note for note in told["notes"])


def test_where_nothing_repeats_only_pairs_are_compared(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (4, 4))
    ranks = default_mapping(SHAPE).ranks
    for number, gpus in enumerate(ranks.reshape(-1, 2).tolist()):
        job.communicator(f"tp{number}", gpus)
        job.collective(f"tp{number}", "AllReduce", 1 << 20)
    folder = job.write()
    found = as_json(folder, *OPTIONS)
    assert found["comparison"]["iterations"] is None
    assert found["comparison"]["accuracy"] is None
    assert (found["comparison"]["only_observed"], found["comparison"]["only_predicted"]) == (0, 16)
    assert any("No iterations were found" in note for note in found["notes"])
    assert "Pairs on one side only" in matrix(folder, *OPTIONS)


def test_of_a_job_recorded_in_part_its_own_pairs_are_compared(tmp_path: Path) -> None:
    job = gpt_job(tmp_path, SHAPE, default_mapping(SHAPE), 4, 3, world_ranks=True, silent_servers=frozenset({0}))
    found = as_json(job.write(), *OPTIONS, "--iterations", "3")["comparison"]
    assert {end for pair in found["pairs"] for end in (pair["source"], pair["destination"])} == {0, 1, 2, 3}
    assert found["pair_accuracy"] == 1.0


def test_the_text_fits_a_terminal_for_any_number_of_gpus(tmp_path: Path) -> None:
    for gpus in (2, 36, 37, 200):
        job = JobDataset(tmp_path / str(gpus), (gpus,))
        job.communicator("aa", range(gpus))
        job.call("aa", 0, "Send", 1 << 20, peer=gpus - 1)
        job.call("aa", gpus - 1, "Send", 1 << 30, peer=0)
        lines = as_text(matrix_of(job.open())).splitlines()
        assert max(len(line) for line in lines) <= 80
        assert any("██" in line and "│" in line for line in lines)
        assert any("added up" in line for line in lines) == (gpus > 36)


def test_the_darker_the_more(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (3,))
    job.communicator("aa", (0, 1, 2))
    job.call("aa", 0, "Send", 1 << 10, peer=1)
    job.call("aa", 1, "Send", 1 << 20, peer=2)
    job.call("aa", 2, "Send", 1 << 30, peer=0)
    rows = [line.split("│")[1] for line in as_text(matrix_of(job.open())).splitlines() if "│" in line]
    assert rows == ["  ··  ", "    ▒▒", "██    "]


def test_csv_has_every_pair_and_all_bytes(recording: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    told = matrix(recording, *OPTIONS, "-o", file)
    assert "│" not in told
    assert told.endswith(f"\nwrote {file}\n")
    assert "Against the prediction of 3 iterations" in told
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    flows = estimate_traffic(SHAPE, default_mapping(SHAPE))
    assert len(rows) == flows.pair_count
    assert sum(int(row["wire_bytes"]) for row in rows) == 3 * flows.total_bytes
    assert all(row["wire_bytes"] == row["predicted_wire_bytes"] for row in rows)
    assert rows[0]["source_server"] == "node-0"


def test_svg_shows_both_beside_each_other(recording: Path, tmp_path: Path) -> None:
    file = tmp_path / "both.svg"
    matrix(recording, *OPTIONS, "-o", file)
    texts = [element.text for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    assert "Observed (simulated hardware)" in texts
    assert "Predicted, 3 iterations" in texts
    matrix(recording, "-o", file)
    texts = [element.text for element in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    assert "Wire bytes from GPU to GPU (simulated hardware)" in texts


def test_png_is_a_picture(recording: Path, tmp_path: Path) -> None:
    file = tmp_path / "both.png"
    matrix(recording, "-o", file)
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_another_jobs_shape_is_refused(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, recording, *OPTIONS[:-2], "--dp", "4")
    assert "the estimate is of 16 ranks, the recording of 8 GPUs" in said


def test_a_shape_that_cannot_be_is_refused(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--hidden" in refusal(capsys, recording, "--layers", "8")


def test_no_dataset_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "railscope record" in refusal(capsys, tmp_path)


def test_a_file_that_cannot_be_written_is_one_line(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "missing/m.svg: cannot write it" in refusal(capsys, recording, "-o", tmp_path / "missing/m.svg")


def test_an_ending_that_is_no_picture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["x", "-o", "m.gif"])
    assert "ends in none of .png, .svg, .csv" in capsys.readouterr().err


def test_the_options_load_nothing_of_the_analysis() -> None:
    program = (
        "import argparse, sys\n"
        "from railscope.agent.analysis.matrix.command import add_matrix_arguments\n"
        "from railscope.agent.analysis.compare.command import add_compare_arguments\n"
        "for add in (add_matrix_arguments, add_compare_arguments):\n"
        "    parser = argparse.ArgumentParser(); add(parser); parser.format_help()\n"
        "print(sorted({'ibis', 'pyarrow', 'duckdb', 'numpy', 'PIL', 'pandas', 'scipy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("command", "missing"), [("matrix", "ibis"), ("matrix", "pyarrow"), ("compare", "ibis")])
def test_a_missing_package_is_one_line(command: str, missing: str, tmp_path: Path) -> None:
    program = (
        "import argparse, sys\n"
        f"sys.modules[{missing!r}] = None\n"
        f"from railscope.agent.analysis.{command}.command import add_{command}_arguments as add, run_{command} as run\n"
        "parser = argparse.ArgumentParser(); add(parser)\n"
        f"sys.exit(run(parser.parse_args([{str(tmp_path)!r}] * 2), sys.stdout))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"railscope {command}: {DISTRIBUTIONS[missing]} is not installed: {ANALYSIS}\n"


def test_png_without_its_package_is_one_line(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "railscope.agent.analysis.pictures.png", raising=False)
    monkeypatch.setitem(sys.modules, "PIL", None)
    said = refusal(capsys, recording, "-o", tmp_path / "m.png")
    assert said == f"railscope matrix: pillow is not installed: {ANALYSIS}, or write SVG\n"


def iterations_of(job: JobDataset, regularity: Regularity) -> CountedIterations | None:
    """With two iterations, from 10 to 30 ms of the recording."""
    found = [
        Iteration(0.0, 0.01, None, None, None, None, None, BEGAN_NS + start * MS, BEGAN_NS + (start + 10) * MS)
        for start in (10, 20)
    ]
    dataset = job.open()
    return count_iterations(dataset, find_gpus(dataset), count_calls(dataset), regularity, found)


def repeated(folder: Path, times_ms: range) -> JobDataset:
    """Two ranks call once a millisecond."""
    job = JobDataset(folder, (2,))
    job.communicator("aa", (0, 1))
    for rank in (0, 1):
        for time in times_ms:
            job.call("aa", rank, "AllReduce", 8, time_ns=BEGAN_NS + time * MS)
    return job


def test_whole_iterations_count_all_calls(tmp_path: Path) -> None:
    found = iterations_of(repeated(tmp_path, range(10, 40)), Regularity(1.0, None, 1.0, 2, 10))
    assert found is not None
    assert (found.number, found.counted.total_calls, found.note) == (3, 60, "")


def test_a_recording_that_began_in_the_middle_counts_complete_iterations_only(tmp_path: Path) -> None:
    found = iterations_of(repeated(tmp_path, range(7, 40)), Regularity(1.0, None, 1.0, 2, 10))
    assert found is not None
    assert (found.number, found.counted.total_calls) == (2, 40)
    assert found.note.startswith("26 of 66 calls lie before or after the 2 complete iterations")


def test_the_matrix_of_complete_iterations_is_exact_where_calls_lie_before_them(tmp_path: Path) -> None:
    job = gpt_job(tmp_path, SHAPE, default_mapping(SHAPE), 4, 5)
    job.communicator("start", range(8))
    job.collective("start", "Broadcast", 1 << 20, peer=0, time_ns=BEGAN_NS - 10 * SECOND_NS)
    folder = job.write()
    found = as_json(folder, *OPTIONS)
    assert found["comparison"]["pair_accuracy"] == 1.0
    assert found["comparison"]["iterations"] == 4
    assert any("calls lie before or after the 4 complete iterations" in note for note in found["notes"])
    assert sum(pair["wire_bytes"] for pair in found["matrix"]) > found["comparison"]["observed_wire_bytes"]


def test_calls_that_the_recording_lost_are_said_below_the_first_line(tmp_path: Path) -> None:
    job = moe_job(tmp_path, iterations=6)
    job.recording = {"calls_lost": 7}
    written = job.write()
    for options in ((), ("--iteration", "1", "3")):
        (loss,) = json.loads(said(str(written), *options, "--json"))["losses"]
        assert " calls were observed and not recorded: counts and bytes are too small by them (on node-0" in loss
        lines = said(str(written), *options).splitlines()
        assert " ".join(lines[1 : lines.index("")]) == loss
        assert max(map(len, lines[1 : lines.index("")])) <= 80


def test_nothing_lost_is_no_loss(recording: Path) -> None:
    assert as_json(recording)["losses"] == []
    assert matrix(recording).splitlines()[1] == ""


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (2,))
    job.communicator("aa", (0, 1))
    found = matrix_of(job.open())
    assert "no pair communicated" in as_text(found)


def test_notes_cannot_steer_the_terminal(recording: Path) -> None:
    found = matrix_of(open_dataset([recording]))
    text = as_text(replace(found, notes=("\x1b[2J of a name",), traffic=replace(found.traffic, basis="\x9b5m")))
    assert "\ufffd[2J of a name" in text
    assert all(line.isprintable() for line in text.split("\n"))


def said(*arguments: str) -> str:
    """What a command prints that ends well."""
    out = io.StringIO()
    assert run_matrix(parser().parse_args(arguments), out) == 0
    return out.getvalue()


@pytest.mark.parametrize("mapping", ["default", "custom"])
def test_the_predicted_matrix_is_that_of_the_estimate_before_anything_runs(tmp_path: Path, mapping: str) -> None:
    table, picture = tmp_path / "predicted.csv", tmp_path / "predicted.svg"
    options = ("--predicted", *OPTIONS, "--mapping", mapping)
    said(*options, "-o", str(table))
    made = default_mapping(SHAPE) if mapping == "default" else custom_mapping(SHAPE)
    expected = estimate_traffic(SHAPE, made).matrix()
    rows = list(csv.DictReader(table.read_text().splitlines()))
    found = {(int(row["source"]), int(row["destination"])): int(row["predicted_wire_bytes"]) for row in rows}
    assert found == {(int(a), int(b)): int(expected[a, b]) for a, b in zip(*np.nonzero(expected), strict=True)}
    content = json.loads(said(*options, "--json"))
    assert {(one["source"], one["destination"]): one["predicted_wire_bytes"] for one in content["matrix"]} == found
    assert f"{mapping} mapping" in said(*options)
    said(*options, "-o", str(picture))
    root = ElementTree.fromstring(picture.read_text())
    squares = [one for one in root.iter() if one.tag.endswith("rect") and "heat" in one.get("class", "")]
    assert len(squares) >= len(found)
    assert "node 1" in picture.read_text()


def test_what_reads_no_recording_takes_none_and_what_reads_one_wants_it(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, why in (
        (("--predicted", *OPTIONS, str(recording)), "reads no recording"),
        ((), "which recording?"),
        ((str(recording), "--iteration", "0", *OPTIONS), "leave out --iterations and the shape"),
        ((str(recording), "--iteration", "9"), "there is no iteration 9: "),
    ):
        assert run_matrix(parser().parse_args(list(arguments)), io.StringIO()) == 2
        assert why in capsys.readouterr().err


def test_iterations_lie_beside_each_other_with_how_far_they_differ(tmp_path: Path) -> None:
    folder = moe_job(tmp_path / "job", iterations=6).write()
    content = json.loads(said(str(folder), "--iteration", "1", "3", "--json"))
    assert [one["number"] for one in content["iterations"]] == [1, 3]
    one, other = (
        {(pair["source"], pair["destination"]): pair["wire_bytes"] for pair in found["matrix"]}
        for found in content["iterations"]
    )
    apart = sum(abs(one.get(ends, 0) - other.get(ends, 0)) for ends in one.keys() | other.keys())
    (difference,) = content["differences"]
    assert difference["ratio"] == pytest.approx(apart / (sum(one.values()) + sum(other.values())))
    assert difference["ratio"] > 0
    # What rank 0 sends to rank 1 of its experts: of moe_job, in iteration i.
    sizes = {i: sum(2048 * (1 + (i + 3 * layer + 7) % 11) for layer in range(12)) for i in range(6)}
    assert one[0, 1] - other[0, 1] == sizes[1] - sizes[3]
    text = said(str(folder), "--iteration", "1", "3")
    assert "iteration 1" in text
    assert "differ by" in text
    picture, table = tmp_path / "beside.svg", tmp_path / "beside.csv"
    said(str(folder), "--iteration", "1", "3", "-o", str(picture))
    assert "Iteration 3: differs by" in picture.read_text()
    said(str(folder), "--iteration", "1", "3", "-o", str(table))
    assert table.read_text().splitlines()[0] == "source,destination,wire_bytes_1,wire_bytes_3"


def test_the_same_iterations_of_a_job_that_repeats_itself_do_not_differ(recording: Path) -> None:
    content = json.loads(said(str(recording), "--iteration", "0", "1", "--json"))
    assert content["differences"] == [{"one": 0, "other": 1, "ratio": 0.0}]
