"""What leaves the kernel's tables stays in the totals, once and under the name of who did it (simulated tables)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from railscope.agent.facts.hardware import GpuFacts
from railscope.agent.facts.snapshot import CommunicatorFacts, NodeCollectives, NodeTimes
from railscope.agent.node.collectives.collectives import Collectives
from railscope.agent.node.collectives.sequences import Sequences
from railscope.agent.node.completion.completion import Completion
from railscope.agent.node.inspection.inspection import InProcess
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.agent.node.targets.jobs import JobFacts
from railscope.agent.node.targets.memory import ProcessMemory
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.nccl.comm_hash import two_lane_hash
from railscope.probes.nccl.functions.internals import Level
from railscope.probes.nccl.records.calls import LifecycleKind
from railscope.probes.processes.namespaces import NetworkNamespace
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit import level_programs
from tests.unit.collectives_kernel import SimulatedPrograms

SECOND_NS = 1_000_000_000
NETNS = NetworkNamespace(7, Path("/proc/1/ns/net"), own=True)


class Node:
    """Collectives beside a simulated kernel."""

    def __init__(self) -> None:
        self.kernel = SimulatedPrograms()
        self.processes: dict[int, ObservedProcess] = {}
        self.collectives = Collectives(self.kernel, self.processes, 0)

    def begin(self, tgid: int, start_ticks: int = 1, job: str = "") -> None:
        identity = ProcessIdentity(tgid, start_ticks)
        self.processes[tgid] = ObservedProcess(identity, NETNS, JobFacts(job=job), "", "2.27.7")

    def end(self, tgid: int, at_ns: int) -> None:
        self.processes[tgid] = replace(self.processes[tgid], ended_ns=at_ns)
        self.collectives.end_processes({tgid}, at_ns)

    def settle(self, now_ns: int) -> None:
        self.collectives.read()
        self.collectives.archive_ended(now_ns)

    def facts(self) -> NodeCollectives:
        return self.collectives.facts(self.collectives.read(), NodeTimes(), now_ns=0, realtime_offset_ns=0)

    def totals(self) -> dict[str, tuple[int, int]]:
        """Calls and payload bytes by GPU."""
        return {total.gpu: (total.calls, total.payload_bytes) for total in self.facts().totals}

    def communicators(self) -> dict[str, CommunicatorFacts]:
        return {facts.identity.comm: facts for facts in self.facts().communicators}

    def expected_bytes(self) -> int:
        return sum(expected.transmit.spread_bytes for expected in self.collectives.expected(self.collectives.read()))


@pytest.fixture
def node() -> Node:
    return Node()


def test_what_an_ended_process_did_leaves_the_kernel_and_stays_in_every_total(node: Node) -> None:
    node.begin(10, job="a")
    node.kernel.communicator(10, 1)
    node.kernel.call(10, 1, 5)
    before, expected = node.totals(), node.expected_bytes()
    assert before == {"0": (5, 5 * 1024)}
    assert expected > 0
    node.end(10, 2 * SECOND_NS)
    node.settle(2 * SECOND_NS)
    assert not node.kernel.aggregates.rows
    assert not node.kernel.communicators.rows
    assert not node.processes
    assert node.totals() == before
    assert node.expected_bytes() == expected
    facts = node.communicators()[f"{1:016x}"]
    assert (facts.enqueued, facts.alive, facts.identity.job) == (5, False, (("job", "a"),))


def test_what_the_collectives_of_a_living_communicator_were_is_a_fact_and_ranks_are_compared_by_it(node: Node) -> None:
    for tgid in (10, 11):
        node.begin(tgid)
        node.kernel.communicator(tgid, tgid, comm_hash=7, rank=tgid - 10)
        node.kernel.event(tgid, tgid, LifecycleKind.INIT)
        node.kernel.call(tgid, tgid, 64)
        node.kernel.shapes.make(tgid, times=64)
        for row in node.kernel.communicators.rows.values():
            row["sequence"] = 65
    node.settle(SECOND_NS)
    assert node.collectives.disagreement(f"{7:016x}") is None
    for tgid, payload in ((10, 8), (11, 16)):
        node.kernel.shapes.make(tgid, payload=payload)
    node.collectives.compare_ranks(3600 * SECOND_NS)
    told = [one.signature for one in node.facts().communicators]
    assert [one is None for one in told] == [False, True]
    found = node.collectives.disagreement(f"{7:016x}")
    assert found is not None
    assert found.number == 65
    last = node.collectives.last_collectives(11)
    assert last is not None
    assert last.shapes[-1] == "AllReduce of 16 bytes float32"
    node.end(11, 2 * SECOND_NS)
    assert node.collectives.disagreement(f"{7:016x}") == found


def make_one(node: Node, tgid: int, rank: int, *payloads: int, first_ns: int = SECOND_NS) -> None:
    """A process with a rank of communicator 7 that made these collectives."""
    node.begin(tgid)
    node.kernel.communicator(tgid, tgid, comm_hash=7, rank=rank)
    node.kernel.event(tgid, tgid, LifecycleKind.INIT, time_ns=first_ns)
    for payload in payloads:
        node.kernel.call(tgid, tgid, 1, bytes_each=payload)
        node.kernel.shapes.make(tgid, payload=payload)
    for row in node.kernel.communicators.rows.values():
        row["sequence"] = len(payloads)


def test_a_rank_that_left_is_compared_with_those_that_stay_before_and_after_its_counts_are_put_away(node: Node) -> None:
    for tgid, last in ((10, 8), (11, 16)):
        make_one(node, tgid, tgid - 10, 4, last)
    node.settle(SECOND_NS)
    node.end(11, 2 * SECOND_NS)
    found = node.collectives.disagreement(f"{7:016x}")
    assert found is not None
    assert found.sentence == (
        "collective 2 is AllReduce of 8 bytes float32 on rank 0, but AllReduce of 16 bytes float32 on rank 1"
    )
    node.settle(60 * SECOND_NS)
    assert node.collectives.disagreement(f"{7:016x}") == found


def test_a_later_job_s_ranks_are_not_compared_with_those_that_had_left(node: Node) -> None:
    make_one(node, 11, 1, 4, 16)
    node.settle(SECOND_NS)
    node.end(11, 2 * SECOND_NS)
    node.settle(3 * SECOND_NS)
    make_one(node, 12, 0, 4, 8, first_ns=4 * SECOND_NS)
    node.settle(5 * SECOND_NS)
    assert node.collectives.disagreement(f"{7:016x}") is None


def test_of_one_host_the_ranks_that_left_tell_once_what_they_called_last(node: Node) -> None:
    for tgid, last in ((10, 8), (11, 8), (12, 16)):
        make_one(node, tgid, tgid - 10, 4, last)
    node.settle(SECOND_NS)
    for tgid in (10, 11, 12):
        node.end(tgid, 2 * SECOND_NS)
    node.settle(60 * SECOND_NS)
    told = {one.identity.rank: one.last for one in node.facts().communicators}
    shown = {rank: last.shapes[-1] for rank, last in told.items() if last is not None}
    assert shown == {"0": "AllReduce of 8 bytes float32", "2": "AllReduce of 16 bytes float32"}


@pytest.mark.parametrize(("nvml_dev", "gpu"), [(5, "5"), (-1, "unknown")])
def test_a_gpu_is_numbered_as_on_the_host_not_as_the_process_sees_it(node: Node, nvml_dev: int, gpu: str) -> None:
    """With CUDA_VISIBLE_DEVICES=5 a process calls it 0."""
    node.begin(10)
    node.kernel.communicator(10, 1, cuda_dev=0, nvml_dev=nvml_dev)
    node.kernel.call(10, 1, 3)
    assert set(node.totals()) == {gpu}


def test_a_container_s_gpu_0_is_the_host_s_fifth_once_nvml_lists_it(node: Node) -> None:
    node.begin(10)
    node.processes[10] = replace(node.processes[10], confined=True)
    node.kernel.communicator(10, 1, cuda_dev=0, nvml_dev=0, bus_id=0x9B000)
    node.kernel.call(10, 1, 3)
    assert set(node.totals()) == {"unknown"}
    before = node.communicators()[f"{1:016x}"].identity
    assert (before.gpu, before.gpu_uuid, before.pci_bus_id) == ("unknown", "unknown", "00000000:9B:00.0")
    fifth = GpuFacts("5", "GPU-5", "0000:9b:00.0", "H200", "0", "completed", (), None, None, None)
    node.collectives.set_host_gpus((fifth,))
    assert node.totals() == {"5": (3, 3 * 1024)}
    identity = node.communicators()[f"{1:016x}"].identity
    assert (identity.gpu, identity.gpu_uuid, identity.pci_bus_id) == ("5", "GPU-5", "00000000:9B:00.0")


def test_the_gpu_of_a_process_that_becomes_known_after_its_communicator_is_found_then(node: Node) -> None:
    node.kernel.communicator(10, 1, nvml_dev=3)
    node.kernel.call(10, 1, 3)
    assert set(node.totals()) == {"unknown"}
    node.begin(10)
    node.collectives.process_added()
    assert set(node.totals()) == {"3"}


def test_a_process_that_begins_to_use_nccl_is_told_of_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    node.begin(10)
    node.begin(11)  # only maps it
    for instance in (1, 2):
        node.kernel.communicator(10, instance)
        node.collectives.read()
        assert not node.collectives.pop_unknown_pids()
    said = ["process 10 uses NCCL: communicator 0000000000000001, rank 0 of 2"]
    assert [record.getMessage() for record in caplog.records] == said
    node.end(10, SECOND_NS)
    node.settle(2 * SECOND_NS)
    node.begin(10, start_ticks=2)
    node.kernel.event(10, 3, LifecycleKind.INIT, nranks=4, rank=1)
    node.collectives.read_lifecycle_events()
    assert not node.collectives.pop_unknown_pids()
    said.append("process 10 uses NCCL: communicator unknown, rank 1 of 4")
    assert [record.getMessage() for record in caplog.records] == said


def test_many_that_end_together_are_taken_out_with_one_reading(node: Node) -> None:
    for tgid in range(10, 30):
        node.begin(tgid)
        node.kernel.communicator(tgid, tgid)
        node.kernel.call(tgid, tgid)
    for tgid in range(10, 30):
        node.end(tgid, SECOND_NS)
    node.settle(2 * SECOND_NS)
    assert node.kernel.aggregates.reads == 1
    assert node.kernel.communicators.reads == 1
    assert not node.kernel.aggregates.rows


def test_one_reading_of_the_communicators_serves_all_who_look_at_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "10").mkdir()
    (tmp_path / "10" / "mem").touch()
    node = Node()
    completion = Completion(level_programs.SimulatedPrograms(), Level.COUNTS, inspection=InProcess())
    libraries: list[int] = []
    monkeypatch.setattr(completion.levels, "error_layout_of", libraries.append)
    monkeypatch.setattr(completion.levels, "sequence_layout_of", libraries.append)
    node.collectives = Collectives(
        node.kernel,
        node.processes,
        0,
        completion,
        memory=ProcessMemory(tmp_path, InProcess(), lambda _pid: UNKNOWN_TENANT),
    )
    node.begin(10)
    node.kernel.communicator(10, 1)
    next(iter(node.kernel.communicators.rows.values()))["library"] = 3
    node.collectives.read()
    node.collectives.read_stored_errors(SECOND_NS)
    node.collectives.read_positions(SECOND_NS)
    assert node.kernel.communicators.reads == 1
    assert libraries == [3, 3]


@pytest.mark.parametrize(
    ("entered_before", "lost"), [(0, 1000), (970, 30), (1010, 0)], ids=["no earlier agent", "dark", "not all compared"]
)
def test_calls_that_an_earlier_agent_counted_were_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entered_before: int, lost: int
) -> None:
    node = Node()
    monkeypatch.setattr(Sequences, "missed", lambda _self, _instance: 1000)
    node.collectives = Collectives(
        node.kernel,
        node.processes,
        0,
        Completion(level_programs.SimulatedPrograms(), Level.COUNTS, inspection=InProcess()),
        memory=ProcessMemory(tmp_path, InProcess(), lambda _pid: UNKNOWN_TENANT),
        entered_before=lambda rank, pid: entered_before if (rank, pid) == ((f"{1:016x}", "0"), 10) else 0,
    )
    node.begin(10)
    node.kernel.communicator(10, 1)
    node.collectives.read()
    assert node.collectives.events_lost()["before_attachment"] == lost


def test_before_the_kernel_forgets_what_a_communicator_did_somebody_may_learn_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node()
    done: list[object] = []
    programs = level_programs.SimulatedPrograms()
    monkeypatch.setattr(level_programs.SimulatedPrograms, "forget_communicators", lambda _, ended: done.append(ended))
    node.collectives = Collectives(
        node.kernel,
        node.processes,
        0,
        Completion(programs, Level.COMPLETION, inspection=InProcess()),
        before_forgetting=lambda: done.append("learnt"),
    )
    node.begin(10)
    node.kernel.communicator(10, 1)
    node.settle(SECOND_NS)
    assert done == []
    node.end(10, SECOND_NS)
    node.settle(2 * SECOND_NS)
    assert done == ["learnt", {1}]


def test_a_call_between_reading_and_taking_out_is_counted(node: Node) -> None:
    node.begin(10)
    node.kernel.communicator(10, 1)
    node.kernel.call(10, 1, 5)
    node.kernel.destroy(1, SECOND_NS)
    node.collectives.read()
    node.kernel.call(10, 1, 1)
    node.collectives.archive_ended(3 * SECOND_NS)
    assert not node.kernel.aggregates.rows
    assert node.totals() == {"0": (6, 6 * 1024)}
    assert node.communicators()[f"{1:016x}"].enqueued == 6


def test_a_call_on_a_communicator_that_was_put_away_is_added_to_it(node: Node) -> None:
    node.begin(10)
    node.kernel.communicator(10, 1)
    node.kernel.call(10, 1, 5)
    node.kernel.destroy(1, SECOND_NS)
    node.settle(3 * SECOND_NS)
    node.kernel.call(10, 1, 2)
    assert node.totals() == {"0": (7, 7 * 1024)}
    node.settle(4 * SECOND_NS)
    assert node.totals() == {"0": (7, 7 * 1024)}
    assert node.communicators()[f"{1:016x}"].enqueued == 7


def test_a_communicator_destroyed_just_now_stays_in_the_kernel_for_a_while(node: Node) -> None:
    node.begin(10)
    node.kernel.communicator(10, 1)
    node.kernel.destroy(1, SECOND_NS)
    node.settle(SECOND_NS + SECOND_NS // 10)
    assert node.kernel.communicators.rows
    node.settle(2 * SECOND_NS)
    assert not node.kernel.communicators.rows


def test_whose_end_of_a_communicator_has_ended_is_known_until_it_is_forgotten(node: Node) -> None:
    name = f"{5:016x}"
    for rank, tgid in enumerate((10, 11, 12)):
        node.begin(tgid)
        node.kernel.communicator(tgid, tgid, comm_hash=5, rank=rank)
    node.collectives.read()
    assert node.collectives.ended_ranks(name) == set()
    node.kernel.destroy(10, SECOND_NS)
    node.end(11, SECOND_NS)
    node.settle(3 * SECOND_NS)
    assert node.collectives.ended_ranks(name) == {"0", "1"}
    assert node.collectives.ended_ranks("unknown") == node.collectives.ended_ranks(f"{6:016x}") == set()
    node.collectives.forget(5 * SECOND_NS, 100)
    assert node.collectives.ended_ranks(name) == set()


def test_a_rank_of_a_job_that_fixes_the_id_has_not_ended_with_that_of_the_job_before(node: Node) -> None:
    for tgid in (10, 11):
        node.begin(tgid)
        node.kernel.communicator(tgid, tgid, comm_hash=5, rank=1)
    node.kernel.destroy(10, SECOND_NS)
    node.settle(3 * SECOND_NS)
    assert node.collectives.ended_ranks(f"{5:016x}") == set()


def test_an_address_used_again_is_not_taken_out_with_the_communicator_before(node: Node) -> None:
    node.begin(10)
    node.kernel.communicator(10, 1, comm=4096)
    node.kernel.destroy(1, SECOND_NS)
    node.collectives.read()
    node.kernel.communicator(10, 2, comm=4096, first_ns=2 * SECOND_NS)
    node.collectives.archive_ended(3 * SECOND_NS)
    assert len(node.kernel.communicators.rows) == 1


def test_a_process_that_gets_the_pid_of_another_does_not_take_its_labels_or_calls(node: Node) -> None:
    node.begin(10, start_ticks=1, job="old")
    node.kernel.communicator(10, 1)
    node.kernel.call(10, 1, 5)
    node.kernel.call(10, 0, 2)  # no communicator can be told for these
    node.end(10, 2 * SECOND_NS)
    node.collectives.archive_ended_processes()
    node.begin(10, start_ticks=2, job="new")
    node.kernel.communicator(10, 2, first_ns=3 * SECOND_NS)
    node.kernel.call(10, 2, 7)
    node.kernel.call(10, 0, 1)
    facts = node.facts().communicators
    assert {(one.identity.comm, one.identity.job, one.enqueued, one.alive) for one in facts} == {
        (f"{1:016x}", (("job", "old"),), 5, False),
        ("unknown", (("job", "old"),), 2, False),
        (f"{2:016x}", (("job", "new"),), 7, True),
        ("unknown", (("job", "new"),), 1, True),
    }


def test_what_begins_after_the_end_of_a_process_belongs_to_the_next_with_its_pid(node: Node) -> None:
    node.begin(10)
    node.kernel.communicator(10, 1)
    node.end(10, 2 * SECOND_NS)
    node.kernel.communicator(10, 2, first_ns=3 * SECOND_NS)
    node.settle(4 * SECOND_NS)
    assert not node.communicators()[f"{1:016x}"].alive
    assert node.communicators()[f"{2:016x}"].alive


def test_late_news_do_not_wake_a_communicator_that_was_put_away(node: Node) -> None:
    node.begin(10)
    node.kernel.communicator(10, 1)
    node.end(10, SECOND_NS)
    node.settle(2 * SECOND_NS)
    node.kernel.event(10, 1, LifecycleKind.CONFIRMED)
    assert [facts.alive for facts in node.facts().communicators] == [False]


def test_forgotten_communicators_stay_in_the_node_s_totals_with_their_gpu(node: Node) -> None:
    node.begin(10)
    node.kernel.communicator(10, 1)
    node.kernel.call(10, 1, 5)
    node.end(10, SECOND_NS)
    node.settle(2 * SECOND_NS)
    node.collectives.forget(3 * SECOND_NS, 100)
    assert node.facts().communicators == ()
    assert node.totals() == {"0": (5, 5 * 1024)}


def test_the_oldest_of_too_many_ended_communicators_are_forgotten_first(node: Node) -> None:
    node.begin(10)
    for instance in (1, 2, 3):
        node.kernel.communicator(10, instance)
        node.kernel.destroy(instance, instance * SECOND_NS)
    node.settle(9 * SECOND_NS)
    node.collectives.forget(0, 2)
    assert node.communicators().keys() == {f"{2:016x}", f"{3:016x}"}


def test_a_tenant_whose_communicators_end_by_the_thousand_makes_nobody_elses_forgotten(node: Node) -> None:
    for tgid in (10, 66):
        node.begin(tgid)
        node.processes[tgid] = replace(node.processes[tgid], tenant=Tenant(tgid))
    for instance in range(1, 40):
        node.kernel.communicator(10 if instance <= 2 else 66, instance)
        node.kernel.destroy(instance, instance * SECOND_NS)
    node.settle(90 * SECOND_NS)
    node.collectives.forget(0, 10)
    assert node.communicators().keys() == {f"{one:016x}" for one in (1, 2, *range(32, 40))}


def test_calls_of_a_process_that_nobody_met_are_put_away_too(node: Node) -> None:
    node.kernel.call(10, 0, 3)
    node.collectives.read()
    assert node.collectives.pop_unknown_pids() == {10}
    node.collectives.end_processes({10}, SECOND_NS)
    node.settle(2 * SECOND_NS)
    assert not node.kernel.aggregates.rows
    assert node.totals() == {"unknown": (3, 3 * 1024)}


def test_totals_stand_and_the_trouble_is_said_once_while_the_kernel_refuses(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.begin(10)
    node.kernel.communicator(10, 1)
    node.kernel.call(10, 1, 5)
    node.kernel.overflow(4, 2)
    before = node.totals()
    assert before == {"0": (5, 5 * 1024), "unknown": (2, 0)}
    assert node.collectives.complete
    node.kernel.refuses_totals = node.kernel.aggregates.refuses = node.kernel.communicators.refuses = True
    with caplog.at_level(logging.ERROR):
        assert node.totals() == before
        assert node.totals() == before
    assert not node.collectives.complete
    assert len(caplog.messages) == 5
    node.kernel.refuses_totals = node.kernel.aggregates.refuses = node.kernel.communicators.refuses = False
    assert node.totals() == before
    assert node.collectives.complete


def test_nothing_is_put_away_while_the_tables_cannot_be_read(node: Node) -> None:
    node.begin(10)
    node.kernel.communicator(10, 1)
    node.kernel.call(10, 1, 5)
    node.collectives.read()
    node.kernel.call(10, 1, 1)
    node.end(10, SECOND_NS)
    node.kernel.aggregates.refuses = True
    node.settle(2 * SECOND_NS)
    node.kernel.aggregates.refuses = False
    node.settle(3 * SECOND_NS)
    assert node.totals() == {"0": (6, 6 * 1024)}


def test_a_communicator_of_an_unknown_build_is_named_by_its_unique_id_once_the_version_is_known(node: Node) -> None:
    unique_id = np.frombuffer(bytes(range(128)), np.uint8)
    known: dict[str, Any] = {"nranks": 8, "rank": 3, "has_unique_id": 1, "unique_id": unique_id}
    node.kernel.event(10, 1, LifecycleKind.INIT, **known)
    (facts,) = node.facts().communicators
    assert (facts.identity.comm, facts.identity.rank, facts.identity.identity_source) == ("unknown", "3", "init")
    node.begin(10)
    (facts,) = node.facts().communicators
    assert facts.identity.comm == f"{two_lane_hash(bytes(range(128))):016x}"
    assert (facts.identity.rank, facts.identity.nranks, facts.identity.identity_source) == ("3", "8", "init")


def test_a_layout_that_tells_ranks_alone_leaves_the_name_to_the_unique_id(node: Node) -> None:
    node.begin(10)
    node.kernel.communicator(10, 1, comm_hash=0, rank=3, nranks=8)
    (facts,) = node.facts().communicators
    assert (facts.identity.comm, facts.identity.rank, facts.identity.nranks, facts.identity.identity_source) == (
        "unknown",
        "3",
        "8",
        "layout",
    )
    unique_id = np.frombuffer(bytes(range(128)), np.uint8)
    identity = node.kernel.communicators.read()[1][0]["identity"]
    node.kernel.event(10, 1, LifecycleKind.INIT, confirmed=1, identity=identity, has_unique_id=1, unique_id=unique_id)
    for _ in range(2):
        (facts,) = node.facts().communicators
        assert facts.identity.comm == f"{two_lane_hash(bytes(range(128))):016x}"
        assert (facts.identity.rank, facts.identity.nranks, facts.identity.identity_source) == ("3", "8", "layout")


def test_a_communicator_that_grew_is_not_named_by_the_id_it_grew_with(node: Node) -> None:
    node.begin(10)
    unique_id = np.frombuffer(bytes(range(128)), np.uint8)
    node.kernel.event(10, 1, LifecycleKind.GROW, nranks=8, rank=3, has_unique_id=1, unique_id=unique_id)
    assert [facts.identity.comm for facts in node.facts().communicators] == ["unknown"]


def test_a_communicator_that_was_not_seen_from_its_first_call_is_said_to_be_unchecked(node: Node) -> None:
    node.begin(1)
    node.kernel.communicator(1, 10)
    node.kernel.communicator(1, 11)
    node.kernel.event(1, 11, LifecycleKind.INIT)
    node.collectives.read()
    assert node.collectives.seen_late_unchecked == 1
    assert node.collectives.events_lost()["before_attachment"] == 0
    node.end(1, 2 * SECOND_NS)
    node.settle(3 * SECOND_NS)
    node.collectives.forget(4 * SECOND_NS, 0)
    assert node.collectives.seen_late_unchecked == 1, "also of those that are forgotten"
