"""What holds for every verdict, whatever hosts say; on made-up fleets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.cluster.fleet.facts import Rank
from railscope.agent.cluster.fleet.sequences import Position
from railscope.agent.cluster.verdict.culprits import find_culprits
from railscope.agent.cluster.verdict.quantities import format_decimal_bytes, format_duration, format_rank_numbers
from railscope.agent.cluster.verdict.verdict import find_root_causes, has_ended, is_idle, is_suspended
from railscope.agent.cluster.verdict.words import make_verdict
from tests.unit.fleets import COMM, NOW, Fleets, fleets_of_any_kind, identity, only, stall


@given(fleets_of_any_kind())
def test_every_stalled_communicator_appears_exactly_once(fleets: Fleets) -> None:
    fleet = fleets.made()
    by_comm = {comm: [one for one in fleet.ranks if one.comm == comm] for comm in sorted({r.comm for r in fleet.ranks})}
    stalled = [
        comm
        for comm, ranks in by_comm.items()
        if any(rank.stall for rank in ranks) and not (has_ended(ranks) or is_idle(ranks) or is_suspended(ranks))
    ]
    shown = [
        comm
        for cause in find_root_causes(fleet)
        for comm in (cause.stalled.comm, *(d.stalled.comm for d in cause.dependents))
    ]
    assert sorted(shown) == stalled
    assert make_verdict(fleet).problem == bool(stalled)


@given(fleets_of_any_kind(), st.booleans(), st.booleans())
def test_there_is_a_problem_while_any_rank_is_inside_a_call(fleets: Fleets, ended: bool, writes: bool) -> None:
    comm, number = fleets.ranks[0].comm, int(fleets.ranks[0].rank)
    fleets.rank(number, comm, stall=stall("inside_call", op="ncclCommDestroy"), ended=ended, present=True)
    fleets.rank(1 - number, comm, writing=writes)
    assert make_verdict(fleets.made()).problem


@given(fleets_of_any_kind())
def test_the_best_evidence_comes_first_and_the_order_of_series_does_not_matter(fleets: Fleets) -> None:
    fleet = fleets.made()
    tiers = [one.stalled.culprit.tier for one in find_root_causes(fleet)]
    assert tiers == sorted(tiers)
    turned = replace(fleet, ranks=tuple(reversed(fleet.ranks)), rails=tuple(reversed(fleet.rails)))
    assert [one.stalled.comm for one in find_root_causes(turned)] == [
        one.stalled.comm for one in find_root_causes(fleet)
    ]


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
            identity(COMM, str(number), nranks=str(len(lags))),
            "host0",
            enqueued=100 - lag,
            position=Position(100 - lag),
            stall=stall("unknown"),
        )
        for number, lag in enumerate(lags)
    ]
    culprit = find_culprits(ranks, Fleets().made().rails)[0]
    if max(lags) == 0 or len(set(lags)) == 1:
        assert culprit.cause == "unknown"
    else:
        assert {rank.rank for rank in culprit.ranks} == {str(n) for n, lag in enumerate(lags) if lag == max(lags)}


# Words


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_written_so_that_they_can_be_read_back(numbers: set[int]) -> None:
    text = format_rank_numbers(map(str, numbers)).split(" ", 1)[1]
    read: set[int] = set()
    for part in text.split(", "):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == numbers


@given(st.lists(st.text(max_size=4) | st.just("²") | st.just("9" * 5000)))
def test_whatever_ranks_are_called_they_can_be_written(names: list[str]) -> None:
    assert format_rank_numbers(names).startswith(("rank ", "ranks ", "an unknown rank"))


def test_amounts_are_written_as_link_speeds_are() -> None:
    assert [format_decimal_bytes(x) for x in (0, 999, 1e3, 1.25e9)] == ["0 B", "999 B", "1 kB", "1.25 GB"]


def test_lengths_of_time_are_short() -> None:
    assert [format_duration(x) for x in (0.04, 9.96, 42.4, 185, 7800)] == [
        "0.0 s",
        "10.0 s",
        "42 s",
        "3 min 5 s",
        "2 h 10 min",
    ]


@pytest.mark.parametrize("early", [0, 500])
def test_thousands_of_ranks_are_not_compared_each_with_each(early: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fleets = Fleets(64, 16).communicator().all_say("rank_behind", blamed_rank="1023")
    before: dict[str, Any] = {
        "enqueued": 1204,
        "completed": 1204,
        "position": Position(1204),
        "inflight_seconds": 0.0,
        "stall": None,
    }
    for number, rank in enumerate(fleets.ranks):
        if number < 500:
            fleets.ranks[number] = replace(rank, **before)
        elif number < 500 + early:
            fleets.ranks[number] = replace(rank, **before, scraped=NOW - 45)
    compared = 0
    equal = Rank.__eq__

    def counted(one: Rank, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(one, other)

    monkeypatch.setattr(Rank, "__eq__", counted)
    finding = only(fleets)
    assert finding.ranks == tuple(map(str, range(500)))
    assert len(finding.evidence) < 20
    assert compared < 10 * len(fleets.ranks)
