"""Which processes with NCCL were there when their host's agent came, and have made no call since.

An agent knows a communicator by the calls that name it.  A rank that hung before the agent came, or before it was
started anew, makes none: nothing tells it from one that computes for long.  Who came after the agent is not meant: what
that is inside of would have been seen.  The store tells them apart: an agent counts a process within seconds, so who
was there first has a series (`process_without_comm`) from the agent's first scrapes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from railscope.agent.cluster.fleet.asker import Asker
from railscope.agent.cluster.fleet.facts import SilentProcess
from railscope.agent.cluster.fleet.prometheus import Sample
from railscope.agent.cluster.fleet.scrapes import Scrapes, match_any
from railscope.agent.facts import catalogue

_WHILE_SECONDS: Final = 30.0
"""A rank that goes on makes a call sooner, as a rule."""
_SCAN_SECONDS: Final = 15.0
"""Within which an agent has found the processes that are there."""
_FIRST_SCRAPES: Final = 2.5
_MOST_HOSTS: Final = 64
"""Each is asked about at another moment."""
_ALONE: Final = "1"

_Process = tuple[str, str]


def read_silent_processes(
    ask: Asker, scrapes: Scrapes, without_comm: Iterable[Sample], inside: Iterable[Sample]
) -> tuple[SilentProcess, ...]:
    """Processes of which nobody can know whether they hang.

    Args:
        ask: the store.
        scrapes: of the hosts.
        without_comm: samples of `process_without_comm`.
        inside: samples of `call_inside_seconds`, whose processes are seen to be in a call.

    Raises:
        PrometheusError: the store does not answer.
    """
    # The start is the host's time, by its own clock.
    ages = {
        agent.address: scrapes.at - (agent.started - (agent.clock_offset_seconds or 0.0))
        for agent in scrapes.agents
        if agent.up and agent.started is not None
    }
    first_seconds = _SCAN_SECONDS + _FIRST_SCRAPES * scrapes.spacing_seconds
    called = {_process(sample) for sample in inside}
    quiet = {
        _process(sample): sample.labels
        for sample in without_comm
        # A job of one rank waits for nobody.
        if _process(sample) not in called and sample.labels.get("world_size") != _ALONE
        if ages.get(sample.labels.get("instance", ""), 0.0) >= max(_WHILE_SECONDS, first_seconds)
    }
    hosts = list(dict.fromkeys(instance for instance, _ in quiet))[:_MOST_HOSTS]
    if not hosts:
        return ()
    metric = catalogue.PROCESS_WITHOUT_COMM
    at_first = " or ".join(
        f"last_over_time({metric.where(match_any('instance', [host]))}[{first_seconds:.0f}s] "
        f"offset {ages[host] - first_seconds:.0f}s)"
        for host in hosts
    )
    there = {_process(sample) for sample in ask(at_first)}
    return tuple(
        SilentProcess(
            host=scrapes.names.get(process[0], process[0]),
            pid=process[1],
            job=labels.get("exported_job", ""),
            world_rank=labels.get("world_rank", ""),
            agent_seconds=ages[process[0]],
        )
        for process, labels in sorted(quiet.items())
        if process in there
    )


def _process(sample: Sample) -> _Process:
    return sample.labels.get("instance", ""), sample.labels.get("pid", "")
