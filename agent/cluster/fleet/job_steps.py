"""Reads what a job's steps are made of, and what its time went into, over all its hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from railscope.agent.cluster.fleet.prometheus import PrometheusError, Sample, Store
from railscope.agent.cluster.fleet.scrapes import host_names, match_any
from railscope.agent.cluster.fleet.slow import promql_seconds, waited_for_expression
from railscope.agent.facts import catalogue
from railscope.agent.facts.bound import StepShares


@dataclass(frozen=True, slots=True)
class StoredJobSteps:
    """A job's steps of late."""

    job: str
    step_seconds: float | None
    """Mean; None: its calls make no steps that are known."""
    calls_per_second: float | None
    """Of all its ranks."""
    shares: StepShares | None
    awaited: str
    """The rank for which the others wait most, as in `rank 3 on node7`; empty: none, or unknown."""
    spent_seconds: Mapping[str, float]
    """Since it began, by what it went into (`railscope_job_time_seconds`), on the host that knows most of it."""


def read_job_steps(store: Store, job: str, window_seconds: float, at: float | None = None) -> StoredJobSteps:
    """Ask the store about one job.

    Raises:
        PrometheusError: the store does not answer, or knows no such job.
    """
    window = promql_seconds(window_seconds)
    info = catalogue.COMM_INFO.where(match_any("exported_job", [job]))
    of_job = f"and on (cluster, comm) last_over_time({info}[{window}])"
    if not store.query(f"count(last_over_time({info}[{window}]))", at):
        raise PrometheusError(f"--job: the store has no job {job!r} of late: the label exported_job has their names")
    steps, parts = catalogue.JOB_STEP_SECONDS.name, catalogue.JOB_STEP_PART_SECONDS.name
    spent = f"(rate({catalogue.COMM_OPERATION_SECONDS}[{window}]) {of_job})"
    made = f"(rate({catalogue.COMM_OPERATIONS}[{window}]) {of_job})"
    apart = f"unless on (cluster, comm) max by (cluster, comm) (delta({catalogue.COMM_SEQUENCE}[{window}])) == 0"
    least = f"min by (cluster, comm) ({spent} / ({made} > 0)) * sum by (cluster, comm) ({made})"

    def number(expression: str) -> float | None:
        found = store.query(expression, at)
        return found[0].value if found else None

    seconds = f"sum(rate({steps}_sum[{window}]) {of_job}) / (sum(rate({steps}_count[{window}]) {of_job}) > 0)"
    by_part = store.query(f"sum by (part) (rate({parts}[{window}]) {of_job})", at)
    shares = StepShares.from_parts({one.labels.get("part", ""): one.value for one in by_part})
    waiting = number(f"1 - sum({least} {apart}) / (sum(sum by (cluster, comm) ({spent}) {apart}) > 0)")
    if shares is not None and waiting is not None:
        shares = shares.with_waiting(max(0.0, waiting))
    awaited = store.query(f"topk(1, ({waited_for_expression(window)}) {of_job})", at)
    awaited = awaited or store.query(f"topk(1, {catalogue.COMM_AWAITED} {of_job})", at)
    return StoredJobSteps(
        job=job,
        step_seconds=number(seconds),
        calls_per_second=number(f"sum(rate({catalogue.COMM_ENQUEUED}[{window}]) {of_job})"),
        shares=shares,
        awaited=_name(awaited[0]) if awaited else "",
        spent_seconds=_longest(store.query(f"{catalogue.JOB_TIME_SECONDS} {of_job}", at)),
    )


def _name(rank: Sample) -> str:
    (host,) = host_names([rank]).values()
    return f"rank {rank.labels.get('rank', '')} on {host}"


def _longest(samples: tuple[Sample, ...]) -> Mapping[str, float]:
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for one in samples:
        key = tuple(one.labels.get(name, "") for name in ("cluster", "job", "instance", "comm", "rank"))
        found.setdefault(key, {})[one.labels.get("state", "")] = one.value
    return max(found.values(), key=lambda spent: sum(spent.values()), default={})
