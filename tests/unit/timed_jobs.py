"""Simulated jobs with times: what they do, and when, is known exactly.

Each returns a `JobDataset` of calls, and where it says so of operations and kernels; times count from `BEGAN_NS`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

from tests.unit.datasets import BEGAN_NS, JobDataset

MS: Final = 1_000_000
SECOND: Final = 1000 * MS
BUCKETS: Final = (1 << 20, *(25 << 20,) * 4, 7 << 20)
"""Payload of DDP's gradient buckets, first to last."""
WHOLE_MODEL: Final = sum(BUCKETS)


def ddp(
    folder: Path,
    iterations: int = 30,
    period_ns: int = 500 * MS,
    jitter: float = 0.05,
    *,
    log_every: int = 0,
    checkpoint_every: int = 0,
    operations: bool = False,
    gpus: int = 2,
    seed: int = 1,
    **columns: Any,
) -> JobDataset:
    """Data parallelism: six gradient buckets 200 ms into an iteration, 20 ms apart, but all at once in the first one.

    With `operations`, each bucket takes 15 ms from its call on, and the GPU computes but for the first 100 ms of the
    iteration and the last 5 ms of each bucket.
    """
    chance = random.Random(seed)
    job = JobDataset(folder, (gpus,), **columns)
    job.communicator("dp", range(gpus))
    begin = 0
    for iteration in range(iterations):
        length = round(period_ns * (1 + chance.uniform(-jitter, jitter)))
        for number, size in enumerate(BUCKETS if iteration else (WHOLE_MODEL,)):
            at = begin + 200 * MS + number * 20 * MS
            for rank in range(gpus):
                job.call("dp", rank, "AllReduce", size, time_ns=BEGAN_NS + at + chance.randrange(MS))
                if operations:
                    job.operation("dp", rank, "AllReduce", size, at, 15 * MS, source="cuda")
                    job.compute(rank, at - 10 * MS, 20 * MS)
        for every, op, size, delay in ((log_every, "AllReduce", 4, 400), (checkpoint_every, "AllGather", 4096, 410)):
            if every and iteration % every == every - 1:
                for rank in range(gpus):
                    job.call("dp", rank, op, size, time_ns=BEGAN_NS + begin + delay * MS)
        begin += length
    return job


def evaluated(
    folder: Path, phases: int = 5, steps: int = 40, *, batches: int = 20, before: bool = False, **columns: Any
) -> JobDataset:
    """Data parallelism of half a second a step, whose operations take 15 ms each; after each phase, or before, an
    evaluation of 5 s that gathers on a communicator of its own, as long as it goes on."""
    job = JobDataset(folder, (2,), **columns)
    job.communicator("dp", range(2))
    job.communicator("eval", range(2))
    at = 0
    for _ in range(phases):
        if before:
            at = _evaluation(job, at, batches)
        for _ in range(steps):
            for number, size in enumerate(BUCKETS):
                _operation(job, "dp", "AllReduce", size, at + 200 * MS + number * 20 * MS, 15 * MS)
            at += 500 * MS
        if not before:
            at = _evaluation(job, at, batches)
    return job


def _evaluation(job: JobDataset, at: int, batches: int) -> int:
    length = 5 * SECOND // batches
    for _ in range(batches):
        _operation(job, "eval", "AllGather", 4 << 20, at + 10 * MS, length - 20 * MS)
        at += length
    return at


def _operation(job: JobDataset, comm: str, op: str, size: int, at: int, took: int) -> None:
    for rank in range(2):
        job.call(comm, rank, op, size, time_ns=BEGAN_NS + at)
        job.operation(comm, rank, op, size, at, took, source="cuda")


