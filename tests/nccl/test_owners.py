"""Whose the bytes of two rails are: the real NCCL (on the CUDA double), the real UCX and a plain copy at once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from railscope.testbed.transfers.library import PERFTEST
from tests.fabric.agent_process import AgentProcess
from tests.fabric.ledgers import PortCounters, ledgers, settled
from tests.fabric.talkers import SEND, SERVE, Talker
from tests.nccl.job import Job
from tests.transfers.perftest import Perftest

pytestmark = [
    *(pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl),
    pytest.mark.skipif(not PERFTEST.exists(), reason="UCX is not there: run make .venv/.stamps/transfers"),
]

SIZE_BYTES = 4 << 20
ITERATIONS = 60
MESSAGE_BYTES = 1 << 20
MESSAGES = 2000
COPIED_BYTES = 40_000_000
PARTS = 10


@pytest.mark.parametrize(("loss_percent", "within"), [(0, 0.02), (1, 0.05)])
def test_each_owner_of_two_shared_rails_gets_what_it_moved(
    two_hosts: Fabric, double: Double, tmp_path: Path, loss_percent: int, within: float
) -> None:
    first, second = two_hosts.hosts
    if loss_percent:
        lossy = (
            "add table inet lossy; add chain inet lossy input { type filter hook input priority 0; }; "
            f'add rule inet lossy input iifname "rail*" meta l4proto tcp numgen random mod 100 < {loss_percent} drop'
        )
        subprocess.run(second.command("nft", lossy), check=True)
    with contextlib.ExitStack() as stack:
        server = Talker(second.command(sys.executable, "-c", SERVE, *second.addresses))
        stack.callback(server.end)
        sender = Talker(first.command(sys.executable, "-c", SEND))
        stack.callback(sender.end)
        ucx = stack.enter_context(Perftest(second, first, 1, messages=MESSAGES, size_bytes=MESSAGE_BYTES))
        job = stack.enter_context(
            Job(two_hosts, tmp_path, double, iterations=ITERATIONS, size_bytes=SIZE_BYTES, hold=True, pace_us=20_000)
        )
        pids = (*job.ready(), *ucx.pids, server.pid, sender.pid)
        options = [option for pid in pids for option in ("--pid", str(pid))]
        agent = stack.enter_context(AgentProcess(*options, "--level", "rails"))
        agent.until(lambda: len(ledgers(agent, two_hosts)) == 8)
        ports = PortCounters(two_hosts)
        job.start()
        ucx.start()
        for _ in range(PARTS):
            sender.send(second.addresses[0], COPIED_BYTES // PARTS)
        ucx.wait(120)
        assert all(report.verified for report in job.finished())
        shown = settled(agent, two_hosts, ports)
        job.release()
        job.wait()
    truth = {"ucx": (1, MESSAGES * MESSAGE_BYTES), "tcp_other": (0, COPIED_BYTES)}
    for host, direction in ((0, "transmit"), (1, "receive")):
        for owner, (rail, moved) in truth.items():
            ledger = shown[host, rail, direction]
            # A machine that is busy lets the kernel send again what has long arrived, which no receiver counts.
            again = shown[0, rail, "transmit"].origins["retransmission"]
            room = within * ledger.bytes + again
            assert ledger.owners[owner] == pytest.approx(moved, abs=within * moved + again), (host, rail, owner, ledger)
            others = sum(ledger.owners.get(one, 0) for one in ledger.owners if one not in (owner, "nccl"))
            assert others < room, (host, rail, owner, ledger, again)
            nccl = ledger.owners["nccl"]
            assert nccl == pytest.approx(ledger.bytes - moved, abs=room), (host, rail, ledger, again)
    sent = shown[0, 1, "transmit"]
    assert sent.origins["transfer"] == pytest.approx(MESSAGES * MESSAGE_BYTES, rel=within)
    assert sent.origins["foreign"] < within * sent.bytes
