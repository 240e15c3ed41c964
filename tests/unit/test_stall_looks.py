"""How often the agent looks for stalls: seldom where all is well, and never so seldom that a stall is found later.

Simulated: see stall_world.
"""

from __future__ import annotations

import errno
import time
from dataclasses import replace
from itertools import pairwise
from typing import NoReturn

import pytest

from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.stalls import watchdog
from railscope.agent.node.stalls.evidence import RailSigns
from railscope.agent.node.stalls.watchdog import EVALUATION_NS, LONGEST_BRIDGED_NS, LONGEST_LOOK_PAUSE_NS
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.loading.bpf_syscall import KernelRefusal
from railscope.probes.nccl.abi import Op
from tests.unit.stall_world import (
    AFTER_S,
    LOOK_S,
    LOOKS_A_SECOND,
    MIB,
    MOVING,
    RAILS,
    RUNNING,
    STANDING,
    STOPPED,
    Rank,
    World,
    steady,
)

levels = pytest.mark.parametrize("seen", [True, False], ids=["completion", "counts"])


def looks_during(world: World, seconds: float) -> int:
    """While ranks do nothing new."""
    before = world.looks
    world.step(int(seconds / LOOK_S))
    return world.looks - before


@levels
def test_beside_a_job_that_works_a_look_a_second_will_do(seen: bool) -> None:
    world = World(seen=seen, ranks=2)
    steady(world)
    before = world.looks
    world.train(20)
    assert 19 <= world.looks - before <= 21


@levels
def test_what_is_usual_is_learnt_once_a_second_all_the_same(seen: bool) -> None:
    seldom, always = World(seen=seen), World(seen=seen)
    always.rests = False
    for world in (seldom, always):
        steady(world)
        world.train(20)
        world.ranks[0].begin()
        world.ranks[0].waits_in = ("poll",)
        world.until_flagged(40)
    one, other = (world.watch._reader.fact(0) for world in (seldom, always))
    assert one.in_flight is not None
    assert other.in_flight is not None
    assert one.in_flight.history is not None
    assert other.in_flight.history is not None
    assert one.in_flight.history.operations == pytest.approx(other.in_flight.history.operations, rel=0.2)
    assert one.in_flight.history.mean_ns == pytest.approx(other.in_flight.history.mean_ns, rel=0.1)


@levels
@pytest.mark.parametrize("phase", range(LOOKS_A_SECOND))
@pytest.mark.parametrize("fault", ["stopped", "waits"])
def test_a_stall_is_flagged_as_soon_as_if_there_had_been_every_look(seen: bool, phase: int, fault: str) -> None:
    took = []
    for rests in (True, False):
        world = World(seen=seen, ranks=2, nranks=4)
        world.rests = rests
        steady(world)
        world.train(phase * LOOK_S)
        for rank in world.ranks:
            rank.begin()
            rank.waits_in = ("poll",)
        if fault == "stopped":
            world.ranks[1].process = STOPPED
        took.append(world.until_flagged(60))
    assert abs(took[0] - took[1]) <= LOOK_S


@levels
def test_what_is_suspected_is_looked_at_as_often_as_can_be(seen: bool) -> None:
    world = World(seen=seen, ranks=2)
    steady(world)
    for rank in world.ranks:
        rank.begin()
        rank.waits_in = ("poll",)
    world.step(LOOKS_A_SECOND)
    assert looks_during(world, 20) == 20 * LOOKS_A_SECOND


@levels
def test_idle_communicators_without_a_sign_of_an_operation_do_not_keep_the_agent_busy(seen: bool) -> None:
    world = World(seen=seen, ranks=2)
    steady(world)
    for rank in world.ranks:
        rank.process = RUNNING
    world.step(10 * LOOKS_A_SECOND)
    assert looks_during(world, 20) <= 21


@levels
@pytest.mark.parametrize("phase", range(LOOKS_A_SECOND))
def test_a_slow_rail_is_looked_at_as_often_as_can_be_as_soon_as_operations_are_slow(seen: bool, phase: int) -> None:
    world = World(seen=seen, nranks=8)
    steady(world)
    world.train(phase * LOOK_S)
    (rank,) = world.ranks
    rank.process = MOVING
    rank.rails = (
        replace(RAILS[0], round_trip_ns=1_600_000, busy_ratio=0.1, sent_bytes=5 * MIB),
        replace(RAILS[1], round_trip_ns=63_000_000, busy_ratio=1.0, sent_bytes=5 * MIB),
    )
    looks = 0
    while not world.watch.current:
        looks += 1
        if looks % 2:
            rank.work(1, 0.1)
        world.step()
        assert looks * LOOK_S <= 1.25 + 2 + 2, (
            "it begins within a second, which is the first of three; then two seconds"
        )


