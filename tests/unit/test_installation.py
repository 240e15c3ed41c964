"""What a person is told to do about a missing file or package, by the way in which railscope was installed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from railscope.probes import installation
from railscope.probes.installation import remedy_for_missing_extra, remedy_for_missing_file

DEBIAN = Path("/usr/lib/railscope/railscope")
EXTRAS = ("analysis", "grafana", "nvlink", "spark", "top", "traces")


def pip_install(remedy: str) -> list[str]:
    """The requirements in `run 'PYTHON -m pip install …'`."""
    command = shlex.split(remedy.removeprefix("run '").removesuffix("'"))
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    return command[4:]


@pytest.mark.parametrize("extra", EXTRAS)
def test_in_an_environment_the_packages_of_an_extra_are_named_and_railscope_is_not(extra: str) -> None:
    packages = pip_install(remedy_for_missing_extra(extra))
    names = {Requirement(package).name for package in packages}
    assert names
    assert "railscope" not in names


def test_an_extra_that_holds_another_names_the_packages_of_both() -> None:
    names = {Requirement(package).name for package in pip_install(remedy_for_missing_extra("spark"))}
    assert names >= {"pyspark", "duckdb"}


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_debian_package_never_sends_to_an_index_for_railscope(extra: str) -> None:
    remedy = remedy_for_missing_extra(extra, DEBIAN)
    assert "apt-get install python3-" in remedy or f"./railscope-*.whl[{extra}]" in remedy or extra == "nvlink"


def test_nvidias_bindings_come_with_the_debian_package() -> None:
    assert remedy_for_missing_extra("nvlink", DEBIAN) == remedy_for_missing_file(DEBIAN)


@pytest.mark.parametrize(
    ("root", "says"),
    [(DEBIAN, "apt-get install --reinstall railscope"), (Path("/opt/x/site-packages/railscope"), "railscope-*.whl")],
)
def test_an_installation_is_told_to_install_again_and_not_to_build(root: Path, says: str) -> None:
    remedy = remedy_for_missing_file(root)
    assert says in remedy
    assert "make" not in remedy


def test_a_checkout_is_told_to_build(tmp_path: Path) -> None:
    (tmp_path / "build.mk").touch()
    assert remedy_for_missing_file(tmp_path) == f"run 'make build' in {tmp_path}"
    assert "make" not in remedy_for_missing_file(tmp_path, compiled=False)


def test_on_a_system_of_rpm_packages_dnf_puts_it_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "_DEBIANS_VERSION", tmp_path / "none")
    assert "dnf reinstall" in installation.remedy_for_missing_file(DEBIAN)
    assert installation.remedy_for_missing_extra("top", DEBIAN) == "run 'dnf install python3-rich'"
