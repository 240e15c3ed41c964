"""The words on processes that made no call since their agent came: that they hang is not seen, nor that they do not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from railscope.agent.cluster.fleet.facts import SilentProcess
from railscope.agent.cluster.verdict.names import format_hosts
from railscope.agent.cluster.verdict.quantities import format_duration
from railscope.agent.facts.counted import format_count

_MOST_LINES: Final = 4


def describe_silent_processes(silent: Sequence[SilentProcess]) -> str:
    """For a headline: how many, where, since when; empty: there are none."""
    if not silent:
        return ""
    many = format_count(len(silent), "process", "es")
    have, they, hang = ("have", "they", "hang") if len(silent) > 1 else ("has", "it", "hangs")
    hosts = dict.fromkeys(one.host for one in silent)
    came = "the agent" if len(hosts) == 1 else "their agents"
    ages = sorted({format_duration(one.agent_seconds): one.agent_seconds for one in silent}.items(), key=lambda a: a[1])
    ago = f"{ages[0][0]} ago" if len(ages) == 1 else f"{ages[0][0]} to {ages[-1][0]} ago"
    return (
        f"{many} with NCCL on {format_hosts(hosts)} {have} made no call since {came} came {ago}: whether {they} {hang} "
        "cannot be known"
    )


def unknown_of_silent_processes(silent: Iterable[SilentProcess]) -> Iterable[str]:
    """What is not known of each job or host, and how to find out."""
    by_job: defaultdict[tuple[str, str], list[SilentProcess]] = defaultdict(list)
    for one in silent:
        by_job[one.host, one.job].append(one)
    for (host, job), those in list(by_job.items())[:_MOST_LINES]:
        of_job = f" of job {job}" if job else ""
        who = ", ".join(
            f"rank {one.world_rank} with pid {one.pid}" if one.world_rank else f"pid {one.pid}"
            for one in those[:_MOST_LINES]
        )
        more = f" and {len(those) - _MOST_LINES} more" if len(those) > _MOST_LINES else ""
        processes, hang = ("processes", "hang") if len(those) > 1 else ("the process", "hangs")
        yield (
            f"{host}: whether {processes}{of_job} ({who}{more}) {hang}, as what was called before the agent came was "
            f"not seen: `py-spy dump --pid {those[0].pid}` there shows where the program is; of a job that is started "
            "again everything is seen"
        )
    if len(by_job) > _MOST_LINES:
        left = len(by_job) - _MOST_LINES
        yield f"{'1 more host or job has' if left == 1 else f'{left} more hosts and jobs have'} such processes"
