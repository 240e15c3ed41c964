"""Stalls of the real NCCL, as one agent that sees both hosts tells them: who, since when, and why."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job

pytestmark = [pytest.mark.nccl, pytest.mark.spins]

LIMITS = ("--stall.floor", "1s", "--stall.after", "4s")
CALLS = 100
"""Of each rank, by which a job is seen to go on."""


def stalls(agent: AgentProcess) -> dict[int, dict[str, Any]]:
    """What /stalls says goes on, by rank."""
    return {stall["rank"]: stall for stall in agent.stalls()}


def has_begun(agent: AgentProcess) -> bool:
    """Both ranks have made calls for a while."""
    calls = [value for _, value in agent.samples("railscope_comm_enqueued_total")]
    return len(calls) == 2 and min(calls) > CALLS


@pytest.mark.parametrize("level", ["all", "counts", "watch"])
def test_a_stopped_rank_is_named_by_itself_and_by_the_one_that_waits(
    two_hosts: Fabric, double: Double, tmp_path: Path, level: str
) -> None:
    with Job(two_hosts, tmp_path, double, iterations=100_000, size_bytes=1 << 16, pace_us=2_000) as job:
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--level", level, *LIMITS) as agent:
            job.start()
            agent.until(lambda: has_begun(agent))
            if level == "watch":
                agent.until(lambda: len(agent.samples("railscope_comm_estimated_total")) == 2)
            assert stalls(agent) == {}
            os.kill(pids[1], signal.SIGSTOP)
            try:
                agent.until(lambda: stalls(agent).keys() == {0, 1})
                found = stalls(agent)
                exported = {labels["rank"]: labels["cause"] for labels, _ in agent.samples("railscope_comm_stalled")}
            finally:
                os.kill(pids[1], signal.SIGCONT)
            agent.until(lambda: stalls(agent) == {})
            ended = agent.ended_stalls()
    assert exported == {str(rank): stall["cause"] for rank, stall in found.items()}
    assert (found[1]["cause"], found[1]["blamed_rank"]) == ("process_stopped", 1)
    assert (found[0]["cause"], found[0]["blamed_rank"]) == ("rank_behind", 1)
    assert {stall["op"] for stall in found.values()} == {"AllReduce"}
    assert found[0]["strength"] == ("strong" if level == "all" else "weak")
    assert any("estimated" in sentence for sentence in found[0]["evidence"]) is (level == "watch"), found[0]["evidence"]
    assert {stall["rank"] for stall in ended} == {0, 1}
    assert all(stall["seconds"] >= 1 for stall in ended)


def test_a_gpu_that_never_begins_is_told_from_a_rank_that_waits_for_it(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    hang = tmp_path / "hang"
    environment = {"CUDA_DOUBLE_HANG": str(hang)}
    folder = tmp_path / "job"
    folder.mkdir()
    with Job(
        two_hosts, folder, double, iterations=100_000, size_bytes=1 << 16, pace_us=20_000, environment=environment
    ) as job:
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--level", "all", *LIMITS) as agent:
            job.start()
            agent.until(lambda: has_begun(agent))
            switch = Path(f"{hang}.{pids[1]}")
            switch.touch()
            agent.until(lambda: stalls(agent).keys() == {0, 1})
            # Threads that have just waited for a processor, on a busy machine, are blamed until they have not.
            agent.comes_true(lambda: {one["cause"] for one in stalls(agent).values()} == {"gpu_not_progressing"}, 20)
            found = stalls(agent)
            switch.unlink()
            agent.until(lambda: stalls(agent) == {})
    assert (found[1]["cause"], found[1]["blamed_rank"]) == ("gpu_not_progressing", 1), found[1]["evidence"]
    assert (found[0]["cause"], found[0]["blamed_rank"]) == ("gpu_not_progressing", 1)
    assert "it waits for rank 1 of this host" in found[0]["evidence"][0]
    assert not any("waits for rank" in sentence for sentence in found[1]["evidence"])


def test_replays_pauses_and_a_job_that_ends_are_no_stalls(two_hosts: Fabric, double: Double, tmp_path: Path) -> None:
    with Job(two_hosts, tmp_path, double, pattern="graph", iterations=400, pace_us=10_000, hold=True) as job:
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), *LIMITS) as agent:
            job.start()
            seen: list[dict[int, dict[str, Any]]] = []
            deadline = time.monotonic() + 8
            while time.monotonic() < deadline:
                seen.append(stalls(agent))
                time.sleep(0.2)
            job.release()
            job.wait()
            time.sleep(1)
            seen.append(stalls(agent))
    assert not any(seen)
