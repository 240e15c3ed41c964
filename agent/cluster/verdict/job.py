"""The words on a job's steps: how long they take, what bounds them, what the job's time went into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from railscope.agent.cluster.fleet.job_steps import StoredJobSteps
from railscope.agent.cluster.verdict.quantities import format_duration, format_short_duration
from railscope.agent.facts.bound import describe_bound, describe_goodput


def describe_job(steps: StoredJobSteps) -> tuple[str, ...]:
    """What is known of a job's steps, in sentences."""
    return tuple(_sentences(steps))


def _sentences(steps: StoredJobSteps) -> Iterator[str]:
    if steps.step_seconds is None:
        calls = "" if steps.calls_per_second is None else f"; it makes {steps.calls_per_second:,.1f} calls/s"
        yield f"Job {steps.job} has no steps that are known{calls}."
        yield (
            "Either its calls do not repeat, as those of a server with requests at random; or they have not repeated "
            "for long enough yet; or CUDA graphs make them."
        )
        return
    yield f"A step of job {steps.job} takes {_step(steps.step_seconds)}."
    if steps.shares is None:
        yield "What it is made of is not known yet."
    else:
        yield from describe_bound(steps.shares, steps.awaited)
    yield from _time(steps.spent_seconds)


def _time(spent: Mapping[str, float]) -> Iterator[str]:
    told = describe_goodput(spent, format_duration)
    if told:
        yield told


def _step(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 10 else format_short_duration(seconds)
