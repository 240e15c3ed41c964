"""The agent as a process, killed and started again: what needs no probes, and so no rights.

With probes and jobs: tests/fabric/test_restarts.py.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.fabric.agent_process import AgentProcess
from tests.fabric.continued_totals import Series, fallen, shown

WITHOUT_PROBES = ("--no-collector.collective", "--no-collector.nvlink")


def dark_seconds(agent: AgentProcess) -> float:
    return agent.samples("railscope_agent_dark_seconds_total")[0][1]


def test_the_dark_time_of_killed_and_ended_agents_adds_up_and_no_total_falls(tmp_path: Path) -> None:
    state = tmp_path / "state"
    highest: dict[Series, float] = {}
    dark = []
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        with AgentProcess(*WITHOUT_PROBES, "--state.directory", str(state)) as agent:
            assert not fallen(highest, shown(agent.text()))
            dark.append(dark_seconds(agent))
            assert dark_seconds(agent) == dark[-1]
            os.kill(agent.process.pid, number)
            agent.process.wait(10)
    assert dark[0] == 0.0
    assert dark[0] < dark[1] < dark[2]
    assert sorted(one.name for one in state.iterdir()) == ["lock", "totals"]


def test_a_second_agent_of_one_folder_says_so_and_works_without(tmp_path: Path) -> None:
    state = ("--state.directory", str(tmp_path / "state"))
    with AgentProcess(*WITHOUT_PROBES, *state) as first:
        with AgentProcess(*WITHOUT_PROBES, *state, log=tmp_path / "log") as second:
            assert second.samples("railscope_agent_dark_seconds_total") == []
        assert "another agent keeps its totals there" in (tmp_path / "log").read_text()
        assert dark_seconds(first) == 0.0


def test_without_a_folder_nothing_is_kept_and_no_dark_time_is_claimed() -> None:
    with AgentProcess(*WITHOUT_PROBES) as agent:
        assert agent.samples("railscope_agent_dark_seconds_total") == []
