"""Profile `lean` of a real agent beside real jobs: how many series a node has, and that a stall is told whole."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.job import GptShape, Job, JobOptions
from tests.fabric.agent_process import AgentProcess, metrics_of

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.slow]

RAILS = 8
JOBS = 4
MOST_SERIES = 400
ENDS = 64
"""Of communicators, on the host that is observed."""
OPTIONS = JobOptions(
    pattern="gpt",
    seconds=240,
    hold=True,
    ranks_per_host=4,
    shape=GptShape(2, 2, 2, 4, 64, 32, 500, 2, 2),
    verify=False,
    pace_us=200_000,
)
ALL_DETAIL = ("--series.detail", "all", "--series.peers", "8")
"""Profile lean has none of it."""
TOTALS = {"all", "any", "both", "everything", "none", "nothing", "sum", "total"}
"""What no value of a label may be: it stands for all other values, or for none, and sums count once."""
OF_STALLS = (
    *("railscope_comm_stalled", "railscope_comm_stall_info", "railscope_comm_stall_seconds_total"),
    *("railscope_comm_stall_collectives", "railscope_comm_info", "railscope_comm_enqueued_total"),
)

Series = tuple[str, tuple[tuple[str, str], ...]]


def scrape(agent: AgentProcess, query: str = "") -> dict[Series, float]:
    shown = metrics_of(agent.page(f"/metrics{query}"))
    return {(name, tuple(sorted(labels.items()))): value for name, labels, value in shown}


def named(series: dict[Series, float], *names: str) -> set[Series]:
    return {one for one in series if one[0] in names}


def told(agent: AgentProcess, query: str = "") -> set[Series]:
    """Everything that a scrape has of stalls and of the ranks in them."""
    return named(scrape(agent, query), *OF_STALLS)


@contextmanager
def jobs(fabric: Fabric) -> Iterator[list[Job]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Job(fabric.hosts, OPTIONS)) for _ in range(JOBS)]


def test_a_node_of_eight_rails_and_sixty_four_communicators_has_few_series_and_tells_its_stalls_whole() -> None:
    with Fabric(hosts=2, rails=RAILS) as fabric, jobs(fabric) as running:
        here = [pid for job in running for pid in job.pids[: OPTIONS.ranks_per_host]]
        watched = [word for pid in here for word in ("--pid", str(pid))]
        with AgentProcess(*watched, "--series.profile", "lean", *ALL_DETAIL) as agent:
            agent.until(lambda: agent.samples("railscope_processes_observed") == [({}, float(len(here)))])
            for job in running:
                job.release()
            agent.until(lambda: len(agent.samples("railscope_comm_info")) >= ENDS)
            agent.until(lambda: len(agent.samples("railscope_rail_up")) >= RAILS)
            lean, full = scrape(agent), scrape(agent, "?profile=full")
            print(f"{len(lean)} series of {len(full)}, {len(named(full, 'railscope_comm_info'))} communicator ends")
            assert len(lean) <= MOST_SERIES
            assert len(lean) < len(full) / 2
            assert len(scrape(agent, "?profile=lean")) <= MOST_SERIES
            os.kill(here[0], signal.SIGSTOP)
            try:
                agent.until(lambda: named(scrape(agent), *OF_STALLS[:1]) != set())
                # Ranks may be found between two scrapes.
                agent.until(lambda: told(agent) == told(agent, "?profile=full"))
                shown = scrape(agent, "?profile=full")
                values = {(name, *label) for name, labels in shown for label in labels}
                assert not [one for one in values if one[2] in TOTALS]
            finally:
                os.kill(here[0], signal.SIGCONT)
