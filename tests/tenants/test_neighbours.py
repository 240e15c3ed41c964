"""What innocent neighbours do: short jobs one after the other, and a job that keeps to one interface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.job import LIBRARY, Job, JobOptions, RankReport
from tests.fabric.agent_process import AgentProcess

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.slow]

JOBS = 16
SHORT = JobOptions(iterations=20, pattern="ddp")


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    with Fabric(hosts=2, rails=2) as made:
        yield made


def calls_of(reports: Iterable[RankReport]) -> Counter[tuple[str, str]]:
    """Calls by communicator and rank."""
    return Counter(
        {
            (one.hash, str(one.rank)): sum(count.calls for count in one.operations)
            for report in reports
            for one in report.communicators
            if one.operations
        }
    )


def counted(agent: AgentProcess) -> dict[tuple[str, str], int]:
    return {
        (labels["comm"], labels["rank"]): int(value) for labels, value in agent.samples("railscope_comm_enqueued_total")
    }


def is_attached(agent: AgentProcess) -> bool:
    return any(value for _, value in agent.samples("railscope_probe_attached", library=str(LIBRARY)))


def test_short_jobs_in_a_row_are_counted_to_the_last_call_from_the_second_on(fabric: Fabric) -> None:
    with AgentProcess("--level", "counts") as agent:
        with Job(fabric.hosts, JobOptions(iterations=20, pattern="ddp", hold=True)) as first:
            agent.until(lambda: is_attached(agent))
            first.release()
            first.wait(60)
        did: Counter[tuple[str, str]] = Counter()
        for _ in range(JOBS):
            with Job(fabric.hosts, SHORT) as job:
                did += calls_of(job.wait(60))
        assert len(did) == 2 * JOBS
        assert agent.comes_true(lambda: did.items() <= counted(agent).items(), 15), (did, counted(agent))


def test_a_job_that_keeps_to_the_loopback_takes_no_rail_from_another(fabric: Fabric) -> None:
    alone = JobOptions(seconds=60, ranks_per_host=2, environment={"NCCL_SOCKET_IFNAME": "=lo"})

    def rails(agent: AgentProcess) -> set[str]:
        return {labels["device"] for labels, _ in agent.samples("railscope_rail_info")}

    with AgentProcess("--level", "counts") as agent, Job(fabric.hosts, JobOptions(seconds=60)) as victim:
        agent.until(lambda: is_attached(agent) and len(rails(agent)) > 1)
        before = rails(agent)
        with Job(fabric.hosts[:1], alone) as neighbour:
            pids = {str(pid) for pid in neighbour.pids}
            agent.until(lambda: pids <= {labels["pid"] for labels, _ in agent.samples("railscope_comm_info")})
            assert rails(agent) >= before
        assert victim.running()
        assert rails(agent) >= before
