"""Series become facts: which hosts count as silent, what they are called, and which sequences can be compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.prometheus import PrometheusError, Series
from railscope.agent.cluster.fleet.reader import find_communicator
from railscope.agent.cluster.fleet.scrapes import read_scrapes
from railscope.agent.cluster.fleet.sequences import Position, find_positions, usual_lead
from railscope.agent.cluster.fleet.slow import waited_for_expression
from railscope.agent.cluster.fleet.slow_rails import pace_expression, slow_rails_questions
from railscope.agent.cluster.verdict.culprits import communicator_size
from railscope.agent.cluster.verdict.words import make_verdict
from railscope.agent.facts.stall import LastCollectives, format_shapes
from railscope.dashboards import recorded, rules_files
from tests.unit.canned_store import COMM, NOW, CannedStore, agent, rank, ranks_of, read, stalled


@pytest.fixture
def store() -> CannedStore:
    """Two hosts, a communicator over both, stalled as seen by the first."""
    made = CannedStore()
    for number in (0, 1):
        agent(made, f"host{number}:9779")
        rank(made, f"host{number}:9779", number)
    stalled(made, "host0:9779", 0, "rank_behind", strength="weak", blamed_rank="1")
    return made


def test_a_rank_has_the_user_whom_its_agent_names(store: CannedStore) -> None:
    rank(store, "host2:9779", 2, user="ada")
    assert [one.identity.of_job("user") for one in read(store).ranks] == ["", "", "ada"]


def test_ranks_have_host_process_sequence_and_what_is_said_of_them(store: CannedStore) -> None:
    fleet = read(store)
    first, second = fleet.ranks
    assert (first.host, first.identity.pid, first.identity.nranks, first.enqueued) == ("host0", 100, "2", 10)
    assert first.position == Position(10)
    assert first.stall is not None
    assert (first.stall.cause, first.stall.op, first.stall.strength, first.stall.blamed_rank) == (
        "rank_behind",
        "AllReduce",
        "weak",
        "1",
    )
    assert second.stall is None
    assert first.completed is None
    assert (fleet.at, fleet.scrape_seconds) == (NOW, 1.0)


def test_a_ranks_number_in_its_job_is_read() -> None:
    store = CannedStore()
    agent(store, "host0:9779")
    rank(store, "host0:9779", 0, world_rank="8")
    stalled(store, "host0:9779", 0, "unknown")
    assert [one.world_rank for one in read(store).ranks] == ["8"]


def test_a_failed_scrape_makes_a_host_silent_and_its_ranks_history(store: CannedStore) -> None:
    agent(store, "host2:9779", scraped=NOW - 40, up=0)
    rank(store, "host2:9779", 2, enqueued=None)
    fleet = read(store)
    silent = next(one for one in fleet.agents if one.host == "host2")
    assert (silent.up, silent.silent_seconds) == (False, 40.0)
    assert not ranks_of(fleet)["2"].present
    assert ranks_of(fleet)["2"].identity.pid == 102


@pytest.mark.parametrize("stamps_span", [86_700.0, 3_900.0, 0.0, -5.0])
def test_a_clock_that_was_set_within_five_minutes_changes_no_interval(stamps_span: float) -> None:
    store = CannedStore()
    agent(store, "host0:9779")
    agent(store, "host1:9779", stamps_span=stamps_span)
    agent(store, "host2:9779", stamps_span=stamps_span, scraped=NOW - 40)
    fleet = read(store)
    assert fleet.scrape_seconds == 1.0
    assert [one.up for one in fleet.agents] == [True, True, False]


@pytest.mark.parametrize("nranks", ["²", "", "unknown", "-2", "9" * 5000])
def test_a_count_of_ranks_that_is_no_number_is_not_known(store: CannedStore, nranks: str) -> None:
    store.canned["last_over_time(railscope_comm_info)"].clear()
    rank(store, "host0:9779", 0, nranks=nranks)
    stalled(store, "host1:9779", 1, "unknown")
    assert communicator_size(read(store).ranks) is None


@given(st.text(max_size=12))
def test_whatever_a_rank_is_called_it_is_read_and_judged(name: str) -> None:
    store = CannedStore()
    agent(store, "host0:9779")
    rank(store, "host0:9779", 0)
    labels = {"instance": "host0:9779", "comm": COMM, "rank": name}
    store.say("railscope_comm_enqueued_total", 3, **labels)
    store.say("railscope_comm_stalled==1", 1, cause="unknown", **labels)
    verdict = make_verdict(read(store))
    assert verdict.problem


def test_agents_of_one_instance_are_told_apart_by_when_they_started(store: CannedStore) -> None:
    started = "railscope_agent_start_time_seconds"
    for replica in ("a", "b"):
        store.say(started, NOW - 100, instance="host0:9779", replica=replica)
    assert {one.mixed_by for one in read(store).agents} == {()}, "two replicas of one store"
    for cluster in ("east", "west"):
        store.say(started, NOW - 100 - len(store.asked), instance="host1:9779", job="railscope", cluster=cluster)
        store.asked.append("another")
    fleet = read(store)
    assert [one.mixed_by for one in fleet.agents] == [(), ("cluster",)]
    (note,) = (note for note in make_verdict(fleet).notes if "tells apart" in note)
    assert note.startswith("host1: agents that only cluster tells apart")


def test_series_that_were_pushed_and_are_old_count_as_silent(store: CannedStore) -> None:
    # Nothing marks them stale: the store goes on to show them for minutes.
    agent(store, "host2:9779", scraped=NOW - 60, up=None)
    rank(store, "host2:9779", 2)
    stalled(store, "host2:9779", 2, "process_stopped")
    fleet = read(store)
    assert not ranks_of(fleet)["2"].present
    assert ranks_of(fleet)["2"].stall is None


@pytest.mark.parametrize(("ended", "known"), [(NOW - 40, True), (NOW - 200, False)])
def test_what_was_said_of_a_rank_when_it_was_last_seen_is_kept(store: CannedStore, ended: float, known: bool) -> None:
    agent(store, "host2:9779", scraped=NOW - 40, up=0)
    rank(store, "host2:9779", 2, enqueued=None)
    labels = {"instance": "host2:9779", "comm": COMM, "rank": "2"}
    details = labels | {"cause": "rail_down", "device": "eth0", "__for__": "railscope_comm_stall_info"}
    store.history = [
        Series(labels | {"__for__": "railscope_comm_enqueued_total"}, ((NOW - 240, 1.0), (NOW - 40, 2.0))),
        Series(details, ((NOW - 240, 1.0), (ended, 1.0))),
    ]
    said = ranks_of(read(store))["2"].last_said
    assert (said is not None) == known
    if said is not None:
        assert (said.cause, said.device) == ("rail_down", "eth0")


def test_the_last_collectives_of_ranks_that_stall_are_read(store: CannedStore) -> None:
    last = ("AllGather of 8 bytes", "AllReduce of 8 bytes float32")
    labels = {"instance": "host1:9779", "comm": COMM, "rank": "1", "last": format_shapes(last)}
    store.say("railscope_comm_stall_collectives", 604, **labels)
    found = ranks_of(read(store))
    assert (found["0"].last, found["1"].last) == (None, LastCollectives(604, last))


def test_a_target_that_never_answered_is_a_silent_host(store: CannedStore) -> None:
    up = "upandon(job)groupby(job)(last_over_time(railscope_build_info))"
    store.say(up, 0, instance="host9:9779")
    (silent,) = (one for one in read(store).agents if not one.up)
    assert (silent.host, silent.silent_seconds) == ("host9", None)


def test_hosts_are_called_by_the_label_that_the_scrape_configuration_gives() -> None:
    store = CannedStore()
    agent(store, "10.0.0.1:9779", node="gpu-17")
    agent(store, "10.0.0.2:9779")
    agent(store, "10.0.0.3:1111")
    agent(store, "10.0.0.3:2222")
    assert {one.host for one in read(store).agents} == {"gpu-17", "10.0.0.2", "10.0.0.3:1111", "10.0.0.3:2222"}


def test_two_replicas_of_a_store_count_once(store: CannedStore) -> None:
    for number in (0, 1):
        labels = {"instance": f"host{number}:9779", "comm": COMM, "rank": str(number), "replica": "b"}
        store.say("railscope_comm_enqueued_total", 11, **labels)
    fleet = read(store)
    assert [one.enqueued for one in fleet.ranks] == [11, 11]


def test_a_rank_that_moved_to_another_host_is_not_missing_on_the_old_one(store: CannedStore) -> None:
    agent(store, "host2:9779")
    rank(store, "host2:9779", 1, enqueued=None)
    assert [(one.rank, one.host) for one in read(store).ranks] == [("0", "host0"), ("1", "host1")]


def test_who_has_left_is_known_of_those_that_are_seen_no_more_and_of_those_that_are_by_what_is_said_now(
    store: CannedStore,
) -> None:
    store.say("railscope_comm_ended", 1, instance="host0:9779", comm=COMM, rank="0")
    agent(store, "host2:9779", scraped=NOW - 40, up=0)
    for number in (2, 3):
        rank(store, "host2:9779", number, enqueued=None)
    for host, number in ((0, 0), (1, 1), (2, 2)):
        labels = {"instance": f"host{host}:9779", "comm": COMM, "rank": str(number)}
        store.say("last_over_time(railscope_comm_ended)", 1, **labels)
    ended = {number: one.ended for number, one in ranks_of(read(store)).items()}
    assert ended == {"0": True, "1": False, "2": True, "3": False}


def test_a_gone_process_is_a_rank_though_only_its_stall_is_left(store: CannedStore) -> None:
    store.canned["railscope_comm_enqueued_total"].pop()
    stalled(store, "host1:9779", 1, "process_gone", strength="strong")
    found = ranks_of(read(store))["1"]
    assert found.present
    assert found.stall is not None
    assert found.stall.cause == "process_gone"
    assert found.enqueued is None


def test_of_two_stalls_of_one_rank_the_one_that_names_somebody_is_kept(store: CannedStore) -> None:
    stalled(store, "host0:9779", 0, "rail_down", device="eth0", rail="0")
    found = ranks_of(read(store))["0"].stall
    assert found is not None
    assert (found.cause, found.device) == ("rail_down", "eth0")


def test_rails_are_read_for_the_hosts_of_the_stall(store: CannedStore) -> None:
    rail = {"instance": "host1:9779", "rail": "0", "device": "eth0"}
    store.say("railscope_rail_info", 1, **rail).say("railscope_rail_up", 0, **rail)
    store.say("increase(railscope_rail_tcp_retransmitted_bytes_total)", 5, **rail)
    store.say("increase(railscope_rail_tcp_sent_bytes_total)>0", 100, **rail)
    store.say("increase(railscope_rail_events_total)>0", 3, **rail, counter="link_downed", severity="page")
    (found,) = read(store).rails
    assert (found.host, found.up, found.retransmitted_ratio) == ("host1", False, 0.05)
    assert found.events == (("link_downed", "page", 3.0),)
    assert found.backlog_bytes is None
    assert found.usual_transmit is None
    (asked,) = (one for one in store.asked if one.startswith("railscope_rail_up"))
    assert asked == 'railscope_rail_up{instance=~"host0:9779|host1:9779"}'


def test_a_rail_s_queue_and_what_it_sent_at_most_are_of_several_scrapes(store: CannedStore) -> None:
    rail = {"instance": "host1:9779", "rail": "0", "device": "eth0"}
    store.say("railscope_rail_info", 1, **rail).say("railscope_rail_up", 1, **rail)
    store.say("railscope_rail_queue_backlog_bytes", 0, **rail)
    store.say("max_over_time(railscope_rail_queue_backlog_bytes)", 133_000, **rail)
    sent = [(NOW - ago, 1e8 * (60 - max(ago, 7.5))) for ago in range(60, 0, -1)]
    store.history.append(Series(rail | {"__for__": "railscope_rail_transmit_bytes_total"}, tuple(sent)))
    (found,) = read(store).rails
    assert found.backlog_bytes == 133_000
    assert found.usual_transmit == pytest.approx(1e8)


def test_a_counter_that_was_not_shown_while_it_was_0_counts_as_risen_by_what_it_shows(store: CannedStore) -> None:
    rail = {"instance": "host1:9779", "rail": "0", "device": "mlx5_0"}
    store.say("railscope_rail_info", 1, **rail)
    read(store)
    (appeared,) = (one for one in store.asked if " unless " in one and "railscope_rail_events_total" in one)
    assert "railscope_rail_events_by_severity_total" in appeared
    store.say(re.sub(r"\{[^}]*\}|\s", "", appeared), 7, **rail, counter="packet_seq_err", severity="warn")
    store.say("increase(railscope_rail_events_total)>0", 3, **rail, counter="packet_seq_err", severity="warn")
    store.say("increase(railscope_rail_events_total)>0", 1, **rail, counter="link_downed", severity="page")
    (found,) = read(store).rails
    assert found.events == (("link_downed", "page", 1.0), ("packet_seq_err", "warn", 7.0))


def test_names_with_special_characters_are_matched_literally(store: CannedStore) -> None:
    agent(store, 'a.b"c:1')
    rank(store, 'a.b"c:1', 5)
    read(store)
    assert any(r"a\\.b\"c:1" in one for one in store.asked)


def test_nothing_but_whether_one_is_slow_is_asked_about_rails_where_nothing_is_stalled() -> None:
    store = CannedStore()
    agent(store, "host0:9779")
    fleet = read(store)
    assert fleet.ranks == ()
    slow = slow_rails_questions(read_scrapes(Asker(store, NOW))).values()
    assert not any("rail_" in one for one in set(store.asked).difference(slow))


def test_a_store_without_railscope_says_so() -> None:
    with pytest.raises(PrometheusError, match="no series of railscope"):
        read(CannedStore())


def test_a_communicator_that_is_not_there_says_so(store: CannedStore) -> None:
    with pytest.raises(PrometheusError, match="no communicator ffff"):
        read(store, "ffff")
    assert len(read(store, COMM).ranks) == 2


def test_one_communicator_is_meant_by_the_beginning_of_its_hash_alone() -> None:
    info = "countby(comm)(last_over_time(railscope_comm_info))"
    store = CannedStore().say(info, 2, comm="ab00000000000001")
    assert find_communicator(store, "ab") == "ab00000000000001"
    assert store.asked == ['count by (comm) (last_over_time(railscope_comm_info{comm=~"ab.*"}[1h]))']
    assert find_communicator(CannedStore(), "ab") == "ab"
    assert find_communicator(store, 'a"\\d') == "ab00000000000001"
    assert store.asked[-1].count(r'comm=~"a\"\\\\d.*"') == 1
    for number in range(2, 8):
        store.say(info, 2, comm=f"ab{number:014x}")
    with pytest.raises(PrometheusError) as several:
        find_communicator(store, "ab")
    first = ", ".join(f"ab{number:014x}" for number in range(1, 6))
    assert str(several.value) == f"--comm ab: 7 communicators begin so, name one of them: {first} and 2 more"
    asked = len(store.asked)
    assert find_communicator(store, "ab00000000000003") == "ab00000000000003"
    assert len(store.asked) == asked, "a whole hash needs no question"


def test_clock_and_start_of_an_agent_are_told(store: CannedStore) -> None:
    store.say("railscope_agent_start_time_seconds", NOW - 100, instance="host0:9779")
    store.say("railscope_collector_success==0", 0, instance="host0:9779", collector="rdma")
    first = next(one for one in read(store).agents if one.host == "host0")
    assert first.started == NOW - 100
    assert first.failing == ("rdma",)
    assert first.clock_offset_seconds == pytest.approx(-0.1)


# Sequences


def advancing(
    offset: float, *, moments: int = 20, per_moment: float = 10, stands_at: int = 15
) -> list[tuple[float, float]]:
    """A counter that advances evenly and then stands."""
    return [(float(t), offset + per_moment * min(t, stands_at)) for t in range(moments)]


def test_the_difference_is_learnt_while_both_advance() -> None:
    assert usual_lead(advancing(100), advancing(40)) == (-60, 0)


def test_a_rank_that_fell_behind_while_the_others_stood_does_not_change_the_difference() -> None:
    stuck = advancing(40, stands_at=14)
    assert usual_lead(advancing(100), stuck) == (-60, 0)


def test_the_moment_at_which_a_rank_fell_behind_is_not_learnt_from() -> None:
    late = [(t, value - (1 if t >= 15 else 0)) for t, value in advancing(40)]
    assert usual_lead(advancing(100), late) == (-60, 0)


def test_hosts_are_scraped_at_different_instants() -> None:
    # Half a second later each time: at an even pace that is known.
    assert usual_lead(advancing(100), [(t + 0.5, value + 5) for t, value in advancing(40)]) == (-60, 0)


def test_the_difference_s_spread_is_its_uncertainty() -> None:
    jittered = [(t, value + (3 if int(t) % 2 and t < 15 else 0)) for t, value in advancing(40)]
    found = usual_lead(advancing(100), jittered)
    assert found is not None
    assert found[1] >= 2


def test_only_what_came_after_a_restart_counts() -> None:
    restarted = [(t, value if t < 8 else value - 80) for t, value in advancing(0)]
    assert usual_lead(advancing(100), restarted) == (-180, 0)


def test_too_little_history_says_nothing() -> None:
    assert usual_lead(advancing(100), advancing(40)[-6:]) is None
    assert usual_lead((), advancing(40)) is None


KEYS = [(f"host{number}:9779", COMM, str(number)) for number in range(3)]


def placed(
    *,
    now: list[float],
    from_start: list[int | None],
    sequence: Sequence[int | None] = (),
    history: Sequence[float] = (),
) -> list[Position | None]:
    """`history`: by how much each rank's counter is off, of counters that advanced evenly and stand."""
    found = find_positions(
        now=dict(zip(KEYS, now, strict=False)),
        from_start={key: flag for key, flag in zip(KEYS, from_start, strict=False) if flag is not None},
        sequence={key: at for key, at in zip(KEYS, sequence, strict=False) if at is not None},
        resets={},
        history={key: tuple(advancing(offset)) for key, offset in zip(KEYS, history, strict=False)},
    )
    return [found.get(key) for key in KEYS[: len(now)]]


