"""What `railscope diagnose` says where a store answers in part.  The store's answers are made up."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest

from railscope.agent.cluster import command
from railscope.agent.cluster.command import diagnose, question_from, run_diagnose
from railscope.agent.cluster.fleet.prometheus import PrometheusError
from railscope.agent.cluster.verdict.finding import Verdict
from tests.unit.canned_store import COMM, CannedStore, agent, rank, stalled
from tests.unit.test_diagnose import parsed


def healthy() -> CannedStore:
    store = CannedStore()
    for number in range(2):
        agent(store, f"host{number}:9779")
        rank(store, f"host{number}:9779", number)
    return store.say("count(countby(comm)(railscope_comm_enqueued_total))", 3)


def with_stall() -> CannedStore:
    store = healthy()
    stalled(store, "host0:9779", 0, "rank_behind", strength="strong", blamed_rank="1")
    stalled(store, "host1:9779", 1, "process_stopped", strength="strong", blamed_rank="1")
    return store


def asked_of(store: CannedStore) -> list[str]:
    """Every question that a verdict asks of this store."""
    diagnose(store, question_from(parsed()))
    return list(dict.fromkeys(store.asked))


def without(make: Callable[[], CannedStore], *parts: str) -> CannedStore:
    """A store that does not answer questions with these words in them."""
    store = make()
    store.unanswered = lambda expression: any(part in expression for part in parts)
    return store


def verdict_of(store: CannedStore) -> Verdict | None:
    """None: it cannot be told at all."""
    try:
        return diagnose(store, question_from(parsed()))
    except PrometheusError:
        return None


def test_a_store_that_answers_everything_leaves_nothing_open() -> None:
    verdict = verdict_of(healthy())
    assert verdict is not None
    assert verdict.headline.startswith("No stall: ")
    assert (verdict.answered, verdict.problem) == (True, False)


@pytest.mark.parametrize("question", asked_of(healthy()))
def test_whatever_question_of_a_healthy_fleet_is_not_answered_no_stall_is_not_claimed(question: str) -> None:
    store = healthy()
    store.unanswered = lambda expression: expression == question
    verdict = verdict_of(store)
    if verdict is not None:
        assert "No stall" not in verdict.headline
        assert (verdict.answered, verdict.problem, verdict.findings) == (False, False, ())
        assert verdict.notes[0].startswith("not known: ")
        assert verdict.notes[0].endswith(" (the store did not answer within 10 s)")


@pytest.mark.parametrize("question", asked_of(with_stall()))
def test_whatever_question_of_a_stall_is_not_answered_nobody_else_is_blamed(question: str) -> None:
    store = with_stall()
    store.unanswered = lambda expression: expression == question
    verdict = verdict_of(store)
    if verdict is not None:
        assert (verdict.answered, verdict.problem) == (False, True)
        assert [(one.cause, one.ranks) for one in verdict.findings] in ([], [("process_stopped", ("1",))])
        assert verdict.headline.startswith("STALLED")


@pytest.mark.parametrize(
    ("part", "known"),
    [
        ("railscope_rail_", True),
        ("railscope_comm_operation_seconds_total", True),
        ("changes(railscope_comm_enqueued_total", False),
        ("railscope_comm_writing", False),
        ("railscope_call_inside_seconds", False),
    ],
)
def test_a_stall_is_judged_where_what_tells_of_its_ranks_was_answered(part: str, known: bool) -> None:
    verdict = verdict_of(without(with_stall, part))
    assert verdict is not None
    assert verdict.problem
    assert [one.cause for one in verdict.findings] == (["process_stopped"] if known else [])
    if not known:
        assert verdict.headline == (
            f"STALLED: hosts call communicator {COMM} stalled; what is to blame could not be asked."
        )
        assert verdict.asked[0] == f"host1 says process_stopped of rank 1 of {COMM}"


@pytest.mark.parametrize(
    ("store", "status"),
    [
        (healthy(), 0),
        (without(healthy, "railscope_comm_operation_seconds_total"), 2),
        (without(with_stall, "railscope_comm_operation_seconds_total"), 1),
        (without(with_stall, "railscope_comm_writing"), 1),
        (without(healthy, "railscope_comm_stalled == 1"), 2),
        (without(healthy, "time()"), 2),
    ],
)
def test_the_exit_status_is_fine_only_where_everything_was_answered(
    store: CannedStore, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PrometheusStore", lambda _endpoint: store)
    out = io.StringIO()
    assert run_diagnose(parsed("--json"), out) == status
    if out.getvalue():
        assert json.loads(out.getvalue())["answered"] is (status == 0)


def test_what_was_open_is_said_in_words_and_why() -> None:
    verdict = verdict_of(without(healthy, "railscope_rail_tcp", "railscope_comm_degraded"))
    assert verdict is not None
    assert verdict.headline == (
        "Cannot tell whether anything is wrong, as the store did not answer everything: no host calls any of 3 "
        "communicators stalled."
    )
    assert verdict.notes == (
        "not known: which connections NCCL moved off a port that failed; which rails are slow or lose packets (the "
        "store did not answer within 10 s)",
    )


def test_of_a_whole_fleet_ranks_are_asked_one_by_one_only_where_communicators_stand_out() -> None:
    for_each_rank = [one for one in asked_of(healthy()) if "comm_enqueued" in one or "comm_operation" in one]
    assert for_each_rank
    assert all(one.startswith(("stddev by", "max by", "count(", "topk(")) for one in for_each_rank)
