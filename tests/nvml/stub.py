"""Builds the simulated NVML library and hands its script to it."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("stub.c")
FLAGS: Final = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror")

UNSIGNED_INT: Final = 1
UNSIGNED_LONG_LONG: Final = 3

NOT_SUPPORTED: Final = 3
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
GPU_IS_LOST: Final = 15
VERSION_MISMATCH: Final = 18


def build_stub(folder: Path) -> Path:
    """Compile into FOLDER/libnvidia-ml.so.1: for a process of its own, name FOLDER in LD_LIBRARY_PATH.

    It has no soname on purpose: a library of this name that one test loaded is not found by another one's.

    Raises:
        subprocess.CalledProcessError, FileNotFoundError: gcc failed or is missing.
    """
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", *FLAGS, str(SOURCE), "-o", str(library)], check=True)
    return library


def link_lines(gpu: int, links: Iterable[int], *, state: int = 1, remote_type: int = 2, bus: int = 0x90) -> list[str]:
    """Links to NVSwitches, with payload counters, errors and speed as a Hopper has them."""
    lines = [f"states {gpu}"]
    for link in links:
        lines.append(f"link {gpu} {link} {state} {remote_type} {bus:x}")
        lines += [f"field {gpu} {field} {link} 0 {UNSIGNED_LONG_LONG} 0" for field in (138, 139, 140, 141)]
        lines += [f"field {gpu} {field} {link} 0 {UNSIGNED_LONG_LONG} 0" for field in (161, 162, 163)]
        lines.append(f"field {gpu} 164 {link} 0 {UNSIGNED_INT} 26562")
    return lines


class Stub:
    """The library as loaded into this process."""

    def __init__(self, library: Path) -> None:
        self.library = str(library)
        self.loaded = ctypes.CDLL(self.library)

    def say(self, *lines: str) -> None:
        """Hand over lines of the script; see stub.c.

        Raises:
            ValueError: a line is not understood.
        """
        for line in lines:
            if self.loaded.nvml_stub(line.encode()) != 0:
                raise ValueError(f"the NVML stub does not understand {line!r}")

    def count(self, gpu: int, field: int, link: int, value: int, kind: int = UNSIGNED_LONG_LONG) -> None:
        """Let a field have a value."""
        self.say(f"field {gpu} {field} {link} 0 {kind} {value}")
