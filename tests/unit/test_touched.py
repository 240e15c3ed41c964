"""Which unit tests a change touches."""

from __future__ import annotations

from tests.touched import module_of, touched

USERS = {
    "railscope.agent.facts.clocks": {"tests.unit.test_clocks", "railscope.agent.recording.recording"},
    "tests.unit.test_clocks": set[str](),
    "tests.unit.stories": {"tests.unit.test_other"},
}
TESTS = ["tests/unit/test_clocks.py", "tests/unit/test_other.py", "tests/unit/test_house.py"]


def test_a_module_touches_who_imports_it_and_the_map() -> None:
    assert touched(["agent/facts/clocks.py"], USERS, TESTS) == ["tests/unit/test_clocks.py", "tests/unit/test_house.py"]
    assert touched(["tests/unit/stories.py"], USERS, TESTS) == ["tests/unit/test_other.py", "tests/unit/test_house.py"]
    assert touched(["tests/unit/test_clocks.py"], USERS, TESTS) == [TESTS[0], TESTS[2]]


def test_what_is_no_module_touches_everything_and_so_does_nothing() -> None:
    assert touched(["agent/facts/clocks.py", "README.md"], USERS, TESTS) == ["tests/unit"]
    assert touched(["agent/facts/gone.py"], USERS, TESTS) == ["tests/unit"]
    assert touched([], USERS, TESTS) == ["tests/unit"]


def test_a_file_has_the_name_that_it_is_imported_by() -> None:
    assert module_of("agent/facts/clocks.py") == "railscope.agent.facts.clocks"
    assert module_of("agent/facts/__init__.py") == "railscope.agent.facts"
    assert module_of("tests/unit/fleets.py") == "tests.unit.fleets"
    assert module_of("setup.py") is None
    assert module_of("dashboards/rules/railscope-alerts.yml") is None
