"""Verdicts on made-up fleets: when there is none, what is noted besides, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.cluster.fleet.facts import Agent, LongWait, Rank
from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.cluster.verdict.culprits import culprits_of
from railscope.agent.cluster.verdict.verdict import has_ended, is_idle, root_causes
from railscope.agent.cluster.verdict.words import verdict_of
from railscope.agent.facts.causes import Cause
from tests.unit.fleets import COMM, OTHER, Fleets, only, stall

# Where nothing is stalled


def test_a_fleet_without_stalls_is_fine() -> None:
    verdict = verdict_of(Fleets(4).made())
    assert not verdict.problem
    assert verdict.findings == ()


def test_differences_between_sequences_alone_are_no_stall() -> None:
    assert not verdict_of(Fleets(4).communicator().behind(1).made()).problem


def test_a_rail_down_without_a_stall_is_no_stall() -> None:
    assert not verdict_of(Fleets().communicator().rail(0, 0, up=False).made()).problem


def test_silent_hosts_are_told_even_where_nothing_is_stalled() -> None:
    verdict = verdict_of(Fleets(4).communicator().lose_host(2).made())
    assert not verdict.problem
    assert "1 of 4 hosts say nothing" in verdict.headline
    assert any(note.startswith("host2") for note in verdict.notes)


def test_a_communicator_asked_for_that_is_not_stalled_is_described() -> None:
    verdict = verdict_of(Fleets().communicator().made(), COMM)
    assert not verdict.problem
    assert any("ranks 0-1 entered 1,205 operations" in line for line in verdict.asked)


def test_asked_for_a_waiting_communicator_the_root_is_shown_and_others_are_not() -> None:
    fleets = (
        Fleets(4).communicator(COMM, hosts=[0, 1]).communicator(OTHER, hosts=[0, 1]).communicator("cc", hosts=[2, 3])
    )
    for comm in (COMM, OTHER):
        fleets.all_say("rank_behind", comm).rank(1, comm, stall=stall("process_stopped", blamed_rank="1"))
    fleets.rank(0, "cc", pid="9").rank(1, "cc", pid="8").all_say("unknown", "cc")
    assert [one.comm for one in verdict_of(fleets.made(), OTHER).findings] == [COMM]


# Notes


def note_of(fleets: Fleets) -> str:
    return " | ".join(verdict_of(fleets.made()).notes)


def test_a_clock_that_is_off_is_told_and_a_small_difference_is_not() -> None:
    fleets = Fleets().communicator()
    fleets.agents[0] = replace(fleets.agents[0], clock_offset_seconds=-90.0)
    assert "host0: its clock is 90 s behind the store's" in note_of(fleets)
    fleets.agents[0] = replace(fleets.agents[0], clock_offset_seconds=-3.0)
    assert note_of(fleets) == ""


def test_slow_scrapes_failing_collectors_and_long_waits_are_told() -> None:
    fleets = Fleets(scrape_seconds=60.0)
    fleets.agents[1] = Agent("host1", up=True, failing=("rdma",))
    fleets.waiting.append(LongWait(COMM, "0", "host0", 400.0))
    notes = note_of(fleets)
    assert "scraped every 60 s" in notes
    assert "host1: rdma cannot be read" in notes
    assert "6 min 40 s" in notes


# Properties

CAUSES = st.sampled_from([*(cause for cause in Cause if cause is not Cause.RANK_MISSING), "some_new_cause"])


@st.composite
def fleets_of_any_kind(draw: st.DrawFn) -> Fleets:
    """Communicators over two to four hosts, with any mixture of what hosts may say."""
    fleets = Fleets(draw(st.integers(2, 4)))
    for index in range(draw(st.integers(1, 4))):
        comm = f"{index:016x}"
        fleets.communicator(comm, pids=draw(st.sampled_from([100, 101, 500])))
        for number in range(fleets.hosts):
            entered = draw(st.integers(1200, 1206))
            fleets.ranks = [
                replace(
                    one,
                    stall=draw(st.none() | st.builds(stall, CAUSES, blamed_rank=st.sampled_from(["", "0", "1", "9"]))),
                    enqueued=entered,
                    completed=draw(st.none() | st.integers(1199, entered)),
                    position=draw(st.none() | st.just(Position(entered)) | st.just(Position(entered, 2, True))),
                    present=draw(st.sampled_from([True, True, True, False])),
                )
                if (one.comm, one.rank) == (comm, str(number))
                else one
                for one in fleets.ranks
            ]
    fleets.rails = draw(st.lists(st.sampled_from(fleets.rails), unique=True))
    return fleets


@given(fleets_of_any_kind())
def test_every_stalled_communicator_appears_exactly_once(fleets: Fleets) -> None:
    fleet = fleets.made()
    by_comm = {comm: [one for one in fleet.ranks if one.comm == comm] for comm in sorted({r.comm for r in fleet.ranks})}
    stalled = [
        comm
        for comm, ranks in by_comm.items()
        if any(rank.stall for rank in ranks) and not has_ended(ranks) and not is_idle(ranks)
    ]
    shown = [
        comm
        for cause in root_causes(fleet)
        for comm in (cause.stalled.comm, *(d.stalled.comm for d in cause.dependents))
    ]
    assert sorted(shown) == stalled
    assert verdict_of(fleet).problem == bool(stalled)


@given(fleets_of_any_kind())
def test_the_best_evidence_comes_first_and_the_order_of_series_does_not_matter(fleets: Fleets) -> None:
    fleet = fleets.made()
    tiers = [one.stalled.culprit.tier for one in root_causes(fleet)]
    assert tiers == sorted(tiers)
    turned = replace(fleet, ranks=tuple(reversed(fleet.ranks)), rails=tuple(reversed(fleet.rails)))
    assert [one.stalled.comm for one in root_causes(turned)] == [one.stalled.comm for one in root_causes(fleet)]


@given(st.permutations(["rank_behind", "unknown", "process_stopped", "rail_slow"]))
def test_whoever_says_it_the_stopped_process_is_the_cause(said: list[str]) -> None:
    fleets = Fleets(4).communicator()
    for number, cause in enumerate(said):
        fleets.rank(number, stall=stall(cause, blamed_rank=str(number) if cause == "process_stopped" else ""))
    finding = only(fleets)
    assert finding.ranks == (str(said.index("process_stopped")),)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=8))
def test_only_ranks_that_entered_least_are_called_behind(lags: list[int]) -> None:
    ranks = [
        Rank(
            COMM,
            str(number),
            "host0",
            len(lags),
            enqueued=100 - lag,
            position=Position(100 - lag),
            stall=stall("unknown"),
        )
        for number, lag in enumerate(lags)
    ]
    culprit = culprits_of(ranks, Fleets().made())[0]
    if max(lags) == 0 or len(set(lags)) == 1:
        assert culprit.cause == "unknown"
    else:
        assert {rank.rank for rank in culprit.ranks} == {str(n) for n, lag in enumerate(lags) if lag == max(lags)}
