"""The agent beside a connection that NCCL moves off a port: what it shows, and until when.

The library is the real one; communicator, proxy and connection are forged in a process that calls it, so that ports
have no names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.records.failover import STATUSES, PortState
from railscope.testbed.nccl.library import nccl_library
from tests.fabric.agent_process import AgentProcess
from tests.root.forged_failover import NEWEST, ForgedConnection
from tests.root.forged_proxy import IDENTITY, Forged, forged
from tests.root.probe_targets import on_x86_64, target

pytestmark = [pytest.mark.root, pytest.mark.nccl, on_x86_64]

OLDER = "2.28.9"
WHOSE = {"comm": f"{IDENTITY['comm_hash']:016x}", "rank": str(IDENTITY["rank"])}
SAID = {"status": "IBV_WC_RETRY_EXC_ERR", "vendor_error": "0x81"}
MOVED, DEGRADED = "railscope_comm_failed_over_total", "railscope_comm_degraded_connections"


@dataclass(frozen=True, slots=True)
class Job:
    """A communicator with a connection over two ports."""

    made: Forged
    ports: ForgedConnection

    @property
    def pid(self) -> int:
        return self.ports.caller.pid

    def send(self) -> None:
        """An operation that goes over the connection."""
        self.made.post(self.made.connections[0])

    def fail(self, place: int) -> None:
        assert self.ports.fail(place, STATUSES.index(SAID["status"])) == 0

    def die(self) -> None:
        self.ports.caller.__exit__(None, None, None)


@contextmanager
def job() -> Iterator[Job]:
    layouts, path = Layouts.load(), nccl_library(NEWEST)
    with path.open("rb") as file, Elf.open(file.fileno()) as elf:
        structures = layouts.structures(elf.build_id)
    with target(path, layouts) as to:
        made = forged(to, structures)
        net, resources = made.new("ncclIbSendComm"), made.new("sendNetResources")
        made.store(resources, "sendNetResources", 8, netSendComm=net)
        made.store(made.connections[0], "ncclProxyConnection", 8, transportResources=resources)
        yield Job(made, ForgedConnection.over(path, to.caller, structures, net, (0, 1)))


def beside(pid: int) -> AgentProcess:
    return AgentProcess("--pid", str(pid), "--level", "all")


def test_the_agent_shows_what_runs_degraded_until_nccl_takes_the_port_back() -> None:
    with job() as moving, beside(moving.pid) as agent:
        agent.until(lambda: agent.samples("railscope_probe_attached", program="failover") != [])
        moving.send()
        agent.until(lambda: agent.samples("railscope_comm_enqueued_total", **WHOSE) != [])
        assert [value for _, value in agent.samples(MOVED)] == [0, 0]
        assert agent.samples(DEGRADED) == []
        moving.fail(1)
        agent.until(lambda: [value for _, value in agent.samples(DEGRADED, **WHOSE, **SAID)] == [1])
        assert [value for _, value in agent.samples(MOVED, status=SAID["status"])] == [1]
        moving.ports.set_state(1, PortState.OK)
        agent.until(lambda: agent.samples(DEGRADED) == [])
        assert [value for _, value in agent.samples(MOVED, status=SAID["status"])] == [1]


def test_it_ends_with_the_process() -> None:
    with job() as moving, beside(moving.pid) as agent:
        agent.until(lambda: agent.samples("railscope_probe_attached", program="failover") != [])
        moving.send()
        moving.fail(0)
        agent.until(lambda: [value for _, value in agent.samples(DEGRADED, **WHOSE, **SAID)] == [1])
        moving.die()
        agent.until(lambda: agent.samples(DEGRADED) == [])


def test_where_nccl_cannot_fail_over_there_is_no_count() -> None:
    layouts, path = Layouts.load(), nccl_library(OLDER)
    with target(path, layouts) as to, beside(to.caller.pid) as agent:
        agent.until(lambda: agent.samples("railscope_probe_attached", program="proxy_stop") != [])
        assert agent.samples(MOVED) == []
        assert agent.samples("railscope_probe_attached", program="failover") == []
