"""Which processes would be the ranks that did not come to the making of a communicator.

Of a communicator that is still being made only the ranks inside the call are known.  A job's first one has all of its
ranks, numbered as the launcher numbers them: where that holds for all ranks inside, the launcher's number names the
process of a rank that is missing, and its host.  Of a job without a name nothing is concluded, as another one may have
the same numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from railscope.agent.cluster.fleet.facts import Rank
from railscope.agent.cluster.fleet.prometheus import Sample
from railscope.agent.cluster.fleet.scrapes import Scrapes
from railscope.agent.facts.host_calls import MAKES_FIRST
from railscope.agent.facts.rank_identity import rank_identity_from_labels

_JOB: Final = "exported_job"
"""The store's own label `job` is that of the scrape."""

_Labels = Mapping[str, str]


def awaited_ranks(
    inside: Iterable[Sample], without_comm: Iterable[Sample], scrapes: Scrapes, known: Iterable[Rank]
) -> list[Rank]:
    """The ranks that are missing and whose processes are there.

    Args:
        inside: samples of `call_inside_seconds`.
        without_comm: samples of `process_without_comm`.
        scrapes: of the hosts.
        known: ranks that are told of already.
    """
    by_process = {(one.labels.get("instance", ""), one.labels.get("pid", "")): one.labels for one in without_comm}
    by_job: defaultdict[tuple[str, str], defaultdict[str, list[_Labels]]] = defaultdict(lambda: defaultdict(list))
    for labels in by_process.values():
        job = labels.get(_JOB, ""), labels.get("world_size", "")
        by_job[job][labels.get("world_rank", "")].append(labels)
    by_comm: defaultdict[str, list[_Labels]] = defaultdict(list)
    for sample in inside:
        if sample.labels.get("call") in MAKES_FIRST:
            by_comm[sample.labels.get("comm", "")].append(sample.labels)
    told = {(rank.comm, rank.rank) for rank in known}
    found = []
    for comm, members in by_comm.items():
        theirs = [by_process.get((one.get("instance", ""), one.get("pid", ""))) for one in members]
        whose = _job_of(members, theirs)
        for number, candidates in by_job[whose].items() if whose is not None else ():
            if len(candidates) == 1 and (comm, number) not in told:
                found.append(_rank(comm, number, candidates[0], scrapes))
    return found


def _job_of(members: Iterable[_Labels], processes: Iterable[_Labels | None]) -> tuple[str, str] | None:
    """Name and size of the job whose ranks these are, number for number; None: they are not, or that is not known."""
    jobs = set()
    for member, process in zip(members, processes, strict=True):
        if process is None or not process.get(_JOB):
            return None
        if (process.get("world_rank"), process.get("world_size")) != (member.get("rank"), member.get("nranks")):
            return None
        jobs.add((process[_JOB], process["world_size"]))
    return jobs.pop() if len(jobs) == 1 else None


def _rank(comm: str, number: str, labels: _Labels, scrapes: Scrapes) -> Rank:
    instance = labels.get("instance", "")
    info = {"nranks": labels["world_size"], "pid": labels.get("pid", "")}
    return Rank(
        identity=rank_identity_from_labels(comm, number, info, (("job", labels[_JOB]), ("world_rank", number))),
        host=scrapes.names.get(instance, instance or "unknown"),
        awaited=True,
        scraped=scrapes.scraped.get(instance),
    )
