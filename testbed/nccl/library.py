"""Where the real NCCL library lies.

wheels.txt pins its versions and fetch-wheels brings them to .venv/nccl of a checkout; neither the library nor any part
of it is kept in the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

NCCL_VERSION: Final = "2.32.3"
OLDER_NCCL_VERSION: Final = "2.28.9"
"""The other one that the double plays; several of its structures have other layouts."""
REPOSITORY: Final = Path(__file__).resolve().parents[2]
"""The checkout; of an installed package it is a folder without NCCL."""


class LibraryMissing(RuntimeError):
    """The NCCL library has not been fetched."""


def nccl_library(version: str = NCCL_VERSION, repository: Path = REPOSITORY) -> Path:
    """The path of libnccl.so.2 of one version.

    Raises:
        LibraryMissing: it is not there; the message says how to fetch it.
    """
    library = repository / ".venv" / "nccl" / version / "libnccl.so.2"
    if not library.is_file():
        raise LibraryMissing(f"{library} is missing: run testbed/nccl/fetch-wheels .venv/bin/python")
    return library
