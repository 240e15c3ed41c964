"""Who comes last among the ranks of a host, however their calls are cut into batches.  The events are simulated."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.facts.snapshot import RankArrivals
from railscope.agent.node.collectives.communicators import Communicator
from railscope.agent.node.collectives.stragglers import MOST_GROUPS, WINDOW, Stragglers
from railscope.agent.node.inspection.tenants import Tenant
from railscope.probes.loading.maps import Records
from railscope.probes.nccl.abi import Op
from railscope.probes.nccl.records.calls import CALL_EVENT

Call = tuple[int, int, int]
"""Instance, number, time in ns."""


def take_from(stragglers: Stragglers, batch: Records, communicator_of: Callable[[int], Communicator | None]) -> None:
    stragglers.record(batch, np.unique(batch["instance"]).tolist(), communicator_of)


def take(stragglers: Stragglers, batch: Records) -> None:
    """Have a batch looked at by itself."""
    take_from(stragglers, batch, who)
    stragglers.arrivals()


def events(calls: list[Call], op: Op = Op.AllReduce) -> Records:
    records = np.zeros(len(calls), CALL_EVENT)
    for at, (instance, number, time_ns) in enumerate(calls):
        records[at]["instance"], records[at]["sequence"], records[at]["time_ns"] = (
            instance,
            number & 0xFFFFFFFF,
            time_ns,
        )
    records["op"] = op
    return records


def who(instance: int) -> Communicator | None:
    """Ranks 0 to 9 of communicator 0xa are instances 10 to 19, those of 0xb are 20 to 29; 30 is alone, 99 unknown."""
    if instance == 99:
        return None
    return Communicator(
        instance, 1, 0, instance // 10 + 9, instance % 10, nranks=1 if instance == 30 else 16, whole=True
    )


def shown(stragglers: Stragglers) -> dict[tuple[int, str], tuple[int, float]]:
    return {(int(one.comm, 16), one.rank): (one.last, one.lag_seconds) for one in stragglers.arrivals()}


def test_the_rank_that_calls_last_is_counted_with_its_distance_from_the_one_before_it() -> None:
    stragglers = Stragglers()
    take(stragglers, events([(10, 1, 100), (11, 1, 150), (12, 1, 1_000_000_150)]))
    take(stragglers, events([(10, 2, 10), (12, 2, 20), (11, 2, 520)]))
    assert stragglers.arrivals() == (
        RankArrivals("000000000000000a", "0", 0, 0.0, 0.0),
        RankArrivals("000000000000000a", "1", 1, 5e-7, 0.0),
        RankArrivals("000000000000000a", "2", 1, 1.0, 1.0),
    )


def test_time_in_which_several_calls_of_one_rank_are_missing_counts_once() -> None:
    stragglers = Stragglers()
    take(stragglers, events([(10, 1, 0), (11, 1, 0)]))  # who is there
    calls = [(10, number, number * 10) for number in range(2, 12)]
    calls += [(11, number, 1_000_000_000 + number * 10) for number in range(2, 12)]
    take(stragglers, events(calls[:7] + calls[10:14]))
    take(stragglers, events(calls[7:10] + calls[14:]))
    (_, late) = stragglers.arrivals()
    assert late.last >= 10
    assert round(late.lag_seconds, 3) == 10.0
    assert round(late.alone_seconds, 3) == 1.0


def test_ranks_whose_events_come_in_different_batches_are_matched() -> None:
    stragglers = Stragglers()
    take(stragglers, events([(10, 1, 0), (11, 1, 0)]))  # who is there
    take(stragglers, events([(11, number, number * 1000 + 400) for number in range(2, 200)]))
    take(stragglers, events([(10, number, number * 1000) for number in range(2, 200)]))
    last, lag_seconds = shown(stragglers)[10, "1"]
    assert last >= 198
    assert lag_seconds * 1e9 == 198 * 400


def test_ranks_of_one_communicator_cost_no_more_each_where_there_are_many() -> None:
    """Those of a tenant who makes thousands, none of whose calls all ranks make."""

    def one_of_many(instance: int) -> Communicator:
        return Communicator(instance, 1, 0, 9, instance, nranks=10_000, whole=True)

    def looks(count: int) -> int:
        stragglers = Stragglers()
        take_from(stragglers, events([(instance, instance, instance) for instance in range(1, count + 1)]), one_of_many)
        steps = 0

        def step(_frame: object, _event: str, _argument: object) -> None:
            nonlocal steps
            steps += 1

        sys.setprofile(step)
        try:
            assert stragglers.arrivals() == ()
        finally:
            sys.setprofile(None)
        return steps

    assert looks(400) < 3 * looks(200)


def test_a_rank_alone_on_its_host_is_not_compared() -> None:
    stragglers = Stragglers()
    take(stragglers, events([(20, number, number) for number in range(100)]))
    take(stragglers, events([(30, number, number) for number in range(100)]))
    assert stragglers.arrivals() == ()


def test_ranks_that_called_before_anybody_looked_are_not_compared() -> None:
    stragglers = Stragglers()

    def late(instance: int) -> Communicator | None:
        found = who(instance)
        return None if found is None else replace(found, whole=False)

    take_from(stragglers, events([(10, 1, 5), (11, 1, 9)]), late)
    take_from(stragglers, events([(10, 2, 15), (11, 2, 19)]), late)
    assert stragglers.arrivals() == ()


def test_one_rank_that_was_met_in_its_middle_leaves_the_communicator_out() -> None:
    stragglers = Stragglers()

    def one_late(instance: int) -> Communicator | None:
        found = who(instance)
        return None if found is None else replace(found, whole=instance != 12)

    for number in range(1, 9):
        take_from(stragglers, events([(10, number, 0), (11, number, 50)]), one_late)
    before = shown(stragglers)
    assert before
    take_from(stragglers, events([(12, number, 90) for number in range(1, 9)]), one_late)
    take_from(stragglers, events([(one, number, 90) for number in range(9, 19) for one in (10, 11, 12)]), one_late)
    assert shown(stragglers) == before


def test_a_communicator_of_which_calls_were_missed_is_left_out_from_then_on() -> None:
    stragglers = Stragglers()
    take(stragglers, events([(10, 1, 100), (11, 1, 150), (20, 1, 100), (21, 1, 150)]))
    before = shown(stragglers)
    stragglers.leave_out([10, 99])
    take(stragglers, events([(10, 2, 200), (11, 2, 900), (20, 2, 200), (21, 2, 900)]))
    after = shown(stragglers)
    assert {key: after[key] for key in after if key[0] == 10} == {key: before[key] for key in before if key[0] == 10}
    assert after[11, "1"] != before[11, "1"]


def test_a_call_is_judged_when_all_ranks_that_nccl_counts_on_this_host_have_made_it() -> None:
    stragglers = Stragglers()

    def three(instance: int) -> Communicator | None:
        found = who(instance)
        return None if found is None else replace(found, local_ranks=3)

    take_from(stragglers, events([(one, number, 10 * one) for number in range(1, 9) for one in (10, 11)]), three)
    assert stragglers.arrivals() == ()
    take_from(stragglers, events([(12, number, 900) for number in range(1, 9)]), three)
    assert shown(stragglers)[10, "2"][0] == 8


def test_who_is_not_known_yet_is_asked_about_again() -> None:
    stragglers = Stragglers()
    asked = []

    def later(instance: int) -> Communicator | None:
        asked.append(instance)
        return who(instance) if len(asked) > 2 else None

    for number in (1, 2, 3):
        take_from(stragglers, events([(10, number, 5), (11, number, 9)]), later)
        stragglers.arrivals()
    assert shown(stragglers)[10, "1"][0] == 2


def test_communicators_with_messages_between_two_ranks_are_left_out_and_others_are_not() -> None:
    stragglers = Stragglers()
    both = [(10, 1, 5), (11, 1, 9), (20, 1, 5), (21, 1, 9)]
    take(stragglers, events(both))
    mixed = events([(10, 2, 5), (11, 2, 9), (20, 2, 5), (21, 2, 9)])
    mixed["op"][0] = Op.Send
    take(stragglers, mixed)
    take(stragglers, events([(10, 3, 5), (11, 3, 9), (20, 3, 5), (21, 3, 9)]))
    assert shown(stragglers)[10, "1"][0] == 1
    assert shown(stragglers)[11, "1"][0] == 3


def test_calls_of_a_rank_that_comes_to_a_communicator_that_is_left_out_are_not_kept() -> None:
    stragglers = Stragglers()
    take(stragglers, events([(10, 1, 0), (11, 1, 5)], Op.Send))
    take(stragglers, events([(12, 1, 9)], Op.Send))
    take_from(stragglers, events([(12, 2, 19)], Op.Send), who)
    assert not stragglers._pending


def test_numbers_go_on_where_they_begin_again() -> None:
    stragglers = Stragglers()
    for number in range((1 << 32) - 5, (1 << 32) + 5):
        take(stragglers, events([(10, number, number)]))
        take(stragglers, events([(11, number, number + 7)]))
    last, lag_seconds = shown(stragglers)[10, "1"]
    assert last >= 9
    assert round(lag_seconds * 1e9) == 7 * last


def test_a_call_that_one_rank_never_makes_is_given_up_and_costs_no_memory() -> None:
    stragglers = Stragglers()
    take(stragglers, events([(10, 0, 0), (11, 0, 0)]))
    for begin in range(1, 20 * WINDOW, 100):
        take(stragglers, events([(10, number, number) for number in range(begin, begin + 100)]))
    take(stragglers, events([(11, 5, 9)]))
    number = 20 * WINDOW + 200
    take(stragglers, events([(11, number, 7), (10, number, 9)]))
    assert shown(stragglers)[10, "0"] == (1, 2e-9)
    assert stragglers._waiting is not None
    assert np.flatnonzero(stragglers._waiting["count"]).max() < WINDOW


def test_what_is_forgotten_is_not_shown_and_its_communicator_goes_with_its_last_rank() -> None:
    stragglers = Stragglers()
    take(stragglers, events([(10, 1, 5), (11, 1, 9)]))
    take(stragglers, events([(10, 2, 5), (11, 2, 9)]))
    stragglers.forget([10])
    assert set(shown(stragglers)) == {(10, "1")}
    stragglers.forget([11, 12345])
    assert stragglers.arrivals() == ()
    assert not stragglers._groups
    assert not stragglers._by_number
    assert not stragglers._places


def reference(calls: list[Call]) -> dict[tuple[int, str], tuple[int, int]]:
    """The same one call at a time, with all the memory in the world."""
    by_call: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for instance, number, time_ns in calls:
        by_call[instance // 10, number].append((time_ns, instance))
    sums: dict[tuple[int, str], tuple[int, int]] = {}
    for (group, _), arrivals in by_call.items():
        if len(arrivals) == 3:
            *_, (before_ns, _), (last_ns, instance) = sorted(arrivals)
            last, lag_ns = sums.get((group + 9, str(instance % 10)), (0, 0))
            sums[group + 9, str(instance % 10)] = last + 1, lag_ns + last_ns - before_ns
    return sums


@st.composite
def histories(draw: st.DrawFn) -> list[list[Call]]:
    """Calls of three ranks of two communicators, some lost, in batches; each rank's in order."""
    queues = []
    clock = draw(st.integers(0, 1 << 40))
    taken: set[int] = set()
    for instance in (10, 11, 12, 20, 21, 22):
        time_ns, queue = clock, []
        for number in range(1, draw(st.integers(1, 30))):
            time_ns += draw(st.integers(1, 1000))
            while time_ns in taken:  # of two at one time either may be last
                time_ns += 1
            taken.add(time_ns)
            if draw(st.integers(0, 9)):
                queue.append((instance, number, time_ns))
        queues.append(queue)
    batches = []
    while any(queues):
        batch = []
        for queue in queues:
            count = draw(st.integers(0, 12))
            batch += queue[:count]
            del queue[:count]
        batches.append(draw(st.permutations(batch)))
    return batches


