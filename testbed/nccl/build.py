"""Build the CUDA test double and the driver program against the fetched NCCL library.

The outputs lie in .venv/nccl/double/, next to the library (those for another version than the usual one in
double-VERSION/), and are built again only when a source, the layout generator or the library is newer.  Needs gcc;
`python -m railscope.testbed.nccl.build` builds by hand.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.testbed.nccl.library import NCCL_VERSION, OLDER_NCCL_VERSION, REPOSITORY, nccl_library

SOURCES: Final = Path(__file__).resolve().parent / "double"
_GENERATOR: Final = SOURCES / "make-layout.py"
KERNEL_SOURCES: Final = ("kernel.c", "ring.c", "tree.c", "p2p.c", "passage.c", "simple.c", "ll.c", "reduce.c")
"""What plays a launch."""
SHARED_OBJECT_SOURCES: Final = (
    *("patch.c", "symbols.c", "runtime.c", "streams.c", "capture.c", "graph.c", "driver_api.c", "patience.c"),
    *KERNEL_SOURCES,
)
DRIVER_SOURCES: Final = (
    *("driver.c", "patterns.c", "families.c", "gpt.c", "inference.c", "failures.c"),
    *("completion.c", "operations.c"),
)
WORKLOAD: Final = Path(__file__).resolve().parents[1] / "workload"
SHARED_SOURCES: Final = ("driver_moments.c", "driver_gpt_shape.c")
"""Of the workload's driver: what happens between calls, and what a GPT sends."""
ENVIRONMENT: Final = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "NCCL_ALGO": "RING",
    "NCCL_PROTO": "SIMPLE",
    "NCCL_P2P_LL_THRESHOLD": "0",
    "NCCL_RAS_ENABLE": "0",
}
"""What keeps NCCL to what the double plays: plain memory, sockets, the ring, the Simple protocol."""
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
    """The tests' driver program; one process of it is one rank."""
    workload: Path
    """The testbed's workload (testbed/job.py) with this NCCL for its library."""
    cuda_runtime: Path
    """libcudart.so.12, which ranks map whose job has `events`; the streams and events behind it are the double's."""
    cuda_driver: Path
    """libcuda.so.1, which libcudart.so.12 calls."""
    layout: Path
    """layout.h, made of NCCL's debug information.  Its folder is the generator's own: checkouts share the others."""


def build(repository: Path = REPOSITORY, compiler: str = "gcc", version: str = NCCL_VERSION) -> Double:
    """Build what is out of date (about 8 s from nothing) for one version of NCCL and say where everything is.

    Raises:
        LibraryMissing: NCCL has not been fetched.
        BuildError: the compiler or the layout generator failed, its folder cannot be written, or the double does not
            play this version.
    """
    if version not in (NCCL_VERSION, OLDER_NCCL_VERSION):
        raise BuildError(f"the double plays NCCL {NCCL_VERSION} and {OLDER_NCCL_VERSION}, not {version}")
    nccl = nccl_library(version, repository)
    if shutil.which(compiler) is None:
        raise BuildError(f"{compiler} is missing: install the packages gcc and libc6-dev")
    folder = _folder(nccl, version)
    recipe = Path(__file__)
    stub = folder / "libnvidia-ml.so.1"
    double = _double(nccl, folder)
    layout, generator = double.layout, _GENERATOR
    try:
        layout.parent.mkdir(parents=True, exist_ok=True)
        locked = (folder / "lock").open("w")
    except OSError as error:
        raise BuildError(f"{error.filename}: cannot build there: {error.strerror}") from None
    with locked as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _stale(layout, [generator, nccl]):
            _run([sys.executable, str(generator), str(nccl), str(layout)])
        common = [compiler, *FLAGS, f"-I{layout.parent}"]
        inputs = [SOURCES / "nvml.c"]
        if _stale(stub, [*inputs, recipe]):
            _compile([*common, "-O2", "-shared", "-Wl,-soname,libnvidia-ml.so.1"], inputs, stub, [])
        inputs = [SOURCES / name for name in SHARED_OBJECT_SOURCES]
        if _stale(double.shared_object, [*inputs, SOURCES / "double.h", SOURCES / "graph.h", layout, stub, recipe]):
            flags = ["-O3", "-fvisibility=hidden", "-shared", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
            _compile([*common, *flags], inputs, double.shared_object, [f"-L{folder}", "-l:libnvidia-ml.so.1"])
        for library, source, needed in (
            (double.cuda_driver, SOURCES / "cuda.c", double.shared_object),
            (double.cuda_runtime, SOURCES / "cudart.c", double.cuda_driver),
        ):
            if _stale(library, [source, needed, recipe]):
                # Functions begin with a push of the frame pointer, as NVIDIA's do (12.9).
                flags = ["-O2", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"]
                flags += ["-shared", f"-Wl,-soname,{library.name}"]
                _compile(
                    [*common, *flags, "-Wl,-rpath,$ORIGIN"], [source], library, [f"-L{folder}", f"-l:{needed.name}"]
                )
        shared = [WORKLOAD / name for name in SHARED_SOURCES]
        inputs = [*(SOURCES / name for name in DRIVER_SOURCES), *shared]
        headers = [SOURCES / "driver.h", SOURCES / "nccl_abi.h", *(path.with_suffix(".h") for path in shared)]
        libraries = [f"-L{folder}", "-l:libcuda-double.so", str(nccl), "-lm"]
        libraries += [f"-Wl,-rpath,$ORIGIN:$ORIGIN/../{nccl.parent.name}"]
        if _stale(double.driver, [*inputs, *headers, double.shared_object, recipe]):
            flags = ["-O2", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"]
            _compile([*common, f"-I{WORKLOAD}", *flags], inputs, double.driver, libraries)
        inputs = [*sorted(WORKLOAD.glob("driver*.c")), SOURCES / "workload.c"]
        if _stale(double.workload, [*inputs, *WORKLOAD.glob("*.h"), double.shared_object, recipe]):
            # GNU's C, as build.mk has it; the sources themselves ask for _GNU_SOURCE.
            flags = ["-std=gnu11", "-U_GNU_SOURCE", "-O2", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined"]
            _compile([*common, f"-I{WORKLOAD}", *flags], inputs, double.workload, libraries)
    return double


def built(repository: Path = REPOSITORY) -> Double:
    """Where `build` has put everything for the usual version, for who can only read it.

    Raises:
        LibraryMissing: NCCL has not been fetched.
    """
    nccl = nccl_library(NCCL_VERSION, repository)
    return _double(nccl, _folder(nccl, NCCL_VERSION))


def _folder(nccl: Path, version: str) -> Path:
    return nccl.parents[1] / ("double" if version == NCCL_VERSION else f"double-{version}")


def _double(nccl: Path, folder: Path) -> Double:
    return Double(
        nccl,
        shared_object=folder / "libcuda-double.so",
        driver=folder / "nccl-driver",
        workload=folder / "nccl-workload",
        cuda_runtime=folder / "libcudart.so.12",
        cuda_driver=folder / "libcuda.so.1",
        layout=folder / f"layout-{hashlib.sha256(_GENERATOR.read_bytes()).hexdigest()[:12]}" / "layout.h",
    )


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
