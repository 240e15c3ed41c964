"""Agents that came to a running job of the real NCCL at different times agree on where its ranks stand."""

from __future__ import annotations

import contextlib
import json
import mmap
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.job import SkippedCall
from railscope.testbed.nccl.build import Double
from railscope.testbed.nccl.library import nccl_library
from tests.fabric.agent_process import AgentProcess
from tests.faults.cluster import Agent, Cluster, until
from tests.nccl.job import Job
from tests.waiting import POLL_SECONDS

pytestmark = [pytest.mark.nccl, pytest.mark.usefixtures("library_in_use")]

COUNTED = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce")
"""What NCCL numbers."""


@pytest.fixture
def library_in_use() -> Iterator[None]:
    """So that an agent attaches to the library before a job makes its communicators."""
    with (
        nccl_library().open("rb") as file,
        mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_EXEC),
    ):
        yield


def of_ranks(agent: AgentProcess, metric: str, pids: tuple[int, ...]) -> dict[int, float]:
    """A metric by rank, of these processes' communicators: others may run on this machine."""
    ours = {
        (labels["comm"], labels["rank"])
        for labels, _ in agent.samples("railscope_comm_info")
        if int(labels["pid"]) in pids
    }
    return {
        int(labels["rank"]): value
        for labels, value in agent.samples(metric)
        if (labels["comm"], labels["rank"]) in ours
    }


