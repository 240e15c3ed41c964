"""An agent beside a real job pushes what a scrape shows, and keeps none of its rights in what talks to the network."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job, JobOptions
from tests.fabric.agent_process import AgentProcess
from tests.waiting import eventually

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra 'otlp' is not installed")

from tests.otlp_receiver import Received, receiver

pytestmark = [pytest.mark.root, pytest.mark.fabric]


def pushed_calls(received: Received) -> Counter[str]:
    """Calls by operation in the newest push."""
    calls: Counter[str] = Counter()
    if received.requests:
        for attributes, point in received.points("railscope.collective.calls").items():
            calls[dict(attributes)["railscope.op"]] += int(point.as_int)
    return calls


def rights_of(pid: int) -> set[int]:
    """The capabilities that a process has or may take, without its bounding set, each set as a number."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {int(line.split()[1], 16) for line in lines if line.startswith(("CapInh", "CapPrm", "CapEff", "CapAmb"))}


def senders_of(agent: int) -> list[int]:
    """Processes of an agent that push."""
    pids = [
        int(pid) for task in Path(f"/proc/{agent}/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    return [pid for pid in pids if b"railscope.exporters.otlp.sender" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_what_a_job_called_is_pushed_without_rights(two_hosts: Fabric) -> None:
    with receiver() as received, Job(two_hosts.hosts, JobOptions(iterations=20, hold=True)) as job:
        only = [word for pid in job.pids for word in ("--pid", str(pid))]
        endpoint = received.url.removesuffix("/v1/metrics")
        with AgentProcess(*only, "--otlp.endpoint", endpoint, "--otlp.interval", "1s") as agent:
            agent.until(lambda: agent.samples("railscope_processes_observed")[0][1] == len(job.pids))
            job.release()
            reports = job.wait(60)
            told: Counter[str] = Counter()
            for report in reports:
                told.update({op: count.calls for op, count in report.totals().items()})
            assert sum(told.values()) > 0
            eventually(lambda: pushed_calls(received) == told)
            by_result = {labels["result"]: count for labels, count in agent.samples("railscope_otlp_exports_total")}
            assert by_result["success"] >= 1
            assert by_result["failure"] == by_result["dropped"] == 0
            success = {one["collector"]: value for one, value in agent.samples("railscope_collector_success")}
            assert success["otlp"] == 1
            [sender] = senders_of(agent.process.pid)
            assert rights_of(sender) == {0}
        assert not Path(f"/proc/{sender}").exists()
