"""Connections that NCCL moved off a port, on simulated probes; the memory of their process is a file."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.facts.snapshot import FailedOver
from railscope.agent.node.collectives import failovers
from railscope.agent.node.collectives.communicators import Communicator
from railscope.agent.node.collectives.failovers import Failovers
from railscope.agent.node.completion.levels import UNLISTED, failover_seen
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.agent.node.targets.memory import ProcessMemory
from railscope.probes.loading.links import ProbePoint
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.layouts.layout import Layouts, Structure
from railscope.probes.nccl.memory.net_devices import NetDevice
from railscope.probes.nccl.records.failover import (
    FAILOVER_EVENT,
    MOST_PORTS,
    SIZES,
    STATUSES,
    FailoverLayout,
    FailoverStat,
    PortState,
    failover_layout,
    status_name,
)
from railscope.probes.nccl.records.internals import CONNECTION, CONNECTION_KEY, NetworkKind
from tests.nccl.library import REPOSITORY
from tests.unit.headers import compare, constants, enumeration
from tests.unit.level_programs import BUILD_ID

HEADER = (REPOSITORY / "probes/bpf/failover.h").read_text()
POINT = ProbePoint("ncclIbResiliencyHandleCompletionError", 0x1000, 0)
LAYOUT = FailoverLayout(comm_resiliency=8, comm=0, count=16, devices=24, device_size=8, device_state=4)
PID, LIBRARY, INSTANCE = 10, 3, 7
COMM, RESILIENCY = 0x1000, 0x2000
RETRIES = STATUSES.index("IBV_WC_RETRY_EXC_ERR")
MOVED = {"IBV_WC_WR_FLUSH_ERR": 0, "IBV_WC_RETRY_EXC_ERR": 1}


@dataclass(slots=True)
class Source:
    """What the programs and the libraries tell."""

    watches_failover: bool = True
    pending: list[Records] = field(default_factory=list)
    owners: dict[tuple[int, int], int] = field(default_factory=dict)
    """Instances, by process and address of the connection."""
    forgotten: list[tuple[int, int]] = field(default_factory=list)
    names: tuple[tuple[str, int], ...] = (("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_2", 1))

    @property
    def levels(self) -> Source:
        return self

    def failover_events(self) -> Records:
        found = np.concatenate([np.zeros(0, FAILOVER_EVENT), *self.pending])
        self.pending.clear()
        return found

    def connections(self) -> tuple[Records, Records]:
        keys, values = np.zeros(len(self.owners), CONNECTION_KEY), np.zeros(len(self.owners), CONNECTION)
        keys["tgid"] = [tgid for tgid, _ in self.owners]
        values["net_comm"], values["instance"] = [comm for _, comm in self.owners], list(self.owners.values())
        return keys, values

    def forget_failed_over(self, connections: Iterable[tuple[int, int]]) -> None:
        self.forgotten += connections

    def device_of(self, tgid: int, library: int, number: int) -> NetDevice | None:
        assert (tgid, library) == (PID, LIBRARY)
        return NetDevice(NetworkKind.IB, number, *self.names[number]) if number < len(self.names) else None

    def failover_layout_of(self, library: int) -> FailoverLayout | None:
        return LAYOUT if library == LIBRARY else None


@dataclass(slots=True)
class Process:
    """One with a connection over several ports."""

    source: Source
    failovers: Failovers
    memory: Path

    def write(self, address: int, value: int, size_bytes: int) -> None:
        with self.memory.open("r+b") as file:
            file.seek(address)
            file.write(value.to_bytes(size_bytes, "little"))

    def set_state(self, place: int, state: PortState) -> None:
        self.write(RESILIENCY + LAYOUT.devices + place * LAYOUT.device_size + LAYOUT.device_state, state, 4)

    def fail(
        self, place: int = 0, *, devices: tuple[int, ...] = (0, 1), result: int = 0, status: int = RETRIES
    ) -> None:
        """A port fails, and NCCL notes it."""
        event = np.zeros(1, FAILOVER_EVENT)
        for name, value in (("comm", COMM), ("resiliency", RESILIENCY), ("tgid", PID), ("library", LIBRARY)):
            event[name] = value
        event["status"], event["vendor_error"], event["queue_pair"] = status, 0x81, 4711
        event["place"], event["count"], event["result"] = place, len(devices), result
        event["devices"][0, : len(devices)] = devices
        self.source.pending.append(event)
        self.write(RESILIENCY + LAYOUT.count, len(devices), 4)
        if not result:
            self.set_state(place, PortState.ERROR)

    def read(self) -> tuple[FailedOver, ...]:
        self.failovers.read()
        return self.failovers.facts()


@pytest.fixture
def process(tmp_path: Path) -> Process:
    memory = tmp_path / str(PID) / "mem"
    memory.parent.mkdir()
    memory.write_bytes(bytes(0x4000))
    source = Source(owners={(PID, COMM): INSTANCE, (PID + 1, COMM): 99, (PID, 0): 98})
    owner = Communicator(INSTANCE, PID, 0, 0xC0FFEE, 3)
    known = {INSTANCE: owner}
    reader = ProcessMemory(tmp_path, InProcess(), lambda _pid: UNKNOWN_TENANT)
    made = Process(source, Failovers(source, reader, known.get), memory)
    made.write(RESILIENCY + LAYOUT.comm, COMM, 8)
    made.write(COMM + LAYOUT.comm_resiliency, RESILIENCY, 8)
    return made


def failed_over(**different: object) -> FailedOver:
    named = {"comm": f"{0xC0FFEE:016x}", "rank": "3", "device": "mlx5_0", "port": "1", "carried_by": "mlx5_1"}
    said = {"status": "IBV_WC_RETRY_EXC_ERR", "vendor_error": 0x81, "connections": 1}
    return FailedOver(**named | said | different)  # type: ignore[arg-type]


def test_where_nothing_failed_nothing_is_degraded_and_the_count_is_zero(process: Process) -> None:
    assert process.read() == ()
    assert process.failovers.totals() == dict.fromkeys(MOVED, 0)


def test_without_a_library_that_tells_there_is_no_count(process: Process) -> None:
    process.source.watches_failover = False
    process.read()
    assert process.failovers.totals() is None
    process.source.watches_failover = True
    process.read()
    process.source.watches_failover = False  # it went; what was counted stays
    process.read()
    assert process.failovers.totals() == dict.fromkeys(MOVED, 0)


def test_a_communicator_is_degraded_until_nccl_uses_the_port_again(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    process.fail()
    assert process.read() == (failed_over(),)
    assert process.failovers.totals() == MOVED
    for state in (PortState.RECOVERING, PortState.RECOVERED, PortState.ERROR_PERMANENT):
        process.set_state(0, state)
        assert process.read() == (failed_over(),)
    assert process.source.forgotten == []
    process.set_state(0, PortState.OK)
    assert process.read() == ()
    assert process.source.forgotten == [(PID, COMM)]
    assert process.failovers.totals() == MOVED
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "process 10: NCCL moved a connection off mlx5_0 port 1: IBV_WC_RETRY_EXC_ERR, vendor error 0x81, "
        "queue pair 4711",
        "process 10: NCCL uses mlx5_0 port 1 again on a connection",
    ]


@pytest.mark.parametrize("end", ["connection", "address used again", "communicator", "process"])
def test_it_ends_with_the_connection(process: Process, end: str) -> None:
    process.fail()
    assert process.read() == (failed_over(),)
    if end == "connection":
        process.write(COMM + LAYOUT.comm_resiliency, 0, 8)
    elif end == "address used again":
        process.write(RESILIENCY + LAYOUT.comm, COMM + 0x800, 8)
    elif end == "communicator":
        process.failovers.end_communicators({INSTANCE, 1})
    else:
        process.failovers.end_processes({PID})
    assert process.read() == ()
    assert process.source.forgotten == [(PID, COMM)]


def test_another_process_or_communicator_that_ends_changes_nothing(process: Process) -> None:
    process.fail()
    process.read()
    process.failovers.end_communicators({INSTANCE + 1})
    process.failovers.end_processes({PID + 1})
    assert process.read() == (failed_over(),)


def test_what_nccl_gives_up_is_no_failover(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    process.fail(result=6)
    assert process.read() == ()
    assert process.failovers.totals() == dict.fromkeys(MOVED, 0)
    assert "NCCL gives a connection up: IBV_WC_RETRY_EXC_ERR, vendor error 0x81" in caplog.text


def test_whose_the_connection_is_may_be_known_later(process: Process) -> None:
    owners, process.source.owners = process.source.owners, {}
    process.fail()
    assert process.read() == (failed_over(comm="unknown", rank="unknown"),)
    process.source.owners = owners
    assert process.read() == (failed_over(),)


@pytest.mark.parametrize(
    ("names", "devices", "place", "device", "carried_by"),
    [
        ((("mlx5_0", 1), ("mlx5_1", 1)), (0, 1), 1, "mlx5_1", "mlx5_0"),
        ((("mlx5_0", 1), ("mlx5_1", 1), ("mlx5_2", 1)), (0, 1, 2), 1, "mlx5_1", "mlx5_2"),
        ((("mlx4_0", 1), ("mlx4_0", 2)), (0, 1), 0, "mlx4_0", "mlx4_0/2"),
        ((), (0, 1), 0, "unknown", "unknown"),
    ],
    ids=["the last", "one of three", "ports of one device", "no names"],
)
def test_the_next_port_carries_the_share(
    process: Process,
    names: tuple[tuple[str, int], ...],
    devices: tuple[int, ...],
    place: int,
    device: str,
    carried_by: str,
) -> None:
    process.source.names = names
    process.fail(place, devices=devices)
    (found,) = process.read()
    assert (found.device, found.carried_by) == (device, carried_by)


def test_memory_that_cannot_be_read_ends_nothing(process: Process) -> None:
    process.fail()
    process.memory.unlink()
    process.memory.symlink_to(process.memory)
    assert process.read() == (failed_over(),)
    assert process.source.forgotten == []


def test_what_a_process_told_before_its_end_ends_with_it(process: Process) -> None:
    process.fail()
    process.failovers.end_processes({PID})
    process.memory.unlink()
    assert process.read() == ()
    assert process.failovers.totals() == MOVED
    assert process.source.forgotten == [(PID, COMM)]


def test_statuses_that_libibverbs_does_not_have_are_one_series(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    for status in (22, 4_000_000_000):
        process.fail(status=status)
    assert {one.status for one in process.read()} == {"unknown"}
    assert process.failovers.totals() == {**dict.fromkeys(MOVED, 0), "unknown": 2}
    assert "status_4000000000, vendor error 0x81" in caplog.text


def test_statuses_have_the_names_of_libibverbs() -> None:
    assert [status_name(number) for number in (0, 5, 12, 21, 22, -1)] == [
        *("IBV_WC_SUCCESS", "IBV_WC_WR_FLUSH_ERR", "IBV_WC_RETRY_EXC_ERR", "IBV_WC_GENERAL_ERR"),
        *("status_22", "status_-1"),
    ]


def test_the_header_and_the_records_agree() -> None:
    for name, (dtype, size_bytes) in SIZES.items():
        compare(HEADER, name, dtype, size_bytes)
    stats = [f"FAILOVER_STAT_{stat.name}" for stat in FailoverStat]
    assert enumeration(HEADER, "failover_stat") == [*stats, "FAILOVER_STAT_COUNT"]
    assert (constants(HEADER)["IB_MOST_DEVICES"], constants(HEADER)["PORT_OK"]) == (MOST_PORTS, PortState.OK)


@pytest.mark.parametrize(
    ("points", "structures", "version", "said"),
    [
        ((), {}, "2.28.9", "not in this version, but from 2.29.7 on"),
        ((), {}, "2.32.3", "not seen: the library has no symbol of the function to probe"),
        ((), {}, "unknown", "not seen: the library has no symbol of the function to probe"),
        ((POINT,), {}, "2.33.1", f"not seen: {UNLISTED}"),
        ((POINT,), Layouts.load().structures(BUILD_ID), "2.32.3", "seen"),
    ],
    ids=["too old", "stripped", "no version", "not listed", "seen"],
)
def test_the_doctor_says_whether_a_library_tells_of_failovers(
    points: tuple[ProbePoint, ...], structures: Mapping[str, Structure], version: str, said: str
) -> None:
    assert failover_seen(points, structures, version) == said


def test_the_layout_needs_every_structure() -> None:
    whole = {
        "ncclIbSendComm": Structure(100, {"base.resiliency": 8}),
        "ncclIbResiliency": Structure(100, {"baseComm": 0, "ndevs": 16, "devs": 24}),
        "ncclIbResiliencyDev": Structure(8, {"state": 4}),
    }
    assert failover_layout(whole) == LAYOUT
    for name in whole:
        assert failover_layout({other: one for other, one in whole.items() if other != name}) is None
    assert failover_layout({**whole, "ncclIbSendComm": Structure(100, {})}) is None


def test_a_user_whose_connections_fail_by_the_thousand_hides_nobody_elses(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failovers, "_MOST_KEPT", 16)
    tenants = {PID: Tenant(1000), PID + 1: Tenant(5000)}
    shared = Failovers(process.source, process.failovers._memory, lambda _: None, tenants.__getitem__)
    process.failovers = shared
    for comm in range(100):
        process.fail()
        process.source.pending[-1]["tgid"], process.source.pending[-1]["comm"] = PID + 1, 0x100000 + comm
    process.fail()
    monkeypatch.setattr(Source, "device_of", lambda *_: None)
    for event in np.concatenate(process.source.pending):
        shared._record(event)
    assert Counter(tgid for tgid, _ in shared._moved) == {PID: 1, PID + 1: 8}
    shared.end_processes({PID + 1})
    assert shared._places.room(tenants[PID + 1]) == 8
