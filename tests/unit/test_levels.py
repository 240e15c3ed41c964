"""Which probes a level attaches and lets go of; the kernel's side is simulated."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from railscope.probes.loading.links import ProbePoint
from railscope.probes.nccl.functions.internals import InternalPoints, Level
from tests.unit.level_programs import EVERYTHING, LoadingPages, SimulatedLibrary, SimulatedPrograms, levels_of


@pytest.fixture(autouse=True)
def all_functions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every library has these functions."""
    functions = list(EVERYTHING)
    monkeypatch.setattr(
        "railscope.agent.node.completion.files.internal_points",
        lambda _, number: InternalPoints({name: ProbePoint(name, 64, number << 32) for name in functions}),
    )
    return functions


@pytest.fixture
def library() -> Iterator[SimulatedLibrary]:
    descriptor = os.open("/proc/self/exe", os.O_RDONLY | os.O_CLOEXEC)
    yield SimulatedLibrary(descriptor=descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("wanted", Level)
def test_a_new_library_is_attached_up_to_the_wanted_level(library: SimulatedLibrary, wanted: Level) -> None:
    programs = SimulatedPrograms()
    levels = levels_of(programs, wanted)
    assert levels.set_libraries([library]) == []
    assert programs.log == [f"+{level.name}" for level in Level if Level.COUNTS < level <= wanted]
    assert programs.described == {3: True}
    assert [(one.level, one.highest) for one in levels.probe_levels()] == [(wanted, Level.ALL)]


def test_of_a_file_that_others_serve_the_pages_are_read_before_probes_go_on_them(library: SimulatedLibrary) -> None:
    library.local = False
    programs, inspection = SimulatedPrograms(), LoadingPages()
    levels = levels_of(programs, Level.ALL, inspection=inspection)
    assert levels.set_libraries([library]) == []
    assert levels.finish_detaching() == []
    assert programs.log == []
    inspection.loaded = True
    assert levels.finish_detaching() == []
    assert programs.log == ["+COMPLETION", "+RAILS", "+ALL"]


def test_a_library_of_an_unknown_build_stays_at_counts(library: SimulatedLibrary) -> None:
    programs = SimulatedPrograms()
    library.build_id = "ff" * 20
    levels = levels_of(programs, Level.ALL)
    assert levels.set_libraries([library]) == []
    assert programs.log == []
    assert programs.described == {3: False}
    assert [(one.level, one.highest) for one in levels.probe_levels()] == [(Level.COUNTS, Level.COUNTS)]


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        (EVERYTHING, "known for listed builds only"),
        (("socket_send",), "lacks the functions to probe"),
        ((), "no symbols of the functions"),
    ],
)
def test_why_completion_is_not_seen_does_not_deny_the_layout_of_communicators(
    library: SimulatedLibrary,
    all_functions: list[str],
    functions: tuple[str, ...],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    all_functions[:] = functions
    library.build_id = "ff" * 20
    with caplog.at_level("INFO"):
        levels_of(SimulatedPrograms(), Level.ALL).set_libraries([library])
    (line,) = caplog.messages
    assert line.startswith("/opt/libnccl.so.2: calls are counted, completions are not observed: ")
    assert why in line
    assert "layout" not in line


def test_a_library_that_cannot_tell_of_completion_is_not_asked_for_it(
    library: SimulatedLibrary, all_functions: list[str]
) -> None:
    all_functions.remove("proxy_stop")
    programs = SimulatedPrograms()
    levels = levels_of(programs, Level.RAILS)
    levels.set_libraries([library])
    assert levels.programs_of(3) == ("socket_send", "ib_send")


def test_levels_go_down_and_up_one_by_one_and_forget_what_gets_old(library: SimulatedLibrary) -> None:
    programs = SimulatedPrograms()
    levels = levels_of(
        programs, Level.ALL, lambda: programs.log.append(f"take what is left of {programs.still_attached()}")
    )
    levels.set_libraries([library])
    programs.log.clear()
    assert levels.set_level(Level.COMPLETION) == []
    levels.finish_detaching(wait=True)
    assert programs.still_attached() == ["COMPLETION"]
    assert programs.log == []
    levels.set_level(Level.COUNTS)
    levels.finish_detaching(wait=True)
    assert programs.still_attached() == []
    assert programs.log == ["take what is left of []", "forget 3"]
    levels.set_level(Level.RAILS)
    levels.finish_detaching(wait=True)
    assert programs.log[2:] == ["+COMPLETION", "+RAILS"]
    levels.close()
    assert programs.still_attached() == []


def test_a_level_is_not_raised_again_before_its_probes_came_off(
    library: SimulatedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr("railscope.agent.node.completion.levels.close_together", lambda _: release.wait(10))
    programs = SimulatedPrograms()
    levels = levels_of(programs, Level.COMPLETION)
    levels.set_libraries([library])
    levels.set_level(Level.COUNTS)
    levels.set_level(Level.COMPLETION)
    assert programs.log == ["+COMPLETION"]
    release.set()
    levels.finish_detaching(wait=True)
    assert programs.log == ["+COMPLETION", "forget 3", "+COMPLETION"]


def test_a_library_that_went_is_let_go_of_and_its_number_may_serve_another(library: SimulatedLibrary) -> None:
    programs = SimulatedPrograms()
    levels = levels_of(programs, Level.COMPLETION)
    levels.set_libraries([library])
    other = SimulatedLibrary(path="/srv/libnccl.so.2", descriptor=library.descriptor, build_id="00" * 20)
    levels.set_libraries([other])
    levels.finish_detaching(wait=True)
    assert programs.log == ["+COMPLETION", "forget 3"]
    assert programs.still_attached() == []
    assert programs.described == {3: False}
    assert [one.library for one in levels.probe_levels()] == ["/srv/libnccl.so.2"]


@pytest.mark.parametrize("first", [Level.COMPLETION, Level.COUNTS])
def test_a_library_that_goes_while_its_probes_come_off_leaves_nothing_behind(
    library: SimulatedLibrary, monkeypatch: pytest.MonkeyPatch, first: Level
) -> None:
    release = threading.Event()
    monkeypatch.setattr("railscope.agent.node.completion.levels.close_together", lambda _: release.wait(10))
    programs = SimulatedPrograms()
    levels = levels_of(programs, Level.RAILS)
    levels.set_libraries([library])
    programs.log.clear()
    levels.set_level(first)
    levels.set_libraries([])
    release.set()
    levels.finish_detaching(wait=True)
    assert programs.log == ["forget 3"]


def test_a_library_that_went_is_not_looked_into_any_more_and_no_probe_for_errors_stays(
    library: SimulatedLibrary,
) -> None:
    programs = SimulatedPrograms()
    levels = levels_of(programs, Level.COUNTS)
    levels.set_libraries([library])
    assert (programs.described, len(programs.error_links)) == ({3: True}, 1)
    levels.set_libraries([])
    levels.finish_detaching(wait=True)
    assert (programs.described, len(programs.error_links)) == ({3: False}, 0)


def test_the_first_library_after_none_is_observed_at_once_at_the_wanted_level(library: SimulatedLibrary) -> None:
    levels = levels_of(SimulatedPrograms(), Level.RAILS)
    seen = [levels.highest]
    library.build_id = "ff" * 20
    for present in ([library], []):
        levels.set_libraries(present)
        seen.append(levels.highest)
    assert seen == [Level.ALL, Level.COUNTS, Level.ALL]


def test_what_the_kernel_refuses_is_one_line_and_leaves_the_rest(library: SimulatedLibrary) -> None:
    programs = SimulatedPrograms(refuses=Level.RAILS)
    levels = levels_of(programs, Level.ALL)
    (error,) = levels.set_libraries([library])
    assert error.startswith("/opt/libnccl.so.2: ")
    assert error.endswith("simulated refusal")
    assert programs.log == ["+COMPLETION"]
    programs.refuses = None
    assert levels.set_libraries([library]) == []
    assert programs.log == ["+COMPLETION", "+RAILS", "+ALL"]


def test_stops_are_attached_before_what_they_stop() -> None:
    points = InternalPoints({name: ProbePoint(name, 64, 0) for name in EVERYTHING})
    order = list(points.at(Level.COMPLETION))
    assert order.index("proxy_stop") < order.index("proxy_post")
