"""Which communicator is which kind of parallelism, and the shape of the job, without hints."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from railscope.agent.analysis.parallelism.groups import Groups, find_groups, role_of_name
from railscope.agent.analysis.tables.calls import count_calls
from railscope.agent.analysis.tables.gpus import find_gpus
from railscope.agent.model.mapping import custom_mapping, default_mapping
from railscope.agent.model.shape import Shape
from tests.unit.datasets import JobDataset, gpt_job
from tests.unit.gpt_datasets import MIB, ddp_job, fsdp_job, inference_job, moe_job, pipeline_job
from tests.unit.model_shapes import GPT_3B

SMALL = Shape(
    layers=4, hidden=64, sequence=32, vocabulary=500, global_batch=16, micro_batch=2, pipeline=2, tensor=2, data=2
)


def groups_of(job: JobDataset) -> Groups:
    dataset = job.open()
    return find_groups(count_calls(dataset), find_gpus(dataset))


def shape_of(groups: Groups) -> tuple[int, int, int, int, bool]:
    found = groups.parallelism
    assert found is not None
    return found.pipeline, found.tensor, found.data, found.expert, found.certain


def roles_of(groups: Groups) -> dict[str, str]:
    """By what the builders' communicators are called, without their numbers."""
    roles: dict[str, str] = {}
    for comm, role in groups.roles.items():
        kind = comm.rstrip("0123456789.-")
        assert roles.setdefault(kind, role) == role, comm
    return roles


