"""What the Debian package is built of: the project's files and what make has built, and nothing that lies about."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.nccl.library import REPOSITORY

LIST = REPOSITORY / "deploy/debian/list-files"


def listed(checkout: Path) -> set[str]:
    done = subprocess.run([LIST, checkout], capture_output=True, check=True, timeout=60)
    return {name.decode() for name in done.stdout.split(b"\0") if name}


def lay(checkout: Path) -> None:
    """A checkout with a file of each kind."""
    for name in (
        *("agent/__init__.py", "agent/gone.py", "agent/secret.key", "agent/__pycache__/x.pyc", "docs/a b.md"),
        *("probes/bpf/nccl.bpf.c", "probes/bpf/nccl.x86.bpf.o", "probes/revision.txt", "build.mk", "pyproject.toml"),
        *("README.md", "CHANGELOG.md", "LICENSE", "tests/test_x.py"),
        *(f"{folder}/x" for folder in ("dashboards", "deploy", "exporters", "testbed")),
    ):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    (checkout / "deploy/link").symlink_to("x")


def test_untracked_files_are_not_packaged_and_built_ones_are(tmp_path: Path) -> None:
    lay(tmp_path)
    untracked = {"agent/secret.key", "agent/__pycache__/x.pyc", "probes/bpf/nccl.x86.bpf.o", "probes/revision.txt"}
    (tmp_path / ".gitignore").write_text("*.o\n*.pyc\nrevision.txt\nsecret.key\n")
    for arguments in (["init", "-q"], ["add", "--all"]):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, timeout=60)
    (tmp_path / "agent/gone.py").unlink()
    (tmp_path / "agent/draft.py").write_text("")
    found = listed(tmp_path)
    assert found & untracked == {"probes/bpf/nccl.x86.bpf.o", "probes/revision.txt"}
    assert {"agent/__init__.py", "docs/a b.md", "probes/bpf/nccl.bpf.c"} <= found
    assert not found & {"agent/gone.py", "agent/draft.py", "deploy/link", "tests/test_x.py"}


def test_in_a_copy_without_git_all_files_are_the_projects(tmp_path: Path) -> None:
    lay(tmp_path)
    assert "agent/secret.key" in listed(tmp_path)
    assert "agent/__pycache__/x.pyc" not in listed(tmp_path)


def test_this_checkouts_package_holds_every_module() -> None:
    found = listed(REPOSITORY)
    assert {"agent/cli/start.py", "probes/bpf/nccl.bpf.c", "deploy/systemd/railscope.service"} <= found
    assert not [name for name in found if name.startswith("tests/") or name.endswith((".pyc", ".so"))]
