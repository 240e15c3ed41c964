"""The wheel, beside a project whose own folders have the names of ours."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.gpu.kit import project_wheel
from tests.nccl.library import REPOSITORY

OURS = ("agent", "dashboards", "exporters", "probes", "testbed", "tests")


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


def test_nothing_is_installed_under_a_name_that_others_have(site: Path) -> None:
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"railscope"}
    assert {path.name for path in (site / "railscope").iterdir()} == set(OURS) - {"tests"}


def test_the_wheel_has_what_is_no_python(site: Path) -> None:
    kinds = ("probes/bpf/*.o", "probes/nccl/*.json", "dashboards/rules/*.yml", "dashboards/json/*.json")
    for kind in kinds:
        wanted = {path.relative_to(REPOSITORY) for path in REPOSITORY.glob(kind)}
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
