"""Chooses, of each job on this host, the rank whose calls stand for all: its lowest one here.

All ranks of a training job make the same steps.  Processes are of one job if they share a communicator, or if one
tenant's batch system or launcher gave both the same job and step.  A rank that was chosen stays so while it lives.
Where one process runs several GPUs, one of these stands for it.

Jobs are few, and each costs memory: so many in all, and tenants have equal shares of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from railscope.agent.facts.label_numbers import UNKNOWN
from railscope.agent.facts.rank_identity import RankKey
from railscope.agent.node.collectives.communicators import Communicator, format_label
from railscope.agent.node.inspection.tenants import UNKNOWN_TENANT, Tenant
from railscope.agent.node.targets.processes import ObservedProcess
from railscope.probes.shares import in_turns

MOST_JOBS: Final = 64


@dataclass(frozen=True, slots=True)
class Reference:
    """The rank of a process whose calls stand for its job."""

    pid: int
    tenant: Tenant
    rank: RankKey
    """Its name in its largest communicator; of equal ones, in the first."""
    instances: frozenset[int]
    """Its ends of communicators."""
    peers: frozenset[int]
    """Processes of the job on this host, itself included."""


def find_references(
    communicators: Iterable[Communicator], processes: Mapping[int, ObservedProcess], kept: Collection[int]
) -> list[Reference]:
    """One for each job, fairly among tenants where there are too many.

    Args:
        communicators: the ends of this host that have not ended.
        processes: by pid.
        kept: pids that were chosen before.
    """
    own: defaultdict[int, list[Communicator]] = defaultdict(list)
    for one in communicators:
        own[one.tgid].append(one)
    chosen = set(kept)
    jobs: defaultdict[Tenant, list[Reference]] = defaultdict(list)
    for pids in _jobs(own, processes):
        pid = min(pids, key=lambda pid: (pid not in chosen, _lowest(own[pid]), pid))
        reference = _reference(pid, own[pid], processes.get(pid), frozenset(pids))
        if reference is not None:
            jobs[reference.tenant].append(reference)
    for of_tenant in jobs.values():
        of_tenant.sort(key=lambda one: (one.pid not in chosen, one.pid))
    by_tenant = [one for tenant in sorted(jobs, key=lambda tenant: tenant.label) for one in jobs[tenant]]
    return in_turns(by_tenant, lambda one: one.tenant)[:MOST_JOBS]


def _jobs(
    own: Mapping[int, Iterable[Communicator]], processes: Mapping[int, ObservedProcess]
) -> Iterable[Collection[int]]:
    """The processes of each job."""
    leader = {pid: pid for pid in own}

    def leader_of(pid: int) -> int:
        while leader[pid] != pid:
            leader[pid] = pid = leader[leader[pid]]
        return pid

    first: dict[object, int] = {}
    for pid, ends in own.items():
        process = processes.get(pid)
        tenant = process.tenant if process is not None else UNKNOWN_TENANT
        marks: list[object] = [(tenant, one.name) for one in ends if one.name != UNKNOWN]
        if process is not None and process.job.job:
            marks.append((tenant, process.job.job, process.job.step))
        for mark in marks:
            leader[leader_of(pid)] = leader_of(first.setdefault(mark, pid))
    found: defaultdict[int, list[int]] = defaultdict(list)
    for pid in own:
        found[leader_of(pid)].append(pid)
    return found.values()


def _lowest(ends: Iterable[Communicator]) -> int:
    """The rank of a process in its largest communicator."""
    largest = _largest(ends)
    return largest.rank if largest is not None and largest.rank is not None else 1 << 31


def _largest(ends: Iterable[Communicator]) -> Communicator | None:
    named = (one for one in ends if one.name != UNKNOWN and one.rank is not None)
    return max(named, key=lambda one: (one.nranks or 0, -one.first_ns, -one.instance), default=None)


def _reference(
    pid: int, ends: Collection[Communicator], process: ObservedProcess | None, peers: frozenset[int]
) -> Reference | None:
    largest = _largest(ends)
    if largest is None:
        return None
    on_gpu = frozenset(one.instance for one in ends if one.cuda_dev in (None, largest.cuda_dev))
    tenant = process.tenant if process is not None else UNKNOWN_TENANT
    return Reference(pid, tenant, (largest.name, format_label(largest.rank)), on_gpu, peers)
