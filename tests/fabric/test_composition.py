"""What jobs really send, as it was recorded: the shape that is found, and the bytes that are predicted.

A scaled-down GPT against `railscope estimate`; data parallelism, experts and inference against what they say they do.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from railscope.agent.analysis.facts.report import Composition, Traffic
from railscope.agent.analysis.parallelism.composition import composition_of
from railscope.agent.analysis.parallelism.groups import Groups, find_groups
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.analysis.traffic.traffic import find_traffic
from railscope.agent.dataset.from_recording import convert_file
from railscope.agent.dataset.reader import open_dataset
from railscope.agent.model.mapping import Mapping, custom_mapping, default_mapping
from railscope.agent.model.shape import Mode, Shape
from railscope.agent.model.traffic import estimate_traffic
from railscope.agent.model.volumes import stage_volumes
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import GptShape, Job, JobOptions, RankReport
from tests.fabric.agent_process import AgentProcess
from tests.fabric.experts import expert_bytes

pytestmark = [pytest.mark.root, pytest.mark.fabric]

ITERATIONS = 3
SHAPES = {
    "pipeline 2, tensor 2, data 2": (2, 2, 2, 5, False),
    "pipeline 4, data 2, replicas apart": (4, 1, 2, 6, True),
    "pipeline 2, tensor 4": (2, 4, 1, 3, False),
}
"""Pipeline, tensor, data, layers, and whether replicas lie furthest apart; on two hosts of four ranks."""


@dataclass(frozen=True, slots=True)
class Run:
    """A job and what the analyses find in its recording."""

    reports: tuple[RankReport, ...]
    groups: Groups
    composition: Composition
    traffic: Traffic

    def matrix(self) -> NDArray[np.int64]:
        observed = np.zeros((self.traffic.gpus, self.traffic.gpus), dtype=np.int64)
        for pair in self.traffic.pairs:
            observed[pair.source, pair.destination] = pair.wire_bytes
        return observed


@dataclass(frozen=True, slots=True)
class GptRun:
    """A GPT, its shape and its mapping."""

    run: Run
    shape: Shape
    mapping: Mapping


def observed(fabric: Fabric, options: JobOptions, folder: Path) -> Run:
    """Run a job beside an agent, record every call, and analyse it."""
    with Job(fabric.hosts, options) as job:
        only = [word for pid in job.pids for word in ("--pid", str(pid))]
        with AgentProcess(*only, "--recordings.directory", str(folder)) as agent:
            agent.until(lambda: agent.samples("railscope_processes_observed")[0][1] == len(job.pids))
            job.release()
            reports = job.wait(60)
            os.kill(agent.process.pid, signal.SIGUSR2)
            agent.until(lambda: any(folder.glob("railscope-*.npz")))
    assert all(report.verified for report in reports)
    convert_file(next(folder.glob("railscope-*.npz")), folder / "dataset")
    with open_dataset([folder / "dataset"]) as dataset:
        gpus, counted = find_gpus(dataset), count_calls(dataset)
        groups = find_groups(counted, gpus)
        found, _ = find_traffic(dataset, gpus, counted)
        return Run(reports, groups, composition_of(counted, gpus, groups), found)


@pytest.fixture(scope="module", params=list(SHAPES.values()), ids=list(SHAPES))
def gpt(request: pytest.FixtureRequest, two_hosts: Fabric, tmp_path_factory: pytest.TempPathFactory) -> GptRun:
    pipeline, tensor, data, layers, apart = request.param
    shape = Shape(
        layers=layers,
        hidden=64,
        sequence=32,
        vocabulary=500,
        global_batch=4 * 2 * data,
        micro_batch=2,
        pipeline=pipeline,
        tensor=tensor,
        data=data,
    )
    sizes = GptShape(pipeline, tensor, data, layers, 64, 32, 500, 2, shape.micro_batches, replicas_apart=apart)
    options = JobOptions("gpt", iterations=ITERATIONS, ranks_per_host=4, hold=True, shape=sizes)
    mapping = (custom_mapping if apart else default_mapping)(shape)
    return GptRun(observed(two_hosts, options, tmp_path_factory.mktemp("gpt")), shape, mapping)


def test_the_shape_is_found_without_hints(gpt: GptRun) -> None:
    found = gpt.run.groups.parallelism
    assert found is not None
    assert (found.pipeline, found.tensor, found.data) == (gpt.shape.pipeline, gpt.shape.tensor, gpt.shape.data)
    assert found.certain, found.reason


def test_every_rank_s_composition_is_the_estimate_s_to_the_byte(gpt: GptRun) -> None:
    for rank in range(gpt.shape.ranks):
        volumes = stage_volumes(gpt.shape, Mode.EXACT, gpt.mapping.position_of(rank)[0])
        wanted = {
            ("tp", "AllReduce"): volumes.tp,
            ("pp", "Send"): volumes.pp_send,
            ("pp", "Recv"): volumes.pp_recv,
            ("dp", "AllReduce"): volumes.dp,
            ("embedding", "AllReduce"): volumes.embedding_sync,
        }
        found = {
            (use.role, use.op): (use.calls, use.payload_bytes) for use in gpt.run.composition.ranks if use.gpu == rank
        }
        assert found == {
            key: (int(ITERATIONS * volume.messages), ITERATIONS * volume.bytes)
            for key, volume in wanted.items()
            if volume.messages
        }


def test_every_pair_of_ranks_has_the_estimate_s_bytes(gpt: GptRun) -> None:
    predicted = ITERATIONS * estimate_traffic(gpt.shape, gpt.mapping).matrix()
    np.testing.assert_array_equal(gpt.run.matrix(), predicted)


def test_gradients_of_replicas_are_data_parallelism(two_hosts: Fabric, tmp_path: Path) -> None:
    run = observed(two_hosts, JobOptions("ddp", iterations=2, ranks_per_host=2, hold=True), tmp_path)
    found = run.groups.parallelism
    assert found is not None
    assert (found.pipeline, found.tensor, found.data, found.certain) == (1, 1, 4, True)
    assert [one.role for one in run.composition.roles] == ["dp"]
    # Two iterations of buckets of 1, 25 and 25 MiB: three halves of each go to the next rank.
    edge = 2 * 51 * (1 << 20) * 3 // 2
    np.testing.assert_array_equal(run.matrix(), edge * np.roll(np.eye(4, dtype=np.int64), 1, axis=1))


def test_decoding_is_tensor_parallelism(two_hosts: Fabric, tmp_path: Path) -> None:
    run = observed(two_hosts, JobOptions("inference", iterations=3, ranks_per_host=2, hold=True), tmp_path)
    found = run.groups.parallelism
    assert found is not None
    # A small model's gradients would look the same: by its calls alone, this is likely and not certain.
    assert (found.pipeline, found.tensor, found.data, found.certain) == (1, 4, 1, False)
    assert found.alternatives == ((1, 1, 4),)
    said = run.reports[0].totals()["AllReduce"]
    (role,) = run.composition.roles
    assert (role.role, role.rank_calls, role.rank_payload_bytes) == ("tp", said.calls, said.payload_bytes)
    edge = said.payload_bytes * 3 // 2
    np.testing.assert_array_equal(run.matrix(), edge * np.roll(np.eye(4, dtype=np.int64), 1, axis=1))


def test_tokens_to_experts_are_expert_parallelism_to_the_byte(two_hosts: Fabric, tmp_path: Path) -> None:
    run = observed(two_hosts, JobOptions("moe", iterations=3, ranks_per_host=2, hold=True, seed=5), tmp_path)
    found = run.groups.parallelism
    assert found is not None
    assert found.expert == 4
    assert [one.role for one in run.composition.roles] == ["ep"]
    np.testing.assert_array_equal(run.matrix(), expert_bytes(seed=5, iterations=3, ranks=4))
