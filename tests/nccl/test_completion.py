"""Below the entry points of the real NCCL (on the CUDA test double): what completed, and what did not.

`comm_completed_total` and `comm_inflight_seconds` come from NCCL's own proxy threads; the network is the kernel's.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import pytest

from railscope.probes.nccl.abi import Op
from railscope.probes.rings.wakeups import RingWakeups
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job
from tests.nccl.test_cuda_events import watched

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

FACTORS_OF_FOUR = {
    Op.AllReduce: Fraction(6, 4),
    Op.AllGather: Fraction(3),
    Op.ReduceScatter: Fraction(3),
    Op.Broadcast: Fraction(1),
    Op.Reduce: Fraction(1),
}
"""Of four ranks' bus bandwidth (doc/PERFORMANCE.md of nccl-tests), for payload as NCCL's calls give it."""


def by_rank(agent: AgentProcess, name: str) -> dict[str, float]:
    """Sums over communicators."""
    values: dict[str, float] = {}
    for labels, value in agent.samples(name):
        values[labels["rank"]] = values.get(labels["rank"], 0) + value
    return values


@pytest.mark.parametrize(("level", "attach"), [("completion", "multi"), ("rails", "perf"), ("all", "multi")])
def test_every_operation_of_mixed_kinds_completes_exactly(
    two_hosts: Fabric, double: Double, tmp_path: Path, level: str, attach: str
) -> None:
    iterations = 60
    with Job(two_hosts, tmp_path, double, pattern="mixed", iterations=iterations, size_bytes=40_000, hold=True) as job:
        pids = [str(pid) for pid in job.ready()]
        with AgentProcess("--pid", *pids, "--level", level, "--probe.attach", attach) as agent:
            job.start()
            reports = job.finished()
            calls = sum(operation.calls for operation in reports[0].operations)
            agent.until(lambda: set(by_rank(agent, "railscope_comm_completed_total").values()) == {calls})
            completed = by_rank(agent, "railscope_comm_completed_total")
            enqueued = by_rank(agent, "railscope_comm_enqueued_total")
            inflight = by_rank(agent, "railscope_comm_inflight_seconds")
            durations = {
                labels["op"]: value for labels, value in agent.samples("railscope_collective_duration_seconds_count")
            }
            bandwidths = {
                labels["op"]: value
                for labels, value in agent.samples("railscope_collective_bus_bandwidth_bytes_per_second_count")
            }
            launches = agent.samples("railscope_collective_launches_total")
            job.release()
            job.wait()
    assert completed == enqueued == {"0": calls, "1": calls}
    assert inflight == {"0": 0.0, "1": 0.0}
    collectives = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce")
    for op in collectives:
        assert durations[op] == bandwidths[op] == 2 * iterations, op
    assert durations["AllToAll"] == 2 * iterations
    assert {labels["op"]: value for labels, value in launches} == dict.fromkeys(collectives, 2.0 * iterations)
    assert {(labels["algorithm"], labels["protocol"]) for labels, _ in launches} == {("Ring", "Simple")}


def test_bus_bandwidth_is_that_of_nccl_tests_for_every_operation(
    four_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    """Four ranks: with two the factors of most kinds are the same."""
    with Job(four_hosts, tmp_path, double, pattern="mixed", iterations=10, size_bytes=40_000, hold=True) as job:
        with watched(double, job.ready(), write_events=True) as seen:
            job.start()
            job.finished()
            events = seen.internals.completion_events.read()
            found = {op: int(rates["sum"]) for op, rates in seen.internals.bandwidths().items() if rates["count"]}
            job.release()
            job.wait()
    sums: defaultdict[Op, Fraction] = defaultdict(Fraction)
    for event in events:
        op = Op(int(event["op"]))
        sums[op] += FACTORS_OF_FOUR.get(op, Fraction()) * Fraction(
            int(event["payload_bytes"]) * 10**9, int(event["duration_ns"])
        )
    assert found.keys() == FACTORS_OF_FOUR.keys() < sums.keys(), "messages have no rate"
    for op, rates in found.items():
        assert rates == pytest.approx(float(sums[op]), rel=1e-6), op


def test_a_burst_of_completed_operations_wakes_their_reader(two_hosts: Fabric, double: Double, tmp_path: Path) -> None:
    with Job(two_hosts, tmp_path, double, iterations=5_000, size_bytes=1024, hold=True) as job:
        with watched(double, job.ready(), write_events=True) as seen:
            ring = seen.internals.completion_events
            with contextlib.closing(RingWakeups([ring])) as wakeups:
                assert not select.select([wakeups], [], [], 0)[0]
                job.start()
                assert select.select([wakeups], [], [], 60)[0] == [wakeups]
                assert wakeups.clear()
                assert ring.fullness() > 0.5
            job.finished()
            job.release()
            job.wait()


def stop_within_an_operation(agent: AgentProcess, pid: int, rank: str) -> None:
    """A rank that is stopped between two operations has none in flight: then it goes on, and is stopped again."""
    for _ in range(50):
        os.kill(pid, signal.SIGSTOP)
        # What it had begun before ends, or waits for it.
        time.sleep(0.3)
        if by_rank(agent, "railscope_comm_inflight_seconds")[rank] > 0:
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} was never stopped within an operation")


def test_a_stopped_rank_leaves_operations_in_flight_on_every_rank_until_it_goes_on(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(
        two_hosts, tmp_path, double, pattern="allreduce", iterations=4_000, size_bytes=1 << 16, pace_us=200, hold=True
    ) as job:
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--level", "completion") as agent:
            job.start()
            agent.until(lambda: by_rank(agent, "railscope_comm_completed_total").get("1", 0) > 10)
            try:
                stop_within_an_operation(agent, pids[1], "1")
                agent.until(lambda: all(age > 1 for age in by_rank(agent, "railscope_comm_inflight_seconds").values()))
                first_ages = by_rank(agent, "railscope_comm_inflight_seconds")
                first = by_rank(agent, "railscope_comm_completed_total")
                time.sleep(1)
                later_ages = by_rank(agent, "railscope_comm_inflight_seconds")
                later = by_rank(agent, "railscope_comm_completed_total")
            finally:
                os.kill(pids[1], signal.SIGCONT)
            reports = job.finished()
            agent.until(lambda: by_rank(agent, "railscope_comm_completed_total") == {"0": 4_000.0, "1": 4_000.0})
            agent.until(lambda: by_rank(agent, "railscope_comm_inflight_seconds") == {"0": 0.0, "1": 0.0})
            job.release()
            job.wait()
    assert [report.verified for report in reports] == [True, True]
    assert set(first_ages) == {"0", "1"}
    for rank in ("0", "1"):
        assert later_ages[rank] >= first_ages[rank] + 0.9
        assert later[rank] == first[rank] < 4_000


def test_an_agent_that_comes_late_sees_what_completes_from_then_on(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(
        two_hosts, tmp_path, double, pattern="allreduce", iterations=3_000, size_bytes=1 << 14, pace_us=500, hold=True
    ) as job:
        pids = job.ready()
        job.start()
        time.sleep(0.5)
        with AgentProcess("--pid", *map(str, pids), "--level", "completion") as agent:
            job.finished()
            agent.until(
                lambda: (
                    by_rank(agent, "railscope_comm_completed_total") == by_rank(agent, "railscope_comm_enqueued_total")
                )
            )
            seen = by_rank(agent, "railscope_comm_completed_total")
            agent.until(lambda: by_rank(agent, "railscope_comm_inflight_seconds") == {"0": 0.0, "1": 0.0})
            job.release()
            job.wait()
    assert set(seen) == {"0", "1"}
    assert all(0 < count <= 3_000 for count in seen.values())


def test_bytes_handed_to_each_rail_are_the_rings_to_the_byte(two_hosts: Fabric, double: Double, tmp_path: Path) -> None:
    calls, size_bytes = 300, 1 << 18
    with Job(two_hosts, tmp_path, double, iterations=calls, size_bytes=size_bytes, hold=True) as job:
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--level", "rails") as agent:
            job.start()
            job.finished()
            agent.until(lambda: by_rank(agent, "railscope_comm_completed_total") == {"0": calls, "1": calls})
            while_alive = agent.samples("railscope_rail_collective_bytes_total")
            job.release()
            job.wait()
            agent.until(lambda: not agent.samples("railscope_comm_inflight_seconds"))
            after_end = agent.samples("railscope_rail_collective_bytes_total")
    ours = {host.namespace for host in two_hosts.hosts}
    for samples in (while_alive, after_end):
        handed = {
            (labels["netns"], labels["device"]): value for labels, value in samples if labels.get("netns") in ours
        }
        # 2 (n-1)/n x payload for two ranks, half of it on each of two rails.
        assert handed == {(host, rail): calls * size_bytes / 2 for host in ours for rail in ("rail0", "rail1")}
