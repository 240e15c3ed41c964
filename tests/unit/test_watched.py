"""What is known of calls that meet no probe; the process's memory and the kernel's tables are simulated."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from railscope.agent.facts.snapshot import EstimatedCalls
from railscope.agent.node.collectives.call_counts import CallCount, CallCounts, CallKind, counts_from_rows
from railscope.agent.node.collectives.watched import Watched, WatchedTable
from railscope.agent.node.inspection.inspection import InProcess, Inspection
from railscope.agent.node.inspection.questions import Found, NotYet, Question
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.agent.node.targets.memory import ProcessMemory
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.memory.sequence_numbers import SequenceLayout
from railscope.probes.nccl.records import calls as records
from railscope.probes.nccl.records.errors import COMMUNICATOR_MAGIC
from tests.unit.collectives_kernel import SimulatedTable
from tests.unit.stall_world import SimulatedClock

LAYOUT = SequenceLayout(
    comm_hash=8, sequence_numbers=0x100, group_next=0x200, shared_resources=0x300, persistent_refs=12
)
PID, ADDRESS, SHARED, HASH, INSTANCE, LIBRARY = 4711, 0x10000, 0x20000, 0xC0FFEE, 7, 3
SECOND_NS = 1_000_000_000
A = TypeVar("A")
PAYLOAD = 1024


@dataclass
class Rank:
    """One rank on a library that may be watched."""

    procfs: Path
    whole: bool = True
    now_ns: int = 1000 * SECOND_NS
    probed: bool = True
    table: SimulatedTable = field(
        default_factory=lambda: SimulatedTable(records.COMMUNICATOR_KEY, records.COMMUNICATOR)
    )
    inspection: Inspection = field(default_factory=InProcess)
    tenant_of: Callable[[int], Tenant] = lambda _pid: UNKNOWN_TENANT
    missed: list[int] = field(default_factory=list)
    more: list[CallCount] = field(default_factory=list)
    """Rows of others in the table of calls."""
    launched: dict[Op, int] = field(default_factory=dict)
    counted: dict[Op, list[int]] = field(default_factory=dict)
    """Calls and payload."""

    def __post_init__(self) -> None:
        (self.procfs / str(PID)).mkdir(parents=True)
        self._memory = os.open(self.procfs / str(PID) / "mem", os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._memory, 0x30000)
        for address, number in (
            (ADDRESS, COMMUNICATOR_MAGIC),
            (ADDRESS + LAYOUT.comm_hash, HASH),
            (ADDRESS + LAYOUT.shared_resources, SHARED),
            (ADDRESS + LAYOUT.group_next, 1),
        ):
            os.pwrite(self._memory, number.to_bytes(8, "little"), address)
        row = np.zeros(1, records.COMMUNICATOR)
        row["instance"], row["confirmed"], row["library"] = INSTANCE, 1, LIBRARY
        row["identity"]["comm_hash"], row["identity"]["nranks"] = HASH, 2
        self._key = struct.pack("<QII", ADDRESS, PID, 0)
        self.table.rows[self._key] = row
        self.watched = Watched(
            ProcessMemory(self.procfs, self.inspection, self.tenant_of),
            lambda library: LAYOUT if library == LIBRARY else None,
            lambda _instance: self.whole,
            lambda _instance, calls: self.missed.append(calls),
        )

    def close(self) -> None:
        os.close(self._memory)

    def call(self, times: int = 1, op: Op = Op.AllReduce, payload: int = PAYLOAD) -> None:
        """NCCL numbers a call, and a probe counts it where there is one."""
        self.launched[op] = self.launched.get(op, 0) + times
        if op < 5:
            address = ADDRESS + LAYOUT.sequence_numbers + 8 * op
            os.pwrite(self._memory, self.launched[op].to_bytes(8, "little"), address)
        if self.probed:
            total = self.counted.setdefault(op, [0, 0])
            total[0] += times
            total[1] += times * payload
            self.table.rows[self._key]["sequence"] += times
            self.table.rows[self._key]["last_ns"] = self.now_ns

    def capture(self) -> None:
        os.pwrite(self._memory, (1).to_bytes(4, "little"), SHARED + LAYOUT.persistent_refs)

    @property
    def counts(self) -> CallCounts:
        own = (
            CallCount(CallKind(PID, INSTANCE, 0, op, 0, 10), calls, payload)
            for op, (calls, payload) in self.counted.items()
        )
        return counts_from_rows((*own, *self.more))

    def tick(self, seconds: float = 1.0) -> None:
        """One update of the agent."""
        self.now_ns += int(seconds * SECOND_NS)
        self.watched.set_libraries({LIBRARY}, set() if self.probed else {LIBRARY})
        self.watched.update(self.table.read(), self.counts, self.now_ns)

    def probes_off(self) -> None:
        self.probed = False
        self.tick()

    def counts_for_a_moment(self, calls: int, payload: int = PAYLOAD) -> None:
        self.watched.set_libraries({LIBRARY}, ())
        self.probed = True
        self.call(calls, payload=payload)
        self.tick()
        self.probed = False
        self.tick()

    def last_call_ns(self) -> int:
        clock = SimulatedClock()
        clock.now_ns = self.now_ns
        table = WatchedTable(self.table, self.watched, clock)
        _, values = table.read()
        return int(values["last_ns"][0])


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path / "proc")
    yield made
    made.close()


def test_what_no_probe_met_is_what_nccl_numbered_beyond_what_was_counted(rank: Rank) -> None:
    rank.call(10)
    rank.probes_off()
    rank.call(500)
    rank.call(20, Op.AllGather)
    rank.tick()
    assert {one.op: one.calls for one in rank.watched.facts()} == {"AllReduce": 500, "AllGather": 20}
    assert sum(rank.missed) == 520
    assert rank.watched.position(INSTANCE) == 530
    assert rank.watched.take_unprobed() == 520
    assert rank.watched.take_unprobed() == 0


def test_calls_that_are_counted_for_a_moment_are_not_estimated_besides(rank: Rank) -> None:
    rank.call(10)
    rank.probes_off()
    for _ in range(3):
        rank.call(100)
        rank.tick()
        rank.counts_for_a_moment(7)
    rank.call(100)
    rank.tick()
    assert sum(rank.missed) == 400
    assert rank.watched.position(INSTANCE) == 10 + 400 + 21


def test_of_a_rank_that_was_seen_late_nothing_before_the_first_look_is_estimated(rank: Rank) -> None:
    rank.whole, rank.probed = False, False
    rank.call(1000)
    rank.probed = True
    rank.call(3)
    rank.probes_off()
    rank.call(50)
    rank.tick()
    assert sum(rank.missed) == 50
    assert rank.watched.position(INSTANCE) == 1053


def test_the_payload_is_that_of_calls_that_were_counted_with_the_error_of_their_means(rank: Rank) -> None:
    rank.call(10, payload=1000)
    rank.probes_off()
    rank.call(100)
    rank.tick()
    assert rank.watched.facts() == (EstimatedCalls("AllReduce", 100, 100_000, None),)
    rank.counts_for_a_moment(10, payload=3000)
    rank.call(100)
    rank.tick()
    (found,) = rank.watched.facts()
    assert (found.calls, found.payload_bytes) == (200, 100_000 + 200_000)
    assert found.payload_error_ratio == pytest.approx(0.5)  # of 1000 and 3000


def test_calls_before_the_first_that_are_counted_get_their_payload_later(rank: Rank) -> None:
    rank.probes_off()
    rank.call(100)
    rank.tick()
    assert rank.watched.facts() == (EstimatedCalls("AllReduce", 100, None, None),)
    assert rank.watched.awaits_counts
    rank.counts_for_a_moment(5, payload=10)
    assert rank.watched.facts() == (EstimatedCalls("AllReduce", 100, 1000, None),)
    assert not rank.watched.awaits_counts


def test_a_rank_stands_since_its_numbers_were_first_seen_as_they_are(rank: Rank) -> None:
    rank.call(10)
    rank.probes_off()
    rank.call()
    rank.tick()
    moved_ns = rank.now_ns
    assert rank.last_call_ns() == moved_ns
    rank.tick(5)
    assert rank.last_call_ns() == moved_ns
    rank.call()
    rank.tick()
    assert rank.last_call_ns() == rank.now_ns


@pytest.mark.parametrize("why", ["uncounted", "unnumbered", "captured", "unreadable"])
def test_a_rank_of_which_nothing_tells_whether_it_stands_never_seems_to(rank: Rank, why: str) -> None:
    if why != "uncounted":
        rank.call(10)
    if why == "unnumbered":
        rank.call(1, Op.Send)
    rank.probes_off()
    if why == "captured":
        rank.capture()
    if why == "unreadable":
        (rank.procfs / str(PID) / "mem").unlink()
    rank.tick(60)
    assert rank.last_call_ns() == rank.now_ns


def test_where_every_call_meets_a_probe_the_table_is_as_it_was(rank: Rank) -> None:
    rank.call(10)
    rank.watched.set_libraries((), ())
    rank.watched.update(rank.table.read(), rank.counts, rank.now_ns)
    rank.now_ns += 60 * SECOND_NS
    assert rank.last_call_ns() == rank.now_ns - 60 * SECOND_NS
    assert rank.watched.position(INSTANCE) is None
    assert rank.watched.facts() == ()


def test_the_share_of_calls_that_nccl_numbers_is_known(rank: Rank) -> None:
    assert rank.watched.share_numbered(rank.counts) == 1
    rank.call(30)
    rank.call(10, Op.Send)
    assert rank.watched.share_numbered(rank.counts) == 0.75


def test_a_number_that_nccl_would_not_come_to_is_none(rank: Rank) -> None:
    rank.call(10)
    rank.probes_off()
    rank.call(2**63)
    rank.tick()
    assert rank.watched.facts() == ()
    assert rank.missed == []
    assert rank.watched.position(INSTANCE) is None


def test_what_leaves_the_table_while_calls_are_counted_changes_no_mean_payload(rank: Rank) -> None:
    ended = [CallCount(CallKind(PID, INSTANCE + 1, 0, Op.AllReduce, 0, 1), 99, 99)]
    rank.more = ended
    rank.call(10, payload=1000)
    rank.probes_off()
    rank.call(100)
    rank.tick()
    rank.more = []
    rank.counts_for_a_moment(100, payload=1000)
    (found,) = rank.watched.facts()
    assert (found.payload_bytes, found.payload_error_ratio) == (100_000, 0)


def test_payload_of_libraries_that_are_not_watched_stands_for_none(rank: Rank) -> None:
    rank.probes_off()
    rank.call(100)
    rank.tick()
    rank.more = [CallCount(CallKind(PID + 1, INSTANCE + 1, 0, Op.AllReduce, 0, 1), 1000, 1)]
    rank.counts_for_a_moment(10, payload=500)
    (found,) = rank.watched.facts()
    assert found.payload_bytes == 50_000


class _Slow(InProcess):
    """Has no answer about some processes."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[int] = set()

    def ask(self, tenant: Tenant, question: Question[A], descriptors: Collection[int] = ()) -> Found[A]:
        if question.pid in self.silent:
            raise NotYet
        return super().ask(tenant, question, descriptors)


