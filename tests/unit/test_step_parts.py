"""What the steps of a job are made of.  All times are simulated."""

from __future__ import annotations

import numpy as np
import pytest

from railscope.agent.facts.snapshot import RankArrivals, RankTimes
from railscope.agent.node.collectives.slow_ranks import STRETCH_NS, SlowRanks
from railscope.agent.node.steps.parts import MOST_STRETCHES, StepParts, Waited
from railscope.agent.rhythm.tracker import ITERATION, Iterations

MS = 1_000_000
NOBODY = Waited()


def steps(count: int, *, first: int = 0, length: int = 100, silence: int = 30) -> Iterations:
    """Steps without a gap, in milliseconds."""
    found = np.zeros(count, ITERATION)
    found["start_ns"] = (first + np.arange(count) * length) * MS
    found["end_ns"] = found["start_ns"] + length * MS
    found["silence_ns"] = silence * MS
    return found


def operations(parts: StepParts, count: int, *, begin: int, length: int, every: int = 100) -> None:
    begin_ns = (begin + np.arange(count) * every) * MS
    parts.record_completions(begin_ns, begin_ns + length * MS)


def test_a_moment_of_a_step_is_one_thing() -> None:
    parts = StepParts()
    operations(parts, 13, begin=-90, length=40)
    operations(parts, 13, begin=-70, length=50)  # beside those before; its end lies in the silence
    parts.add(steps(10))
    parts.settle(1100 * MS, Waited(of_communication=0.25), all_seen=True)
    assert parts.seconds == pytest.approx({"waiting": 0.175, "communication": 0.525, "silent": 0.2, "between": 0.1})
    assert sum(parts.seconds.values()) == pytest.approx(1.0)


def test_what_is_not_seen_of_all_communicators_is_unknown() -> None:
    parts = StepParts()
    operations(parts, 12, begin=0, length=40)
    parts.add(steps(10))
    parts.settle(1100 * MS, NOBODY, all_seen=False)
    assert parts.seconds == pytest.approx({"communication": 0.4, "silent": 0.3, "unknown": 0.3})


def test_without_completions_waiting_is_told_by_calls_and_the_rest_is_unknown() -> None:
    parts = StepParts()
    parts.add(steps(10))
    parts.settle(1100 * MS, Waited(of_time=0.2), all_seen=False)
    assert not parts.seconds, "their operations may yet end"
    parts.settle(11_100 * MS, Waited(of_time=0.2), all_seen=False)
    assert parts.seconds == pytest.approx({"waiting": 0.2, "silent": 0.3, "unknown": 0.5})


def test_steps_before_the_first_completion_are_left_out() -> None:
    parts = StepParts()
    operations(parts, 7, begin=500, length=40)
    parts.add(steps(10))
    parts.settle(1100 * MS, NOBODY, all_seen=True)
    assert sum(parts.seconds.values()) == pytest.approx(0.5)
    assert parts.seconds["communication"] == pytest.approx(0.2)


def test_completions_that_end_and_come_again_leave_a_part_that_is_unknown() -> None:
    parts = StepParts()
    operations(parts, 12, begin=0, length=40)
    parts.add(steps(10))
    parts.settle(1100 * MS, NOBODY, all_seen=True)
    parts.add(steps(100, first=2000))
    parts.settle(40_000 * MS, NOBODY, all_seen=True)
    assert parts.seconds["unknown"] == pytest.approx(7.0)
    parts.add(steps(10, first=40_000))
    operations(parts, 12, begin=40_000, length=40)
    parts.settle(41_100 * MS, NOBODY, all_seen=True)
    assert parts.seconds["communication"] == pytest.approx(0.8)


def test_memory_is_bounded_and_steps_that_do_not_fit_are_left_out() -> None:
    parts = StepParts()
    for first in range(0, 4 * MOST_STRETCHES, 1000):
        operations(parts, 1000, begin=first * 2, length=1, every=2)
    parts.add(steps(80 * MOST_STRETCHES // 1000))
    parts.settle(10**9 * MS, NOBODY, all_seen=True)
    assert sum(parts.seconds.values()) <= 2.1e-3 * MOST_STRETCHES
    assert parts.seconds["communication"] == pytest.approx(sum(parts.seconds.values()) * 0.5, rel=0.01)


def test_ranks_wait_for_the_one_that_spends_least_in_operations_or_calls_last() -> None:
    ranks = SlowRanks(lambda: 0)
    ranks.update(0, [RankTimes("a", str(rank), 10, 1.0) for rank in range(3)], [])
    ranks.update(
        STRETCH_NS,
        [RankTimes("a", "0", 20, 3.0), RankTimes("a", "1", 20, 2.5), RankTimes("a", "2", 20, 1.5)],
        [RankArrivals("b", "0", 10, 1.0, 0.5), RankArrivals("b", "1", 30, 3.0, 2.0), RankArrivals("a", "0", 9, 9, 4)],
    )
    waited = {key: (round(wait.seconds, 9), wait.inside_seconds) for key, wait in ranks.waits.items()}
    assert waited == {
        ("a", "0"): (1.5, 2.0),
        ("a", "1"): (1.0, 1.5),
        ("a", "2"): (0.0, 0.5),
        ("b", "0"): (2.0, None),
        ("b", "1"): (0.5, None),
    }
