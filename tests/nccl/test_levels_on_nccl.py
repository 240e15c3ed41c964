"""Levels on the real NCCL (on the CUDA test double): what each one sees is exact, and changing it disturbs no count."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.node.completion.completion import Completion
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.abi import op_name
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.functions.probe_points import probe_points
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import NcclPrograms, ProgramSettings
from railscope.probes.nccl.programs.internals import Internals
from railscope.probes.nccl.records.calls import Stat
from railscope.probes.nccl.records.internals import ALGORITHMS, PROTOCOLS, InternalStat
from railscope.probes.processes.processes import ProcessIdentity
from railscope.testbed.hosts import Fabric, Host
from railscope.testbed.nccl.build import Double
from railscope.testbed.nccl.library import nccl_library
from tests.nccl.job import Job, RankReport
from tests.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce")


@dataclass(frozen=True, slots=True)
class OpenLibrary:
    """What agent/node/completion/levels.py asks of a library."""

    number: int
    path: str
    descriptor: int
    build_id: str | None
    nccl_version: str
    mappers: frozenset[ProcessIdentity] = frozenset()
    tenant: Tenant = UNKNOWN_TENANT
    local: bool = True


@dataclass(frozen=True, slots=True)
class Probed:
    """The real library, with its calls counted; nothing is observed until a process is named."""

    programs: NcclPrograms
    internals: Internals
    library: OpenLibrary

    def calls(self) -> dict[int, Counter[str]]:
        """By process and op."""
        keys, values = self.programs.aggregates.read()
        found: dict[int, Counter[str]] = {}
        for key, value in zip(keys, values, strict=True):
            found.setdefault(int(key["tgid"]), Counter())[op_name(int(key["op"]))] += int(value["calls"].sum())
        return found

    def payload_bytes(self) -> Counter[int]:
        """By process."""
        keys, values = self.programs.aggregates.read()
        found: Counter[int] = Counter()
        for key, value in zip(keys, values, strict=True):
            found[int(key["tgid"])] += int(value["payload_bytes"].sum())
        return found


@pytest.fixture
def probed() -> Iterator[Probed]:
    path = str(nccl_library())
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    programs = NcclPrograms.load(ProgramSettings(only_observed_processes=True))
    internals = Internals.load(programs)
    with Elf.open(descriptor) as elf:
        points, layout, build_id = probe_points(elf, 0), Layouts.load().layout_of(elf), elf.build_id
    links = programs.attach(path, points, 0, layout)
    try:
        yield Probed(programs, internals, OpenLibrary(0, path, descriptor, build_id, "2.32.3"))
    finally:
        links.close()
        internals.close()
        programs.close()
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class OneHost:
    """A part of a fabric."""

    hosts: Sequence[Host]


def as_reported(reports: list[RankReport]) -> dict[int, Counter[str]]:
    return {r.pid: Counter({entry.operation: entry.calls for entry in r.operations}) for r in reports}


def payload_of(reports: list[RankReport]) -> Counter[int]:
    return Counter({r.pid: sum(entry.payload_bytes for entry in r.operations) for r in reports})


def test_twenty_thousand_mixed_operations_are_exact_at_every_point(
    probed: Probed, two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    completion = Completion(probed.internals, Level.ALL, inspection=InProcess())
    assert completion.set_libraries([probed.library]) == []
    iterations = 2_000  # ten calls each
    with Job(two_hosts, tmp_path, double, pattern="mixed", iterations=iterations, size_bytes=4_000, hold=True) as job:
        for pid in job.ready():
            probed.programs.observe(pid)
        job.start()
        reports = list(job.finished())
        # The proxy threads have done their last step, and report it a moment later.
        eventually(lambda: not len(probed.internals.operations()[0]))
        progress = probed.internals.progress()
        sent = probed.internals.sent()
        launches = probed.internals.launches()
        stats = probed.internals.stats()
        outstanding = len(probed.internals.operations()[0])
        job.release()
        job.wait()
    assert sum(as_reported(reports)[reports[0].pid].values()) == 20_000
    assert probed.calls() == as_reported(reports)
    assert probed.payload_bytes() == payload_of(reports)
    assert [(one.completed_sequence, one.posted - one.completed) for one in progress.values()] == [(20_000, 0)] * 2
    assert outstanding == 0
    assert {op_name(one.op): one.count for one in launches} == dict.fromkeys(COLLECTIVES, 2 * iterations)
    # What each of two ranks hands to the network, with b = 4,000: AllReduce 2b(n-1)/n = b; AllGather, ReduceScatter and
    # AlltoAll (n-1)b = b each; one Send b, the other goes to itself; Broadcast from rank 0 b and Reduce to it b.
    handed: Counter[int] = Counter()
    for one in sent:
        handed[one.tgid] += one.bytes
    assert sorted(handed.values()) == [iterations * 6 * 4_000] * 2
    lost = (InternalStat.STOPS_UNKNOWN, InternalStat.FULL, InternalStat.UNREADABLE)
    assert {stats[name] for name in lost} == {0}
    completion.levels.close()


def test_counts_stay_exact_while_levels_change(
    probed: Probed, two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    completion = Completion(probed.internals, Level.COUNTS, inspection=InProcess())
    assert completion.set_libraries([probed.library]) == []
    cycle = (Level.ALL, Level.COMPLETION, Level.RAILS, Level.COUNTS, Level.RAILS, Level.COMPLETION)
    changes = 0
    with Job(two_hosts, tmp_path, double, pattern="mixed", iterations=1_000, size_bytes=4_000, hold=True) as job:
        for pid in job.ready():
            probed.programs.observe(pid)
        job.start()
        while probed.programs.stats()[Stat.CALLS] < 18_000:
            assert completion.set_level(cycle[changes % len(cycle)]) == []
            changes += 1
            completion.read()
        reports = list(job.finished())
        # From here on all is seen again, and nothing of the interrupted observations is left behind.
        completion.set_level(Level.COUNTS)
        completion.levels.finish_detaching(wait=True)
        completion.set_level(Level.ALL)
        job.release()
        job.wait()
    assert changes > len(cycle)
    assert probed.calls() == as_reported(reports)
    assert probed.payload_bytes() == payload_of(reports)
    assert len(probed.internals.operations()[0]) == 0
    completion.levels.close()


def test_each_completed_operation_is_one_event_with_its_times_and_shape(
    probed: Probed, two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    internals = Internals.load(probed.programs, write_events=True)
    completion = Completion(internals, Level.COMPLETION, inspection=InProcess())
    assert completion.set_libraries([probed.library]) == []
    calls, size_bytes = 200, 1 << 15
    with Job(two_hosts, tmp_path, double, iterations=calls, size_bytes=size_bytes, hold=True) as job:
        for pid in job.ready():
            probed.programs.observe(pid)
        job.start()
        job.finished()
        seen = [internals.completion_events.read()]
        while sum(len(events) for events in seen) < 2 * calls:
            seen.append(internals.completion_events.read())
        job.release()
        job.wait()
    completion.levels.close()
    events = np.concatenate(seen)
    internals.close()
    assert len(events) == 2 * calls
    for tgid in np.unique(events["tgid"]):
        of_rank = events[events["tgid"] == tgid]
        assert of_rank["sequence"].tolist() == list(range(1, calls + 1))
        assert (of_rank["time_ns"] > of_rank["posted_ns"]).all()
    assert set(events["payload_bytes"].tolist()) == {size_bytes}
    assert set(zip(events["op"].tolist(), events["algorithm"].tolist(), events["protocol"].tolist(), strict=True)) == {
        (4, 1, 2)
    }


@pytest.mark.parametrize(("pattern", "of_each"), [("allreduce", 1), ("grouped", 4)])
def test_launches_without_a_network_part_tell_what_nccl_chose(
    probed: Probed, two_hosts: Fabric, double: Double, tmp_path: Path, pattern: str, of_each: int
) -> None:
    """Two ranks of one host send through memory: no proxy tells of them.  All tasks of a plan count."""
    completion = Completion(probed.internals, Level.ALL, inspection=InProcess())
    assert completion.set_libraries([probed.library]) == []
    one_host, calls = OneHost(two_hosts.hosts[:1]), 25
    with Job(
        one_host, tmp_path, double, pattern=pattern, iterations=calls, size_bytes=40_000, ranks_per_host=2, hold=True
    ) as job:
        for pid in job.ready():
            probed.programs.observe(pid)
        job.start()
        job.finished()
        launches = probed.internals.launches()
        job.release()
        job.wait()
    (chosen,) = {(op_name(one.op), one.algorithm, one.protocol) for one in launches}
    assert (chosen[0], ALGORITHMS[chosen[1]], PROTOCOLS[chosen[2]]) == ("AllReduce", "Ring", "Simple")
    assert sum(one.count for one in launches) == 2 * calls * of_each
    assert all(one.channels >= 1 for one in launches)
    completion.levels.close()


def test_ranks_that_share_a_host_are_not_taken_for_ones_that_send_through_each_other(
    probed: Probed, two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    """What goes to another rank's proxy is not seen to end (PXN); shared memory needs none."""
    completion = Completion(probed.internals, Level.COMPLETION, inspection=InProcess())
    assert completion.set_libraries([probed.library]) == []
    calls = 20
    with Job(two_hosts, tmp_path, double, iterations=calls, size_bytes=40_000, ranks_per_host=2, hold=True) as job:
        for pid in job.ready():
            probed.programs.observe(pid)
        job.start()
        job.finished()
        eventually(lambda: [one.completed for one in probed.internals.progress().values()] == [calls] * 4)
        completion.read()
        known = [completion.progress_of(instance) for instance in probed.internals.progress()]
        job.release()
        job.wait()
    assert [one.completed for one in known if one is not None] == [calls] * 4
    completion.levels.close()
