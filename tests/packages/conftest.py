"""Packages built once for all tests of this folder, which run in the lane of `make test-packages`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.nccl.library import REPOSITORY

BUILD: Final = REPOSITORY / "deploy/debian/build"
ARCHITECTURE: Final = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "amd64")
NEWER: Final = "99.0"
BUILD_SECONDS: Final = 500
"""It takes 20 s of a processor."""


@dataclass(frozen=True, slots=True)
class Packages:
    old: Path
    new: Path


@pytest.fixture(scope="session", autouse=True)
def lane() -> None:
    """Bare roots are downloaded and booted here, for minutes."""
    if os.environ.get("RAILSCOPE_TEST_PACKAGES") != "1":
        pytest.skip("minutes of installing on bare roots: run 'make test-packages' as root")


@pytest.fixture(scope="session")
def packages(lane: None, tmp_path_factory: pytest.TempPathFactory) -> Packages:  # noqa: ARG001
    """The Debian package of this checkout, and the same as a later version."""
    folder = tmp_path_factory.mktemp("packages")
    old = build_deb(folder)
    tree, new = folder / "tree", folder / f"railscope_{NEWER}_{ARCHITECTURE}.deb"
    subprocess.run(["dpkg-deb", "--raw-extract", old, tree], check=True, timeout=BUILD_SECONDS)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"^Version: .*", f"Version: {NEWER}", control.read_text(), flags=re.MULTILINE))
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", tree, new], check=True, timeout=BUILD_SECONDS)
    return Packages(old, new)


def build_deb(folder: Path) -> Path:
    """This machine's package in a folder."""
    if shutil.which("dh") is None:
        pytest.skip("debhelper is missing: run 'make packages-test' as root")
    environment = {**os.environ, "RAILSCOPE_DEB_OUTPUT": str(folder)}
    done = subprocess.run([BUILD, ARCHITECTURE], env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.split()[-1])
