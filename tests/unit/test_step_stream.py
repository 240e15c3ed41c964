"""Steps of jobs, found in the running stream of their calls without a hint.  All streams are simulated."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from railscope.agent.node.steps.stream import CallStream
from railscope.agent.rhythm.tracker import Iterations
from tests.unit.call_streams import Stream, calls_of, ddp, fsdp, gpt, gpt_evaluation, inference, moe, moe_evaluation

Job = Callable[[Stream, int], None]
JOBS: dict[str, Job] = {
    "ddp": ddp,
    "accumulation": partial(ddp, accumulate=4),
    "fsdp": fsdp,
    "moe": moe,
    **{f"gpt stage {stage}": partial(gpt, stage=stage) for stage in range(4)},
}


class Inline(Executor):
    """Runs what it is given at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def followed(stream: CallStream, made: Stream, seconds: float = 1.0) -> Iterations:
    """What is told of calls that come as they were made, read once a second."""
    calls = calls_of(made.calls)
    edges = np.searchsorted(calls.time_ns, np.arange(0, calls.time_ns[-1] + 2e9, seconds * 1e9).astype(np.int64))
    return np.concatenate([stream.add(calls.part(low, high)) for low, high in pairwise(edges.tolist())])


@pytest.mark.parametrize("name", JOBS)
def test_all_steps_of_a_job_are_told_and_no_others(name: str) -> None:
    made = Stream(random.Random(8))
    JOBS[name](made, 300)
    found = followed(CallStream(Inline(), 1 << 16), made)
    assert 297 <= len(found) <= 299
    begins_ns = np.array(made.begins) * 1e9
    mean_ns = np.diff(begins_ns).mean()
    assert (found["end_ns"] - found["start_ns"]).mean() == pytest.approx(mean_ns, rel=0.01)
    assert not found["odd"].any()


@pytest.mark.parametrize("name", ["ddp", "gpt stage 1", "gpt stage 3", "moe"])
def test_evaluations_between_are_no_steps(name: str) -> None:
    made = Stream(random.Random(9))
    steps = 200 if name == "moe" else 80
    for _ in range(5):
        JOBS[name](made, steps)
        if name == "ddp":
            for _ in range(200):
                made.wait(0.2)
                made.call(0, "AllGather", 1 << 20)
        elif name == "moe":
            moe_evaluation(made, 500)
        else:
            gpt_evaluation(made, 1500)
    found = followed(CallStream(Inline(), 1 << 16), made)
    assert 5 * steps - 4 <= len(found) <= 5 * steps - 1
    assert found["odd"].sum() <= 8
    usual_ns = (found["end_ns"] - found["start_ns"])[~found["odd"]]
    assert usual_ns.max() < 1.5 * np.median(usual_ns)


def test_an_evaluation_before_the_first_step_is_not_taken_for_the_job() -> None:
    made = Stream(random.Random(10))
    gpt_evaluation(made, 100)
    gpt(made, 300)
    found = followed(CallStream(Inline(), 1 << 16), made)
    assert 290 <= len(found[found["start_ns"] >= made.begins[0] * 1e9]) <= 299
    assert len(found) <= 299


@pytest.mark.parametrize("seed", range(4))
def test_requests_at_random_have_no_steps(seed: int) -> None:
    made = Stream(random.Random(seed))
    inference(made, 3000)
    stream = CallStream(Inline(), 1 << 14)
    assert not len(followed(stream, made))
    assert stream.pattern is None


def test_a_job_that_changes_its_batch_goes_on_with_other_calls() -> None:
    made = Stream(random.Random(11))
    ddp(made, 200)
    ddp(made, 400, buckets=8)
    found = followed(CallStream(Inline(), 1 << 16), made)
    assert 590 <= len(found) <= 599


def test_training_after_requests_is_found() -> None:
    made = Stream(random.Random(12))
    inference(made, 500)
    gpt(made, 400)
    found = followed(CallStream(Inline(), 1 << 14), made)
    assert 300 <= len(found) <= 399


def test_losses_cost_the_steps_in_which_they_were() -> None:
    made = Stream(random.Random(13))
    gpt(made, 200)
    calls = calls_of(made.calls)
    stream = CallStream(Inline(), 1 << 16)
    told, at, lost = 0, 0, 0
    told += len(stream.add(calls.part(0, 6000)))
    told += len(stream.add(calls.part(6000, 14000)))
    told += len(stream.add(calls.part(14000, 14100)))
    at = 14100
    while at < len(calls):
        found = stream.add(calls.part(at, at + 4000))
        told += len(found)
        assert ((found["end_ns"] - found["start_ns"]) < 400_000_000).all()
        at += 4100
        if at < len(calls):
            stream.record_loss(int(calls.time_ns[at]))
            lost += 1
    assert lost >= 4
    assert 200 - 2 * lost - 2 <= told <= 198 - lost


def test_no_more_calls_are_kept_than_allowed() -> None:
    made = Stream(random.Random(14))
    inference(made, 5000)
    stream = CallStream(Inline(), 4096)
    calls = calls_of(made.calls)
    for at in range(0, len(calls), 1000):
        stream.add(calls.part(at, at + 1000))
        assert stream.kept <= 4096
