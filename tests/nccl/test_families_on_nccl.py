"""Communicators as jobs make them: without blocking, from one another, several in one group; and calls of nothing.

The agent beside the real NCCL (on the CUDA test double): whoever makes a communicator and however, what it calls is
counted, what completes is exact, and where completion cannot be seen none is shown.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from railscope.probes.libraries.elf import Elf
from railscope.probes.nccl.functions.probe_points import probe_points
from railscope.probes.nccl.layouts.layout import Layouts
from railscope.probes.nccl.programs.calls import NcclPrograms, ProgramSettings
from railscope.probes.nccl.records.calls import LifecycleKind
from railscope.probes.nccl.records.errors import Result
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job, RankReport

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

READY = re.compile(r" comm 0x[0-9a-f]+ rank (\d+) nranks (\d+) .* commId 0x([0-9a-f]+) .*- Init COMPLETE")
"""What NCCL_DEBUG=INFO says of a communicator that is ready."""
TELLING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}

Identity = tuple[str, str, str]
"""Hash, rank, number of ranks; as labels."""


def said_by_nccl(job: Job) -> Counter[Identity]:
    """Every communicator of every rank that has left (what it says is buffered), in NCCL's own words."""
    return Counter(
        (f"{int(comm, 16):016x}", rank, nranks)
        for process in range(len(job.pids))
        for rank, nranks, comm in READY.findall(job.output(process))
    )


def identities(agent: AgentProcess) -> Counter[Identity]:
    return Counter(
        (labels["comm"], labels["rank"], labels["nranks"]) for labels, _ in agent.samples("railscope_comm_info")
    )


def by_comm(agent: AgentProcess, name: str) -> dict[tuple[str, str], float]:
    return {(labels["comm"], labels["rank"]): value for labels, value in agent.samples(name)}


def completes(agent: AgentProcess, calls: float) -> None:
    """Wait until so many calls are complete, over all communicators."""
    agent.until(lambda: sum(by_comm(agent, "railscope_comm_completed_total").values()) == calls)


def calls_of(reports: list[RankReport]) -> int:
    return sum(entry.calls for report in reports for entry in report.operations)


def handed_over(agent: AgentProcess, fabric: Fabric) -> Counter[str]:
    """Bytes by host, over its rails."""
    handed: Counter[str] = Counter()
    for labels, value in agent.samples("railscope_rail_collective_bytes_total"):
        if labels.get("netns") in {host.namespace for host in fabric.hosts}:
            handed[labels["netns"]] += int(value)
    return handed


