"""What tests of the NCCL probes share: libraries with a process that calls them, and probes on them.

The library is the real one where it can answer without a GPU: it refuses a NULL, zeroed or forged communicator only
behind the probed functions.  Where a live communicator is needed, the testbed's library stands in.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.loading.links import AttachKind, Links
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import DataType, Op
from railscope.probes.nccl.functions.entry_points import ENQUEUE_CHECK
from railscope.probes.nccl.functions.probe_points import ProbePoints, probe_points
from railscope.probes.nccl.layouts.layout import CommLayout, Layouts
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms, ProgramSettings
from tests.root.caller import Caller

MODES: Final = [
    pytest.param(attach, enqueue_time, id=f"{attach.value}+{enqueue_time.value}")
    for attach in AttachKind
    for enqueue_time in EnqueueTime
    if attach is AttachKind.MULTI or enqueue_time is not EnqueueTime.SESSION
]
FLOAT32: Final = int(DataType.Float32)
GARBAGE: Final = 0xDEAD << 48
"""Upper half of an `int` argument, which the caller may leave as it was."""

on_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the library is written in x86-64 assembly")


@dataclass(frozen=True, slots=True)
class Target:
    """A library, what to probe in it, and a process that calls it."""

    path: Path
    points: ProbePoints
    layout: CommLayout | None
    caller: Caller


@dataclass(frozen=True, slots=True)
class Count:
    calls: int
    payload_bytes: int


@contextmanager
def target(path: Path, layouts: Layouts) -> Iterator[Target]:
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        points, layout = probe_points(elf, 3), layouts.layout_of(elf)
    with Caller(path) as caller:
        yield Target(path, points, layout, caller)


@contextmanager
def loaded(*observed: Target, **settings: Any) -> Iterator[NcclPrograms]:
    """Programs that count the targets' processes only: others on this machine may use the same library."""
    programs = NcclPrograms.load(ProgramSettings(**settings, only_observed_processes=True))
    try:
        for each in observed:
            programs.observe(each.caller.pid)
        yield programs
    finally:
        programs.close()


@contextmanager
def attached(programs: NcclPrograms, to: Target, points: ProbePoints | None = None) -> Iterator[Links]:
    links = programs.attach(str(to.path), points or to.points, 3, to.layout)
    try:
        yield links
    finally:
        links.close()


@contextmanager
def on_processor(number: int, to: Target) -> Iterator[None]:
    """Keep the thread that calls the library to one processor, whose ring it fills alone."""
    before = os.sched_getaffinity(to.caller.pid)
    os.sched_setaffinity(to.caller.pid, {sorted(before)[number]})
    try:
        yield
    finally:
        os.sched_setaffinity(to.caller.pid, before)


def all_reduce_only(points: ProbePoints) -> ProbePoints:
    """Enough where the function does not matter: each perf event costs a grace period of the kernel to close."""
    calls = tuple(point for point in points.calls if point.symbol in ("ncclAllReduce", ENQUEUE_CHECK))
    return replace(points, calls=calls, calls_entry_only=(), inits=(), ends=(), followed=())


def counted(programs: NcclPrograms, pid: int | None = None) -> dict[Op, Count]:
    """What the programs counted, by operation."""
    keys, values = programs.aggregates.read()
    found: dict[Op, Count] = {}
    for op in sorted(set(keys["op"].tolist())):
        chosen = (keys["op"] == op) & ((keys["tgid"] == pid) if pid is not None else True)
        if chosen.any():
            calls, payload_bytes = (int(values[name][chosen].sum()) for name in ("calls", "payload_bytes"))
            found[Op(op)] = Count(calls, payload_bytes)
    return found


def communicators(programs: NcclPrograms) -> dict[int, Records]:
    """Entries of the communicators' map by address."""
    keys, values = programs.communicators.read()
    return {int(key["comm"]): value for key, value in zip(keys, values, strict=True)}


def all_reduce(to: Target, times: int, comm: int = 0, count: int = 100, data_type: int = FLOAT32) -> int:
    buffer = to.caller.memory(4096) if not to.points.through_enqueue_check else 0
    return to.caller.call("ncclAllReduce", times, buffer, buffer, count, data_type, 0, comm, 7)


def assemble(folder: Path, **functions: str) -> Path:
    """A library of functions in x86-64 assembly."""
    source, library = folder / "library.s", folder / "libassembled.so"
    lines = ['.section .note.GNU-stack,"",@progbits', ".text"]
    for name, code in functions.items():
        lines += [f".globl {name}", f".type {name}, @function", f"{name}: {code}", f".size {name}, . - {name}"]
    source.write_text("\n".join(lines) + "\n")
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", library, source], check=True)
    return library
