"""Recorded datasets (simulated) of whole jobs: what frameworks call, beside the plain `gpt_job` of `datasets`.

Sizes are the frameworks' own, scaled down where a test says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from railscope.agent.model.mapping import Mapping
from railscope.agent.model.shape import Mode, Shape
from railscope.agent.model.volumes import stage_volumes
from tests.unit.datasets import SECOND_NS, JobDataset

MIB = 1 << 20


def ddp_job(folder: Path, servers: Sequence[int] = (4, 4), iterations: int = 3) -> JobDataset:
    """PyTorch's data parallelism: buckets of Float32, the first one of 1 MiB, the last what is left."""
    job = JobDataset(folder, servers)
    job.communicator("world", range(sum(servers)))
    for _ in range(iterations):
        for size in (MIB, 25 * MIB, 25 * MIB, 25 * MIB, 7 * MIB):
            job.collective("world", "AllReduce", size, data_type="Float32")
        job._now_ns += SECOND_NS
    return job


def fsdp_job(folder: Path, servers: Sequence[int] = (4, 4), iterations: int = 2, layers: int = 8) -> JobDataset:
    """Fully sharded data parallelism: parameters are gathered layer by layer, twice, and gradients scattered."""
    job = JobDataset(folder, servers)
    members = sum(servers)
    job.communicator("world", range(members))
    shards = [50 * MIB // members, *([12 * MIB // members] * layers)] * 2
    for _ in range(iterations):
        for shard in shards:
            job.collective("world", "AllGather", shard, data_type="Bfloat16")
        for shard in shards[: len(shards) // 2]:
            job.collective("world", "ReduceScatter", 2 * shard, data_type="Float32")
        job._now_ns += SECOND_NS
    return job


def inference_job(folder: Path, servers: Sequence[int] = (8, 8), layers: int = 61, tokens: int = 4) -> JobDataset:
    """Tensor-parallel decoding, two AllReduces a layer and an AllGather of logits a token; replicas if told so."""
    job = JobDataset(folder, servers)
    job.communicator("tp", range(sum(servers)))
    for _ in range(tokens):
        for size in (14 << 10, 28 << 10):
            job.collective("tp", "AllReduce", size, data_type="Bfloat16", times=layers)
        job.collective("tp", "AllGather", 16 << 10, data_type="Bfloat16")
    return job


def moe_job(
    folder: Path, servers: Sequence[int] = (4, 4), expert: int = 4, layers: int = 3, iterations: int = 2,
    *, grouped: bool = True,
) -> JobDataset:  # fmt: skip
    """Data parallelism with experts: tokens go to them and back, in Sends of their own sizes or in AllToAlls.

    Dense gradients are reduced among all, those of experts among the GPUs that hold the same ones.
    """
    job = JobDataset(folder, servers)
    count = sum(servers)
    job.communicator("dp", range(count))
    for group in range(count // expert):
        job.communicator(f"ep{group}", range(group * expert, (group + 1) * expert))
    for place in range(expert):
        job.communicator(f"edp{place}", range(place, count, expert))
    for iteration in range(iterations):
        for layer in range(4 * layers):
            for group in range(count // expert):
                if not grouped:
                    job.collective(f"ep{group}", "AllToAll", 64 << 10)
                    continue
                for source in range(expert):
                    for destination in range(expert):
                        size = 2048 * (1 + (iteration + 3 * layer + 5 * source + 7 * destination) % 11)
                        job.call(f"ep{group}", source, "Send", size, peer=destination)
                        job.call(f"ep{group}", destination, "Recv", size, peer=source)
        job.collective("dp", "AllReduce", 40 * MIB, data_type="Float32")
        for place in range(expert):
            job.collective(f"edp{place}", "AllReduce", 20 * MIB, data_type="Float32")
        job._now_ns += SECOND_NS
    return job


def pipeline_job(
    folder: Path, shape: Shape, mapping: Mapping, gpus_per_server: int, *, communicators: str
) -> JobDataset:
    """One iteration of a pipeline's Sends and Receives, one forward one backward, and of its tensor groups.

    `communicators` says where the Sends run: in `pairs` of neighbours, or in the `world`.
    """
    job = JobDataset(folder, (gpus_per_server,) * (shape.ranks // gpus_per_server))
    ranks = mapping.ranks
    job.communicator("world", range(shape.ranks))
    for stage in range(shape.pipeline):
        for data in range(shape.data):
            if shape.tensor > 1:
                job.communicator(f"tp{stage}.{data}", ranks[stage, data].tolist())
    size = shape.activation_bytes

    def hand_on(data: int, tensor: int, source: int, destination: int) -> None:
        ends = int(ranks[source, data, tensor]), int(ranks[destination, data, tensor])
        comm, places = "world", ends
        if communicators == "pairs":
            comm = f"p2p{min(ends)}-{max(ends)}"
            places = (0, 1) if ends[0] < ends[1] else (1, 0)
            if (comm, 0) not in job._instances:
                job.communicator(comm, sorted(ends))
        job.call(comm, places[0], "Send", size, peer=places[1])
        job.call(comm, places[1], "Recv", size, peer=places[0])

    for _ in range(shape.micro_batches):
        for stage in range(shape.pipeline - 1):
            for data in range(shape.data):
                for tensor in range(shape.tensor):
                    hand_on(data, tensor, stage, stage + 1)
                    hand_on(data, tensor, stage + 1, stage)
    for stage in range(shape.pipeline):
        volume = stage_volumes(shape, Mode.EXACT, stage).tp
        for data in range(shape.data if shape.tensor > 1 else 0):
            job.collective(f"tp{stage}.{data}", "AllReduce", volume.message_bytes, times=int(volume.messages))
    return job