def test_a_communicator_that_is_not_ready_when_its_init_returns_is_confirmed_at_its_first_call(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with double.nccl.open("rb") as file, Elf.open(file.fileno()) as elf:
        points, layout = probe_points(elf, 0), Layouts.load().layout_of(elf)
    programs = NcclPrograms.load(ProgramSettings(write_events=False))
    try:
        links = programs.attach(str(double.nccl), points, 0, layout)
        try:
            with Job(two_hosts, tmp_path, double, blocking=False, environment=TELLING) as job:
                pids = job.ready()
                job.run()
                said = said_by_nccl(job)
        finally:
            links.close()
        told = programs.lifecycle_events.read()
    finally:
        programs.close()
    seen: Counter[Identity] = Counter()
    for pid in pids:
        mine = told[told["tgid"] == pid]
        assert [LifecycleKind(int(kind)) for kind in mine["kind"]] == [
            *(LifecycleKind.INIT, LifecycleKind.CONFIRMED, LifecycleKind.FINALIZE, LifecycleKind.DESTROY)
        ]
        init, confirmed = mine[0], mine[1]
        assert (int(init["result"]), int(init["confirmed"])) == (Result.IN_PROGRESS, 0)
        assert int(init["instance"]) == int(confirmed["instance"])
        identity = confirmed["identity"]
        seen[f"{int(identity['comm_hash']):016x}", str(identity["rank"]), str(identity["nranks"])] += 1
    assert seen == said


@pytest.mark.parametrize("pattern", ["mixed", "mixed-group"])
@pytest.mark.parametrize("blocking", [False, True])
def test_two_communicators_are_exact_whether_their_calls_block_or_stand_in_one_group(
    two_hosts: Fabric, double: Double, tmp_path: Path, pattern: str, blocking: bool
) -> None:
    iterations, size_bytes, communicators = 25, 40_000, 2
    with Job(
        two_hosts, tmp_path, double, pattern=pattern, iterations=iterations, size_bytes=size_bytes,
        communicators=communicators, blocking=blocking, hold=True, environment=TELLING,
    ) as job:  # fmt: skip
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--level", "all") as agent:
            job.start()
            reports = job.finished()
            calls = calls_of(reports)
            completes(agent, calls)
            completed = by_comm(agent, "railscope_comm_completed_total")
            enqueued = by_comm(agent, "railscope_comm_enqueued_total")
            inflight = by_comm(agent, "railscope_comm_inflight_seconds")
            payload = sum(value for _, value in agent.samples("railscope_collective_payload_bytes_total"))
            handed = handed_over(agent, two_hosts)
            seen = identities(agent)
            errors = {labels["error"]: value for labels, value in agent.samples("railscope_comm_errors_total") if value}
            job.release()
            job.wait()
        said = said_by_nccl(job)
    assert [report.verified for report in reports] == [True, True]
    assert (min(report.in_progress for report in reports) > 0) == (not blocking)
    assert seen == said
    assert len(seen) == 2 * communicators
    assert completed == enqueued
    assert set(enqueued.values()) == {calls / (2 * communicators)}
    assert inflight == dict.fromkeys(enqueued, 0.0)
    assert payload == sum(entry.payload_bytes for report in reports for entry in report.operations)
    # A round of each rank of two: AllReduce, AllGather, ReduceScatter, AlltoAll and one Send b each; rank 1 broadcasts
    # b, and rank 0 hands b to the Reduce (tests/nccl/test_levels_on_nccl.py).
    assert handed == {host.namespace: communicators * iterations * 6 * size_bytes for host in two_hosts.hosts}
    assert errors == {}


def test_calls_that_nccl_discards_are_complete_and_those_behind_one_in_flight_wait(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    with Job(
        two_hosts, tmp_path, double, pattern="empty", iterations=1_500, size_bytes=4_000, pace_us=1_000, hold=True
    ) as job:
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--level", "completion") as agent:
            job.start()
            agent.until(lambda: sum(by_comm(agent, "railscope_comm_completed_total").values()) > 100)
            os.kill(pids[1], signal.SIGSTOP)
            try:
                agent.until(lambda: any(age > 1 for age in by_comm(agent, "railscope_comm_inflight_seconds").values()))
                behind = {
                    rank: by_comm(agent, "railscope_comm_enqueued_total")[comm, rank] - completed
                    for (comm, rank), completed in by_comm(agent, "railscope_comm_completed_total").items()
                }
            finally:
                os.kill(pids[1], signal.SIGCONT)
            reports = job.finished()
            calls = calls_of(reports)
            completes(agent, calls)
            enqueued = by_comm(agent, "railscope_comm_enqueued_total")
            completed = by_comm(agent, "railscope_comm_completed_total")
            inflight = by_comm(agent, "railscope_comm_inflight_seconds")
            job.release()
            job.wait()
    assert [report.verified for report in reports] == [True, True]
    # The AllReduce, if it is what waits for the stopped rank; two Send and two Recv of nothing, which are messages all
    # the same; and the six collectives of nothing behind them, but not the six before.
    assert behind["0"] in (1 + 4 + 6, 4 + 6)
    assert completed == enqueued
    assert set(inflight.values()) == {0.0}


@pytest.mark.parametrize("shares", ["0", "1"])
def test_of_a_split_without_a_colour_a_shrink_and_a_grow_every_communicator_is_exact(
    four_hosts: Fabric, double: Double, tmp_path: Path, shares: str
) -> None:
    iterations = 20
    sharing = {"NCCL_COMM_SPLIT_SHARE_RESOURCES": shares, "NCCL_COMM_SHRINK_SHARE_RESOURCES": shares}
    with Job(
        four_hosts, tmp_path, double, pattern="families", iterations=iterations, size_bytes=40_000, hold=True,
        environment={**TELLING, **sharing},
    ) as job:  # fmt: skip
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--level", "completion") as agent:
            job.start()
            reports = job.finished()
            completes(agent, calls_of(reports))
            completed = by_comm(agent, "railscope_comm_completed_total")
            enqueued = by_comm(agent, "railscope_comm_enqueued_total")
            inflight = by_comm(agent, "railscope_comm_inflight_seconds")
            seen = identities(agent)
            events = {labels["event"]: value for labels, value in agent.samples("railscope_comm_events_total")}
            job.release()
            job.wait()
        said = said_by_nccl(job)
    assert [report.verified for report in reports] == [True] * 4
    assert seen == said
    ranks = Counter(comm for comm, _, _ in seen)
    # The whole, the two without the last rank, and the one that took it in again.
    assert sorted(ranks.values()) == [3, 3, 4, 4]
    assert completed == enqueued == {(comm, rank): iterations for comm, rank, _ in seen}
    assert inflight == dict.fromkeys(enqueued, 0.0)
    assert (events["split"], events["shrink"], events["grow"]) == (4, 3, 4)


def test_a_communicator_of_one_rank_shows_no_completion_and_disturbs_nobodys(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    iterations = 20
    with Job(
        two_hosts, tmp_path, double, pattern="families", iterations=iterations, size_bytes=40_000, blocking=False,
        hold=True, environment=TELLING,
    ) as job:  # fmt: skip
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--level", "completion") as agent:
            job.start()
            reports = job.finished()
            completes(agent, 4 * iterations)
            completed = by_comm(agent, "railscope_comm_completed_total")
            inflight = by_comm(agent, "railscope_comm_inflight_seconds")
            enqueued = by_comm(agent, "railscope_comm_enqueued_total")
            seen = identities(agent)
            job.release()
            job.wait()
        said = said_by_nccl(job)
    assert [report.verified for report in reports] == [True, True]
    assert seen == said
    alone = {(comm, rank) for comm, rank, nranks in seen if nranks == "1"}
    assert len(alone) == 2  # the split of rank 0 only, and the shrunk one
    assert enqueued == {(comm, rank): iterations for comm, rank, _ in seen}
    # Its calls are copies on the GPU, of which no network tells.
    assert set(completed) == set(inflight) == set(enqueued) - alone
    assert set(completed.values()) == {iterations}
    assert set(inflight.values()) == {0.0}
