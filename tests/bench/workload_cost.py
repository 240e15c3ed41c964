"""What a job loses to the agent's default: small collectives back to back, the case in which a probe weighs most.

One job runs all the time and agents come and go, as beside the real NCCL (tests/bench/nccl_cost.py): rates are told by
what the job's rails carry, and a rate beside an agent that has come to rest is divided by the mean of the bare rates
before and after it.  Beside it stands a job of three seconds that finds the agent there.  Of this library calls are all
that can be observed: it has none of the functions below them.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Final

from railscope.agent.node.daemon.schedule import CALM_NS
from railscope.testbed.hosts import Fabric
from railscope.testbed.job import LIBRARY, Job, JobOptions
from tests.bench.counted_job import share_cores
from tests.bench.cpu_time import DISTURBED, Others
from tests.bench.nccl_cost import at_rest
from tests.bench.results import Bound, Line, figure, ratios
from tests.bench.results import Target as Limit
from tests.bench.target import Built
from tests.fabric.agent_process import AgentProcess

PART: Final = "workload"
_LONG: Final = JobOptions(pattern="inference", seconds=3600.0, bytes=1024)
_SHORT: Final = JobOptions(pattern="inference", seconds=3.0, bytes=1024, hold=True)
_WITHOUT, _WITH = "without the agent", "with the agent"
_WINDOW_SECONDS: Final = CALM_NS / 1e9
"""What an agent does most seldom is in every one."""
_SETTLE_SECONDS: Final = 0.5


def measure(_built: Built, rounds: int) -> list[Line]:
    """Let an agent come and go beside one job `rounds` times, and run as many pairs of short jobs."""
    with Fabric(hosts=2, rails=2) as fabric:
        return [*_long_job(fabric, rounds), *_short_jobs(fabric, rounds)]


def _long_job(fabric: Fabric, rounds: int) -> list[Line]:
    bare: list[float] = []
    kept: list[float] = []
    others: list[float] = []
    rested: Counter[str] = Counter()
    with Job(fabric.hosts, _LONG) as job:
        time.sleep(_WINDOW_SECONDS)
        share_cores(job.pids)
        before = _rail_rate(job.pids[0])
        for _ in range(rounds):
            with AgentProcess("--pid", *map(str, job.pids)) as agent:
                agent.until(partial(_observes, agent, job))
                rested[at_rest(agent, LIBRARY)] += 1
                beside = _rail_rate(job.pids[0])
            time.sleep(_SETTLE_SECONDS)
            taken = Others(job.pids)
            after = _rail_rate(job.pids[0])
            others.append(taken.percent())
            bare.append(after / 1e6)
            kept.append(beside / ((before + after) / 2))
            before = after
    rests = ", ".join(f"{level} {times}x" for level, times in rested.most_common())
    limit, note = Limit(Bound.AT_LEAST, 0.97), f"the governor came to rest at {rests}"
    return [
        figure(PART, "1 KiB calls, bare: a host's rails", "MB/s", bare),
        figure(PART, "CPU taken by others", "%", others, note=DISTURBED),
        figure(PART, "1 KiB calls, with / without", "×", kept, target=limit, note=note),
    ]


def _observes(agent: AgentProcess, job: Job) -> bool:
    return agent.samples("railscope_processes_observed")[0][1] >= len(job.pids)


def _rail_rate(pid: int) -> float:
    """Bytes per second that leave a process's network namespace, over a while; every call puts as many there."""
    first, began = _sent_bytes(pid), time.monotonic()
    time.sleep(_WINDOW_SECONDS)
    return (_sent_bytes(pid) - first) / (time.monotonic() - began)


def _sent_bytes(pid: int) -> int:
    """Of all devices but the loopback: proc_pid_net(5), the ninth number of /proc/PID/net/dev."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    devices = (line.partition(":") for line in lines)
    return sum(int(numbers.split()[8]) for name, _, numbers in devices if name.strip() != "lo")


def _short_jobs(fabric: Fabric, rounds: int) -> list[Line]:
    rates: dict[str, list[float]] = {_WITHOUT: [], _WITH: []}
    for turn in range(rounds):
        for name in (_WITHOUT, _WITH) if turn % 2 == 0 else (_WITH, _WITHOUT):
            rates[name].append(_observed_rate(fabric) if name == _WITH else _rate(fabric))
    kept = ratios(rates[_WITH], rates[_WITHOUT])
    return [
        *(figure(PART, f"1 KiB calls, a job of 3 s, {name}", "calls/s", values) for name, values in rates.items()),
        figure(PART, "a job of 3 s, with / without", "×", kept),
    ]


def _rate(fabric: Fabric) -> float:
    with Job(fabric.hosts, _SHORT) as job:
        return _released_rate(job)


def _observed_rate(fabric: Fabric) -> float:
    with AgentProcess() as agent, Job(fabric.hosts, _SHORT) as job:
        agent.until(partial(_observes, agent, job))
        return _released_rate(job)


def _released_rate(job: Job) -> float:
    job.release()
    reports = job.wait(60)
    return sum(report.calls_per_second for report in reports) / len(reports)
