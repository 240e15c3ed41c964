"""Bytes that the real NCCL hands to each rail, against what its ring has to send, to the byte; names of its devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from railscope.agent.node.completion.handed_over import HandedOver, RailBytes
from railscope.agent.node.targets.jobs import JobFacts
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.functions.internals import Level, internal_points
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.memory.net_devices import DeviceArrays, NetDevice, NetDeviceError, device_arrays, net_devices
from railscope.probes.nccl.programs.calls import NcclPrograms, ProgramSettings
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.internals import NetworkKind, layout_record
from railscope.probes.processes.namespaces import network_namespace
from railscope.probes.processes.processes import FileKey, ProcessIdentity, executable_mappings, identity_of
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.nccl.job import Job

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

PROCFS = Path("/proc")
ITERATIONS = 6
SIZE_BYTES = 1 << 18
RAILS = ("rail0", "rail1")
LOW_LATENCY_FACTOR = 2
"""Every 8 bytes of data travel with 8 bytes of flags (src/device/prims_ll.h)."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The library and the loaded programs, and how to ask a process for its devices."""

    programs: NcclPrograms
    internals: Internals
    arrays: DeviceArrays

    def devices(self, pid: int) -> tuple[NetDevice, ...]:
        process = identity_of(PROCFS, pid)
        assert process is not None
        return net_devices(PROCFS, process, nccl_file(pid), self.arrays)


def nccl_file(pid: int) -> FileKey:
    return next(mapping.file for mapping in executable_mappings(PROCFS, pid) if "libnccl" in mapping.path)


@pytest.fixture(scope="module")
def observed(double: Double) -> Iterator[Observed]:
    layouts = Layouts.load()
    programs = NcclPrograms.load(ProgramSettings(only_observed_processes=True))
    try:
        internals = Internals.load(programs)
        try:
            with open(double.nccl, "rb") as file, Elf.open(file.fileno()) as elf:
                structures = layouts.structures(elf.build_id)
                internals.describe(0, layout_record(structures))
                points, arrays = internal_points(elf, 0), device_arrays(elf, structures)
            links = internals.attach(str(double.nccl), points, Level.RAILS)
            yield Observed(programs, internals, arrays)
            links.close()
        finally:
            internals.close()
    finally:
        programs.close()


@dataclass(frozen=True, slots=True)
class Ranks:
    """What a job handed over, by rank."""

    bytes: tuple[int, ...]
    by_rail: tuple[Mapping[str, HandedOver], ...]


def handed_over(
    observed: Observed,
    fabric: Fabric,
    double: Double,
    folder: Path,
    pattern: str,
    environment: Mapping[str, str | None] | None = None,
    *,
    end_before_first_reading: bool = False,
) -> Ranks:
    """Run a job and add up what it sent; every rail is asked for in its own host's namespace."""
    job = Job(
        fabric, folder, double,
        pattern=pattern, iterations=ITERATIONS, size_bytes=SIZE_BYTES, hold=True, environment=environment,
    )  # fmt: skip
    with job:
        pids = job.ready()
        processes = {pid: process_facts(pid) for pid in pids}
        rails = RailBytes(processes.get, lambda tgid, _: observed.devices(tgid))
        for pid in pids:
            observed.programs.observe(pid)
        job.start()
        assert all(report.verified for report in job.finished())
        if end_before_first_reading:
            for pid in pids:
                rails.read_device_names(pid, 0)
        else:
            rails.add_readings(observed.internals.sent())
        job.release()
        job.wait()
    before = rails.by_device()
    for pid in pids:
        rails.end_processes({pid}, observed.internals.sent())
        observed.internals.forget_sent({pid})
        observed.programs.forget(pid)
    totals = rails.by_device()
    assert rails.unattributed() == HandedOver(0, 0)
    assert all(totals[rail].bytes >= sent.bytes for rail, sent in before.items())
    by_rail = []
    for pid in pids:
        namespace = processes[pid].namespace
        assert namespace is not None
        by_rail.append({device: sent for (inode, device), sent in totals.items() if inode == namespace.inode})
    return Ranks(tuple(sum(sent.bytes for sent in rank.values()) for rank in by_rail), tuple(by_rail))


def process_facts(pid: int) -> ObservedProcess:
    identity = identity_of(PROCFS, pid)
    assert identity is not None
    return ObservedProcess(identity, network_namespace(PROCFS, pid), JobFacts(), "", "")


