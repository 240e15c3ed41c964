"""What the kernel tells at once is told of at once, where others wait because of it; what is nobody's harm is not.

Simulated: see stall_world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.causes import Cause
from railscope.agent.node.inspection.tenants import Tenant
from railscope.agent.node.stalls.early_looks import SETTLED_NS, EarlyLooks
from railscope.agent.node.stalls.evidence import ProcessFacts
from railscope.agent.node.targets.jobs import JobFacts
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.processes.processes import ProcessIdentity
from tests.unit.stall_world import FLOOR_S, LOOK_S, MOVING, RAILS, STANDING, STOPPED, World, steady

MS: Final = 1_000_000
SOON_S: Final = 0.25
"""The event has settled."""
UNREAD: Final = tuple(replace(rail, unread_bytes=65536) for rail in RAILS)
DOWN: Final = (RAILS[0], replace(RAILS[1], up=False, unacknowledged=1))
FROZEN: Final = replace(STOPPED, condition="frozen")
levels = pytest.mark.parametrize("seen", [True, False], ids=["completion", "counts"])


def hold(world: World, *ranks: int, process: ProcessFacts = STOPPED) -> None:
    """Some ranks' processes may not run from now on, and the kernel tells."""
    for number in ranks:
        rank = world.ranks[number]
        rank.process = process
        world.watch.early.record_events({rank.pid: world.clock.now_ns})


def lose_rail(world: World) -> None:
    for rank in world.ranks:
        rank.rails = DOWN
    world.watch.early.record_events(dict.fromkeys([rank.pid for rank in world.ranks], world.clock.now_ns))


def begin(world: World) -> None:
    for rank in world.ranks:
        rank.begin()


def short_after(world: World, seconds: float) -> None:
    """Let time pass, and look early as the daemon does; other looks are not due yet."""
    until_ns = world.clock.now_ns + round(seconds * 1e9)
    while (due_ns := world.watch.early.due_ns) is not None and due_ns <= until_ns:
        world.clock.now_ns = max(world.clock.now_ns, due_ns)
        world.watch.look_early()
    world.clock.now_ns = until_ns


def told(world: World) -> dict[int, Cause]:
    """Causes by rank."""
    return {int(stall.rank): stall.diagnosis.cause for stall in world.watch.current}


def world_of(*, seen: bool = True, ranks: int = 1, nranks: int = 2) -> World:
    world = World(seen=seen, ranks=ranks, nranks=nranks)
    steady(world)
    return world


def test_a_rank_that_is_stopped_in_an_operation_is_told_of_as_soon_as_that_lasts() -> None:
    world = world_of()
    begin(world)
    hold(world, 0)
    short_after(world, 0.19)
    assert not told(world)
    short_after(world, 0.02)
    assert told(world) == {0: Cause.PROCESS_STOPPED}
    ((flagged_ns, stall),) = world.begun
    assert stall.strength == "strong"
    assert stall.diagnosis.blamed_rank == 0
    assert flagged_ns - stall.since_ns <= SOON_S * 1e9


@pytest.mark.parametrize(
    ("process", "cause"), [(STOPPED, Cause.PROCESS_STOPPED), (FROZEN, Cause.PROCESS_FROZEN)], ids=["stopped", "frozen"]
)
def test_it_stalls_on_until_its_operation_is_through(process: ProcessFacts, cause: Cause) -> None:
    world = world_of()
    begin(world)
    hold(world, 0, process=process)
    short_after(world, SOON_S)
    for _ in range(40):
        world.step()
        assert told(world) == {0: cause}
    world.ranks[0].process = STANDING
    world.ranks[0].complete()
    world.step(4)
    assert not told(world)
    assert len(world.begun) == 1


@levels
def test_a_rank_that_others_of_this_host_wait_for_is_told_of_at_once_though_it_is_in_no_operation(seen: bool) -> None:
    world = world_of(seen=seen, ranks=3, nranks=8)
    for rank in world.ranks[1:]:
        rank.begin()
    hold(world, 0)
    short_after(world, SOON_S)
    assert told(world) == {0: Cause.PROCESS_STOPPED}
    for _ in range(30):
        world.step()
        assert told(world)[0] is Cause.PROCESS_STOPPED
    assert [stall.rank for _, stall in world.begun].count("0") == 1


@levels
def test_what_peers_sent_to_a_stopped_rank_shows_that_they_wait_for_it(seen: bool) -> None:
    world = world_of(seen=seen)
    world.ranks[0].rails = UNREAD
    hold(world, 0)
    short_after(world, SOON_S)
    assert told(world) == {0: Cause.PROCESS_STOPPED}


@levels
def test_a_stopped_rank_that_no_other_is_seen_to_wait_for_is_told_of_after_the_floor(seen: bool) -> None:
    world = world_of(seen=seen)
    hold(world, 0)
    short_after(world, SOON_S)
    assert not told(world)
    assert world.until_flagged(FLOOR_S + 2 * LOOK_S) >= FLOOR_S - 2 * LOOK_S


