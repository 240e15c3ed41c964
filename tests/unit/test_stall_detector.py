"""When something is called a stall: the limits, whose they are, and how stalls begin, go on and end."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.facts.causes import Cause
from railscope.agent.facts.stall import Diagnosis, OwnHistory, Stall
from railscope.agent.node.stalls.detector import Detector, StallLimits
from railscope.agent.node.stalls.evidence import Evidence, RailSigns, RankFacts
from tests.unit import stall_facts
from tests.unit.stall_facts import MIB, PROCESS, SECOND_NS, STARVED, STOPPED, USUAL, with_process

LIMITS: Final = StallLimits()
FLIGHT: Final = replace(stall_facts.FLIGHT, history=USUAL)
RANK: Final = replace(stall_facts.RANK, rank=0, in_flight=FLIGHT)
RAIL: Final = stall_facts.RAIL0
CALM: Final = replace(stall_facts.CALM, rails=(RAIL,))
DOWN: Final = replace(CALM, rails=(replace(RAIL, up=False),))


def diagnosis(cause: Cause, *, culprit: bool) -> Diagnosis:
    return Diagnosis(cause, ("a sentence",), culprit=culprit)


@pytest.mark.parametrize(
    ("cause", "culprit", "history", "seconds"),
    [
        (Cause.UNKNOWN, False, USUAL, 30),
        (Cause.PROCESS_STOPPED, True, None, 2),
        (Cause.RAIL_DOWN, True, USUAL, 2),
        (Cause.RAIL_DOWN, True, replace(USUAL, longest_ns=20e9), 2),
        (Cause.RANK_BEHIND, True, USUAL, 2),
        (Cause.RANK_BEHIND, True, replace(USUAL, longest_ns=1e9), 8),
        (Cause.RANK_BEHIND, True, replace(USUAL, longest_ns=10e9), 30),
        (Cause.RANK_BEHIND, True, None, 30),
        (Cause.RANK_BEHIND, True, replace(USUAL, operations=19), 30),
    ],
)
def test_who_is_plainly_broken_has_little_time_who_is_suspect_his_own_history_and_a_wait_the_most(
    cause: Cause, culprit: bool, history: OwnHistory | None, seconds: float
) -> None:
    assert LIMITS.limit_ns(replace(FLIGHT, history=history), diagnosis(cause, culprit=culprit)) == seconds * SECOND_NS


@given(
    st.integers(1, 10**12),
    st.floats(2, 1000),
    st.integers(1, 10**12),
    st.sampled_from(list(Cause)),
    st.booleans(),
    st.none() | st.builds(OwnHistory, st.integers(1, 10**6), st.floats(0, 1e12), st.floats(0, 1e12), st.none()),
)
def test_nothing_may_take_longer_than_the_absolute_limit(
    after_ns: int, factor: float, floor_ns: int, cause: Cause, culprit: bool, history: OwnHistory | None
) -> None:
    limits = StallLimits(after_ns, factor, floor_ns)
    limit_ns = limits.limit_ns(replace(FLIGHT, history=history), diagnosis(cause, culprit=culprit))
    assert min(after_ns, floor_ns) <= limit_ns <= after_ns
    assert limits.suspicion_ns() <= limit_ns


def test_an_operation_below_suspicion_is_not_looked_at() -> None:
    def never(_rank: RankFacts) -> Evidence:
        raise AssertionError("nobody is suspected")

    stalls = Detector(LIMITS, lambda: 0)
    assert stalls.evaluate(SECOND_NS - 1, [RANK], never).begun == ()
    assert stalls.evaluate(10 * SECOND_NS, [replace(RANK, in_flight=None)], never).begun == ()


def test_a_stall_begins_once_goes_on_and_ends_with_its_operation() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    (begun,) = stalls.evaluate(2 * SECOND_NS, [RANK], lambda _: DOWN).begun
    assert (begun.since_ns, begun.flagged_ns) == (0, 2 * SECOND_NS)
    changes = stalls.evaluate(3 * SECOND_NS, [RANK], lambda _: DOWN)
    assert (changes.begun, changes.ended) == ((), ())
    (ended,) = stalls.evaluate(4 * SECOND_NS, [replace(RANK, in_flight=None)], lambda _: DOWN).ended
    assert (ended.ended_ns, ended.length_ns(99 * SECOND_NS)) == (4 * SECOND_NS, 4 * SECOND_NS)
    assert stalls.current == ()


def test_the_next_operation_that_stands_too_is_another_stall() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    stalls.evaluate(2 * SECOND_NS, [RANK], lambda _: DOWN)
    later = replace(RANK, in_flight=replace(FLIGHT, since_ns=10 * SECOND_NS))
    changes = stalls.evaluate(20 * SECOND_NS, [later], lambda _: DOWN)
    assert [stall.since_ns for stall in changes.ended] == [0]
    assert [stall.since_ns for stall in changes.begun] == [10 * SECOND_NS]


def test_a_communicator_that_is_gone_ends_its_stall_unless_its_process_went() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    other = replace(RANK, instance=8)
    stalls.evaluate(2 * SECOND_NS, [RANK, other], lambda _: DOWN)
    assert stalls.process_gone(3 * SECOND_NS, other, "process 4711 has ended") is None, "it was stalled already"
    (ended,) = stalls.evaluate(4 * SECOND_NS, [], lambda _: DOWN).ended
    assert ended.instance == 7
    (left,) = stalls.current
    assert (left.diagnosis.cause, left.since_ns) == (Cause.PROCESS_GONE, 0)
    assert stalls.process_gone(5 * SECOND_NS, other, "again") is None
    (forgotten,) = stalls.forget(6 * SECOND_NS, [8, 99])
    assert forgotten.ended_ns == 6 * SECOND_NS
    assert stalls.current == ()


def test_the_rank_that_went_first_is_blamed_for_those_that_went_after_it() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    first, second = replace(RANK, rank=1, pid=4712, instance=8), RANK
    killed = stalls.process_gone(SECOND_NS, first, "process 4712 has ended: killed by signal 9")
    failed = stalls.process_gone(2 * SECOND_NS, second, "process 4711 has ended: exit status 1")
    assert killed is not None
    assert failed is not None
    assert (killed.diagnosis.blamed_rank, killed.diagnosis.culprit) == (1, True)
    assert (failed.diagnosis.cause, failed.diagnosis.blamed_rank, failed.diagnosis.culprit) == (
        Cause.PROCESS_GONE,
        1,
        False,
    )
    assert failed.diagnosis.evidence == (
        "process 4711 has ended: exit status 1",
        "rank 1, process 4712, had ended before",
    )
    elsewhere = stalls.process_gone(3 * SECOND_NS, replace(RANK, comm="cafe", instance=9), "process 4711 has ended")
    assert elsewhere is not None
    assert elsewhere.diagnosis.blamed_rank == RANK.rank, "of another communicator"


def test_a_job_of_which_nobody_is_left_does_not_stall_for_ever() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    ranks = [replace(RANK, rank=number, nranks=2, instance=7 + number) for number in range(2)]
    stalls.process_gone(SECOND_NS, ranks[0], "process 4711 has ended")
    assert stalls.evaluate(100 * SECOND_NS, [], lambda _: DOWN).ended == (), "somebody on another host waits for it"
    stalls.process_gone(100 * SECOND_NS, ranks[1], "process 4712 has ended")
    assert stalls.evaluate(159 * SECOND_NS, [], lambda _: DOWN).ended == ()
    assert [one.instance for one in stalls.evaluate(160 * SECOND_NS, [], lambda _: DOWN).ended] == [7, 8]
    assert stalls.current == ()


@pytest.mark.parametrize(("left", "over"), [({"0", "1", "2"}, True), ({"1", "2"}, False)])
def test_a_rank_that_fails_when_the_others_have_left_does_not_stall_for_ever(left: set[str], over: bool) -> None:
    asked: list[str] = []

    def ended(comm: str) -> set[str]:
        asked.append(comm)
        return left

    stalls = Detector(LIMITS, lambda: 0, ended)
    stalls.process_gone(SECOND_NS, replace(RANK, rank=3, nranks=4), "process 4711 has ended: exit status 1")
    assert stalls.evaluate(60 * SECOND_NS, [], lambda _: DOWN).ended == ()
    assert asked == []
    assert bool(stalls.evaluate(61 * SECOND_NS, [], lambda _: DOWN).ended) is over
    assert asked == [RANK.comm]


def test_a_worse_founded_cause_does_not_replace_a_better_one() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    stalls.evaluate(2 * SECOND_NS, [RANK], lambda _: DOWN)
    stalls.evaluate(3 * SECOND_NS, [RANK], lambda _: CALM)
    (stall,) = stalls.current
    assert stall.diagnosis.cause is Cause.RAIL_DOWN
    stalls.evaluate(4 * SECOND_NS, [RANK], lambda _: with_process(STOPPED, DOWN))
    (stall,) = stalls.current
    assert stall.diagnosis.cause is Cause.PROCESS_STOPPED


def test_of_two_rails_with_the_same_trouble_the_first_that_was_found_stays_blamed() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    for second, down in ((2, RAIL), (3, replace(RAIL, rail="1", device="rail1"))):
        evidence = replace(CALM, rails=(replace(down, up=False),))
        stalls.evaluate(second * SECOND_NS, [RANK], lambda _, one=evidence: one)  # type: ignore[misc]
    (stall,) = stalls.current
    assert (stall.diagnosis.cause, stall.diagnosis.device) == (Cause.RAIL_DOWN, RAIL.device)


def test_a_process_is_watched_before_it_is_called_idle() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    fresh = replace(CALM, process=replace(PROCESS, window_ns=0))
    assert stalls.evaluate(40 * SECOND_NS, [RANK], lambda _: fresh).begun == ()
    assert len(stalls.evaluate(41 * SECOND_NS, [RANK], lambda _: CALM).begun) == 1


@pytest.mark.parametrize(
    ("evidence", "moves"),
    [
        (CALM, False),
        (replace(CALM, process=replace(PROCESS, moved_bytes=1000)), False),
        (replace(CALM, process=replace(PROCESS, moved_bytes=1 << 20)), True),
        (replace(CALM, sends=True), True),
        (replace(CALM, sends=False), False),
        (replace(CALM, sends=False, rails=(replace(RAIL, port_bytes=1 << 30, connections=0),)), False),
        (replace(CALM, rails=(replace(RAIL, port_bytes=1 << 30),)), False),
        (replace(CALM, rails=(replace(RAIL, port_bytes=1 << 30, connections=0),)), True),
    ],
    ids=[
        "nothing",
        "keep-alive",
        "TCP",
        "NCCL hands over",
        "NCCL does not",
        "only others",
        "others on a TCP rail",
        "RDMA",
    ],
)
def test_an_operation_whose_process_moves_bytes_is_no_stall(evidence: Evidence, moves: bool) -> None:
    stalls = Detector(LIMITS, lambda: 0)
    assert bool(stalls.evaluate(40 * SECOND_NS, [RANK], lambda _: evidence).begun) is not moves


BUSY_PORT = replace(CALM, rails=(replace(RAIL, port_bytes=1 << 30, connections=0),))
"""Of an RDMA device: whose bytes these are is not told."""


def test_a_busy_port_does_not_excuse_for_ever_nor_what_is_plainly_broken() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    assert stalls.evaluate(119 * SECOND_NS, [RANK], lambda _: BUSY_PORT).begun == ()
    assert len(stalls.evaluate(120 * SECOND_NS, [RANK], lambda _: BUSY_PORT).begun) == 1
    (stall,) = (
        Detector(LIMITS, lambda: 0).evaluate(3 * SECOND_NS, [RANK], lambda _: with_process(STOPPED, BUSY_PORT)).begun
    )
    assert stall.diagnosis.cause is Cause.PROCESS_STOPPED
    (stall,) = (
        Detector(LIMITS, lambda: 0).evaluate(40 * SECOND_NS, [RANK], lambda _: with_process(STARVED, BUSY_PORT)).begun
    )
    assert (stall.diagnosis.cause, stall.diagnosis.culprit) == (Cause.RANK_BEHIND, True)


def test_who_receives_may_stand_beside_a_busy_port_without_sending() -> None:
    receiver = replace(RANK, in_flight=replace(FLIGHT, op="Recv"))
    evidence = replace(BUSY_PORT, sends=False)
    assert Detector(LIMITS, lambda: 0).evaluate(40 * SECOND_NS, [receiver], lambda _: evidence).begun == ()


# Operations that are slow


MOVING: Final = with_process(replace(PROCESS, moved_bytes=1 << 30), CALM)
RAIL1: Final = replace(RAIL, rail="1", device="rail1")
QUEUE: Final = replace(MOVING, rails=(RAIL, replace(RAIL1, backlog_bytes=1 << 20, busy_ratio=0.9)))
OTHER_QUEUE: Final = replace(MOVING, rails=(replace(RAIL, backlog_bytes=1 << 20, busy_ratio=0.9), RAIL1))
BURSTS: Final = replace(MOVING, rails=(RAIL, replace(RAIL1, backlog_bytes=1 << 20, busy_ratio=0.15)))
SHARED: Final = replace(QUEUE.rails[1], port_bytes=75_000_000, foreign_ratio=0.8)
"""As measured: 50 MB/s of another TCP stream on a rail of as much, 80 % of what the port carried."""
HUNGRY: Final = with_process(replace(STARVED, moved_bytes=1 << 30, busy_ratio=0.05), CALM)
HELD: Final = with_process(STOPPED, CALM)
SLOW: Final = replace(RANK, in_flight=None, slow=replace(USUAL, recent_mean_ns=20e6), slow_op="AllReduce")
SLOWER: Final = replace(SLOW, slow=OwnHistory(1000, 200e6, 250e6, 800e6))
FROM_NOTHING: Final = replace(SLOW, slow=OwnHistory(1000, 0.0, 0.0, 20e6))
FOUR_TIMES: Final = "4.0 times as long"


def on(rail: RailSigns) -> Evidence:
    """The second rail is this one."""
    return replace(QUEUE, rails=(RAIL, rail))


@pytest.mark.parametrize(
    ("found", "rank", "cause", "words"),
    [
        pytest.param([QUEUE] * 20, SLOW, Cause.RAIL_SLOW, FOUR_TIMES, id="a rail that differs"),
        pytest.param([HUNGRY] * 20, SLOWER, Cause.RANK_BEHIND, FOUR_TIMES, id="starved, and half a second each"),
        pytest.param(
            [on(replace(SHARED, foreign_ratio=0.1))] * 20, SLOW, Cause.RAIL_SLOW, FOUR_TIMES, id="its own load"
        ),
        pytest.param(
            [on(replace(SHARED, port_bytes=75_000))] * 20, SLOW, Cause.RAIL_SLOW, FOUR_TIMES, id="hardly any load"
        ),
        # No operation stands for long: it is stopped for 1.5 s, and runs for half of one.
        pytest.param(
            ([HELD] * 6 + [MOVING] * 2) * 3, SLOW, Cause.PROCESS_STOPPED, FOUR_TIMES, id="stopped again and again"
        ),
        pytest.param(
            [QUEUE] * 20, FROM_NOTHING, Cause.RAIL_SLOW, "operations take 20.0 ms", id="they took no time before"
        ),
    ],
)
def test_slow_operations_are_a_stall_beside_somebody_who_makes_them_slow(
    found: list[Evidence], rank: RankFacts, cause: Cause, words: str
) -> None:
    (stall,) = begun_in(found, rank)
    assert (stall.diagnosis.cause, stall.op, stall.slow) == (cause, "AllReduce", True)
    assert words in stall.diagnosis.evidence[-1]
    assert cause is not Cause.PROCESS_STOPPED or stall.diagnosis.blamed_rank == RANK.rank


@pytest.mark.parametrize(
    "found",
    [
        pytest.param([MOVING] * 20, id="nothing differs"),
        pytest.param([HUNGRY] * 40, id="threads wait for a processor, and operations are fast"),
        pytest.param(([QUEUE] * 4 + [MOVING]) * 5, id="a queue is full now and then"),
        pytest.param(([QUEUE] * 4 + [OTHER_QUEUE] * 4) * 5, id="queues are full in turns"),
        pytest.param([BURSTS] * 20, id="a queue of a rail that is not busy"),
        pytest.param([on(SHARED)] * 20, id="a rail that works for others"),
        pytest.param(([HELD] * 3 + [MOVING] * 5) * 6, id="held now and then"),
        pytest.param([HELD] * 7 + [MOVING] * 20, id="held for once"),
    ],
)
def test_slow_operations_alone_are_no_stall(found: list[Evidence]) -> None:
    assert begun_in(found) == []


@pytest.mark.parametrize(("found", "cause"), [(QUEUE, Cause.RAIL_SLOW), (HELD, Cause.PROCESS_STOPPED)])
def test_what_makes_operations_slow_is_so_until_they_are_fast_again(found: Evidence, cause: Cause) -> None:
    stalls = Detector(LIMITS, lambda: 0)
    for at in range(12):
        stalls.evaluate((160 + at) * SECOND_NS // 4, [SLOW], lambda _: found)
    assert not stalls.evaluate(44 * SECOND_NS, [SLOW], lambda _: MOVING).ended
    (ended,) = stalls.evaluate(45 * SECOND_NS, [replace(SLOW, slow=None)], lambda _: MOVING).ended
    assert ended.diagnosis.cause is cause


def begun_in(evidences: list[Evidence], rank: RankFacts = SLOW) -> list[Stall]:
    """What begins while these are found, four times a second."""
    stalls = Detector(LIMITS, lambda: 0)
    begun: list[Stall] = []
    for at, evidence in enumerate(evidences):
        begun += stalls.evaluate((160 + at) * SECOND_NS // 4, [rank], lambda _, one=evidence: one).begun  # type: ignore[misc]
    return begun


def test_looks_from_before_operations_became_slow_do_not_count() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    for at, rank in enumerate([SLOW] * 7 + [replace(SLOW, slow=None)] + [SLOW] * 7):
        assert not stalls.evaluate((160 + at) * SECOND_NS // 4, [rank], lambda _: HELD).begun


BY_THE_WAY: Final = replace(
    QUEUE, rails=(replace(RAIL, sent_bytes=MIB, retransmitted_bytes=32 << 10, busy_ratio=0.6), replace(RAIL1))
)
"""The other rail sent 3.1 % again, while no queue of the first is seen."""


def test_a_rail_that_sends_a_little_again_does_not_take_the_blame_from_a_slow_one_for_good() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    for at, found in enumerate([QUEUE] * 12 + [BY_THE_WAY] * 4 + [QUEUE] * 4):
        stalls.evaluate((160 + at) * SECOND_NS // 4, [SLOW], lambda _, one=found: one)  # type: ignore[misc]
        blamed = [(stall.diagnosis.cause, stall.diagnosis.device) for stall in stalls.current]
        assert blamed == [(Cause.RAIL_SLOW, "rail1")] * (at >= 7)


def test_the_blame_goes_to_another_rail_when_that_one_is_found_as_often_as_the_first() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    changed = []
    for at, found in enumerate([BY_THE_WAY] * 12 + [QUEUE] * 12):
        stalls.evaluate((160 + at) * SECOND_NS // 4, [SLOW], lambda _, one=found: one)  # type: ignore[misc]
        changed += [at for stall in stalls.current if stall.diagnosis.device == "rail1"]
    assert changed == list(range(19, 24))


# An operation on a rail so slow that none completes

SIX_SECONDS: Final = tuple(at * SECOND_NS // 4 for at in range(4, 25))
CRAWLS: Final = replace(
    MOVING,
    process=replace(PROCESS, window_ns=1_610_000_000, moved_bytes=8_482_352),
    rails=(
        replace(RAIL, sent_bytes=6_554_792, retransmitted_bytes=1176, busy_ratio=0.09, backlog_bytes=0),
        replace(RAIL1, sent_bytes=1_889_640, busy_ratio=1.0, round_trip_ns=93_613_000, backlog_bytes=99_924),
    ),
)
"""As measured: one rail shaped to 10 Mbit/s, in an AllReduce that took 38 ms before and takes 18 s now."""
OF_38_MS: Final = OwnHistory(240, 37.6e6, 44.5e6, 40.1e6)
CRAWLING: Final = replace(RANK, completed=None, in_flight=replace(stall_facts.WEAK, history=OF_38_MS))


def test_an_operation_that_never_ends_on_a_slow_rail_is_told_of_although_it_moves() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    begun = [one for at_ns in SIX_SECONDS for one in stalls.evaluate(at_ns, [CRAWLING], lambda _: CRAWLS).begun]
    ((cause, device, slow, flagged_ns),) = [
        (one.diagnosis.cause, one.diagnosis.device, one.slow, one.flagged_ns) for one in begun
    ]
    assert (cause, device, slow) == (Cause.RAIL_SLOW, "rail1", True)
    assert flagged_ns == 2.75 * SECOND_NS
    assert begun[0].diagnosis.evidence[-1] == "an operation has taken 2.8 s so far, 37.6 ms before"


@pytest.mark.parametrize(
    ("rank", "found"),
    [
        pytest.param(CRAWLING, MOVING, id="no rail differs"),
        pytest.param(
            replace(CRAWLING, in_flight=replace(FLIGHT, history=replace(OF_38_MS, longest_ns=2e9))),
            CRAWLS,
            id="others took seconds",
        ),
        pytest.param(replace(CRAWLING, in_flight=stall_facts.WEAK), CRAWLS, id="nothing is known of others"),
        pytest.param(
            CRAWLING,
            replace(CRAWLS, process=replace(CRAWLS.process, written_bytes=100 * MIB)),
            id="its process writes",
        ),
        pytest.param(
            CRAWLING,
            replace(
                CRAWLS, rails=(CRAWLS.rails[0], replace(CRAWLS.rails[1], port_bytes=75_000_000, foreign_ratio=0.8))
            ),
            id="others fill the rail",
        ),
    ],
)
def test_an_operation_that_moves_for_long_is_no_stall_by_itself(rank: RankFacts, found: Evidence) -> None:
    stalls = Detector(LIMITS, lambda: 0)
    assert not [one for at_ns in SIX_SECONDS for one in stalls.evaluate(at_ns, [rank], lambda _: found).begun]


def test_a_stall_on_a_slow_rail_outlasts_what_is_not_seen_of_it_and_ends_when_operations_are_fast() -> None:
    stalls = Detector(LIMITS, lambda: 0)
    for at_ns in SIX_SECONDS:
        stalls.evaluate(at_ns, [CRAWLING], lambda _: CRAWLS)
    # At counts the signs that one is in flight come and go; and three calls later the next one crawls.
    unseen, next_one = replace(CRAWLING, in_flight=None), replace(CRAWLING, in_flight=None, enqueued=103)
    assert stalls.evaluate(7 * SECOND_NS, [unseen], lambda _: CRAWLS).ended == ()
    assert stalls.evaluate(18 * SECOND_NS, [next_one], lambda _: CRAWLS).ended == ()
    (ended,) = stalls.evaluate(19 * SECOND_NS, [replace(next_one, enqueued=120)], lambda _: CRAWLS).ended
    assert ended.slow