def hosts(request: pytest.FixtureRequest, count: int) -> Fabric:
    fabric = request.getfixturevalue({2: "two_hosts", 4: "four_hosts"}[count])
    assert isinstance(fabric, Fabric)
    return fabric


def ring_bytes(pattern: str, n: int) -> list[int]:
    """What each of n ranks on as many hosts sends to its neighbour for one call; the root is the last rank.

    NCCL's rings (src/device/all_reduce.h and its neighbours): a Broadcast goes from the root to 0, 1, … and ends
    before the root; a Reduce begins at 0 and ends at the root.
    """
    return {
        "allreduce": [2 * (n - 1) * SIZE_BYTES // n] * n,
        "allgather": [(n - 1) * SIZE_BYTES] * n,
        "reducescatter": [(n - 1) * SIZE_BYTES] * n,
        "broadcast": [0 if rank == n - 2 else SIZE_BYTES for rank in range(n)],
        "reduce": [0 if rank == n - 1 else SIZE_BYTES for rank in range(n)],
    }[pattern]


@pytest.mark.parametrize("pattern", ["allreduce", "allgather", "reducescatter", "broadcast", "reduce"])
@pytest.mark.parametrize("n", [2, 4])
def test_rails_carry_what_the_ring_sends_to_the_byte(
    observed: Observed, double: Double, tmp_path: Path, request: pytest.FixtureRequest, n: int, pattern: str
) -> None:
    ranks = handed_over(observed, hosts(request, n), double, tmp_path, pattern)
    assert ranks.bytes == tuple(ITERATIONS * sent for sent in ring_bytes(pattern, n))
    for rank in ranks.by_rail:
        assert set(rank) <= set(RAILS)
        # Channels alternate between the rails and share the payload equally.
        assert not rank or rank["rail0"].bytes == rank["rail1"].bytes


def test_low_latency_messages_are_twice_their_payload(
    observed: Observed, double: Double, tmp_path: Path, two_hosts: Fabric
) -> None:
    ranks = handed_over(observed, two_hosts, double, tmp_path, "allreduce", {"NCCL_PROTO": "LL"})
    payload = ITERATIONS * ring_bytes("allreduce", 2)[0]
    assert ranks.bytes == (LOW_LATENCY_FACTOR * payload,) * 2
    assert all(set(rank) == set(RAILS) for rank in ranks.by_rail)


def test_a_process_that_ends_before_its_first_reading_keeps_its_rails(
    observed: Observed, double: Double, tmp_path: Path, two_hosts: Fabric
) -> None:
    ranks = handed_over(observed, two_hosts, double, tmp_path, "allreduce", end_before_first_reading=True)
    assert ranks.bytes == tuple(ITERATIONS * sent for sent in ring_bytes("allreduce", 2))
    assert all(set(rank) == set(RAILS) for rank in ranks.by_rail)


def test_devices_are_numbered_as_the_process_was_told_to_use_them(
    observed: Observed, double: Double, tmp_path: Path, two_hosts: Fabric
) -> None:
    """NCCL takes interfaces in the order of the system, so a job on one rail has another number 0."""
    job = Job(two_hosts, tmp_path, double, environment={"NCCL_SOCKET_IFNAME": "rail1"})
    with job:
        pids = job.ready()
        devices = [observed.devices(pid) for pid in pids]
        job.run()
    assert devices == [(NetDevice(NetworkKind.SOCKET, 0, "rail1", None),)] * 2


def test_a_process_that_has_ended_is_said_to_be_gone(
    observed: Observed, double: Double, tmp_path: Path, two_hosts: Fabric
) -> None:
    with Job(two_hosts, tmp_path, double) as job:
        pid = job.ready()[0]
        process, file = identity_of(PROCFS, pid), nccl_file(pid)
        job.run()
    assert process is not None
    with pytest.raises(NetDeviceError, match=f"process {pid} has ended") as error:
        net_devices(PROCFS, process, file, observed.arrays)
    assert error.value.gone


def test_another_process_with_the_same_pid_is_not_taken_for_it(
    observed: Observed, double: Double, tmp_path: Path, two_hosts: Fabric
) -> None:
    with Job(two_hosts, tmp_path, double) as job:
        pid = job.ready()[0]
        process = identity_of(PROCFS, pid)
        assert process is not None
        earlier = ProcessIdentity(pid, process.start_time_ticks - 1)
        with pytest.raises(NetDeviceError, match="has ended") as error:
            net_devices(PROCFS, earlier, nccl_file(pid), observed.arrays)
        job.run()
    assert error.value.gone
