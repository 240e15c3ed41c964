"""Which builds of the real NCCL the tests have, and how to make one that nobody knows."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

from railscope.probes.libraries.elf import Elf

REPOSITORY: Final = Path(__file__).resolve().parents[2]
_PINNED: Final = re.findall(
    r"^nvidia-nccl-cu12==([\d.]+)", (REPOSITORY / "testbed/nccl/wheels.txt").read_text(), re.MULTILINE
)
LIBRARIES: Final = sorted(
    {*_PINNED, *(found.parent.name for found in (REPOSITORY / ".venv/nccl").glob("2.*/libnccl*"))}
)
"""Folders of all that fetch-wheels brings, named by version, and of whatever lies beside it."""


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
