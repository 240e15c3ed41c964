"""Measures what one hit of a probe costs on this host.

A hit costs its trap, which depends on the processor, the hypervisor and the kernel's mitigations and is therefore
measured: a program that does nothing is attached to a function of our own, and a loop around that function is timed
with and without it.  The function and the loop are a few machine instructions in an anonymous file that none else
maps: no other process meets the probe, no mapping of another process is touched, and the first instruction is of the
kind that NCCL's functions begin with.  It takes about 3 ms of CPU time.

To that a hit adds its program.  Those costs were measured on NCCL 2.32.3 at work, by a part of the bench
(tests/bench/program_cost.py), and are written down here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Final

import numpy as np

from railscope.probes.loading import libbpf
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.links import AttachKind, Links, ProbePoint, plain_attach_type

DEFAULT_TRAP_NS: Final = 600.0
"""Where nothing can be measured: a quiet Linux 6.18 on an AMD EPYC guest takes 530 to 640 ns."""

REFERENCE_TRAP_NS: Final = 780.0
"""What the trap took while `PROGRAM_NS` was measured, the same host with both cores busy."""

PROGRAM_NS: Final[Mapping[str, float]] = {
    "calls": 500.0,  # 410 to 520 in 6 runs on a host with a trap of 460; 60 to 100 when called in a tight loop
    "returns": 150.0,
    "lifecycle": 20_000.0,  # init_entry 10,000, init_return 32,000
    "proxy_post": 2400.0,  # whole: 2900 for 2 operations, 3500 to 4500 for 4, 4800 for 8, 6700 for 16
    "proxy_stop": 1300.0,  # 1110 to 1610
    "plan_replay": 700.0,  # 640 to 840
    "plan_launch": 400.0,  # 350 to 460
    "socket_send": 480.0,  # 330 to 620
    "cuda": 650.0,  # 540 to 710 of a job that asks an event until it has happened; a record behind work is dearer
    "driver_calls": 250.0,  # 80 in a tight loop; in a job others take three to five times as long as there
    "transfers": 400.0,
    "ib_send": 1100.0,  # not on a job: what it takes above socket_send on a made-up connection, added to that
}
"""What each program takes above the trap, ns.

Run times by BPF_ENABLE_STATS, less those of a program that does nothing (60), on NCCL 2.32.3 between two namespace
hosts: AllReduce, Send and Recv and graph replays of 1 KiB to 1 MiB.  Jobs call the programs with cold caches: tight
loops show a fraction of this.  `python -m tests.bench --only programs` measures them anew and shows these beside."""

OPERATION_NS: Final = 300.0
"""What `proxy_post` takes for each proxy operation that it walks over, ns; measured likewise."""

LOOP_OFFSET: Final = 16
CODE: Final[Mapping[str, bytes]] = {
    "x86_64": bytes.fromhex("555dc3").ljust(LOOP_OFFSET, b"\x90") + bytes.fromhex("534889fbe8e7ffffff48ffcb75f65bc3"),
    "aarch64": b"".join(
        word.to_bytes(4, "little")
        for word in (
            *(0xA9BF7BFD, 0xA8C17BFD, 0xD65F03C0, 0xD503201F),
            *(0xA9BE7BFD, 0xF9000BF3, 0xAA0003F3),
            *(0x97FFFFF9, 0xF1000673, 0x54FFFFC1),
            *(0xF9400BF3, 0xA8C27BFD, 0xD65F03C0),
        )
    ),
}
"""By machine: at 0 a function that saves its frame pointer, restores it and returns, at LOOP_OFFSET one that calls it
as often as its argument says (at least once)."""

_CALLS: Final = 400
_ROUNDS: Final = 7
_MOST_NS: Final = 30_000_000
_PLAUSIBLE_NS: Final = (50.0, 200_000.0)

Loop = Callable[[int], object]


class Source(Enum):
    """Where the trap's cost comes from."""

    MEASURED = "measured"
    ASSUMED = "assumed"


