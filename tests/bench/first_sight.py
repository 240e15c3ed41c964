"""What the agent takes to make sense of an NCCL library that it sees for the first time: 470 MB, in the page cache.

Known is a build that stands in the table of layouts.  The unknown one is the same library with another build-id, whose
layout the machine code has to tell.  Measured is all that the agent's loop does about it: reading the process's
mappings, finding functions and layout, attaching.  Each look happens in a process of its own, as nothing may be
remembered; starting that process and loading the programs are not part of it.

`python -m tests.bench.first_sight PID` is one such look: it prints what it found and how long it took.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from railscope.agent.node.completion.levels import Levels
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.targets.libraries import Libraries
from railscope.probes.clock import SystemClock
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import NcclPrograms, ProgramSettings
from railscope.probes.nccl.programs.internals import Internals
from railscope.testbed.nccl.library import nccl_library
from tests.bench.agent_cost import idle_mapper
from tests.bench.results import Bound, Line, figure
from tests.bench.results import Target as Limit
from tests.bench.target import BenchError, Built
from tests.nccl.library import REPOSITORY, copy_with_another_build_id

PART: Final = "first sight"
_PROCFS: Final = Path("/proc")


def measure(_built: Built, rounds: int) -> list[Line]:
    """Look at both builds in turn, `rounds` times.

    Raises:
        BenchError: a look fails, or does not find what it should.
        LibraryMissing: the NCCL library was not fetched.
    """
    library = nccl_library()
    known: list[float] = []
    unknown: list[float] = []
    with tempfile.TemporaryDirectory(prefix="railscope-bench-") as directory:
        stranger = Path(directory) / library.name
        try:
            copy_with_another_build_id(library, stranger)
        except ValueError as error:
            raise BenchError(str(error)) from None
        with idle_mapper(library) as mapper, idle_mapper(stranger) as strangers_mapper:
            for turn in range(-1, rounds):
                milliseconds = _look(mapper, "build-id"), _look(strangers_mapper, "accessors")
                if turn >= 0:  # the first turn brings the file into memory
                    known.append(milliseconds[0])
                    unknown.append(milliseconds[1])
    return [
        figure(PART, "known build", "ms", known, target=Limit(Bound.BELOW, 50)),
        figure(PART, "unknown build", "ms", unknown, target=Limit(Bound.BELOW, 1000)),
    ]


def _look(pid: int, source: str) -> float:
    """Milliseconds that a fresh process took; `source` is how the layout must have been found."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.first_sight", str(pid)],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    found, _, milliseconds = done.stdout.strip().partition(" ")
    if done.returncode or found != source:
        said = done.stderr.strip() or done.stdout.strip()
        raise BenchError(f"the layout was to be found by {source}: {said[-500:]}")
    return float(milliseconds)


def look(pid: int) -> tuple[str, float]:
    """See what one process maps as the agent does: how the layout was found, and in how many milliseconds.

    Raises:
        BenchError: there is no NCCL, or something went wrong.
    """
    with ExitStack() as stack:
        programs = NcclPrograms.load(ProgramSettings(only_observed_processes=True))
        stack.callback(programs.close)
        internals = Internals.load(programs)
        stack.callback(internals.close)
        discovery = Libraries(
            programs, _PROCFS, wanted=lambda _: True, found=lambda *_: None, inspection=InProcess(), clock=SystemClock()
        )
        stack.callback(discovery.close)
        levels = Levels(internals, Layouts.load().structures, Level.RAILS, inspection=InProcess())
        stack.callback(levels.close)
        began_ns = time.perf_counter_ns()
        errors = [*discovery.scan_process(pid), *levels.set_libraries(discovery.libraries)]
        took_ns = time.perf_counter_ns() - began_ns
        if errors or len(discovery.libraries) != 1:
            raise BenchError("; ".join(errors) or f"process {pid} maps {len(discovery.libraries)} NCCL libraries")
        layout = discovery.libraries[0].layout
        return layout.source if layout is not None else "nothing", took_ns / 1e6


if __name__ == "__main__":
    print(*look(int(sys.argv[1])))
