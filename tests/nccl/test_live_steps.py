"""Steps as the agent tells them live, beside what `railscope report` makes of a recording of the same job."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.timing.iterations import find_iterations
from railscope.agent.dataset.reader import open_dataset
from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.fabric.test_datasets import recorder
from tests.nccl.job import Job

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl]

ITERATIONS = 220
PACE_US = 70_000
"""So that they take more than ten seconds on any machine."""


def test_live_steps_and_their_parts_agree_with_the_report_of_the_same_job(
    two_hosts: Fabric, double: Double, tmp_path: Path
) -> None:
    folder = tmp_path / "dataset"
    (tmp_path / "job").mkdir()
    job = Job(
        two_hosts,
        tmp_path / "job",
        double,
        pattern="mixed",
        iterations=ITERATIONS,
        size_bytes=1 << 16,
        pace_us=PACE_US,
        hold=True,
    )
    with job:
        pids = job.ready()
        words = [word for pid in pids for word in ("--pid", str(pid))]
        with AgentProcess(*words, "--level", "completion") as agent:
            with recorder(folder, pids, "--level", "completion") as record:
                job.start()
                job.finished(180)
                agent.until(lambda: steps(agent) >= ITERATIONS - 4)
                record.send_signal(signal.SIGINT)
                _, err = record.communicate(timeout=120)
                assert record.returncode == 0, err
            told, seconds = steps(agent), value(agent, "railscope_job_step_seconds_sum")
            parts = {one["part"]: part for one, part in agent.samples("railscope_job_step_part_seconds_total")}
            spent = {one["state"]: part for one, part in agent.samples("railscope_job_time_seconds")}
        job.release()
        job.wait()
    with open_dataset([folder]) as dataset:
        found, iterations, unknown = find_iterations(dataset, find_gpus(dataset))
    assert found is not None, unknown
    # Live, the last ones are told when those behind them are whole, and the first one may lack its beginning.
    missing = len(iterations) - int(told)
    assert 0 <= missing <= 4
    lengths = np.array([one.period_seconds for one in iterations])
    means = [lengths[first : first + int(told)].mean() for first in range(missing + 1)]
    assert min(abs(seconds / told / mean - 1) for mean in means) < 0.01
    # Steps whose operations ended within the job; the last of them may yet wait for the next one.
    assert 0.5 * seconds < sum(parts.values()) <= seconds
    assert parts["communication"] > 0
    # On a busy machine ranks wait for processors, which is a stall, and steps take longer because of it.
    assert spent["steps"] + spent["stalled"] > 0.8 * seconds, spent


def steps(agent: AgentProcess) -> float:
    return value(agent, "railscope_job_step_seconds_count")


def value(agent: AgentProcess, name: str) -> float:
    return sum(sample for _, sample in agent.samples(name))
