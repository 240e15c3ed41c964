"""Which ranks a store's series call slow, and by how much.  The store's answers are made up."""

from __future__ import annotations

from dataclasses import replace

from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.facts import SlowRank
from railscope.agent.cluster.fleet.prometheus import Series
from railscope.agent.cluster.fleet.scrapes import read_scrapes
from railscope.agent.cluster.fleet.slow import slow_question, uneven_question, waited_for_expression
from tests.unit.canned_store import COMM, NOW, CannedStore, agent, bare, rank, read, stalled

LENGTH = 5.0
STRETCHES = 60
MADE = "maxby(comm)(increase(railscope_comm_operations_total))"
OPERATIONS = "rate(railscope_comm_operations_total)"
SECONDS = "rate(railscope_comm_operation_seconds_total)"


def job(hosts: int = 2, comm: str = COMM) -> CannedStore:
    """A job with a rank on each host, scraped each second, that completes two operations a second."""
    store = CannedStore()
    for number in range(hosts):
        agent(store, f"host{number}:9779")
        rank(store, f"host{number}:9779", number)
    at = tuple((NOW - LENGTH * (STRETCHES - number - 1), 10.0) for number in range(STRETCHES))
    store.evaluated[MADE] = [Series({"comm": comm}, at)]
    return store


def wait(store: CannedStore, number: int, *stretches: int, ratio: float = 0.5, comm: str = COMM) -> None:
    """Others wait for this rank in these stretches, and lately."""
    labels = {"instance": f"host{number}:9779", "comm": comm, "rank": str(number)}
    scrapes = read_scrapes(Asker(store, NOW))
    store.say(bare(uneven_question(scrapes)), ratio, comm=comm)
    store.say(bare(slow_question(scrapes, [comm])), ratio, **labels)
    moments = tuple((NOW - LENGTH * (STRETCHES - one - 1), ratio) for one in stretches)
    store.evaluated.setdefault(bare(waited_for_expression("5s")), []).append(Series(labels, moments))


def spend(store: CannedStore, *seconds: float) -> None:
    """In operations, of each second, by rank."""
    for number, spent in enumerate(seconds):
        labels = {"instance": f"host{number}:9779", "comm": COMM, "rank": str(number)}
        store.say(OPERATIONS, 2.0, **labels)
        store.say(SECONDS, spent, **labels)


def slow(store: CannedStore) -> tuple[SlowRank, ...]:
    return read(store).slow


def test_a_rank_that_is_waited_for_in_most_stretches_is_slow_by_so_much_since_then() -> None:
    store = job(3)
    wait(store, 1, *range(20, STRETCHES))
    spend(store, 0.82, 0.02, 0.82)
    (found,) = slow(store)
    assert (found.comm, found.rank, found.host, found.waited_ratio) == (COMM, "1", "host1", 0.5)
    assert (found.slowness.waited, found.slowness.stretches, found.slowness.operations) == (40, 40, 400.0)
    assert found.slowness.since == NOW - 200.0
    assert round(found.waited_seconds or 0, 3) == 0.4
    assert round(found.times_median or 0, 1) == 5.4
    assert not found.of_window
    assert {one.rank for one in read(store).ranks} == {"0", "1", "2"}, "whose they are is told too"


def test_a_rank_that_was_slow_when_the_window_began_may_have_been_for_longer() -> None:
    store = job()
    wait(store, 1, *range(STRETCHES))
    (found,) = slow(store)
    assert found.of_window
    assert (found.waited_seconds, found.times_median) == (None, None)


def test_who_is_waited_for_now_and_then_is_not_slow() -> None:
    store = job()
    wait(store, 1, STRETCHES - 1)
    assert slow(store) == ()


def test_ranks_that_are_slow_in_turn_are_not_slow() -> None:
    store = job()
    wait(store, 0, *range(0, STRETCHES, 2))
    wait(store, 1, *range(1, STRETCHES, 2))
    assert slow(store) == ()


def test_who_writes_to_storage_meanwhile_is_not_slow() -> None:
    store = job()
    wait(store, 1, *range(STRETCHES))
    assert slow(store)
    store.say("max_over_time(railscope_comm_writing)==1", 1, instance="host1:9779", comm=COMM, rank="1")
    assert slow(store) == ()


def test_of_a_communicator_that_is_stalled_nobody_is_slow() -> None:
    store = job()
    wait(store, 1, *range(STRETCHES))
    stalled(store, "host0:9779", 0, "rank_behind")
    assert slow(store) == ()


def test_where_completions_are_not_seen_a_host_tells_of_its_own_ranks() -> None:
    store = job()
    labels = {"instance": "host1:9779", "comm": COMM, "rank": "1"}
    store.say("railscope_comm_awaited_ratio", 0.8, **labels)
    store.say("railscope_comm_awaited_since_timestamp_seconds", NOW - 90.0, **labels)
    store.say("increase(railscope_comm_last_arrivals_total)", 198.0, **labels)
    store.say("increase(railscope_comm_arrival_lag_seconds_total)", 79.2, **labels)
    calls = "sumby(instance,comm)(increase(railscope_comm_last_arrivals_total))"
    store.say(calls, 200.0, instance="host1:9779", comm=COMM)
    (found,) = slow(store)
    assert (found.rank, found.host, found.waited_ratio, found.stretch_seconds) == ("1", "host1", 0.8, None)
    assert (found.slowness.since, found.slowness.waited, found.slowness.stretches) == (NOW - 90.0, 198, 200)
    assert round(found.waited_seconds or 0, 6) == 0.4
    wait(store, 0, *range(STRETCHES))
    assert [one.rank for one in slow(store)] == ["0"], "completions of all hosts tell more"


def test_the_stretches_are_so_long_that_two_scrapes_are_in_each() -> None:
    often = read_scrapes(Asker(job(), NOW))
    assert "[20000ms]" in slow_question(often, [COMM])
    assert "[300000ms]" in slow_question(replace(often, interval_seconds=30.0), [COMM])
