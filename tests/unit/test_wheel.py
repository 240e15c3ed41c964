"""Wheels: each says which machine it is for and holds nothing of another's; beside a project with our folders' names.

The source distribution is built from what git knows, and a wheel from that.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from railscope.testbed.job import build_workload
from tests.gpu.kit import project_wheel
from tests.nccl.library import REPOSITORY

OURS = ("agent", "dashboards", "exporters", "probes", "testbed", "tests")


MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
COMPILERS = {"x86_64": "gcc", "aarch64": "aarch64-linux-gnu-gcc"}
LOWEST_GLIBC = (2, 17)
BUILD = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installer unpacks."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "wheels").mkdir()
    project_wheel(REPOSITORY, folder / "source", folder / "wheels")
    (wheel,) = (folder / "wheels").glob("railscope-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module", params=MACHINES)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A machine, and the wheel that is built for it here."""
    machine = request.param
    compiler = "gcc" if machine == platform.machine() else COMPILERS[machine]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is missing: run 'make packages-deb' as root")
    folder = tmp_path_factory.mktemp(machine)
    project_wheel(REPOSITORY, folder / "source", folder, RAILSCOPE_MACHINE=machine, CC=compiler)
    (made,) = folder.glob("railscope-*.whl")
    return machine, made


def machine_code(wheel: Path) -> dict[str, ELFFile]:
    """Every ELF file of a wheel, by its name."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    return {name: ELFFile(BytesIO(data)) for name, data in contents.items() if data.startswith(b"\x7fELF")}


def test_a_wheel_is_for_the_machine_that_its_name_says(wheel: tuple[str, Path]) -> None:
    machine, made = wheel
    assert made.name.endswith(f"-py3-none-manylinux_2_17_{machine}.whl")
    files = machine_code(made)
    assert {file["e_machine"] for name, file in files.items() if name.endswith(".so")} == {MACHINES[machine]}
    suffix = {"x86_64": "x86", "aarch64": "arm64"}[machine]
    objects = [name for name in files if name.endswith(".o")]
    assert len(objects) == len(list(REPOSITORY.glob("probes/bpf/*.bpf.c")))
    assert all(name.endswith(f".{suffix}.bpf.o") for name in objects)
    assert all(files[name]["e_machine"] == "EM_BPF" for name in objects)


def test_a_wheel_needs_no_newer_c_library_than_its_name_says(wheel: tuple[str, Path]) -> None:
    for name, file in machine_code(wheel[1]).items():
        if name.endswith(".so"):
            needed: Any = file.get_section_by_name(".gnu.version_r")
            versions = [version.name for _, found in needed.iter_versions() for version in found]
            assert versions
            for version in versions:
                numbers = tuple(map(int, version.removeprefix("GLIBC_").split(".")))
                assert numbers <= LOWEST_GLIBC, f"{name} needs {version}"


def test_the_library_that_reads_counters_runs_on_its_machine(wheel: tuple[str, Path], tmp_path: Path) -> None:
    machine, made = wheel
    compiler = "gcc" if machine == platform.machine() else COMPILERS[machine]
    emulator: list[str] = []
    if machine != platform.machine():
        if shutil.which(f"qemu-{machine}-static") is None:
            pytest.skip("qemu-user-static is missing: run 'make packages-deb' as root")
        emulator = [f"qemu-{machine}-static", "-L", f"/usr/{machine}-linux-gnu"]
    with zipfile.ZipFile(made) as archive:
        library = archive.extract(f"railscope/probes/native/beats.{machine}.so", tmp_path)
    program = tmp_path / "elsewhere"
    source = Path(__file__).with_name("beats_elsewhere.c")
    subprocess.run([compiler, source, "-o", program, "-pthread", "-ldl"], check=True)
    done = subprocess.run([*emulator, program, library], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_a_wheel_tells_its_licence_and_its_commit(wheel: tuple[str, Path]) -> None:
    with zipfile.ZipFile(wheel[1]) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        revision = archive.read("railscope/probes/revision.txt").decode()
        licences = {Path(name).name for name in archive.namelist() if "/licenses/" in name}
    assert "License-Expression: Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)" in text.splitlines()
    assert "License :: " not in text
    assert revision == (REPOSITORY / "probes/revision.txt").read_text()
    assert licences == {"LICENSE", "GPL-2.0-only.txt", "BSD-2-Clause.txt"}


@pytest.mark.parametrize("wheel", [platform.machine()], indirect=True)
def test_a_source_distribution_builds_the_same_wheel(tmp_path: Path, wheel: tuple[str, Path]) -> None:
    _, made = wheel
    source = tmp_path / "source"
    project_wheel(REPOSITORY, source, tmp_path / "unused")
    shutil.copy(REPOSITORY / "MANIFEST.in", source)
    shutil.copy(REPOSITORY / "CHANGELOG.md", source)
    for leftover in ("build", "railscope.egg-info"):
        shutil.rmtree(source / leftover, ignore_errors=True)
    script = "import setuptools.build_meta as it; print(it.build_sdist('.'))"
    shared = tmp_path / "backend"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", shared, "setuptools>=77"],
        check=True,
        timeout=120,
    )
    environment = {**os.environ, "PYTHONPATH": str(shared)}
    subprocess.run([sys.executable, "-c", script], cwd=source, env=environment, check=True, capture_output=True)
    (distribution,) = source.glob("railscope-*.tar.gz")
    subprocess.run([*BUILD, tmp_path / "wheels", distribution], check=True, timeout=170)
    (again,) = (tmp_path / "wheels").glob("railscope-*.whl")
    assert again.name == made.name
    with zipfile.ZipFile(again) as one, zipfile.ZipFile(made) as other:
        assert set(one.namelist()) == set(other.namelist())


def test_the_demo_s_workload_is_compiled_where_it_is_first_used(site: Path, tmp_path: Path) -> None:
    assert not (site / "railscope/testbed/bin").exists()
    build_workload(tmp_path / "built", site / "railscope/testbed/workload", packaged=site / "railscope/testbed/bin")
    done = subprocess.run([tmp_path / "built/railscope-workload", "--help"], capture_output=True, text=True)
    assert "cannot open shared object" not in done.stderr


def test_nothing_is_installed_under_a_name_that_others_have(site: Path) -> None:
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"railscope"}
    assert {path.name for path in (site / "railscope").iterdir()} == set(OURS) - {"tests"}


def test_the_wheel_has_what_is_no_python(site: Path) -> None:
    kinds = ("probes/bpf/*.o", "probes/nccl/*.json", "dashboards/rules/*.yml", "dashboards/json/*.json")
    for kind in kinds:
        others = ".x86." if platform.machine() == "aarch64" else ".arm64."
        wanted = {path.relative_to(REPOSITORY) for path in REPOSITORY.glob(kind) if others not in path.name}
        assert {path.relative_to(site / "railscope") for path in (site / "railscope").glob(kind)} == wanted


@pytest.mark.parametrize("command", [["--version"], ["doctor", "--help"], ["estimate", "--help"]], ids=" ".join)
def test_a_project_with_folders_of_the_same_names_does_not_get_in_the_way(
    site: Path, tmp_path: Path, command: list[str]
) -> None:
    for name in OURS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('somebody else')\n")
    script = "import sys; from railscope.agent.cli.main import main; sys.exit(main())"
    # -S: not the editable installation that runs this test.
    packages = sysconfig.get_path("platlib")
    done = subprocess.run(
        [sys.executable, "-S", "-c", script, *command],
        env={"PYTHONPATH": f"{tmp_path}:{site}:{packages}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "railscope" in done.stdout
