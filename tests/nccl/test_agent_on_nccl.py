"""The agent beside the real NCCL (on the CUDA test double): counts, identity, and late attach."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

_COMM_ID = re.compile(r"commId 0x([0-9a-f]+)")


def test_real_nccl_is_counted_exactly_and_named_as_it_names_itself(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    job = Job(
        two_hosts, tmp_path, double, pattern="mixed", iterations=30, size_bytes=1 << 16, hold=True,
        environment={"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"},
    )  # fmt: skip
    with job:
        pids = [str(pid) for pid in job.ready()]
        # The communicators exist already: this is a late attach.
        with AgentProcess("--pid", pids[0], "--pid", pids[1]) as agent:
            job.start()
            reports = job.finished()
            agent.until(lambda: len(identities(agent)) >= 2)
            text = agent.text()
            calls: dict[str, float] = {}
            for labels, value in agent.samples("railscope_collective_calls_total"):
                calls[labels["op"]] = calls.get(labels["op"], 0) + value
            seen = identities(agent)
            printed = {rank: set(_COMM_ID.findall(job.output(rank))) for rank in range(2)}
            job.release()
            job.wait()
    assert 'nccl_version="2.32.3"' in text
    assert 'layout_source="build-id"' in text
    for op, name in (("AllReduce", "AllReduce"), ("AllGather", "AllGather"), ("Broadcast", "Broadcast")):
        assert calls.get(op, 0) == sum(report.count(name).calls for report in reports), op
    for comm, rank, nranks in seen:
        assert comm in {f"{int(hexadecimal, 16):016x}" for hexadecimal in printed[int(rank)]}
        assert nranks == "2"


def identities(agent: AgentProcess) -> set[tuple[str, str, str]]:
    return {
        (labels["comm"], labels["rank"], labels["nranks"])
        for labels, _ in agent.samples("railscope_comm_info")
        if labels["comm"] != "unknown"
    }
