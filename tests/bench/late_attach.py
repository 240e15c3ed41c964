"""How soon an agent that comes late knows every communicator of a job that has long been running.

Nothing of how the communicators came about can be seen any more: each is named when it is used the next time.
"""

from __future__ import annotations

import re
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from railscope.testbed.hosts import Fabric
from railscope.testbed.nccl.build import build
from tests.bench.many_communicators import ManyCommunicators, pause, resume
from tests.bench.results import Bound, Line, figure
from tests.bench.results import Target as Limit
from tests.bench.target import BenchError, Built
from tests.fabric.agent_process import AgentProcess

PART: Final = "late attach"
COMMUNICATORS: Final = 200
_IDENTITY: Final = re.compile(r'^railscope_comm_info\{comm="([0-9a-f]{16})",rank="(\d+)"', re.MULTILINE)
_POLL_SECONDS: Final = 0.02
_PACED_SECONDS: Final = 0.5
"""The job runs for so long before an agent comes."""
_GIVE_UP_SECONDS: Final = 30.0


def measure(_built: Built, rounds: int) -> list[Line]:
    """Start the agent beside the same running job, `rounds` times.

    Raises:
        BenchError: the job does not run, or not every communicator is named within 30 s.
        LibraryMissing, BuildError: the NCCL library or its stand-in for CUDA is not there.
    """
    double = build()
    from_start: list[float] = []
    from_ready: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="railscope-bench-") as directory,
        Fabric(hosts=2, rails=2) as fabric,
        ManyCommunicators(fabric, Path(directory), double, COMMUNICATORS) as job,
    ):
        pids = job.ready()
        for _ in range(rounds):
            resume(pids)
            time.sleep(_PACED_SECONDS)
            started, ready, named = _attach(pids)
            from_start.append(named - started)
            from_ready.append(named - ready)
    name = f"until {COMMUNICATORS} communicators of each of {len(pids)} ranks are named"
    note = "until the last one is in /metrics, asked every 20 ms"
    return [
        figure(PART, f"start {name}", "s", from_start, target=Limit(Bound.AT_MOST, 2), note=note),
        figure(PART, f"ready {name}", "s", from_ready, target=Limit(Bound.AT_MOST, 2)),
    ]


def _attach(pids: tuple[int, ...]) -> tuple[float, float, float]:
    """Seconds of one clock: when the agent was started, when it was ready, when every communicator was named."""
    started = time.monotonic()
    with AgentProcess("--pid", *map(str, pids)) as agent, ExitStack() as stack:
        stack.callback(pause, pids)  # leaving is not measured here
        ready = time.monotonic()
        while True:
            named = identities(agent.text())
            now = time.monotonic()
            if all(len(named.get(rank, ())) == COMMUNICATORS for rank in range(len(pids))):
                return started, ready, now
            if now - started > _GIVE_UP_SECONDS:
                found = {rank: len(communicators) for rank, communicators in sorted(named.items())}
                raise BenchError(f"of {COMMUNICATORS} communicators a rank, so many were named in 30 s: {found}")
            time.sleep(_POLL_SECONDS)


def identities(text: str) -> dict[int, set[str]]:
    """Communicators by rank, of an exposition; those without an identity do not count."""
    named: dict[int, set[str]] = {}
    for communicator, rank in _IDENTITY.findall(text):
        named.setdefault(int(rank), set()).add(communicator)
    return named
