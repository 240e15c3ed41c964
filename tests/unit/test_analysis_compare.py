"""`railscope compare`: two recordings, a recording and an estimate, and whether a difference is chance."""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from railscope.agent.analysis.compare.command import add_compare_arguments, run_compare
from railscope.agent.analysis.compare.compare import compare_runs, compare_sides
from railscope.agent.analysis.compare.estimate import compare_with_estimate
from railscope.agent.analysis.compare.figures import (
    Compared,
    Figure,
    Side,
    Unit,
    Value,
    accuracy,
    compare_values,
    side_of,
)
from railscope.agent.analysis.compare.significance import rank_test
from railscope.agent.analysis.compare.text import as_json_text, as_text, warnings_of
from railscope.agent.dataset.reader import open_dataset
from railscope.agent.estimate.answer import estimate_of
from railscope.agent.estimate.options import request_from
from railscope.agent.model.mapping import default_mapping
from railscope.probes.installation import remedy_for_missing_extra
from tests.unit.datasets import BEGAN_NS, JobDataset, gpt_job
from tests.unit.gpt_datasets import ddp_job, moe_job
from tests.unit.model_shapes import GPT_3B

ANALYSIS = remedy_for_missing_extra("analysis")

SHAPE = replace(
    GPT_3B, layers=8, hidden=64, sequence=16, vocabulary=1000, global_batch=16, micro_batch=2, pipeline=2, data=2
)
TOML = """\
layers = 8
hidden = 64
seq = 16
vocab = 1000
global_batch = 16
micro_batch = 2
pp = 2
tp = 2
dp = 2
gpus_per_node = 4
"""
MS = 1_000_000


def timed_job(folder: Path, factor: float, seed: int, iterations: int = 12) -> Path:
    """Iterations of six AllReduces of 1 MiB on four GPUs, each about 2 ms × factor, then 30 ms without (simulated)."""
    noise = random.Random(seed)
    job = JobDataset(folder, (2, 2))
    job.communicator("aa", (0, 1, 2, 3))
    now = 0
    for _ in range(iterations):
        for _ in range(6):
            took = int(2 * MS * factor * noise.lognormvariate(0, 0.05))
            for rank in range(4):
                job.call("aa", rank, "AllReduce", 1 << 20, time_ns=BEGAN_NS + now)
                job.operation("aa", rank, "AllReduce", 1 << 20, now, took)
            now += took + MS
        now += 30 * MS
    return job.write()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("jobs")
    (base / "job.toml").write_text(TOML)
    return {
        "usual": timed_job(base / "usual", 1.0, 1),
        "again": timed_job(base / "again", 1.0, 2),
        "slow": timed_job(base / "slow", 1.5, 3),
        "long": timed_job(base / "long", 1.0, 4, iterations=24),
        "short": timed_job(base / "short", 1.5, 5, iterations=4),
        "gpt": gpt_job(base / "gpt", SHAPE, default_mapping(SHAPE), 4, 3).write(),
        "toml": base / "job.toml",
    }


@pytest.fixture(scope="module")
def sides(folders: dict[str, Path]) -> dict[str, Side]:
    """Every recording, read once."""
    names = [name for name in folders if name != "toml"]
    return {name: side_of(open_dataset([folders[name]]), name) for name in names}


def compare(*arguments: str | int | Path) -> str:
    """What the command prints; it must succeed."""
    out = io.StringIO()
    assert run_compare(parsed(*arguments), out) == 0
    return out.getvalue()


def parsed(*arguments: str | int | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="railscope compare")
    add_compare_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


def as_json(a: Side, b: Side | Path) -> dict[str, Any]:
    if isinstance(b, Path):
        estimate = estimate_of(request_from(argparse.Namespace(file=b, json=True)))
        compared = compare_with_estimate(a, estimate, b.name)
    else:
        compared = compare_sides(a, b)
    content: dict[str, Any] = json.loads(as_json_text(compared))
    return content


