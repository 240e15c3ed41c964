"""Simulated streams of one rank's calls, whose iterations are known: what jobs call, by their kind of parallelism."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from railscope.agent.rhythm.pattern import Calls

MIB: Final = 1 << 20
OPS: Final = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "Send", "Recv")
Call = tuple[float, int, str, int]
"""Seconds, communicator, operation (`Send:3` to rank 3), payload."""


@dataclass(slots=True)
class Stream:
    """Calls, and how many iterations a job would say that it made."""

    chance: random.Random
    now: float = 0.0
    calls: list[Call] = field(default_factory=list)
    iterations: int = 0
    begins: list[float] = field(default_factory=list)
    """When each iteration made its first call."""

    def wait(self, seconds: float) -> None:
        """Compute for about so long."""
        self.now += seconds * self.chance.uniform(0.9, 1.1)

    def call(self, communicator: int, op: str, payload: int) -> None:
        """Make a call, which takes 20 µs of the host's time."""
        self.now += 20e-6
        self.calls.append((self.now, communicator, op, payload))

    def begin(self) -> int:
        """Begin an iteration; returns where its calls begin."""
        self.iterations += 1
        return len(self.calls)

    def end(self, first: int) -> None:
        """End it: its first call is known."""
        self.begins.append(self.calls[first][0])


def calls_of(made: Sequence[Call]) -> Calls:
    """Their columns."""
    ordered = sorted(made)
    time_ns = np.array([round(at * 1e9) for at, *_ in ordered], np.int64)
    named = [op.partition(":") for _, _, op, _ in ordered]
    op = np.array([OPS.index(name) for name, _, _ in named])
    peer = np.array([int(number or -1) for _, _, number in named])
    communicator, payload = (np.array(column) for column in zip(*((c, size) for _, c, _, size in ordered), strict=True))
    return Calls.of_columns(time_ns, communicator, peer, op, np.full(len(ordered), 7), payload)


def ddp(stream: Stream, iterations: int, *, accumulate: int = 1, buckets: int = 6) -> None:
    """Data parallelism: gradients in buckets once in so many backward passes, and the loss now and then."""
    for number in range(iterations):
        first = stream.begin()
        for _ in range(accumulate):
            stream.wait(0.1)
        for bucket in range(buckets):
            stream.wait(0.01)
            stream.call(0, "AllReduce", (25 if bucket else 1) * MIB)
        stream.wait(0.03)
        if number % 10 == 9:
            stream.call(0, "AllReduce", 4)
        stream.end(first)


def fsdp(stream: Stream, iterations: int, *, layers: int = 12, accumulate: int = 1) -> None:
    """Sharded data parallelism: layers are gathered forwards and backwards, gradients scattered, their norm summed.

    Of several micro-batches the last one scatters gradients.
    """
    for _ in range(iterations):
        stream.wait(0.05)
        first = stream.begin()
        for last in (*(False,) * (accumulate - 1), True):
            for _ in range(layers):
                stream.call(0, "AllGather", 40 * MIB)
                stream.wait(0.004)
            for _ in range(layers):
                stream.call(0, "AllGather", 40 * MIB)
                stream.wait(0.008)
                if last:
                    stream.call(0, "ReduceScatter", 40 * MIB)
            if not last:
                stream.wait(0.05)
        stream.call(0, "AllReduce", 4)
        stream.end(first)


def gpt(
    stream: Stream, iterations: int, *, stage: int = 1, stages: int = 4, micro_batches: int = 8, layers: int = 4
) -> None:
    """1F1B of one pipeline stage: AllReduces of tensor ranks, Sends and Recvs, gradients of replicas at the end."""
    ahead = stages - 1 - stage
    for _ in range(iterations):
        stream.wait(0.05)
        first = stream.begin()
        for step in "F" * ahead + "FB" * (micro_batches - ahead) + "B" * ahead:
            if stage if step == "F" else stage < stages - 1:
                stream.call(1, "Recv", 20 * MIB)
            for _ in range(layers * (2 if step == "F" else 4)):
                stream.wait(0.001)
                stream.call(0, "AllReduce", 20 * MIB)
            if stage < stages - 1 if step == "F" else stage:
                stream.call(1, "Send", 20 * MIB)
        stream.wait(0.01)
        stream.call(2, "AllReduce", 700 * MIB)
        stream.call(3, "AllReduce", 4)
        stream.end(first)


def gpt_evaluation(stream: Stream, batches: int, *, layers: int = 4) -> None:
    """The same stage, forwards only."""
    for _ in range(batches):
        stream.call(1, "Recv", 20 * MIB)
        for _ in range(layers * 2):
            stream.wait(0.001)
            stream.call(0, "AllReduce", 20 * MIB)
        stream.call(1, "Send", 20 * MIB)


def moe(stream: Stream, iterations: int, *, experts: int = 4, layers: int = 3) -> None:
    """Mixture of experts: uneven Sends and Recvs to all others, layer by layer, then the gradients."""
    for _ in range(iterations):
        stream.wait(0.05)
        first = stream.begin()
        for _ in range(2 * layers):
            stream.wait(0.005)
            for expert in range(experts):
                stream.call(0, f"Send:{expert}", stream.chance.randrange(1, 4000) * 1024)
                stream.call(0, f"Recv:{expert}", stream.chance.randrange(1, 4000) * 1024)
        stream.call(1, "AllReduce", 100 * MIB)
        stream.end(first)


