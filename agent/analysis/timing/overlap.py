"""The communication ratio of a job, and its non-overlapped ratio: communication while nothing is computed (paper B).

- communication time: the union of the intervals of an iteration's operations on one GPU; several at a time count once.
- communication ratio: communication time / length of the iteration.
- non-overlapped time: communication time minus its intersection with the GPU's kernels that are no communication.
- computing time: the union of these kernels; a GPU that does neither is idle, and that is in none of the three.

The same by kind of parallelism (paper B's figures of time by tensor, pipeline, data and expert parallelism): the union
of the operations of each kind's communicators.  Kinds overlap each other, so that these add up to more than the whole.

All are of one GPU, the one that communicates longest in all.  An iteration begins within the silence before its first
call (`Iteration.from_ns`), and that is where its length counts from.  Calls have no duration: the time in NCCL's
function is that of enqueueing, and is never taken for communication.  Times of NCCL's network threads (`proxy`) hold
only what crosses the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import ibis
import numpy as np

from railscope.agent.analysis.facts.report import Iteration, RoleTime, Unknown
from railscope.agent.analysis.tables.gpu_rows import instances_table, rows_by_gpu, rows_of_gpu
from railscope.agent.analysis.tables.gpus import Gpus
from railscope.agent.analysis.timing.computation import find_computation, find_suspects
from railscope.agent.analysis.timing.iterations import operation_intervals
from railscope.agent.dataset.reader import Dataset
from railscope.agent.rhythm.intervals import Intervals, union

COMMUNICATION, NON_OVERLAPPED = 11, 12
_NO_TIMES: Final = (
    "No operation has times, only calls, and the enqueue time says nothing about the duration: record at level "
    "completion, or import a GPU trace."
)
_NO_ITERATIONS: Final = "No iterations were found to take shares of: see regularity."
NETWORK_ONLY: Final = (
    "The times are those of NCCL's proxy threads: communication inside a server is not included. Import a GPU trace "
    "for all of it."
)
_SUSPECTS: Final = (
    "Kernels that sound like communication and are in no list take part of the time: {}. Import the trace again and "
    "say with --communication-kernel NAME or --compute-kernel NAME what they do."
)


@dataclass(frozen=True, slots=True, eq=False)
class Busiest:
    """The GPU that communicates longest."""

    gpu: int
    computed: Intervals | None
    """When it computed; None: not known."""


class Overlap(NamedTuple):
    """Communication and computation of iterations."""

    iterations: tuple[Iteration, ...]
    """With communication and non-overlapped time, as far as they can be known."""
    unknown: tuple[Unknown, ...]
    busiest: Busiest | None = None
    """None: it is not known how long the iterations communicate."""


def find_overlap(dataset: Dataset, gpus: Gpus, iterations: Sequence[Iteration]) -> Overlap:
    """How long the GPU that communicates longest does so in each iteration, and how much of that beside computation."""
    rows = rows_by_gpu(dataset, "operations", gpus)
    if not rows or not iterations:
        reason = _NO_TIMES if not rows else _NO_ITERATIONS
        return Overlap(tuple(iterations), (Unknown(COMMUNICATION, reason), Unknown(NON_OVERLAPPED, reason)))
    from_ns = np.array([one.from_ns for one in iterations], np.int64)
    to_ns = np.array([one.to_ns for one in iterations], np.int64)
    busiest = _busiest(dataset, gpus, int(from_ns[0]), int(to_ns[-1]))
    if busiest is None:
        busiest = min(rows)
    busy = operation_intervals(dataset, gpus, busiest)
    busy_ns = busy.length_in(from_ns, to_ns)
    unknown = []
    if _sources(dataset) == {"proxy"}:
        unknown.append(Unknown(COMMUNICATION, NETWORK_ONLY))
    length = to_ns - from_ns
    suspects = find_suspects(dataset, gpus, busiest, int(from_ns[0]), int(to_ns[-1]))
    if suspects:
        reason = _SUSPECTS.format(", ".join(suspects))
        return Overlap(tuple(iterations), (Unknown(COMMUNICATION, reason), Unknown(NON_OVERLAPPED, reason)))
    computed = find_computation(dataset, gpus, busiest)
    if isinstance(computed, str):
        unknown.append(Unknown(NON_OVERLAPPED, computed))
        alone: list[int | None] = [None] * len(iterations)
        computing = alone
    else:
        alone = list(busy.difference(computed).length_in(from_ns, to_ns).tolist())
        computing = list(computed.length_in(from_ns, to_ns).tolist())
    found = tuple(
        replace(
            one,
            comm_seconds=spent / 1e9,
            comm_ratio=spent / whole,
            non_overlapped_seconds=None if left is None else left / 1e9,
            non_overlapped_ratio=None if left is None else left / whole,
            compute_seconds=None if used is None else used / 1e9,
        )
        for one, spent, whole, left, used in zip(
            iterations, busy_ns.tolist(), length.tolist(), alone, computing, strict=True
        )
    )
    return Overlap(found, tuple(unknown), Busiest(busiest, None if isinstance(computed, str) else computed))


def find_role_times(dataset: Dataset, gpus: Gpus, overlap: Overlap, roles: Mapping[str, str]) -> tuple[RoleTime, ...]:
    """Communication by kind of parallelism, the longest first; `roles` are those of communicators, by `comm`.

    Empty: of these iterations it is not known how long they communicate.
    """
    iterations, busiest = overlap.iterations, overlap.busiest
    if busiest is None:
        return ()
    from_ns = np.array([one.from_ns for one in iterations], np.int64)
    to_ns = np.array([one.to_ns for one in iterations], np.int64)
    computed = busiest.computed
    whole = int((to_ns - from_ns).sum())
    found = []
    for role, busy in _intervals_by_role(dataset, gpus, busiest.gpu, roles).items():
        spent = int(busy.length_in(from_ns, to_ns).sum())
        alone = None if computed is None else int(busy.difference(computed).length_in(from_ns, to_ns).sum())
        if spent:
            found.append(
                RoleTime(
                    gpu=busiest.gpu,
                    role=role,
                    seconds=spent / len(iterations) / 1e9,
                    ratio=spent / whole,
                    non_overlapped_seconds=None if alone is None else alone / len(iterations) / 1e9,
                    non_overlapped_ratio=None if alone is None else alone / whole,
                )
            )
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.role)))


def _intervals_by_role(dataset: Dataset, gpus: Gpus, number: int, roles: Mapping[str, str]) -> dict[str, Intervals]:
    operations = rows_of_gpu(dataset["operations"], gpus, number)
    operations = operations.filter(operations.begin_ns.notnull() & operations.end_ns.notnull())
    found = dataset.rows(operations.select("recording", "instance", "begin_ns", "end_ns"))
    recording, instance, begin_ns, end_ns = (
        found[name].to_numpy() for name in ("recording", "instance", "begin_ns", "end_ns")
    )
    chosen: dict[str, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}
    for end, gpu in gpus.gpu_of.items():
        communicator = gpus.communicator_of.get(end)
        if gpu == number:
            role = "unknown" if communicator is None else roles.get(communicator.comm, "unknown")
            own = (recording == end[0]) & (instance == end[1])
            chosen[role] = chosen[role] | own if role in chosen else own
    return {role: union(begin_ns[own], end_ns[own]) for role, own in chosen.items()}


def _busiest(dataset: Dataset, gpus: Gpus, from_ns: int, to_ns: int) -> int | None:
    """Which GPU communicates longest in this time; the first of equals; None: none of them.

    One query for all GPUs, as each query reads all operations: what an operation adds to the union of those that began
    before it is what of it lies behind the latest of their ends.
    """
    operations = dataset["operations"]
    timed = operations.join(instances_table(gpus), ["recording", "instance"]).select(
        "gpu",
        since=ibis.greatest(operations.begin_ns, from_ns),
        until=ibis.least(operations.end_ns, to_ns),
        known=operations.begin_ns.notnull() & operations.end_ns.notnull(),
    )
    timed = timed.filter(timed.known & (timed.until > timed.since))
    earlier = ibis.window(group_by="gpu", order_by="since", preceding=(None, 1))
    covered = timed.mutate(covered_ns=timed.until.max().over(earlier).fill_null(from_ns))
    added = covered.mutate(added_ns=ibis.greatest(covered.until - ibis.greatest(covered.since, covered.covered_ns), 0))
    found = dataset.rows(added.group_by("gpu").agg(busy_ns=added.added_ns.sum())).to_pylist()
    return min(found, key=lambda row: (-row["busy_ns"], row["gpu"]))["gpu"] if found else None


def _sources(dataset: Dataset) -> set[str]:
    operations = dataset["operations"]
    return set(dataset.rows(operations.select("source").distinct())["source"].to_pylist())
