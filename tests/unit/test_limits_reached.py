"""Who lost what at a limit: totals never fall, users are named up to a number, and losses are forgotten as news."""

from __future__ import annotations

from railscope.agent.node.daemon.limits import MOST_USERS, OTHERS, RECENT_NS, LimitsReached, user_of_share
from railscope.probes.nccl.records.calls import DEEPLY_NESTED
from railscope.probes.processes.namespaces import FIRST_NAMESPACE
from tests.unit.stall_world import SimulatedClock


def test_totals_grow_with_readings_and_never_fall() -> None:
    limits = LimitsReached(SimulatedClock())
    readings: list[dict[int | None, int]] = [{5000: 3}, {5000: 5, None: 1}, {5000: 5}, {5000: 2}]
    for reading in readings:
        limits.record("inspection", reading)
    assert limits.totals == {("inspection", "5000"): 7, ("inspection", "unknown"): 1}


def test_users_beyond_a_number_are_one() -> None:
    limits = LimitsReached(SimulatedClock())
    limits.record("libraries", dict.fromkeys(range(MOST_USERS + 10), 1))
    limits.record("communicators", {7: 1})
    assert limits.totals["libraries", OTHERS] == 10
    assert sum(limit == "libraries" for limit, _ in limits.totals) == MOST_USERS + 1
    assert limits.totals["communicators", "7"] == 1


def test_who_lost_something_lately_is_named_and_later_is_not() -> None:
    clock = SimulatedClock()
    limits = LimitsReached(clock)
    limits.record("communicators", {5000: 1})
    limits.record("libraries", {0: 1})
    assert limits.recent() == "communicators of uid 5000, libraries of uid 0"
    clock.sleep(RECENT_NS / 1e9)
    limits.record("communicators", {5000: 1})
    assert limits.recent() == ""


def test_shares_of_containers_are_roots_and_nobody_knows_whose_deeply_nested_ones_are() -> None:
    shares = (5000, None, FIRST_NAMESPACE + 17, DEEPLY_NESTED)
    assert [user_of_share(number) for number in shares] == [5000, None, 0, None]
