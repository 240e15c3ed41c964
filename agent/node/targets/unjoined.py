"""Which processes were given a rank of their job, and have no communicator.

Where ranks wait inside the call that makes a job's first communicator, NCCL knows the others by nothing but their
absence.  The launcher knows them: it gives every process its rank (agent/node/targets/jobs.py).  So the host of a rank
that did not come can say where it is, and which process.

A job's processes hand their environment on: whatever a rank starts, such as a data loader, was given the same rank.  Of
those the one that began first is told of, and none where one of them has a communicator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from railscope.agent.facts.snapshot import UnjoinedProcess
from railscope.agent.node.targets.processes import ObservedProcess

MOST: Final = 256
"""Shown processes of one user: a host has fewer ranks, and a user who starts more hides his own."""

_Key = tuple[int | None, str, str]
"""User, job and rank."""


def unjoined_processes(
    processes: Iterable[ObservedProcess], with_communicators: Collection[int]
) -> tuple[UnjoinedProcess, ...]:
    """Living processes, one for each rank of a job; `with_communicators`: pids of those that have one."""
    joined: set[_Key] = set()
    first: dict[_Key, ObservedProcess] = {}
    of_user: dict[int | None, int] = {}
    for process in sorted(processes, key=lambda one: one.identity.start_time_ticks):
        if process.ended_ns is not None or not process.job.world_rank:
            continue
        uid = process.tenant.uid
        key = uid, process.job.job, process.job.world_rank
        if process.identity.pid in with_communicators:
            joined.add(key)
        elif key not in first and of_user.get(uid, 0) < MOST:
            first[key] = process
            of_user[uid] = of_user.get(uid, 0) + 1
    return tuple(
        UnjoinedProcess(one.identity.pid, one.job.job, one.job.world_rank, one.job.world_size)
        for key, one in first.items()
        if key not in joined
    )
