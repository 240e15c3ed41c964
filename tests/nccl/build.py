"""Build the CUDA test double and the driver program against the fetched NCCL library.

The outputs lie in .venv/nccl/double/, next to the library, and are built again only when a source, the
layout generator or the library is newer.  Needs gcc; `python -m tests.nccl.build` builds by hand.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.nccl.library import REPOSITORY, nccl_library

SOURCES: Final = Path(__file__).resolve().parent / "double"
SHARED_OBJECT_SOURCES: Final = (
    "patch.c",
    "symbols.c",
    "runtime.c",
    "streams.c",
    "driver_api.c",
    "kernel.c",
    "ring.c",
    "tree.c",
    "p2p.c",
    "passage.c",
    "simple.c",
    "ll.c",
    "reduce.c",
)
DRIVER_SOURCES: Final = ("driver.c", "operations.c")
FLAGS: Final = ("-std=c11", "-D_GNU_SOURCE", "-g", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror")


class BuildError(RuntimeError):
    """The double does not build; the message holds what the tool said."""


@dataclass(frozen=True, slots=True)
class Double:
    """What a test needs to run NCCL without a GPU."""

    nccl: Path
    """The real libnccl.so.2."""
    shared_object: Path
    """libcuda-double.so: link it, or name it in LD_PRELOAD of a process that loads libnccl."""
    driver: Path
    """The driver program; one process of it is one rank."""


def build(repository: Path = REPOSITORY, compiler: str = "gcc") -> Double:
    """Build what is out of date (about 8 s from nothing) and say where everything is.

    Raises:
        LibraryMissing: NCCL has not been fetched.
        BuildError: the compiler or the layout generator failed.
    """
    nccl = nccl_library(repository=repository)
    if shutil.which(compiler) is None:
        raise BuildError(f"{compiler} is missing: install the packages gcc and libc6-dev")
    folder = repository / ".venv" / "nccl" / "double"
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Path(__file__)
    layout = folder / "layout.h"
    stub = folder / "libnvidia-ml.so.1"
    double = Double(nccl, folder / "libcuda-double.so", folder / "nccl-driver")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        generator = SOURCES / "make-layout.py"
        if _stale(layout, [generator, nccl]):
            _run([sys.executable, str(generator), str(nccl), str(layout)])
        common = [compiler, *FLAGS, f"-I{folder}"]
        inputs = [SOURCES / "nvml.c"]
        if _stale(stub, [*inputs, recipe]):
            _compile([*common, "-O2", "-shared", "-Wl,-soname,libnvidia-ml.so.1"], inputs, stub, [])
        inputs = [SOURCES / name for name in SHARED_OBJECT_SOURCES]
        if _stale(double.shared_object, [*inputs, SOURCES / "double.h", layout, stub, recipe]):
            flags = ["-O3", "-fvisibility=hidden", "-shared", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
            _compile([*common, *flags], inputs, double.shared_object, [f"-L{folder}", "-l:libnvidia-ml.so.1"])
        inputs = [SOURCES / name for name in DRIVER_SOURCES]
        headers = [SOURCES / "driver.h", SOURCES / "nccl_abi.h"]
        if _stale(double.driver, [*inputs, *headers, double.shared_object, recipe]):
            libraries = [
                f"-L{folder}",
                "-l:libcuda-double.so",
                str(nccl),
                "-lm",
                f"-Wl,-rpath,$ORIGIN:$ORIGIN/../{nccl.parent.name}",
            ]
            flags = ["-O2", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"]
            _compile([*common, *flags], inputs, double.driver, libraries)
    return double


def _stale(output: Path, inputs: Sequence[Path]) -> bool:
    if not output.exists():
        return True
    made_ns = output.stat().st_mtime_ns
    return any(path.stat().st_mtime_ns > made_ns for path in inputs)


def _compile(command: Sequence[str], sources: Sequence[Path], output: Path, libraries: Sequence[str]) -> None:
    partial = output.with_name(output.name + ".partial")
    _run([*command, "-o", str(partial), *map(str, sources), *libraries])
    partial.rename(output)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{Path(command[0]).name} failed:\n{done.stderr.strip() or done.stdout.strip()}")


if __name__ == "__main__":
    print(build())
