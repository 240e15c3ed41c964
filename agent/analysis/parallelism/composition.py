"""Splits a job's communication into tensor, pipeline, data and expert parallelism and embedding synchronisation.

The measurement composition, paper B's table 3.  Each communicator is of one kind (`groups` says how that shows), and
all its calls count for it.  Calls are NCCL calls as they were recorded, over the whole recording: divide by its
iterations for the table's figures.  Payload is that of `calls` (count × size of the data type, with NCCL's meaning of
count); a Recv is a call, and its bytes count where they are sent, so that 8 Sends and 8 Receives of 125 MiB are 16
calls and 1,000 MiB.

A rank takes part in a kind if it made a call for it; embeddings, for instance, are synchronised by the first and the
last stage only, and the average is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from railscope.agent.analysis.facts.report import Composition, RankUse, Role, Unknown
from railscope.agent.analysis.parallelism.groups import ROLES, UNKNOWN, Groups, find_groups
from railscope.agent.analysis.tables.calls import CountedCalls, count_calls
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.analysis.tables.grouping import sum_by_group
from railscope.agent.dataset.reader import Dataset
from railscope.agent.facts.counted import format_count

_ROW = 7


def find_composition(
    dataset: Dataset, gpus: Gpus, counted: CountedCalls | None = None
) -> tuple[Composition, dict[str, str], tuple[Unknown, ...]]:
    """What the job's communication is made of, and the role of each communicator by its `comm`.

    `counted` are the dataset's calls, if they are already counted.
    """
    counted = count_calls(dataset) if counted is None else counted
    groups = find_groups(counted, gpus)
    return composition_of(counted, gpus, groups), dict(groups.roles), tuple(_unknown(counted, groups))


def composition_of(counted: CountedCalls, gpus: Gpus, groups: Groups) -> Composition:
    """The figures of each parallelism role: calls, payload and their parts of the job's communication."""
    ranks = _rank_uses(counted, gpus, groups)
    rows = []
    for role in ROLES:
        own = [use for use in ranks if use.role == role]
        if not own:
            continue
        calls, sent = sum(use.calls for use in own), sum(use.payload_bytes for use in own if use.op != "Recv")
        takers = len({use.gpu for use in own})
        communicators = sum(found == role for found in groups.roles.values())
        unsized = sum(use.unsized_calls for use in own)
        rows.append(Role(role, communicators, calls, sent, calls / takers, sent / takers, unsized))
    return Composition(tuple(rows), groups.parallelism, ranks)


def _rank_uses(counted: CountedCalls, gpus: Gpus, groups: Groups) -> tuple[RankUse, ...]:
    numbers = {role: number for number, role in enumerate(ROLES)}
    gpu_of_end, role_of_end = [], []
    for end in counted.ends:
        communicator = gpus.communicator_of.get(end)
        name = UNKNOWN if communicator is None else groups.roles.get(communicator.comm, UNKNOWN)
        gpu_of_end.append(gpus.gpu_of.get(end, -1))
        role_of_end.append(numbers[name])
    kinds = counted.kinds
    gpu = np.array(gpu_of_end, dtype=np.int64)[kinds.end]
    role = np.array(role_of_end, dtype=np.int64)[kinds.end]
    known = gpu >= 0
    keys, sums = sum_by_group(
        (gpu[known], role[known], kinds.op[known]),
        *(column[known] for column in (kinds.calls, kinds.moved_bytes, kinds.unsized_calls)),
    )
    return tuple(
        RankUse(own_gpu, ROLES[own_role], counted.op_names[op], *numbers)
        for own_gpu, own_role, op, *numbers in zip(*(column.tolist() for column in (*keys, *sums)), strict=True)
    )


def _unknown(counted: CountedCalls, groups: Groups) -> Iterable[Unknown]:
    shape = groups.parallelism
    if not len(counted):
        yield Unknown(_ROW, "No call was recorded: record while the job runs.")
    elif shape is None:
        yield Unknown(
            _ROW,
            "No communicator shows a kind of parallelism, so the job's shape is unknown: record a whole iteration on "
            "all nodes.",
        )
    elif not shape.certain:
        yield Unknown(
            _ROW,
            f"The job's shape is a guess ({shape.reason}): record several whole iterations on all nodes, or import "
            "data that names the groups.",
        )
    silent = [one for one in groups.evidence if groups.roles[one.comm] == UNKNOWN and one.ops]
    if silent and shape is not None:
        yield Unknown(
            _ROW,
            f"{format_count(len(silent), 'communicator')}, the largest of {format_count(silent[0].size, 'rank')}, "
            f"{'matches' if len(silent) == 1 else 'match'} no known kind of parallelism: see the operations in the "
            "table of communicators.",
        )