def test_the_rank_that_skipped_a_collective_is_one_behind_whenever_the_agents_came(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    skipped = 2000
    skip = SkippedCall(rank=1, iteration=skipped)
    with (
        AgentProcess("--level", "all") as early,
        Job(two_hosts, tmp_path, double, iterations=100_000, size_bytes=1 << 14, pace_us=5_000, skip=skip) as job,
    ):
        pids = job.ready()

        def entered(agent: AgentProcess) -> float:
            return max(of_ranks(agent, "railscope_comm_enqueued_total", pids).values(), default=0)

        job.start()
        early.until(lambda: entered(early) > 200)
        with AgentProcess("--pid", str(pids[0]), "--level", "counts") as late:
            late.until(lambda: entered(late) > 200)
            with AgentProcess("--pid", str(pids[1]), "--level", "counts") as latest:
                agents = (early, late, latest)
                latest.until(lambda: of_ranks(latest, "railscope_comm_sequence", pids).keys() == {1})
                # While the job goes on: all are some way, and none knows it by its own count.
                assert min(of_ranks(latest, "railscope_comm_sequence", pids).values()) > 200
                early.until(
                    lambda: of_ranks(early, "railscope_comm_sequence", pids) == {0: skipped + 1, 1: skipped},
                    seconds=120,
                )
                late.until(lambda: of_ranks(late, "railscope_comm_sequence", pids) == {0: skipped + 1})
                latest.until(lambda: of_ranks(latest, "railscope_comm_sequence", pids) == {1: skipped})
                counted = [entered(agent) for agent in agents]
                not_whole = [of_ranks(agent, "railscope_comm_counted_from_start", pids) for agent in agents]
                page = json.loads(latest.page("/communicators"))["communicators"]
    assert counted[0] == skipped + 1 > counted[1] > counted[2]
    assert not_whole == [{}, {0: 0}, {1: 0}]
    assert [one["sequence"] for one in page if one["pid"] == pids[1]] == [skipped]


def test_what_two_agents_counted_and_what_none_saw_is_all_that_a_rank_entered(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    skipped = 2000
    skip = SkippedCall(rank=1, iteration=skipped)
    with Job(two_hosts, tmp_path, double, iterations=100_000, size_bytes=1 << 14, pace_us=5_000, skip=skip) as job:
        pid, _ = job.ready()
        job.start()
        arguments = ("--pid", str(pid), "--level", "counts", "--state.directory", str(tmp_path / "state"))

        def entered(agent: AgentProcess) -> float:
            return max(of_ranks(agent, "railscope_comm_sequence", (pid,)).values(), default=0)

        def lost(agent: AgentProcess) -> float:
            ((_, calls),) = agent.samples("railscope_events_lost_total", reason="before_attachment")
            return calls

        with AgentProcess(*arguments) as first:
            first.until(lambda: entered(first) > 500 and lost(first) > 0)
            before_the_first = lost(first)
        with AgentProcess(*arguments) as second:
            second.until(lambda: entered(second) == skipped + 1, seconds=120)
            counted = of_ranks(second, "railscope_comm_enqueued_total", (pid,))[0]
            in_all = lost(second)
    assert before_the_first < in_all
    assert counted + in_all == skipped + 1


def counts_more_than(agent: Agent, calls: int) -> bool:
    return any(one.value > calls for one in agent.samples("comm_enqueued_total"))


def stands_at(agent: Agent, entered: int) -> bool:
    return [one.value for one in agent.samples("comm_sequence")] == [entered]


@pytest.mark.spins
def test_rules_and_diagnose_name_the_rank_behind_though_every_agent_was_restarted(
    double: Double, tmp_path: Path
) -> None:
    skipped = 2000
    rules = [Path(__file__).parents[2] / "dashboards" / "rules" / "railscope-recording.yml"]
    with Cluster(agent=("--stall.floor", "1s", "--stall.after", "4s")) as cluster, contextlib.ExitStack() as stack:
        skip = SkippedCall(rank=1, iteration=skipped)
        job = Job(cluster.fabric, tmp_path, double, iterations=100_000, size_bytes=1 << 14, pace_us=5_000, skip=skip)
        pids = stack.enter_context(job).ready()
        job.start()
        comms = set()
        for agent, calls in zip(cluster.agents, (200, 300), strict=True):
            until(partial(counts_more_than, agent, calls), "calls are seen")
            agent.stop()
            agent.start()
            agent.ready()
        for agent, entered in zip(cluster.agents, (skipped + 1, skipped), strict=True):
            until(partial(stands_at, agent, entered), "the rank stands", 120)
            assert [one.value for one in agent.samples("comm_counted_from_start")] == [0]
            comms = {one.labels["comm"] for one in agent.samples("comm_info") if int(one.labels["pid"]) in pids}
        # No history that could tell the distance of the two agents' counts.
        stack.callback(cluster.prometheus.stop)
        cluster.prometheus.start(cluster.fabric.hosts, rules)
        behind = "comm_rank:railscope_operations_behind:max"
        until(lambda: len(cluster.prometheus.query(behind)) == 2, "the rule is evaluated")
        found = {one["metric"]["rank"]: float(one["value"][1]) for one in cluster.prometheus.query(behind)}
        until(lambda: f"rank 1 entered {skipped:,} operations" in cluster.diagnose().stdout, "the verdict")
        (finding,) = json.loads(cluster.diagnose("--json").stdout)["findings"]
    assert found == {"0": 0, "1": 1}
    assert {finding["comm"]} == comms
    assert (finding["cause"], finding["ranks"]) == ("rank_behind", [1])


@pytest.mark.parametrize("pattern", ["mixed", "graph-and-live"])
def test_what_nccl_does_not_number_is_never_taken_for_a_rank_behind(
    two_hosts: Fabric, double: Double, tmp_path: Path, pattern: str
) -> None:
    with (
        AgentProcess("--level", "counts") as early,
        Job(two_hosts, tmp_path, double, pattern=pattern, iterations=40, pace_us=150_000, hold=True) as job,
    ):
        pids = job.ready()
        job.start()
        early.until(lambda: of_ranks(early, "railscope_comm_enqueued_total", pids).get(0, 0) > 30)
        with AgentProcess("--pid", str(pids[1]), "--level", "counts") as late:
            reports = job.finished()
            # Three rounds of the agents' looks after the last call.
            settled = time.monotonic() + 3.5
            while time.monotonic() < settled:
                said = [of_ranks(agent, "railscope_comm_sequence", pids) for agent in (early, late)]
                time.sleep(POLL_SECONDS)
            counted = [of_ranks(agent, "railscope_comm_enqueued_total", pids) for agent in (early, late)]
            job.release()
            job.wait()
    numbered = {
        report.rank: sum(one.calls for one in report.operations if one.operation in COUNTED) for report in reports
    }
    assert counted[1].get(1, 0) < counted[0][1]
    for found in said:
        assert found.items() <= numbered.items()
