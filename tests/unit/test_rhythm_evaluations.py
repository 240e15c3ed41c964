"""Steps of jobs between which evaluations, checkpoints or metrics lie, recorded and live.  Streams are simulated."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import pytest

from railscope.agent.node.steps.stream import CallStream
from railscope.agent.rhythm.between import NO_LAYERS, OtherCalls, lie_between
from railscope.agent.rhythm.pattern import Calls, find_pattern
from railscope.agent.rhythm.repetition import Repetition, find_repetition
from railscope.agent.rhythm.series import CallSeries, dense_codes
from railscope.agent.rhythm.tracker import Tracker
from tests.unit.call_streams import (
    MIB,
    OWN,
    Stream,
    accumulation,
    calls_of,
    checkpoint,
    ddp,
    ddp_evaluation,
    fsdp,
    fsdp_evaluation,
    gpt,
    gpt_evaluation,
    logged,
    metric,
    moe,
    moe_evaluation,
    normalised,
    one_f_one_b,
    own_evaluation,
)
from tests.unit.test_step_stream import Inline, read_each_second

Job = Callable[[Stream, int], None]
Evaluation = Callable[[Stream], None]
JOBS: Final[dict[str, tuple[Job, Callable[[Stream, int], None]]]] = {
    "ddp": (ddp, ddp_evaluation),
    "fsdp": (fsdp, fsdp_evaluation),
    "moe": (moe, moe_evaluation),
    **{f"gpt stage {stage}": (partial(gpt, stage=stage), gpt_evaluation) for stage in (0, 1, 3)},
}
EVALUATIONS: Final[dict[str, Callable[[str], Evaluation]]] = {
    "metric": lambda _: metric,
    "log": lambda _: logged,
    "checkpoint": lambda _: checkpoint,
    "on its own communicator": lambda _: own_evaluation,
    "forwards": lambda job: lambda stream: JOBS[job][1](stream, 100),
    "most calls": lambda job: lambda stream: JOBS[job][1](stream, 1500),
}
PHASES: Final = 5


def repetition_of(calls: Calls) -> Repetition | None:
    kind, symbol = (dense_codes(column.view(np.int64)) for column in (calls.kind, calls.symbol))
    return find_repetition(
        CallSeries(calls.time_ns, kind, symbol, dense_codes(calls.communicator), calls.payload_bytes)
    )


def trained(job: str, evaluation: str, *, evenly: bool, before: bool = False, phases: int = PHASES) -> Stream:
    """Phases of training with an evaluation after each, or before."""
    stream = Stream(random.Random(5))
    evaluate = EVALUATIONS[evaluation](job)
    for _ in range(phases):
        if before:
            evaluate(stream)
        JOBS[job][0](stream, 60 if evenly else stream.chance.randrange(40, 120))
        if not before:
            evaluate(stream)
    return stream


def usual_of(stream: Stream) -> float:
    return float(np.median(np.diff(stream.begins)))


@pytest.mark.parametrize("evenly", [True, False])
@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("job", JOBS)
def test_the_training_step_is_the_iteration_in_a_recording_and_live(job: str, evaluation: str, evenly: bool) -> None:
    stream = trained(job, evaluation, evenly=evenly)
    calls = calls_of(stream.calls)
    found = repetition_of(calls)
    assert found is not None
    lengths = np.diff(calls.time_ns[found.starts]) / 1e9
    # The last one's end is not known, or the evaluation's first call ends it.
    assert stream.iterations - 1 <= len(lengths) <= stream.iterations
    own = lengths[~found.interrupted]
    assert np.median(own) == pytest.approx(usual_of(stream), rel=0.01)
    assert found.interrupted.sum() == (0 if evaluation == "log" else PHASES - 1)
    assert own.max() < 1.5 * np.median(own)
    follower = CallStream(Inline(), 1 << 16)
    live = read_each_second(follower, calls)
    assert follower.pattern is not None
    # Where the order of calls proves nothing, as sizes vary, sixteen are told together.
    held = 0 if follower.pattern.telling else 15
    assert 0.99 * (len(lengths) - held) <= len(live) <= 1.01 * len(lengths)
    told = (live["end_ns"] - live["start_ns"]) / 1e9
    assert np.median(told) == pytest.approx(np.median(own), rel=0.01)
    assert len(told[told > 1.5 * np.median(told)]) == found.interrupted.sum()
    assert live["odd"][told > 1.5 * np.median(told)].all()


@pytest.mark.parametrize(("evaluation", "phases"), [("most calls", 3), ("most calls", 1), ("forwards", 1)])
@pytest.mark.parametrize("job", JOBS)
def test_an_evaluation_at_the_beginning_of_a_recording_is_not_its_iteration(
    job: str, evaluation: str, phases: int
) -> None:
    stream = trained(job, evaluation, evenly=True, before=True, phases=phases)
    calls = calls_of(stream.calls)
    found = repetition_of(calls)
    assert found is not None
    lengths = np.diff(calls.time_ns[found.starts]) / 1e9
    assert len(lengths) == stream.iterations - 1
    assert np.median(lengths) == pytest.approx(usual_of(stream), rel=0.01)
    assert found.interrupted.sum() == phases - 1
    assert calls.time_ns[found.starts[0]] >= stream.begins[0] * 1e9 - 0.1e9


@pytest.mark.parametrize("evaluation", ["most calls", "on its own communicator"])
@pytest.mark.parametrize("job", JOBS)
def test_an_evaluation_that_was_told_as_steps_gives_way_to_training(job: str, evaluation: str) -> None:
    """Nothing tells a long evaluation before the first step from a job that repeats its calls."""
    stream = Stream(random.Random(3))
    EVALUATIONS[evaluation](job)(stream)
    for _ in range(4):
        JOBS[job][0](stream, 200 if job != "moe" else 500)
        EVALUATIONS["forwards"](job)(stream)
    calls = calls_of(stream.calls)
    follower = CallStream(Inline(), 1 << 16)
    live = read_each_second(follower, calls)
    assert follower.kept <= 1 << 16
    begun = stream.begins[0]
    assert len(live[live["end_ns"] < begun * 1e9]) > 100
    # Half a minute later the training steps are told, and nothing else.
    late = live[live["start_ns"] > (begun + 35.0) * 1e9]
    expected = sum(moment > begun + 35.0 for moment in stream.begins)
    assert expected > 200
    assert len(late) == pytest.approx(expected, rel=0.01, abs=2)
    assert np.median(late["end_ns"] - late["start_ns"]) / 1e9 == pytest.approx(usual_of(stream), rel=0.01)
    # No moment is told twice.
    assert (live["start_ns"][1:] >= live["end_ns"][:-1]).all()


def test_an_evaluation_that_ends_with_next_to_no_bytes_interrupts_a_step_too() -> None:
    stream = Stream(random.Random(1))
    for _ in range(PHASES):
        gpt(stream, 60)
        stream.wait(4.0)
        stream.call(0, "AllReduce", 4)
    calls = calls_of(stream.calls)
    found = repetition_of(calls)
    assert found is not None
    assert found.interrupted.sum() == PHASES - 1
    live = read_each_second(CallStream(Inline(), 1 << 16), calls)
    assert live["odd"].sum() == PHASES - 1


@pytest.mark.parametrize("iterations", [4, 30])
@pytest.mark.parametrize("micro_batches", [8, 16, 64])
@pytest.mark.parametrize("stage", range(4))
def test_micro_batches_after_silences_lack_the_gradients_and_are_no_steps(
    stage: int, micro_batches: int, iterations: int
) -> None:
    """The first and the last stage call the same again and again, and their gradients once in so many micro-batches."""
    stream = Stream(random.Random(1))
    one_f_one_b(stream, iterations, stage=stage, micro_batches=micro_batches)
    calls = calls_of(stream.calls)
    found = repetition_of(calls)
    assert found is not None
    assert len(found.starts) == iterations
    assert not found.interrupted.any()
    # What cannot be known is said.
    assert found.parts == (micro_batches if stage in (0, 3) and micro_batches >= 10 else 0)


@pytest.mark.parametrize("gradients_seconds", [0.05, 0.5])
@pytest.mark.parametrize("micro_batches", [4, 16, 64, 200])
def test_gradients_once_in_many_micro_batches_make_the_iteration(micro_batches: int, gradients_seconds: float) -> None:
    stream = Stream(random.Random(1))
    accumulation(stream, 8, micro_batches=micro_batches, gradients_seconds=gradients_seconds)
    calls = calls_of(stream.calls)
    found = repetition_of(calls)
    assert found is not None
    assert len(found.starts) == 8
    assert np.median(np.diff(calls.time_ns[found.starts])) / 1e9 == pytest.approx(usual_of(stream), rel=0.01)


@pytest.mark.parametrize("micro_batches", [4, 10, 12, 16])
@pytest.mark.parametrize("job", ["sharded", "normalised"])
def test_gradients_on_the_communicator_of_micro_batches_make_the_iteration(job: str, micro_batches: int) -> None:
    """As where layers are sharded over the ranks that share their gradients, or normalised across these."""
    stream = Stream(random.Random(1))
    if job == "sharded":
        fsdp(stream, 30, accumulate=micro_batches)
    else:
        normalised(stream, 30, micro_batches=micro_batches)
    calls = calls_of(stream.calls)
    found = repetition_of(calls)
    assert found is not None
    assert len(found.starts) == 30
    assert not found.interrupted.any()


def test_evaluations_of_its_own_communicator_leave_a_pattern_right_and_gradients_do_not() -> None:
    stream = Stream(random.Random(2))
    one_f_one_b(stream, 30, stage=3, micro_batches=16)
    calls = calls_of(stream.calls)
    # As of a stretch before the first gradients.
    pattern = find_pattern(calls.part(0, 16 * 26))
    assert pattern is not None
    assert pattern.length == 26
    tracker = Tracker(pattern)
    tracker.add(calls)
    assert tracker.failed
    evaluated = trained("gpt stage 1", "on its own communicator", evenly=True)
    calls = calls_of(evaluated.calls)
    pattern = find_pattern(calls.part(0, 8000))
    assert pattern is not None
    assert OWN not in pattern.communicators
    tracker = Tracker(pattern)
    tracker.add(calls)
    assert not tracker.failed


STEP_NS, STEP_BYTES = 1_000_000_000, 1000 * MIB


def others(
    apart: list[int], *, spread: float = 0.0, took: float = 2.0, calls: int = 10, payload: int = 700 * MIB
) -> OtherCalls:
    """Stretches after so many segments each, of steps of ten calls and a second; times in seconds."""
    count = len(apart)
    return OtherCalls(
        segments_before=np.cumsum(apart),
        called_ns=np.full(count, round(spread * 1e9)),
        took_ns=np.full(count, round(took * 1e9)),
        usual_calls=np.full(count, calls),
        payload_bytes=payload * count,
    )


CASES: Final[dict[str, tuple[OtherCalls, bool]]] = {
    "gradients": (others([16] * 20), False),
    "gradients of layers": (others([NO_LAYERS - 10] * 20), False),
    "more than layers and micro-batches": (others([NO_LAYERS] * 20), True),
    "after few": (others([4, 7, 5, 3] * 5, spread=5.0, took=20.0), False),
    "after different numbers": (others([16, 40, 100, 20]), True),
    "calls were lost once": (others([16] * 10 + [11] + [16] * 10), False),
    "next to no bytes": (others([16] * 20, payload=MIB), True),
    "over some steps' time": (others([16] * 20, spread=2.5), True),
    "as long as many steps": (others([16] * 20, took=12.0), True),
    "as long, with calls of many steps": (others([16] * 20, took=12.0, calls=100), False),
}


@pytest.mark.parametrize("name", CASES)
def test_what_lies_between_steps_and_what_is_part_of_one(name: str) -> None:
    made, between = CASES[name]
    usual = int(made.segments_before[-1])
    assert lie_between(made, STEP_NS, STEP_BYTES, usual, 10) == between
    few = lie_between(made, STEP_NS, STEP_BYTES, usual, 3)
    assert few == (name == "more than layers and micro-batches")