def by_name(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for figure in content["figures"]}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line of a command that could not run."""
    out = io.StringIO()
    assert run_compare(parsed(*arguments), out) == 2
    printed = capsys.readouterr().err
    assert out.getvalue() == ""
    assert printed.startswith("railscope compare: ")
    assert printed.count("\n") == 1
    return printed


def test_a_slower_network_is_found_and_said_in_words(sides: dict[str, Side]) -> None:
    content = as_json(sides["usual"], sides["slow"])
    figures = by_name(content)
    for name in ("period", "communication", "communication ratio", "median AllReduce of 1 MiB (proxy)"):
        assert figures[name]["significant"], name
        assert figures[name]["b"] > figures[name]["a"]
        assert figures[name]["b_is_larger"] > 0.9
    bandwidth = figures["bus bandwidth of AllReduce of 1 MiB"]
    assert bandwidth["significant"]
    assert bandwidth["ratio"] == pytest.approx(1 / 1.5, rel=0.05)
    assert bandwidth["b_is_larger"] < 0.1
    assert any(
        sentence.startswith("B's period is 1") and "longer" in sentence and "(significant, p < 0.001)" in sentence
        for sentence in content["words"]
    )
    assert any("points higher" in sentence for sentence in content["words"] if "communication ratio" in sentence)
    assert "Both send the same: calls, payload and pairs differ by less than 1 %." in content["words"]


def test_two_runs_of_the_same_differ_by_chance_only(sides: dict[str, Side]) -> None:
    content = as_json(sides["usual"], sides["again"])
    assert not [figure["name"] for figure in content["figures"] if figure["significant"]]
    assert by_name(content)["period"]["significant"] is False
    assert any(sentence.startswith("Iterations take as long in both") for sentence in content["words"])


def test_a_recording_equals_itself(sides: dict[str, Side]) -> None:
    for figure in as_json(sides["slow"], sides["slow"])["figures"]:
        assert figure["a"] == figure["b"]
        assert figure["p"] in (None, 1.0)


def test_sizes_that_print_alike_are_told_apart_to_the_byte(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (2,))
    job.communicator("aa", (0, 1))
    for number in range(60):
        for place, (size, took) in enumerate(((26_214_400, MS), (26_214_656, 3 * MS))):
            at = number * 10 * MS + place * 5 * MS
            for rank in range(2):
                job.call("aa", rank, "AllReduce", size, time_ns=BEGAN_NS + at)
                job.operation("aa", rank, "AllReduce", size, at, took)
    side = side_of(open_dataset([job.write()]), "same")
    content = as_json(side, side)
    figures = content["figures"]
    assert len({figure["name"] for figure in figures if figure["row"] in (6, 13)}) == sum(
        figure["row"] in (6, 13) for figure in figures
    )
    assert by_name(content)["median AllReduce of 26,214,400 B (proxy)"]["a"] == pytest.approx(0.001)
    assert by_name(content)["median AllReduce of 26,214,656 B (proxy)"]["a"] == pytest.approx(0.003)
    assert all(figure["a"] == figure["b"] for figure in figures), [figure["name"] for figure in figures]


def test_what_a_side_without_calls_sent_is_not_known(sides: dict[str, Side], tmp_path: Path) -> None:
    job = JobDataset(tmp_path / "silent", (2, 2))
    job.communicator("aa", (0, 1, 2, 3))
    silent = side_of(open_dataset([job.write()]), "silent")
    compared = compare_sides(sides["usual"], silent)
    sent = [figure for figure in compared.figures if figure.row in (3, 4, 5)]
    assert sent
    assert [figure.name for figure in sent if figure.b is not None] == []
    assert "100 % less" not in as_text(compared)
    assert "silent: no call was recorded, so its traffic is unknown." in compared.caveats


def test_volumes_of_a_recording_without_calls_are_not_held_against_an_estimate(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    job = JobDataset(tmp_path / "silent", (4, 4))
    job.communicator("aa", tuple(range(8)))
    content = as_json(side_of(open_dataset([job.write()]), "silent", 3), folders["toml"])
    assert {figure["row"] for figure in content["figures"]} == {17}
    assert any(note.startswith("No call was recorded") for note in content["caveats"])


def test_different_numbers_of_gpus_are_said_first(sides: dict[str, Side]) -> None:
    said = list(warnings_of(compare_sides(sides["usual"], sides["gpt"])))
    assert said[0].startswith("The numbers of GPUs differ: 4 in A, 8 in B;")
    assert not any(
        sentence.startswith("The numbers") for sentence in warnings_of(compare_sides(sides["usual"], sides["slow"]))
    )


def test_what_speaks_against_a_comparison_stands_before_the_first_difference(sides: dict[str, Side]) -> None:
    lossy = replace(sides["slow"], notes=("12 calls were lost.",))
    text = as_text(compare_sides(sides["usual"], lossy))
    assert text.index("Before comparing\n- slow: 12 calls were lost.\n") < text.index("- B's period")
    assert "Before comparing" not in as_text(compare_sides(sides["usual"], sides["slow"]))


def test_where_calls_are_missing_nothing_is_said_of_those(sides: dict[str, Side]) -> None:
    usual, slow, again = sides["usual"], sides["slow"], sides["again"]
    for other in (slow, again):
        whole = list(warnings_of(compare_sides(usual, other)))
        lossy = replace(other, report=replace(other.report, missing_calls=("7 calls are missing.",)))
        for pair in ((usual, lossy), (lossy, usual)):
            assert all(said.startswith("As far as was recorded, ") for said in warnings_of(compare_sides(*pair)))
        said = list(warnings_of(compare_sides(usual, lossy)))
        assert [one.removeprefix("As far as was recorded, ").lower() for one in said] == [one.lower() for one in whole]
        assert not any("recorded" in sentence for sentence in whole)
    assert any(sentence.startswith("As far as was recorded, both send the same: ") for sentence in said)
    assert any(sentence.startswith("As far as was recorded, iterations take as long ") for sentence in said)


def test_calls_that_a_recording_lost_hedge_the_words(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (2,), recording={"calls_lost": 7})
    job.communicator("aa", (0, 1))
    job.collective("aa", "AllReduce", 8)
    side = side_of(open_dataset([job.write()]), "lossy")
    assert compare_sides(side, side).incomplete
    (said,) = warnings_of(compare_sides(side, side))
    assert said == "As far as was recorded, both send the same: calls, payload and pairs differ by less than 1 %."


def test_an_accuracy_below_zero_comes_with_its_formula() -> None:
    (wrong,) = compare_values(
        [Value(17, "T_iter", Unit.SECONDS, 1.0)], [Value(17, "T_iter", Unit.SECONDS, 4.0)], predicted=True
    )
    text = as_text(Compared("a", "b", True, False, (wrong,), ()))
    assert text.count("accuracy: 1 − |predicted − measured| / measured; where it is below 0: how many times") == 1
    assert "- T_iter: measured 1 s, predicted 4 s, 4 times too much." in text
    assert "−200" not in text


def test_sides_swapped_turn_the_sign_and_keep_the_evidence(sides: dict[str, Side]) -> None:
    there = by_name(as_json(sides["usual"], sides["slow"]))
    back = by_name(as_json(sides["slow"], sides["usual"]))
    for name, figure in there.items():
        assert (back[name]["a"], back[name]["b"]) == (figure["b"], figure["a"])
        assert back[name]["p"] == pytest.approx(figure["p"])


def test_recordings_of_different_length_are_compared_by_iteration(sides: dict[str, Side]) -> None:
    figures = by_name(as_json(sides["usual"], sides["long"]))
    calls = figures["AllReduce calls an iteration"]
    assert calls["a"] == calls["b"] == 24
    assert figures["wire bytes between GPUs an iteration"]["ratio"] == 1


def test_a_recording_of_two_iterations_says_which_it_is_and_what_helps(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Where an iteration ends is not to be seen in so few; who knows how many there are, says it."""
    two = timed_job(tmp_path / "two", 1.0, 2, iterations=2)
    content = json.loads(compare(folders["usual"], two, "--json"))
    (caveat,) = content["caveats"]
    assert caveat.endswith(f"not found in the calls of B ({two}; --iterations-b N says how many).")
    figures = by_name(content)
    assert (figures["AllReduce calls"]["a"], figures["AllReduce calls"]["b"]) == (12 * 24, 2 * 24)
    told = by_name(json.loads(compare(folders["usual"], two, "--iterations-b", 2, "--json")))
    assert told["AllReduce calls an iteration"]["a"] == told["AllReduce calls an iteration"]["b"] == 24
    # How long one took is not known.
    assert told["period"]["b"] is None


