"""What bounds a job, and the words for it."""

from __future__ import annotations

import pytest

from railscope.agent.facts.bound import (
    Bound,
    StepShares,
    describe_bound,
    describe_bound_briefly,
    describe_goodput,
    find_bound,
)

PARTS = {
    Bound.STRAGGLER: {"waiting": 30.0, "communication": 25.0, "between": 25.0, "silent": 20.0},
    Bound.COMMUNICATION: {"waiting": 2.0, "communication": 60.0, "between": 20.0, "silent": 18.0},
    Bound.COMPUTATION_OR_INPUT: {"communication": 20.0, "between": 30.0, "silent": 50.0},
    Bound.UNKNOWN: {"waiting": 5.0, "silent": 30.0, "unknown": 65.0},
}


@pytest.mark.parametrize("bound", PARTS)
def test_what_is_most_of_a_step_bounds_the_job(bound: Bound) -> None:
    shares = StepShares.from_parts(PARTS[bound])
    assert shares is not None
    assert find_bound(shares) is bound


def test_with_a_trace_of_the_gpu_computation_and_input_are_told_apart() -> None:
    assert find_bound(StepShares(None, 0.2, 0.7, 0.1, 0.0, hidden_known=True)) is Bound.COMPUTATION
    assert find_bound(StepShares(None, 0.1, 0.3, 0.6, 0.0, hidden_known=True)) is Bound.INPUT


def test_waiting_seen_over_all_hosts_counts_where_one_host_sees_less() -> None:
    shares = StepShares.from_parts({"communication": 60.0, "silent": 40.0})
    assert shares is not None
    straggler = shares.with_waiting(0.5)
    assert (straggler.waiting, straggler.communication) == pytest.approx((0.3, 0.3))
    assert find_bound(straggler) is Bound.STRAGGLER
    assert straggler.with_waiting(0.1) == straggler


def test_the_first_sentence_is_the_verdict_and_what_cannot_be_told_is_said() -> None:
    shares = StepShares.from_parts(PARTS[Bound.STRAGGLER])
    assert shares is not None
    first, parts, *rest = describe_bound(shares, "rank 3 on node7")
    assert first == "The job is bound by a straggler: ranks wait 30 % of a step for rank 3 on node7."
    assert parts == "Of a step: 30 % waiting for rank 3 on node7, 25 % communication, 45 % computation or input."
    assert rest == [
        "How much of the 25 % is overlapped with computation cannot be told without a trace of the GPU.",
    ]
    unseen = StepShares.from_parts(PARTS[Bound.UNKNOWN])
    assert unseen is not None
    told = describe_bound(unseen)
    assert told[0] == "What bounds the job cannot be told: completions are not seen of all its communicators."
    assert told[-1] == (
        "In 65 % of a step communication and computation cannot be told apart: completions are not seen of all "
        "communicators."
    )
    assert StepShares.from_parts({}) is None


BRIEFLY = {
    Bound.STRAGGLER: "bound by a straggler: ranks wait 30 % of it",
    Bound.COMMUNICATION: "bound by communication, 62 % of it",
    Bound.COMPUTATION_OR_INPUT: "bound by computation or input, 80 % of it",
    Bound.UNKNOWN: "what bounds it cannot be told; 65 % is communication or computation",
}


@pytest.mark.parametrize("bound", BRIEFLY)
def test_a_line_has_the_verdict_and_the_share_that_cannot_be_told(bound: Bound) -> None:
    shares = StepShares.from_parts(PARTS[bound])
    assert shares is not None
    assert describe_bound_briefly(shares) == BRIEFLY[bound]


def test_goodput_is_a_sentence() -> None:
    spent = {"steps": 90.0, "start": 6.0, "checkpoint": 4.0, "stalled": 0.0}
    assert describe_goodput(spent, lambda seconds: f"{seconds:.0f} s") == (
        "The job began 100 s ago; steps took 90 % of that time; the rest was 6 s before the first step, 4 s writing "
        "checkpoints."
    )
    assert not describe_goodput({}, str)