def test_counts_from_the_first_operation_need_no_history() -> None:
    assert placed(now=[250, 249], from_start=[1, 1]) == [Position(250), Position(249)]


def test_a_rank_counted_since_later_is_put_on_the_scale_of_the_others() -> None:
    assert placed(now=[250, 250, 189], from_start=[1, 1, 0], history=[100, 100, 40]) == [
        Position(250),
        Position(250),
        Position(249, 0, learnt=True),
    ]


def test_where_nobody_counts_from_the_first_operation_one_of_them_is_the_scale() -> None:
    first, second = placed(now=[250, 189], from_start=[0, 0], history=[100, 40])
    assert first is not None
    assert second is not None
    assert first.entered - second.entered == 1
    assert first.learnt
    assert second.learnt


def test_without_history_such_a_rank_is_not_compared() -> None:
    assert placed(now=[250, 189], from_start=[1, 0]) == [Position(250), None]
    assert placed(now=[250, 189], from_start=[0, 0]) == [None, None]


def test_ranks_of_agents_that_came_late_are_compared_by_the_numbers_of_nccl() -> None:
    assert placed(now=[250, 3], from_start=[1, 0], sequence=[250, 249]) == [Position(250), Position(249)]
    assert placed(now=[7, 3], from_start=[0, 0], sequence=[249, 250]) == [Position(249), Position(250)]


