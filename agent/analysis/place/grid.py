"""Infers which GPU is which stage, replica and tensor rank from the job's groups.

A pipeline's chain gives the stage, the rank in a tensor group the tensor rank, and what chains and tensor groups hold
together is one replica; replicas are counted in the order of ranks of the groups that reduce their gradients.  The
grid is only given where it agrees with every group that was found.
"""

from __future__ import annotations

from collections.abc import Mapping as Dictionary

import numpy as np

from railscope.agent.analysis.parallelism.groups import DP, TP, Groups
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.model.mapping import Mapping
from railscope.agent.model.shape import ShapeError


def find_mapping(groups: Groups, gpus: Gpus) -> Mapping | None:
    """The GPU at each position of the job's grid of stages, replicas and tensor ranks; None: groups make no grid."""
    shape = groups.parallelism
    if shape is None or shape.pipeline * shape.tensor * shape.data != len(gpus.gpus):
        return None
    everyone = range(len(gpus.gpus))
    chains = groups.pipelines.chains or tuple((gpu,) for gpu in everyone)
    stage = {gpu: place for chain in chains for place, gpu in enumerate(chain)}
    tensor = _tensor_ranks(groups, len(gpus.gpus))
    if set(stage) != set(everyone) or tensor is None:
        return None
    for chain in chains:
        tensor |= dict.fromkeys(chain, tensor[chain[0]])
    replica = _replicas(groups, chains, tensor)
    ranks = np.full((shape.pipeline, shape.data, shape.tensor), -1, dtype=np.int64)
    for gpu in everyone:
        position = stage[gpu], replica[gpu], tensor[gpu]
        if any(index >= size for index, size in zip(position, ranks.shape, strict=True)):
            return None
        ranks[position] = gpu
    try:
        mapping = Mapping(ranks)
    except ShapeError:
        return None
    return mapping if _agrees(mapping, groups) else None


def _tensor_ranks(groups: Groups, count: int) -> dict[int, int] | None:
    shape = groups.parallelism
    if shape is None or shape.tensor == 1:
        return dict.fromkeys(range(count), 0)
    ranks: dict[int, int] = {}
    for one in groups.with_role(TP):
        for rank, gpu in one.communicator.members.items():
            if one.size == shape.tensor:
                ranks.setdefault(gpu, rank)
    return ranks if len(ranks) == count else None


def _replicas(groups: Groups, chains: tuple[tuple[int, ...], ...], tensor: Dictionary[int, int]) -> dict[int, int]:
    """By GPU the number of its replica; GPUs of one replica are those that chains and tensor groups connect."""
    leader = {gpu: gpu for gpu in tensor}

    def leader_of(gpu: int) -> int:
        while leader[gpu] != gpu:
            gpu = leader[gpu]
        return gpu

    shape = groups.parallelism
    size = 1 if shape is None else shape.tensor
    together = [*chains, *(tuple(one.gpus) for one in groups.with_role(TP) if one.size == size)]
    for members in together:
        for gpu in members[1:]:
            first, second = sorted((leader_of(members[0]), leader_of(gpu)))
            leader[second] = first
    order: dict[int, tuple[int, int]] = {}
    for one in groups.with_role(DP):
        if shape is not None and one.size == shape.data:
            for rank, gpu in one.communicator.members.items():
                order[leader_of(gpu)] = min(order.get(leader_of(gpu), (rank, gpu)), (rank, gpu))
    leaders = sorted({leader_of(gpu) for gpu in leader}, key=lambda gpu: (order.get(gpu, (0, gpu)), gpu))
    number = {gpu: place for place, gpu in enumerate(leaders)}
    return {gpu: number[leader_of(gpu)] for gpu in leader}


def _agrees(mapping: Mapping, groups: Groups) -> bool:
    """Whether every tensor group and every group of all replicas is a line of the grid."""
    _, data, tensor = mapping.ranks.shape
    tensor_lines = {frozenset(line) for line in mapping.ranks.reshape(-1, tensor).tolist()}
    data_lines = {frozenset(line) for line in mapping.ranks.transpose(0, 2, 1).reshape(-1, data).tolist()}
    return all(one.gpus in tensor_lines for one in groups.with_role(TP) if one.size == tensor) and all(
        one.gpus in data_lines for one in groups.with_role(DP) if one.size == data
    )