def test_a_process_that_cannot_be_read_for_long_keeps_no_other_waiting_and_does_not_seem_to_stand(
    tmp_path: Path,
) -> None:
    slow = _Slow()
    rank = Rank(tmp_path / "proc", inspection=slow)
    other = PID + 1
    (tmp_path / "proc" / str(other)).symlink_to(str(PID))
    row = rank.table.rows[struct.pack("<QII", ADDRESS, PID, 0)].copy()
    row["instance"] = INSTANCE + 1
    rank.table.rows[struct.pack("<QII", ADDRESS, other, 0)] = row
    rank.call(10)
    rank.probes_off()
    slow.silent = {PID}
    rank.call(5)
    for _ in range(60):
        rank.tick()
    assert rank.watched.position(INSTANCE + 1) == 15
    assert rank.watched.position(INSTANCE) == 10
    assert rank.now_ns - rank.last_call_ns() <= SECOND_NS
    slow.silent = set()
    rank.tick()
    assert rank.watched.position(INSTANCE) == 15
    rank.close()


def test_how_often_a_process_is_read_depends_on_its_own_tenants_communicators(tmp_path: Path) -> None:
    tenants = {PID: UNKNOWN_TENANT, PID + 1: Tenant(1000)}
    rank = Rank(tmp_path / "proc", tenant_of=tenants.__getitem__)
    for number in range(20_000):
        row = rank.table.rows[struct.pack("<QII", ADDRESS, PID, 0)].copy()
        row["instance"] = INSTANCE + 1 + number
        rank.table.rows[struct.pack("<QII", ADDRESS + number, PID + 1, 0)] = row
    rank.call(10)
    rank.probes_off()
    for calls in (11, 12):
        rank.call()
        rank.tick()
        assert rank.watched.position(INSTANCE) == calls
    rank.close()
