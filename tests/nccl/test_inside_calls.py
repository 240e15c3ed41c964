"""Calls of the real NCCL that do not return: who is inside, since when, and of which communicator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job

pytestmark = pytest.mark.nccl

AFTER_SECONDS = 4
LIMITS = ("--stall.floor", "1s", "--stall.after", f"{AFTER_SECONDS}s")


def watching(pids: Sequence[int]) -> AgentProcess:
    return AgentProcess("--pid", *map(str, pids), "--probe.scan-interval", "500ms", *LIMITS)


def inside(agent: AgentProcess) -> dict[str, dict[str, Any]]:
    """What /stalls says of calls that do not return, by call and rank."""
    return {f"{one['op']} {one['rank']}": one for one in agent.stalls() if one["cause"] == "inside_call"}


def attached(agent: AgentProcess) -> bool:
    return any(value for _, value in agent.samples("railscope_probe_attached"))


@pytest.mark.parametrize("blocking", [pytest.param(True, marks=pytest.mark.spins), False])
def test_an_init_whose_peer_never_comes_is_a_stall_and_ends_when_the_peer_comes(
    two_hosts: Fabric, double: Double, tmp_path: Path, blocking: bool
) -> None:
    with Job(two_hosts, tmp_path, double, blocking=blocking, late=[1], hold_init=True) as job:
        with watching(job.pids) as agent:
            agent.until(lambda: attached(agent))
            job.initialise()
            agent.until(lambda: bool(inside(agent)))
            ((name, stall),) = inside(agent).items()
            (labels, age) = agent.samples("railscope_call_inside_seconds")[0]
            ((stalled, _),) = agent.samples("railscope_comm_stalled")
            job.begin(1)
            pids = job.ready()
            agent.until(lambda: not inside(agent))
            # Of this job: jobs of other tests run beside it.
            comms = {one["comm"] for one, _ in agent.samples("railscope_comm_info") if int(one["pid"]) in pids}
            job.start()
            job.wait()
            ended = agent.ended_stalls()
    assert name == "ncclCommInitRank 0"
    assert (stall["pid"], stall["nranks"], stall["strength"]) == (pids[0], 2, "strong")
    assert AFTER_SECONDS <= age < 60
    assert labels == {
        "call": "ncclCommInitRank", "comm": stall["comm"], "rank": "0", "nranks": "2", "pid": str(pids[0])
    }  # fmt: skip
    assert stalled == {"comm": stall["comm"], "rank": "0", "op": "ncclCommInitRank", "cause": "inside_call"}
    assert comms == {stall["comm"]}, "the name that the communicator will have is known before"
    assert [one["op"] for one in ended] == ["ncclCommInitRank"]


@pytest.mark.parametrize("blocking", [pytest.param(True, marks=pytest.mark.spins), False])
def test_a_split_that_a_rank_never_calls_is_a_stall_of_its_parent(
    two_hosts: Fabric, double: Double, tmp_path: Path, blocking: bool
) -> None:
    late = Job(two_hosts, tmp_path, double, pattern="split-late", blocking=blocking, warm_up_ms=12_000, hold_init=True)
    with late as job:
        with watching(job.pids) as agent:
            agent.until(lambda: attached(agent))
            job.initialise()
            job.ready()
            (comm,) = {labels["comm"] for labels, _ in agent.samples("railscope_comm_info")}
            job.start()
            agent.until(lambda: bool(inside(agent)))
            ((name, stall),) = inside(agent).items()
            job.wait()
            agent.until(lambda: not inside(agent))
    assert (name, stall["comm"], stall["blamed_rank"]) == ("ncclCommSplit 0", comm, None)


@pytest.mark.spins
def test_ranks_that_each_receive_first_are_inside_the_connecting_of_ranks(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(two_hosts, tmp_path, double, pattern="receive-first", hold_init=True) as job:
        with watching(job.pids) as agent:
            agent.until(lambda: attached(agent))
            job.initialise()
            job.ready()
            job.start()
            agent.until(lambda: len(inside(agent)) == 2)
            found = inside(agent)
            job.kill(1)
            agent.until(lambda: "connecting ranks 1" not in inside(agent))
    assert found.keys() == {"connecting ranks 0", "connecting ranks 1"}
    assert "ncclRecv" in found["connecting ranks 0"]["evidence"][0]


def test_nobody_is_inside_a_call_of_a_job_that_comes_slowly_and_goes_on(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(two_hosts, tmp_path, double, pattern="families", late=[1], hold_init=True, iterations=50) as job:
        # On a busy machine a split takes seconds.
        with AgentProcess("--probe.scan-interval", "500ms", "--stall.floor", "1s", "--stall.after", "20s") as agent:
            agent.until(lambda: attached(agent))
            job.initialise()
            time.sleep(AFTER_SECONDS)
            job.begin(1)
            job.ready()
            job.start()
            job.wait()
            time.sleep(2)
            told = [*agent.stalls(), *agent.ended_stalls()]
    assert [stall for stall in told if stall["cause"] == "inside_call"] == []


def test_who_is_killed_inside_a_call_leaves_nothing_behind(two_hosts: Fabric, double: Double, tmp_path: Path) -> None:
    with Job(two_hosts, tmp_path, double, late=[1], hold_init=True) as job, watching(job.pids) as agent:
        agent.until(lambda: attached(agent))
        job.initialise()
        agent.until(lambda: bool(inside(agent)))
        job.kill(0)
        agent.until(lambda: not inside(agent))
        time.sleep(1)
        assert agent.samples("railscope_call_inside_seconds") == []
        assert agent.process.poll() is None
