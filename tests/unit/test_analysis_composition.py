"""Composition: what the communication of a job is made of, with the numbers of a worked example and of other jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from railscope.agent.analysis.facts.report import Composition, Role, Unknown
from railscope.agent.analysis.parallelism.composition import find_composition
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.model.mapping import default_mapping
from tests.unit.datasets import JobDataset, gpt_job
from tests.unit.gpt_datasets import MIB, ddp_job, inference_job, moe_job
from tests.unit.model_shapes import GPT_3B


def composition_of(job: JobDataset) -> tuple[Composition, tuple[Unknown, ...]]:
    with job.open() as dataset:
        found, _, unknown = find_composition(dataset, find_gpus(dataset), count_calls(dataset))
    return found, unknown


def role(found: Composition, name: str) -> Role:
    return next(one for one in found.roles if one.role == name)


@pytest.fixture(scope="module")
def table_3(tmp_path_factory: pytest.TempPathFactory) -> Composition:
    job = gpt_job(tmp_path_factory.mktemp("gpt"), GPT_3B, default_mapping(GPT_3B), 8)
    found, unknown = composition_of(job)
    assert unknown == ()
    return found


def of_rank_0(found: Composition) -> dict[tuple[str, str], tuple[int, int]]:
    return {(use.role, use.op): (use.calls, use.payload_bytes) for use in found.ranks if use.gpu == 0}


def test_rank_0_has_the_680_messages_of_tensor_parallelism(table_3: Composition) -> None:
    assert of_rank_0(table_3)["tp", "AllReduce"] == (680, 89_128_960_000)


def test_rank_0_sends_and_receives_8_messages_of_the_pipeline(table_3: Composition) -> None:
    found = of_rank_0(table_3)
    assert found["pp", "Send"] == found["pp", "Recv"] == (8, 1000 * MIB)


def test_rank_0_reduces_its_gradients_once(table_3: Composition) -> None:
    assert of_rank_0(table_3)["dp", "AllReduce"] == (1, 777_492_000)


def test_rank_0_synchronises_its_embedding_once(table_3: Composition) -> None:
    assert of_rank_0(table_3)["embedding", "AllReduce"] == (1, 100_864_000)


def test_rank_0_calls_nothing_else(table_3: Composition) -> None:
    assert len(of_rank_0(table_3)) == 5


def test_what_is_received_is_not_counted_a_second_time(table_3: Composition) -> None:
    pipeline = role(table_3, "pp")
    assert pipeline.communicators == 8
    assert pipeline.calls == 2 * 8 * 48
    assert pipeline.payload_bytes == 8 * 48 * 125 * MIB


def test_the_average_is_of_ranks_that_take_part(table_3: Composition) -> None:
    embedding = role(table_3, "embedding")
    assert (embedding.calls, embedding.rank_calls, embedding.rank_payload_bytes) == (16, 1, 100_864_000)


def test_two_iterations_are_twice_one(tmp_path: Path) -> None:
    once, _ = composition_of(ddp_job(tmp_path / "1", iterations=1))
    twice, _ = composition_of(ddp_job(tmp_path / "2", iterations=2))
    assert [2 * one.calls for one in once.roles] == [one.calls for one in twice.roles]


def test_data_parallelism_alone(tmp_path: Path) -> None:
    found, unknown = composition_of(ddp_job(tmp_path, iterations=3))
    assert [(one.role, one.rank_calls, one.rank_payload_bytes) for one in found.roles] == [("dp", 15, 3 * 83 * MIB)]
    assert unknown == ()


def test_inference_is_tensor_parallelism_alone(tmp_path: Path) -> None:
    found, unknown = composition_of(inference_job(tmp_path, layers=61, tokens=4))
    assert [(one.role, one.rank_calls) for one in found.roles] == [("tp", 4 * (2 * 61 + 1))]
    (doubt,) = unknown
    assert "it could also be p=1, t=1, d=16" in doubt.reason, "gradients of a small model would look the same"


def test_experts_have_a_row_of_their_own(tmp_path: Path) -> None:
    found, unknown = composition_of(moe_job(tmp_path, layers=3, iterations=2, grouped=False))
    assert [one.role for one in found.roles] == ["dp", "ep"]
    assert role(found, "ep").rank_calls == 2 * 12
    assert role(found, "dp").rank_calls == 2 * 2
    assert found.parallelism is not None
    assert found.parallelism.expert == 4
    assert unknown == ()


def test_a_guess_is_said_to_be_one(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (4,))
    job.communicator("only", range(4))
    job.collective("only", "AllReduce", 8 * MIB, times=5)
    _, unknown = composition_of(job)
    assert [(one.row, "guess" in one.reason) for one in unknown] == [(7, True)]


def test_nothing_recorded_is_said_to_be_so(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (2,))
    job.communicator("aa", (0, 1))
    found, unknown = composition_of(job)
    assert (found.roles, found.parallelism) == ((), None)
    assert [one.row for one in unknown] == [7]
