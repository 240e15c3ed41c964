"""What is told of stalls while they last and afterwards, and when a rank is suspected of one.

Simulated: see stall_world.  Where it matters, where completion is seen and where only calls are.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.stall import Diagnosis, Stall
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.stalls.stacks import MOST_STACKS
from railscope.agent.node.stalls.stall_totals import MOST_ENDED, StallTotals
from railscope.agent.node.stalls.watchdog import Watchdog
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.records.calls import CALL_EVENT
from railscope.probes.processes.owner import ProcessOwner
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit.stall_world import (
    FLOOR_S,
    LOOK_S,
    MIB,
    MOVING,
    RAILS,
    RUNNING,
    STANDING,
    STARVED,
    STOPPED,
    World,
    steady,
)


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        (ProcessOwner(ProcessIdentity(4711, 1), "ada", "python3 train.py"), 'process 4711 of ada, "python3 train.py"'),
        (None, "process 4711"),
    ],
)
def test_the_log_says_whose_the_process_of_a_stalled_rank_is(
    caplog: pytest.LogCaptureFixture, owner: ProcessOwner | None, words: str
) -> None:
    world = World()
    if owner is not None:
        world.owners[4711] = owner
    steady(world)
    (rank,) = world.ranks
    rank.begin()
    rank.process = STOPPED
    world.until_flagged(10)
    assert world.stall is not None
    assert world.stall.owner == owner
    (line,) = caplog.messages
    assert line.endswith(f"({words})")


def test_the_time_of_day_of_a_stall_is_read_once() -> None:
    world = World()
    steady(world)
    (rank,) = world.ranks
    rank.begin()
    rank.process = STOPPED
    world.until_flagged(10)
    assert world.stall is not None
    found_ns = world.stall.since_realtime_ns
    assert found_ns == world.stall.since_ns + 10**18
    world.clock.day_ns += 100_000
    world.watch.processes_gone({rank.pid: 9})
    rank.gone = True
    assert world.stall.diagnosis.cause is Cause.PROCESS_GONE
    assert world.stall.since_realtime_ns == found_ns


def test_the_log_names_a_rail_with_its_namespace_where_the_device_s_name_is_in_several(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for netns, name in (("", "rail 1 (rail1)"), ("pod7", "rail 1 (rail1 in pod7)")):
        world = World(nranks=8)
        steady(world)
        (rank,) = world.ranks
        rank.begin()
        rank.rails = (RAILS[0], replace(RAILS[1], up=False, netns=netns))
        caplog.clear()
        world.until_flagged(10)
        (line,) = caplog.messages
        assert f"rail_down, blamed on {name}: {name} has no carrier" in line


def test_each_stall_is_counted_once_and_its_length_is_kept() -> None:
    world = World(nranks=8)
    steady(world)
    (rank,) = world.ranks
    for _ in range(2):
        rank.begin()
        rank.rails = RAILS[0], replace(RAILS[1], up=False)
        world.step(40)
        rank.rails = RAILS
        rank.complete()
        steady(world)
    facts = world.watch.facts()
    (length,), (total,) = facts.lengths, facts.totals
    assert (length.cause, length.current) == ("rail_down", None)
    assert length.seconds == pytest.approx(20.0, abs=2 * LOOK_S)
    assert (total.op, total.cause, total.count) == ("AllReduce", "rail_down", 2)
    assert [round(stall.length_ns(0) / 1e9) for stall in facts.ended] == [10, 10]


def test_lengths_never_fall_when_a_better_cause_is_found_and_add_up_to_the_whole() -> None:
    world = World(nranks=8)
    steady(world)
    (rank,) = world.ranks
    rank.begin()
    rank.rails = RAILS[0], replace(RAILS[1], unanswered=1, unanswered_ns=1_500_000_000)
    world.step(40)
    rank.rails = RAILS[0], replace(RAILS[1], up=False)
    world.step(20)
    lengths = world.watch.facts().lengths
    seconds = {one.cause: one.seconds for one in lengths}
    assert seconds == {"rail_filtered": pytest.approx(10, abs=0.5), "rail_down": pytest.approx(5, abs=0.5)}
    assert [one.cause for one in lengths if one.current is not None] == ["rail_down"]
    assert len(world.begun) == 1


def test_the_cause_stays_while_tcp_still_waits_after_the_link_is_back() -> None:
    world = World(nranks=8)
    steady(world)
    (rank,) = world.ranks
    rank.begin()
    rank.rails = RAILS[0], replace(RAILS[1], up=False)
    world.step(40)
    rank.rails = RAILS
    world.step(24)
    assert world.stall is not None
    assert world.stall.diagnosis.cause is Cause.RAIL_DOWN


def test_a_stall_does_not_become_what_is_usual() -> None:
    world = World(nranks=8)
    for _ in range(3):
        steady(world)
        world.ranks[0].begin()
        world.ranks[0].process = STARVED
        assert world.until_flagged(10) <= FLOOR_S + LOOK_S
        world.step(80)
        world.ranks[0].complete()


def test_bytes_that_move_put_the_flag_off_and_do_not_clear_it() -> None:
    world = World(nranks=8)
    steady(world)
    (rank,) = world.ranks
    rank.begin()
    rank.process = MOVING
    world.step(400)
    assert world.stall is None
    rank.process = STANDING
    world.step(8)
    assert world.stall is not None
    rank.process = MOVING
    world.step(8)
    assert world.stall is not None


def beside_a_busy_port() -> World:
    """A rank without TCP in an operation, on a host whose ports move much; below level rails."""
    world = World(nranks=8)
    steady(world)
    (rank,) = world.ranks
    rank.begin()
    rank.process = replace(RUNNING, moved_bytes=None)
    rank.rails = tuple(replace(rail, connections=0, port_bytes=10**9) for rail in RAILS)
    world.counts_messages = False
    return world


def test_a_port_that_moves_much_speaks_for_a_process_without_tcp() -> None:
    world = beside_a_busy_port()
    (rank,) = world.ranks
    world.step(400)
    assert world.stall is None
    rank.rails = tuple(replace(rail, port_bytes=10_000) for rail in rank.rails)
    world.step(2)
    assert world.stall is not None


def test_a_port_that_moves_much_does_not_speak_for_a_process_for_ever() -> None:
    """Another job's bytes, or storage's, are no answer to a wait of minutes."""
    world = beside_a_busy_port()
    world.step(500)
    assert world.stall is not None


def test_an_agent_that_comes_into_the_middle_of_an_operation_watches_before_it_speaks() -> None:
    world = World(nranks=8, ranks=2)
    first, second = world.ranks
    first.begin()
    world.clock.now_ns += 100_000_000_000
    first.process = MOVING
    world.step(40)
    assert world.watch.current == ()
    second.process = first.process = STANDING
    world.step(2)
    assert len(world.watch.current) >= 1


def test_what_is_forgotten_leaves_the_lengths_but_not_the_node_s_count() -> None:
    world = World(nranks=8)
    steady(world)
    world.ranks[0].begin()
    world.step(140)
    assert len(world.watch.facts().lengths) == 1
    world.watch.forget([world.ranks[0].instance])
    world.ranks.clear()
    world.step()
    facts = world.watch.facts()
    assert facts.lengths == ()
    assert [total.count for total in facts.totals] == [1]


def test_sums_of_operations_reach_the_snapshot() -> None:
    world = World(ranks=2)
    steady(world, 2)
    world.ranks[0].work(1, 1.0, Op.AllGather, 100)
    world.ranks[0].ended = True
    world.step()
    reader = world.watch._reader
    assert {(one.rank, one.operations) for one in reader.times.by_rank()} == {("0", 65), ("1", 64)}
    assert {(one.op, one.size_bytes) for one in reader.times.by_size()} == {("AllReduce", MIB), ("AllGather", 128)}


def test_of_many_calls_read_together_each_communicator_s_last_one_is_remembered() -> None:
    world = World(seen=False, ranks=3)
    calls = [(7, Op.AllGather), (8, Op.Broadcast), (7, Op.Reduce), (9, Op.AllGather), (8, Op.AllReduce)]
    for batch in (calls, [], [(9, Op.ReduceScatter)]):
        events = np.zeros(len(batch), CALL_EVENT)
        for at, (instance, op) in enumerate(batch):
            events[at]["instance"], events[at]["op"] = instance, op
        world.watch.record_calls(events)
    reader = world.watch._reader
    assert [reader.last_op(instance) for instance in (7, 8, 9)] == ["Reduce", "AllReduce", "ReduceScatter"]
    assert reader.last_op(10) == UNKNOWN


def test_reading_calls_takes_no_memory_for_the_communicators_whose_numbers_lie_between() -> None:
    """Who makes and ends communicators without end moves those numbers apart."""
    world = World(seen=False)
    events = np.zeros(1000, CALL_EVENT)
    events["instance"], events["op"] = 1, Op.Broadcast
    events["instance"][::2], events["op"][::2] = 1 << 31, Op.Reduce
    tracemalloc.start()
    try:
        world.watch.record_calls(events)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 1 << 20
    reader = world.watch._reader
    assert [reader.last_op(instance) for instance in (1, 1 << 31)] == ["Broadcast", "Reduce"]


@pytest.mark.parametrize("instances", [[7], []])
def test_only_the_last_call_s_operation_is_remembered(instances: list[int]) -> None:
    world = World(seen=False)
    steady(world)
    world.tell_calls(Op.Broadcast)
    world.watch.forget(instances)
    world.ranks[0].waits_in = ("poll",)
    world.until_flagged(40)
    assert world.stall is not None
    assert world.stall.op == ("unknown" if instances else "Broadcast")


def test_a_rank_is_suspicious_before_it_stalls_and_until_it_goes_on() -> None:
    world = World()
    steady(world)
    (rank,) = world.ranks
    assert not world.watch.suspicious
    rank.begin()
    rank.process = STOPPED
    while not world.watch.suspicious:
        assert not world.watch.current
        world.step()
    assert world.until_flagged(10) >= 2 * LOOK_S
    assert world.watch.suspicious
    rank.process = RUNNING
    rank.complete()
    world.train(5)
    assert not world.watch.suspicious


def test_a_rank_that_has_rested_for_long_is_not_suspicious_and_one_that_comes_to_rest_is() -> None:
    world = World(ranks=2, nranks=4)
    steady(world)
    first, second = world.ranks
    first.ended = True
    suspicious = []
    for at in range(1200):
        if at < 600:
            second.work(8, 0.005)
        world.step()
        suspicious.append(world.watch.suspicious)
    assert not any(suspicious[20:600])
    assert any(suspicious[600:620])
    assert not suspicious[-1]


def stall_of(pid: int, number: int) -> Stall:
    """A stall of a communicator, put down to its rank 0."""
    diagnosis = Diagnosis(Cause.PROCESS_STOPPED, ("it is stopped",), culprit=True, blamed_rank=0)
    return Stall(
        instance=number,
        comm=f"{number:016x}",
        rank="0",
        nranks="2",
        pid=pid,
        op="AllReduce",
        payload_bytes=None,
        since_ns=number,
        flagged_ns=number,
        realtime_offset_ns=0,
        flight_strength="strong",
        diagnosis=diagnosis,
    )


def test_a_user_whose_stalls_end_by_the_thousand_pushes_out_none_of_another() -> None:
    totals = StallTotals(lambda pid: Tenant(pid))
    for number in range(1000):
        stall = stall_of(5000 if number else 1000, number)
        totals.begin(stall)
        totals.end(stall, number + 1)
    assert [stall.pid for stall in totals.ended] == [1000, *[5000] * (MOST_ENDED - 1)]
    assert totals.ended[-1].instance == 999


def test_stacks_are_read_of_every_users_blamed_ranks_however_many_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    stalls = [stall_of(5000, number) for number in range(500)] + [stall_of(1000, 500)]
    processes = {
        pid: SimpleNamespace(tenant=Tenant(pid), ended_ns=None, identity=ProcessIdentity(pid, 1))
        for pid in (1000, 5000)
    }
    ranks = {stall.comm: [SimpleNamespace(pid=stall.pid, rank=0)] for stall in stalls}
    monkeypatch.setattr(Watchdog, "current", stalls)
    monkeypatch.setattr(world.watch, "_every", lambda: SimpleNamespace(by_comm=ranks))
    monkeypatch.setattr(world.watch, "_known", SimpleNamespace(process=processes.get))
    blamed = world.watch._blamed()
    assert len(blamed) == MOST_STACKS
    assert [identity.pid for identity in blamed.values()].count(1000) == 1
