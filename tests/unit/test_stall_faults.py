"""Every fault of a host is found in time, and blamed on the right one, by cause.

Simulated: see stall_world.  Where it matters, where completion is seen and where only calls are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest

from railscope.agent.facts.causes import CAUSES, Cause
from railscope.agent.facts.stall import Disagreement
from railscope.agent.node.stalls.watchdog import EVALUATION_NS
from railscope.probes.nccl.abi import Op
from tests.unit.stall_world import (
    AFTER_S,
    COMM_HASH,
    FLOOR_S,
    LOOK_S,
    MIB,
    MOVING,
    RAILS,
    STARVED,
    STOPPED,
    World,
    steady,
)

levels = pytest.mark.parametrize("seen", [True, False], ids=["completion", "counts"])
UNREAD: Final = tuple(replace(rail, unread_bytes=262160) for rail in RAILS)


def shows(*, begins: bool = True, **facts: Any) -> Callable[[World], None]:
    """The first rank begins an operation, and shows this."""

    def show(world: World) -> None:
        rank = world.ranks[0]
        if begins:
            rank.begin()
        for name, fact in facts.items():
            setattr(rank, name, fact)

    return show


def on_rail1(**signs: Any) -> Callable[[World], None]:
    """The second rail shows something, while an operation stands."""
    return shows(rails=(RAILS[0], replace(RAILS[1], **signs)))


def stopped_later(world: World) -> None:
    world.ranks[0].begin()
    world.step(2)
    world.ranks[0].process = STOPPED


def carrier_back(world: World) -> None:
    lost_ns = world.clock.now_ns + 500_000_000
    on_rail1(carrier_lost_ns=lost_ns, unanswered=2, unanswered_ns=2_000_000_000)(world)


def gpu_hangs(world: World) -> None:
    world.step(8)  # the counts of messages are read once a second
    world.ranks[0].begin(sends=False)


def not_counted_any_more(world: World) -> None:
    (rank,) = world.ranks
    messages, sent_ns = rank.messages, rank.sent_ns
    for _ in range(40):
        rank.work(8, 0.005)
        rank.messages, rank.sent_ns = messages, sent_ns
        world.step()
    rank.begin(sends=False)


def graph_hangs(world: World) -> None:
    world.graph_in_flight = True
    world.ranks[0].begin()
    world.ranks[0].sequence -= 1


def disagrees(world: World) -> None:
    world.ranks[0].begin()
    made = ((0,), "AllReduce of 8 bytes float32"), ((1, 2), "AllGather of 8 bytes")
    world.disagreements[f"{COMM_HASH:016x}"] = Disagreement(world.ranks[0].sequence, made)


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with the only rank of a host."""

    name: str
    happens: Callable[[World], None]
    at_once: bool = True
    """Within the floor of all limits, and not only after the absolute one."""
    nranks: int = 8
    blamed: int | None = None
    culprit: bool = True
    levels: tuple[bool, ...] = (True,)
    """Where completion is seen, or only calls are."""
    told: Mapping[str, object] = field(default_factory=dict)
    """Of the stall, by name."""