def test_too_few_iterations_decide_nothing(sides: dict[str, Side]) -> None:
    content = as_json(sides["usual"], sides["short"])
    assert by_name(content)["period"]["significant"] is None
    assert any("whether by chance needs 4 iterations on each side" in sentence for sentence in content["words"])


def test_a_recording_of_the_shape_is_exactly_as_estimated(sides: dict[str, Side], folders: dict[str, Path]) -> None:
    content = as_json(sides["gpt"], folders["toml"])
    assert content["b_is_estimate"]
    volumes = [figure for figure in content["figures"] if figure["row"] in (7, 8)]
    assert len(volumes) == 12
    assert [figure["name"] for figure in volumes if figure["a"] != figure["b"]] == []
    assert {figure["accuracy"] for figure in volumes} <= {1.0, None}  # None: nothing of it was sent
    assert content["words"][0] == "11 of 12 figures are exactly as predicted."
    text = compare(folders["gpt"], folders["toml"])
    assert "simulated hardware" in text
    assert all(sentence.split(":")[0] in text for sentence in content["words"])


def test_what_the_recording_does_not_tell_has_no_accuracy(sides: dict[str, Side], folders: dict[str, Path]) -> None:
    content = as_json(sides["gpt"], folders["toml"])
    figures = by_name(content)
    for name in ("T_comm", "R_comm", "T_comp", "R_bubble"):
        assert figures[name]["a"] is None
        assert figures[name]["accuracy"] is None
        assert figures[name]["b"] > 0
    assert any(note.startswith("Not known: ") for note in content["notes"])
    assert any(note.startswith("Assumed, and not given: ") for note in content["notes"])


