"""What hosts said of stalls before: from scrapes to when it was on, how often, and when most was said."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from railscope.agent.cluster.fleet.apart import apart_question, standing_question
from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.facts import BriefStall
from railscope.agent.cluster.fleet.prometheus import Series
from railscope.agent.cluster.fleet.scrapes import read_scrapes
from railscope.agent.cluster.verdict.words import make_verdict
from tests.unit.canned_store import COMM, NOW, CannedStore, agent, bare, rank, ranks_of, read, stalled

INFO = "railscope_comm_stall_info"
CALLS = "railscope_comm_enqueued_total"
SECONDS = "railscope_comm_stall_seconds_total"


def heard() -> CannedStore:
    """Two hosts with a communicator over both, which goes on; nobody calls it stalled now."""
    store = CannedStore()
    for number in (0, 1):
        agent(store, f"host{number}:9779")
        rank(store, f"host{number}:9779", number)
    return store


def said(store: CannedStore, number: int, cause: str, times: Iterable[float], **more: str) -> None:
    """A host called its rank stalled, at so many seconds before now."""
    labels = {"instance": f"host{number}:9779", "comm": COMM, "rank": str(number), "cause": cause, "strength": "weak"}
    points = tuple((NOW - ago, 1.0) for ago in sorted(times, reverse=True))
    store.history.append(Series(labels | more | {"__for__": INFO}, points))
    if not any(name.startswith("count(last") for name in store.canned):
        store.say(f"count(last_over_time({INFO}))", 1)


def test_a_stall_that_was_on_and_off_began_as_often_as_a_scrape_showed_none_before() -> None:
    store = heard()
    said(store, 0, "rail_slow", [40.5, 39.5, 30.5, 29.5, 28.5, 4.5], rail="1", device="eth1")
    said(store, 1, "unknown", [29.0, 28.0])
    fleet = read(store)
    (history,) = fleet.history
    assert (history.comm, history.times, history.first, history.last) == (COMM, 3, NOW - 40.5, NOW - 4.5)
    assert {one.rank for one in fleet.ranks} == {"0", "1"}, "its ranks are read"
    assert all(one.stall is None for one in fleet.ranks)


def test_a_stall_of_hosts_whose_time_stamps_stand_still_has_a_telling_moment() -> None:
    store = CannedStore()
    for number in (0, 1):
        agent(store, f"host{number}:9779", stamps_span=1e-9)
        rank(store, f"host{number}:9779", number)
    said(store, 0, "rail_slow", [4.5], rail="1", device="eth1")
    (history,) = read(store).history
    assert (history.telling, len(history.said)) == (NOW - 4.5, 1)


def test_the_telling_moment_is_the_latest_at_which_the_best_founded_cause_was_said() -> None:
    store = heard()
    said(store, 0, "rank_behind", [9.5, 8.5, 7.5, 6.5, 5.5, 4.5])
    said(store, 1, "rail_slow", [8.0, 7.0], rail="1", device="eth1")
    (history,) = read(store).history
    # Host 1's last word holds until its next scrape; both still say something.
    assert history.telling in (NOW - 7.0, NOW - 6.5)
    assert {(host, rank, stall.cause, stall.device) for host, rank, stall in history.said} == {
        ("host0", "0", "rank_behind", ""),
        ("host1", "1", "rail_slow", "eth1"),
    }
    assert history.last == NOW - 4.5


def test_of_moments_at_which_the_best_founded_cause_was_said_the_one_tells_at_which_most_was_said() -> None:
    store = heard()
    said(store, 0, "rail_slow", [8.0, 7.0, 6.0, 5.0, 4.0, 3.0], rail="1", device="eth1")
    said(store, 1, "rank_behind", [8.0])
    (history,) = read(store).history
    assert history.telling <= NOW - 7.0
    assert {stall.cause for _, _, stall in history.said} == {"rail_slow", "rank_behind"}


def test_what_was_said_long_before_the_end_is_not_told_of_the_end() -> None:
    store = heard()
    said(store, 1, "rail_down", [200.0], rail="1", device="eth1")
    said(store, 0, "rank_behind", [5.0, 4.0])
    (history,) = read(store).history
    assert history.times == 2
    assert {stall.cause for _, _, stall in history.said} == {"rank_behind"}


def test_ranks_of_a_stall_that_has_been_over_for_long_are_not_asked_for() -> None:
    store = heard()
    said(store, 0, "rail_slow", [150.0, 149.0])
    fleet = read(store)
    assert [one.last for one in fleet.history] == [NOW - 149.0]
    assert fleet.ranks == ()


def test_without_any_stall_no_history_is_asked_for() -> None:
    store = heard()
    assert read(store).history == ()
    assert INFO not in store.asked


@pytest.mark.parametrize("name", ["lengthened", "appeared"])
def test_stalls_between_two_scrapes_are_known_by_their_length(name: str) -> None:
    store = heard()
    question = {
        "lengthened": f"maxby(instance,comm,cause)(increase({SECONDS}))>0",
        "appeared": f"maxby(instance,comm,cause)({SECONDS}unless{SECONDS}offset60sandon(job,instance)"
        "railscope_build_infooffset60s)>0",
    }[name]
    store.say(question, 2.6, instance="host1:9779", comm=COMM, cause="rail_slow")
    assert read(store).brief == (BriefStall(COMM, "host1", "rail_slow", 2.6),)
    said(store, 0, "rail_slow", [5.0])
    assert read(store).brief == (), "a scrape shows it"


def test_the_usual_pace_is_that_before_the_first_stall() -> None:
    store = heard()
    said(store, 0, "rail_slow", [20.0 - number for number in range(19)])
    labels = {"instance": "host0:9779", "comm": COMM, "rank": "0", "__for__": CALLS}
    # Ten a second until 20 s ago, two a second since.
    points = [(NOW - ago, 1000 - 10 * ago if ago > 20 else 800 + 2 * (20 - ago)) for ago in range(32, 0, -1)]
    store.history.append(Series(labels, tuple(points)))
    assert ranks_of(read(store))["0"].usual_calls_per_second == pytest.approx(10.0)


def test_the_length_of_a_stall_counts_from_its_first_second() -> None:
    store = heard()
    said(store, 0, "rail_slow", [3.0, 2.0])
    labels = {"instance": "host0:9779", "comm": COMM, "rank": "0"}
    store.history.append(Series(labels | {"__for__": CALLS}, ((NOW - 9, 1.0), (NOW - 8, 2.0))))
    # There is no such counter before; of two causes both count.
    store.history.append(Series(labels | {"cause": "unknown", "__for__": SECONDS}, ((NOW - 4, 2.5),)))
    store.history.append(Series(labels | {"cause": "rail_slow", "__for__": SECONDS}, ((NOW - 3, 1.0), (NOW - 2, 2.0))))
    assert ranks_of(read(store))["0"].stalled_seconds == pytest.approx(4.5)


def test_a_counter_that_fell_does_not_make_a_rank_another_kind() -> None:
    store = heard()
    for number in (0, 1):
        labels = {"instance": f"host{number}:9779", "comm": COMM, "rank": str(number), "__for__": CALLS}
        points = [(NOW - ago, 500.0 - 10 * ago - (5 if number and ago < 3 else 0)) for ago in range(20, 0, -1)]
        points = [(t, value - (9 if number and t == NOW - 2 else 0)) for t, value in points]
        store.history.append(Series(labels, tuple(points)))
    means = [one.mean_calls_per_second for one in read(store, COMM).ranks]
    assert means == pytest.approx([10.0, 10.0], rel=0.1)


def test_who_is_inside_an_init_is_known_by_the_call_alone() -> None:
    store = CannedStore()
    for number in (0, 1):
        agent(store, f"host{number}:9779")
    stalled(store, "host0:9779", 0, "inside_call", op="ncclCommInitRank", strength="strong")
    labels = {"instance": "host0:9779", "comm": COMM, "rank": "0"}
    store.say("railscope_call_inside_seconds", 42.5, call="ncclCommInitRank", nranks="2", pid="100", **labels)
    fleet = read(store)
    (found,) = fleet.ranks
    assert (found.host, found.present, found.identity.nranks, found.identity.pid) == ("host0", True, "2", 100)
    assert (found.inflight_seconds, found.stall and found.stall.op) == (42.5, "ncclCommInitRank")
    verdict = make_verdict(fleet)
    assert verdict.problem
    assert "ncclCommInitRank" in verdict.headline
    assert "rank 1 did not call it" in verdict.headline


def test_of_a_rank_that_has_its_communicator_more_is_known_than_the_call_tells() -> None:
    store = heard()
    stalled(store, "host0:9779", 0, "inside_call", op="ncclCommSplit", strength="strong")
    labels = {"instance": "host0:9779", "comm": COMM, "rank": "0"}
    store.say("railscope_call_inside_seconds", 42.5, call="ncclCommSplit", nranks="2", pid="100", **labels)
    ranks = ranks_of(read(store))
    assert (ranks["0"].identity.gpu, ranks["0"].inflight_seconds) == ("0", 42.5)
    assert ranks["1"].stall is None


def init_without_a_peer(*, job: str = "7", ranks: dict[str, str] | None = None) -> CannedStore:
    """Rank 0 on host0 is inside an init of two; `ranks`: the launcher's ranks of processes without a communicator, by
    host."""
    store = CannedStore()
    for host in ("host0:9779", "host1:9779"):
        agent(store, host)
    stalled(store, "host0:9779", 0, "inside_call", op="ncclCommInitRank", strength="strong")
    labels = {"instance": "host0:9779", "comm": COMM, "rank": "0"}
    store.say("railscope_call_inside_seconds", 42.5, call="ncclCommInitRank", nranks="2", pid="100", **labels)
    for at, (host, world_rank) in enumerate((ranks or {"host0:9779": "0", "host1:9779": "1"}).items()):
        store.say(
            "railscope_process_without_comm", 1, instance=host, pid=str(100 + at), exported_job=job,
            world_rank=world_rank, world_size="2",
        )  # fmt: skip
    return store


def test_the_launchers_rank_tells_where_a_rank_is_that_did_not_come() -> None:
    fleet = read(init_without_a_peer())
    missing = ranks_of(fleet)["1"]
    assert (missing.host, missing.identity.pid, missing.awaited) == ("host1", 101, True)
    assert "rank 1 (pid 101, host1) did not call it" in make_verdict(fleet).headline


def test_who_is_inside_a_call_is_told_of_once_though_another_communicator_stands_out() -> None:
    store = init_without_a_peer(ranks={"host0:9779": "0"})
    other = "00000000000000bb"
    store.say(bare(standing_question(read_scrapes(Asker(store, NOW)))), 1, comm=other)
    for number in (0, 1):
        labels = {"instance": f"host{number}:9779", "comm": other, "rank": str(number)}
        store.say("last_over_time(railscope_comm_info)", 1, **labels, nranks="2", pid=str(200 + number))
        store.say(CALLS, 10, **labels)
    apart = apart_question(read_scrapes(Asker(store, NOW)), [other], 300.0)
    store.say(bare(apart), 1, comm=other)
    fleet = read(store)
    assert fleet.apart == (other,)
    inside = [one for one in fleet.ranks if one.comm == COMM]
    assert [(one.rank, one.identity.pid, one.identity.of_job("job")) for one in inside] == [("0", 100, "7")]
    (finding,) = make_verdict(fleet).findings
    assert "does not return for rank 0 (pid 100, host0), and rank 1 did not call it" in finding.headline
    assert len(set(finding.evidence)) == len(finding.evidence)
    assert finding.evidence[0] == "2 ranks, 1 of them seen, on host0; job 7"


@pytest.mark.parametrize(
    "store",
    [
        pytest.param(init_without_a_peer(job=""), id="the job has no name"),
        pytest.param(init_without_a_peer(ranks={"host0:9779": "1", "host1:9779": "0"}), id="it is numbered otherwise"),
        pytest.param(init_without_a_peer(ranks={"host1:9779": "1"}), id="who is inside has no rank of a job"),
    ],
)
def test_where_the_launchers_ranks_are_not_those_of_the_communicator_nobody_is_named(store: CannedStore) -> None:
    fleet = read(store)
    assert ranks_of(fleet).keys() == {"0"}
    assert "rank 1 did not call it on any observed host" in make_verdict(fleet).headline
