"""What a person is told to do about a missing file or package, by the way in which railscope was installed."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from railscope.agent.analysis.tables.missing import DISTRIBUTIONS
from railscope.probes import installation
from railscope.probes.installation import remedy_for_missing_extra, remedy_for_missing_file, remedy_for_missing_package

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


READERS = ("agent/analysis", "agent/cluster", "agent/dataset", "agent/imports")
"""What `report`, `diagnose` and their like import."""
BESIDES = {"numpy", "pyspark", "py4j", "_typeshed"}
"""What every installation has, what the extra `spark` brings and its command tells of, and what only mypy reads."""
DUMP = Path(__file__).parent / "data/imports/nccl_trace_rank_0"
MISSES = """
import sys
for module in sys.argv.pop(1).split(","):
    sys.modules[module] = None
from railscope.agent.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""A railscope that lacks packages."""


def imported_by(source: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return {module.partition(".")[0] for module in modules}


def test_whatever_a_reader_of_files_imports_has_a_remedy() -> None:
    sources = [file for room in READERS for file in (installation.ROOT / room).rglob("*.py")]
    foreign = set().union(*map(imported_by, sources)) - sys.stdlib_module_names - {"railscope"} - BESIDES
    assert foreign == set(DISTRIBUTIONS)
    assert {Requirement(one).name for one in installation._packages_of("analysis")} <= set(DISTRIBUTIONS.values())


def run_without(modules: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MISSES, modules, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_dump_of_a_hang_is_diagnosed_with_msgspec_alone_and_without_it_one_line_says_so() -> None:
    others = ",".join(sorted(DISTRIBUTIONS.keys() - {"msgspec"}))
    with_it = run_without(others, "diagnose", str(DUMP))
    assert with_it.returncode in (0, 1), with_it.stderr
    assert with_it.stdout
    without = run_without(f"{others},msgspec", "diagnose", str(DUMP))
    assert without.returncode == 2
    (line,) = without.stderr.splitlines()
    assert line.startswith("railscope diagnose: msgspec is not installed: run '")


def test_what_debian_has_is_taken_from_debian(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "debian_version").touch()
    monkeypatch.setattr(installation, "_DEBIANS_VERSION", tmp_path / "debian_version")
    remedy = remedy_for_missing_package("msgspec", "analysis", DEBIAN)
    assert remedy.startswith("run 'apt-get install python3-msgspec' on Debian 13 and newer; elsewhere run railscope's")
    assert remedy_for_missing_package("scipy", "analysis", DEBIAN) == remedy_for_missing_extra("analysis", DEBIAN)