def test_numbers_of_nccl_are_never_compared_with_those_of_railscope() -> None:
    # Rank 0 was seen from its first call on, 10 of which NCCL does not number, and is in the middle of a call.
    assert placed(now=[260, 3, 4], from_start=[1, 0, 0], sequence=[None, 250, 249]) == [
        None,
        Position(250),
        Position(249),
    ]
    # One number alone would compare with nothing.
    assert placed(now=[260, 260, 3], from_start=[1, 1, 0], sequence=[None, None, 250]) == [
        Position(260),
        Position(260),
        None,
    ]


def test_a_rank_without_a_number_is_put_beside_those_that_have_one_by_history() -> None:
    learnt = placed(now=[250, 190, 149], from_start=[0, 0, 0], sequence=[1250, 1250, None], history=[100, 40, 0])
    assert learnt == [
        Position(1250),
        Position(1250),
        Position(1249, 0, learnt=True),
    ]


def test_the_numbers_of_nccl_are_asked_for(store: CannedStore) -> None:
    store.canned["railscope_comm_counted_from_start"].clear()
    for number, sequence in ((0, 605), (1, 604)):
        labels = {"instance": f"host{number}:9779", "comm": COMM, "rank": str(number)}
        store.say("railscope_comm_counted_from_start", 0, **labels)
        store.say("railscope_comm_sequence", sequence, **labels)
        store.history.append(Series(labels, tuple(advancing(0, per_moment=10 / (1 + number)))))
    found = ranks_of(read(store))
    assert {number: one.position for number, one in found.items()} == {"0": Position(605), "1": Position(604)}
    # They are not counted since the same call, so how many were made within the window says nothing.
    assert {one.mean_calls_per_second for one in found.values()} == {None}


