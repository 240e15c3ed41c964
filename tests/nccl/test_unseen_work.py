"""Ranks whose work makes no NCCL call, with the real probes on a simulated CUDA driver.

NCCL makes the communicator; then each rank launches a graph of a kernel that is not NCCL's, and waits for it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Moments, SkippedCall
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

AFTER_SECONDS = 4
ASKED = ("--collector.cuda", "--budget", "100%", "--stall.floor", "1s", "--stall.after", f"{AFTER_SECONDS}s")
STUCK_AT = 1_000
"""Iteration: seconds after the first, and the counts of both ranks have been seen to keep up by then."""


def inference(hosts: Fabric, folder: Path, double: Double, **settings: Any) -> Job:
    """Ranks that make a communicator when they are told to, and then launch graphs."""
    return Job(hosts, folder, double, pattern="inference", events="stream", hold_init=True, **settings)


def agent_on(job: Job, *arguments: str) -> AgentProcess:
    return AgentProcess("--pid", *map(str, job.pids), "--probe.scan-interval", "500ms", *arguments)


def make_communicators(job: Job, agent: AgentProcess) -> None:
    """While the agent looks: without a call afterwards nothing else tells which ranks belong together."""
    agent.until(lambda: any(value for _, value in agent.samples("railscope_probe_attached")))
    job.initialise()
    job.ready()


def all_stalls(agent: AgentProcess) -> list[dict[str, Any]]:
    return [*agent.stalls(), *agent.ended_stalls()]


def launches(agent: AgentProcess) -> dict[int, float]:
    """Of graphs, by pid."""
    return {int(labels["pid"]): value for labels, value in agent.samples("railscope_cuda_graph_launches_total")}


def test_a_rank_whose_graph_never_finishes_is_told_of_while_its_peer_goes_on(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with inference(two_hosts, tmp_path, double, iterations=1_000_000, skip=SkippedCall(1, STUCK_AT)) as job:
        with agent_on(job, *ASKED) as agent:
            make_communicators(job, agent)
            agent.until(lambda: len(launches(agent)) == 2)
            job.start()
            agent.until(lambda: bool(agent.stalls()))
            (stall,) = agent.stalls()
            counts = launches(agent)
            ((stalled, _),) = agent.samples("railscope_comm_stalled")
            inside = {labels["pid"]: value for labels, value in agent.samples("railscope_cuda_inside_seconds")}
            ((call, age),) = agent.samples("railscope_call_inside_seconds")
            agent.until(lambda: launches(agent)[job.pids[0]] > counts[job.pids[0]])
            later = launches(agent)
            costs = {one["program"]: value for one, value in agent.samples("railscope_overhead_seconds_total")}
            job.kill(1)
            agent.until(lambda: not [one for one in agent.stalls() if one["cause"] == "unseen_work_stuck"])
    healthy, stuck = job.pids
    assert (stall["cause"], stall["op"], stall["pid"], stall["rank"]) == (
        "unseen_work_stuck", "cuStreamSynchronize", stuck, 1
    )  # fmt: skip
    assert (stall["strength"], stall["nranks"]) == ("weak", 2)
    assert stall["evidence"][0] == f"thread {stuck} has not returned from cuStreamSynchronize"
    assert stall["evidence"][-1] == f"rank 0 (process {healthy}) goes on: its calls return"
    assert stalled == {
        "comm": stall["comm"], "rank": "1", "op": "cuStreamSynchronize", "cause": "unseen_work_stuck"
    }  # fmt: skip
    assert (call["call"], call["pid"]) == ("cuStreamSynchronize", str(stuck))
    assert AFTER_SECONDS <= inside[str(stuck)] <= age < 60
    assert counts[stuck] == later[stuck] == STUCK_AT + 1, "every launch is counted"
    assert counts[healthy] > STUCK_AT
    assert costs["driver_calls"] > 0


def test_ranks_that_wait_for_nothing_on_the_gpu_are_let_alone(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    # All wait for their data twice, for longer than a stall takes, and then for requests that do not come.
    pause = Moments(every=90, milliseconds=(AFTER_SECONDS + 2) * 1000)
    with inference(two_hosts, tmp_path, double, iterations=200, pause=pause, hold=True) as job:
        with agent_on(job, *ASKED) as agent:
            make_communicators(job, agent)
            agent.until(lambda: len(launches(agent)) == 2)
            job.start()
            job.finished()
            time.sleep(AFTER_SECONDS + 2)
            counts, told = launches(agent), all_stalls(agent)
        job.release()
        job.wait()
    assert told == []
    assert set(counts.values()) == {200}


def test_nothing_is_attached_to_cuda_unless_it_is_asked_for(two_hosts: Fabric, double: Double, tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    with inference(two_hosts, tmp_path, double, iterations=1_000_000, skip=SkippedCall(1, 10)) as job:
        with AgentProcess("--pid", *map(str, job.pids), *ASKED[1:], "--level", "rails", log=log) as agent:
            make_communicators(job, agent)
            job.start()
            time.sleep(AFTER_SECONDS + 2)
            assert all_stalls(agent) == []
            assert launches(agent) == {}
            assert [
                one for one in agent.samples("railscope_overhead_seconds_total", program="driver_calls") if one[1]
            ] == []
    assert "libcuda" not in log.read_text()
