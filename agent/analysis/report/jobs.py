"""Several jobs in one dataset: which there are, the dataset with one of them alone, and that one's report.

GPUs that no communicator connects are of several jobs, or of one that was started again.  In the report of one job
(`report --only`) its GPUs keep the numbers that the report of all jobs gives them, so that the two can be laid side by
side.  The analyses name a GPU by its place among the job's; here places become numbers, in every fact that names one.

The rails' ports count what everybody on their server sends: no counter says whose bytes they were.  Those of servers
that the job does not use are left out; of servers where other jobs have GPUs too, that is said.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ibis
import numpy as np

from railscope.agent.analysis.facts.fact_columns import Pairs
from railscope.agent.analysis.facts.quantities import format_numbers, shorten
from railscope.agent.analysis.facts.report import Report
from railscope.agent.analysis.tables.gpu_rows import is_of_instances
from railscope.agent.analysis.tables.gpus import Gpus, find_gpus, is_unnamed
from railscope.agent.dataset.files import DatasetError
from railscope.agent.dataset.reader import Dataset
from railscope.agent.facts.communicator_names import describe_ambiguity, matches_prefix
from railscope.agent.facts.counted import format_count

_MOST_NAMED: Final = 2
_COMM_LENGTH: Final = 16


@dataclass(frozen=True, slots=True)
class JobPart:
    """GPUs that communicators connect."""

    gpus: tuple[int, ...]
    comms: tuple[str, ...]
    """Names of its communicators, the largest first; of unnamed ones, the analysis's own name."""
    job: str
    """The batch system's or launcher's identifier; empty: not known, or not the same of all."""


def jobs_in(dataset: Dataset, gpus: Gpus) -> tuple[JobPart, ...]:
    """The jobs of a dataset, by their first GPU."""
    jobs_of: defaultdict[str, set[str]] = defaultdict(set)
    for row in dataset.rows(dataset["communicators"].select("comm", "job").distinct()).to_pylist():
        jobs_of[row["comm"] or ""].add(row["job"] or "")
    members: defaultdict[str, set[int]] = defaultdict(set)
    for end, communicator in gpus.communicator_of.items():
        members[communicator.comm].add(gpus.gpu_of[end])
    parts = []
    for group in gpus.connected_groups():
        comms = tuple(one.comm for one in gpus.communicators if members[one.comm] & group)
        named = {job for comm in comms for job in jobs_of[comm]}
        parts.append(JobPart(tuple(sorted(group)), comms, named.pop() if len(named) == 1 else ""))
    return tuple(parts)


def describe_several_jobs(jobs: Sequence[JobPart]) -> str:
    """That figures are of several jobs, and how to see one alone; empty: there is one."""
    if len(jobs) < 2:
        return ""
    named = [_name(job) for job in jobs[:_MOST_NAMED]]
    if len(jobs) > _MOST_NAMED:
        named.append(f"{len(jobs) - _MOST_NAMED} more")
    return (
        f"{len(jobs):,} groups of GPUs share no communicator, several jobs or one restarted, and figures are of all "
        f"of them together: {', '.join(named[:-1])} and {named[-1]}.  'railscope report --only COMM' reports one of "
        "them alone."
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
        meant = [comm for job in jobs for comm in job.comms if not is_unnamed(comm) and matches_prefix(comm, name)]
        chosen = [job for job in jobs if set(job.comms) & set(meant)]
        if len(chosen) > 1:
            raise DatasetError(describe_ambiguity("--only", name, meant))
    if not chosen:
        there = ", ".join(_name(job) for job in jobs[:_MOST_NAMED]) or "none"
        more = f" and {len(jobs) - _MOST_NAMED} more" if len(jobs) > _MOST_NAMED else ""
        raise DatasetError(f"--only {name}: no communicator and no job is called so; there are {there}{more}")
    comms = [comm for job in chosen for comm in job.comms]
    ends = dataset["communicators"]
    wanted = ends["comm"].isin([comm for comm in comms if not is_unnamed(comm)])
    if any(map(is_unnamed, comms)):
        wanted = wanted | ends["comm"].isnull() | (ends["comm"] == "")
    gpus = everyone.select_job({number for job in chosen for number in job.gpus})
    unattributed = [end for end in gpus.gpu_of if end not in gpus.communicator_of]
    ends = ends.filter(wanted | is_of_instances(ends, unattributed) if unattributed else wanted)
    keys = {one: ends.select("recording", one).distinct() for one in ("instance", "pid")}
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
    gpus = f"GPU{'s' if len(job.gpus) > 1 else ''} {format_numbers(job.gpus)}"
    communicator = f"communicator {shorten(comm, _COMM_LENGTH)}" if comm else "communicators without a name"
    return f"job {job.job} ({gpus}, {communicator})" if job.job else f"{gpus} ({communicator})"


def with_numbers(report: Report, gpus: Gpus) -> Report:
    """The report with the GPUs' numbers where it has their places."""
    number = [gpu.number for gpu in gpus.gpus]
    if number == list(range(len(number))):
        return report
    pairs, lookup = report.matrix.pairs, np.array(number, dtype=np.int32)
    composition, regularity = report.composition, report.regularity
    return replace(
        report,
        communicators=tuple(
            replace(
                use,
                gpus=tuple(number[place] for place in use.gpus),
                links=tuple(
                    replace(link, source=_named(link.source, number), destination=_named(link.destination, number))
                    for link in use.links
                ),
            )
            for use in report.communicators
        ),
        matrix=replace(report.matrix, pairs=Pairs(lookup[pairs.source], lookup[pairs.destination], pairs.wire_bytes)),
        composition=replace(composition, ranks=tuple(replace(use, gpu=number[use.gpu]) for use in composition.ranks)),
        regularity=None if regularity is None else replace(regularity, gpu=number[regularity.gpu]),
        receives=tuple(replace(use, gpu=number[use.gpu]) for use in report.receives),
        role_times=tuple(replace(one, gpu=number[one.gpu]) for one in report.role_times),
        waiting=None if report.waiting is None else replace(report.waiting, gpu=number[report.waiting.gpu]),
    )


def describe_selected_job(gpus: Gpus) -> str:
    """That the figures are of one job of several; empty: nothing was left out."""
    if not gpus.others:
        return ""
    own = [gpu.number for gpu in gpus.gpus]
    return (
        f"Of {len(own) + len(gpus.others):,} recorded GPUs only {format_numbers(own)}, which share no communicator "
        "with the "
        "others; their numbers are those of the report of all."
    )


def describe_shared_rails(gpus: Gpus) -> str:
    """What the rails' port bytes are of, where others than the job's GPUs are on its servers; empty: they are not."""
    servers = Counter(gpu.server for gpu in gpus.others)
    shared = sorted({gpu.server for gpu in gpus.gpus} & servers.keys())
    if not shared:
        return ""
    count = sum(servers[server] for server in shared)
    where = shared[0] if len(shared) == 1 else f"{len(shared):,} of its servers"
    return (
        f"The rails' port bytes do not belong to this job alone: {format_count(count, 'GPU')} of other jobs "
        f"{'are' if count != 1 else 'is'} on {where}, and a port counts the traffic of all jobs."
    )


def _named(place: int | None, number: Sequence[int]) -> int | None:
    return None if place is None else number[place]