STRONG: Final = {"strength": "strong"}
WEAK: Final = {"strength": "weak"}
FAULTS: Final[dict[Cause, list[Fault]]] = {
    Cause.PEER_LEFT: [
        Fault(
            "the peer closed connections",
            shows(rails=tuple(replace(rail, peer_closed=2) for rail in RAILS)),
            nranks=2,
            blamed=1,
        )
    ],
    Cause.PROCESS_STOPPED: [
        Fault(
            "within an operation",
            stopped_later,
            nranks=2,
            blamed=0,
            told={**STRONG, "op": "AllReduce", "payload_bytes": MIB, "comm": f"{COMM_HASH:016x}"},
        ),
        Fault(
            "between operations",
            shows(begins=False, process=STOPPED),
            nranks=2,
            blamed=0,
            levels=(True, False),
            told=WEAK,
        ),
    ],
    Cause.PROCESS_FROZEN: [
        Fault(
            "between operations",
            shows(begins=False, process=replace(STOPPED, condition="frozen")),
            nranks=2,
            blamed=0,
            levels=(True, False),
            told=WEAK,
        )
    ],
    Cause.RAIL_DOWN: [Fault("no carrier", on_rail1(up=False)), Fault("carrier back a second ago", carrier_back)],
    Cause.RANKS_DISAGREE: [Fault("two of this host made different ones", disagrees, blamed=0)],
    Cause.RAIL_MTU: [
        Fault("only small ones pass", on_rail1(unanswered=2, unanswered_ns=1_500_000_000, only_small_arrive=2))
    ],
    Cause.RAIL_FILTERED: [Fault("no answer", on_rail1(unanswered=2, unanswered_ns=1_500_000_000))],
    Cause.RAIL_LOSSY: [
        Fault(
            "sends again, as the other end may, too",
            on_rail1(sent_bytes=MIB, retransmitted_bytes=MIB // 4, busy_ratio=0.9),
            told={**WEAK, "confidence": "medium"},
        ),
        Fault(
            "losing by its own count",
            on_rail1(losses=(("rx_crc_errors", 500),)),
            told={**STRONG, "confidence": "high"},
        ),
    ],
    Cause.RAIL_SLOW: [
        Fault("full queue", on_rail1(backlog_bytes=MIB, busy_ratio=1.0), told={**STRONG, "confidence": "high"}),
        Fault(
            "long round trips, as the other end has, too",
            on_rail1(round_trip_ns=60_000_000, least_round_trip_ns=100_000, busy_ratio=1.0, backlog_bytes=0),
            told={**WEAK, "confidence": "medium"},
        ),
    ],
    Cause.GPU_NOT_PROGRESSING: [Fault("never begins", gpu_hangs, at_once=False, blamed=0, culprit=False)],
    Cause.RANK_BEHIND: [
        Fault("only waits, for the other of two", shows(), at_once=False, nranks=2, blamed=1, culprit=False),
        Fault("only waits, in a longer ring", shows(), at_once=False, culprit=False),
        Fault(
            "a thread waits in the network",
            shows(begins=False, waits_in=("recvmsg",)),
            at_once=False,
            culprit=False,
            levels=(False,),
            told={**WEAK, "op": "AllReduce"},
        ),
        Fault("starved", shows(process=STARVED), blamed=0),
        Fault(
            "skipped a collective, and does not read what peers send",
            shows(begins=False, rails=UNREAD),
            blamed=0,
            levels=(True, False),
            told=WEAK,
        ),
        Fault("waits, and messages are not counted any more", not_counted_any_more, at_once=False, culprit=False),
    ],
    Cause.UNSEEN: [Fault("what is in flight is of no call", graph_hangs, at_once=False, culprit=False)],
}


@pytest.mark.parametrize(
    ("cause", "fault", "seen"),
    [
        pytest.param(cause, fault, seen, id=f"{cause}: {fault.name}, {'completion' if seen else 'counts'}")
        for cause, faults in FAULTS.items()
        for fault in faults
        for seen in fault.levels
    ],
)
def test_each_fault_is_found_in_time_and_over_when_it_goes_on(cause: Cause, fault: Fault, seen: bool) -> None:
    world = World(seen=seen, nranks=fault.nranks)
    steady(world)
    fault.happens(world)
    took_s = world.until_flagged(40)
    if fault.at_once:
        assert took_s <= FLOOR_S + LOOK_S
    else:
        # Of calls alone it counts from the last one, a look ago.
        assert (AFTER_S if seen else AFTER_S - LOOK_S) <= took_s <= AFTER_S + LOOK_S
    stall = world.stall
    assert stall is not None
    assert (stall.diagnosis.cause, stall.diagnosis.blamed_rank, stall.diagnosis.culprit) == (
        cause,
        fault.blamed,
        fault.culprit,
    )
    assert {name: getattr(stall, name) for name in fault.told} == fault.told
    rail = ("1", "rail1") if cause.startswith("rail_") else ("", "")
    assert (stall.diagnosis.rail, stall.diagnosis.device) == rail
    (rank,) = world.ranks
    rank.rails, rank.process, rank.waits_in = RAILS, MOVING, ()
    if rank.posted is not None:
        rank.complete()
    rank.work(8, 0.005)
    world.step()
    assert world.stall is None


def test_every_cause_that_a_host_finds_has_a_fault() -> None:
    """That nothing stands out is tried in tests/unit/test_root_cause.py, where it can be had by itself."""
    # Tried in tests/unit/test_deaths.py, test_inside_calls.py, test_unseen_work.py and test_stuck_transfers.py.
    elsewhere = {Cause.PROCESS_GONE, Cause.INSIDE_CALL, Cause.UNSEEN_WORK_STUCK, Cause.TRANSFER_STUCK}
    assert set(FAULTS) == {cause for cause, facts in CAUSES.items() if facts.by_host} - {Cause.UNKNOWN} - elsewhere
    assert all(FAULTS.values())


def test_a_survivor_that_takes_its_communicator_apart_does_not_stall_any_more() -> None:
    world = World()
    steady(world)
    shows(rails=tuple(replace(rail, peer_closed=2) for rail in RAILS))(world)
    world.until_flagged(10)
    world.ranks[0].ended = True
    world.step()
    assert world.stall is None


def test_whether_anything_was_sent_is_not_known_before_messages_are_counted_again() -> None:
    world = World(nranks=8)
    world.rests = False
    steady(world)
    (rank,) = world.ranks
    while not world.watch._reader.learnt:
        world.step()
    rank.begin()
    rank.sequence -= 1  # no call: a look finds what is in flight, and reads nothing else
    world.clock.now_ns += EVALUATION_NS
    world.watch.evaluate()
    assert not world.watch._reader.learnt
    fact = world.watch._reader.fact(0)
    assert fact.in_flight is not None
    assert not fact.in_flight.nothing_sent


# Several ranks of a host


@levels
def test_of_two_ranks_on_a_host_the_one_that_sleeps_behind_is_named_by_both(seen: bool) -> None:
    world = World(seen=seen, ranks=2, nranks=8)
    steady(world)
    first, second = world.ranks
    second.begin()
    assert world.until_flagged(10) <= FLOOR_S + LOOK_S
    world.step()
    assert {stall.diagnosis.blamed_rank for stall in world.watch.current} == {first.rank}
    assert {stall.diagnosis.cause for stall in world.watch.current} == {Cause.RANK_BEHIND}


@levels
def test_an_agent_that_came_late_names_the_rank_behind_by_the_numbers_of_nccl(seen: bool) -> None:
    world = World(seen=seen, ranks=2, nranks=8)
    world.whole = False
    first, second = world.ranks
    # The agent attached when the second had made a call that the first had not: it counts one call more of the first.
    world.calls_before = {first.instance: 1000, second.instance: 1001}
    first.sequence += 1
    steady(world)
    second.begin()
    assert first.sequence == second.sequence
    assert world.until_flagged(10) <= FLOOR_S + LOOK_S
    world.step()
    assert {stall.diagnosis.cause for stall in world.watch.current} == {Cause.RANK_BEHIND}
    assert {stall.diagnosis.blamed_rank for stall in world.watch.current} == {first.rank}
    assert {stall.diagnosis.evidence[0] for stall in world.watch.current} == {
        f"rank {first.rank} is 1 call behind rank {second.rank}"
    }


def test_an_agent_that_came_late_and_cannot_know_compares_nobody() -> None:
    world = World(ranks=2, nranks=8)
    world.whole = False
    first, second = world.ranks
    world.calls_before = {second.instance: 1001}
    first.sequence += 1
    steady(world)
    second.begin()
    world.until_flagged(120)
    assert [stall.diagnosis.blamed_rank for stall in world.watch.current] == [None]


def test_a_rank_that_made_the_call_is_not_blamed_for_having_run_ahead_less() -> None:
    world = World(ranks=2, nranks=8)
    steady(world)
    first, second = world.ranks
    first.begin()
    second.begin()
    second.ahead = 3
    second.sequence += 3
    assert world.until_flagged(40) >= AFTER_S
    assert {stall.diagnosis.blamed_rank for stall in world.watch.current} == {None}


def test_ranks_of_one_process_are_told_apart() -> None:
    world = World(ranks=2, nranks=2)
    first, second = world.ranks
    second.pid = first.pid
    steady(world)
    second.begin()
    world.until_flagged(10)
    assert {stall.diagnosis.blamed_rank for stall in world.watch.current} == {first.rank}


# Processes that end


@pytest.mark.parametrize("status", [9, 11, 1 << 8], ids=["SIGKILL", "SIGSEGV", "exit 1"])
def test_a_killed_or_failed_rank_is_gone_at_once(status: int) -> None:
    world = World()
    steady(world)
    (rank,) = world.ranks
    world.watch.processes_gone({rank.pid: status})
    rank.gone = True
    ((at_ns, stall),) = world.begun
    assert at_ns == world.clock.now_ns
    assert (stall.diagnosis.cause, stall.diagnosis.blamed_rank) == (Cause.PROCESS_GONE, 0)
    world.step(40)
    assert world.stall == stall
    world.watch.forget([rank.instance])
    assert world.stall is None
    assert world.watch.facts().lengths == ()


@pytest.mark.parametrize("leaves", ["ended", "gone"])
def test_a_rank_that_fails_at_the_end_of_a_job_stalls_until_the_others_have_left_for_a_minute(leaves: str) -> None:
    world = World(ranks=3, nranks=3)
    steady(world)
    *others, last = world.ranks
    world.watch.processes_gone({last.pid: 1 << 8})
    last.gone = True
    setattr(others[0], leaves, True)
    world.step(4 * 100)
    assert world.stall is not None, "another rank has not left, and may wait"
    setattr(others[1], leaves, True)
    world.step()
    assert world.stall is None


def test_of_a_process_that_dies_long_after_the_last_look_it_is_known_what_it_was_at() -> None:
    world = World()
    steady(world)
    (rank,) = world.ranks
    rank.work(8, 0.005)
    world.watch.evaluate()
    world.clock.now_ns += EVALUATION_NS + EVALUATION_NS // 2
    rank.begin(Op.ReduceScatter)
    world.clock.now_ns += EVALUATION_NS
    world.watch.processes_gone({rank.pid: None})
    assert world.stall is not None
    assert world.stall.op == "ReduceScatter"
