"""Waits for the GPU that no NCCL call explains, as a host finds them.  Tables of the kernel and time are simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.hardware import NvlinkFacts
from railscope.agent.facts.rank_identity import RankGpu
from railscope.agent.facts.stall import Stall
from railscope.agent.node.collectives.communicators import Communicator
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.stalls.told_calls import MOST_OF_A_USER
from railscope.agent.node.targets.jobs import JobFacts
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.nccl.records.driver_calls import DriverKind
from tests.unit.driver_tables import SimulatedDriverCalls
from tests.unit.stall_world import AFTER_S, COMM_HASH, LOOKS_A_SECOND, RUNNING, STOPPED, WRITING, World

COMM = f"{COMM_HASH:016x}"
SECOND_NS = 1_000_000_000
STEPS = 50
"""Graphs that a rank launches and waits for in a second."""


class Inference:
    """Ranks of one host that launch graphs and wait for them, and make no call of NCCL; each from one thread."""

    def __init__(self, procfs: Path, *, ranks: int = 2, **settings: Any) -> None:
        self.calls = SimulatedDriverCalls()
        self.world = World(ranks=ranks, nranks=ranks, procfs=procfs, driver_calls=self.calls, **settings)
        self.pids = [rank.pid for rank in self.world.ranks]
        for pid in self.pids:
            (procfs / str(pid) / "task" / str(pid)).mkdir(parents=True)

    @property
    def now_ns(self) -> int:
        return self.world.clock.now_ns

    def serve(self, seconds: int, *ranks: int, steps: Mapping[int, int] | None = None) -> None:
        """These ranks, or all, do what they do, so many graphs a second."""
        for _ in range(seconds):
            for rank in ranks or range(len(self.pids)):
                pid = self.pids[rank]
                self.calls.work(self.now_ns, pid, pid, steps=(steps or {}).get(rank, STEPS))
            self.world.step(LOOKS_A_SECOND)

    def rest(self, seconds: float) -> None:
        """No rank does anything."""
        self.world.step(int(seconds * LOOKS_A_SECOND))

    def enter(self, rank: int, kind: DriverKind = DriverKind.STREAM_SYNC) -> None:
        self.calls.enter(self.now_ns, self.pids[rank], self.pids[rank], kind)

    def leave(self, rank: int) -> None:
        self.calls.leave(self.now_ns, self.pids[rank])

    def stalls(self) -> dict[str, Stall]:
        """By rank."""
        return {stall.rank: stall for stall in self.world.watch.current}


@pytest.fixture
def inference(tmp_path: Path) -> Inference:
    return Inference(tmp_path)


def the_weak_stall(inference: Inference, rank: int) -> Stall:
    """Of this rank alone."""
    assert inference.stalls().keys() == {str(rank)}
    stall = inference.stalls()[str(rank)]
    assert stall.diagnosis.cause is Cause.UNSEEN_WORK_STUCK
    assert (stall.comm, stall.pid, stall.strength) == (COMM, inference.pids[rank], "weak")
    return stall


def test_a_wait_that_does_not_return_while_a_peer_goes_on_is_told_of(inference: Inference) -> None:
    inference.serve(60)
    began_ns = inference.now_ns
    inference.enter(1)
    inference.serve(int(AFTER_S) - 2, 0)
    assert inference.stalls() == {}
    inference.serve(4, 0)
    stall = the_weak_stall(inference, 1)
    assert (stall.op, stall.since_ns, stall.nranks) == ("cuStreamSynchronize", began_ns, "2")
    assert stall.diagnosis.evidence[0] == f"thread {stall.pid} has not returned from cuStreamSynchronize"
    assert stall.diagnosis.evidence[-1] == f"rank 0 (process {inference.pids[0]}) goes on: its calls return"
    assert [one.instance for _, one in inference.world.begun] == [stall.instance]
    inference.leave(1)
    inference.serve(2)
    assert inference.stalls() == {}
    (ended,) = inference.world.watch.facts().ended
    assert (ended.op, ended.diagnosis.cause) == ("cuStreamSynchronize", Cause.UNSEEN_WORK_STUCK)


def test_where_all_wait_and_launched_as_many_graphs_nobody_is_named(inference: Inference) -> None:
    inference.serve(60)
    for rank in (0, 1):
        inference.enter(rank, DriverKind.EVENT_SYNC)
    inference.rest(AFTER_S + 2)
    stalls = inference.stalls()
    assert stalls.keys() == {"0", "1"}
    for stall in stalls.values():
        assert (stall.diagnosis.cause, stall.diagnosis.blamed_rank) == (Cause.UNSEEN_WORK_STUCK, None)
        assert stall.diagnosis.evidence[1:] == ("no call returns in any of the 2 processes of its job on this host",)
        assert stall.confidence == "low"


def test_whoever_launched_fewer_graphs_than_before_is_named(inference: Inference) -> None:
    # Probes came when one of them had launched three graphs.
    inference.calls.work(inference.now_ns, inference.pids[0], inference.pids[0], steps=3)
    inference.serve(60)
    inference.enter(0, DriverKind.GRAPH_LAUNCH)
    inference.leave(0)
    inference.enter(0)
    inference.rest(AFTER_S + 2)
    stall = the_weak_stall(inference, 0)
    assert stall.diagnosis.blamed_rank == 1
    behind = f"rank 1 (process {inference.pids[1]}) launched 1 graph fewer than another process"
    assert stall.diagnosis.evidence[1].startswith(behind)


def test_counts_that_were_never_alike_are_not_compared(inference: Inference) -> None:
    inference.serve(60, steps={1: STEPS + 7})
    inference.enter(0)
    inference.rest(AFTER_S + 2)
    assert the_weak_stall(inference, 0).diagnosis.blamed_rank is None


def test_a_launch_that_does_not_return_is_told_of_too(inference: Inference) -> None:
    inference.serve(10)
    inference.enter(1, DriverKind.GRAPH_LAUNCH)
    inference.serve(int(AFTER_S) + 2, 0)
    assert the_weak_stall(inference, 1).op == "cuGraphLaunch"


def nvlink(gpu: int, link: str, count: int | None) -> NvlinkFacts:
    return NvlinkFacts(str(gpu), link, True, count, count, "data", (), None, "", "switch")


@pytest.mark.parametrize(
    ("carried", "still"),
    [
        (lambda _now_ns: [nvlink(1, "0", 7), nvlink(1, "1", 9)], True),
        (lambda now_ns: [nvlink(1, "0", 7), nvlink(1, "1", now_ns)], False),
        (lambda _now_ns: [nvlink(1, "all", 7)], True),
        (lambda _now_ns: [nvlink(1, "all", None)], False),
        (lambda _now_ns: [nvlink(0, "all", 7)], False),
    ],
    ids=["still", "one of them moves", "counted together", "not counted", "of another GPU"],
)
def test_whether_nvlinks_of_its_gpu_carry_anything_is_said_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carried: Callable[[int], list[NvlinkFacts]], still: bool
) -> None:
    inference = Inference(tmp_path, nvlinks=lambda: found())

    def found() -> list[NvlinkFacts]:
        return carried(inference.now_ns)

    known = inference.world.watch._known
    communicator = known.communicator

    def with_gpu(instance: int) -> Communicator | None:
        found = communicator(instance)
        return None if found is None else replace(found, on=RankGpu(str(found.rank)))

    monkeypatch.setattr(known, "communicator", with_gpu)
    inference.serve(20)
    inference.enter(1)
    inference.serve(int(AFTER_S) + 10, 0)
    said = "NVLinks of its GPU 1 carry nothing" in the_weak_stall(inference, 1).diagnosis.evidence
    assert said is still


# What is no fault


def test_ranks_that_wait_for_data_or_requests_or_a_compiler_are_in_no_call_and_nothing_is_said(
    inference: Inference,
) -> None:
    inference.serve(20)
    inference.rest(300)
    inference.serve(20)
    # One of them compiles: the other launches what it has, and waits for nothing on the GPU.
    inference.serve(300, 0)
    inference.serve(20)
    assert inference.world.begun == []


def test_ranks_that_all_become_slower_are_told_of_at_most_until_the_first_wait_has_returned(
    inference: Inference,
) -> None:
    inference.serve(20)
    for seconds in (1, 5, 30, 100, 100, 500):
        for _ in range(3):
            for rank in (0, 1):
                inference.enter(rank)
            inference.rest(seconds)
            for rank in (0, 1):
                inference.leave(rank)
            inference.serve(1)
    assert inference.world.begun == []
    for rank in (0, 1):
        inference.enter(rank)
    # Eight times the longest so far.
    inference.rest(3990)
    assert inference.stalls() == {}
    inference.rest(20)
    assert inference.stalls().keys() == {"0", "1"}


def test_a_first_wait_may_take_long(inference: Inference) -> None:
    for rank in (0, 1):
        inference.enter(rank)
    inference.rest(8 * AFTER_S - 5)
    assert inference.stalls() == {}
    inference.rest(10)
    assert inference.stalls().keys() == {"0", "1"}


def test_a_wait_no_longer_than_one_before_is_nothing_though_peers_go_on(inference: Inference) -> None:
    for seconds, told in ((20, False), (80, True), (70, False), (79, False)):
        inference.serve(5)
        begun = len(inference.world.begun)
        inference.enter(1)
        inference.serve(seconds, 0)
        inference.leave(1)
        inference.serve(1)
        assert (len(inference.world.begun) > begun) is told


def test_a_process_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    inference = Inference(tmp_path, ranks=1)
    inference.serve(20)
    inference.enter(0)
    inference.rest(600)
    assert inference.world.begun == []


def test_a_wait_for_an_operation_of_nccl_is_that_operations(inference: Inference) -> None:
    inference.serve(20)
    inference.world.ranks[1].begin()
    inference.enter(1)
    inference.serve(int(AFTER_S) * 3, 0)
    (stall,) = inference.world.watch.current
    assert (stall.op, stall.diagnosis.cause == Cause.UNSEEN_WORK_STUCK) == ("AllReduce", False)


def test_a_wait_for_a_peer_that_writes_is_none_until_it_has_not_written_for_long(inference: Inference) -> None:
    inference.serve(20)
    inference.enter(0)
    inference.rest(10)
    inference.world.ranks[1].process = WRITING
    inference.rest(200)
    inference.world.ranks[1].process = RUNNING
    inference.rest(AFTER_S - 5)
    assert inference.world.begun == []
    inference.rest(10)
    the_weak_stall(inference, 0)


def test_a_peer_that_is_stopped_is_to_blame_for_the_wait(inference: Inference) -> None:
    inference.serve(20)
    inference.world.ranks[1].process = STOPPED
    inference.enter(0)
    inference.rest(AFTER_S + 2)
    stall = inference.stalls()["0"]
    assert (stall.diagnosis.cause, stall.diagnosis.blamed_rank) == (Cause.PROCESS_STOPPED, 1)
    assert stall.diagnosis.evidence[-1] == f"thread {stall.pid} has not returned from cuStreamSynchronize"


# Whose processes belong together


def described(monkeypatch: pytest.MonkeyPatch, inference: Inference, **changes: list[Any]) -> None:
    """Processes of which this is known, one after the other."""
    known = inference.world.watch._known
    before = known.process

    def process(pid: int) -> ObservedProcess | None:
        found = before(pid)
        at = inference.pids.index(pid)
        return None if found is None else replace(found, **{name: values[at] for name, values in changes.items()})

    monkeypatch.setattr(known, "process", process)


@pytest.mark.parametrize(("jobs", "told"), [(("7", "7"), True), (("7", "8"), False), (("", ""), False)])
def test_processes_of_one_job_belong_together_without_a_communicator_in_common(
    inference: Inference, monkeypatch: pytest.MonkeyPatch, jobs: tuple[str, str], told: bool
) -> None:
    inference.world.ranks[1].comm_hash += 1
    described(monkeypatch, inference, job=[JobFacts(job=job) for job in jobs])
    inference.serve(20)
    inference.enter(1)
    inference.serve(int(AFTER_S) + 2, 0)
    assert bool(inference.stalls()) is told


def test_whoever_says_anothers_names_is_not_of_his_job(inference: Inference, monkeypatch: pytest.MonkeyPatch) -> None:
    described(monkeypatch, inference, tenant=[Tenant(1000), Tenant(1001)], job=[JobFacts(job="7")] * 2)
    inference.serve(20)
    inference.enter(1)
    inference.serve(int(AFTER_S) + 2, 0)
    assert inference.stalls() == {}


# What is kept


def test_threads_that_have_ended_or_rest_are_taken_out_and_others_stay(inference: Inference) -> None:
    inference.serve(2)
    inference.calls.enter(inference.now_ns, inference.pids[1], 77, DriverKind.STREAM_SYNC)
    inference.serve(int(AFTER_S) + 2, 0)
    assert 77 not in inference.calls.threads, "it ended inside its call"
    assert inference.world.begun == []
    inference.rest(61)
    assert inference.calls.threads == {}
    inference.serve(1)
    assert inference.calls.threads.keys() == set(inference.pids)


def test_of_whoever_has_thousands_of_threads_inside_calls_one_of_each_process_is_told(
    inference: Inference, tmp_path: Path
) -> None:
    inference.serve(2)
    for tid in range(10_000, 14_000):
        (tmp_path / str(inference.pids[1]) / "task" / str(tid)).mkdir()
        inference.calls.enter(inference.now_ns, inference.pids[1], tid, DriverKind.STREAM_SYNC)
    inference.serve(int(AFTER_S) + 2, 0)
    assert the_weak_stall(inference, 1).pid == inference.pids[1]
    assert len(inference.world.watch.current) <= MOST_OF_A_USER


def test_what_each_process_did_is_told(inference: Inference) -> None:
    inference.serve(3)
    inference.enter(1, DriverKind.CONTEXT_SYNC)
    inference.rest(5)
    first, second = inference.world.watch.facts().driver_calls
    assert (first.pid, first.graph_launches, first.inside) == (inference.pids[0], 3 * STEPS, "")
    assert (second.pid, second.graph_launches, second.inside) == (inference.pids[1], 3 * STEPS, "cuCtxSynchronize")
    assert second.inside_seconds == pytest.approx(5, abs=0.5)


def test_nothing_is_read_while_nothing_is_followed(inference: Inference) -> None:
    inference.serve(3)
    inference.calls.follows = False
    inference.rest(2)
    reads = inference.calls.reads
    inference.enter(1)
    inference.rest(600)
    assert inference.calls.reads == reads
    assert inference.world.watch.facts().driver_calls == ()
    assert inference.world.begun == []
