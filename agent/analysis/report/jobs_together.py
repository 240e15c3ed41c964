"""Several jobs in one dataset: which there are, and the dataset with one of them alone.

GPUs that no communicator connects are of several jobs, or of one that was started again.  What the rails' ports counted
belongs to all of them together: no counter says whose bytes they were (`one_of_several`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ibis

from railscope.agent.analysis.facts.quantities import numbers, shortened
from railscope.agent.analysis.tables.gpus import Gpus, find_gpus, is_unnamed
from railscope.agent.dataset.files import DatasetError
from railscope.agent.dataset.reader import Dataset
from railscope.agent.facts.communicator_names import begins_so, several_fit

_MOST_NAMED: Final = 2
_COMM_LENGTH: Final = 16


@dataclass(frozen=True, slots=True)
class JobPart:
    """GPUs that communicators connect."""

    gpus: tuple[int, ...]
    comms: tuple[str, ...]
    """Names of its communicators, the largest first; of what nobody named, what the analysis calls it."""
    job: str
    """The batch system's or launcher's identifier; empty: not known, or not the same of all."""


def jobs_in(dataset: Dataset, gpus: Gpus) -> tuple[JobPart, ...]:
    """The jobs of a dataset, by their first GPU."""
    jobs_of: defaultdict[str, set[str]] = defaultdict(set)
    for row in dataset.rows(dataset["communicators"].select("comm", "job").distinct()).to_pylist():
        jobs_of[row["comm"] or ""].add(row["job"] or "")
    members: defaultdict[str, set[int]] = defaultdict(set)
    for end, number in gpus.gpu_of.items():
        members[gpus.communicator_of[end].comm].add(number)
    parts = []
    for group in gpus.connected_groups():
        comms = tuple(one.comm for one in gpus.communicators if members[one.comm] & group)
        named = {job for comm in comms for job in jobs_of[comm]}
        parts.append(JobPart(tuple(sorted(group)), comms, named.pop() if len(named) == 1 else ""))
    return tuple(parts)


def said_of_several(jobs: Sequence[JobPart]) -> str:
    """That figures are of several jobs, and how to see one alone; empty: there is one."""
    if len(jobs) < 2:
        return ""
    named = [_name(job) for job in jobs[:_MOST_NAMED]]
    if len(jobs) > _MOST_NAMED:
        named.append(f"{len(jobs) - _MOST_NAMED} more")
    return (
        f"{len(jobs):,} groups of GPUs share no communicator, several jobs or one restarted, and figures are of all of "
        f"them together: {', '.join(named[:-1])} and {named[-1]}.  'railscope report --only COMM' tells of one alone."
    )


def only_job(dataset: Dataset, name: str) -> tuple[Dataset, Gpus]:
    """The dataset without other jobs than the one that has a communicator, or an identifier, of this name; its GPUs.

    How a communicator's name begins is enough where no other job has one that begins so.

    Raises:
        DatasetError: nothing is called so, or communicators of several jobs begin so.
    """
    everyone = find_gpus(dataset)
    jobs = jobs_in(dataset, everyone)
    chosen = [job for job in jobs if name == job.job or name in job.comms]
    if not chosen:
        meant = [comm for job in jobs for comm in job.comms if not is_unnamed(comm) and begins_so(comm, name)]
        chosen = [job for job in jobs if set(job.comms) & set(meant)]
        if len(chosen) > 1:
            raise DatasetError(several_fit("--only", name, meant))
    if not chosen:
        there = ", ".join(_name(job) for job in jobs[:_MOST_NAMED]) or "none"
        more = f" and {len(jobs) - _MOST_NAMED} more" if len(jobs) > _MOST_NAMED else ""
        raise DatasetError(f"--only {name}: no communicator and no job is called so; there are {there}{more}")
    comms = [comm for job in chosen for comm in job.comms]
    ends = dataset["communicators"]
    wanted = ends["comm"].isin([comm for comm in comms if not is_unnamed(comm)])
    if any(map(is_unnamed, comms)):
        wanted = wanted | ends["comm"].isnull() | (ends["comm"] == "")
    ends = ends.filter(wanted)
    keys = {one: ends.select("recording", one).distinct() for one in ("instance", "pid")}
    gpus = everyone.of_one_job({number for job in chosen for number in job.gpus})
    rails = _rails_of(dataset, {gpu.server for gpu in gpus.gpus})
    nodes = ends.select("node").distinct()

    def own(table: Any) -> Any:
        if "rail_id" in table.columns:
            return table.semi_join(rails, ["recording", "rail_id"]).select(*table.columns)
        key = next((one for one in keys if one in table.columns), None)
        if key is not None:
            # A selection is a table like any other; what a join gives is taken for a part of the next one.
            return table.semi_join(keys[key], ["recording", key]).select(*table.columns)
        if "comm" in table.columns:
            return table.filter(table["comm"].isin(comms))
        return table.semi_join(nodes, "node").select(*table.columns)

    return replace(dataset, tables={table: own(rows) for table, rows in dataset.tables.items()}), gpus


def _rails_of(dataset: Dataset, servers: set[str]) -> Any:
    """`recording` and `rail_id` of the rails that these servers may use: a host's are everybody's on it."""
    rails = dataset["rails"]
    server = ibis.cases((_of_host(rails), rails["node"]), else_=rails["node"] + "/" + rails["netns"])
    nodes = {server.partition("/")[0] for server in servers}
    whole = [server for server in servers if "/" not in server]
    wanted = server.isin(sorted(servers)) | rails["node"].isin(whole) | (_of_host(rails) & rails["node"].isin(nodes))
    return rails.filter(wanted).select("recording", "rail_id").distinct()


def _of_host(rails: Any) -> Any:
    return rails["netns"].isnull() | (rails["netns"] == "")


def _name(job: JobPart) -> str:
    """`job 4711 (GPUs 0–7, communicator 00c0ffee00c0ffee)`."""
    comm = next((one for one in job.comms if not is_unnamed(one)), "")
    gpus = f"GPU{'s' if len(job.gpus) > 1 else ''} {numbers(job.gpus)}"
    communicator = f"communicator {shortened(comm, _COMM_LENGTH)}" if comm else "communicators without a name"
    return f"job {job.job} ({gpus}, {communicator})" if job.job else f"{gpus} ({communicator})"
