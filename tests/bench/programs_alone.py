"""The programs of level counts beside a job, and of the agent nothing but a thread that reads their ring."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from agent.config import Config
from agent.drain_pace import pause_ns
from agent.program_settings import program_settings
from probes.elf import Elf
from probes.libbpf import LoadError
from probes.nccl.layout import Layouts
from probes.nccl.library import probe_points
from probes.nccl.programs import NcclPrograms
from probes.nccl.records import Stat
from probes.slot_rings import SlotRings
from tests.bench.target import BenchError


@contextmanager
def programs_alone(library: Path, pids: tuple[int, ...], *, write_events: bool = True) -> Iterator[NcclPrograms]:
    """Count the calls of these processes as an agent does that was told to observe them and no others.

    `write_events` False: nothing is written for time lines and stalls, and so there is nothing to read.

    Raises:
        BenchError: the programs do not load, or counted nothing.
    """
    with ExitStack() as stack:
        try:
            settings = replace(program_settings(Config(pids=pids)), write_events=write_events)
            programs = NcclPrograms.load(settings)
        except LoadError as error:
            raise BenchError(str(error)) from None
        stack.callback(programs.close)
        for pid in pids:
            programs.observe(pid)
        with library.open("rb") as file, Elf.open(file.fileno()) as elf:
            points, layout = probe_points(elf, 0), Layouts.load().layout_of(elf)
        stack.callback(programs.attach(str(library), points, 0, layout).close)
        if write_events:
            stop = threading.Event()
            reader = threading.Thread(target=_read, args=(programs.call_events, stop), name="ring")
            reader.start()
            stack.callback(reader.join)
            stack.callback(stop.set)
        yield programs
        if not programs.stats()[Stat.CALLS]:
            raise BenchError("the programs alone counted nothing")


def _read(rings: SlotRings, stop: threading.Event) -> None:
    """Read the rings as often as the agent does."""
    read_ns = time.monotonic_ns()
    waiting_ns = 0
    while not stop.wait(waiting_ns / 1e9):
        now_ns = time.monotonic_ns()
        waiting_ns = pause_ns(rings.fullness(), now_ns - read_ns)
        read_ns = now_ns
        rings.read()