def test_measured_times_are_held_against_predicted_ones(sides: dict[str, Side], tmp_path: Path) -> None:
    job = tmp_path / "four.toml"
    job.write_text(TOML.replace("pp = 2", "pp = 1").replace("dp = 2", "dp = 2"))
    figures = by_name(as_json(sides["usual"], job))
    measured, predicted = figures["T_comm"]["a"], figures["T_comm"]["b"]
    assert measured == pytest.approx(0.012, rel=0.1)
    assert figures["T_comm"]["accuracy"] == pytest.approx(1 - abs(predicted - measured) / measured)
    assert figures["R_comm"]["a"] == pytest.approx(12 / 48, rel=0.1)


def test_idle_time_is_not_taken_for_computing(tmp_path: Path) -> None:
    # Simulated: of each 100 ms, 30 ms compute and 30 ms communicate, 20 ms of it at the same time; the rest is idle.
    job = JobDataset(tmp_path / "job", (2, 2))
    job.communicator("aa", (0, 1, 2, 3))
    for number in range(12):
        at = number * 100 * MS
        for rank in range(4):
            job.call("aa", rank, "AllReduce", 1 << 20, time_ns=BEGAN_NS + at)
            job.operation("aa", rank, "AllReduce", 1 << 20, at, 30 * MS, source="kernel")
            job.compute(rank, at + 5 * MS, 20 * MS)
            job.compute(rank, at + 60 * MS, 10 * MS)
    shape = tmp_path / "four.toml"
    shape.write_text(TOML.replace("pp = 2", "pp = 1"))
    figures = by_name(as_json(side_of(open_dataset([job.write()]), "job"), shape))
    assert figures["T_iter"]["a"] == pytest.approx(0.1)
    assert figures["T_comp"]["a"] == pytest.approx(0.03)


