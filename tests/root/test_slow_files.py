"""Of files that a tenant serves the daemon asks nothing itself: not where probes go on, and not at the end."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from railscope.agent.node.inspection.inspection import InspectionProcesses
from railscope.agent.node.targets.libraries import Libraries
from railscope.probes.clock import SystemClock
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.loading.links import Links
from railscope.probes.nccl.functions.probe_points import ProbePoints
from railscope.probes.nccl.layouts.layout import CommLayout
from railscope.probes.nccl.programs.calls import NcclPrograms
from railscope.probes.processes.processes import PROCFS
from railscope.testbed.job import LIBRARY as TESTBED_LIBRARY
from tests.root.caller import Caller
from tests.root.probe_targets import loaded
from tests.root.slow_files import slow_file
from tests.waiting import eventually

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="this kernel has no FUSE: no program can serve files"),
]

SLOW_SECONDS = 0.7
QUESTIONS = ("railscope.agent.node.targets.sightings", "railscope.agent.node.inspection.pages")


class LateAttacher:
    """Attaches through programs once it may."""

    def __init__(self, programs: NcclPrograms) -> None:
        self._programs = programs
        self.refuses = True

    def attach(self, path: str, points: ProbePoints, library: int, layout: CommLayout | None, *, pid: int = 0) -> Links:
        if self.refuses:
            raise KernelRefusal(errno.EAGAIN, "not now")
        return self._programs.attach(path, points, library, layout, pid=pid)


@contextmanager
def discovering(caller: Caller, attacher: LateAttacher) -> Iterator[tuple[Libraries, InspectionProcesses]]:
    inspection = InspectionProcesses(QUESTIONS)
    libraries = Libraries(
        attacher,
        PROCFS,
        inspection,
        SystemClock(),
        wanted=lambda identity: identity.pid == caller.pid,
        found=lambda *_: None,
    )
    try:
        yield libraries, inspection
    finally:
        libraries.close()
        inspection.close()


def test_who_serves_a_library_hears_of_inspection_processes_alone(tmp_path: Path) -> None:
    with (
        slow_file(tmp_path / "served", TESTBED_LIBRARY) as file,
        Caller(file.path) as caller,
        loaded() as programs,
    ):
        attacher = LateAttacher(programs)
        with discovering(caller, attacher) as (libraries, inspection):

            def seen() -> bool:
                inspection.collect()
                libraries.scan_process(caller.pid)
                return [library.path for library in libraries.libraries] == [str(file.path)]

            eventually(seen)
            attacher.refuses = False
            file.become_slow(SLOW_SECONDS)
            reads = file.reads
            eventually(lambda: seen() and libraries.libraries[0].links is not None)
            assert file.reads > reads, "they were not in the kernel's cache"
        threads = {int(one.name) for one in Path("/proc/self/task").iterdir()}
        assert not file.askers & threads, "while the kernel waits for a page to probe, no process of this host forks"
