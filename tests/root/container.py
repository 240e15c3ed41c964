"""Boots systemd in a container on a root of which nothing is changed: an overlay in memory takes every write."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

_OPTIONS: Final = (
    "--quiet --register=no --keep-unit --link-journal=no --private-network --capability=all --console=pipe"
)
MOST_SECONDS: Final = 240


@contextlib.contextmanager
def throw_away_root(lower: Path, stage: Path) -> Iterator[Path]:
    """A root that holds what `lower` does; `stage` is an empty folder for it."""
    if os.geteuid() != 0:
        pytest.skip("booting systemd in a container needs root")
    if shutil.which("systemd-nspawn") is None:
        pytest.skip("systemd-nspawn is missing: run 'make packages-test' as root")
    with contextlib.ExitStack() as mounts:
        _mount(mounts, "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(stage))
        for name in ("upper", "work", "root"):
            (stage / name).mkdir()
        layers = f"lowerdir={lower},upperdir={stage}/upper,workdir={stage}/work"
        _mount(mounts, "-t", "overlay", "-o", layers, "overlay", str(stage / "root"))
        yield stage / "root"


def _mount(mounts: contextlib.ExitStack, *arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this machine cannot make the container's root: {done.stderr.strip()}")
    mounts.callback(subprocess.run, ["umount", "--lazy", arguments[-1]], check=True)


def boot(root: Path, target: str, read_only: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Boot systemd to a unit that ends the container, in a network of its own; returns its status and its console.

    `read_only`: folders of this machine that it sees, as `--bind-ro` takes them.
    """
    machine = f"railscope-test-{os.getpid()}"
    container = ["systemd-nspawn", *_OPTIONS.split(), "--system-call-filter=bpf perf_event_open"]
    container += [f"--directory={root}", f"--machine={machine}", *(f"--bind-ro={folder}" for folder in read_only)]
    with control_groups() as join, contextlib.ExitStack() as leftovers:
        own = Path("/run/systemd/nspawn")
        leftovers.callback(shutil.rmtree, own / "propagate" / machine, ignore_errors=True)
        lock = own / "locks" / f"inode-{root.stat().st_dev}:{root.stat().st_ino}"
        leftovers.callback(lock.unlink, missing_ok=True)
        trial = subprocess.run([*join, *container, "/bin/true"], capture_output=True, text=True, timeout=60)
        if trial.returncode != 0:
            pytest.skip(f"systemd-nspawn does not run here: {' '.join((trial.stdout + trial.stderr).split())}")
        return subprocess.run(
            [*join, *container, "--boot", f"systemd.unit={target}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=MOST_SECONDS,
        )  # fmt: skip


def inside(root: Path, path: Path | str) -> Path:
    """Where a path of the container lies on this machine."""
    return root / Path(path).relative_to("/")


@contextlib.contextmanager
def control_groups() -> Iterator[list[str]]:
    """A control group of our own in every hierarchy, since nspawn leaves its groups behind; yields the command
    before the command that runs it in there."""
    mounts = re.findall(r"^\S+ (\S+) cgroup2? ", Path("/proc/mounts").read_text(), re.MULTILINE)
    own = {
        controllers: path
        for _, controllers, path in (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    }
    groups = []
    try:
        for mount in map(Path, mounts):
            path = next((p for names, p in own.items() if mount.name in names.removeprefix("name=").split(",")), None)
            parent = mount / (own.get("", "/") if path is None else path).lstrip("/")
            group = (parent if parent.is_dir() else mount) / f"railscope-test-{os.getpid()}"
            try:
                group.mkdir()
            except OSError as error:
                pytest.skip(f"no control group for a container can be made here: {error}")
            groups.append(group)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                if (group / setting).exists() and (group / "tasks").exists():  # the first version does not inherit
                    (group / setting).write_text((group.parent / setting).read_text())
        join = 'while [ "$1" != -- ]; do echo $$ >"$1/cgroup.procs" || exit; shift; done; shift; exec "$@"'
        yield ["sh", "-c", join, "sh", *map(str, groups), "--"]
    finally:
        for group in groups:
            _remove(group)


def _remove(group: Path) -> None:
    folders = [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]
    deadline = time.monotonic() + 10
    for folder in folders:
        while True:
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                folder.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
