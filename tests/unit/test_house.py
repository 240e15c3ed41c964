"""The house is as its map says: who may import whom, and a sentence at every door."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

from tests.gpu.unpack import product_folders
from tests.unit.house import (
    CONTRIBUTING,
    REPOSITORY,
    contracts,
    contributing,
    floors,
    folder,
    modules,
    root_packages,
    sentence,
)

SECOND_DOCSTRING = re.compile(r'^( +)""".*"""\n\1(""".*)', re.MULTILINE)
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
WORKLOAD = REPOSITORY / "testbed/workload"
HEADING = re.compile(r"^/\* (?:---- )?(\w+)\.c (?:---- )?\*/$")
DECLARED = re.compile(r"^[a-z][\w ]*[ *](\w+)\(")


def test_no_room_imports_from_its_own_floor_or_above() -> None:
    done = subprocess.run(
        [LINT_IMPORTS, "--no-cache"],
        env={"PYTHONPATH": str(REPOSITORY / ".venv/tree"), "PYTHONUTF8": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(contracts())} kept, 0 broken" in done.stdout


def test_the_contract_is_about_all_that_is_installed() -> None:
    assert sorted(root_packages()) == [f"railscope.{name}" for name in product_folders(REPOSITORY)]


def test_every_room_has_a_floor_and_every_room_and_module_says_in_one_line_what_it_is() -> None:
    known = {room for contract in contracts().values() if "layers" in contract for room in _flat(floors(contract))}
    containers = {contract["containers"][0] for contract in contracts().values() if "containers" in contract}
    for parent in ("railscope.agent", *containers):
        for inside in folder(parent).iterdir():
            if inside.is_dir() and any(inside.glob("*.py")):
                assert f"{parent}.{inside.name}" in known
    for room in known:
        assert sentence(room).endswith("."), room
        for module in modules(room, known - {room}):
            assert sentence(module).endswith("."), module


def test_no_docstring_has_slipped_behind_that_of_another_attribute() -> None:
    slipped = [
        f"{file.relative_to(REPOSITORY)}: {found[2]}"
        for name in product_folders(REPOSITORY)
        for file in (REPOSITORY / name).rglob("*.py")
        for found in SECOND_DOCSTRING.finditer(file.read_text())
    ]
    assert slipped == []


def test_contributing_shows_the_map_of_the_contract() -> None:
    assert CONTRIBUTING.read_text() == contributing(), "run 'python -m tests.unit.house'"


def test_no_two_sources_of_the_workload_call_each_other() -> None:
    """Their headers say which source has a function; whoever names it in a source uses that one."""
    home: dict[str, str] = {}
    for header in WORKLOAD.glob("*.h"):
        source = header.stem
        for line in header.read_text().splitlines():
            if heading := HEADING.match(line):
                source = heading[1]
            elif declared := DECLARED.match(line):
                home[declared[1]] = source
    uses: defaultdict[str, set[str]] = defaultdict(set)
    for file in WORKLOAD.glob("*.c"):
        named = set(re.findall(r"(?<![.>])\b\w+", file.read_text())) & home.keys()
        uses[file.stem] = {home[name] for name in named} - {file.stem}
    assert uses["driver_patterns"] >= {"driver_job", "driver_gpt"}
    assert uses["network"] == {"errors"}
    TopologicalSorter(uses).prepare()  # raises where there is a circle


def _flat(ordered: list[list[str]]) -> list[str]:
    return [room for floor in ordered for room in floor]
