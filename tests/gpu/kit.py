"""Make `.gpu/`: all that a machine with a GPU lacks, so that nothing is compiled or fetched there.

    python -m tests.gpu.kit        (`make gpu-kit`)

The kit travels beside the working tree to a bare x86-64 machine with root, the CUDA driver, Python 3.12 and PyTorch,
and tests/gpu/unpack.py lays it out there.  It holds

* `wheels/`: this project, built from the working tree with its BPF objects and native library in it, and what the agent
  needs beyond numpy, psutil, prometheus-client, PyYAML and nvidia-ml-py, which machines with PyTorch have.  All are
  made for any CPython from 3.9 on;
* `debs/`: libbpf, libelf and iproute2 with the libraries that they need, as Debian packages them;
* `stamps/`: a profiler plugin for NCCL that only asks for the time stamps of kernels (stamps.c), and where NCCL keeps
  those (offsets.json, from the debug information of the NCCL that PyTorch brings);
* `manifest.json`: the revision, a digest of the sources that the wheel was built from, and the SHA-256 of every file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from railscope.probes.nccl.layouts.dwarf import structures_in
from railscope.testbed.nccl.library import OLDER_NCCL_VERSION, nccl_library
from tests.gpu.unpack import MANIFEST, product_folders, source_digest
from tests.nccl.library import REPOSITORY

KIT: Final = REPOSITORY / ".gpu"
MOST_BYTES: Final = 40 << 20
PYTHON_VERSION: Final = "3.12"
"""Of the machines that are lent."""
WHEELS: Final = ("bcrypt", "capstone", "pyelftools")
"""Of the agent's dependencies (pyproject.toml) those that a machine with PyTorch lacks."""
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
DEBS: Final = ("libbpf1", "libelf1", "zlib1g", "iproute2", "libmnl0", "libbsd0", "libmd0", "libcap2", "libxtables12")
"""libbpf for the agent; iproute2, with what `ip` and `tc` are linked to, for network namespaces with veth rails."""
STAMPS_NCCL_VERSION: Final = OLDER_NCCL_VERSION
"""What PyTorch 2.11 for CUDA 13 brings, and the double plays: the layouts of -cu12 and -cu13 are the same."""
STAMP_FIELDS: Final = {
    "ncclComm": ("profiler.workStarted", "profiler.workCompleted", "rank", "commHash"),
    "ncclDevProfiler": ("data",),
}


class KitError(RuntimeError):
    """The kit cannot be made; one line says what to do."""


def make_kit(kit: Path = KIT, repository: Path = REPOSITORY) -> int:
    """Make the kit anew, in half a minute; returns its size in bytes.

    Raises:
        KitError: a tool or a registry refused, something is not built, or the kit is too large to travel.
    """
    missing = [path for path in _built(repository) if not path.exists()]
    if missing:
        raise KitError(f"{missing[0].relative_to(repository)} is missing: run 'make build'")
    with tempfile.TemporaryDirectory(prefix="railscope-kit-") as folder:
        work = Path(folder) / "kit"
        for name in ("wheels", "debs", "stamps"):
            (work / name).mkdir(parents=True)
        project_wheel(repository, Path(folder) / "source", work / "wheels", RAILSCOPE_WHEEL_TESTBED="1")
        _run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON_VERSION),
            *(word for platform in PLATFORMS for word in ("--platform", platform)),
            *("--dest", str(work / "wheels"), *WHEELS),
        )
        _run("apt-get", "--quiet", "download", *DEBS, folder=work / "debs")
        _stamps(repository, work / "stamps")
        files = sorted(path for path in work.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in files)
        if size > MOST_BYTES:
            raise KitError(f"the kit has {size >> 20} MiB, and may have {MOST_BYTES >> 20}")
        manifest = {
            "revision": _run("git", "-C", str(repository), "describe", "--always", "--dirty").strip(),
            "sources": source_digest(repository),
            "files": {str(path.relative_to(work)): _sha256(path) for path in files},
        }
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        shutil.rmtree(kit, ignore_errors=True)
        shutil.move(work, kit)
    return size


def _built(repository: Path) -> Iterable[Path]:
    """What must have been compiled: it goes into the wheel."""
    for source in sorted((repository / "probes/bpf").glob("*.bpf.c")):
        yield source.with_name(source.name.replace(".bpf.c", ".x86.bpf.o"))
    yield repository / "probes/native/beats.x86_64.so"
    yield repository / "testbed/bin/librailscope-workload.so"


def project_wheel(repository: Path, source: Path, wheels: Path, **environment: str) -> None:
    """Build the wheel from a copy: a folder `build` of former builds would bring back modules that are gone.

    `environment`: what setup.py heeds.
    """
    for name in product_folders(repository):
        shutil.copytree(repository / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "build.mk", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    _run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"),
        *("--wheel-dir", str(wheels), str(source)),
        environment=environment,
    )


def _stamps(repository: Path, folder: Path) -> None:
    source = Path(__file__).with_name("stamps.c")
    plugin = folder / "libnccl-profiler-stamps.so"
    _run("gcc", "-std=c11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", str(source), "-o", str(plugin))
    with nccl_library(STAMPS_NCCL_VERSION, repository).open("rb") as file:
        found = structures_in(file, STAMP_FIELDS, until_found=True)
    offsets: dict[str, Mapping[str, int]] = {name: structure.offsets for name, structure in found.items()}
    lacking = [f"{name}.{field}" for name in STAMP_FIELDS for field in STAMP_FIELDS[name] if field not in offsets[name]]
    if lacking:
        raise KitError(f"NCCL {STAMPS_NCCL_VERSION} has no {lacking[0]}: look where it keeps its kernels' time stamps")
    table = {
        "nccl_version": STAMPS_NCCL_VERSION,
        "offsets": offsets["ncclComm"],
        "channel_bytes": found["ncclDevProfiler"].size_bytes,
    }
    (folder / "offsets.json").write_text(json.dumps(table, indent=1) + "\n")


def _run(*command: str, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    try:
        both = {**os.environ, **(environment or {})}
        done = subprocess.run(command, cwd=folder, env=both, capture_output=True, text=True)
    except FileNotFoundError:
        raise KitError(f"{command[0]} is missing: run 'make setup'") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise KitError(f"{' '.join(command[:4])} … failed: {' '.join(said)}")
    return done.stdout


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    try:
        print(f"{KIT.relative_to(REPOSITORY)}: {make_kit() / (1 << 20):.1f} MiB")
    except (KitError, OSError) as error:
        sys.exit(f"gpu-kit: {error}")
