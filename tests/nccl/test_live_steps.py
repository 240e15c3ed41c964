"""Steps as the agent tells them live, beside what `railscope report` makes of a recording of the same job."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.analysis.facts.report import Iteration, Regularity
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.timing.iterations import find_iterations
from railscope.agent.dataset.reader import open_dataset
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.fabric.test_datasets import recorder
from tests.nccl.job import Evaluations, Job

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

ITERATIONS = 220
PACE_US = 70_000
"""So that they take more than ten seconds on any machine."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One job as the agent told it live and as its recording tells it."""

    told: int
    """Steps whose length was told live."""
    steps: float
    """All steps that were."""
    seconds: float
    counts: dict[float, float]
    """Of steps by upper bound, as a histogram has them."""
    parts: dict[str, float]
    spent: dict[str, float]
    regularity: Regularity
    iterations: tuple[Iteration, ...]


def seen(hosts: Fabric, double: Double, folder: Path, *, evaluations: Evaluations | None = None) -> Seen:
    """Run a job with an agent and a recorder beside it."""
    (folder / "job").mkdir()
    job = Job(
        hosts,
        folder / "job",
        double,
        pattern="mixed",
        iterations=ITERATIONS,
        size_bytes=1 << 16,
        pace_us=PACE_US,
        evaluations=evaluations,
        hold=True,
    )
    with job:
        pids = job.ready()
        words = [word for pid in pids for word in ("--pid", str(pid))]
        with AgentProcess(*words, "--level", "completion") as agent:
            with recorder(folder / "dataset", pids, "--level", "completion") as record:
                job.start()
                job.finished(180)
                agent.until(lambda: value(agent, "railscope_job_steps_total") >= ITERATIONS - 4)
                record.send_signal(signal.SIGINT)
                _, err = record.communicate(timeout=120)
                assert record.returncode == 0, err
            told, seconds = steps(agent), value(agent, "railscope_job_step_seconds_sum")
            number = value(agent, "railscope_job_steps_total")
            counts = {float(one["le"]): count for one, count in agent.samples("railscope_job_step_seconds_bucket")}
            parts = {one["part"]: part for one, part in agent.samples("railscope_job_step_part_seconds_total")}
            spent = {one["state"]: part for one, part in agent.samples("railscope_job_time_seconds")}
        job.release()
        job.wait()
    with open_dataset([folder / "dataset"]) as dataset:
        found, iterations, unknown = find_iterations(dataset, find_gpus(dataset))
    assert found is not None, unknown
    return Seen(int(told), number, seconds, counts, parts, spent, found, iterations)


def test_live_steps_and_their_parts_agree_with_the_report_of_the_same_job(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    job = seen(two_hosts, double, tmp_path)
    # Live, the last ones are told when those behind them are whole, and the first one may lack its beginning.
    assert 0 <= len(job.iterations) - job.told <= 4
    assert difference(job) < 0.01
    # Steps whose operations ended within the job; the last of them may yet wait for the next one.
    assert 0.5 * job.seconds < sum(job.parts.values()) <= job.seconds
    assert job.parts["communication"] > 0
    # On a busy machine ranks wait for processors, which is a stall, and steps take longer because of it.
    assert job.spent["steps"] + job.spent["stalled"] > 0.8 * job.seconds, job.spent


def test_evaluations_on_a_communicator_of_their_own_are_no_steps_live_and_in_the_report(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    job = seen(two_hosts, double, tmp_path, evaluations=Evaluations(every=50, calls=60))
    regularity = job.regularity
    # The fourth and last comes after 200 iterations; at least one is recorded before and behind each.
    assert regularity.between is not None
    assert regularity.between.stretches == 4
    assert regularity.between.calls == 4 * 60
    assert regularity.between.mean_seconds > 60 * PACE_US / 2 / 1e6
    assert regularity.iterations == ITERATIONS - 1
    assert len(job.iterations) == ITERATIONS - 1 - 4
    assert regularity.calls_per_iteration == 10  # of a Send and a Recv, and of an all-to-all, two and more
    # Live, the same: those that were interrupted are counted, and their length is not.
    assert 0 <= regularity.iterations - job.steps <= 4
    assert 0 <= len(job.iterations) - job.told <= 4
    assert difference(job) < 0.01
    lengths = np.array([one.period_seconds for one in job.iterations])
    bounds = sorted(job.counts)
    at = float(next(bound for bound in bounds if job.counts[bound] >= job.told / 2))
    assert bounds[bounds.index(at) - 1] < np.median(lengths) <= at
    # What evaluations took is no step's time.
    assert job.spent["steps"] < 1.1 * lengths.mean() * ITERATIONS


def difference(job: Seen) -> float:
    """How far the mean step is live from that of as many of the recording's steps, as a part of it."""
    lengths = np.array([one.period_seconds for one in job.iterations])
    means = [lengths[first : first + job.told].mean() for first in range(len(lengths) - job.told + 1)]
    return float(min(abs(job.seconds / job.told / mean - 1) for mean in means))


def steps(agent: AgentProcess) -> float:
    return value(agent, "railscope_job_step_seconds_count")


def value(agent: AgentProcess, name: str) -> float:
    return sum(sample for _, sample in agent.samples(name))
