"""`railscope top` beside a real agent and a real job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from railscope.testbed.hosts import Fabric
from railscope.testbed.job import Job, JobOptions
from tests.fabric.agent_process import RAILSCOPE, AgentProcess
from tests.unit.pseudo_terminal import PseudoTerminal

pytestmark = [pytest.mark.root, pytest.mark.fabric]


def pairs(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def url_of(agent: AgentProcess) -> str:
    command = agent.process.args
    assert isinstance(command, list)
    return f"http://{command[command.index('--web.listen-address') + 1]}"


@contextmanager
def verdicts_told(path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What `railscope verdicts` has printed so far."""
    out = path.with_suffix(".told")
    with out.open("w") as file:
        command = subprocess.Popen([RAILSCOPE, "verdicts", "--socket", str(path)], stdout=file)
    try:
        yield lambda: [json.loads(line) for line in out.read_text().splitlines()]
    finally:
        command.terminate()
        command.wait()


def test_the_ranks_and_rails_of_a_job_move_and_a_stopped_rank_is_a_red_stall(two_hosts: Fabric, tmp_path: Path) -> None:
    with Job(two_hosts.hosts, JobOptions(pattern="ddp", seconds=100)) as job:
        only = [option for pid in job.pids for option in ("--pid", str(pid))]
        verdicts = tmp_path / "verdicts.sock"
        only += ["--verdicts.socket", str(verdicts), "--stall.stacks", str(RAILSCOPE.with_name("py-spy"))]
        with AgentProcess(*only) as agent, verdicts_told(verdicts) as told:
            agent.until(lambda: len(agent.samples("railscope_comm_enqueued_total")) >= 2)
            comms = {labels["comm"] for labels, _ in agent.samples("railscope_comm_enqueued_total")}
            url = url_of(agent)
            ran = subprocess.run(
                [RAILSCOPE, "top", "--plain", "--url", url, "--interval", "2", "--count", "1"],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert (ran.returncode, ran.stderr) == (0, "")
            found = [pairs(line) for line in ran.stdout.splitlines()]
            ranks = [one for one in found if one["kind"] == "rank"]
            assert {one["comm"] for one in ranks} <= comms
            assert {one["pid"] for one in ranks} == {str(pid) for pid in job.pids}
            assert any(float(one["calls_per_second"]) > 0 for one in ranks)
            rails = [one for one in found if one["kind"] == "rail"]
            assert sum(float(one.get("transmit_bytes_per_second", 0)) > 0 for one in rails) >= 2

            with PseudoTerminal([str(RAILSCOPE), "top", "--url", url, "--interval", "0.5"]) as terminal:
                terminal.shows("no stall", ranks[0]["comm"], "AllReduce")
                stopped = job.pids[0]
                os.kill(stopped, signal.SIGSTOP)
                try:
                    lines = terminal.until(lambda lines: any(line.startswith("STALL") for line in lines), 60)
                    assert "red" in terminal.colour("STALL")
                    agent.until(lambda: "blamed_stack" in agent.page("/stalls"))
                    assert "py-spy finds no Python there" in agent.page("/stalls"), "the ranks are written in C"
                finally:
                    os.kill(stopped, signal.SIGCONT)
                print("\n".join(lines))
                terminal.shows("no stall", "ended")
                terminal.press(b"q")
                assert terminal.ended() == 0
                assert terminal.attributes == terminal.attributes_before
            of_the_stopped = [one for one in told() if one["verdict"]["cause"] == "process_stopped"]
            assert {one["event"] for one in of_the_stopped} >= {"begun", "ended"}
            assert {one["verdict"]["blamed_rank"] for one in of_the_stopped} == {0}
            assert sum(one["lost"] for one in told()) == 0
        assert not verdicts.exists()