@levels
def test_a_peer_that_comes_to_wait_later_is_seen_within_two_seconds(seen: bool) -> None:
    world = world_of(seen=seen)
    hold(world, 0)
    short_after(world, SOON_S)
    world.step(2)
    world.ranks[0].rails = UNREAD
    assert world.until_flagged(1.5) <= 1.25


def test_a_process_that_is_held_for_a_moment_is_no_stall() -> None:
    world = world_of()
    begin(world)
    hold(world, 0)
    world.clock.now_ns += 190 * MS
    world.ranks[0].process = STANDING
    short_after(world, 1.0)
    assert not told(world)


def test_a_debugger_may_hold_a_process_as_long_as_any_other_wait_for_something_broken() -> None:
    world = world_of()
    begin(world)
    hold(world, 0, process=replace(STOPPED, condition="traced"))
    short_after(world, SOON_S)
    assert not told(world)
    assert world.until_flagged(FLOOR_S + 2 * LOOK_S) >= FLOOR_S - 2 * LOOK_S


@levels
@pytest.mark.parametrize("process", [STOPPED, FROZEN], ids=["stopped", "frozen"])
def test_a_job_all_of_whose_ranks_are_held_is_suspended_and_stalls_nowhere(seen: bool, process: ProcessFacts) -> None:
    world = world_of(seen=seen, ranks=3, nranks=3)
    begin(world)
    for number in range(3):  # one after the other
        hold(world, number, process=process)
        short_after(world, 0.06)
    short_after(world, 1.0)
    world.step(400)
    assert not told(world)


def test_once_one_of_a_suspended_job_goes_on_the_others_hold_it_up() -> None:
    world = world_of(ranks=2)
    begin(world)
    hold(world, 0, 1)
    short_after(world, SOON_S)
    world.step(40)
    world.ranks[0].process = STANDING
    world.step(3)
    assert told(world)[1] is Cause.PROCESS_STOPPED
    assert {stall.diagnosis.blamed_rank for _, stall in world.begun} == {1}


def test_where_all_ranks_of_this_host_are_held_and_others_are_elsewhere_it_takes_the_floor() -> None:
    world = world_of(ranks=2, nranks=4)
    begin(world)
    hold(world, 0, 1)
    short_after(world, SOON_S)
    assert not told(world)
    world.until_flagged(FLOOR_S + 2 * LOOK_S)
    assert set(told(world).values()) == {Cause.PROCESS_STOPPED}


def test_what_the_kernel_tells_of_no_process_that_is_known_is_nothing() -> None:
    world = world_of()
    begin(world)
    world.watch.early.record_events({1: world.clock.now_ns})
    assert world.watch.early.due_ns is None


@levels
def test_a_rail_that_loses_its_carrier_under_data_is_told_of_as_soon_as_that_lasts(seen: bool) -> None:
    world = world_of(seen=seen)
    begin(world)
    world.ranks[0].waits_in = ("poll",)
    lose_rail(world)
    short_after(world, 0.19)
    assert not told(world)
    short_after(world, 0.02)
    assert told(world) == {0: Cause.RAIL_DOWN}
    world.step(20)
    assert told(world) == {0: Cause.RAIL_DOWN}
    assert len(world.begun) == 1


def test_that_the_other_rail_still_moves_bytes_excuses_none_on_which_data_wait() -> None:
    world = world_of()
    begin(world)
    world.ranks[0].process = MOVING
    world.step(2)
    lose_rail(world)
    short_after(world, SOON_S)
    assert told(world) == {0: Cause.RAIL_DOWN}


def back_again(world: World) -> None:
    world.ranks[0].rails = RAILS


def goes_on(world: World) -> None:
    world.ranks[0].complete()
    world.ranks[0].work(8, 0.005)


def test_an_operation_that_begins_just_after_the_carrier_was_lost_stands_because_of_it() -> None:
    world = world_of()
    lose_rail(world)
    world.clock.now_ns += 30 * MS
    begin(world)
    short_after(world, SOON_S)
    assert told(world) == {0: Cause.RAIL_DOWN}


@pytest.mark.parametrize("then", [back_again, goes_on])
def test_a_carrier_that_is_back_or_that_no_operation_needs_is_nothing(then: Callable[[World], None]) -> None:
    world = world_of()
    begin(world)
    lose_rail(world)
    world.clock.now_ns += 100 * MS
    then(world)
    short_after(world, 1.0)
    assert not told(world)


def test_a_rail_that_carried_no_data_as_it_went_down_is_told_of_after_the_floor_where_calls_alone_are_seen() -> None:
    world = world_of(seen=False)
    begin(world)
    world.ranks[0].waits_in = ("poll",)
    world.ranks[0].rails = (RAILS[0], replace(RAILS[1], up=False))
    world.watch.early.record_events({world.ranks[0].pid: world.clock.now_ns})
    short_after(world, SOON_S)
    assert not told(world)
    world.until_flagged(FLOOR_S + 2 * LOOK_S)
    assert told(world) == {0: Cause.RAIL_DOWN}