@settings(max_examples=150, deadline=None)
@given(histories())
def test_batches_in_any_order_give_what_looking_at_each_call_gives(batches: list[list[Call]]) -> None:
    stragglers = Stragglers()
    instances = (10, 11, 12, 20, 21, 22)
    take(stragglers, events([(instance, 0, 0) for instance in instances]))
    stragglers._counts.totals[:] = 0
    for group in stragglers._groups.values():
        group.shown = None
    for batch in batches:
        take(stragglers, events(batch))
    found = {key: (last, round(lag * 1e9)) for key, (last, lag) in shown(stragglers).items() if last}
    assert found == reference([call for batch in batches for call in batch])


PAIRS = 5_000
"""Instances 2n and 2n+1 are the ranks of communicator n on this host; from this one on they are another tenant's."""


def one_of_a_pair(instance: int) -> Communicator:
    return Communicator(
        instance, instance // 2 // PAIRS, 0, instance // 2, instance % 2, nranks=2, local_ranks=2, whole=True
    )


def whose(pid: int) -> Tenant:
    return Tenant(1000 + pid)


def call_of(communicators: Iterable[int], number: int) -> Records:
    return events([(2 * one + rank, number, rank * 100) for one in communicators for rank in (0, 1)])


def compared(stragglers: Stragglers) -> set[int]:
    return {int(one.comm, 16) for one in stragglers.arrivals()}


