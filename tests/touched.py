"""Which unit tests a change touches: those that import, directly or not, a module that differs from the last commit.

    .venv/bin/python -m tests.touched      # paths for pytest

A test that reads a file other than Python (data, documentation, rules) names it nowhere; where such a file changed, or
nothing did, it is all of them.  The map of the house is always among them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import grimp

from tests.unit.house import REPOSITORY, root_packages

_ALWAYS: Final = "tests/unit/test_house.py"
_EVERYTHING: Final = ("tests/unit",)


def module_of(path: str) -> str | None:
    """The import name of a Python file of ours; None: it is none."""
    if not path.endswith(".py") or "/" not in path:
        return None
    name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return name if name.startswith("tests") else f"railscope.{name}"


def touched(changed: Iterable[str], users: Mapping[str, set[str]], tests: Iterable[str]) -> list[str]:
    """Paths of the unit tests that a change touches.

    Args:
        changed: paths in the repository.
        users: by module, every module that imports it, directly or not.
        tests: paths of all unit tests.
    """
    modules = [module_of(path) for path in changed]
    if not modules or any(module not in users for module in modules):
        return list(_EVERYTHING)
    meant = {user for module in modules if module for user in (module, *users[module])}
    found = [path for path in tests if module_of(path) in meant]
    return [*found, *([] if _ALWAYS in found else [_ALWAYS])]


def _changed() -> list[str]:
    listed = []
    for command in (["diff", "--name-only", "HEAD"], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", *command], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        listed += done.stdout.split()
    return listed


def _users() -> dict[str, set[str]]:
    sys.path[:0] = [str(REPOSITORY / ".venv/tree"), str(REPOSITORY)]
    graph = grimp.build_graph(*root_packages(), "tests", cache_dir=None)
    return {module: graph.find_downstream_modules(module) for module in graph.modules}


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    unit = [str(path) for path in sorted(Path("tests/unit").glob("test_*.py"))]
    changes = _changed()
    print(*(touched(changes, _users(), unit) if changes else _EVERYTHING))