def test_computing_without_recorded_kernels_is_not_known_and_the_reason_is_given(
    sides: dict[str, Side], tmp_path: Path
) -> None:
    shape = tmp_path / "four.toml"
    shape.write_text(TOML.replace("pp = 2", "pp = 1"))
    content = as_json(sides["usual"], shape)
    assert by_name(content)["T_comp"]["a"] is None
    assert any("so the compute time" in note for note in content["notes"])


def test_an_estimate_of_another_job_is_refused_in_one_line(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "it has 4 ranks, and the estimate is of 8; give the estimate of its own job" in refusal(
        capsys, folders["usual"], folders["toml"]
    )
    text = folders["toml"].read_text()
    # The same ranks, with messages fifty times as large: another model.
    large = tmp_path / "large.toml"
    large.write_text(re.sub(r"(?m)^seq = (\d+)", lambda found: f"seq = {50 * int(found[1])}", text))
    assert large.read_text() != text
    assert "pipeline parallel payload an iteration is" in refusal(capsys, folders["gpt"], large)


def test_a_recording_of_some_ranks_is_compared_as_far_as_it_goes(
    sides: dict[str, Side], folders: dict[str, Path]
) -> None:
    few = replace(sides["gpt"].report, gpus=sides["gpt"].report.gpus[:4])
    few = replace(
        few, communicators=tuple(replace(use, gpus=use.gpus[:1]) for use in few.communicators if use.nranks != 1)
    )
    content = as_json(replace(sides["gpt"], report=few), folders["toml"])
    assert {figure["row"] for figure in content["figures"]} == {17}
    assert any("The estimate is of 8 ranks, and 4 GPUs were recorded" in note for note in content["caveats"])


def test_the_command_compares_two_folders(sides: dict[str, Side], folders: dict[str, Path]) -> None:
    text = compare(folders["usual"], folders["slow"])
    same = as_text(compare_sides(sides["usual"], sides["slow"]))
    assert text.splitlines()[2:] == same.splitlines()[2:]
    assert text.startswith(f"A  {folders['usual']}\nB  {folders['slow']}\n")
    assert max(len(line) for line in text.splitlines()) <= 120


def test_errors_are_one_line(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "railscope record" in refusal(capsys, tmp_path, folders["usual"])
    (tmp_path / "bad.toml").write_text("layer = 3\n")
    assert "unknown key layer" in refusal(capsys, folders["usual"], tmp_path / "bad.toml")
    assert "missing.toml" in refusal(capsys, folders["usual"], tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("measured", "predicted", "expected"),
    [(10.0, 9.0, 0.9), (10.0, 11.0, 0.9), (10.0, 30.0, -1.0), (10.0, 10.0, 1.0), (0.0, 1.0, None), (None, 1.0, None)],
)
def test_accuracy_is_that_of_the_paper(measured: float | None, predicted: float, expected: float | None) -> None:
    assert accuracy(measured, predicted) == (None if expected is None else pytest.approx(expected))


def test_a_figure_that_one_side_lacks_stays_with_the_other() -> None:
    figures = compare_values(
        [Value(1, "x", Unit.COUNT, 3.0), Value(1, "y", Unit.COUNT, 2.0)], [Value(1, "z", Unit.COUNT, 1.0)]
    )
    assert [(one.name, one.a, one.b) for one in figures] == [("x", 3.0, None), ("y", 2.0, None), ("z", None, 1.0)]
    assert figures[0].difference is None
    assert figures[0].ratio is None


def test_chance_among_many_figures_is_not_taken_for_a_difference() -> None:
    # One of twenty figures has p = 0.004 by itself: not significant where twenty were tested.
    noise = np.random.default_rng(3)
    same = [Value(6, str(number), Unit.SECONDS, 1.0, noise.random(12)) for number in range(20)]
    other = [replace(value, samples=noise.random(12)) for value in same]
    single = [
        rank_test(a.samples, b.samples)
        for a, b in zip(same, other, strict=True)
        if a.samples is not None and b.samples is not None
    ]
    figures = compare_values(same, other)
    assert not any(figure.significant for figure in figures)
    assert all(
        figure.p is not None and test is not None and figure.p >= test.p
        for figure, test in zip(figures, single, strict=True)
    )


def figure(name: str, unit: Unit, a: float, b: float, p: float | None) -> Figure:
    return Figure(9, name, unit, a, b, None, p)


def test_sentences_say_how_much_in_the_figures_own_words() -> None:
    def said(one: Figure) -> str:
        return next(iter(warnings_of(Compared("a", "b", False, False, (one,), ()))))

    assert said(figure("period", Unit.SECONDS, 1.0, 1.12, 0.0001)) == (
        "B's period is 12 % longer: 1.12 s instead of 1 s (significant, p < 0.001)."
    )
    assert said(figure("period", Unit.SECONDS, 1.0, 0.9, 0.002)) == (
        "B's period is 10 % shorter: 900 ms instead of 1 s (significant, p = 0.002)."
    )
    assert said(figure("period", Unit.SECONDS, 1.0, 3.0, 0.0001)).startswith("B's period is 3 times A's: 3 s instead")
    for name, verb in (("AllReduce calls an iteration", "are"), ("AllReduce payload an iteration", "is")):
        assert said(figure(name, Unit.COUNT, 1.0, 3.0, 0.0001)).startswith(f"B's {name} {verb} 3 times A's: 3 ")
    assert said(figure("duty cycle", Unit.SHARE, 0.2, 0.5, 0.0001)).startswith("B's duty cycle is 30 points higher")


def test_p_of_two_recordings_is_said_to_be_of_the_spread_within_them(sides: dict[str, Side]) -> None:
    content = as_json(sides["usual"], sides["slow"])
    assert content["p_is_of_the_spread"] == "within recordings"
    assert any(note.startswith("p is computed from the spread within the two recordings") for note in content["notes"])
    assert "--a-again" in as_text(compare_sides(sides["usual"], sides["slow"]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Side]]:
    """A job that was started several times each: as usual, much slower, and no slower than starts differ."""
    base = tmp_path_factory.mktemp("runs")
    factors = {"usual": (0.9, 1.0, 1.1), "slow": (2.9, 3.0, 3.1), "alike": (1.02, 1.12)}
    return {
        name: [
            side_of(open_dataset([timed_job(base / f"{name}-{place}", factor, place, iterations=6)]), f"{name}-{place}")
            for place, factor in enumerate(own)
        ]
        for name, own in factors.items()
    }


def test_recordings_of_several_starts_are_held_against_the_spread_between_them(runs: dict[str, list[Side]]) -> None:
    name = "median AllReduce of 1 MiB (proxy)"
    slow = compare_runs(runs["usual"], runs["slow"])
    assert json.loads(as_json_text(slow))["p_is_of_the_spread"] == "between recordings"
    assert slow.a == "usual-0, and 2 recordings more"
    figures = {one.name: one for one in slow.figures}
    found = figures[name]
    assert found.significant
    assert found.a == sorted(side.report.latency.rows[0].p50_seconds for side in runs["usual"])[1]
    assert found.ratio == pytest.approx(3, rel=0.1)
    # What is the same in every recording needs no test.
    assert figures["AllReduce calls an iteration"].p is None
    alike = {one.name: one for one in compare_runs(runs["usual"], runs["alike"]).figures}
    assert alike[name].significant is False
    # Within two of these recordings the difference looks sure, and it is that of two starts of one job.
    one_each = {one.name: one for one in compare_sides(runs["usual"][0], runs["usual"][2]).figures}
    assert one_each[name].significant


def test_the_command_takes_more_recordings_of_a_side(folders: dict[str, Path]) -> None:
    arguments = (folders["usual"], folders["slow"], "--a-again", folders["again"], "--json")
    content = json.loads(compare(*arguments))
    assert content["p_is_of_the_spread"] == "between recordings"
    assert content["a"] == f"{folders['usual']}, and 1 recording more"
    assert content["b"] == str(folders["slow"])


def test_repeated_runs_without_scipy_say_what_to_install(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    said = refusal(capsys, folders["usual"], folders["slow"], "--a-again", folders["again"])
    assert said == f"railscope compare: scipy is not installed: {ANALYSIS}\n"


@pytest.mark.parametrize("servers", [(4, 4), (4, 4, 4, 4)])
def test_recordings_of_different_jobs_are_said_to_be_and_no_difference_is_tested(
    tmp_path: Path, servers: tuple[int, ...]
) -> None:
    one = side_of(open_dataset([ddp_job(tmp_path / "ddp", iterations=12).write()]), "ddp")
    other = side_of(open_dataset([moe_job(tmp_path / "moe", servers, iterations=12).write()]), "moe")
    compared = compare_sides(one, other)
    assert "expert parallel" in compared.unlike
    assert compared.caveats[0].startswith("A and B are different jobs, since A has ")
    assert all(figure.p is None for figure in compared.figures)
    assert not any("by chance" in words or "significant" in words for words in warnings_of(compared))
    assert json.loads(as_json_text(compared))["unlike"] == compared.unlike
    text = as_text(compared)
    assert text.index("A and B are different jobs") < text.index("Operations")


def test_two_recordings_of_one_job_are_not_unlike(sides: dict[str, Side]) -> None:
    names = sorted(sides)
    same = sides[names[0]]
    assert compare_sides(same, same).unlike == ""


def test_runs_of_different_numbers_of_gpus_have_their_scaling(tmp_path: Path) -> None:
    small = gpt_job(tmp_path / "small", SHAPE, default_mapping(SHAPE), 4, 4).write()
    twice = replace(SHAPE, data=4, global_batch=32)
    large = gpt_job(tmp_path / "large", twice, default_mapping(twice), 4, 4).write()
    content = json.loads(compare(small, large, "--json"))
    (factor,) = [one for one in content["figures"] if one["row"] == 14]
    assert factor["name"] == "scaling factor, weak scaling"
    assert factor["a"] == 1.0
    assert factor["b"] == pytest.approx(
        next(one["a"] / one["b"] for one in content["figures"] if one["name"] == "period")
    )


def test_of_different_jobs_there_is_no_scaling_and_it_is_said_why(tmp_path: Path) -> None:
    small = gpt_job(tmp_path / "small", SHAPE, default_mapping(SHAPE), 4, 4).write()
    other = replace(SHAPE, pipeline=1, data=8, global_batch=32)
    large = gpt_job(tmp_path / "other", other, default_mapping(other), 4, 4).write()
    content = json.loads(compare(small, large, "--json"))
    assert [one for one in content["figures"] if one["row"] == 14] == []
    assert any(
        one.startswith("There is no scaling factor: it is of one job on 8 and on 16 GPUs, and these are not comparable")
        and "A has tensor parallel and pipeline parallel communication and B has tensor parallel" in one
        for one in content["caveats"]
    )
    assert "scaling factor, " not in compare(small, large)


def test_a_leaf_map_tells_what_reaches_the_spine_on_both_sides(folders: dict[str, Path], tmp_path: Path) -> None:
    leaves = tmp_path / "leaves.csv"
    leaves.write_text("server,leaf\nnode-0,a\nnode-1,b\n")
    content = json.loads(compare(folders["usual"], folders["long"], "--leaf-map", leaves, "--json"))
    found = {one["name"]: (one["a"], one["b"]) for one in content["figures"] if one["row"] == 5}
    spine = found["wire bytes over the spine an iteration"]
    assert spine == found["wire bytes between servers an iteration"]
    assert spine[0] == spine[1] > 0


def test_more_recordings_of_an_estimate_are_refused_in_one_line(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = parsed(folders["gpt"], folders["toml"], "--a-again", folders["gpt"])
    assert run_compare(arguments, io.StringIO()) == 2
    assert capsys.readouterr().err == (
        "railscope compare: --a-again and --b-again take recordings: an estimate is compared with one recording\n"
    )