def test_an_early_look_is_at_the_communicators_of_the_process_alone() -> None:
    world = World(ranks=4, nranks=2)
    for rank in world.ranks[2:]:
        rank.comm_hash += 1
    steady(world)
    begin(world)
    world.ranks[2].process = STOPPED  # the kernel did not tell
    hold(world, 0)
    short_after(world, SOON_S)
    assert told(world) == {0: Cause.PROCESS_STOPPED}
    assert set(world.outdated) == {world.ranks[0].pid, world.ranks[1].pid}


def test_what_else_happens_on_the_host_is_as_it_was_after_an_early_look() -> None:
    world = World(ranks=4, nranks=2)
    for rank in world.ranks[2:]:
        rank.comm_hash += 1
    steady(world)
    begin(world)
    world.step(2)
    hold(world, 0)
    world.ranks[3].gone = True
    world.watch.processes_gone({world.ranks[3].pid: 9})
    assert told(world) == {}
    short_after(world, SOON_S)
    assert told(world) == {0: Cause.PROCESS_STOPPED}
    world.step(2)
    assert told(world) == {0: Cause.PROCESS_STOPPED, 3: Cause.PROCESS_GONE}


def test_what_is_usual_is_not_learnt_from_early_looks() -> None:
    world = world_of()
    looks = world.looks
    for _ in range(10):
        hold(world, 0)
        world.ranks[0].process = STANDING
        short_after(world, SOON_S)
    assert world.looks == looks
    world.train(10)
    assert not world.begun


# When to look


ADA, BOB = Tenant(1000), Tenant(1001)


def process(pid: int, tenant: Tenant) -> ObservedProcess:
    return ObservedProcess(ProcessIdentity(pid, 1), None, JobFacts(), "", "2.27.3", tenant=tenant)


def looks_of(events: list[tuple[int, int, Tenant]], until_ns: int) -> list[tuple[int, frozenset[int]]]:
    """Looks, with the processes looked at, of a loop that never is late; events are (ns, pid, tenant)."""
    tenants = {pid: tenant for _, pid, tenant in events}
    early, looks, now_ns = EarlyLooks(lambda pid: process(pid, tenants[pid])), [], 0
    left = sorted(events, key=lambda event: event[0])
    while now_ns < until_ns:
        due_ns = early.due_ns
        if left and (due_ns is None or left[0][0] <= due_ns):
            now_ns, pid, _ = left.pop(0)
            early.record_events({pid: now_ns})
            continue
        if due_ns is None:
            break
        now_ns = max(now_ns, due_ns)
        if found := early.pop_due(now_ns):
            looks.append((now_ns, found))
    return looks


def test_who_stops_and_continues_in_a_loop_gets_two_looks_a_second_and_delays_no_other() -> None:
    loops = [(at_ns, 10 + at_ns % 7, ADA) for at_ns in range(0, 10_000 * MS, 3 * MS)]
    once = (5_432 * MS, 99, BOB)
    looks = looks_of([*loops, once], 10_000 * MS)
    assert len([at_ns for at_ns, pids in looks if pids != {99}]) <= 21
    (found_ns,) = [at_ns for at_ns, pids in looks if 99 in pids]
    assert found_ns - once[0] <= SETTLED_NS + 100 * MS


events = st.lists(
    st.tuples(st.integers(0, 5000).map(lambda ms: ms * MS), st.integers(0, 9), st.sampled_from([ADA, BOB]))
)


@given(events)
def test_the_last_event_of_every_process_is_looked_at_once_it_has_settled(
    happened: list[tuple[int, int, Tenant]],
) -> None:
    happened = [(at_ns, pid * 2 + (tenant is BOB), tenant) for at_ns, pid, tenant in happened]
    looks = looks_of(happened, 60_000 * MS)
    for pid in {pid for _, pid, _ in happened}:
        last_ns = max(at_ns for at_ns, one, _ in happened if one == pid)
        assert any(SETTLED_NS <= at_ns - last_ns <= 1_000 * MS for at_ns, pids in looks if pid in pids)
    for tenant in (ADA, BOB):
        mine = [at_ns for at_ns, pids in looks if any(pid % 2 == (tenant is BOB) for pid in pids)]
        assert all(after - before >= 500 * MS for before, after in pairwise(mine))


def test_a_process_that_ended_is_not_looked_at() -> None:
    early = EarlyLooks(lambda pid: process(pid, ADA))
    early.record_events({1: 0})
    early.forget(1)
    assert early.due_ns is None
    assert not early.pop_due(SETTLED_NS)
    assert not early.recent(0)
