"""A process that executes another program keeps its pid and start time, and nothing else of what it was."""

from __future__ import annotations

import pytest

from railscope.testbed.job import LIBRARY
from tests.fabric.agent_process import AgentProcess
from tests.root.caller import Caller
from tests.root.nccl_variants import COUNT, FLOAT32, log_of

pytestmark = pytest.mark.root


def reduce(job: Caller, times: int) -> None:
    comm, buffer = job.new_communicator(), job.memory(4 * COUNT)
    assert job.call("ncclAllReduce", times, buffer, buffer, COUNT, FLOAT32, 0, comm, 0) == 0


def test_what_a_process_did_before_it_executed_another_program_has_ended() -> None:
    with Caller(LIBRARY) as job, AgentProcess("--pid", str(job.pid)) as agent:
        job.execute_again(SLURM_JOB_ID="111")
        reduce(job, 5)
        agent.until(lambda: living(agent, job.pid) == {"111": 5})
        job.execute_again(SLURM_JOB_ID="222")
        reduce(job, 7)
        agent.until(lambda: living(agent, job.pid) == {"222": 7})
        calls = sum(value for _, value in agent.samples("railscope_collective_calls_total", op="AllReduce"))
        assert calls == 12
        ended = {labels["comm"] for labels, value in agent.samples("railscope_comm_ended") if value == 1}
        jobs = {labels["comm"]: labels.get("exported_job") for labels, _ in agent.samples("railscope_comm_info")}
        assert {jobs[comm] for comm in ended} == {"111"}
        said = log_of(agent)
    assert f"process {job.pid} executes another program" in said
    assert said.count("will be noticed by scans only") == 0


def living(agent: AgentProcess, pid: int) -> dict[str, int]:
    """Calls by job, of communicators that have not ended."""
    ended = {labels["comm"] for labels, value in agent.samples("railscope_comm_ended") if value == 1}
    calls = {labels["comm"]: int(value) for labels, value in agent.samples("railscope_comm_enqueued_total")}
    return {
        labels["exported_job"]: calls[labels["comm"]]
        for labels, _ in agent.samples("railscope_comm_info", pid=str(pid))
        if labels["comm"] not in ended
    }
