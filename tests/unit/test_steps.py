"""Which jobs' steps are told, under which rank, and what becomes of them.  The events are simulated."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from railscope.agent.facts.rank_identity import RankKey
from railscope.agent.facts.snapshot import JobSteps
from railscope.agent.node.collectives.communicators import Communicator
from railscope.agent.node.collectives.slow_ranks import RankWait
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.steps.references import MOST_JOBS, find_references
from railscope.agent.node.steps.steps import BOUNDS, Steps
from railscope.agent.node.targets.jobs import JobFacts
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.records.calls import CALL_EVENT
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit.call_streams import OPS, Call, Stream, ddp, gpt, inference
from tests.unit.test_step_stream import Inline

USER = Tenant(1000)


@dataclass(frozen=True)
class Nothing:
    """What is seen of ranks besides their calls."""

    waits: Mapping[RankKey, RankWait] = field(default_factory=dict)
    stalled_since_ns: Mapping[int, int] = field(default_factory=dict)
    writing_since_ns: Mapping[int, int] = field(default_factory=dict)


def process(pid: int, *, job: str = "", tenant: Tenant = USER) -> ObservedProcess:
    return ObservedProcess(ProcessIdentity(pid, 1), None, JobFacts(job=job), "", "2.27.3", None, tenant=tenant)


def end(instance: int, pid: int, comm: int, rank: int, nranks: int = 8, gpu: int = 0) -> Communicator:
    return Communicator(instance, pid, 100 + instance, comm, rank, nranks=nranks, cuda_dev=gpu)


def events(calls: Iterable[Call], *, first: int = 10) -> Records:
    """Calls on communicators `first`, `first` + 1, …, numbered in each."""
    made = sorted(calls)
    records = np.zeros(len(made), CALL_EVENT)
    records["time_ns"] = [round(at * 1e9) for at, *_ in made]
    records["instance"] = [first + one[1] for one in made]
    records["op"] = [OPS.index(one[2].partition(":")[0]) for one in made]
    records["peer"] = [int(one[2].partition(":")[2] or -1) for one in made]
    records["payload_bytes"] = [one[3] for one in made]
    records["data_type"] = 7
    numbers: Counter[int] = Counter()
    for at, (_, communicator, _, _) in enumerate(made):
        numbers[communicator] += 1
        records["sequence"][at] = numbers[communicator]
    return records


def watched(steps: Steps, records: Records, batch: int = 100) -> None:
    for at in range(0, len(records), batch):
        part = records[at : at + batch]
        steps.record(part, np.unique(part["instance"]).tolist())
        steps.facts()


def of_one(facts: tuple[JobSteps, ...]) -> JobSteps:
    (one,) = facts
    return one


def test_steps_are_told_of_the_lowest_rank_under_its_largest_communicator() -> None:
    processes = {pid: process(pid) for pid in (100, 101)}
    ends = [end(10 + 10 * at + comm, 100 + at, 0xA0 + comm, at, nranks=8 >> comm) for at in (1, 0) for comm in range(4)]
    steps = Steps(processes, frozenset, Inline(), Nothing())
    steps.update(0, ends, 1)
    for at in (1, 0):
        made = Stream(random.Random(at))
        gpt(made, 200)
        watched(steps, events(made.calls, first=10 + 10 * at))
    job = of_one(steps.facts())
    assert (job.comm, job.rank) == (f"{0xA0:016x}", "0")
    assert 197 <= job.steps <= 199
    assert sum(job.lengths.counts) == job.steps
    assert job.lengths.sum == pytest.approx((made.begins[job.steps] - made.begins[0]), rel=0.01)
    assert 0.04 * job.steps < job.silent_seconds < 0.06 * job.steps
    assert [bound for bound, count in zip(BOUNDS, job.lengths.counts, strict=False) if count] == [0.25, 0.5]


def test_an_interrupted_step_is_counted_and_its_length_is_not() -> None:
    steps = Steps({100: process(100)}, frozenset, Inline(), Nothing())
    steps.update(0, [end(10, 100, 0xA0, 0)], 1)
    made = Stream(random.Random(2))
    for _ in range(4):
        ddp(made, 100)
        made.now += 60.0
        for _ in range(4):
            made.call(0, "AllGather", 8 << 20)
    watched(steps, events(made.calls))
    job = of_one(steps.facts())
    assert 396 <= job.steps <= 399
    assert job.steps - 4 <= sum(job.lengths.counts) < job.steps
    assert job.lengths.sum is not None
    assert job.lengths.sum < 400 * 0.25


def test_of_requests_nothing_is_told() -> None:
    steps = Steps({100: process(100)}, frozenset, Inline(), Nothing())
    steps.update(0, [end(10, 100, 0xA0, 0)], 1)
    made = Stream(random.Random(3))
    inference(made, 1000)
    watched(steps, events(made.calls))
    assert steps.facts() == ()


def test_missing_numbers_cost_their_step_and_no_other() -> None:
    steps = Steps({100: process(100)}, frozenset, Inline(), Nothing())
    steps.update(0, [end(10 + comm, 100, 0xA0 + comm, 0) for comm in range(4)], 1)
    made = Stream(random.Random(4))
    gpt(made, 200)
    records = events(made.calls)
    watched(steps, records[:30_000])
    before = of_one(steps.facts()).steps
    watched(steps, records[30_010:])
    job = of_one(steps.facts())
    assert before > 100
    assert 195 <= job.steps <= 197
    assert sum(job.lengths.counts) == job.steps


def test_calls_that_met_no_probe_cost_their_step_though_numbers_go_on() -> None:
    steps = Steps({100: process(100)}, frozenset, Inline(), Nothing())
    steps.update(0, [end(10 + comm, 100, 0xA0 + comm, 0) for comm in range(4)], 1)
    made = Stream(random.Random(4))
    gpt(made, 200)
    records = events(made.calls)
    watched(steps, records[:30_000])
    unseen, later = records[30_000:30_010], records[30_010:].copy()
    for instance in np.unique(unseen["instance"]).tolist():
        later["sequence"][later["instance"] == instance] -= (unseen["instance"] == instance).sum().astype("u4")
    steps.miss_calls()
    watched(steps, later)
    job = of_one(steps.facts())
    assert 195 <= job.steps <= 197


def test_captured_collectives_make_steps_unknown() -> None:
    replays: set[int] = set()
    steps = Steps({100: process(100)}, lambda: replays, Inline(), Nothing())
    steps.update(0, [end(10, 100, 0xA0, 0)], 1)
    made = Stream(random.Random(5))
    ddp(made, 200)
    records = events(made.calls)
    replays.add(10)
    watched(steps, records)
    assert steps.facts() == ()


def test_what_ended_stays_for_a_while() -> None:
    processes = {100: process(100)}
    steps = Steps(processes, frozenset, Inline(), Nothing())
    ends = [end(10, 100, 0xA0, 0)]
    steps.update(0, ends, 1)
    made = Stream(random.Random(6))
    ddp(made, 150)
    watched(steps, events(made.calls))
    counted = of_one(steps.facts())
    steps.update(1000, [replace(ends[0], ended_ns=999)], 2)
    assert steps.facts() == (counted,)
    assert [job.stream.kept for _, job in steps._ended.items()] == [0], "its calls take no memory"
    steps.forget(1000)
    assert steps.facts() == (counted,)
    steps.forget(1001)
    assert steps.facts() == ()


def test_a_life_without_a_step_hands_on_what_the_lives_before_it_took() -> None:
    processes = {pid: process(pid, job="4711") for pid in (100, 101, 102)}
    steps = Steps(processes, frozenset, Inline(), Nothing())
    lives = [replace(end(10 * at, 99 + at, 0xA0 + at, 0), first_ns=at * 1_000_000_000_000) for at in (1, 2, 3)]

    def made(first: int, after: float) -> Records:
        stream = Stream(random.Random(first))
        stream.now = after
        ddp(stream, 150)
        return events(stream.calls, first=first)

    steps.update(1_000_000_000_000, lives[:1], 1)
    watched(steps, made(10, 1_010.0))
    steps.update(1_900_000_000_000, [replace(lives[0], ended_ns=1)], 2)
    (before,) = steps.facts()
    steps.update(2_000_000_000_000, lives[1:2], 3)
    steps.update(2_900_000_000_000, [replace(lives[1], ended_ns=1)], 4)
    steps.update(3_000_000_000_000, lives[2:], 5)
    watched(steps, made(30, 3_010.0))
    steps.update(3_900_000_000_000, lives[2:], 5)
    (now,) = [one for one in steps.facts() if one.comm == lives[2].name]
    assert now.spent["start"] == before.spent["start"]
    assert now.spent["restart"] == pytest.approx(3_010 - 1_900, abs=1)
    assert sum(now.spent.values()) == pytest.approx(2_900)


def test_processes_of_one_job_are_those_that_share_a_communicator_or_are_told_so() -> None:
    processes = {
        **{pid: process(pid) for pid in (1, 2, 3)},
        **{pid: process(pid, job="7") for pid in (4, 5)},
        6: process(6, tenant=Tenant(2000)),
    }
    ends = [
        *(end(1, 1, 0xA, 3), end(2, 2, 0xA, 2), end(3, 2, 0xB, 0, nranks=2), end(4, 3, 0xB, 1, nranks=2)),
        *(end(5, 4, 0xC, 0), end(6, 5, 0xD, 1), end(7, 6, 0xA, 0)),
    ]
    found = {one.pid: one.peers for one in find_references(ends, processes, ())}
    assert found == {3: {1, 2, 3}, 4: {4, 5}, 6: {6}}
    kept = {one.pid for one in find_references(ends, processes, {1, 5})}
    assert kept == {1, 5, 6}


def test_one_gpu_stands_for_a_process_with_several() -> None:
    ends = [end(at, 1, 0xA, at, gpu=at) for at in range(8)]
    (found,) = find_references(ends, {1: process(1)}, ())
    assert found.instances == {0}


def test_a_tenant_with_very_many_jobs_takes_no_place_of_others() -> None:
    processes = {pid: process(pid, tenant=USER if pid < 500 else Tenant(2000)) for pid in range(1, 503)}
    ends = [end(pid, pid, pid, 0) for pid in processes]
    found = find_references(ends, processes, ())
    assert len(found) == MOST_JOBS
    assert {500, 501, 502} <= {one.pid for one in found}
