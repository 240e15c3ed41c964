"""What the service's environment is made of: pinned with hashes, and what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY: Final = Path(__file__).resolve().parents[2]
SERVICE: Final = REPOSITORY / "deploy/service"
PROJECT: Final = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS: Final = ("nvlink",)
HASH: Final = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")


def locked(name: str) -> list[tuple[Requirement, int]]:
    """Each pinned requirement of a lock file, and how many hashes it has."""
    text = (SERVICE / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return [(Requirement(HASH.sub("", line).strip()), len(HASH.findall(line))) for line in lines]


def asked_for() -> list[Requirement]:
    """What the service needs, as pyproject.toml says it."""
    project = PROJECT["project"]
    extras = [one for extra in EXTRAS for one in project["optional-dependencies"][extra]]
    return [Requirement(one) for one in (*project["dependencies"], *extras)]


def pinned_version(requirement: Requirement) -> str:
    (only,) = requirement.specifier
    assert only.operator == "==", requirement
    return only.version


@pytest.mark.parametrize("name", ["requirements.txt", "build-requirements.txt"])
def test_every_requirement_is_one_version_with_hashes_and_names_no_registry(name: str) -> None:
    for requirement, hashes in locked(name):
        pinned_version(requirement)
        assert hashes > 0, requirement
    assert "://" not in (SERVICE / name).read_text()


def test_the_lock_satisfies_what_the_project_asks_for() -> None:
    pinned = {canonicalize_name(one.name): one for one, _ in locked("requirements.txt") if _applies(one)}
    for asked in asked_for():
        requirement = pinned[canonicalize_name(asked.name)]
        assert asked.specifier.contains(pinned_version(requirement)), f"{asked}: run 'make lock'"


def test_the_lock_holds_what_these_packages_need_and_nothing_else() -> None:
    needed: set[str] = set()
    waiting = [one.name for one in asked_for()]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in needed:
            needed.add(name)
            of_this = map(Requirement, requires(name) or ())
            waiting += [one.name for one in of_this if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert {canonicalize_name(one.name) for one, _ in locked("requirements.txt")} == needed


def test_the_wheel_is_built_with_what_the_project_names() -> None:
    pinned = {canonicalize_name(one.name): pinned_version(one) for one, _ in locked("build-requirements.txt")}
    for asked in map(Requirement, PROJECT["build-system"]["requires"]):
        assert asked.specifier.contains(pinned[canonicalize_name(asked.name)])


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate()
