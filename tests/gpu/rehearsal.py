"""The lane without a GPU: the same command, kit and checks, in a bare root, with NCCL on the CUDA test double.

    tests/gpu/run --double [--short] [--only CHECK…]

The root is a Debian that mmdebstrap made (make-root), with a Python of its own and nothing of this project.  Into a
throw-away copy of it goes what travels to a lent machine: the files that git knows or would take, and the kit.  NCCL
and the double are mounted beside them, in the place of the driver and of PyTorch, with stand-ins for NVML and
nvidia-smi (simulated_driver.py).  Everything that is not hardware is real: the kit, the agent, its probes, NCCL, the
network.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pynvml

from railscope.testbed.nccl.build import BuildError, Double, build
from railscope.testbed.nccl.library import OLDER_NCCL_VERSION, LibraryMissing
from tests.gpu.kit import KIT, KitError, make_kit
from tests.gpu.simulated_driver import lay_driver
from tests.gpu.table import Results, read_results
from tests.gpu.unpack import MANIFEST, source_digest
from tests.nccl.library import REPOSITORY

ROOT: Final = REPOSITORY / ".venv" / "gpu-root"
_MOUNT: Final = """
set -e
mount -t tmpfs tmpfs {work}
mkdir {work}/upper {work}/layer {work}/root
mount -t overlay overlay -o lowerdir={root},upperdir={work}/upper,workdir={work}/layer {work}/root
cd {work}/root
mkdir -p checkout out double nccl
cp -r {driver} driver
cp {pynvml} usr/lib/python3/dist-packages
for folder in proc sys dev; do mount --rbind /$folder $folder; done
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount --bind {out} out
mount --bind {double} double
mount --bind {nccl} nccl
git -C {repository} ls-files --cached --others --exclude-standard -z \
    | (cd {repository} && while IFS= read -r -d '' file; do [ ! -f "$file" ] || printf '%s\\0' "$file"; done) \
    | tar -C {repository} --null --files-from=- -c | tar -C checkout -x
cp -r {kit} checkout/.gpu
exec env -i PATH=/driver:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root OUT=/out LD_LIBRARY_PATH=/driver \
    NVML_STUB_SCRIPT=/driver/script chroot . \
    /checkout/tests/gpu/run --backend /double:/nccl/libnccl.so.2 "$@"
"""


class RehearsalError(RuntimeError):
    """The rehearsal cannot begin, or left no results; one line says why."""


def rehearse(out: Path, arguments: Sequence[str] = (), repository: Path = REPOSITORY) -> Results:
    """Run the lane; `out` gets what `$OUT` would.

    Args:
        arguments: of tests/gpu/run, such as `--short`.

    Raises:
        RehearsalError, KitError: see there.
    """
    if os.geteuid() != 0:
        raise RehearsalError("mounts and probes want root: run it as root")
    double = build(version=OLDER_NCCL_VERSION)
    _renew_kit(repository)
    made = subprocess.run([Path(__file__).with_name("make-root"), str(ROOT)])
    if made.returncode != 0:
        raise RehearsalError("there is no bare root to rehearse in")
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="railscope-results-") as fresh,
        tempfile.TemporaryDirectory(prefix="railscope-rehearsal-") as work,
        tempfile.TemporaryDirectory(prefix="railscope-driver-") as driver,
    ):
        lay_driver(Path(driver))
        # Mounts, and what a killed run leaves of them, end with the namespace.
        command = ["unshare", "--mount", "--propagation", "private", "--kill-child", "bash", "-c"]
        command += [_script(Path(work), Path(driver), Path(fresh), double, repository), "rehearsal", *arguments]
        status = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
        if not (Path(fresh) / "results.json").exists():
            raise RehearsalError(f"the lane ended with status {status} and no results")
        # Only now: a run that never began leaves the last one's results.
        for file in Path(fresh).iterdir():
            shutil.copy(file, out)
    return read_results(out / "results.json")


def _script(work: Path, driver: Path, out: Path, double: Double, repository: Path) -> str:
    return _MOUNT.format(
        work=shlex.quote(str(work)),
        root=shlex.quote(str(ROOT)),
        driver=shlex.quote(str(driver)),
        pynvml=shlex.quote(str(pynvml.__file__)),
        out=shlex.quote(str(out.resolve())),
        double=shlex.quote(str(double.shared_object.parent)),
        nccl=shlex.quote(str(double.nccl.parent)),
        repository=shlex.quote(str(repository)),
        kit=shlex.quote(str(KIT)),
    )


def _renew_kit(repository: Path) -> None:
    """Make the kit where there is none, or one of other sources."""
    try:
        manifest = json.loads((KIT / MANIFEST).read_text())
    except FileNotFoundError:
        manifest = {}
    if manifest.get("sources") != source_digest(repository):
        make_kit()


if __name__ == "__main__":
    try:
        seen = rehearse(Path(os.environ.get("OUT", "gpu-results")), sys.argv[1:])
    except (RehearsalError, KitError, LibraryMissing, BuildError) as error:
        sys.exit(f"tests/gpu/run: {error}")
    sys.exit(not seen.passed)
