"""The agent killed, stopped and replaced beside a job: totals go on, the dark time is told, and nothing stays."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.probes.loading.bpf_syscall import KernelRefusal, bpf
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job, JobOptions, RankReport
from tests.fabric.agent_process import AgentProcess
from tests.fabric.continued_totals import Series, fallen, shown

pytestmark = [pytest.mark.root, pytest.mark.fabric]

KILLS = int(os.environ.get("RAILSCOPE_TEST_KILLS", "8"))
"""At random moments, of which a longer run meets more: `make soak` asks for a hundred."""
_NEXT_ID = {"prog_id": 11, "map_id": 12, "link_id": 31}
"""Commands of bpf(2) that tell the next id, by what /proc/PID/fdinfo calls it."""
_MOST_DARK_SECONDS = 15.0
"""Of one restart, on a machine that runs other tests meanwhile; docs/restarts.md has the figures of a quiet one."""


def only(job: Job) -> tuple[str, ...]:
    return tuple(option for pid in job.pids for option in ("--pid", str(pid)))


def observed(agent: AgentProcess) -> float:
    return agent.samples("railscope_processes_observed")[0][1]


def calls(agent: AgentProcess) -> float:
    return sum(value for _, value in agent.samples("railscope_collective_calls_total"))


def dark_seconds(agent: AgentProcess) -> float:
    return agent.samples("railscope_agent_dark_seconds_total")[0][1]


def ids_in_kernel() -> Iterator[tuple[str, int]]:
    for kind, command in _NEXT_ID.items():
        last = 0
        while True:
            attributes = bytearray(struct.pack("<III", last, 0, 0))
            try:
                bpf(command, attributes, "next id")
            except KernelRefusal:
                break
            last = struct.unpack_from("<I", attributes, 4)[0]
            yield kind, last


def ids_of(pid: int) -> set[tuple[str, int]]:
    """Programs, maps and links that a process holds open."""
    held = set()
    for file in list(Path(f"/proc/{pid}/fdinfo").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            for line in file.read_text().splitlines():
                name, _, number = line.partition(":")
                if name in _NEXT_ID:
                    held.add((name, int(number)))
    return held


def children_of(pid: int) -> set[int]:
    return {int(one) for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()}


def said(reports: tuple[RankReport, ...]) -> int:
    return sum(report.calls for report in reports)


def test_an_agent_killed_again_and_again_under_load_shows_no_total_that_falls_and_leaves_nothing(
    two_hosts: Fabric, tmp_path: Path
) -> None:
    chance = random.Random(6)
    highest: dict[Series, float] = {}
    left: set[tuple[str, int]] = set()
    children: set[int] = set()
    lengths = []
    with Job(two_hosts.hosts, JobOptions(pattern="inference", seconds=600, pace_us=4_000)) as job:
        dark = 0.0
        for _ in range(KILLS):
            with AgentProcess(*only(job), "--state.directory", str(tmp_path / "state")) as agent:
                assert not fallen(highest, shown(agent.text()))
                lengths.append(dark_seconds(agent) - dark)
                dark = dark_seconds(agent)
                left |= ids_of(agent.process.pid)
                children |= children_of(agent.process.pid)
                ends = time.monotonic() + chance.uniform(0.0, 1.5)
                while time.monotonic() < ends:
                    assert not fallen(highest, shown(agent.text()))
                os.kill(agent.process.pid, signal.SIGKILL)
                agent.process.wait(10)
        with AgentProcess(*only(job), "--state.directory", str(tmp_path / "state")) as agent:
            assert not fallen(highest, shown(agent.text()))
            results = job.stop()
            agent.until(lambda: observed(agent) == 0)
            counted = calls(agent)
            agent.until(lambda: not left & set(ids_in_kernel()))
            agent.until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    print("dark seconds of each restart:", [round(one, 2) for one in lengths])
    assert len(left) >= KILLS * 3
    assert lengths[0] == 0.0
    assert all(0.0 < one < _MOST_DARK_SECONDS for one in lengths[1:])
    reports = tuple(result.report for result in results if result.report is not None)
    assert len(reports) == 2
    assert all(report.verified for report in reports)
    # Some were made in the dark; none was counted twice.
    assert 0 < counted < said(reports)
    assert not [one for one in Path("/sys/fs/bpf").glob("*") if "railscope" in one.name]


def test_what_jobs_called_while_an_agent_was_there_is_counted_exactly_once(two_hosts: Fabric, tmp_path: Path) -> None:
    """Three jobs and three agents: between them, and before the first is killed, nothing is called."""
    wanted = 0
    for end in (signal.SIGKILL, signal.SIGTERM, signal.SIGTERM):
        with Job(two_hosts.hosts, JobOptions(pattern="mixed", iterations=20, hold=True)) as job:
            with AgentProcess(*only(job), "--state.directory", str(tmp_path / "state")) as agent:
                agent.until(lambda: observed(agent) == 2)
                assert calls(agent) == wanted
                job.release()
                wanted += said(job.wait(60))
                agent.until(lambda: calls(agent) == wanted, 20)  # noqa: B023
                agent.process.send_signal(end)
                agent.process.wait(10)


def test_an_agent_that_is_stopped_and_continued_under_load_loses_no_call(two_hosts: Fabric, tmp_path: Path) -> None:
    with Job(two_hosts.hosts, JobOptions(pattern="inference", seconds=60, hold=True)) as job:
        with AgentProcess(*only(job), "--state.directory", str(tmp_path / "state")) as agent:
            agent.until(lambda: observed(agent) == 2)
            job.release()
            agent.until(lambda: calls(agent) > 0)
            highest: dict[Series, float] = {}
            for _ in range(3):
                assert not fallen(highest, shown(agent.text()))
                os.kill(agent.process.pid, signal.SIGSTOP)
                time.sleep(1.5)
                os.kill(agent.process.pid, signal.SIGCONT)
                time.sleep(0.3)
            reports = tuple(result.report for result in job.stop() if result.report is not None)
            agent.until(lambda: observed(agent) == 0)
            assert calls(agent) == said(reports)
            assert not fallen(highest, shown(agent.text()))
            assert dark_seconds(agent) == 0.0
            lost = {labels["reason"]: value for labels, value in agent.samples("railscope_events_lost_total")}
    print("events lost while stopped:", {reason: value for reason, value in lost.items() if value})
    assert not any(value for reason, value in lost.items() if not reason.endswith("ring_full"))
