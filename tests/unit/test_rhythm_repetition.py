"""Where a series of calls repeats itself.  All series are simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.tables.gpu_rows import dense_codes
from railscope.agent.rhythm.repetition import find_most_frequent, find_repetition, relative_spread
from railscope.agent.rhythm.series import CallSeries

Call = tuple[float, int, str, int]
"""Seconds, communicator, operation, payload."""
MIB = 1 << 20


def series(calls: Sequence[Call]) -> CallSeries:
    ordered = sorted(calls)
    names = sorted({call[2] for call in ordered})
    communicator = dense_codes(np.array([call[1] for call in ordered]))
    kind = dense_codes(communicator.astype(np.int64), np.array([names.index(call[2]) for call in ordered]))
    payload = np.array([call[3] for call in ordered], np.int64)
    time_ns = np.array([round(call[0] * 1e9) for call in ordered], np.int64)
    return CallSeries(time_ns, kind, dense_codes(kind.astype(np.int64), payload), communicator, payload)


def periods(found: CallSeries) -> list[float]:
    repetition = find_repetition(found)
    assert repetition is not None
    return [round(float(gap), 6) for gap in np.diff(found.time_ns[repetition.starts]) / 1e9]


def gpt(iterations: int, stage: int, stages: int = 4, micro_batches: int = 8, *, tensor: bool = True) -> list[Call]:
    """1F1B of one stage: TP AllReduces, Sends and Recvs of one size, a DP AllReduce, a small one for the loss."""
    calls: list[Call] = []
    now = 0.0
    ahead = stages - 1 - stage
    for _ in range(iterations):
        for step in "F" * ahead + "FB" * (micro_batches - ahead) + "B" * ahead:
            now += 0.01
            if stage if step == "F" else stage < stages - 1:
                calls.append((now, 1, "Recv", 125 * MIB))
            for _ in range((28 if step == "F" else 56) * tensor):
                now += 0.001
                calls.append((now, 0, "AllReduce", 125 * MIB))
            if stage < stages - 1 if step == "F" else stage:
                now += 0.001
                calls.append((now, 1, "Send", 125 * MIB))
        calls += [(now + 0.02, 2, "AllReduce", 741 * MIB), (now + 0.05, 3, "AllReduce", 4)]
        now += 0.1
    return calls


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("tensor", [True, False])
def test_an_iteration_of_a_pipeline_is_found_not_a_layer_or_a_micro_batch(stage: int, tensor: bool) -> None:
    found = periods(series(gpt(6, stage, tensor=tensor)))
    assert len(found) == 5
    assert max(found) - min(found) < 1e-6


def test_gathers_of_equal_layers_make_no_iteration_of_a_layer() -> None:
    calls: list[Call] = []
    for iteration in range(8):
        ops = ["AllGather"] * 40 + ["AllGather", "ReduceScatter"] * 40
        calls += [(iteration * 2 + place * 0.01, 0, op, 10 * MIB) for place, op in enumerate(ops)]
    assert periods(series(calls)) == [2.0] * 7


def test_a_layer_that_repeats_exactly_lacks_the_gradients() -> None:
    calls: list[Call] = []
    for iteration in range(8):
        ops = ["AllGather", "ReduceScatter"] * 60
        calls += [(iteration * 2 + place * 0.01, 0, op, 10 * MIB) for place, op in enumerate(ops)]
        calls.append((iteration * 2 + 1.3, 1, "AllReduce", 50 * MIB))
    assert periods(series(calls)) == [2.0] * 7


def test_light_calls_in_every_third_iteration_do_not_make_three_iterations_one() -> None:
    calls: list[Call] = []
    for iteration in range(30):
        calls += [(iteration * 0.5 + place * 0.02, 0, "AllReduce", (place + 1) * MIB) for place in range(8)]
        if iteration % 3 == 2:
            calls.append((iteration * 0.5 + 0.2, 0, "AllReduce", 4))
    found = series(calls)
    assert periods(found) == [0.5] * 29
    repetition = find_repetition(found)
    assert repetition is not None
    assert find_most_frequent(found, repetition.starts, found.symbol) == (20 / 29, 8)


def test_a_heavy_call_in_every_twentieth_iteration_does_not_make_twenty_iterations_one() -> None:
    calls: list[Call] = []
    for iteration in range(100):
        calls += [(iteration * 0.5 + place * 0.02, 0, "AllReduce", (place + 1) * MIB) for place in range(8)]
        if iteration % 20 == 19:
            calls.append((iteration * 0.5 + 0.3, 0, "AllGather", 40 * MIB))
    found = series(calls)
    assert periods(found) == [0.5] * 99
    repetition = find_repetition(found)
    assert repetition is not None
    assert find_most_frequent(found, repetition.starts, found.symbol) == (95 / 99, 8)


def fsdp(iterations: int, begin: float = 0.0) -> list[Call]:
    """Twelve layers are gathered forwards and backwards, and their gradients scattered; then the optimizer works."""
    ops = ["AllGather"] * 12 + ["AllGather", "ReduceScatter"] * 12
    return [
        (begin + iteration * 0.4 + place * 0.01, 0, op, 40 * MIB)
        for iteration in range(iterations)
        for place, op in enumerate(ops)
    ]


def ddp(iterations: int, begin: float = 0.0) -> list[Call]:
    return [
        (begin + iteration * 0.4 + place * 0.01, 0, "AllReduce", (25 if place else 1) * MIB)
        for iteration in range(iterations)
        for place in range(6)
    ]


@pytest.mark.parametrize(("job", "batches"), [(ddp, 8), (ddp, 40), (fsdp, 8), (fsdp, 100)])
def test_training_with_an_evaluation_now_and_then_has_the_training_step_as_iteration(
    job: Callable[[int, float], list[Call]], batches: int
) -> None:
    """A hundred steps and an evaluation that gathers, five times: it makes up to two fifths of the calls."""
    calls: list[Call] = []
    for phase in range(5):
        begin = phase * 200.0
        calls += job(100, begin)
        gathered = 12 * batches
        calls += [(begin + 45 + place * 0.01, 0, "AllGather", 40 * MIB) for place in range(gathered)]
    found = periods(series(calls))
    assert found.count(0.4) == 495
    # The others have an evaluation in them.
    assert len(found) <= 500


def test_micro_batches_in_another_order_at_the_ends_are_no_iterations() -> None:
    """Forwards first, then each with a backward, backwards last: an iteration holds nothing but micro-batches."""
    calls: list[Call] = []
    now = 0.0
    for _ in range(6):
        for step in "F" * 5 + "FB" * 20 + "B" * 5:
            now += 0.1 if step == "F" else 0.01
            for size in (1, 2, 3) if step == "F" else (4, 5, 6):
                now += 0.001
                calls.append((now, 0, "AllReduce", size * MIB))
    assert len(periods(series(calls))) == 5


def test_calls_of_several_communicators_may_interleave_as_they_like() -> None:
    chance = random.Random(5)
    calls: list[Call] = []
    for iteration in range(20):
        for communicator in range(3):
            moments = sorted(chance.uniform(0, 0.2) for _ in range(10))
            calls += [
                (iteration + moment, communicator, "AllReduce", (1 + place % 4) * MIB)
                for place, moment in enumerate(moments)
            ]
    found = series(calls)
    repetition = find_repetition(found)
    assert repetition is not None
    assert len(repetition.starts) == 20
    assert find_most_frequent(found, repetition.starts, found.symbol) == (1.0, 30)


def test_another_order_on_one_communicator_is_another_iteration() -> None:
    calls = [
        (i + 0.01 * place, 0, "AllReduce", size * MIB) for i in range(10) for place, size in enumerate((1, 2, 3, 4))
    ]
    swapped = [
        (*call[:3], {2: 3, 3: 2}.get(call[3] // MIB, call[3] // MIB) * MIB) if 5 < call[0] < 6 else call
        for call in calls
    ]
    found = series(swapped)
    repetition = find_repetition(found)
    assert repetition is not None
    recurrence, calls_of_most = find_most_frequent(found, repetition.starts, found.symbol)
    assert calls_of_most == 4
    assert recurrence == pytest.approx(1 - 1 / (len(repetition.starts) - 1))


def test_equal_calls_in_bursts_of_one_size_are_iterations_by_their_gaps() -> None:
    found = series([(i * 0.5 + place * 0.01, 0, "AllReduce", MIB) for i in range(20) for place in range(10)])
    repetition = find_repetition(found)
    assert repetition is not None
    assert repetition.by_gaps
    assert repetition.starts.tolist() == list(range(0, 200, 10))


def test_the_same_call_at_regular_distance_is_an_iteration_each() -> None:
    chance = random.Random(2)
    found = series([(i * 0.5 + chance.uniform(-0.02, 0.02), 0, "AllReduce", MIB) for i in range(40)])
    assert len(periods(found)) == 39


@pytest.mark.parametrize("seed", range(5))
def test_calls_at_random_moments_do_not_repeat(seed: int) -> None:
    chance = random.Random(seed)
    same, differing = [], []
    now = 0.0
    for _ in range(300):
        now += chance.expovariate(3)
        same.append((now, 0, "AllReduce", MIB))
        for place in range(chance.randrange(1, 20)):
            differing.append((now + place * 0.0005, 0, "AllReduce", chance.randrange(1, 5000) * 14336))
    assert find_repetition(series(same)) is None
    assert find_repetition(series(differing)) is None


@pytest.mark.parametrize("sizes", [5, 4096])
def test_sizes_that_vary_hide_no_iteration(sizes: int) -> None:
    chance = random.Random(3)
    calls: list[Call] = []
    for iteration in range(12):
        for place in range(32):
            for op in ("Send", "Recv"):
                calls.append((iteration * 0.3 + place * 0.005, 0, op, chance.randrange(1, sizes) * 4096))
        calls.append((iteration * 0.3 + 0.2, 1, "AllReduce", 100 * MIB))
    found = series(calls)
    repetition = find_repetition(found)
    assert repetition is not None
    assert repetition.sizes_vary
    assert len(repetition.starts) == 12
    assert find_most_frequent(found, repetition.starts, found.kind)[0] == 1.0
    assert find_most_frequent(found, repetition.starts, found.symbol)[0] <= 2 / 11


@pytest.mark.parametrize(("kinds", "repeats"), [(12, True), (2, False)])
def test_calls_of_many_kinds_in_one_order_are_iterations_at_any_distance(kinds: int, repeats: bool) -> None:
    chance = random.Random(11)
    calls: list[Call] = []
    now = 0.0
    for _ in range(200):
        now += chance.choice((0.01, 0.01, 0.05))
        for kind in range(kinds):
            calls.append((now + kind * 1e-5, 0, f"Operation{kind:02}", chance.randrange(1, 5000) * 4096))
    repetition = find_repetition(series(calls))
    assert (repetition is not None) == repeats
    if repetition is not None:
        assert repetition.sizes_vary
        assert np.unique(np.diff(repetition.starts)).tolist() == [kinds]


@given(
    pattern=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=2, max_size=12),
    iterations=st.integers(5, 20),
    warm_up=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_any_pattern_between_silences_is_found_whole(
    pattern: list[tuple[int, int]], iterations: int, warm_up: int
) -> None:
    """Every iteration ends with a call that only ends iterations."""
    body = [*pattern, (3, 9)]
    calls: list[Call] = [(place * 0.01 - 10, 0, "Broadcast", 77 * MIB) for place in range(warm_up)]
    calls += [
        (iteration * 5.0 + place * 0.001, communicator, "AllReduce", size * MIB)
        for iteration in range(iterations)
        for place, (communicator, size) in enumerate(body)
    ]
    assert periods(series(calls)) == [5.0] * (iterations - 1)


def test_spread_of_equal_lengths_is_none_at_all() -> None:
    assert relative_spread(np.array([5, 5, 5])) == 0
    assert relative_spread(np.array([1, 2, 3, 4, 5])) == pytest.approx(2 / 3)
    assert relative_spread(np.array([], np.int64)) == float("inf")
