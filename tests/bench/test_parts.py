"""A part of the bench that fails takes nothing from the others.  The parts are made up."""

from __future__ import annotations

import io
from pathlib import Path
from typing import cast

import pytest

from railscope.testbed.nccl.library import LibraryMissing
from tests.bench.__main__ import arguments, wanted_parts
from tests.bench.parts import Part, measure_parts
from tests.bench.results import Figure, Line, Omission, figure
from tests.bench.target import BenchError, Built

BUILT = cast(Built, Path("/nowhere"))


def fails(_built: Built, _rounds: int) -> list[Line]:
    raise BenchError("the kernel refused")


def lacks_its_library(_built: Built, _rounds: int) -> list[Line]:
    raise LibraryMissing("fetch it")


def measured(_built: Built, rounds: int) -> list[Line]:
    return [figure("part", "rounds", "", [float(rounds)])]


def test_results_of_other_parts_are_kept_and_the_one_that_failed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"first": Part(measured, 3), "late": Part(fails, 1), "last": Part(measured, 5)}
    found = measure_parts(parts, BUILT)
    assert [line.median for line in found.lines if isinstance(line, Figure)] == [3.0, 5.0]
    assert found.lines[1] == Omission("late", "all of it", "the kernel refused")
    errors = io.StringIO()
    assert found.status(errors) == 1
    assert errors.getvalue() == "late failed, and has no figures in the results: the kernel refused\n"
    assert capsys.readouterr().err.splitlines() == ["first …", "late …", "late: the kernel refused", "last …"]


def test_a_part_whose_library_was_not_fetched_fails() -> None:
    errors = io.StringIO()
    assert measure_parts({"nccl": Part(lacks_its_library, 1)}, BUILT).status(errors) == 1
    assert errors.getvalue() == "nccl failed, and has no figures in the results: fetch it\n"


def test_all_lines_so_far_are_kept_after_each_part() -> None:
    kept: list[int] = []
    parts = {"first": Part(measured, 3), "late": Part(fails, 1)}
    measure_parts(parts, BUILT, keep=lambda lines: kept.append(len(lines)))
    assert kept == [1, 2]


def test_given_rounds_are_those_of_every_part_and_without_a_failure_all_is_well() -> None:
    found = measure_parts({"first": Part(measured, 3), "last": Part(measured, 5)}, BUILT, 2)
    assert [line.median for line in found.lines if isinstance(line, Figure)] == [2.0, 2.0]
    errors = io.StringIO()
    assert (found.status(errors), errors.getvalue()) == (0, "")


def test_several_parts_can_be_asked_for_by_name_and_come_in_the_usual_order() -> None:
    everything = list(wanted_parts(arguments([]).only))
    assert len(everything) > 10
    asked = arguments(["--only", everything[5], "--only", everything[2]])
    assert list(wanted_parts(asked.only)) == [everything[2], everything[5]]
