"""The RPM package: the files of the Debian package, where RPM distributions have them, installed into an empty root.

Simulated: no root of an RPM distribution is to be had here, so rpm installs without its dependencies, no scriptlet
runs, and no service is started; what scriptlets say is read.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Final

import pytest

from tests.nccl.library import REPOSITORY
from tests.packages.conftest import ARCHITECTURE, Packages

BUILD: Final = REPOSITORY / "deploy/rpm/build"
MOVED: Final = (
    ("lib/systemd/", "usr/lib/systemd/"),
    ("etc/default/", "etc/sysconfig/"),
    ("usr/share/zsh/vendor-completions/", "usr/share/zsh/site-functions/"),
    ("usr/share/doc/railscope/copyright", "usr/share/licenses/railscope/copyright"),
)
DEBIANS_OWN: Final = ("usr/share/python3/", "usr/share/lintian/", "usr/share/doc/railscope/changelog.gz")
UNIT: Final = "usr/lib/systemd/system/railscope.service"


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rpms(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The package, built twice."""
    if shutil.which("rpmbuild") is None:
        pytest.skip("rpmbuild is missing: run 'make packages-deb' as root")
    built = []
    for name in ("one", "two"):
        folder = tmp_path_factory.mktemp(name)
        # Beside it lies a later version.
        shutil.copy(packages.old, folder)
        environment = {**os.environ, "RAILSCOPE_DEBS": str(folder), "RAILSCOPE_RPM_OUTPUT": str(folder)}
        done = subprocess.run([BUILD, ARCHITECTURE], env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        built.append(Path(done.stdout.split()[-1]))
    return built[0], built[1]


@pytest.fixture(scope="module")
def root(rpms: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty root with the package installed."""
    folder = tmp_path_factory.mktemp("root")
    run("rpm", "--root", folder, "--dbpath", "/var/lib/rpm", "--initdb")
    run("rpm", "--root", folder, "--dbpath", "/var/lib/rpm", "--install", "--nodeps", "--noscripts", rpms[0])
    return folder


def contents(folder: Path) -> dict[str, str]:
    """What each file below a folder holds, as a hash, or where a link leads."""
    return {
        str(file.relative_to(folder)): str(file.readlink())
        if file.is_symlink()
        else hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_symlink() or file.is_file()
    }


def test_two_builds_are_equal_byte_by_byte(rpms: tuple[Path, Path]) -> None:
    one, two = rpms
    assert one.read_bytes() == two.read_bytes()


def test_it_holds_the_files_of_the_debian_package(packages: Packages, root: Path, tmp_path: Path) -> None:
    run("dpkg-deb", "--extract", packages.old, tmp_path / "deb")
    wanted = {}
    for name, held in contents(tmp_path / "deb").items():
        if not name.startswith(DEBIANS_OWN):
            wanted[next((new + name.removeprefix(old) for old, new in MOVED if name.startswith(old)), name)] = held
    found = {name: held for name, held in contents(root).items() if not name.startswith("var/lib/rpm/")}
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == [UNIT]
    assert "EnvironmentFile=-/etc/sysconfig/railscope\n" in (root / UNIT).read_text()


def test_configuration_stays_over_an_upgrade_and_all_belongs_to_root(rpms: tuple[Path, Path]) -> None:
    listed = run("rpm", "-qp", "--queryformat", "[%{FILENAMES} %{FILEFLAGS:fflags} %{FILEUSERNAME}\n]", rpms[0])
    configured = {line.split()[0] for line in listed.splitlines() if " cn " in line}
    assert configured == {"/etc/railscope/railscope.yml", "/etc/sysconfig/railscope"}
    assert {line.split()[-1] for line in listed.splitlines()} == {"root"}


def test_dependencies_are_those_of_the_project(rpms: tuple[Path, Path]) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    required = run("rpm", "-qp", "--requires", rpms[0])
    for name, version in (one.split(">=") for one in project["dependencies"]):
        found = re.search(rf"^python3dist\({name.lower()}\) >= ([\d.]+)$", required, re.MULTILINE)
        assert found, required
        assert found[1].split(".") == version.removesuffix(".0").split(".")


def test_scriptlets_compile_restart_and_take_the_probes_off(rpms: tuple[Path, Path]) -> None:
    scripts = run("rpm", "-qp", "--scripts", rpms[0])
    for line in ("preset railscope.service", "compileall", "restart railscope.service", "disable --now railscope"):
        assert line in scripts
    # Each is a program that the shell takes.
    for one in re.split(r"^\w+ scriptlet \(using /bin/sh\):$", scripts, flags=re.MULTILINE)[1:]:
        subprocess.run(["sh", "-n"], input=one, text=True, check=True, timeout=60)