def test_calls_ahead_of_an_operation_do_not_hide_how_old_it_is() -> None:
    world = World()
    steady(world)
    (rank,) = world.ranks
    rank.begin()
    world.clock.now_ns += 3 * EVALUATION_NS
    rank.sequence, rank.last_ns, rank.ahead = rank.sequence + 1, world.clock.now_ns, 1
    # Suspect when it is a second old, and one look later at the latest.
    assert world.watch.evaluate() == 2 * EVALUATION_NS


@levels
@pytest.mark.parametrize("each", range(1, 12))
def test_what_is_usual_is_learnt_about_once_a_second_however_often_calls_come(seen: bool, each: int) -> None:
    world = World(seen=seen)
    steady(world)
    (rank,) = world.ranks
    learnt_ns = []
    for step in range(40 * LOOKS_A_SECOND):
        if step % each == 0:
            rank.work(1, 0.005)
        before = world.looks
        world.step()
        if world.looks > before and world.watch._reader.learnt:
            learnt_ns.append(world.clock.now_ns)
    gaps_ns = [later - earlier for earlier, later in pairwise(learnt_ns)]
    assert 2 * EVALUATION_NS <= min(gaps_ns) <= max(gaps_ns) <= 5 * EVALUATION_NS


@levels
def test_what_is_suspected_is_learnt_once_a_second_and_no_more_often(seen: bool) -> None:
    world = World(seen=seen)
    steady(world)
    (rank,) = world.ranks
    rank.begin()
    rank.waits_in = ("poll",)
    world.step(2 * LOOKS_A_SECOND)
    learnt = 0
    for _ in range(20 * LOOKS_A_SECOND):
        world.step()
        learnt += world.watch._reader.learnt
    assert learnt == 20


def test_after_a_table_that_cannot_be_read_the_next_look_comes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise KernelRefusal(errno.EPERM, "read map communicators")

    world = World()
    steady(world)
    monkeypatch.setattr(world, "read", refuse)
    assert world.watch.evaluate() == EVALUATION_NS


@pytest.mark.parametrize("idle_s", [5.0, 5.25, 5.5, 5.75, 300.0, 305.0, 310.0, 320.0, 325.0])
def test_who_waits_for_good_after_a_long_silence_is_found_within_ten_seconds_more(idle_s: float) -> None:
    world = World(seen=False, ranks=2, nranks=4)
    steady(world)
    for rank in world.ranks:
        rank.process = RUNNING
    world.step(int(idle_s / LOOK_S))
    for rank in world.ranks:
        rank.process = STANDING
        rank.waits_in = ("recvmsg",)
    assert world.until_flagged(100) <= AFTER_S + (11 if idle_s > 10 else LOOK_S)


def test_below_completion_no_table_of_what_was_followed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    steady(world)
    world.seen, world.left_behind = False, True

    def refuse() -> NoReturn:
        raise AssertionError("read although nothing is followed")

    for table in ("operations", "connections", "histories", "sent"):
        monkeypatch.setattr(world, table, refuse)
    for _ in range(8):
        world.ranks[0].sequence += 1
        world.ranks[0].last_ns = world.clock.now_ns
        world.step()
    world.ranks[0].process = STOPPED
    world.until_flagged(10)
    reader = world.watch._reader
    assert reader.sent_recently(world.clock.now_ns, world.ranks[0].pid) is None
    assert {one.op for one in reader.times.by_size()} == {Op.AllReduce.name}


CROWD, CROWDED = 20, 9000
"""Ranks of one process of another tenant; its pid."""


