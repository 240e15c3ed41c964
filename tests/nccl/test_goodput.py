"""What a job's time went into that is killed and begins again under its batch system's name, on the real NCCL."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from railscope.agent.config.options import Config
from railscope.agent.facts.bound import describe_goodput
from railscope.agent.facts.snapshot import JobSteps
from railscope.agent.node.daemon.daemon import Daemon
from railscope.probes.clock import SystemClock
from railscope.testbed.hosts import Fabric, Host
from railscope.testbed.job import Job, JobOptions
from railscope.testbed.namespaces import NAMESPACES_DIRECTORY
from railscope.testbed.nccl.build import Double
from tests.waiting import eventually, pause

pytestmark = [pytest.mark.root, pytest.mark.fabric, pytest.mark.nccl, pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_SECONDS = 180.0
STEPS = 40
DOWN_SECONDS = 3.0
"""What took less than a second is not told of."""
OPTIONS = JobOptions(
    pattern="ddp",
    seconds=600,
    ranks_per_host=2,
    hold=True,
    pace_us=200_000,
    batch=1 << 20,
    environment={"SLURM_JOB_ID": "4711"},
)


@contextmanager
def agent(host: Host) -> Iterator[Daemon]:
    """An agent that observes the processes of one host, those that come later too."""
    namespace = (NAMESPACES_DIRECTORY / host.namespace).stat().st_ino
    config = Config(
        namespaces=frozenset({namespace}),
        collectors=frozenset({"collective"}),
        recordings_directory=None,
        state_directory=None,
        verdicts_socket=None,
    )
    daemon = Daemon(config, SystemClock(), "0", serve=False)
    loop = threading.Thread(target=daemon.run, name="agent")
    try:
        daemon.start()
        loop.start()
        yield daemon
    finally:
        daemon.stop()
        if loop.ident is not None:
            loop.join()
        daemon.close()


class Observed:
    """The life of the job that runs, as the agent tells of it."""

    def __init__(self, daemon: Daemon) -> None:
        self._observer = daemon.observer

    def begin(self, job: Job) -> float:
        """Let the job go once it is observed; returns when that was (time.monotonic())."""
        eventually(lambda: self._observer.observes(job.pids), PATIENCE_SECONDS)
        job.release()
        return time.monotonic()

    def until(self, condition: Callable[[JobSteps], bool]) -> JobSteps:
        """Wait until something holds of its steps."""
        began = time.monotonic()
        while (job := self._job()) is None or not condition(job):
            assert time.monotonic() < began + PATIENCE_SECONDS, job
            pause(began)
        return job

    def _job(self) -> JobSteps | None:
        """None: its steps are not known yet."""
        seen = self._observer.snapshot().collectives
        living = {one.identity.comm for one in seen.communicators if one.alive}
        return next((one for one in seen.jobs if one.comm in living), None)


def test_a_job_that_is_killed_and_begins_again_shows_what_that_took_of_its_goodput(
    two_hosts: Fabric, double: Double
) -> None:
    host = two_hosts.hosts[0]
    with agent(host) as daemon:
        seen = Observed(daemon)
        launched = time.monotonic()
        with Job([host], OPTIONS, double) as job:
            seen.begin(job)
            before = seen.until(lambda one: one.steps > STEPS)
            for pid in job.pids:
                os.kill(pid, signal.SIGKILL)
            ended = time.monotonic()
        time.sleep(DOWN_SECONDS)
        with Job([host], OPTIONS, double) as job:
            again = seen.begin(job)
            after = seen.until(lambda one: one.steps > STEPS)
            now = time.monotonic()
    spent = after.spent
    lost = again - ended
    assert "restart" not in before.spent
    assert spent["start"] == pytest.approx(before.spent["start"])
    # It ends with the first step, which comes late on a busy machine; the agent looks at processes once a second.
    assert lost - 3 <= spent["restart"] <= now - ended
    assert sum(spent.values()) <= now - launched
    assert sum(spent.values()) >= now - launched - 10, "a job begins with its first call"
    assert spent["steps"] > before.spent["steps"] > 0
    told = describe_goodput(spent, lambda seconds: f"{seconds:.1f} s")
    assert f"{spent['restart']:.1f} s until it began again" in told
