"""What a job loses to the agent: small collectives back to back, the case in which a probe weighs most."""

from __future__ import annotations

from typing import Final

from testbed.hosts import Fabric
from testbed.job import Job, JobOptions
from tests.bench.results import Bound, Line, figure, ratios
from tests.bench.results import Target as Limit
from tests.bench.target import Built
from tests.fabric.agent_process import AgentProcess

PART: Final = "workload"
_OPTIONS: Final = JobOptions(pattern="inference", seconds=3.0, bytes=1024, hold=True)
_WITHOUT, _WITH = "without the agent", "with the agent"


def measure(_built: Built, rounds: int) -> list[Line]:
    """Run the job with and without the agent, `rounds` pairs; every second pair in the other order."""
    rates: dict[str, list[float]] = {_WITHOUT: [], _WITH: []}
    with Fabric(hosts=2, rails=2) as fabric:
        for turn in range(rounds):
            for name in (_WITHOUT, _WITH) if turn % 2 == 0 else (_WITH, _WITHOUT):
                rates[name].append(_observed_rate(fabric) if name == _WITH else _rate(fabric))
    kept = ratios(rates[_WITH], rates[_WITHOUT])
    return [
        *(figure(PART, f"1 KiB calls, {name}", "calls/s", values) for name, values in rates.items()),
        figure(PART, "with / without", "×", kept, target=Limit(Bound.AT_LEAST, 0.97)),
    ]


def _rate(fabric: Fabric) -> float:
    with Job(fabric.hosts, _OPTIONS) as job:
        return _released_rate(job)


def _observed_rate(fabric: Fabric) -> float:
    with AgentProcess() as agent, Job(fabric.hosts, _OPTIONS) as job:
        agent.until(lambda: agent.samples("railscope_processes_observed")[0][1] >= len(job.pids))
        return _released_rate(job)


def _released_rate(job: Job) -> float:
    job.release()
    reports = job.wait(60)
    return sum(report.calls_per_second for report in reports) / len(reports)
