"""One agent for an hour beside jobs that come and go: `python -m tests.soak [--seconds N]`.

A round starts jobs in network namespaces of their own, some on a library that all of them share and some on one that
no other job has, while the agent is scraped; then nothing runs until what the jobs left is due to be gone, and what the
agent holds is measured.  Nothing of it may grow from the first third of the rounds to the last one.  Prints a table of
all rests.  Needs root.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.testbed.job import LIBRARY
from tests.fabric.agent_process import AgentProcess
from tests.soak.measurement import Held, grown, held, table

JOB: Final = Path(__file__).with_name("job.py")
CALLS: Final = 2_000
"""Of one job."""
LINGER: Final = "1s"
DETACHED_SECONDS: Final = 15.0
_WITH_LOOPBACK: Final = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")
ALONE: Final = ("unshare", "--net", *_WITH_LOOPBACK)
"""Before a job: a network namespace of its own."""
APART: Final = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", *_WITH_LOOPBACK)
"""Before all of it: other processes of the machine would come and go in the agent's sight."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a run is divided."""

    rounds: int
    busy_seconds: float
    """Of a round; the rest of it nothing runs."""
    rest_seconds: float
    """Longer than probes linger."""

    @classmethod
    def of(cls, seconds: int) -> Pace:
        """Rounds of a minute, and at least seven."""
        rounds = max(7, seconds // 60)
        return cls(rounds, seconds / rounds * 2 / 3, seconds / rounds / 3)


def soak(pace: Pace) -> list[Held]:
    """Run it, and measure at each rest.

    Raises:
        AssertionError: a job failed, or the agent ended.
    """
    rests = []
    with tempfile.TemporaryDirectory(prefix="railscope-soak-") as folder:
        shared = Path(shutil.copy(LIBRARY, Path(folder, "libnccl.so.2")))
        with AgentProcess("--probe.linger", LINGER, log=Path(folder, "log")) as agent:
            links = held(agent).links
            for _ in range(pace.rounds):
                _keep_busy(agent, shared, pace.busy_seconds)
                time.sleep(pace.rest_seconds)
                # On a busy machine probes come off later; those that never do are seen in the table.
                agent.comes_true(lambda: held(agent).links <= links, DETACHED_SECONDS)
                rests.append(held(agent))
    return rests


def _keep_busy(agent: AgentProcess, shared: Path, seconds: float) -> None:
    """Jobs one after the other, on the shared library and on one of their own by turns, and a scrape after each."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _run(shared)
        agent.text()
        own = Path(shutil.copy(LIBRARY, shared.with_name("libnccl-own.so")))
        _run(own)
        agent.text()
        own.unlink()


def _run(library: Path) -> None:
    command = [*ALONE, sys.executable, "-I", str(JOB), str(library), str(CALLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def soak_apart(seconds: int) -> int:
    """Run it where no other process is seen; returns the exit status."""
    command = [*APART, sys.executable, "-m", "tests.soak", "--apart", "--seconds", str(seconds)]
    return subprocess.run(command, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where something grows."""
    parser = argparse.ArgumentParser(prog="make soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=3600, help="how long, about (default %(default)s)")
    parser.add_argument("--apart", action="store_true", help="this process has namespaces of its own already")
    given = parser.parse_args(arguments)
    if not given.apart:
        return soak_apart(given.seconds)
    rests = soak(Pace.of(given.seconds))
    print(table(rests))
    more = grown(rests, given.seconds)
    for name, amount in more.items():
        print(f"{name} grows: {amount:+g} from the first third of the rests to the last one")
    return 1 if more else 0


if __name__ == "__main__":
    raise SystemExit(main())
