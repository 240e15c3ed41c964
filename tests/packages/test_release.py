"""A release: what `make release` builds comes out the same a second time, from another folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.nccl.library import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

RELEASE: Final = REPOSITORY / "deploy/release/release.py"
PARTS: Final = ("debs", "rpms", "wheels", "chart")
"""Without the images, which are built of the packages and take longest."""


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same commit, built twice."""
    folder = tmp_path_factory.mktemp("release")
    for name in ("one", "two"):
        command = [sys.executable, str(RELEASE), str(folder / name), "--snapshot", "--only", *PARTS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if "make packages-deb" in done.stderr:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
    return folder / "one", folder / "two"


def test_two_builds_are_equal_byte_by_byte(releases: tuple[Path, Path]) -> None:
    one, two = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in releases)
    assert one.keys() == two.keys()
    assert [name for name in sorted(one) if one[name] != two[name]] == []


def test_it_holds_packages_for_both_machines_with_checksums_and_a_bill(releases: tuple[Path, Path]) -> None:
    folder = releases[0]
    names = {file.name for file in folder.iterdir()}
    for ending in (
        "_amd64.deb",
        "_arm64.deb",
        ".x86_64.rpm",
        ".aarch64.rpm",
        "x86_64.whl",
        "aarch64.whl",
        ".tar.gz",
        ".cdx.json",
    ):
        assert [name for name in names if name.endswith(ending)], ending
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) == len(names) - 1
