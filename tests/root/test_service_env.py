"""The environment that the service runs from: it holds what the agent needs, nothing else, and the agent runs there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow]

REPOSITORY: Final = Path(__file__).resolve().parents[2]
SCRIPT: Final = REPOSITORY / "deploy/service/environment.py"
MOST_BYTES: Final = 150 << 20
PACKAGES: Final = {
    "bcrypt", "capstone", "numpy", "nvidia-ml-py", "psutil", "pyelftools", "pyyaml", "railscope",
}  # fmt: skip
OFFLINE: Final = ("Failed to establish a new connection", "Name or service not known", "Temporary failure in name")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0:
        pytest.skip("the service's environment is made by root")
    directory = tmp_path_factory.mktemp("service") / "railscope"
    command = [sys.executable, str(SCRIPT), "make", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd="/")
    if any(sign in done.stderr for sign in OFFLINE):
        pytest.skip("no Python package index is reachable")
    assert directory.exists(), done.stderr
    others = [line for line in done.stderr.splitlines() if "the service's user cannot enter" not in line]
    assert not others, done.stderr
    return directory


@pytest.fixture
def bill(environment: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((environment / "share/doc/railscope/sbom.cdx.json").read_text())
    return found


def test_it_holds_these_packages_and_is_small(environment: Path) -> None:
    command = (
        "import importlib.metadata as m; print(*sorted(one.metadata['Name'].lower() for one in m.distributions()))"
    )
    assert set(_python(environment, command).split()) == PACKAGES
    assert sum(file.lstat().st_size for file in environment.rglob("*")) < MOST_BYTES
    commands = {file.name for file in (environment / "bin").iterdir()}
    assert {name for name in commands if not name.startswith("python")} == {"railscope"}


def test_nothing_runs_at_the_start_of_python_and_every_module_is_compiled(environment: Path) -> None:
    assert list(environment.rglob("*.pth")) == []
    modules = list((environment / "lib").rglob("railscope/**/*.py"))
    assert modules
    tag = sys.implementation.cache_tag
    for module in modules:
        assert (module.parent / "__pycache__" / f"{module.stem}.{tag}.pyc").exists(), module


def test_the_agent_runs_from_it(environment: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [environment / "bin/railscope", "agent", "--once", "--web.listen-address", "127.0.0.1:0", "--scope", "netns"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "railscope_build_info{" in done.stdout


def test_the_bill_lists_packages_and_machine_code_with_hashes_and_licences(bill: dict[str, Any]) -> None:
    own, others = bill["metadata"]["component"], bill["components"]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert {one["name"] for one in (own, *others)} == PACKAGES
    files = {Path(one["name"]).name: one for one in own["components"]}
    # A wheel is of one machine.
    assert {name for name in files if name.startswith("nccl.")} == {"nccl.x86.bpf.o"}
    assert f"beats.{os.uname().machine}.so" in files
    assert files["nccl.x86.bpf.o"]["licenses"] == [{"expression": "GPL-2.0-only OR BSD-2-Clause"}]
    for one in (own, *others, *own["components"]):
        assert [len(entry["content"]) for entry in one["hashes"]] == [64], one["name"]
        (licence,) = one["licenses"][:1]
        assert licence != {"license": {"name": "unknown"}}, one["name"]


def test_the_licences_of_the_bpf_objects_lie_beside_them(environment: Path) -> None:
    (folder,) = environment.glob("lib/python3*/site-packages/railscope/probes/bpf/LICENSES")
    assert {file.name for file in folder.iterdir()} == {"GPL-2.0-only.txt", "BSD-2-Clause.txt"}
    assert "Version 2, June 1991" in (folder / "GPL-2.0-only.txt").read_text()


@pytest.fixture
def extra_file(environment: Path) -> Iterator[Path]:
    (site_packages,) = environment.glob("lib/python3*/site-packages")
    file = site_packages / "extra.pth"
    yield file
    file.unlink()


def test_what_does_not_belong_there_is_found(environment: Path, extra_file: Path) -> None:
    extra_file.write_text("import os\n")
    extra_file.chmod(0o666)
    command = [sys.executable, str(SCRIPT), "check", str(environment)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"{extra_file} runs code at every start of Python" in done.stderr
    assert f"{extra_file} can be written by others" in done.stderr


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    done = subprocess.run([sys.executable, str(SCRIPT), "make", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "kept").read_text()) == (2, "kept")
    assert "name another directory" in done.stderr


def _python(environment: Path, command: str) -> str:
    return subprocess.run(
        [environment / "bin/python", "-I", "-c", command], check=True, capture_output=True, text=True
    ).stdout