def moe_evaluation(stream: Stream, batches: int, *, experts: int = 4, layers: int = 3) -> None:
    """The same experts, forwards only."""
    for _ in range(batches * layers):
        stream.wait(0.005)
        for expert in range(experts):
            stream.call(0, f"Send:{expert}", stream.chance.randrange(1, 4000) * 1024)
            stream.call(0, f"Recv:{expert}", stream.chance.randrange(1, 4000) * 1024)


def inference(stream: Stream, requests: int) -> None:
    """Requests that come at random: prompts of any length, then tokens for as long as the answer is."""
    for _ in range(requests):
        stream.now += stream.chance.expovariate(20)
        for size in (
            stream.chance.randrange(1, 4000) * 8192,
            *[8192 * stream.chance.randrange(1, 33)] * stream.chance.randrange(1, 40),
        ):
            for _ in range(4):
                stream.call(0, "AllReduce", size)
            stream.now += stream.chance.uniform(0.002, 0.01)


def fsdp_evaluation(stream: Stream, batches: int, *, layers: int = 12) -> None:
    """The same layers are gathered forwards."""
    for _ in range(batches):
        stream.wait(0.03)
        for _ in range(layers):
            stream.call(0, "AllGather", 40 * MIB)
            stream.wait(0.004)


def ddp_evaluation(stream: Stream, batches: int) -> None:
    """Predictions are gathered."""
    for _ in range(batches):
        stream.wait(0.2)
        stream.call(0, "AllGather", MIB)


OWN: Final = 9
"""A communicator that no step calls."""


def metric(stream: Stream) -> None:
    """An evaluation of half a second without calls, then its metric on a communicator of its own."""
    stream.wait(0.5)
    stream.call(OWN, "AllReduce", 4 * MIB)
    stream.wait(0.05)


def logged(stream: Stream) -> None:
    """A sum for the log on a communicator of its own, at once."""
    stream.call(OWN, "AllReduce", 4 * MIB)


def checkpoint(stream: Stream, *, parts: int = 8) -> None:
    """The parts of a model are gathered one after the other, and each is written, on a communicator of its own."""
    stream.wait(1.0)
    for _ in range(parts):
        stream.wait(0.5)
        stream.call(OWN, "AllGather", 40 * MIB)


def own_evaluation(stream: Stream, *, batches: int = 1000) -> None:
    """An evaluation on a communicator of its own."""
    for _ in range(batches):
        stream.wait(0.02)
        stream.call(OWN, "AllGather", 4 * MIB)
        stream.call(OWN, "AllReduce", 2 * MIB)


def one_f_one_b(
    stream: Stream, iterations: int, *, stage: int, stages: int = 4, micro_batches: int = 16, layers: int = 4
) -> None:
    """As `gpt`, with a silence before each pass, as the host waits for what is received."""
    ahead = stages - 1 - stage
    for _ in range(iterations):
        stream.wait(0.05)
        first = stream.begin()
        for step in "F" * ahead + "FB" * (micro_batches - ahead) + "B" * ahead:
            stream.wait(0.02)
            if stage if step == "F" else stage < stages - 1:
                stream.call(1, "Recv", 20 * MIB)
            for _ in range(layers * (2 if step == "F" else 4)):
                stream.wait(0.001)
                stream.call(0, "AllReduce", 20 * MIB)
            if stage < stages - 1 if step == "F" else stage:
                stream.call(1, "Send", 20 * MIB)
        stream.wait(0.01)
        stream.call(2, "AllReduce", 700 * MIB)
        stream.end(first)


def normalised(stream: Stream, iterations: int, *, micro_batches: int) -> None:
    """Data parallelism whose layers are normalised across all ranks in each micro-batch, then gradients, on the one
    communicator that there is."""
    for _ in range(iterations):
        first = stream.begin()
        for _ in range(micro_batches):
            stream.wait(0.12)
            for layer in range(8):
                stream.call(0, "AllReduce", MIB // 4 + 4096 * layer)
                stream.wait(0.002)
        for bucket in range(6):
            stream.call(0, "AllReduce", 10 * (bucket + 1) * MIB)
            stream.wait(0.01)
        stream.wait(0.1)
        stream.end(first)


def accumulation(stream: Stream, iterations: int, *, micro_batches: int, gradients_seconds: float = 0.05) -> None:
    """Micro-batches of tensor ranks, each after a silence, then the gradients of replicas on their communicator."""
    for _ in range(iterations):
        first = stream.begin()
        for _ in range(micro_batches):
            stream.wait(0.05)
            for _ in range(8):
                stream.call(0, "AllReduce", 20 * MIB)
                stream.wait(0.002)
                stream.call(0, "AllGather", 10 * MIB)
                stream.wait(0.002)
        stream.call(1, "AllReduce", 700 * MIB)
        stream.wait(gradients_seconds)
        stream.wait(0.1)
        stream.end(first)
