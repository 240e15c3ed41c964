"""How often a process's BPF programs ran and how long that took, as the kernel counts while it is asked to.

A process's programs are those that it has descriptors of.  The kernel counts from bpf(BPF_ENABLE_STATS) on, for as
long as that descriptor is open.  It measures the programs alone: neither the trap that leads to them is in it, nor what
counting itself costs them.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.probes.loading.bpf_syscall import BPF_OBJ_GET_INFO_BY_FD, bpf

_BPF_PROG_GET_FD_BY_ID: Final = 13
_BPF_ENABLE_STATS: Final = 32
_RUN_TIME: Final = 0
_INFO_BYTES: Final = 256
_NAME: Final = struct.Struct("=64x16s")
_TIMES: Final = struct.Struct("=192xQQ")
"""Of struct bpf_prog_info: name; run_time_ns, run_cnt."""
_LINK: Final = "anon_inode:bpf-prog"
NAME_BYTES: Final = 15
"""The kernel keeps no more of a program's name."""


@dataclass(frozen=True, slots=True)
class RunTime:
    """What one program took so far, or several together."""

    runs: int
    nanoseconds: int

    def __add__(self, other: RunTime) -> RunTime:
        return RunTime(self.runs + other.runs, self.nanoseconds + other.nanoseconds)

    def __sub__(self, earlier: RunTime) -> RunTime:
        return RunTime(self.runs - earlier.runs, self.nanoseconds - earlier.nanoseconds)

    @property
    def mean_ns(self) -> float:
        """Of one run; there was at least one."""
        return self.nanoseconds / self.runs


NEVER: Final = RunTime(0, 0)


@contextmanager
def counted() -> Iterator[None]:
    """Let the kernel count, for all programs of the machine.

    Raises:
        KernelRefusal: CAP_SYS_ADMIN is missing.
    """
    descriptor = bpf(_BPF_ENABLE_STATS, struct.pack("=I", _RUN_TIME), "count run times of BPF programs")
    try:
        yield
    finally:
        os.close(descriptor)


def run_times(pid: int, procfs: Path = Path("/proc")) -> Mapping[str, RunTime]:
    """By name, cut to NAME_BYTES: every program that a process has a descriptor of.

    Programs of one name, as an object that was loaded twice has them, are taken together.

    Raises:
        KernelRefusal: the kernel does not tell.
        OSError: the process has ended.
    """
    found: dict[str, RunTime] = {}
    for number in program_ids(procfs / str(pid)):
        name, taken = _parse(_info(number))
        found[name] = found.get(name, NEVER) + taken
    return found


def program_ids(process_folder: Path) -> set[int]:
    """Numbers that the kernel gave to the programs of a process, from `PROCFS/PID`.

    Raises:
        OSError: the process has ended.
    """
    found = set()
    for entry in (process_folder / "fd").iterdir():
        try:
            if str(entry.readlink()) != _LINK:
                continue
            lines = (process_folder / "fdinfo" / entry.name).read_text().splitlines()
        except OSError:
            continue  # closed since it was listed
        found |= {int(line.split()[1]) for line in lines if line.startswith("prog_id:")}
    return found


def _info(number: int) -> bytes:
    descriptor = bpf(_BPF_PROG_GET_FD_BY_ID, struct.pack("=III", number, 0, 0), "open a BPF program")
    buffer = ctypes.create_string_buffer(_INFO_BYTES)
    attributes = struct.pack("=IIQ", descriptor, _INFO_BYTES, ctypes.addressof(buffer))
    try:
        bpf(BPF_OBJ_GET_INFO_BY_FD, attributes, "read a BPF program's run time")
    finally:
        os.close(descriptor)
    return buffer.raw


def _parse(info: bytes) -> tuple[str, RunTime]:
    (name,) = _NAME.unpack_from(info)
    nanoseconds, runs = _TIMES.unpack_from(info)
    return name.rstrip(b"\0").decode("ascii", "replace"), RunTime(runs, nanoseconds)