class CalibrationError(RuntimeError):
    """The trap could not be measured; one line says why."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What hits cost on this host."""

    trap_ns: float
    source: Source
    reason: str = ""
    """Why it is assumed, one line; empty where it was measured."""

    def hit_ns(self, program: str) -> float:
        """One hit of a program of `PROGRAM_NS`, trap included; `proxy_post` without what it walks over."""
        return self.trap_ns + PROGRAM_NS[program] * self._slowness

    @property
    def operation_ns(self) -> float:
        """What `proxy_post` takes for one proxy operation."""
        return OPERATION_NS * self._slowness

    @property
    def _slowness(self) -> float:
        """A host is taken to run programs as much slower or faster as it traps."""
        return self.trap_ns / REFERENCE_TRAP_NS


ASSUMED: Final = Calibration(DEFAULT_TRAP_NS, Source.ASSUMED, "not measured")


def calibrate(attach: AttachKind) -> Calibration:
    """Measure what a hit of probes that are attached in this way costs; where that fails, assume it and say why."""
    try:
        return Calibration(measure_trap_ns(attach), Source.MEASURED)
    except CalibrationError as error:
        return Calibration(DEFAULT_TRAP_NS, Source.ASSUMED, str(error))


def measure_trap_ns(attach: AttachKind) -> float:
    """What a hit of a BPF program that does nothing costs the thread that runs into it, ns of its CPU time.

    The loop's caches are warm, so this is the least that a trap costs a job.

    Raises:
        CalibrationError: this host lets us map no code, or attach nothing to it, or the result makes no sense.
    """
    with _own_function() as (path, loop):
        bare_ns = _call_ns(loop)
        with _empty_probe(attach, path):
            trap_ns = _call_ns(loop) - bare_ns
    low, high = _PLAUSIBLE_NS
    if not low <= trap_ns <= high:
        raise CalibrationError(f"a hit seems to cost {trap_ns:.0f} ns, which cannot be: this host is too unsteady")
    return trap_ns


@contextmanager
def _own_function() -> Iterator[tuple[str, Loop]]:
    """The path of a file with `CODE`, and the loop in it, mapped."""
    code = CODE.get(platform.machine())
    if code is None:
        raise CalibrationError(f"there is no code to measure with for {platform.machine()}")
    try:
        fd = os.memfd_create("railscope-calibration", os.MFD_CLOEXEC)
    except OSError as error:
        raise CalibrationError(f"an anonymous file cannot be made: {error.strerror}") from None
    try:
        os.write(fd, code.ljust(mmap.PAGESIZE, b"\0"))
        try:
            # Private and never writable: a uprobe goes nowhere else, and hardened services allow nothing else.
            mapping = mmap.mmap(fd, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
        except OSError as error:
            raise CalibrationError(f"code cannot be mapped: {error.strerror}") from None
        with mapping:
            # The array lends the address only: the mapping cannot be closed while an array holds on to it.
            address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
            yield f"/proc/self/fd/{fd}", ctypes.CFUNCTYPE(None, ctypes.c_uint64)(address + LOOP_OFFSET)
    finally:
        os.close(fd)


@contextmanager
def _empty_probe(attach: AttachKind, path: str) -> Iterator[None]:
    """Attach the program that does nothing to the function at the start of a file."""
    links = Links()
    try:
        loaded = libbpf.load(
            libbpf.object_path("empty"),
            attach_types={"empty": plain_attach_type(attach)},
            map_entries={},
        )
    except libbpf.LoadError as error:
        raise CalibrationError(str(error)) from None
    try:
        links.attach(attach, loaded.program_fds["empty"], path, (ProbePoint("calibration", 0, 0),))
        yield
    except KernelRefusal as refusal:
        raise CalibrationError(refusal.strerror or str(refusal)) from None
    finally:
        links.close()
        loaded.close()


def _call_ns(loop: Loop) -> float:
    """CPU time of one turn of the loop, ns: the median of some rounds, fewer where they take long."""
    loop(_CALLS // 8)  # the first ones find cold caches
    rounds: list[float] = []
    started_ns = time.thread_time_ns()
    while len(rounds) < _ROUNDS and (not rounds or time.thread_time_ns() - started_ns < _MOST_NS):
        before_ns = time.thread_time_ns()
        loop(_CALLS)
        rounds.append((time.thread_time_ns() - before_ns) / _CALLS)
    return median(rounds)  # numpy.median loads its masked arrays, 2 MB
