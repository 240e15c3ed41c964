"""What a scaled-down GPT on the real NCCL (on the CUDA test double) sends: equal to the estimate to the byte."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from railscope.agent.analysis.parallelism.groups import find_groups
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.traffic.traffic import find_traffic
from railscope.agent.dataset.from_recording import convert_file
from railscope.agent.dataset.reader import open_dataset
from railscope.agent.model.mapping import default_mapping
from railscope.agent.model.shape import Shape
from railscope.agent.model.traffic import estimate_traffic
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import GptShape
from railscope.testbed.nccl.build import Double
from tests.fabric.agent_process import AgentProcess
from tests.nccl.job import Job

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl, pytest.mark.slow]

ITERATIONS = 2


@pytest.mark.parametrize(("pipeline", "tensor", "data"), [(2, 2, 1), (2, 1, 2)])
def test_a_gpt_s_shape_and_every_pair_s_bytes_are_found(
    two_hosts: Fabric, double: Double, tmp_path: Path, pipeline: int, tensor: int, data: int
) -> None:
    shape = Shape(
        layers=2,
        hidden=32,
        sequence=32,
        vocabulary=200,
        global_batch=2 * 2 * data,
        micro_batch=2,
        pipeline=pipeline,
        tensor=tensor,
        data=data,
    )
    sizes = GptShape(pipeline, tensor, data, 2, 32, 32, 200, 2, shape.micro_batches)
    folder = tmp_path / "recordings"
    with Job(
        two_hosts,
        tmp_path,
        double,
        pattern="gpt",
        iterations=ITERATIONS,
        ranks_per_host=shape.ranks // 2,
        shape=sizes,
        hold=True,
    ) as job:
        pids = job.ready()
        with AgentProcess("--pid", *map(str, pids), "--recordings.directory", str(folder)) as agent:
            agent.until(lambda: agent.samples("railscope_processes_observed")[0][1] == len(pids))
            job.start()
            assert all(report.verified for report in job.finished(120))
            os.kill(agent.process.pid, signal.SIGUSR2)
            agent.until(lambda: any(folder.glob("railscope-*.npz")))
            job.release()
            job.wait()
    convert_file(next(folder.glob("railscope-*.npz")), tmp_path / "dataset")
    with open_dataset([tmp_path / "dataset"]) as dataset:
        gpus, counted = find_gpus(dataset), count_calls(dataset)
        found = find_groups(counted, gpus).parallelism
        observed, _ = find_traffic(dataset, gpus, counted)
    assert found is not None
    assert (found.pipeline, found.tensor, found.data, found.certain) == (pipeline, tensor, data, True), found.reason
    matrix = np.zeros((shape.ranks, shape.ranks), dtype=np.int64)
    for pair in observed.pairs:
        matrix[pair.source, pair.destination] = pair.wire_bytes
    np.testing.assert_array_equal(matrix, ITERATIONS * estimate_traffic(shape, default_mapping(shape)).matrix())
