"""Two agents beside one job of the real NCCL, each with a loader of its own, tell the same story."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.probes.loading import bcc_loader
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job

pytestmark = [
    pytest.mark.root,
    pytest.mark.fabric,
    pytest.mark.nccl,
    pytest.mark.skipif(
        bcc_loader.installed_version() is None, reason="bcc is not installed: apt install python3-bpfcc"
    ),
]

TOLD = (
    "railscope_collective_calls_total",
    "railscope_collective_payload_bytes_total",
    "railscope_collective_size_bytes_bucket",
    "railscope_comm_enqueued_total",
    "railscope_comm_info",
)

Story = dict[str, dict[frozenset[tuple[str, str]], float]]


def story(agent: AgentProcess) -> Story:
    return {name: {frozenset(labels.items()): value for labels, value in agent.samples(name)} for name in TOLD}


def test_agents_with_different_loaders_tell_the_same_of_one_job(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(two_hosts, tmp_path, double, pattern="mixed", iterations=30, size_bytes=1 << 16, hold=True) as job:
        pids = [str(pid) for pid in job.ready()]
        options = ("--no-collector.netdev", "--probe.enqueue-time", "off", "--pid", *pids)
        with (
            AgentProcess("--loader", "libbpf", *options) as one,
            AgentProcess("--loader", "bcc", *options) as other,
        ):
            job.start()
            reports = job.finished()
            calls = sum(report.count("AllReduce").calls for report in reports)
            for agent in (one, other):
                agent.until(lambda agent=agent: counted(agent, "AllReduce") == calls)  # type: ignore[misc]
            while_running = (story(one), story(other))
            job.release()
            job.wait()
            after = (story(one), story(other))
    assert calls > 0
    for told, retold in (while_running, after):
        assert told == retold
        assert len(told["railscope_comm_info"]) >= 2
        assert all("unknown" not in dict(labels)["comm"] for labels in told["railscope_comm_info"])
        assert len(told["railscope_collective_size_bytes_bucket"]) > 5


def counted(agent: AgentProcess, op: str) -> float:
    return sum(value for _, value in agent.samples("railscope_collective_calls_total", op=op))
