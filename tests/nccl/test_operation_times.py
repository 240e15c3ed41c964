"""How long the real NCCL's operations took, in sums: exact in number and bytes, and kept when the job has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

ITERATIONS = 200
SIZE_BYTES = 1 << 18


def total(agent: AgentProcess, name: str) -> float:
    return sum(value for _, value in agent.samples(f"railscope_{name}_total"))


def test_every_operation_is_in_the_sums_also_after_the_job_and_its_bandwidth_follows_from_them(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    job_of = Job(
        two_hosts, tmp_path, double, pattern="allreduce", iterations=ITERATIONS, size_bytes=SIZE_BYTES, hold=True
    )
    with job_of as job:
        pids = [str(pid) for pid in job.ready()]
        with AgentProcess("--pid", *pids, "--level", "completion") as agent:
            job.start()
            reports = job.finished()
            calls = reports[0].operations[0].calls
            job.release()
            job.wait()
            # Both ranks have gone: what they did just before their end is not lost.
            agent.until(lambda: total(agent, "comm_operations") == 2 * calls)
            agent.until(lambda: total(agent, "collective_completed_payload_bytes") == 2 * calls * SIZE_BYTES)
            (payload,) = agent.samples("railscope_collective_completed_payload_bytes_total")
            bus_bytes = total(agent, "collective_completed_bus_bytes")
            seconds = total(agent, "collective_completed_seconds")
            rank_seconds = total(agent, "comm_operation_seconds")
            histogram_seconds = sum(
                value for _, value in agent.samples("railscope_collective_duration_seconds_sum", source="proxy")
            )
    assert payload[0] == {"op": "AllReduce", "size": str(SIZE_BYTES)}
    assert bus_bytes == payload[1], "two ranks: a factor of one"
    assert seconds == pytest.approx(rank_seconds)
    assert seconds == pytest.approx(histogram_seconds)
