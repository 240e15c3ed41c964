"""Where the bytes of rails came from, with the real NCCL (on the CUDA test double) and the agent beside it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.fabric.ledgers import PortCounters, ledgers, settled
from tests.fabric.talkers import SEND, SERVE, Talker
from tests.nccl.job import Job

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

SIZE_BYTES = 4 << 20
ITERATIONS = 60
LEVELS = {"completion": 1, "rails": 2}
FOREIGN_BYTES = 20_000_000
PARTS = 10


@contextlib.contextmanager
def observed(fabric: Fabric, job: Job, level: str) -> Iterator[tuple[AgentProcess, PortCounters]]:
    """The agent beside a job that is ready and has not begun."""
    pids = job.ready()
    with AgentProcess(*(option for pid in pids for option in ("--pid", str(pid))), "--level", level) as agent:
        agent.until(lambda: len(ledgers(agent, fabric)) == 8)
        agent.until(lambda: LEVELS[level] in [value for _, value in agent.samples("railscope_probe_level")])
        yield agent, PortCounters(fabric)


def run(job: Job) -> None:
    job.start()
    assert all(report.verified for report in job.finished())
    job.release()
    job.wait()


@pytest.mark.parametrize(
    ("pattern", "level", "environment"),
    [
        ("allreduce", "rails", {}),
        ("allreduce", "rails", {"NCCL_PROTO": "LL"}),
        ("allgather", "rails", {}),
        ("allreduce", "completion", {}),
    ],
)
def test_collectives_with_their_headers_explain_the_rails_of_real_nccl_within_two_percent(
    two_hosts: Fabric,
    double: Double,
    tmp_path: Path,
    pattern: str,
    level: str,
    environment: dict[str, str | None],
) -> None:
    """Seen as NCCL hands them to the rails, its low-latency protocol doubling the data; or as the model expects."""
    with (
        Job(
            two_hosts, tmp_path, double,
            pattern=pattern, iterations=ITERATIONS, size_bytes=SIZE_BYTES, hold=True, environment=environment,
        ) as job,
        observed(two_hosts, job, level) as (agent, ports),
    ):  # fmt: skip
        run(job)
        shown = settled(agent, two_hosts, ports)
    for place, ledger in shown.items():
        assert ledger.explained_ratio == pytest.approx(1, abs=0.02), (place, ledger)
        assert ledger.error_ratio < 0.02, (place, ledger)


def test_foreign_bytes_beside_real_nccl_are_found_within_five_percent(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as open_until_here:
        server = Talker(two_hosts.hosts[1].command(sys.executable, "-c", SERVE, *two_hosts.hosts[1].addresses))
        open_until_here.callback(server.end)
        sender = Talker(two_hosts.hosts[0].command(sys.executable, "-c", SEND))
        open_until_here.callback(sender.end)
        job = Job(
            two_hosts, tmp_path, double,
            pattern="allreduce", iterations=ITERATIONS, size_bytes=SIZE_BYTES, hold=True, pace_us=20_000,
        )  # fmt: skip
        open_until_here.enter_context(job)
        agent, ports = open_until_here.enter_context(observed(two_hosts, job, "rails"))
        job.start()
        for _ in range(PARTS):
            sender.send(two_hosts.hosts[1].addresses[1], FOREIGN_BYTES // PARTS)
        job.release()
        job.wait()
        shown = settled(agent, two_hosts, ports)
    for place in ((0, 1, "transmit"), (1, 1, "receive")):
        assert shown[place].origins["foreign"] == pytest.approx(FOREIGN_BYTES, rel=0.05), shown[place]
    for place in ((0, 0, "transmit"), (1, 1, "transmit"), (1, 0, "receive")):
        assert shown[place].origins["foreign"] < 0.01 * FOREIGN_BYTES, (place, shown[place])


def test_an_agent_that_comes_late_takes_nothing_of_a_healthy_job_for_unseen(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(
        two_hosts, tmp_path, double, iterations=500, size_bytes=1 << 20, pace_us=8_000, hold=True
    ) as job:  # fmt: skip
        pids = job.ready()
        job.start()
        time.sleep(1)
        with AgentProcess(*(option for pid in pids for option in ("--pid", str(pid))), "--level", "rails") as agent:
            job.finished()
            agent.until(lambda: len(ledgers(agent, two_hosts)) == 8)
            time.sleep(2)  # connections are read once a second
            shown = ledgers(agent, two_hosts)
        job.release()
        job.wait()
    for place, ledger in shown.items():
        assert ledger.bytes > 50_000_000, (place, ledger)
        assert ledger.origins["unseen"] <= ledger.error_ratio * ledger.bytes + 0.01 * ledger.bytes, (place, ledger)
        if place[2] == "transmit":
            assert ledger.origins["unseen"] < 0.01 * ledger.bytes, (place, ledger)
