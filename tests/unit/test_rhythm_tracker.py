"""Iterations of a stream, followed by the pattern of a stretch of it.  All streams are simulated."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.rhythm.pattern import Calls, Pattern, find_pattern
from railscope.agent.rhythm.repetition import find_repetition
from railscope.agent.rhythm.series import CallSeries, dense_codes
from railscope.agent.rhythm.tracker import Iterations, Tracker
from tests.unit.call_streams import MIB, Stream, calls_of, ddp, fsdp, gpt, gpt_evaluation, inference, moe

Job = Callable[[Stream, int], None]
JOBS: dict[str, Job] = {
    "ddp": ddp,
    "accumulation": partial(ddp, accumulate=4),
    "fsdp": fsdp,
    "moe": moe,
    **{f"gpt stage {stage}": partial(gpt, stage=stage) for stage in range(4)},
    "gpt without tensor ranks": partial(gpt, layers=0),
}


def offline_starts(calls: Calls) -> np.ndarray:
    codes = [dense_codes(column.view(np.int64)) for column in (calls.kind, calls.symbol, calls.communicator)]
    found = find_repetition(CallSeries(calls.time_ns, codes[0], codes[1], codes[2], calls.payload_bytes))
    assert found is not None
    return calls.time_ns[found.starts]


def learnt(calls: Calls) -> Pattern:
    pattern = find_pattern(calls)
    assert pattern is not None
    return pattern


def followed(tracker: Tracker, calls: Calls, chunk: int) -> Iterations:
    parts = [tracker.add(calls.part(at, at + chunk)) for at in range(0, len(calls), chunk)]
    return np.concatenate(parts)


@pytest.mark.parametrize("chunk", [7, 500, 1 << 20])
@pytest.mark.parametrize("name", JOBS)
def test_iterations_are_those_of_the_whole_recording(name: str, chunk: int) -> None:
    stream = Stream(random.Random(3))
    JOBS[name](stream, 60)
    calls = calls_of(stream.calls)
    tracker = Tracker(learnt(calls.part(0, len(calls) // 3)))
    found = followed(tracker, calls, chunk)
    assert not tracker.failed
    starts = offline_starts(calls)
    # The last one's end, and what follows the last anchor, is not known yet.
    assert len(starts) - 3 <= len(found) <= len(starts) - 1
    assert set(found["start_ns"].tolist()) <= set(starts.tolist())
    assert np.array_equal(found["start_ns"][1:], found["end_ns"][:-1])
    assert not found["odd"].any()
    begins = np.array(stream.begins) * 1e9
    nearest = np.abs(found["start_ns"][:, None] - begins).min(axis=1)
    assert np.median(found["end_ns"] - found["start_ns"]) == pytest.approx(np.median(np.diff(begins)), rel=0.01)
    assert (nearest < np.median(np.diff(begins)) / 2).all()


@pytest.mark.parametrize("name", JOBS)
def test_chunks_of_any_size_make_no_difference(name: str) -> None:
    stream = Stream(random.Random(4))
    JOBS[name](stream, 30)
    calls = calls_of(stream.calls)
    pattern = learnt(calls)
    whole, pieces = followed(Tracker(pattern), calls, 1 << 20), followed(Tracker(pattern), calls, 1)
    assert np.array_equal(whole, pieces)


@pytest.mark.parametrize("name", ["ddp", "gpt stage 1", "moe"])
def test_evaluation_between_is_no_iteration_and_makes_one_odd(name: str) -> None:
    stream = Stream(random.Random(5))
    for _ in range(6):
        JOBS[name](stream, 20)
        if name == "ddp":
            stream.now += 5.0
            for _ in range(8):
                stream.call(0, "AllGather", 2 * MIB)
                stream.now += 0.5
        else:
            gpt_evaluation(stream, 30)
    calls = calls_of(stream.calls)
    tracker = Tracker(learnt(calls.part(0, len(calls) // 8)))
    found = followed(tracker, calls, 333)
    assert not tracker.failed
    assert 117 <= len(found) <= 119
    assert 5 <= found["odd"].sum() <= 10
    usual_ns = (found["end_ns"] - found["start_ns"])[~found["odd"]]
    assert usual_ns.max() < 1.5 * np.median(usual_ns)


def test_an_iteration_in_which_calls_were_lost_is_not_told() -> None:
    stream = Stream(random.Random(6))
    gpt(stream, 40)
    calls = calls_of(stream.calls)
    tracker = Tracker(learnt(calls))
    half = len(calls) // 2
    before = tracker.add(calls.part(0, half))
    tracker.record_loss(int(calls.time_ns[half + 20]))
    after = tracker.add(calls.part(half + 20))
    assert 36 <= len(before) + len(after) <= 37  # two, where the anchor between them is lost
    assert ((after["end_ns"] - after["start_ns"]) < 1.5 * tracker.pattern.median_ns).all()


def test_a_pattern_that_lacks_a_communicator_fails() -> None:
    stream = Stream(random.Random(7))
    gpt_evaluation(stream, 60)
    pattern = learnt(calls_of(stream.calls))
    gpt(stream, 60, stages=2, micro_batches=16)
    tracker = Tracker(pattern)
    followed(tracker, calls_of(stream.calls), 1000)
    assert tracker.failed


def test_requests_have_no_pattern() -> None:
    for seed in range(8):
        stream = Stream(random.Random(seed))
        inference(stream, 400)
        assert find_pattern(calls_of(stream.calls)) is None


def test_equal_calls_in_bursts_are_iterations_while_they_are_regular() -> None:
    made = [(i * 0.5 + place * 0.01, 0, "AllReduce", MIB) for i in range(100) for place in range(10)]
    calls = calls_of(made)
    tracker = Tracker(learnt(calls.part(0, 300)))
    found = followed(tracker, calls, 37)
    assert 98 - 16 < len(found) <= 99
    assert set(np.diff(found["start_ns"]).tolist()) == {500_000_000}


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 30), name=st.sampled_from(sorted(JOBS)), late=st.floats(0.0, 0.3))
def test_jitter_moves_no_iteration(seed: int, name: str, late: float) -> None:
    """One call in twenty comes late, and what follows it with it."""
    stream = Stream(random.Random(seed))
    JOBS[name](stream, 40)
    delay, shifted = 0.0, []
    for at, communicator, op, size in stream.calls:
        if stream.chance.random() < 0.05:
            delay += late * stream.chance.random() * 0.02
        shifted.append((at + delay, communicator, op, size))
    calls = calls_of(shifted)
    tracker = Tracker(learnt(calls.part(0, len(calls) // 2)))
    found = followed(tracker, calls, 100)
    assert 36 <= len(found) <= 39
