"""Steps of jobs, found in the running stream of their calls without a hint.  All streams are simulated."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from railscope.agent.node.steps.stream import CallStream
from railscope.agent.rhythm.pattern import Calls, find_pattern
from railscope.agent.rhythm.repetition import find_repetition
from railscope.agent.rhythm.series import CallSeries, dense_codes
from railscope.agent.rhythm.tracker import Iterations
from tests.unit.call_streams import Stream, calls_of, ddp, fsdp, gpt, gpt_evaluation, inference, moe, moe_evaluation

Job = Callable[[Stream, int], None]
JOBS: dict[str, Job] = {
    "ddp": ddp,
    "accumulation": partial(ddp, accumulate=4),
    "fsdp": fsdp,
    "moe": moe,
    **{f"gpt stage {stage}": partial(gpt, stage=stage) for stage in range(4)},
    "uneven pipeline": partial(gpt, stage=3, layers=1),
}


class Inline(Executor):
    """Runs what it is given at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


RECORDED = Path(__file__).parent / "data" / "steps"
"""Calls of rank 0, as `railscope record` had them beside the testbed's workload (ddp; gpt: pipeline 2 x tensor 2 x data
2) and the real NCCL (2.32.3: an AllReduce again and again; the demo's ddp, gpt and inference), on a machine that was
busy otherwise."""


RECORDINGS = ("ddp", "gpt", "nccl-allreduce", "nccl-ddp", "nccl-gpt")


def recorded(name: str) -> Calls:
    with np.load(RECORDED / f"{name}.npz") as file:
        time_ns = np.cumsum(file["microseconds"].astype(np.int64)) * 1000
        columns = (file[column].astype(np.int64) for column in ("communicator", "peer", "op", "payload_bytes"))
        communicator, peer, op, payload = columns
    return Calls.of_columns(time_ns, communicator, peer, op, np.full(len(op), 7), payload)


def read_each_second(stream: CallStream, calls: Calls) -> Iterations:
    """What is told of calls that come as they were made, read once a second."""
    edges = np.searchsorted(calls.time_ns, np.arange(0, calls.time_ns[-1] + 2e9, 1e9).astype(np.int64))
    return np.concatenate([stream.add(calls.part(low, high)) for low, high in pairwise(edges.tolist())])


def offline(calls: Calls) -> NDArray[np.int64]:
    """When iterations begin, as `railscope report` finds them."""
    kind, symbol = (dense_codes(column.view(np.int64)) for column in (calls.kind, calls.symbol))
    series = CallSeries(calls.time_ns, kind, symbol, dense_codes(calls.communicator), calls.payload_bytes)
    found = find_repetition(series)
    assert found is not None
    starts: NDArray[np.int64] = calls.time_ns[found.starts]
    return starts


def followed(stream: CallStream, made: Stream) -> Iterations:
    """What is told of calls that come as they were made, read once a second."""
    return read_each_second(stream, calls_of(made.calls))


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


def simulated(name: str) -> Calls:
    made = Stream(random.Random(16))
    JOBS[name](made, 200)
    return calls_of(made.calls)


STREAMS: dict[str, Callable[[], Calls]] = {
    **{name: partial(simulated, name) for name in JOBS},
    **{f"{name} recorded": partial(recorded, name) for name in RECORDINGS},
}


@pytest.mark.parametrize("name", STREAMS)
def test_live_steps_are_those_of_the_report(name: str) -> None:
    calls = STREAMS[name]()
    live, starts = read_each_second(CallStream(Inline(), 1 << 16), calls), offline(calls)
    # The last ones are told when those behind them are whole.
    assert len(starts) - 1 - 3 <= len(live) <= len(starts) - 1
    both = starts[(starts >= live["start_ns"][0]) & (starts <= live["end_ns"][-1])]
    assert len(both) - 1 == pytest.approx(len(live), rel=0.01)
    assert np.diff(both).mean() == pytest.approx((live["end_ns"] - live["start_ns"]).mean(), rel=0.01)


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


def test_recorded_requests_have_no_steps_for_the_report_either() -> None:
    calls = recorded("nccl-inference")
    assert not len(read_each_second(CallStream(Inline(), 1 << 16), calls))
    assert find_pattern(calls) is None


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