class Crowded(World):
    """The ranks of two processes, and a process of another tenant with very many ranks, all of which stand still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seen: bool, crowd: int) -> None:
        super().__init__(seen=seen, ranks=2)
        self.tenants = {4711: Tenant(1000), 4712: Tenant(1000), CROWDED: Tenant(5000)}
        self.crowd = [Rank(self, 1000 + at, 0, CROWDED, comm_hash=at + 1) for at in range(crowd)]
        self.looks_at_crowd: list[int] = []
        monkeypatch.setattr(watchdog, "_CROWD", CROWD // 2)
        spent = iter(range(0, 10**15, 100_000_000))  # each look takes a tenth of a second
        monkeypatch.setattr(time, "thread_time_ns", lambda: next(spent))

    def stand_still(self) -> None:
        """The crowd comes, and waits for what does not come."""
        self.ranks += self.crowd
        for rank in self.crowd:
            rank.begin()
            rank.waits_in = ("poll",)

    def rails(self, process: ObservedProcess, devices: frozenset[str]) -> tuple[RailSigns, ...]:
        if process.identity.pid == CROWDED and self.looks_at_crowd[-1:] != [self.clock.now_ns]:
            self.looks_at_crowd.append(self.clock.now_ns)
        return super().rails(process, devices)

    def stalled(self) -> set[int]:
        return {stall.pid for stall in self.watch.current}


@levels
def test_where_thousands_of_one_tenants_ranks_stand_still_no_other_tenant_waits_for_its_look(
    monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    took = []
    for crowd in (0, CROWD):
        world = Crowded(monkeypatch, seen=seen, crowd=crowd)
        steady(world)
        world.stand_still()
        world.step(60 * LOOKS_A_SECOND)
        told = crowd if seen else min(crowd, 1)  # of a process whose calls are all that is seen one operation is
        assert len(world.watch.current) == told
        for rank in world.ranks[:2]:
            rank.begin()
            rank.waits_in = ("poll",)
        began_ns = world.clock.now_ns
        while not world.stalled() & {4711, 4712}:
            world.step()
            assert len([stall for stall in world.watch.current if stall.pid == CROWDED]) == told, "as they were"
        took.append(world.clock.now_ns - began_ns)
    assert abs(took[1] - took[0]) <= EVALUATION_NS
    pauses = [later - earlier for earlier, later in pairwise(world.looks_at_crowd[-10:])]
    assert min(pauses) >= LONGEST_LOOK_PAUSE_NS, "its own looks are no dearer for it"
    assert max(pauses) <= LONGEST_LOOK_PAUSE_NS + 1_000_000_000


@levels
def test_a_stall_is_told_of_though_looks_are_seconds_apart(seen: bool) -> None:
    world = World(seen=seen, ranks=2)
    steady(world)
    for rank in world.ranks:
        rank.begin()
        rank.waits_in = ("poll",)
    for _ in range(20):
        world.clock.now_ns += LONGEST_LOOK_PAUSE_NS
        world.watch.evaluate()
    assert {stall.pid for stall in world.watch.current} == {4711, 4712}


@levels
def test_a_crowd_that_goes_on_is_seen_at_its_next_look(monkeypatch: pytest.MonkeyPatch, seen: bool) -> None:
    world = Crowded(monkeypatch, seen=seen, crowd=CROWD)
    steady(world)
    world.stand_still()
    world.step(60 * LOOKS_A_SECOND)
    for rank in world.crowd:
        rank.complete()
        rank.work(8, 0.005)
        rank.waits_in = ()
    world.step(4 * LOOKS_A_SECOND)
    assert not world.watch.current
    for rank in world.crowd:
        rank.gone = True
    world.watch.processes_gone({CROWDED: 9})
    world.step(8 * LOOKS_A_SECOND)
    assert world.watch._crowds == frozenset()


@pytest.mark.parametrize(("pause_ns", "bridged"), [(LONGEST_LOOK_PAUSE_NS, True), (LONGEST_BRIDGED_NS + 1, False)])
def test_what_was_read_before_the_agent_was_stopped_for_long_says_nothing_of_now(pause_ns: int, bridged: bool) -> None:
    world = World()
    steady(world)
    world.clock.now_ns += pause_ns
    world.watch.evaluate()
    assert (world.gap_ns > 0) is bridged


@pytest.mark.parametrize("library", [0, 1])
def test_only_of_a_library_whose_calls_meet_no_probe_they_are_said_to_be_estimated(library: int) -> None:
    world = World(seen=False)
    (rank,) = world.ranks
    rank.library = library
    world.unprobed.add(1)
    steady(world)
    rank.begin()
    rank.waits_in = ("poll",)
    world.until_flagged(60)
    assert world.stall is not None
    assert any("calls are estimated" in one for one in world.stall.diagnosis.evidence) is (library == 1)


def test_a_rank_that_came_to_rest_is_told_though_an_ended_process_had_the_tables_read_before_the_look() -> None:
    world = World(seen=False)
    steady(world)
    world.ranks[0].process = RUNNING
    world.step(2)
    assert not world.watch.suspicious
    world.clock.now_ns += 5 * EVALUATION_NS
    world.watch.processes_gone({})
    world.watch.evaluate()
    assert world.watch.suspicious