def pipeline(
    folder: Path,
    stages: int = 4,
    micro_batches: int = 8,
    iterations: int = 6,
    *,
    forward_ns: int = 10 * MS,
    transfer_ns: int = MS,
    **columns: Any,
) -> JobDataset:
    """A GPT in pipeline-parallel stages (1F1B), one GPU a server, a backward pass as long as two forward ones.

    Stages wait for one another; a receive is posted when the stage is ready for the data, and takes `transfer_ns` once
    both are.  At the end of an iteration all reduce gradients on a communicator of their own.
    """
    size = 125 << 20
    job = JobDataset(folder, (1,) * stages, **columns)
    job.communicator("pp", range(stages))
    job.communicator("dp", range(stages))
    free = [0] * stages
    for _ in range(iterations):
        waiting = [_one_f_one_b(stage, stages, micro_batches) for stage in range(stages)]
        sent: dict[tuple[str, int, int], int] = {}
        done: dict[tuple[str, int], int] = {}
        while any(waiting):
            for stage in range(stages):
                while waiting[stage]:
                    kind = waiting[stage][0]
                    number = done.get((kind, stage), 0)
                    source = stage - 1 if kind == "F" else stage + 1
                    if 0 <= source < stages:
                        ready = sent.get((kind, stage, number))
                        if ready is None:
                            break
                        posted, free[stage] = free[stage], max(free[stage], ready) + transfer_ns
                        job.call("pp", stage, "Recv", size, peer=source, time_ns=BEGAN_NS + posted)
                        job.operation(
                            "pp", stage, "Recv", size, posted, free[stage] - posted, peer=source, source="cuda"
                        )
                    took = forward_ns * (1 if kind == "F" else 2)
                    job.compute(stage, free[stage], took)
                    free[stage] += took
                    target = stage + 1 if kind == "F" else stage - 1
                    if 0 <= target < stages:
                        sent[kind, target, number] = free[stage]
                        job.call("pp", stage, "Send", size, peer=target, time_ns=BEGAN_NS + free[stage])
                    done[kind, stage] = number + 1
                    waiting[stage].pop(0)
        together = max(free)
        for stage in range(stages):
            job.call("dp", stage, "AllReduce", 700 << 20, time_ns=BEGAN_NS + together)
            job.operation("dp", stage, "AllReduce", 700 << 20, together, 30 * MS, source="cuda")
            free[stage] = together + 130 * MS
    return job


def _one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[str]:
    ahead = min(stages - 1 - stage, micro_batches)
    return ["F"] * ahead + ["F", "B"] * (micro_batches - ahead) + ["B"] * ahead


def moe(
    folder: Path,
    iterations: int = 10,
    experts: int = 4,
    layers: int = 2,
    *,
    seed: int = 1,
    **columns: Any,
) -> tuple[JobDataset, list[dict[tuple[int, int], int]]]:
    """A mixture of experts: grouped Sends and Recvs of uneven sizes, then a gradient AllReduce on a communicator of its
    own; with the bytes of each pair in each iteration."""
    chance = random.Random(seed)
    job = JobDataset(folder, (experts // 2, experts // 2), **columns)
    job.communicator("ep", range(experts))
    job.communicator("dp", range(experts))
    truth = []
    for iteration in range(iterations):
        begin = iteration * 400 * MS
        volumes: dict[tuple[int, int], int] = {}
        for layer in range(layers):
            at = BEGAN_NS + begin + (20 + 30 * layer) * MS
            for source in range(experts):
                for destination in range(experts):
                    sent = chance.randrange(1, 400) * 4096
                    job.call("ep", source, "Send", sent, peer=destination, time_ns=at + destination)
                    job.call("ep", destination, "Recv", sent, peer=source, time_ns=at + source)
                    if source != destination:
                        volumes[source, destination] = volumes.get((source, destination), 0) + sent
        for rank in range(experts):
            job.call("dp", rank, "AllReduce", 100 << 20, time_ns=BEGAN_NS + begin + (120 + rank) * MS)
        truth.append(volumes)
    return job, truth


def inference(folder: Path, requests: int = 120, seed: int = 1, **columns: Any) -> JobDataset:
    """Tensor-parallel inference: requests come at random, with sizes and numbers of calls at random."""
    chance = random.Random(seed)
    job = JobDataset(folder, (2,), **columns)
    job.communicator("tp", range(2))
    at = BEGAN_NS
    for _ in range(requests):
        at += round(chance.expovariate(1 / (200 * MS)))
        for _ in range(chance.randrange(3, 30)):
            size = chance.randrange(1, 4096) * 14336
            at += MS
            for rank in range(2):
                job.call("tp", rank, "AllReduce", size, time_ns=at)
        for rank in range(2):
            job.call("tp", rank, "AllGather", chance.randrange(1, 64) * 258560, time_ns=at + MS)
    return job