def test_ranks_that_are_all_seen_from_their_first_call_on_need_no_numbers_of_nccl() -> None:
    # An AllToAll that rank 1 did not enter has none.
    assert placed(now=[250, 249], from_start=[1, 1], sequence=[200, 200]) == [Position(250), Position(249)]


def test_agents_that_do_not_say_since_when_they_count_are_trusted_unless_they_started_anew() -> None:
    assert placed(now=[250, 249], from_start=[None, None]) == [Position(250), Position(249)]


@given(st.integers(-1000, 1000), st.lists(st.integers(0, 30), min_size=8, max_size=40))
def test_a_constant_difference_is_found_whatever_the_pace(offset: int, steps: list[int]) -> None:
    scale, value = [], 0.0
    for t, step in enumerate(steps):
        value += step
        scale.append((float(t), value))
    found = usual_lead(scale, [(t, v + offset) for t, v in scale])
    advances = sum(step > 0 and following > 0 for step, following in pairwise(steps[1:]))
    assert found == ((offset, 0) if advances >= 5 else None)


def test_an_operation_that_a_host_does_not_know_is_not_another_one(store: CannedStore) -> None:
    stalled(store, "host1:9779", 1, "process_gone", op="unknown")
    found = ranks_of(read(store))
    assert [one.stall.op for one in found.values() if one.stall] == ["AllReduce", ""]


def test_the_recording_rule_of_the_alert_reckons_alike() -> None:
    groups = yaml.safe_load((rules_files.SHIPPED / rules_files.RECORDING).read_text())["groups"]
    rules = {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}

    def bare(expression: str) -> str:
        return re.sub(r"\s", "", expression)

    assert bare(rules[recorded.WAITED_FOR.name]) == bare(waited_for_expression("5m", least=0.05))
    assert bare(rules[recorded.PACE_TO_SIBLINGS.name]) == bare(pace_expression("5m")).replace("{}", "")
