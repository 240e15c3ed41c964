"""`make stack`: a job, agents, Prometheus and Alertmanager on this machine, to look at in a browser.

Hosts are network namespaces with two rails each; the job really moves bytes over them.  Prometheus and Alertmanager
have the configuration that is shipped, but for scrapes every few seconds.  Everything goes away with Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from railscope.testbed.faults import Fault, LinkDown, Stopped
from railscope.testbed.hosts import TestbedError
from railscope.testbed.job import Job, JobOptions
from tests.faults.cluster import AGENT_PORT, ClusterError
from tests.faults.web import WebError
from tests.stack.stack import Pace, Stack
from tests.stack.webhook import Notified

FINE, PROBLEM, COULD_NOT_RUN = 0, 1, 2

_HOUR_SECONDS: Final = 3600.0
_LOOK_SECONDS: Final = 1.0
_STALL, _LINK_DOWN = "stall", "link-down"
_PACE_US: Final = 50_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What breaks, and when; seconds from the job's first call."""

    what: str
    fault: Fault
    begins: float
    ends: float


@dataclass(slots=True)
class Said:
    """The lines on the terminal, each with its time, and what was notified."""

    notified: list[Notified] = field(default_factory=list)

    def line(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)

    def notification(self, alert: Notified) -> None:
        self.notified.append(alert)
        labels = " ".join(f"{name}={value}" for name, value in alert.labels.items() if name != "alertname")
        self.line(f"webhook {alert.receiver}: {alert.status} {alert.name} {labels}")
        if alert.status == "firing":
            print(f"          {alert.annotations['summary']}\n          read {alert.annotations['runbook_url']}")


def _pages(stack: Stack) -> str:
    def graph(expression: str) -> str:
        return f"{stack.prometheus_url}/graph?g0.tab=0&g0.range_input=5m&g0.expr={quote(expression)}"

    first = stack.fabric.hosts[0]
    agent_url = f"http://{first.management_address}:{AGENT_PORT}"
    return f"""
Prometheus    {stack.prometheus_url}
  targets     {stack.prometheus_url}/targets
  alerts      {stack.prometheus_url}/alerts
  calls/s     {graph("sum by (instance, op) (rate(railscope_collective_calls_total[1m]))")}
  rails       {graph("rail:railscope_transmit_bytes:rate1m")}
Alertmanager  {stack.alertmanager_url}

Who is stuck, and why:  .venv/bin/railscope diagnose --prometheus {stack.prometheus_url}
One host, live:         ip netns exec {first.namespace} .venv/bin/railscope top --url {agent_url}
Its stalls:             ip netns exec {first.namespace} curl --silent {agent_url}/stalls
Dashboards:             a Grafana on this machine, with that Prometheus as data source (deploy/grafana)
"""


def _plan(options: argparse.Namespace, stack: Stack, job: Job) -> Plan | None:
    last = len(stack.fabric.hosts) - 1
    times = (options.fault_after, options.fault_after + options.fault_for)
    if options.fault == _STALL:
        return Plan(f"rank {last} on host{last} (pid {job.pids[last]}) is stopped", Stopped(job.pids[last]), *times)
    if options.fault == _LINK_DOWN:
        return Plan(f"rail1 of host{last} is down", LinkDown(stack.fabric, last, 1), *times)
    return None


def _run(options: argparse.Namespace, said: Said) -> None:
    pace = Pace(interval=options.interval)
    # Large batches: ranks wait in collectives and nowhere else, as they do in training.
    load = JobOptions(pattern="ddp", seconds=_HOUR_SECONDS * 24, batch=1_000_000_000, linger=True, pace_us=_PACE_US)
    said.line(f"{options.hosts} hosts with 2 rails and an agent each, Prometheus, Alertmanager …")
    # Every panel has something to show.
    agent = ["--series.peers", "16"]
    running = Stack(options.hosts, pace=pace, agent=agent, told=said.notification)
    with running as stack, Job(stack.fabric.hosts, load) as job:
        print(_pages(stack), flush=True)
        plan = _plan(options, stack, job)
        if plan is not None:
            said.line(f"in {options.fault_after:g} s for {options.fault_for:g} s: {plan.what}")
        said.line("running; Ctrl-C ends everything")
        _watch(stack, job, plan, options.seconds, said)


def _watch(stack: Stack, job: Job, plan: Plan | None, seconds: float | None, said: Said) -> None:
    """Until the time is over, the fault at its time.

    Raises:
        ClusterError, TestbedError: something has ended that should not.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as broken:
        steps = _steps(plan, broken, said)
        while seconds is None or time.monotonic() - began < seconds:
            while steps and time.monotonic() - began >= steps[0][0]:
                steps.pop(0)[1]()
            stack.check()
            for rank in job.results():
                if rank.exit_status is not None:
                    raise TestbedError(f"rank {rank.rank} ended with status {rank.exit_status}: {rank.complaint}")
            time.sleep(_LOOK_SECONDS)


def _steps(plan: Plan | None, broken: contextlib.ExitStack, said: Said) -> list[tuple[float, Callable[[], None]]]:
    if plan is None:
        return []

    def break_it() -> None:
        broken.enter_context(plan.fault)
        said.line(f"broken: {plan.what}")

    def mend() -> None:
        broken.close()
        said.line("mended")

    return [(plan.begins, break_it), (plan.ends, mend)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when all went well, 1 when a fault was not notified, 2 when it cannot run here."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.stack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: make stack STACK='--fault stall'",
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="namespace hosts, 2 to 8 (default: 2)")
    parser.add_argument("--seconds", type=float, metavar="N", help="end after so long (default: at Ctrl-C)")
    parser.add_argument("--interval", default="5s", metavar="5s", help="of scrapes, rules and notifications")
    parser.add_argument(
        "--fault", choices=(_STALL, _LINK_DOWN), help="break the job: a rank is stopped, or a rail loses its link"
    )
    parser.add_argument("--fault-after", type=float, default=30, metavar="N", help="seconds (default: 30)")
    parser.add_argument("--fault-for", type=float, default=90, metavar="N", help="seconds (default: 90)")
    options = parser.parse_args(arguments)
    if not 2 <= options.hosts <= 8:
        parser.error("choose 2 to 8 hosts")
    said = Said()
    try:
        _run(options, said)
    except KeyboardInterrupt:
        said.line("everything is taken down")
    except (ClusterError, TestbedError, WebError) as error:
        print(f"make stack: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    broken_in_time = options.fault and options.seconds is not None and options.seconds > options.fault_after
    if broken_in_time and not said.notified:
        print(f"make stack: {options.fault} was not notified within {options.seconds:g} s", file=sys.stderr)
        return PROBLEM
    return FINE


if __name__ == "__main__":
    sys.exit(main())
