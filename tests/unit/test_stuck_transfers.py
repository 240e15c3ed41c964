"""Whose process is told of as the other end of a transfer that does not complete.

Simulated: what is under way, who runs, and their connections.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.stall import Diagnosis
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.stalls import stuck_transfers
from railscope.agent.node.stalls.detector import StallLimits
from railscope.agent.node.stalls.stuck_transfers import StuckTransfers
from railscope.agent.node.stalls.told_calls import CallNumbers
from railscope.agent.node.targets.jobs import JobFacts
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.agent.node.transfers.watch import UnderWay
from railscope.probes.netdev.process_connections import Connection, End
from railscope.probes.processes.namespaces import NetworkNamespace
from railscope.probes.processes.processes import ProcessIdentity
from railscope.probes.transfers.functions import OPERATIONS

PUT = next(number for number, one in enumerate(OPERATIONS) if (one.library.value, one.op) == ("ucx", "Put"))
NEAR, FAR = End(bytes((10, 0, 0, 1)), 5000), End(bytes((10, 0, 0, 2)), 6000)
SECOND = 1_000_000_000


@dataclass
class Host:
    """Processes by pid: (tenant, number of the network namespace), the connections of each, and who waits."""

    processes: dict[int, tuple[Tenant, int]]
    ends: dict[int, tuple[End, End]]
    waits: tuple[int, ...]
    read: list[int] = field(default_factory=list)

    @property
    def mappers(self) -> list[ProcessIdentity]:
        return [ProcessIdentity(pid, 1) for pid in self.processes]

    def under_way(self) -> tuple[UnderWay, ...]:
        return tuple(UnderWay(pid, 4096, PUT, pid, 10, 7, pid, 0, waited_ns=pid) for pid in self.waits)

    def name_of_peer(self, _one: UnderWay) -> str:
        return ""

    def process(self, pid: int) -> ObservedProcess:
        tenant, netns = self.processes[pid]
        namespace = NetworkNamespace(netns, Path("/proc/0/ns/net"), own=False)
        return ObservedProcess(ProcessIdentity(pid, 1), namespace, cast(JobFacts, None), "", "", tenant=tenant)

    def owner(self, _pid: int) -> None:
        return None

    def connections(self, _procfs: Path, pid: int, _namespace: NetworkNamespace) -> tuple[Connection, ...]:
        self.read.append(pid)
        return (Connection(*self.ends[pid], 5, 1, 0),) if pid in self.ends else ()

    def stuck(self, read: Any = None) -> StuckTransfers:
        known = cast(Any, self)
        held = Diagnosis(Cause.UNKNOWN, ("it is stopped",), culprit=True)
        return StuckTransfers(
            self, known, Path("/proc"), lambda: 0, lambda pid, _rank: held if pid == 2 else None,
            numbers=CallNumbers(), read=read or self.connections,
        )  # fmt: skip


ONE, OTHER = Tenant(1000), Tenant(1001)
POD, ANOTHER_POD = Tenant(0, "a" * 64), Tenant(0, "b" * 64)


@pytest.mark.parametrize(
    ("mine", "theirs", "named"),
    [
        ((ONE, 1), (ONE, 1), True),
        ((ONE, 1), (ONE, 2), True),
        ((ONE, 1), (OTHER, 1), False),
        ((ONE, 1), (OTHER, 2), False),
        ((POD, 1), (ANOTHER_POD, 1), True),
        ((POD, 1), (ANOTHER_POD, 2), False),
    ],
)
def test_no_other_users_process_is_named(mine: tuple[Tenant, int], theirs: tuple[Tenant, int], named: bool) -> None:
    """Whoever has a network namespace of his own has any addresses there."""
    host = Host({1: mine, 2: theirs}, {1: (NEAR, FAR), 2: (FAR, NEAR)}, (1,))
    (stall,) = host.stuck().update(100 * SECOND, StallLimits(after_ns=SECOND)).begun
    assert stall.diagnosis.culprit is named
    assert stall.diagnosis.blamed_pid == (2 if named else None)
    assert (stall.diagnosis.cause is Cause.TRANSFER_STUCK) is not named
    assert stall.peer == "10.0.0.2:6000"


def test_a_tenant_with_many_processes_takes_nobodys_turn() -> None:
    greedy = dict.fromkeys(range(10, 110), (OTHER, 2))
    host = Host({**greedy, 2: (ONE, 1), 200: (ONE, 1)}, {200: (NEAR, FAR), 2: (FAR, NEAR)}, (*greedy, 200))
    stuck = host.stuck()
    stuck.update(100 * SECOND, StallLimits(after_ns=SECOND))
    assert [one.diagnosis.culprit for one in stuck.current if one.pid == 200] == [True]
    assert len(host.read) == len(set(host.read)), "each is read once"


def test_connections_that_take_long_to_read_hold_up_nothing() -> None:
    host = Host({1: (ONE, 1), 2: (ONE, 1)}, {1: (NEAR, FAR), 2: (FAR, NEAR)}, (1,))
    goes_on = threading.Event()

    def read(*asked: Any) -> tuple[Connection, ...]:
        goes_on.wait(10)
        return host.connections(*asked)

    stuck = host.stuck(read)
    (stall,) = stuck.update(100 * SECOND, StallLimits(after_ns=SECOND)).begun
    assert not stall.peer
    goes_on.set()
    assert stuck._reading is not None
    stuck._reading.result()
    stuck.update(102 * SECOND, StallLimits(after_ns=SECOND))
    assert [one.peer for one in stuck.current] == ["10.0.0.2:6000"]
    assert stuck_transfers._PATIENCE_S < 0.1


def test_a_reading_that_fails_is_one_failure_of_its_collector_and_nobody_elses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Host({1: (ONE, 1), 2: (ONE, 1), 3: (OTHER, 2)}, {1: (NEAR, FAR), 2: (FAR, NEAR), 3: (NEAR, FAR)}, (1, 3))
    failing = {3}

    def read(*asked: Any) -> tuple[Connection, ...]:
        if asked[1] in failing:
            raise RuntimeError(f"can't start new thread ({len(host.read)})")
        return host.connections(*asked)

    stuck = host.stuck(read)
    assert stuck.result is None
    for second in range(100, 110):
        stuck.update(second * SECOND, StallLimits(after_ns=SECOND))
    assert {one.pid: one.diagnosis.blamed_pid for one in stuck.current} == {1: 2, 3: None}
    assert stuck.result is not None
    assert (stuck.result.collector, stuck.result.success) == ("transfer_ends", False)
    (line,) = caplog.messages
    assert "process 3 cannot be read: RuntimeError: can't start new thread" in line
    failing.clear()
    stuck.update(111 * SECOND, StallLimits(after_ns=SECOND))
    assert stuck.result.success
    assert [one.peer for one in stuck.current if one.pid == 3] == ["10.0.0.2:6000"]
