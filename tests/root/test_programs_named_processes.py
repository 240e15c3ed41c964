"""With --pid, only the processes that are named meet probes, in all of their threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.agent.doctor.libraries import LeashedAttacher
from railscope.probes.loading.links import AttachKind
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import EnqueueTime, NcclPrograms, ProgramSettings
from railscope.probes.nccl.records.calls import Stat
from tests.fabric.agent_process import AgentProcess
from tests.root.probe_targets import FLOAT32, Count, Target, all_reduce_only, attached, counted, target
from tests.whole_host import observed_by_nobody_else

pytestmark = pytest.mark.root

NO_PROCESS = 2**22 - 1
MODES = [EnqueueTime.SESSION, EnqueueTime.PAIR, EnqueueTime.OFF]


@pytest.fixture(scope="module", autouse=True)
def no_agent_of_another_test() -> Iterator[None]:
    with observed_by_nobody_else():
        programs = NcclPrograms.load(ProgramSettings(enqueue_time=EnqueueTime.OFF, pids=(os.getpid(),)))
        apart = programs.pids == (os.getpid(),)
        programs.close()
        if not apart and tuple(map(int, os.uname().release.split(".")[:2])) < (6, 10):
            pytest.skip("this kernel attaches to threads, not to processes")
        yield


def probed(of: Target) -> bool:
    """Whether anything in the library's code, as the process has it, is not as in the file: a breakpoint."""
    caller = of.caller
    with of.path.open("rb") as file:
        for line in Path(f"/proc/{caller.pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] == str(of.path.resolve()) and "x" in fields[1]:
                start, end = (int(part, 16) for part in fields[0].split("-"))
                file.seek(int(fields[2], 16))
                in_file = file.read(end - start)
                # Behind the file's end a page is filled up with zeros.
                if caller.text(start, len(in_file)) != in_file:
                    return True
    return False


def test_the_doctor_tries_its_probes_on_nobody_but_itself(testbed: Target) -> None:
    programs = NcclPrograms.load(ProgramSettings(attach=AttachKind.MULTI))
    try:
        attacher = LeashedAttacher(programs)
        links = attacher.attach(str(testbed.path), testbed.points, 3, testbed.layout)
        try:
            assert len(links) > 0
            assert attacher.refusals == {}
            assert not probed(testbed)
        finally:
            links.close()
    finally:
        programs.close()


@pytest.mark.parametrize("enqueue_time", MODES)
def test_processes_that_are_not_named_meet_no_probe(
    testbed: Target, layouts: Layouts, enqueue_time: EnqueueTime
) -> None:
    with target(testbed.path, layouts) as other:
        # One that has ended is no reason not to observe the others.
        pids = (NO_PROCESS, testbed.caller.pid)
        settings = ProgramSettings(attach=AttachKind.MULTI, enqueue_time=enqueue_time, pids=pids)
        programs = NcclPrograms.load(settings)
        try:
            with attached(programs, testbed, all_reduce_only(testbed.points)):
                assert probed(testbed)
                assert not probed(other)
                words = (0, 0, 100, FLOAT32, 0, 0, 0)
                testbed.caller.call("ncclAllReduce", 10, *words)
                testbed.caller.call_from_threads("ncclAllReduce", 4, 25, *words)
                assert testbed.caller.call_from_fork("ncclAllReduce", 7, *words) == 0
                other.caller.call_from_threads("ncclAllReduce", 4, 25, *words)
                assert counted(programs) == {Op.AllReduce: Count(110, 44_000)}
                assert programs.stats()[Stat.CALLS] == 110
            assert not probed(testbed)
        finally:
            programs.close()


@pytest.mark.parametrize(("enqueue_time", "most"), [(EnqueueTime.SESSION, 1), (EnqueueTime.OFF, 2)])
def test_probes_are_for_all_where_a_link_for_each_process_would_cost_them_more(
    enqueue_time: EnqueueTime, most: int
) -> None:
    with subprocess.Popen(["sleep", "60"]) as first, subprocess.Popen(["sleep", "60"]) as second:
        living = (os.getpid(), first.pid, second.pid)
        try:
            for named in range(1, 4):
                pids = (*living[:named], NO_PROCESS)
                settings = ProgramSettings(attach=AttachKind.MULTI, enqueue_time=enqueue_time, pids=pids)
                programs = NcclPrograms.load(settings)
                try:
                    assert programs.pids == (pids if named <= most else ())
                finally:
                    programs.close()
        finally:
            first.kill()
            second.kill()


@pytest.mark.nccl
def test_the_agent_attaches_to_named_processes_alone_at_every_level(
    nccl: Target, layouts: Layouts, tmp_path: Path
) -> None:
    # A file that no other test's agent attaches to for all who map it.
    copy = tmp_path / nccl.path.name
    shutil.copy(nccl.path, copy)
    with (
        target(copy, layouts) as named,
        target(copy, layouts) as other,
        AgentProcess("--pid", str(named.caller.pid), "--level", "all", "--probe.attach", "multi") as agent,
    ):
        agent.until(lambda: [value for _labels, value in agent.samples("railscope_probe_level")] == [3])
        assert probed(named)
        assert not probed(other)
        named.caller.call("ncclAllReduce", 30, 0, 0, 100, FLOAT32, 0, 0, 0)
        other.caller.call("ncclAllReduce", 20, 0, 0, 100, FLOAT32, 0, 0, 0)
        agent.until(lambda: bool(agent.samples("railscope_collective_calls_total", op="AllReduce")))
        assert [value for _labels, value in agent.samples("railscope_collective_calls_total", op="AllReduce")] == [30]
