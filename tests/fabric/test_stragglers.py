"""Among the ranks of one host the one that comes late is named, by how much, and nobody else."""

from __future__ import annotations

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job, JobOptions, Moments
from tests.fabric.agent_process import AgentProcess

pytestmark = [pytest.mark.root, pytest.mark.fabric]

LATE_MS = 20
LATE = JobOptions(
    pattern="inference",
    seconds=60,
    hold=True,
    ranks_per_host=2,
    bytes=4096,
    calls=1,
    verify=False,
    batch=1_000_000,
    pace_us=1000,
    checkpoint=Moments(every=1, milliseconds=LATE_MS),
)
"""Rank 0 computes and writes between any two collectives, while the other is in the next one already."""


def by_rank(agent: AgentProcess, name: str) -> dict[str, float]:
    return {labels["rank"]: value for labels, value in agent.samples(name)}


def test_the_rank_that_is_late_is_last_nearly_always_and_by_as_much_as_it_is_late(two_hosts: Fabric) -> None:
    with Job(two_hosts.hosts[:1], LATE) as job, AgentProcess("--pid", *(str(pid) for pid in job.pids)) as agent:
        agent.until(lambda: agent.samples("railscope_processes_observed") == [({}, 2.0)])
        job.release()
        agent.until(lambda: by_rank(agent, "railscope_comm_last_arrivals_total").get("0", 0) >= 50)
        last = by_rank(agent, "railscope_comm_last_arrivals_total")
        lag_seconds = by_rank(agent, "railscope_comm_arrival_lag_seconds_total")
        comms = {labels["comm"] for labels, _ in agent.samples("railscope_comm_last_arrivals_total")}
        known = {labels["comm"] for labels, _ in agent.samples("railscope_comm_info")}
    assert last["0"] >= 20 * last["1"]
    # Between two scrapes more may have come, of both.
    assert lag_seconds["0"] >= 0.75 * last["0"] * LATE_MS / 1000
    assert len(comms) == 1
    assert comms <= known