def test_a_tenant_who_makes_communicators_without_end_takes_no_place_from_another() -> None:
    stragglers = Stragglers(whose)
    take_from(stragglers, call_of(range(1, 4000), 1), one_of_a_pair)
    his = compared(stragglers)
    assert len(his) == MOST_GROUPS // 2
    take_from(stragglers, call_of([PAIRS, PAIRS + 1], 1), one_of_a_pair)
    assert compared(stragglers) == his | {PAIRS, PAIRS + 1}
    assert stragglers.refused == {1000: 3999 - MOST_GROUPS // 2}


def test_a_communicator_that_had_no_place_gets_one_when_another_ends() -> None:
    stragglers = Stragglers(whose)
    take_from(stragglers, call_of(range(1, 1000), 1), one_of_a_pair)
    before = compared(stragglers)
    waiting = next(one for one in range(1, 1000) if one not in before)
    take_from(stragglers, call_of([waiting], 2), one_of_a_pair)
    assert compared(stragglers) == before, "there is no place"
    ended, another = sorted(before)[:2]
    stragglers.forget([2 * another, 2 * another + 1])
    take_from(stragglers, call_of([another], 2), one_of_a_pair)
    take_from(stragglers, call_of([another], 3), one_of_a_pair)
    assert compared(stragglers) == before, "it is back"
    stragglers.forget([2 * ended, 2 * ended + 1])
    assert compared(stragglers) == before - {ended}
    for number in (3, 4):
        take_from(stragglers, call_of([waiting], number), one_of_a_pair)
    assert compared(stragglers) == before - {ended} | {waiting}
    assert [one.last for one in stragglers.arrivals() if int(one.comm, 16) == waiting] == [0, 2]


def test_a_communicator_that_is_left_out_gives_its_place_to_another() -> None:
    stragglers = Stragglers(whose)
    take_from(stragglers, call_of(range(1, 1000), 1), one_of_a_pair)
    before = compared(stragglers)
    waiting = next(one for one in range(1, 1000) if one not in before)
    sends = call_of([min(before)], 2)
    sends["op"] = Op.Send
    take_from(stragglers, sends, one_of_a_pair)
    assert compared(stragglers) == before, "what was counted of it stays"
    take_from(stragglers, call_of([waiting], 2), one_of_a_pair)
    assert compared(stragglers) == before | {waiting}
    stragglers.forget([2 * min(before), 2 * min(before) + 1])
    assert compared(stragglers) == before - {min(before)} | {waiting}


def test_nothing_is_left_of_communicators_that_had_no_place() -> None:
    stragglers = Stragglers(whose)
    take_from(stragglers, call_of(range(1, 4000), 1), one_of_a_pair)
    assert stragglers.arrivals()
    stragglers.forget(range(2, 8000))
    assert stragglers.arrivals() == ()
    assert not stragglers._refused._which
    assert not stragglers._refused._of_tenants
    assert not stragglers._places
    take_from(stragglers, call_of(range(1, 4000), 1), one_of_a_pair)
    assert len(compared(stragglers)) == MOST_GROUPS // 2
