"""The agent beside the real NCCL (on the CUDA test double): its budget, CUDA graphs, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job
from tests.nccl.test_completion import by_rank

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

ENDLESS = 1 << 30


def level(agent: AgentProcess) -> float:
    """Of the real library."""
    return max(value for labels, value in agent.samples("railscope_probe_level") if labels["nccl_version"] == "2.32.3")


def test_a_job_that_costs_more_than_the_budget_loses_levels_and_no_count(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    # Point to point, which NCCL does not number: the agent cannot do without probes on calls.
    iterations = 6_000
    with Job(
        *(two_hosts, tmp_path, double), pattern="sendrecv", iterations=iterations, size_bytes=1_024, hold=True
    ) as job:
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--budget", "0.05%") as agent:
            agent.until(lambda: level(agent) == 2)
            job.start()
            agent.until(lambda: level(agent) == 0)
            reports = job.finished(180)
            made = {str(report.rank): sum(entry.calls for entry in report.operations) for report in reports}
            agent.until(lambda: by_rank(agent, "railscope_comm_enqueued_total") == made)
            payload = sum(value for _, value in agent.samples("railscope_collective_payload_bytes_total"))
            spent = {labels["program"]: value for labels, value in agent.samples("railscope_overhead_seconds_total")}
            # What is not observed any more is not shown: no communicator seems to stand still.
            inflight = agent.samples("railscope_comm_inflight_seconds")
            job.release()
            job.wait()
    assert payload == sum(entry.payload_bytes for report in reports for entry in report.operations)
    assert spent["calls"] > 0 < spent["proxy_stop"]
    assert inflight == []


def test_an_agent_that_comes_to_a_running_job_of_small_calls_counts_alone_unless_a_person_names_a_level(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(two_hosts, tmp_path, double, pattern="sendrecv", iterations=ENDLESS, size_bytes=1_024) as job:
        pids = job.ready()
        job.start()
        # So small a budget that no level beyond counts is tried before ten seconds, however slow this machine is.
        log = tmp_path / "agent.log"
        with AgentProcess("--pid", *map(str, pids), "--budget", "0.05%", log=log) as agent:
            assert level(agent) == 0
            agent.until(lambda: "counts: a job ran before the agent" in log.read_text())
            agent.until(lambda: min(by_rank(agent, "railscope_comm_enqueued_total").values(), default=0) > 100)
            assert level(agent) == 0
        with AgentProcess("--pid", *map(str, pids), "--budget", "0.05%", "--level", "rails") as agent:
            assert level(agent) == 2


def test_replays_of_a_graph_are_told_from_calls_and_are_no_stall(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    replays = 40
    with Job(two_hosts, tmp_path, double, pattern="graph", iterations=replays, size_bytes=1 << 16, hold=True) as job:
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--level", "all") as agent:
            job.start()
            reports = job.finished()
            agent.until(
                lambda: by_rank(agent, "railscope_comm_graph_replayed_total") == {"0": 2 * replays, "1": 2 * replays}
            )
            captured = by_rank(agent, "railscope_comm_graph_captured_total")
            agent.until(lambda: by_rank(agent, "railscope_comm_inflight_seconds") == {"0": 0.0, "1": 0.0})
            calls = sum(value for _, value in agent.samples("railscope_collective_calls_total"))
            expected = [
                (labels, value)
                for labels, value in agent.samples("railscope_rail_expected_wire_bytes_total")
                if labels["device"] in two_hosts.rail_names
            ]
            job.release()
            job.wait()
    assert expected == [], "what replays send is in no call, so the model cannot say"
    assert captured == {"0": 2, "1": 2}
    assert calls == sum(entry.calls for report in reports for entry in report.operations) == 4


def test_a_replayed_plan_counts_as_often_as_it_has_collectives(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(two_hosts, tmp_path, double, pattern="graph-of-group", iterations=5, size_bytes=4_096, hold=True) as job:
        with AgentProcess("--pid", *map(str, job.ready()), "--level", "all") as agent:
            job.start()
            reports = job.finished()
            ran = {str(report.rank): sum(entry.calls for entry in report.replayed) for report in reports}
            agent.until(lambda: by_rank(agent, "railscope_comm_graph_replayed_total") == ran)
            captured = by_rank(agent, "railscope_comm_graph_captured_total")
            job.release()
            job.wait()
    assert captured == {"0": 48, "1": 48}
    assert ran == {"0": 5 * 48, "1": 5 * 48}


@pytest.mark.parametrize("at_level", ["counts", "auto"])
def test_a_rank_that_dies_leaves_its_peers_error_and_abort_in_the_counters(
    two_hosts: Fabric, double: Double, tmp_path: Path, at_level: str
) -> None:
    with Job(two_hosts, tmp_path, double, pattern="bereaved", iterations=ENDLESS, size_bytes=4_096) as job:
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--level", at_level) as agent:
            job.start()
            job.under_way()
            before = {labels["error"]: value for labels, value in agent.samples("railscope_comm_errors_total")}
            job.kill(1)
            job.wait()
            agent.until(
                lambda: (
                    agent.samples("railscope_comm_errors_total", error="remote_error")[0][1] == 1
                    and agent.samples("railscope_comm_events_total", event="abort")[0][1] == 1
                )
            )
    assert set(before.values()) == {0}
    assert {"remote_error", "timeout", "invalid_usage", "system_error"} <= set(before)


def test_a_job_that_polls_cuda_events_tells_of_completion_through_them(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    calls = 200
    with Job(
        two_hosts, tmp_path, double, iterations=calls, size_bytes=1 << 16, events="query", hold=True
    ) as job:  # fmt: skip
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--level", "all") as agent:
            job.start()
            job.finished()
            agent.until(
                lambda: (
                    {
                        labels["source"]: value
                        for labels, value in agent.samples(
                            "railscope_collective_duration_seconds_count", op="AllReduce"
                        )
                    }
                    == {"proxy": 2 * calls, "cuda": 2 * calls}
                )
            )
            seconds = {
                labels["source"]: value
                for labels, value in agent.samples("railscope_collective_duration_seconds_sum", op="AllReduce")
            }
            job.release()
            job.wait()
    # Not one above the other: a kernel may end before the network reports its last send.
    assert min(seconds.values()) > 0
