"""Where the bytes of rails came from, on real rails: a job of the workload library, with and without traffic of others.

Nothing is handed over that is seen here: collectives' bytes are those that the model expects.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job, JobOptions
from tests.fabric.agent_process import AgentProcess
from tests.fabric.ledgers import PortCounters, ledgers, settled
from tests.fabric.talkers import SEND, SERVE, Talker

pytestmark = [pytest.mark.root, pytest.mark.fabric]

FOREIGN_BYTES = 60_000_000
PARTS = 10


@contextlib.contextmanager
def observed(fabric: Fabric, options: JobOptions) -> Iterator[tuple[Job, AgentProcess, PortCounters]]:
    with Job(fabric.hosts, options) as job:
        with AgentProcess(*(option for pid in job.pids for option in ("--pid", str(pid)))) as agent:
            agent.until(lambda: len(ledgers(agent, fabric)) == 8)
            yield job, agent, PortCounters(fabric)


@pytest.mark.parametrize("pattern", ["ddp", "tensor-parallel"])
def test_collectives_with_their_headers_explain_a_job_s_bytes_within_two_percent(
    two_hosts: Fabric, pattern: str
) -> None:
    iterations = {"ddp": 12, "tensor-parallel": 6}[pattern]
    with observed(two_hosts, JobOptions(pattern, iterations=iterations, hold=True, verify=False)) as (
        job,
        agent,
        ports,
    ):
        job.release()
        job.wait(60)
        shown = settled(agent, two_hosts, ports)
    for place, ledger in shown.items():
        assert ledger.explained_ratio == pytest.approx(1, abs=0.02), (place, ledger)
        assert ledger.error_ratio < 0.02, (place, ledger)


@pytest.mark.parametrize("rail", [0, 1])
def test_foreign_bytes_beside_a_job_are_found_on_their_rail_within_five_percent(two_hosts: Fabric, rail: int) -> None:
    with contextlib.ExitStack() as open_until_here:
        server = Talker(two_hosts.hosts[1].command(sys.executable, "-c", SERVE, *two_hosts.hosts[1].addresses))
        open_until_here.callback(server.end)
        sender = Talker(two_hosts.hosts[0].command(sys.executable, "-c", SEND))
        open_until_here.callback(sender.end)
        options = JobOptions("ddp", iterations=12, hold=True, verify=False)
        job, agent, ports = open_until_here.enter_context(observed(two_hosts, options))
        job.release()
        for _ in range(PARTS):
            sender.send(two_hosts.hosts[1].addresses[rail], FOREIGN_BYTES // PARTS)
        job.wait(60)
        shown = settled(agent, two_hosts, ports)
    # A machine that is busy lets the kernel send again what has long arrived, which no receiver counts.
    again = {one: shown[0, one, "transmit"].origins["retransmission"] for one in (0, 1)}
    for place in ((0, rail, "transmit"), (1, rail, "receive")):
        room = 0.05 * FOREIGN_BYTES + again[rail]
        assert shown[place].origins["foreign"] == pytest.approx(FOREIGN_BYTES, abs=room), shown[place]
        assert shown[place].origins["unseen"] < 0.01 * shown[place].bytes
    for place in ((0, 1 - rail, "transmit"), (1, rail, "transmit"), (1, 1 - rail, "receive")):
        most = 0.02 * shown[place].bytes + again[place[1]]
        assert shown[place].origins["foreign"] < most, (place, shown[place])
