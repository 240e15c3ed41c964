"""Where the real NCCL library of the tests lies.

tests/nccl/wheels.txt pins it and tests/nccl/fetch-wheels brings it; neither the library nor any part
of it is kept in the repository.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

from railscope.probes.libraries.elf import Elf

NCCL_VERSION: Final = "2.32.3"
OLDER_NCCL_VERSION: Final = "2.28.9"
"""The other one that the double plays; several of its structures have other layouts."""
REPOSITORY: Final = Path(__file__).resolve().parents[2]
_PINNED: Final = re.findall(
    r"^nvidia-nccl-cu12==([\d.]+)", Path(__file__).with_name("wheels.txt").read_text(), re.MULTILINE
)
LIBRARIES: Final = sorted(
    {*_PINNED, *(found.parent.name for found in (REPOSITORY / ".venv/nccl").glob("2.*/libnccl*"))}
)
"""Folders of all that fetch-wheels brings, named by version, and of whatever lies beside it."""


class LibraryMissing(RuntimeError):
    """The NCCL library has not been fetched."""


def nccl_library(version: str = NCCL_VERSION, repository: Path = REPOSITORY) -> Path:
    """The path of libnccl.so.2 of one version.

    Raises:
        LibraryMissing: it is not there; the message says how to fetch it.
    """
    library = repository / ".venv" / "nccl" / version / "libnccl.so.2"
    if not library.is_file():
        raise LibraryMissing(f"{library} is missing: run tests/nccl/fetch-wheels .venv/bin/python")
    return library


def copy_with_another_build_id(library: Path, to: Path) -> None:
    """Make a build that nobody knows: the same code and data under another name.

    Raises:
        ValueError: the library has no build-id near its beginning.
    """
    shutil.copyfile(library, to)
    with library.open("rb") as file, Elf.open(file.fileno()) as elf:
        build_id = bytes.fromhex(elf.build_id or "")
    with to.open("r+b") as copy:
        at = copy.read(1 << 20).find(build_id) if build_id else -1
        if at < 0:
            raise ValueError(f"{library} has no build-id to be changed")
        copy.seek(at)
        copy.write(bytes(byte ^ 0xFF for byte in build_id))