@pytest.fixture(scope="module")
def worked_example(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    return groups_of(gpt_job(tmp_path_factory.mktemp("gpt"), GPT_3B, default_mapping(GPT_3B), 8))


def test_the_shape_of_the_worked_example_is_found(worked_example: Groups) -> None:
    assert shape_of(worked_example) == (4, 2, 4, 1, True)
    assert worked_example.parallelism is not None
    assert worked_example.parallelism.alternatives == ()


def test_every_communicator_of_the_worked_example_has_its_role(worked_example: Groups) -> None:
    roles = roles_of(worked_example)
    assert {kind: roles[kind] for kind in ("tp", "pp", "dp", "emb")} == {
        "tp": "tp",
        "pp": "pp",
        "dp": "dp",
        "emb": "embedding",
    }
    assert Counter(worked_example.roles.values()) == {"tp": 16, "pp": 8, "dp": 8, "embedding": 8, "unknown": 1}


def test_pipelines_begin_with_the_first_stage(worked_example: Groups) -> None:
    assert worked_example.pipelines.chains == tuple((r, r + 8, r + 16, r + 24) for r in range(8))


def test_the_custom_mapping_s_chains_stay_in_the_servers(tmp_path: Path) -> None:
    groups = groups_of(gpt_job(tmp_path, SMALL, custom_mapping(SMALL), 4))
    assert shape_of(groups) == (2, 2, 2, 1, True)
    assert groups.pipelines.chains == ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize("communicators", ["pairs", "world"])
def test_a_pipeline_is_found_in_whatever_communicators_it_sends(tmp_path: Path, communicators: str) -> None:
    shape = Shape(
        layers=8, hidden=64, sequence=32, vocabulary=500, global_batch=8, micro_batch=2, pipeline=4, tensor=2, data=1
    )
    groups = groups_of(pipeline_job(tmp_path, shape, default_mapping(shape), 4, communicators=communicators))
    assert shape_of(groups) == (4, 2, 1, 1, True)
    assert groups.pipelines.chains == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert {role for comm, role in groups.roles.items() if comm[:3] in ("p2p", "wor")} <= {"pp", "unknown"}


def test_an_interleaved_pipeline_s_ring_begins_with_its_lowest_rank(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (2, 2), world_ranks=True)
    job.communicator("pp", (3, 1, 0, 2))
    for rank in range(4):
        for source, destination in ((rank, (rank + 1) % 4), ((rank + 1) % 4, rank)):
            job.call("pp", source, "Send", 4096, peer=destination, times=8)
            job.call("pp", destination, "Recv", 4096, peer=source, times=8)
    groups = groups_of(job)
    assert groups.pipelines.chains == ((3, 1, 0, 2),)
    assert shape_of(groups) == (4, 1, 1, 1, True)


def test_a_one_way_ring_is_no_pipeline(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (4,))
    job.communicator("cp", range(4))
    for rank in range(4):
        job.call("cp", rank, "Send", 4096, peer=(rank + 1) % 4, times=8)
        job.call("cp", (rank + 1) % 4, "Recv", 4096, peer=rank, times=8)
    groups = groups_of(job)
    assert groups.pipelines.chains == ()
    assert groups.roles == {"cp": "unknown"}


def test_buckets_of_float32_are_data_parallelism(tmp_path: Path) -> None:
    groups = groups_of(ddp_job(tmp_path))
    assert groups.roles == {"world": "dp"}
    assert shape_of(groups) == (1, 1, 8, 1, True)


def test_sharded_parameters_are_data_parallelism(tmp_path: Path) -> None:
    groups = groups_of(fsdp_job(tmp_path))
    assert groups.roles == {"world": "dp"}
    assert shape_of(groups)[:3] == (1, 1, 8)


def test_small_messages_layer_after_layer_are_rather_tensor_parallelism(tmp_path: Path) -> None:
    groups = groups_of(inference_job(tmp_path))
    assert groups.roles == {"tp": "tp"}
    assert shape_of(groups) == (1, 16, 1, 1, False)
    assert groups.parallelism is not None
    assert groups.parallelism.alternatives == ((1, 1, 16),)


def check_doubted(groups: Groups, truth: tuple[int, int, int]) -> None:
    """The truth is the shape or one of its alternatives, and nothing is claimed."""
    found = groups.parallelism
    assert found is not None
    assert not found.certain
    assert truth in {(found.pipeline, found.tensor, found.data), *found.alternatives}
    assert "p={}, t={}, d={}".format(*found.alternatives[0]) in found.reason


def test_a_small_model_s_gradients_are_not_claimed_to_be_activations(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (4, 4))
    job.communicator("world", range(8))
    job.collective("world", "AllReduce", 800_000, data_type="Bfloat16", times=150)
    check_doubted(groups_of(job), (1, 1, 8))


def test_equal_small_shards_are_not_claimed_to_be_activations(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (4, 4))
    job.communicator("world", range(8))
    job.collective("world", "AllGather", 40_000, data_type="Bfloat16", times=240)
    job.collective("world", "ReduceScatter", 40_000, data_type="Bfloat16", times=120)
    check_doubted(groups_of(job), (1, 1, 8))


def test_long_sequences_of_many_lengths_are_not_claimed_to_be_shards(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (8,))
    job.communicator("world", range(8))
    for length in range(1, 31):
        for op in ("AllGather", "ReduceScatter"):
            job.collective("world", op, length * MIB // 4, data_type="Bfloat16", times=16)
    check_doubted(groups_of(job), (1, 8, 1))


def test_one_server_of_four_leaves_a_doubt_and_counts_the_gpus_of_all(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (8,) * 4, silent_servers=frozenset({1, 2, 3}))
    for server in range(4):
        job.communicator(f"tp{server}", range(8 * server, 8 * server + 8))
    for place in range(8):
        job.communicator(f"dp{place}", range(place, 32, 8))
    for server in range(4):
        job.collective(f"tp{server}", "AllReduce", 4 * MIB, times=60)
    for place in range(8):
        job.collective(f"dp{place}", "AllReduce", 13 * MIB, data_type="Float32", times=3)
    groups = groups_of(job)
    assert shape_of(groups) == (1, 8, 4, 1, False)
    assert roles_of(groups) == {"tp": "tp", "dp": "dp"}
    assert groups.parallelism is not None
    assert "not all ranks of 8 communicators were recorded" in groups.parallelism.reason


def test_experts_in_pairs_are_no_stages(tmp_path: Path) -> None:
    groups = groups_of(uneven_pairs(tmp_path, every_size_twice=False))
    assert roles_of(groups) == {"dp": "dp", "ep": "ep"}
    assert shape_of(groups) == (1, 1, 8, 2, True)


def uneven_pairs(folder: Path, *, every_size_twice: bool) -> JobDataset:
    """Pairs of neighbours that send to each other in many sizes, and gradients of all."""
    job = JobDataset(folder, (4, 4))
    for pair in range(4):
        job.communicator(f"ep{pair}", (2 * pair, 2 * pair + 1))
        for place in range(20):
            for source in (0, 1):
                size = 4096 * (1 + place + (0 if every_size_twice else 50 * source))
                job.call(f"ep{pair}", source, "Send", size, peer=1 - source)
                job.call(f"ep{pair}", 1 - source, "Recv", size, peer=source)
    job.communicator("dp", range(8))
    job.collective("dp", "AllReduce", 13 * MIB, data_type="Float32", times=5)
    return job


def test_rings_of_two_that_reduce_gradients_together_are_no_stages(tmp_path: Path) -> None:
    groups = groups_of(uneven_pairs(tmp_path, every_size_twice=True))
    assert groups.pipelines.chains == ()
    assert groups.pipelines.denied == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert shape_of(groups) == (1, 1, 8, 1, False)
    check_doubted(groups, (2, 1, 4))


def test_two_gpus_that_send_to_each_other_are_not_claimed_to_be_stages(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (2,))
    job.communicator("all", (0, 1))
    for source in (0, 1):
        job.call("all", source, "Send", 2 * MIB, peer=1 - source, times=40)
        job.call("all", 1 - source, "Recv", 2 * MIB, peer=source, times=40)
    job.collective("all", "AllReduce", 13 * MIB, data_type="Float32", times=5)
    groups = groups_of(job)
    check_doubted(groups, (2, 1, 1))
    check_doubted(groups, (1, 1, 2))


@pytest.mark.parametrize("grouped", [True, False])
def test_experts_are_found_beside_two_kinds_of_replicas(tmp_path: Path, grouped: bool) -> None:
    groups = groups_of(moe_job(tmp_path, grouped=grouped))
    assert roles_of(groups) == {"dp": "dp", "ep": "ep", "edp": "dp"}
    assert shape_of(groups) == (1, 1, 8, 4, True)


def test_one_size_in_one_group_can_be_either_and_is_said_to_be(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (4,))
    job.communicator("only", range(4))
    job.collective("only", "AllReduce", 8 * MIB, times=5)
    found = groups_of(job).parallelism
    assert found is not None
    assert not found.certain
    assert {(found.pipeline, found.tensor, found.data), *found.alternatives} == {(1, 1, 4), (1, 4, 1)}
    assert "p=1, t=4, d=1" in found.reason


def test_a_group_s_name_settles_what_its_calls_leave_open(tmp_path: Path) -> None:
    for name, shape in (("TENSOR_MODEL_PARALLEL_GROUP", (1, 4, 1)), ("DATA_PARALLEL_GROUP_WITH_CP", (1, 1, 4))):
        job = JobDataset(tmp_path / name, (4,))
        job.communicator("only", range(4), group_name=name)
        job.collective("only", "AllReduce", 8 * MIB, times=5)
        assert shape_of(groups_of(job)) == (*shape, 1, True)


def test_barriers_of_all_are_the_world_s(tmp_path: Path) -> None:
    job = gpt_job(tmp_path, SMALL, default_mapping(SMALL), 4)
    job.collective("world", "AllReduce", 4, times=50)
    groups = groups_of(job)
    assert groups.roles["world"] == "world"
    assert shape_of(groups) == (2, 2, 2, 1, True)


def test_a_restarted_job_is_no_job_of_twice_as_many_gpus_for_sure(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, servers=(2, 2))
    job.communicator("aa", (0, 1), group_name="TENSOR_MODEL_PARALLEL_GROUP")
    job.communicator("bb", (2, 3), group_name="TENSOR_MODEL_PARALLEL_GROUP", node_rank=0)
    for comm in ("aa", "bb"):
        job.collective(comm, "AllReduce", 1 << 17, times=8)
    side_by_side = groups_of(job).parallelism
    assert side_by_side is not None
    assert side_by_side.certain
    assert side_by_side.reason.endswith("2 groups of GPUs share no communicator: they may be several jobs")

    again = JobDataset(tmp_path / "again", servers=(2,))
    again.communicator("aa", (0, 1), group_name="TENSOR_MODEL_PARALLEL_GROUP")
    again.communicator("restarted", (0, 1), comm="bb", group_name="TENSOR_MODEL_PARALLEL_GROUP")
    for rows in again._rows.values():
        for row in rows:
            if row.get("comm") == "bb":
                row["pid"] += 1000
    for comm in ("aa", "restarted"):
        again.collective(comm, "AllReduce", 1 << 17, times=8)
    restarted = groups_of(again).parallelism
    assert restarted is not None
    assert not restarted.certain
    assert "the same GPUs: jobs one after the other, or one restarted" in restarted.reason


def test_a_job_without_calls_has_no_shape(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (2,))
    job.communicator("aa", (0, 1))
    groups = groups_of(job)
    assert groups.parallelism is None
    assert groups.roles == {"aa": "unknown"}


def test_servers_that_were_not_recorded_leave_a_doubt(tmp_path: Path) -> None:
    job = gpt_job(tmp_path, SMALL, default_mapping(SMALL), 4, silent_servers=frozenset({1}))
    found = groups_of(job).parallelism
    assert found is not None
    assert (found.pipeline, found.tensor, found.data) == (2, 2, 2)
    assert not found.certain


def test_hybrid_shards_are_no_tensor_parallelism(tmp_path: Path) -> None:
    job = JobDataset(tmp_path, (4, 4))
    for server in (0, 1):
        job.communicator(f"shard{server}", range(4 * server, 4 * server + 4))
    for place in range(4):
        job.communicator(f"replica{place}", (place, place + 4))
    for server in (0, 1):
        job.collective(f"shard{server}", "AllGather", 3 * MIB, times=40)
        job.collective(f"shard{server}", "ReduceScatter", 3 * MIB, times=20)
    for place in range(4):
        job.collective(f"replica{place}", "AllReduce", 3 * MIB, times=20)
    found = groups_of(job).parallelism
    assert found is not None
    assert (found.pipeline, found.tensor, found.data) != (1, 4, 2) or not found.certain


def test_the_order_of_rows_changes_nothing(tmp_path: Path) -> None:
    found = []
    for seed in (1, 2):
        job = gpt_job(tmp_path / str(seed), SMALL, default_mapping(SMALL), 4, shuffle=seed)
        groups = groups_of(job)
        found.append((groups.roles, groups.parallelism, groups.pipelines.chains))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("mesh_tp", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("DATA_PARALLEL_GROUP", "dp"),
        ("EXPERT_DATA_PARALLEL_GROUP", "dp"),
        ("dp_shard", "dp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EMBEDDING_GROUP", "embedding"),
        ("POSITION_EMBEDDING_GROUP", "embedding"),
        ("MODEL_PARALLEL_GROUP", ""),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", ""),
        ("default_pg", ""),
        ("stop", ""),
        ("", ""),
    ],
)
def test_frameworks_names_of_groups(name: str, role: str) -> None:
    assert role_of_name(name) == role


@st.composite
def small_shapes(draw: st.DrawFn) -> Shape:
    """Jobs of up to 16 GPUs whose messages are larger than control messages."""
    pipeline, tensor, data = (draw(st.sampled_from((1, 2, 3, 4))) for _ in range(3))
    if pipeline * tensor * data > 16 or pipeline * tensor * data == 1:
        pipeline, tensor, data = 2, 2, 2
    return Shape(
        layers=pipeline * draw(st.integers(1, 2)) + draw(st.integers(0, 1)),
        hidden=12 * draw(st.integers(2, 6)),
        sequence=32,
        vocabulary=draw(st.integers(1, 900)),
        global_batch=2 * data * draw(st.integers(1, 3)),
        micro_batch=2,
        pipeline=pipeline,
        tensor=tensor,
        data=data,
        recompute=draw(st.booleans()),
    )


@settings(max_examples=20, deadline=None)
@given(shape=small_shapes(), iterations=st.integers(1, 2), seed=st.integers(0, 1000))
def test_any_shape_on_any_mapping_is_found_or_among_the_alternatives(shape: Shape, iterations: int, seed: int) -> None:
    mapping = default_mapping(shape).renumber(np.random.default_rng(seed).permutation(shape.ranks))
    with tempfile.TemporaryDirectory() as folder:
        found = groups_of(gpt_job(Path(folder), shape, mapping, shape.ranks, iterations)).parallelism
    truth = (shape.pipeline, shape.tensor, shape.data)
    assert found is not None
    if found.certain:
        assert (found.pipeline, found.tensor, found.data) == truth
    else:
        assert truth in {(found.pipeline, found.tensor, found.data), *found.alternatives}
    if shape.tensor > 1 and shape.data > 1:
        assert found.certain
